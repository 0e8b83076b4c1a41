"""`optimize_and_load` on checkpoints of every storage form: what comes out equals the stock model and is one to its users."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import save_unloadable, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel, pipeline

from moegraft.cpu_backend import PackedLinear
from moegraft.injection import optimize_and_load
from moegraft.operators.errors import CheckpointError, NotEnoughMemoryError, UnsupportedModelError

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
qwen3 = partial(tiny_model, "qwen3_moe", **TOKENS)
mixtral = partial(tiny_model, "mixtral", **TOKENS)
gpt_oss = partial(tiny_model, "gpt_oss", **TOKENS)
IDS = torch.tensor([[5, 17, 33, 90, 3, 8, 61]])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.double()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return qwen3()


@pytest.fixture(scope="module")
def folder(stock: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    stock.save_pretrained(path)
    return path


@pytest.mark.parametrize("build", [qwen3, mixtral, gpt_oss], ids=["per-expert", "w1-w2-w3", "transposed-interleaved-bias"])
@pytest.mark.parametrize("shard", ["5GB", "40KB"], ids=["one-file", "shards"])
def test_streamed_equals_stock(build: object, shard: str, tmp_path: Path) -> None:
    stock = build()  # type: ignore[operator]
    stock.save_pretrained(tmp_path, max_shard_size=shard)
    injected = optimize_and_load(tmp_path, "cpu-exact", progress=False)
    assert relative_error(logits(injected), logits(stock)) <= 1e-5
    assert type(injected).__name__ == type(stock).__name__
    assert not any(parameter.is_meta for parameter in injected.parameters())


@pytest.mark.parametrize("rules", ["cpu", "cpu-exact"])
def test_packing_by_several_threads_gives_the_same_bytes(folder: Path, rules: str) -> None:
    one, two = (logits(optimize_and_load(folder, rules, threads=threads, progress=False)) for threads in (1, 2))
    assert torch.equal(one, two)


def test_fused_storage_is_read_as_it_is(stock: PreTrainedModel, tmp_path: Path) -> None:
    """Some checkpoints hold the fused parameter itself."""
    stock.save_pretrained(tmp_path)
    save_file({key: value.contiguous() for key, value in stock.state_dict().items()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert any("gate_up_proj" in key for key in load_file(tmp_path / "model.safetensors"))
    assert relative_error(logits(optimize_and_load(tmp_path, "cpu-exact", progress=False)), logits(stock)) <= 1e-5


def test_generation_equals_stock(stock: PreTrainedModel, folder: Path) -> None:
    injected = optimize_and_load(folder, "cpu-exact", progress=False)
    arguments = {"max_new_tokens": 32, "do_sample": False}
    assert torch.equal(injected.generate(IDS, **arguments), stock.generate(IDS, **arguments))


def test_loaded_model_is_grafted_in_place_and_freed(stock: PreTrainedModel) -> None:
    model = copy.deepcopy(stock)
    before = sum(parameter.numel() for parameter in model.parameters())
    injected = optimize_and_load(model, "cpu-exact", progress=False)
    assert injected is model
    experts = sum(p.numel() for name, p in stock.named_parameters() if ".experts." in name)
    assert sum(parameter.numel() for parameter in model.parameters()) == before - experts
    assert relative_error(logits(injected), logits(stock)) <= 1e-5
    with pytest.raises(UnsupportedModelError, match="injected already"):
        optimize_and_load(model, "cpu-exact", progress=False)


def test_meta_model_with_a_checkpoint(stock: PreTrainedModel, folder: Path) -> None:
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(stock.config)
    skeleton.config.name_or_path = ""
    with pytest.raises(UnsupportedModelError, match="checkpoint=FOLDER"):
        optimize_and_load(skeleton, "cpu-exact", progress=False)
    injected = optimize_and_load(skeleton, "cpu-exact", progress=False, checkpoint=folder)
    assert relative_error(logits(injected), logits(stock)) <= 1e-5


def test_dtype_is_that_of_the_rest(folder: Path, stock: PreTrainedModel) -> None:
    injected = optimize_and_load(folder, "cpu-exact", dtype="bfloat16", progress=False)
    assert injected.dtype == torch.bfloat16
    reference = copy.deepcopy(stock).to(torch.bfloat16)
    assert relative_error(logits(injected), logits(reference)) <= 0.05
    with pytest.raises(UnsupportedModelError, match="int8"):
        optimize_and_load(folder, "cpu-exact", dtype="int8", progress=False)


def test_dry_run_returns_the_plan_and_reads_no_weights(folder: Path, tmp_path: Path) -> None:
    plan = optimize_and_load(folder, "cpu-exact", dry_run=True)
    assert [swap.module for swap in plan.swaps if not swap.in_place] == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert [swap.module for swap in plan.swaps if swap.in_place] == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert len(optimize_and_load(tmp_path, "cpu-exact", dry_run=True).swaps) == 4


def test_planned_bytes_are_the_packed_bytes(folder: Path) -> None:
    for rules in ("cpu", "cpu-exact"):
        injected = optimize_and_load(folder, rules, progress=False)
        for swap in (swap for swap in injected.moegraft.plan.swaps if not swap.in_place):
            operator = injected.moegraft.operators[swap.module]
            if operator.kind == "experts":
                packed = operator.on_cpu.packed
            else:
                packed = PackedLinear(operator.out_features, operator.in_features, operator.weight_type)
            assert packed.nbytes == swap.footprint.total_bytes


def test_too_little_memory_is_refused_before_reading(tmp_path: Path) -> None:
    save_unloadable(tmp_path)
    with pytest.raises(NotEnoughMemoryError, match=r"and [\d.]+ [MGT]i?B are free"):
        optimize_and_load(tmp_path, "cpu-exact", progress=False)


def test_generation_config_and_name_survive(stock: PreTrainedModel, tmp_path: Path) -> None:
    model = copy.deepcopy(stock)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path)
    injected = optimize_and_load(tmp_path, "cpu-exact", progress=False)
    assert injected.generation_config.max_new_tokens == 7
    assert injected.config.name_or_path == str(tmp_path)


def test_tied_embeddings_load(tmp_path: Path) -> None:
    stock = qwen3(tie_word_embeddings=True)
    stock.save_pretrained(tmp_path)
    injected = optimize_and_load(tmp_path, "cpu-exact", progress=False)
    assert injected.lm_head.weight.data_ptr() == injected.model.embed_tokens.weight.data_ptr()
    assert relative_error(logits(injected), logits(stock)) <= 1e-5


def test_two_models_of_different_sizes_live_together(stock: PreTrainedModel, folder: Path, tmp_path: Path) -> None:
    other = qwen3(num_experts=8, moe_intermediate_size=16)
    other.save_pretrained(tmp_path)
    first, second = (optimize_and_load(path, "cpu-exact", progress=False) for path in (folder, tmp_path))
    for _ in range(2):
        assert relative_error(logits(first), logits(stock)) <= 1e-5
        assert relative_error(logits(second), logits(other)) <= 1e-5


def test_pipeline_takes_an_injected_model(folder: Path) -> None:
    injected = optimize_and_load(folder, "cpu-exact", progress=False)
    generator = pipeline("text-generation", model=injected, tokenizer=_byte_tokenizer())
    text = generator("ab", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert text.startswith("ab")


def _byte_tokenizer() -> object:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:101])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_unknown_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        optimize_and_load("./nowhere/at/all", "cpu")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        optimize_and_load(tmp_path, "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(UnsupportedModelError, match="no_such_type"):
        optimize_and_load(tmp_path, "cpu")
