"""A packed linear layer, from the very bytes of `PackedLinear`, against float64 on the weights as they are unpacked."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.kernel_cases import TOLERANCE, WEIGHT_TYPES, relative_error
from support.triton_cases import DEVICE, INTERPRETED, ROUNDED
from torch import nn

from moegraft.cpu_backend import PackedLinear
from moegraft.injection.checkpoint.sources import ModuleSource
from moegraft.operators.context import InjectionContext
from moegraft.operators.kernels.linear import PackedLinearOnGpu
from moegraft.operators.kernels.packed_layout import gpu_format
from moegraft.operators.linear import QuantizedLinear, QuantizedLinearOptions
from moegraft.operators.weight_formats import FORMATS, STORED_FORMATS


def made(weight_type: str, rows: int, columns: int, *, bias: bool) -> tuple[PackedLinearOnGpu, torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(0)
    packed = PackedLinear(rows, columns, weight_type)
    packed.pack(random.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5))
    values = torch.from_numpy(random.standard_normal(rows, dtype=np.float32)) if bias else torch.zeros(rows)
    on_device = torch.from_numpy(packed.buffer.copy()).to(DEVICE)
    weight = torch.from_numpy(packed.unpack()).double()
    return PackedLinearOnGpu(rows, columns, weight_type, on_device, values.to(DEVICE) if bias else None), weight, values.double()


@pytest.mark.parametrize("path", ["decode", "grouped"])
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "bias"),
    [
        (32, 64, 1, False),  # one block
        (45, 72, 3, True),  # rows past a block, columns that are no multiple of a group
    ],
)
def test_every_weight_type(rows: int, columns: int, tokens: int, bias: bool, weight_type: str, path: str) -> None:
    linear, weight, values = made(weight_type, rows, columns, bias=bias)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1))
    limit = TOLERANCE["float32"] if path == "decode" else ROUNDED[torch.float32]
    assert relative_error(linear.forward(x.to(DEVICE), path).cpu(), x.double() @ weight.T + values) <= limit


@pytest.mark.parametrize("weight_type", sorted(STORED_FORMATS))
def test_formats_of_files(weight_type: str) -> None:
    """Their weights bit for bit, as products with columns of the identity, and products with any activations."""
    block = FORMATS[weight_type].block_weights
    rows = 77 if gpu_format(weight_type).group_words is not None else 45  # the last tile is cut where kernels expand groups
    columns = 288 if block == 32 else 320 if block == 64 else 384 if block == 128 else 512  # steps of which one is cut
    random = np.random.default_rng(0)
    packed = PackedLinear(rows, columns, weight_type)
    packed.pack_blocks(FORMATS[weight_type].random_blocks((rows, columns), random))
    weight = torch.from_numpy(packed.unpack())
    linear = PackedLinearOnGpu(rows, columns, weight_type, torch.from_numpy(packed.buffer.copy()).to(DEVICE))
    chosen = torch.from_numpy(random.permutation(columns)[:64])
    found = linear.forward(torch.eye(columns)[chosen].to(DEVICE), "grouped").cpu()
    if INTERPRETED:
        assert torch.equal(found, weight.T[chosen])
    assert relative_error(found, weight.T[chosen].double()) <= ROUNDED[torch.float32]
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(1))
    for path, limit in (("decode", TOLERANCE["float32"]), ("grouped", ROUNDED[torch.float32])):
        assert relative_error(linear.forward(x.to(DEVICE), path).cpu(), x.double() @ weight.double().T) <= limit, path


@pytest.mark.parametrize("path", ["decode", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_activations_of_any_shape(dtype: torch.dtype, path: str) -> None:
    linear, weight, values = made("int4", 45, 64, bias=True)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = linear.forward(x.to(DEVICE), path)
    assert (found.dtype, found.shape) == (dtype, (2, 3, 45))
    assert relative_error(found.cpu(), x.double() @ weight.T + values) <= ROUNDED[dtype]


def test_many_tokens_take_several_blocks_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.operators.kernels.linear.MOST_TOKENS", 20)
    linear, weight, values = made("int8", 32, 32, bias=False)
    x = torch.randn(37, 32, generator=torch.Generator().manual_seed(1))
    assert relative_error(linear.forward(x.to(DEVICE)).cpu(), x.double() @ weight.T + values) <= ROUNDED[torch.float32]


def test_no_tokens_and_wrong_bytes() -> None:
    linear, *_ = made("int8", 32, 32, bias=False)
    assert linear.forward(torch.empty(0, 32, device=DEVICE)).shape == (0, 32)
    with pytest.raises(ValueError, match="packed bytes where int4"):
        PackedLinearOnGpu(32, 32, "int4", torch.zeros(1088, dtype=torch.uint8))


@pytest.mark.skipif(INTERPRETED, reason="without a GPU the operator stays on the CPU")
def test_the_operator_takes_its_bytes_to_the_device() -> None:
    module = nn.Linear(64, 45)
    context = InjectionContext(dtype=torch.float32, threads=1)
    operator, on_cpu = (QuantizedLinear.build(module, QuantizedLinearOptions("int8", gpu=gpu), context) for gpu in ("auto", "none"))
    for each in (operator, on_cpu):
        each.load(ModuleSource("linear", module), lambda size: None)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # the CPU rounds activations to 8 bits
        torch.testing.assert_close(operator(x.to(DEVICE)).cpu(), on_cpu(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_keep_their_results(bias: bool) -> None:
    parts = [made("int8", rows, 64, bias=bias) for rows in (64, 32, 45)]
    x = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(1))
    layers = [layer for layer, *_ in parts]
    expected = [layer.forward(x.to(DEVICE)) for layer in layers]
    joint = PackedLinearOnGpu.joined(layers)
    assert joint is not None
    assert torch.equal(joint.forward(x.to(DEVICE)), torch.cat(expected, -1))
    assert all(torch.equal(layer.forward(x.to(DEVICE)), own) for layer, own in zip(layers, expected, strict=True))
    memory = joint.packed.untyped_storage().data_ptr()
    assert {layer.packed.untyped_storage().data_ptr() for layer in layers} == {memory}  # held once


def test_layers_of_other_forms_are_not_joined() -> None:
    first = made("int8", 64, 64, bias=False)[0]
    for weights, rows, columns, bias in (("int4", 32, 64, False), ("int8", 32, 32, False), ("int8", 32, 64, True)):
        assert PackedLinearOnGpu.joined([first, made(weights, rows, columns, bias=bias)[0]]) is None
    odd = made("int8", 45, 64, bias=False)[0]
    assert PackedLinearOnGpu.joined([odd, first]) is None  # its last block is not full
