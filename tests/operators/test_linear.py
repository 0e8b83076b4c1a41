"""`quantized_linear` equals torch up to the rounding of activations, from checkpoints, tied weights and live models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.families import build_model, case_of, prompt
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2MoeConfig

from moegraft.cpu_backend import PackedLinear
from moegraft.injection import optimize_and_load
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import RuleFileError
from moegraft.operators.linear import QuantizedLinear, QuantizedLinearOptions
from moegraft.operators.weights import WeightSource

# Signal to noise against float64 with the unrounded weight, random normal data: 8 and 4 bits with a scale for 32 values.
LEAST_SQNR_DB = {"float16": 60.0, "bfloat16": 45.0, "int8": 34.0, "int4": 17.0}


class ArraySource(WeightSource):
    """A weight source over tensors."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._pieces = {"weight": weight, "bias": bias}
        self._weight_dtype = weight.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self._weight_dtype

    def parts(self) -> tuple[str, ...]:
        return tuple(name for name, piece in self._pieces.items() if piece is not None)

    def read(self, part: str, expert: int = 0) -> torch.Tensor:
        piece = self._pieces[part]
        assert piece is not None
        return piece

    def origin(self, part: str, expert: int = 0) -> str:
        return f"array: {part}"


def sqnr_db(found: torch.Tensor, expected: torch.Tensor) -> float:
    noise = (found.double() - expected.double()).square().mean()
    return float(10 * torch.log10(expected.double().square().mean() / noise))


def make(linear: nn.Linear, weights: str) -> QuantizedLinear:
    context = InjectionContext(dtype=torch.float32, threads=2)
    operator = QuantizedLinear.build(linear, QuantizedLinearOptions(weights), context)  # type: ignore[arg-type]
    operator.load(ArraySource(linear.weight.detach(), None if linear.bias is None else linear.bias.detach()), lambda size: None)
    return operator


@pytest.mark.parametrize("weights", LEAST_SQNR_DB)
@pytest.mark.parametrize(
    ("rows", "columns", "tokens"),
    [
        (16, 32, 1),  # one block
        (17, 32, 3),  # a row past a block
        (48, 40, 5),  # inputs no multiple of a group
        (5, 7, 2),  # less than a group and a block
        (256, 160, 70),  # more tokens than a decode tile
        (33, 96, 0),  # no token
    ],
)
def test_equals_torch_within_the_types_noise(weights: str, rows: int, columns: int, tokens: int) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(columns, rows)
    x = torch.randn(tokens, columns)
    found = make(linear, weights)(x)
    assert found.shape == (tokens, rows) and found.dtype == x.dtype
    if tokens:
        expected = linear.double()(x.double()).detach()
        assert sqnr_db(found, expected) >= LEAST_SQNR_DB[weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_leading_dimensions_dtype_and_strides_survive(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False)
    operator = make(linear, "int8")
    x = torch.randn(4, 3, 128).to(dtype)[..., ::2]
    found = operator(x)
    assert found.shape == (4, 3, 48) and found.dtype == dtype
    torch.testing.assert_close(found, operator(x.contiguous()))
    assert sqnr_db(found, x.double() @ linear.weight.detach().double().T) >= 30  # bfloat16's own rounding is in it


def test_rows_do_not_depend_on_their_batch() -> None:
    linear = nn.Linear(64, 48)
    operator = make(linear, "int4")
    x = torch.randn(9, 64)
    assert torch.equal(operator(x)[3:4], operator(x[3:4]))


def test_nan_stays_in_its_row() -> None:
    operator = make(nn.Linear(64, 48), "int8")
    x = torch.randn(3, 64)
    x[1, 5] = float("nan")
    found = operator(x)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


RULES = """
version: 1
rules:
- match: {kind: linear, name: 'self_attn|shared_expert\\.|^lm_head$'}
  replace: {class: quantized_linear, kwargs: {weights: int8}}
"""


def model(*, tie: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=40,
        intermediate_size=48,
        initializer_range=0.2,
        tie_word_embeddings=tie,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_from_a_checkpoint_and_from_a_live_model(tie: bool, tmp_path: Path) -> None:
    """Cover attention with biases, shared experts and the head; a tied head is read from the embedding, which is not replaced."""
    stock = model(tie=tie)
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    stock.save_pretrained(tmp_path / "model")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = stock(ids).logits
        streamed = optimize_and_load(tmp_path / "model", rules, progress=False)
        assert isinstance(streamed.lm_head, QuantizedLinear)
        assert len(streamed.moegraft.operators) == 2 * (4 + 3) + 1
        found = streamed(ids).logits
        live = optimize_and_load(stock, rules, progress=False)
        assert torch.equal(live(ids).logits, found)
    # The noise of nine quantised layers in a row (-9.5 dB), amplified by the large random weights.
    assert sqnr_db(found, expected) >= 18
    assert np.isfinite(found.numpy()).all()


def test_only_plain_linears_are_replaced(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("version: 1\nrules:\n- match: {name: 'mlp\\.gate$'}\n  replace: {class: quantized_linear}\n")
    with pytest.raises(RuleFileError, match="Qwen2MoeTopKRouter"):
        optimize_and_load(model(tie=False), rules, progress=False)


def test_without_a_gpu_it_runs_on_the_cpu_and_logs_the_reason_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    context = InjectionContext(dtype=torch.float32, threads=1)
    linear, options = nn.Linear(64, 48), QuantizedLinearOptions("int8", gpu="auto")
    made = [QuantizedLinear.build(linear, options, context) for _ in range(2)]
    assert [record.getMessage() for record in caplog.records] == ["quantized_linear stays on the CPU: PyTorch finds no CUDA GPU"]
    assert "on the CPU" in made[0].placement()
    assert QuantizedLinear.footprint(linear, options, torch.float32).by_device.keys() == {"cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert QuantizedLinear.footprint(linear, options, torch.float32).by_device.keys() == {"cuda:0"}
    assert QuantizedLinear.build(linear, QuantizedLinearOptions("int8", gpu="cuda:1"), context).placement().endswith("int8 on cuda:1")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="cuda:0"):
        QuantizedLinearOptions("int8", gpu="cpu")


def test_packed_bytes_can_be_read_and_not_written() -> None:
    packed = PackedLinear(17, 40, "int4")
    packed.pack(np.ones((17, 40), np.float32))
    view = packed.buffer
    del packed
    assert view.nbytes == PackedLinear.nbytes_for(17, 40, "int4")
    assert not view.flags.writeable
    assert view.any()


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "nemotron_h"])
def test_a_projection_whose_weight_is_read_in_training_alone_is_packed(model_type: str, tmp_path: Path) -> None:
    """Layers of Mamba-2 give a fused kernel the weight of `out_proj` in training, and call the module otherwise."""
    stock = build_model(case_of(model_type))
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "version: 1\nrules:\n- match: {kind: linear, name: out_proj}\n  replace: {class: quantized_linear, kwargs: {weights: stored}}\n"
    )
    ids = prompt(11)
    with torch.no_grad():
        expected, text = stock(ids).logits, stock.generate(ids, max_new_tokens=6, do_sample=False)
        found = optimize_and_load(stock, rules, progress=False)
        logits = found(ids).logits
        assert isinstance(next(module for path, module in found.named_modules() if path.endswith("out_proj")), QuantizedLinear)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        assert torch.equal(found.generate(ids, max_new_tokens=6, do_sample=False), text)
        with pytest.raises(AttributeError, match=r"no parameter 'weight': leave this linear layer out of the rule, or call model\.eval"):
            found.train()(ids, use_cache=False)
        assert torch.equal(found.eval()(ids).logits, logits)
