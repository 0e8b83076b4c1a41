"""What users do to checkpoints, models and arguments beside the plain load: each is served as stock serves it, or refused in words."""

import copy
import gc
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import TINY, tiny_model
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel

from moegraft.injection import meta_model, optimize_and_load
from moegraft.injection.progress import ProgressLine
from moegraft.operators.errors import CheckpointError, RuleFileError, UnsupportedModelError
from moegraft.operators.experts.hybrid import HybridExperts

IDS = torch.tensor([[5, 17, 33, 90, 3, 8, 61]])
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
RULES = "version: 1\nrules: [{match: {kind: experts}, replace: {class: hybrid_experts}}]\n"
QUANTIZED_HEAD = "version: 1\nrules: [{match: {kind: linear, name: '^lm_head$'}, replace: {class: quantized_linear}}]\n"


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def folder(stock: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edges")
    stock.save_pretrained(path)
    (path / "rules.yaml").write_text(RULES)
    return path


@pytest.fixture
def inject(folder: Path) -> Callable[..., PreTrainedModel]:
    def inject(model: object, rules: object = folder / "rules.yaml", **options: object) -> PreTrainedModel:
        return optimize_and_load(model, rules, **{"progress": False, "threads": 1} | options)

    return inject


Inject = Callable[..., PreTrainedModel]


@torch.no_grad()
def error_of(injected: PreTrainedModel, stock: PreTrainedModel) -> float:
    """The largest error of the logits, relative to the largest of them."""
    found, expected = injected(IDS).logits.double(), stock(IDS).logits.double()
    return float((found - expected).abs().max() / expected.abs().max())


def rewritten(folder: Path, copy_to: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a checkpoint of one file, each tensor changed."""
    shutil.copytree(folder, copy_to)
    tensors = {key: change(key, tensor) for key, tensor in load_file(folder / SINGLE).items()}
    save_file(tensors, copy_to / SINGLE, {"format": "pt"})
    return copy_to


def split(folder: Path, copy_to: Path, first: str, second: str, *, shared: int = 0) -> Path:
    """A copy in two shards, of which the second holds the last `shared` keys of the first too; the index names the first for them."""
    shutil.copytree(folder, copy_to)
    tensors = load_file(folder / SINGLE)
    (copy_to / SINGLE).unlink()
    keys = list(tensors)
    for name, held in ((first, keys[:20]), (second, keys[20 - shared :])):
        (copy_to / name).parent.mkdir(exist_ok=True)
        save_file({key: tensors[key] for key in held}, copy_to / name, {"format": "pt"})
    weight_map = {key: first if position < 20 else second for position, key in enumerate(keys)}
    (copy_to / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return copy_to


def test_one_file_goes_before_a_stale_index(stock: PreTrainedModel, inject: Inject, tmp_path: Path) -> None:
    """`save_pretrained` of one file into a folder of shards removes the shards and leaves their index."""
    stock.save_pretrained(tmp_path, max_shard_size="40KB")
    stock.save_pretrained(tmp_path)
    assert (tmp_path / INDEX).is_file() and (tmp_path / SINGLE).is_file()
    assert error_of(inject(tmp_path), stock) <= 1e-5


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ("a.safetensors", "b.safetensors", 1),  # a key in both
        ("ünïcode name.safetensors", "part two/x.safetensors", 0),
    ],
)
def test_shards_as_their_index_names_them(
    stock: PreTrainedModel, folder: Path, inject: Inject, tmp_path: Path, first: str, second: str, shared: int
) -> None:
    path = split(folder, tmp_path / "mödel ☃", first, second, shared=shared)
    assert error_of(inject(path), stock) <= 1e-5


def test_hub_cache_of_links_to_read_only_blobs(stock: PreTrainedModel, inject: Inject, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    stock.save_pretrained(blobs, max_shard_size="40KB")
    snapshot.mkdir(parents=True)
    for position, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / f"{position:064x}")
        blob.chmod(0o444)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    assert error_of(inject(snapshot), stock) <= 1e-5


def test_only_the_weights_that_will_be_read_are_downloaded(
    stock: PreTrainedModel, inject: Inject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some repositories hold their weights a second time, as `original/*.safetensors`."""
    stock.save_pretrained(tmp_path, max_shard_size="40KB")
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(meta_model, "snapshot_download", download)
    assert error_of(inject("owner/name"), stock) <= 1e-5
    shards = {path.name for path in tmp_path.glob("*.safetensors")}
    assert {name for name in asked if name.endswith("safetensors")} == {SINGLE, "mtp.safetensors"} | shards
    asked.clear()
    inject("owner/name", dry_run=True)
    assert not any(name.endswith("safetensors") for name in asked)


def test_dry_run_of_a_sharded_hub_model_needs_no_shard(stock: PreTrainedModel, inject: Inject, tmp_path: Path) -> None:
    stock.save_pretrained(tmp_path, max_shard_size="40KB")
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    assert len(inject(tmp_path, dry_run=True).swaps) == 2
    with pytest.raises(CheckpointError, match="is missing"):
        inject(tmp_path)


def test_stored_experts_of_two_dtypes_are_not_rounded(folder: Path, inject: Inject, tmp_path: Path) -> None:
    """`weights: stored` promises no rounding, so the wider dtype is kept."""
    path = rewritten(folder, tmp_path / "mixed", lambda key, tensor: tensor.bfloat16() if "down_proj" in key else tensor)
    expected = AutoModelForCausalLM.from_pretrained(path).eval()
    injected = inject(path)
    assert {operator.weight_type for operator in injected.moegraft.operators.values()} == {"float32"}
    assert error_of(injected, expected) <= 1e-5
    for name, parameter in expected.named_parameters():
        if name.endswith("experts.down_proj"):
            parameter.data = parameter.data.bfloat16()
    live = inject(expected)
    assert {operator.weight_type for operator in live.moegraft.operators.values()} == {"float32"}
    assert error_of(live, injected) <= 1e-5


def test_float32_parts_of_a_bfloat16_checkpoint_stay(inject: Inject, tmp_path: Path) -> None:
    """DeepSeek-V3 keeps its router's correction bias in float32 in a bfloat16 model."""
    torch.manual_seed(0)
    own = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "intermediate_size": 48}
    heads = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    sizes = {name: size for name, size in TINY.items() if name != "head_dim"}  # which this family computes from others
    AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes | own | heads)).save_pretrained(tmp_path / "float32")
    stored = rewritten(
        tmp_path / "float32", tmp_path / "mixed", lambda key, tensor: tensor if "e_score_correction_bias" in key else tensor.bfloat16()
    )
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    expected, injected = AutoModelForCausalLM.from_pretrained(stored).eval(), inject(stored)
    with pytest.warns(UserWarning, match=r"lacks the packed weights of its 1 operators \(model\.layers\.1\.mlp\.experts, \.\.\.\)"):
        kept = {name: tensor.dtype for name, tensor in injected.state_dict().items()}
    assert kept == {name: tensor.dtype for name, tensor in expected.state_dict().items() if ".experts." not in name}
    assert torch.float32 in kept.values() and error_of(injected, expected) <= 0.05


def test_unreadable_generation_config_is_named(folder: Path, inject: Inject, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not a readable"):
        inject(tmp_path / "model")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [("hidden_size", "64", "hidden_size.*expected int"), ("dtype", "float99", "not a readable model config.*float99")],
)
def test_wrong_values_of_a_config_are_named(folder: Path, inject: Inject, tmp_path: Path, key: str, value: object, says: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{says}") as caught:
        inject(tmp_path)
    assert "\n" not in str(caught.value)


def test_progress_counts_what_is_read_and_no_more(folder: Path, inject: Inject, tmp_path: Path) -> None:
    """Keys that nothing in the model reads, such as layers that only predict ahead, are no part of the load."""
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(64, 128), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(load_file(folder / SINGLE) | extra, path / SINGLE, {"format": "pt"})
    counts: list[int] = []

    class Line(ProgressLine):
        @contextmanager
        def stage(self, text: str, total: int = 0, unit: str = "B") -> Iterator[Callable[[int], None]]:
            counts.append(total)
            yield counts.append

    inject(path, progress=Line())
    assert 0 < max(counts) == sum(counts) / 2


def test_home_is_expanded_everywhere(stock: PreTrainedModel, folder: Path, inject: Inject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    named = f"~/{folder.name}"
    assert error_of(inject(named, f"{named}/rules.yaml"), stock) <= 1e-5
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(stock.config)
    assert error_of(inject(skeleton, checkpoint=named), stock) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_callers_default_dtype_is_no_matter(stock: PreTrainedModel, folder: Path, inject: Inject, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        injected = inject(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    assert error_of(injected, stock) <= 1e-5


@pytest.mark.parametrize(
    ("option", "value"),
    [("dtype", "bfloat16"), ("device_map", "cpu"), ("attn_implementation", "eager"), ("checkpoint", "somewhere")],
)
def test_options_that_a_loaded_model_cannot_honour_are_refused(stock: PreTrainedModel, inject: Inject, option: str, value: str) -> None:
    model = copy.deepcopy(stock)
    with pytest.raises(UnsupportedModelError, match=f"^{option}: .* loaded already"):
        inject(model, **{option: value})
    assert error_of(inject(model, dtype="float32"), stock) <= 1e-5


@pytest.mark.parametrize("model", [None, 3, torch.nn.Linear(2, 2)], ids=lambda model: type(model).__name__)
def test_what_is_no_model_is_refused(inject: Inject, model: object) -> None:
    with pytest.raises(UnsupportedModelError, match="a hub id, a folder, or a PreTrainedModel"):
        inject(model)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rules": ""}, "no such rule file"),  # none of these is a missing argument, for which `cpu` stands
        ({"rules": {}}, "a rule file needs 'rules'"),
        ({"rules": []}, "rules are a path, the name of shipped ones or a mapping, not of type list"),
        ({"rules": 3}, "rules are a path, the name of shipped ones or a mapping, not of type int"),
        ({"vars": ["weights=int8"]}, "vars is a mapping of variables to values, not of type list"),
    ],
)
def test_what_is_no_rules_is_refused(folder: Path, inject: Inject, given: dict[str, Any], text: str) -> None:
    with pytest.raises((RuleFileError, UnsupportedModelError), match=text):
        inject(folder, **given)


@pytest.mark.parametrize("name", [SINGLE, "model.gguf"])
def test_a_pointer_of_git_lfs_is_named(folder: Path, inject: Inject, name: str, tmp_path: Path) -> None:
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n")
    with pytest.raises(CheckpointError, match=f"{name}: a pointer of Git LFS, .* run 'git lfs pull' in its repository"):
        inject(tmp_path, **({"gguf": tmp_path / name} if name != SINGLE else {}))


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("loaded", [False, True], ids=["streamed", "loaded"])
@pytest.mark.usefixtures("without_collector")
def test_a_models_weights_go_with_it(stock: PreTrainedModel, folder: Path, inject: Inject, loaded: bool) -> None:
    """Packed weights are most of memory: they must not wait for Python's collector of cycles."""
    injected = inject(copy.deepcopy(stock) if loaded else folder)
    operators = [weakref.ref(operator) for operator in injected.moegraft.operators.values()]
    del injected
    assert operators and not any(operator() for operator in operators)


def test_the_class_of_an_injected_model_builds_stock_ones(stock: PreTrainedModel, folder: Path, inject: Inject) -> None:
    model_class = type(inject(folder))
    assert isinstance(model_class(stock.config).get_submodule("model.layers.0.mlp.experts"), type(stock.model.layers[0].mlp.experts))
    assert error_of(model_class.from_pretrained(folder), stock) == 0.0


@pytest.mark.parametrize("at", [0, 1])
def test_a_graft_that_is_stopped(stock: PreTrainedModel, inject: Inject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Before the first module is replaced nothing has happened; later the model still answers, and is never saved with experts missing."""
    whole, calls = HybridExperts.load, iter(range(2))

    def stopped(self: HybridExperts, *arguments: object) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        whole(self, *arguments)  # type: ignore[arg-type]

    model = copy.deepcopy(stock)
    monkeypatch.setattr(HybridExperts, "load", stopped)
    with pytest.raises(KeyboardInterrupt):
        inject(model)
    monkeypatch.undo()
    assert error_of(model, stock) <= 1e-5
    if at == 0:
        assert error_of(inject(model), stock) <= 1e-5
    with pytest.raises(UnsupportedModelError, match="cannot be saved"):
        model.save_pretrained(tmp_path / "out")


def test_ties_of_a_replaced_layer_are_gone(tmp_path: Path, inject: Inject) -> None:
    """transformers ties again whenever embeddings are resized or a user asks for it."""
    stock = tiny_model(tie_word_embeddings=True)
    stock.save_pretrained(tmp_path)
    (tmp_path / "head.yaml").write_text(QUANTIZED_HEAD)
    for model in (tmp_path, copy.deepcopy(stock)):
        injected = inject(model, tmp_path / "head.yaml")
        injected.tie_weights()
        assert dict(injected.lm_head.named_parameters()) == {}
        assert error_of(injected, stock) <= 0.05


def test_a_packed_head_cannot_be_resized(stock: PreTrainedModel, inject: Inject, tmp_path: Path) -> None:
    """A call that asks for the present size, as scripts make for any tokenizer, changes nothing."""
    (tmp_path / "head.yaml").write_text(QUANTIZED_HEAD)
    injected = inject(copy.deepcopy(stock), tmp_path / "head.yaml")
    embeddings, size = injected.get_input_embeddings(), stock.config.vocab_size
    for options in ({}, {"new_num_tokens": size}, {"new_num_tokens": size - 3, "pad_to_multiple_of": size}):
        assert injected.resize_token_embeddings(**options) is embeddings
    for options in ({"new_num_tokens": size + 5}, {"pad_to_multiple_of": 64}):
        with pytest.raises(UnsupportedModelError, match="rules have packed the head; resize and save the stock model first"):
            injected.resize_token_embeddings(**options)
    assert injected.get_input_embeddings() is embeddings and injected.config.vocab_size == size


def test_embeddings_beside_a_stock_head_are_resized(stock: PreTrainedModel, inject: Inject) -> None:
    injected, expected = inject(copy.deepcopy(stock)), copy.deepcopy(stock)
    for model in (injected, expected):
        torch.manual_seed(0)
        model.resize_token_embeddings(stock.config.vocab_size + 5, mean_resizing=False)
    assert error_of(injected, expected) <= 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_resized_embeddings_are_not_saved_with_weights_of_the_old_size(folder: Path, inject: Inject, tmp_path: Path, packed: bool) -> None:
    injected = inject(folder)
    injected.resize_token_embeddings(injected.config.vocab_size + 5, mean_resizing=False)
    with pytest.raises(UnsupportedModelError, match="embeddings were resized from"):
        injected.save_pretrained(tmp_path / "saved", packed=packed)
    assert not (tmp_path / "saved").exists()


def test_dtype_of_a_model_can_be_changed(stock: PreTrainedModel, folder: Path, inject: Inject) -> None:
    injected = inject(folder)
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float16, 0.01), (torch.bfloat16, 0.1), (torch.float32, 0.1)):
        assert injected.to(dtype).dtype == dtype
        assert error_of(injected, stock) <= tolerance
