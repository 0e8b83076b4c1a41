"""`draft: {model: folder}`: an EAGLE-3 head drafts as its stored tensors predict, and does not change the text."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle3 import LAYERS, StoredHead, train_head, write_head
from support.families import build_model, greedy, prompt, served_cases
from support.mtp import assert_plain_steps_change_no_draft, proposals
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from moegraft.injection import build_meta_model, optimize_and_load, plan
from moegraft.injection.cli.chat.prompt_cache import read_ahead
from moegraft.operators.decode.draft_costs import measure_draft_costs
from moegraft.operators.errors import MoegraftError

if not hasattr(output_capturing, "selected_hidden_states"):
    pytest.skip("this transformers cannot return the states after chosen layers", allow_module_level=True)

HEADS: dict[str, dict[str, Any]] = {
    "reduced": {},
    "whole": {"vocabulary": None},  # by the model's own embedding and matrix of logits
    "own embedding": {"own_embedding": True},
    "other size": {"hidden": 48},
}


def stock_model(model_type: str = "qwen3_moe", **config: Any) -> PreTrainedModel:
    case = next(case for case in served_cases() if case.model_type == model_type)
    return build_model(dataclasses.replace(case, text={**case.text, "num_hidden_layers": LAYERS, **config}))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The folder of a tiny model, and the stock model."""
    folder, model = tmp_path_factory.mktemp("model"), stock_model()
    model.save_pretrained(folder)
    return folder, model


def rules(folder: Path, head: Path, weights: str = "stored", **options: Any) -> Path:
    options = {"schedule": "fixed", "max_draft": 3} | options
    kwargs = ", ".join(f"{name}: {value}" for name, value in options.items())
    path = folder / "rules.yaml"
    path.write_text(
        "version: 1\nextends: cpu-exact\nrules:\n- match: {kind: model}\n  replace: {class: speculative_draft, kwargs: "
        f"{{draft: {{model: '{head}', weights: {weights}}}, {kwargs}}}}}\n"
    )
    return path


def statistics(model: PreTrainedModel) -> Any:
    return model.moegraft.model_operator.statistics()


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_drafts_are_those_of_the_stored_tensors(
    name: str, checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stock = checkpoint
    write_head(tmp_path / "head", stock, **HEADS[name])
    found = proposals(monkeypatch)
    model = optimize_and_load(folder, rules(tmp_path, tmp_path / "head"), progress=False)
    ids = greedy(model, prompt(20))
    assert torch.equal(ids, greedy(stock, prompt(20)))
    drafted = {length: tokens for length, tokens in found.items() if len(tokens) == 3}
    assert len(drafted) > 5
    head = StoredHead(tmp_path / "head", stock)
    assert drafted == {length: head.drafts(ids[:, :length], 3) for length in drafted}
    steps = model.moegraft.statistics()["decode_steps"]
    assert steps["replayed_steps"] > 0 and steps["reasons"] == []
    assert steps["replayed_steps"] > statistics(model)["rounds"], "the head's steps are programs too"


def test_every_draft_of_a_trained_head_is_accepted(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, stock = checkpoint
    text = greedy(stock, prompt(20), max_new_tokens=24)
    train_head(tmp_path / "head", stock, text, 20, 3)
    for weights in ("stored", "int8"):
        model = optimize_and_load(folder, rules(tmp_path, tmp_path / "head", weights), progress=False)
        assert torch.equal(greedy(model, prompt(20), max_new_tokens=21), text[:, :41]), weights
        found = statistics(model)
        assert found["acceptance_by_position"] == (1.0, 1.0, 1.0) and found["drafted_tokens"] >= 15, weights
        assert f"EAGLE-3 head {tmp_path / 'head'}, {weights} weights" in model.moegraft.model_operator.placement()


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},  # and biases in linear layers
    "deepseek_v3": {},  # latent attention
    "qwen3_next": {"layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"]},  # recurrent states
    "glm4_moe": {},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 1, 0]},  # chunks of attention, and heads are published for it
}


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_families(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stock_model(model_type, **FAMILIES[model_type])
    stock.save_pretrained(tmp_path / "model")
    write_head(tmp_path / "head", stock)
    found = proposals(monkeypatch)
    model = optimize_and_load(tmp_path / "model", rules(tmp_path, tmp_path / "head"), progress=False)
    ids = greedy(model, prompt(20))
    assert torch.equal(ids, greedy(stock, prompt(20)))
    drafted = {length: tokens for length, tokens in found.items() if len(tokens) == 3}
    head = StoredHead(tmp_path / "head", stock)
    assert drafted == {length: head.drafts(ids[:, :length], 3) for length in drafted} and len(drafted) > 5
    steps = model.moegraft.statistics()["decode_steps"]
    assert steps["replayed_steps"] > 0 and steps["reasons"] == []


@pytest.fixture
def loaded(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> PreTrainedModel:
    folder, stock = checkpoint
    write_head(tmp_path / "head", stock)
    model: PreTrainedModel = optimize_and_load(folder, rules(tmp_path, tmp_path / "head"), progress=False)
    return model


def test_plain_steps_between_drafts_do_not_change_them(loaded: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_plain_steps_change_no_draft(loaded, monkeypatch)


def test_later_calls_and_chunks_go_on_with_the_same_cache(loaded: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = proposals(monkeypatch)
    whole = greedy(loaded, prompt(60), max_new_tokens=60)
    expected = dict(found)
    found.clear()
    cache, ids = read_ahead(loaded, prompt(60)[0].tolist(), None, 16), prompt(60)
    assert cache is not None and cache.get_seq_length() > 40
    for _ in range(4):
        ids = greedy(loaded, ids, max_new_tokens=15, past_key_values=cache)
    assert torch.equal(ids, whole)
    both = [length for length in found if length in expected and len(found[length]) == len(expected[length])]
    assert any(length > 100 for length in both)
    assert {length: found[length] for length in both} == {length: expected[length] for length in both}


def test_the_measured_schedule_and_sampling_work(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, stock = checkpoint
    write_head(tmp_path / "head", stock)
    model = optimize_and_load(folder, rules(tmp_path, tmp_path / "head", schedule="marginal", max_draft=4), progress=False)
    assert torch.equal(greedy(model, prompt(12), max_new_tokens=80), greedy(stock, prompt(12), max_new_tokens=80))
    torch.manual_seed(0)
    ids = model.generate(prompt(12), do_sample=True, max_new_tokens=30)  # type: ignore[operator] # generates
    assert ids.shape == (1, 42)


def test_a_head_is_a_part_of_the_plan(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, stock = checkpoint
    write_head(tmp_path / "head", stock, own_embedding=True)
    plain = plan(build_meta_model(folder), "cpu-exact")
    more = {}
    for weights in ("stored", "int8"):
        planned = plan(build_meta_model(folder), rules(tmp_path, tmp_path / "head", weights))
        more[weights] = planned.bytes_by_device["cpu"] - plain.bytes_by_device["cpu"]
        assert f"draft.model={tmp_path / 'head'} draft.weights={weights}" in planned.describe()
    stored = load_file(tmp_path / "head" / "model.safetensors")
    nbytes = {name: tensor.nbytes for name, tensor in stored.items()}
    norms_and_embedding = sum(size for name, size in nbytes.items() if "norm" in name or "embed" in name)
    linear = sum(size for name, size in nbytes.items() if name.endswith(("proj.weight", "fc.weight", "head.weight")))
    held = norms_and_embedding + 8 * stock.config.vocab_size
    assert held + linear <= more["stored"] < held + 1.5 * linear  # packed rows are padded
    assert held + linear / 4 < more["int8"] < held + linear / 2
    model = optimize_and_load(folder, rules(tmp_path, tmp_path / "head"), progress=False)
    assert measure_draft_costs(model, model.moegraft.context, prompt(40)[0], longest=1, rounds=1)[0].drafter == "eagle-3"


def changed(folder: Path, tensors: Callable[[dict[str, torch.Tensor]], object] | None = None, **config: Any) -> None:
    """Change the tensors or the config of a head; None deletes a setting."""
    if tensors is not None:
        stored = load_file(folder / "model.safetensors")
        tensors(stored)
        save_file(stored, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


Change = Callable[[Path], object]


def config(**settings: Any) -> Change:
    return lambda head: changed(head, **settings)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return lambda head: changed(head, change)


def without(name: str) -> Change:
    return tensors(lambda stored: stored.pop(name))


def text(file: str, content: str) -> Change:
    return lambda head: (head / file).write_text(content)


def form(architecture: str) -> Change:
    return config(architectures=[architecture])


def layers(ids: object) -> Change:
    return config(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})


INDEX = "model.safetensors.index.json"
FAULTS: dict[str, tuple[Change, str]] = {
    "no folder": (shutil.rmtree, r"config\.json: No such file or directory: draft: \{model: FOLDER\} is the folder of a drafter's"),
    "no config": (lambda head: (head / "config.json").unlink(), r"config\.json: No such file or directory"),
    "damaged config": (text("config.json", "{"), r"config\.json: not JSON .*; download the file again"),
    "not a mapping": (text("config.json", "[]"), "no 'architectures'"),
    "a model": (form("Qwen3ForCausalLM"), "Qwen3ForCausalLM is not computed: it is not known to be a drafter; EAGLE-3 heads are read"),
    "DFlash": (form("DFlashDraftModel"), "a DFlash drafter denoises a block of tokens in one pass"),
    "DSpark": (form("Qwen3DSparkModel"), "a DSpark drafter predicts a block of tokens in one pass"),
    "speculators": (form("Eagle3Speculator"), "the speculators library numbers layers in another way"),
    "EAGLE": (form("LlamaForCausalLMEagle"), "the first two versions of EAGLE read the last layer's states"),
    "experts": (form("GptOssForCausalLMEagle3"), "its layer has experts"),
    "EAGLE-3.1": (config(fc_norm=True), "fc_norm: EAGLE-3.1 normalises the states that it reads, which is not computed"),
    "two layers": (config(num_hidden_layers=2), "the head has 2 layers, and heads of one layer are computed"),
    "a missing setting": (config(hidden_size=None), "hidden_size must be a whole number, not None"),
    "a wrong setting": (config(num_key_value_heads=0), "no layer can be built from this config"),
    "foreign size": (config(hidden_size=80), "trained for a model with hidden_size 80, and this one has 64; take the head of this very"),
    "foreign vocabulary": (config(vocab_size=500), "trained for a model with vocab_size 500, and this one has 101"),
    "foreign layers": (layers([1, 46, 90]), r"after layers \[1, 46, 90\] of a model with 5, and it must read 3 different ones before the"),
    "usual layers": (config(eagle_config=None), "the usual layers of a model with 5"),  # 2, 5 // 2 and 5 - 3
    "layers as text": (layers("1"), "eagle_aux_hidden_state_layer_ids must be a list of numbers, not '1'"),
    "no map": (without("d2t"), "the head lacks d2t, which maps the 24 tokens of its vocabulary to the model's 101; complete the folder"),
    "a map to nowhere": (
        tensors(lambda stored: stored["d2t"].add_(90)),
        "model.safetensors: d2t: not a map to 101 tokens, each at most once; download the head again",
    ),
    "two tokens for one": (tensors(lambda stored: stored["d2t"][1:2].sub_(4)), "each at most once"),
    "a missing matrix": (without("midlayer.mlp.up_proj.weight"), "the head lacks midlayer.mlp.up_proj.weight"),
    "no logits": (without("lm_head.weight"), "the head lacks lm_head.weight; complete the folder"),
    "another shape": (
        config(intermediate_size=100),
        r"model\.safetensors: midlayer\.mlp\.gate_proj\.weight has the shape \(96, 64\), and by config\.json it is \(100, 64\)",
    ),
    "quantised": (
        tensors(lambda stored: stored.update({"fc.weight": stored["fc.weight"].to(torch.float8_e4m3fn)})),
        "fc.weight is stored as F8_E4M3, and heads are read in F32, F16, BF16",
    ),
    "another tensor": (
        tensors(lambda stored: stored.update({"mask_hidden": torch.zeros(1, 192)})),
        r"tensors that are not computed with \(mask_hidden\): it is of another form; EAGLE-3 heads are read",
    ),
    "no weights": (
        lambda head: (head / "model.safetensors").rename(head / "pytorch_model.bin"),
        r"model\.safetensors is missing, and there is pytorch_model\.bin; heads are read from safetensors files",
    ),
    "cut": (lambda head: os.truncate(head / "model.safetensors", 3000), r"model\.safetensors: .*; download the file again"),
    "wrong index": (text(INDEX, "{}"), "no map of tensors to files; download the file again"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_checkpoints_end_in_one_message_before_anything_is_loaded(
    fault: str, checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stock = checkpoint
    write_head(tmp_path / "head", stock)
    change, message = FAULTS[fault]
    change(tmp_path / "head")
    monkeypatch.setattr("moegraft.injection.api.load", None)
    with pytest.raises(MoegraftError, match=message) as raised:
        optimize_and_load(folder, rules(tmp_path, tmp_path / "head"), progress=False)
    assert len(str(raised.value).splitlines()) == 1


def test_names_of_vllm_and_shards_are_read(checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, stock = checkpoint
    write_head(tmp_path / "head", stock)
    expected = optimize_and_load(folder, rules(tmp_path, tmp_path / "head"), progress=False)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    renamed = {f"model.{name}".replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
    shards = {"one.safetensors": dict(list(renamed.items())[:6]), "two.safetensors": dict(list(renamed.items())[6:])}
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / "head" / file)
    (tmp_path / "head" / "model.safetensors").unlink()
    places = {name: file for file, tensors in shards.items() for name in tensors}
    (tmp_path / "head" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    changed(tmp_path / "head", architectures=["Eagle3LlamaForCausalLM"])
    model = optimize_and_load(folder, rules(tmp_path, tmp_path / "head"), progress=False)
    greedy(model, prompt(20)), greedy(expected, prompt(20))
    assert statistics(model)["acceptance_by_position"] == statistics(expected)["acceptance_by_position"]
