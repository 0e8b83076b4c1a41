"""Plain transformers with moegraft: `quantization_config`, saved folders and `experts_implementation`."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import HfApi
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import with_long
from support.autoload import write_autoload
from support.families import model_class, prompt, save_checkpoint, served_cases, tiny_model
from support.family_rows import FamilyCase
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel, pipeline
from transformers.distributed import DistributedConfig

from moegraft.injection import MoegraftConfig, build_meta_model, optimize_and_load, read_rules
from moegraft.injection.demo import demo_path
from moegraft.injection.lora import lora_config
from moegraft.injection.meta_model import find_model
from moegraft.injection.verify import verify
from moegraft.operators.errors import CheckpointError, RuleFileError, UnsupportedModelError
from moegraft.operators.registry import load_registry
from moegraft.rules import shipped_rules

IDS = torch.tensor([[5, 17, 33, 90, 3, 8, 61]])
# Storage forms, a hybrid, shared experts; laguna's keys and qwen3_vl_moe's parameters are looked up again after operators are in place.
SHORT = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "granitemoehybrid", "laguna", "qwen3_vl_moe")


def load(folder: Path, rules: Any = None, **options: Any) -> PreTrainedModel:
    given = {} if rules is None else {"quantization_config": MoegraftConfig(rules=rules, threads=1)}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **given, **options)
    return model


def reference(folder: Path, rules: Any = None, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = optimize_and_load(folder, rules, progress=False, threads=1, **options)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids).logits
    return found


def tokens(model: PreTrainedModel) -> list[int]:
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    found: list[int] = generate(IDS, max_new_tokens=16, do_sample=False)[0].tolist()
    return found


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_model("qwen3_moe").save_pretrained(path)
    return path


@pytest.mark.parametrize("rules", sorted(shipped_rules()))
def test_every_shipped_file_gives_the_logits_of_optimize_and_load(rules: str) -> None:
    found, expected = load(demo_path(), rules), reference(demo_path(), rules)
    assert found.moegraft.placement() == expected.moegraft.placement()  # before texts, whose drafts it counts
    assert torch.equal(logits(found), logits(expected))
    assert tokens(found) == tokens(expected)
    assert type(found).__name__ == type(expected).__name__


def families() -> list[Any]:
    marks = {True: (), False: (pytest.mark.long,)}
    return [pytest.param(case, id=case.model_type, marks=marks[case.model_type in SHORT]) for case in served_cases() if case.generates]


@pytest.mark.parametrize("case", families())
@pytest.mark.parametrize("shards", [1, 3])
def test_every_family_loads_as_by_optimize_and_load(
    shards: int, case: FamilyCase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(case, tmp_path, shards=shards)
    config = MoegraftConfig(rules="cpu-exact", threads=1)
    found, info = model_class(case).from_pretrained(tmp_path, quantization_config=config, output_loading_info=True)
    assert not any(info.values()), info
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and record.name.startswith("transformers")]
    assert torch.equal(logits(found, prompt(9, batch=2)), logits(reference(tmp_path, "cpu-exact"), prompt(9, batch=2)))
    assert found.moegraft.replacing


@pytest.mark.parametrize(
    "options",
    [{"dtype": torch.float64}, {"dtype": "bfloat16"}, {"device_map": "cpu"}, {"device_map": "auto"}, {"attn_implementation": "eager"}],
    ids=["float64", "bfloat16", "device_map", "device_map-auto", "attention"],
)
def test_options_of_from_pretrained_mean_what_they_do_elsewhere(folder: Path, options: dict[str, Any]) -> None:
    found, expected = load(folder, "cpu-exact", **options), reference(folder, "cpu-exact", **options)
    assert found.dtype == expected.dtype and found.config._attn_implementation == expected.config._attn_implementation
    assert torch.equal(logits(found), logits(expected))


@pytest.mark.parametrize(
    "options", [{"device_map": {"": "disk"}}, {"device_map": "auto", "max_memory": {"cpu": "1KiB"}}], ids=["by hand", "by transformers"]
)
def test_packed_experts_are_not_placed_on_a_disk(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"device_map: model\.layers\.\d\.mlp\.experts would be on the disk, .* 'memory'"):
        load(folder, "cpu-exact", offload_folder=str(tmp_path), **options)


def test_what_is_not_replaced_may_be_on_a_disk(folder: Path, tmp_path: Path) -> None:
    places = {"model.embed_tokens": "disk", "lm_head": "disk", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    found = load(folder, "cpu-exact", offload_folder=str(tmp_path), device_map=places)
    assert torch.equal(logits(found), logits(reference(folder, "cpu-exact")))


def test_a_model_without_its_head(folder: Path) -> None:
    """transformers reports nothing that the operators read as unexpected."""
    config = MoegraftConfig(rules="cpu", threads=1)
    model, info = AutoModel.from_pretrained(folder, quantization_config=config, output_loading_info=True)
    stock, expected = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert info == expected
    assert torch.equal(model(IDS)[0], optimize_and_load(stock, "cpu", progress=False, threads=1)(IDS)[0])


def test_a_head_for_another_task_is_new(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in stock transformers; it is trained beside adapters, and saved with them, as the checkpoint's weights are not."""
    peft = pytest.importorskip("peft", reason="an extra: pip install 'moegraft[train]'")

    def classifier(**given: Any) -> Any:
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0, **given)

    stock, model = classifier(), classifier(quantization_config=MoegraftConfig(rules="cpu-exact", threads=1))
    assert "score.weight are new" in caplog.text
    assert model.score.weight.std() > 0 and model.moegraft.replacing
    model.load_state_dict(dict(model.state_dict(), **{"score.weight": stock.score.weight}))
    assert torch.allclose(logits(model), logits(stock), rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"score\.weight are not in its checkpoint"):
        model.save_pretrained(tmp_path / "whole")
    adapted = peft.get_peft_model(model, lora_config(model, target_modules=["q_proj"], task_type="SEQ_CLS"))
    adapted.train()(IDS, labels=torch.tensor([1])).loss.backward()
    torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], 0.1).step()
    adapted.eval().save_pretrained(tmp_path / "adapter")
    again = classifier(quantization_config=MoegraftConfig(rules="cpu-exact", threads=1))
    assert torch.equal(logits(peft.PeftModel.from_pretrained(again, tmp_path / "adapter")), logits(adapted))


def test_weights_of_the_checkpoints_own_class_are_not_new(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"feeds lm_head\.weight"):
        load(tmp_path, "cpu-exact")


def test_a_pipeline_answers(folder: Path) -> None:
    config = MoegraftConfig(rules="cpu", threads=1)
    found = pipeline("text-generation", model=str(demo_path()), model_kwargs={"quantization_config": config})
    expected = pipeline("text-generation", model=reference(demo_path(), "cpu"), tokenizer=found.tokenizer)
    asked = {"max_new_tokens": 8, "do_sample": False}
    assert found("ROMEO:", **asked) == expected("ROMEO:", **asked)
    assert found.model.moegraft.replacing


@pytest.mark.parametrize("rules", sorted(shipped_rules()))
def test_rules_survive_as_a_mapping(rules: str) -> None:
    read = read_rules(rules, registry=load_registry())
    mapping = json.loads(json.dumps(read.to_mapping()))
    again = read_rules(mapping, registry=load_registry())
    assert again.to_mapping() == mapping
    assert [(rule.id, rule.match, rule.operator, rule.options, rule.recursive, rule.expect) for rule in again.rules] == [
        (rule.id, rule.match, rule.operator, rule.options, rule.recursive, rule.expect) for rule in read.rules
    ]


def test_all_that_a_rule_may_have_survives_as_a_mapping() -> None:
    given = {
        "version": 1,
        "requires": {"model_type": ["mixtral", "qwen3_moe"]},
        "parallel": {"shares": [2.0, 1.0]},
        "rules": [
            {"id": "a", "match": {"kind": "experts", "layers": "1-3,5", "name": r"mlp\.experts$"}, "replace": {"class": "default"}},
            {
                "match": {"class": "Linear", "name": "été"},
                "replace": {"class": "quantized_linear", "kwargs": {"weights": "int4", "gpu": "none"}},
                "recursive": False,
                "expect": "any",
            },
        ],
    }
    assert read_rules(given, registry=load_registry()).to_mapping() == given


@pytest.mark.parametrize("loader", [load, reference], ids=["from_pretrained", "optimize_and_load"])
@pytest.mark.parametrize("shards", ["5GB", "40KB"], ids=["one-file", "shards"])
def test_a_saved_folder_gives_equal_logits(loader: Callable[..., PreTrainedModel], shards: str, tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "stock", max_shard_size=shards)
    model = load(tmp_path / "stock", "cpu")
    model.save_pretrained(tmp_path / "saved")
    again = loader(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
    assert again.moegraft.placement() == model.moegraft.placement()
    assert sum(file.lstat().st_size for file in (tmp_path / "saved").iterdir()) < 100_000  # of weights there are links
    again.save_pretrained(tmp_path / "once more")
    assert torch.equal(logits(loader(tmp_path / "once more")), logits(model))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by", ["an optimiser", "a merge"])
def test_what_was_trained_is_not_dropped_where_a_model_is_saved(by: str, packed: bool, folder: Path, tmp_path: Path) -> None:
    """The weights of the checkpoint are saved, and not those of the model. PEFT merges through `.data`, which PyTorch does not count."""
    model = load(folder, "cpu")
    model.to(torch.bfloat16).to(torch.float32).train()(input_ids=IDS, labels=IDS).loss.backward()
    model.save_pretrained(tmp_path / "untrained", packed=packed)
    if by == "a merge":
        model.model.embed_tokens.weight.data += 0.01
    else:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(UnsupportedModelError, match=r"parameters \(model\.embed_tokens\.weight, \.\.\.\) were written to"):
        model.save_pretrained(tmp_path / "trained", packed=packed)
    assert not (tmp_path / "trained").exists()


def test_other_rules_can_be_given_for_a_saved_folder(folder: Path, tmp_path: Path) -> None:
    load(folder, "cpu").save_pretrained(tmp_path)
    assert torch.equal(logits(reference(tmp_path, "cpu-exact")), logits(reference(folder, "cpu-exact")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load(tmp_path, "cpu-exact")
    assert torch.equal(logits(found), logits(reference(folder, "cpu")))
    assert any("from the model will be used" in str(each.message) for each in caught)


def test_thresholds_and_layers_for_drafts_belong_to_a_saved_folder(tmp_path: Path) -> None:
    model = reference(demo_path(), "sparse")
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("layers for multi-token prediction need transformers 5.23")
    drafting = reference(tmp_path, "speculative", vars={"draft": "mtp"})
    assert tokens(drafting) == tokens(reference(demo_path(), "speculative", vars={"draft": "mtp"}))


def test_a_stock_model_saved_over_a_saved_folder_leaves_the_stock_weights(tmp_path: Path) -> None:
    stock = tiny_model("qwen3_moe")
    stock.save_pretrained(tmp_path / "stock")
    before = (tmp_path / "stock" / "model.safetensors").read_bytes()
    load(tmp_path / "stock", "cpu").save_pretrained(tmp_path / "saved")
    other = tiny_model("qwen3_moe", seed=1)
    other.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "stock" / "model.safetensors").read_bytes() == before
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(other))


@pytest.mark.parametrize("files", ["links", "files"])
def test_a_folder_saved_over_itself_keeps_its_weights(files: str, folder: Path, tmp_path: Path) -> None:
    """`files`: as a clone of a pushed repository has them."""
    load(folder, "cpu").save_pretrained(tmp_path / "links")
    shutil.copytree(tmp_path / "links", tmp_path / "files")
    model = load(tmp_path / files)
    model.save_pretrained(tmp_path / files)
    assert torch.equal(logits(load(tmp_path / files)), logits(model))


def test_links_to_other_weights_are_replaced_and_files_are_not(folder: Path, tmp_path: Path) -> None:
    load(folder, "cpu").save_pretrained(tmp_path / "links")
    shutil.copytree(tmp_path / "links", tmp_path / "files")
    tiny_model("qwen3_moe", seed=1).save_pretrained(tmp_path / "other")
    other = load(tmp_path / "other", "cpu")
    other.save_pretrained(tmp_path / "links")
    assert torch.equal(logits(load(tmp_path / "links")), logits(other))
    before = (tmp_path / "files" / "stock-model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"stock-model\.safetensors is in this folder already"):
        other.save_pretrained(tmp_path / "files")
    assert (tmp_path / "files" / "stock-model.safetensors").read_bytes() == before


def test_a_card_names_a_base_model_of_the_hub(folder: Path, tmp_path: Path) -> None:
    model = load(folder, "cpu")
    model.config.name_or_path = "owner/some-model"
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "base_model: owner/some-model" in card and "hybrid_experts" in card
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_card_states_what_verify_has_found(folder: Path, tmp_path: Path) -> None:
    model = load(folder, "cpu")
    model.save_pretrained(tmp_path / "before")
    found = verify(model, find_model(folder), torch.arange(3, 30)).logits
    model.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "README.md").read_text() for name in ("before", "after"))
    assert "KL" not in before
    assert f"over {found.positions} positions of a text: KL divergence {found.kl_nats:.4f} nats" in after
    assert f"perplexity {found.injected_perplexity:.3f} (stock {found.stock_perplexity:.3f})" in after


@pytest.mark.parametrize("has_card", [False, True])
def test_a_push_uploads_the_weights_that_the_links_lead_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_card: bool
) -> None:
    """The hub is a folder here: what the client would send is copied."""
    calls: dict[str, Any] = {}

    def upload(self: object, *, folder_path: str, ignore_patterns: list[str], **more: Any) -> str:
        calls.update(more)
        shutil.copytree(folder_path, tmp_path / "hub", ignore=shutil.ignore_patterns(*ignore_patterns))
        return "https://example.org/commit"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **more: SimpleNamespace(repo_id=f"me/{repo_id}"))
    monkeypatch.setattr(HfApi, "file_exists", lambda self, repo_id, filename: has_card)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    model = load(folder, "cpu")
    model.save_pretrained(tmp_path / "mine", push_to_hub=True, commit_message="First", private=True)
    assert calls == {"repo_id": "me/mine", "commit_message": "First"}
    assert not any(file.is_symlink() for file in (tmp_path / "hub").iterdir())
    assert (tmp_path / "hub" / "README.md").exists() != has_card
    assert torch.equal(logits(load(tmp_path / "hub")), logits(model))
    shutil.rmtree(tmp_path / "hub")
    assert model.push_to_hub("other") == "https://example.org/commit"
    assert calls["repo_id"] == "me/other"


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    in_memory = optimize_and_load(tiny_model("qwen3_moe"), "cpu", progress=False)
    with pytest.raises(UnsupportedModelError, match="cannot be saved"):
        in_memory.save_pretrained(out)
    model = load(folder, "cpu")
    with pytest.raises(UnsupportedModelError, match="state_dict"):
        model.save_pretrained(out, state_dict={})
    assert not out.exists()
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is in this folder already"):
        model.save_pretrained(copied)
    assert "quantization_config" not in json.loads((copied / "config.json").read_text())
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "file")


@pytest.mark.parametrize("packed", [False, True], ids=["recipe", "packed"])
def test_saving_finds_the_weights_from_another_working_directory(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the same name there has other weights, and without one the name might be taken for an id of the hub."""
    for place, seed in (("here", 0), ("there", 1)):
        tiny_model("qwen3_moe", seed=seed).save_pretrained(tmp_path / place / "stock")
    monkeypatch.chdir(tmp_path / "here")
    model = reference(Path("stock"), "cpu-exact")
    monkeypatch.chdir(tmp_path / "there")
    model.save_pretrained("saved", packed=packed)
    assert torch.equal(logits(reference(Path("saved"))), logits(model))
    (tmp_path / "here" / "stock").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="stock: it was moved after the model was loaded"):
        model.save_pretrained("again", packed=packed)
    assert not Path("again").exists()


def test_a_link_whose_file_was_moved_is_named_with_its_target(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "stock")
    load(tmp_path / "stock", "cpu").save_pretrained(tmp_path / "saved")
    (tmp_path / "stock").rename(tmp_path / "moved")
    for loading in (load, reference):
        with pytest.raises(CheckpointError, match=r"stock-model\.safetensors: a link to .*stock/model\.safetensors, where no"):
            loading(tmp_path / "saved")


OWN_CODE = """
import pathlib
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
pathlib.Path({ran!r}).touch()
class OwnConfig(Qwen3MoeConfig):
    model_type = {model_type!r}
class OwnModel(Qwen3MoeForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("packed", [False, True], ids=["recipe", "packed"])
@pytest.mark.parametrize("trusted", [False, True], ids=["untrusted", "trusted"])
def test_saving_runs_a_folders_code_only_where_loading_did(trusted: bool, packed: bool, tmp_path: Path) -> None:
    folder, ran = tmp_path / "stock", tmp_path / "ran"
    tiny_model("qwen3_moe").save_pretrained(folder)
    own = {"model_type": "own_moe" if trusted else "qwen3_moe"}  # which transformers has not, and has
    code = {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | own | code))
    (folder / "own.py").write_text(OWN_CODE.format(ran=str(ran), **own))
    model = reference(folder, "cpu-exact", trust_remote_code=trusted)
    model.save_pretrained(tmp_path / "saved", packed=packed)
    assert ran.exists() is trusted
    assert torch.equal(logits(reference(tmp_path / "saved", trust_remote_code=trusted)), logits(model))


def save_packed(folder: Path, rules: Any, out: Path, **options: Any) -> PreTrainedModel:
    model = reference(folder, rules, **options)
    model.save_pretrained(out, packed=True)
    return model


def test_a_part_of_a_model_is_not_packed(tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(demo_path(), quantization_config=MoegraftConfig("cpu-exact"))
    with pytest.raises(UnsupportedModelError, match="of which this is a part: load it by that class, or save without packed"):
        model.save_pretrained(tmp_path, packed=True)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("rules", with_long(sorted(shipped_rules()), "cpu", "cpu-exact", "hybrid"))
def test_a_packed_folder_gives_equal_logits(rules: str, tmp_path: Path) -> None:
    model = save_packed(demo_path(), rules, tmp_path)
    assert not any(file.is_symlink() for file in tmp_path.iterdir())
    expected = logits(model), model.moegraft.placement(), tokens(model)
    for again in (load(tmp_path), reference(tmp_path)):
        assert torch.equal(logits(again), expected[0])
        assert (again.moegraft.placement(), tokens(again)) == expected[1:]


@pytest.mark.parametrize("case", families())
def test_every_family_has_packed_folders(case: FamilyCase, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(case, tmp_path / "stock", shards=2)
    model = save_packed(tmp_path / "stock", "cpu", tmp_path / "packed")
    found, info = model_class(case).from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not any(info.values()), info
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert torch.equal(logits(found, prompt(9, batch=2)), logits(model, prompt(9, batch=2)))


@pytest.mark.parametrize("weights", ["int4", "float16", {"gate": "q4_k", "up": "q4_k", "down": "q6_k"}, "iq2_xs", "mxfp4"])
def test_every_weight_type_may_be_packed(weights: Any, tmp_path: Path) -> None:
    rules = {"rules": [{"match": {"kind": "experts"}, "replace": {"class": "hybrid_experts", "kwargs": {"weights": weights}}}]}
    wide = tiny_model("qwen3_moe", hidden_size=256, moe_intermediate_size=256)
    wide.save_pretrained(tmp_path / "stock")
    model = save_packed(tmp_path / "stock", rules, tmp_path / "packed")
    assert torch.equal(logits(load(tmp_path / "packed")), logits(model))
    assert model.moegraft.placement() == load(tmp_path / "packed").moegraft.placement()


def test_layers_for_drafts_may_be_packed(tmp_path: Path) -> None:
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("layers for multi-token prediction need transformers 5.23")
    model = save_packed(demo_path(), "speculative", tmp_path, vars={"draft": "mtp"})
    assert tokens(reference(tmp_path)) == tokens(model)


def test_packed_experts_are_computed_from_the_file(tmp_path: Path) -> None:
    save_packed(demo_path(), "cpu", tmp_path)
    again = load(tmp_path)
    with safe_open(tmp_path / "model-00001-of-00001.safetensors", framework="pt") as file:
        [place, *_] = [key for key in file.keys() if key.endswith("experts.packed.experts")]  # noqa: SIM118 (no mapping)
        size = file.get_slice(place).get_shape()[0]
    held = again.get_submodule(place.removesuffix(".packed.experts")).packed_weights().tensors["experts"]
    assert held.nbytes == size and not held.flags.writeable
    path = str(tmp_path / "model-00001-of-00001.safetensors")
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    ranges = [tuple(int(end, 16) for end in line.split("-")) for line in mapped]
    assert any(begin <= held.ctypes.data and held.ctypes.data + size <= end for begin, end in ranges)


def test_a_process_takes_its_experts_from_a_packed_layer(tmp_path: Path) -> None:
    model = save_packed(demo_path(), "cpu", tmp_path)
    path, whole = next((path, operator) for path, operator in model.moegraft.replacing.items() if operator.kind == "experts")
    some = copy.copy(whole.on_cpu)
    some.experts = range(3, 7)
    source = build_meta_model(tmp_path, weights=True).weights.source(path, "experts")
    some.load(whole.weight_type, source, lambda size: None)
    for place in range(4):
        for part in ("gate", "up", "down"):
            np.testing.assert_array_equal(some.packed.unpack(place, part), whole.on_cpu.packed.unpack(3 + place, part))


def test_a_packed_folder_may_be_saved_again(tmp_path: Path) -> None:
    model = save_packed(demo_path(), "cpu", tmp_path / "packed")
    again = load(tmp_path / "packed")
    again.save_pretrained(tmp_path / "links")
    again.save_pretrained(tmp_path / "copy", packed=True)
    assert torch.equal(logits(load(tmp_path / "links")), logits(model))
    assert (tmp_path / "copy" / "model-00001-of-00001.safetensors").read_bytes() == (
        tmp_path / "packed" / "model-00001-of-00001.safetensors"
    ).read_bytes()
    with pytest.raises(CheckpointError, match="in this folder already"):
        again.save_pretrained(tmp_path / "packed", packed=True)


def test_a_packed_folder_needs_its_own_rules(tmp_path: Path) -> None:
    save_packed(demo_path(), "cpu", tmp_path)
    with pytest.raises(CheckpointError, match=r"packed with weights int8, and the rules ask for weights int4: .* its config\.json"):
        reference(tmp_path, "cpu", vars={"weights": "int4"})
    with pytest.raises(CheckpointError, match=r"leave modules that it holds packed"):
        reference(tmp_path, {"rules": [{"match": {"kind": "router"}, "replace": {"class": "cpu_router"}}]})


def test_a_packed_folder_cannot_be_quantised(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files are written by gguf, which is not installed")
    export = importlib.import_module("moegraft.injection.checkpoint.gguf.export")
    save_packed(demo_path(), "cpu", tmp_path)
    meta = build_meta_model(tmp_path, weights=True)
    with pytest.raises(CheckpointError, match=r"the folder has it packed by its rules: use the stock model"):
        export.plan_export(meta.weights, meta.skeleton, export.read_types("q8_0"))


def changed_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    about = json.loads(header["__metadata__"]["moegraft"])
    change(about)
    header["__metadata__"]["moegraft"] = json.dumps(about)
    body = json.dumps(header).encode()
    path.write_bytes(len(body).to_bytes(8, "little") + body + content[8 + length :])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "short": (lambda path: os.truncate(path, path.stat().st_size - 100), "damaged or truncated"),
    "bit": (lambda path: path.write_bytes(path.read_bytes()[:900_000] + b"????" + path.read_bytes()[900_004:]), "checksums do not match"),
    "layout": (
        lambda path: changed_header(path, lambda about: about.update(layout_version=0)),
        "packed in version 0 of the kernels' layout",
    ),
    "no layout": (lambda path: changed_header(path, lambda about: about.pop("layout_version")), "readable metadata"),
    "no module": (lambda path: changed_header(path, lambda about: about["modules"].popitem()), "damaged metadata"),
    "no form": (lambda path: changed_header(path, lambda about: next(iter(about["modules"].values())).pop("form")), "damaged metadata"),
    "no sums": (
        lambda path: changed_header(path, lambda about: next(iter(about["modules"].values())).update(checksums={})),
        "checksums do not match",
    ),
    "list": (lambda path: changed_header(path, lambda about: about.update(modules=[1])), "readable metadata"),
    "gone": (lambda path: path.unlink(), "the file is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_packed_files_end_in_a_message(damage: str, tmp_path: Path) -> None:
    save_packed(demo_path(), "cpu", tmp_path)
    change, message = DAMAGES[damage]
    change(tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=message):
        reference(tmp_path)


def test_bytes_without_an_alignment_are_copied(tmp_path: Path) -> None:
    model = save_packed(demo_path(), "cpu", tmp_path)
    changed_header(tmp_path / "model-00001-of-00001.safetensors", lambda about: None)  # writes no padding
    assert torch.equal(logits(load(tmp_path)), logits(model))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"rules": "cpuu"}, RuleFileError, "did you mean"),
        ({"rules": {"rules": [{"match": {"kind": "expert"}, "replace": {"class": "hybrid_experts"}}]}}, RuleFileError, "experts"),
        ({"rules": "speculative", "vars": {"draft": "mtp"}}, UnsupportedModelError, "optimize_and_load"),
        ({"rules": "cpu", "vars": {"no_such": 1}}, RuleFileError, "no_such"),
    ],
)
def test_mistakes_end_before_a_file_is_looked_for(given: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    shutil.copyfile(demo_path() / "config.json", tmp_path / "config.json")  # a folder without weights
    with pytest.raises(error, match=text):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MoegraftConfig(**given))


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no argument rule:"):
        MoegraftConfig(rule="cpu")
    with pytest.raises(UnsupportedModelError, match="a mapping, not of type int"):
        MoegraftConfig(rules=3)  # type: ignore[arg-type]


def test_what_from_pretrained_cannot_do_is_refused_with_the_reason(folder: Path, tmp_path: Path) -> None:
    config = MoegraftConfig(rules="cpu")
    stock = tiny_model("qwen3_moe")
    with pytest.raises(UnsupportedModelError, match="not in files"):
        type(stock).from_pretrained(None, config=stock.config, state_dict=stock.state_dict(), quantization_config=config)
    stock.save_pretrained(tmp_path, variant="fp32")
    with pytest.raises(UnsupportedModelError, match="without a variant"):
        load(tmp_path, "cpu", variant="fp32")
    divided = copy.deepcopy(stock.config)
    divided.distributed_config = DistributedConfig()
    with pytest.raises(UnsupportedModelError, match="tp_plan"):
        load(folder, "cpu", config=divided)


def remove(tensors: dict[str, torch.Tensor], key: str) -> None:
    del tensors[key]


def widen(tensors: dict[str, torch.Tensor], key: str) -> None:
    tensors[key] = torch.cat([tensors[key], tensors[key]])


def rename(tensors: dict[str, torch.Tensor], key: str) -> None:
    tensors[f"{key}s"] = tensors.pop(key)


@pytest.mark.parametrize("damage", [remove, widen, rename])
@pytest.mark.parametrize("key", ["model.layers.1.mlp.experts.3.down_proj.weight", "model.norm.weight"])
def test_a_damaged_checkpoint_ends_in_our_message(
    folder: Path, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor], str], None], key: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors, key)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as expected:
        reference(tmp_path, "cpu")
    with pytest.raises(CheckpointError) as found:
        load(tmp_path, "cpu")
    assert str(found.value) == str(expected.value)


class TestExpertsImplementation:
    @pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
    def test_it_equals_transformers_own(self, model_type: str, tmp_path: Path) -> None:
        stock = tiny_model(model_type)
        stock.save_pretrained(tmp_path)
        found = load(tmp_path, experts_implementation="moegraft")
        expected = logits(stock)
        assert float((logits(found) - expected).abs().max() / expected.abs().max()) <= 1e-5
        assert tokens(found) == tokens(stock)

    @pytest.mark.parametrize("counted", [True, False])
    def test_a_changed_parameter_is_packed_again(self, counted: bool, folder: Path) -> None:
        """PyTorch does not count what is written through `.data`, as PEFT merges adapters."""
        found, stock = load(folder, experts_implementation="moegraft"), load(folder)
        logits(found)
        for model in (found, stock):
            with torch.no_grad():
                weight = model.model.layers[0].mlp.experts.down_proj
                (weight if counted else weight.data)[3].mul_(1.5)
        assert float((logits(found) - logits(stock)).abs().max() / logits(stock).abs().max()) <= 1e-5

    def test_parameters_of_inference_mode_are_computed(self, folder: Path) -> None:
        with torch.inference_mode():
            found = load(folder, experts_implementation="moegraft")
        expected = logits(load(folder))
        assert float((logits(found) - expected).abs().max() / expected.abs().max()) <= 1e-5

    def test_a_model_in_use_can_be_copied_and_pickled(self, folder: Path) -> None:
        model = load(folder, experts_implementation="moegraft")
        expected = logits(model)
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(logits(again), expected)

    def test_adapters_of_experts_are_computed_and_merged(self, folder: Path) -> None:
        """PEFT puts a parameter with the adapter in the place of the module's own while the module is called."""
        peft = pytest.importorskip("peft", reason="PEFT is not installed (the extra `train`)")
        found = []
        for model in (load(folder, experts_implementation="moegraft"), load(folder)):
            logits(model)
            torch.manual_seed(0)
            targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            config = peft.LoraConfig(r=4, target_modules=[], target_parameters=targets, init_lora_weights=False)
            adapted = peft.get_peft_model(model, config).eval()
            found.append(torch.stack([logits(adapted), logits(adapted.merge_and_unload())]))
        assert float((found[0] - found[1]).abs().max() / found[1].abs().max()) <= 1e-5

    def test_gradients_are_those_of_transformers(self, folder: Path) -> None:
        found, stock = load(folder, experts_implementation="moegraft"), load(folder, experts_implementation="grouped_mm")
        for model in (found, stock):
            model(input_ids=IDS, labels=IDS).loss.backward()
        name = "model.layers.0.mlp.experts.gate_up_proj"
        assert torch.equal(found.get_parameter(name).grad, stock.get_parameter(name).grad)


class TestRegistration:
    """In processes of their own, as registration lasts."""

    CHECK = (
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING;"
        "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS;"
        "assert 'moegraft' in AUTO_QUANTIZER_MAPPING; assert 'moegraft' in ALL_EXPERTS_FUNCTIONS.valid_keys()"
    )

    @pytest.mark.parametrize(
        "imports",
        [
            "from transformers import PreTrainedModel; import moegraft.injection",
            "import moegraft.operators.autoload as a; a.register(); a.register(); import transformers.modeling_utils; a.register()",
            *(
                pytest.param(imports, marks=pytest.mark.long)
                for imports in (
                    "import moegraft.injection; from transformers import AutoModelForCausalLM, PreTrainedModel",
                    "from moegraft.injection import MoegraftConfig, optimize_and_load; from transformers import PreTrainedModel",
                    "import moegraft.injection; from transformers.quantizers.auto import AutoQuantizationConfig as c;"
                    "c.from_dict({'quant_method': 'moegraft'})",
                )
            ),
        ],
    )
    def test_importing_in_any_order_registers(self, imports: str) -> None:
        assert run_python(f"{imports}; {self.CHECK}").returncode == 0

    def test_importing_moegraft_imports_neither_torch_nor_transformers(self) -> None:
        done = run_python("import sys, moegraft.injection; assert not {'torch', 'transformers'} & set(sys.modules)")
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize(
        ("on", "first"),
        [
            (True, "import transformers.quantizers.auto"),
            *(pytest.param(True, f"import {name}", marks=pytest.mark.long) for name in ("torch", "transformers.integrations.moe")),
            (False, "import torch"),
        ],
    )
    def test_torch_registers_where_the_environment_asks_for_it(self, on: bool, first: str, folder: Path, tmp_path: Path) -> None:
        """transformers may import torch in the middle of the module that has the register. The package is made known as pip does it."""
        load(folder, "cpu").save_pretrained(tmp_path / "saved")
        write_autoload(tmp_path, on=on)
        code = (
            f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path_importer_cache.clear(); {first};"
            "from transformers import AutoModelForCausalLM;"
            f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'saved')!r}); print(hasattr(model, 'moegraft'))"
        )
        done = run_python(code)
        assert done.stdout.strip() == str(on), done.stderr
