"""Programs: every native operation beside PyTorch, and refusals that are exceptions before any memory is touched."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.kernel_cases import make_batch, make_layer
from torch.nn import functional

from moegraft.cpu_backend import NormSpec, PackedLinear, Program, Runtime
from moegraft.cpu_backend._kernel import Pace

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (*FLOATS, *INTEGERS, torch.bool)}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Of a small operation: the sizes with which strips, joined dimensions and rows begin and end in odd places.
SHAPES = [(), (1,), (0,), (7,), (1025,), (3, 0, 2), (2, 1, 5), (3, 4, 5, 2), (2, 1030)]


def name_of(dtype: torch.dtype) -> str:
    return NAMES[dtype]


def fixed(number: int) -> tuple[int, int, int]:
    return number, 0, 0


class Rig:
    """A program whose operands are tensors."""

    def __init__(self, runtime: Runtime) -> None:
        self.program = Program(runtime)
        self._buffers: list[torch.Tensor] = []
        self._expected: list[tuple[torch.Tensor, torch.Tensor, float | None]] = []

    def buffer(self, tensor: torch.Tensor) -> int:
        """The number of the buffer that is the storage of `tensor`."""
        data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        for number, known in enumerate(self._buffers):
            if known.data_ptr() == data.data_ptr() and data.numel():
                return number
        self._buffers.append(data)
        self.program.bind(len(self._buffers) - 1, data)
        return len(self._buffers) - 1

    def operand(self, value: torch.Tensor | float) -> tuple[Any, ...]:
        if not isinstance(value, torch.Tensor):
            return float(value), 0.0
        sizes, strides = tuple(map(fixed, value.shape)), tuple(map(fixed, value.stride()))
        return self.buffer(value), NAMES[value.dtype], fixed(value.storage_offset()), sizes, strides

    def small(self, name: str, *operands: torch.Tensor | float, numbers: Sequence[float] = ()) -> None:
        self.program.add_small(name, [self.operand(value) for value in operands], list(numbers))

    def compare(
        self,
        name: str,
        expected: torch.Tensor,
        *operands: torch.Tensor | float,
        out: torch.Tensor | None = None,
        tolerance: float | None = None,
        numbers: Sequence[float] = (),
    ) -> None:
        """Add an operation, of which `run` compares the result; it is written to `out`, or to memory of its own."""
        out = torch.empty(expected.shape, dtype=expected.dtype) if out is None else out
        self.small(name, out, *operands, numbers=numbers)
        self._expected.append((out, expected, tolerance))

    def run(self, position: int = 0) -> None:
        end = self.program.end_stage()
        self.program.check(position, position, 0)
        self.program.run(position, 0, end)
        for found, expected, tolerance in self._expected:
            equal(found, expected, tolerance)


@pytest.fixture(params=[1, 2])
def rig(request: pytest.FixtureRequest, threaded: dict[int, Runtime]) -> Rig:
    return Rig(threaded[request.param])


@pytest.fixture(scope="module")
def threaded() -> dict[int, Runtime]:
    return {threads: Runtime(threads=threads) for threads in (1, 2)}


def random(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    if dtype.is_floating_point:
        return (2 * torch.randn(shape, generator=generator)).to(dtype)
    return torch.randint(-5, 6, shape, generator=generator).to(dtype)


def strided(shape: Sequence[int], dtype: torch.dtype, form: str, seed: int = 0) -> torch.Tensor:
    """A tensor of `shape` in another form than contiguous."""
    if form == "transposed" and len(shape) > 1:
        return random(tuple(reversed(shape)), dtype, seed).permute(*reversed(range(len(shape))))
    if form == "sliced" and shape:
        return random((*shape[:-1], 2 * shape[-1] + 3), dtype, seed)[..., 2 : 2 + 2 * shape[-1] : 2]
    if form == "broadcast" and shape:
        return random((*shape[:-1], 1), dtype, seed).expand(shape)
    return random(shape, dtype, seed)


def equal(found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    tolerance = TOLERANCE.get(found.dtype, 0.0) if tolerance is None else tolerance
    torch.testing.assert_close(found, expected, rtol=4 * tolerance, atol=tolerance, equal_nan=True)


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy": torch.clone,
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "tanh": torch.tanh,
    "floor": torch.floor,
    "sign": torch.sign,
}
BINARY: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}
LOGICAL = {"and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor}
FORMS = ("contiguous", "transposed", "sliced", "broadcast")


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", UNARY)
def test_a_function_of_one_number(rig: Rig, name: str, dtype: torch.dtype) -> None:
    for shape, form in itertools.product(SHAPES, FORMS):
        x = strided(shape, dtype, form)
        rig.compare(name, UNARY[name](x), x, out=strided(shape, dtype, "transposed" if form == "sliced" else "contiguous", seed=1))
    rig.run()


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", [name for name in UNARY if name not in ("sin", "cos", "gelu")])
def test_a_function_of_what_is_not_finite(rig: Rig, name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0], dtype=dtype)
    rig.compare(name, UNARY[name](x), x)
    rig.run()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=name_of)
@pytest.mark.parametrize("name", BINARY)
def test_a_function_of_two_numbers(rig: Rig, name: str, dtype: torch.dtype) -> None:
    for shape, (one, other) in itertools.product(SHAPES, itertools.product(FORMS, FORMS)):
        a, b = strided(shape, dtype, one), strided(shape, dtype, other, seed=2)
        rig.compare(name, BINARY[name](a, b), a, b)
    rig.run()


@pytest.mark.parametrize("name", ["maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"])
def test_a_comparison_of_what_is_not_finite(rig: Rig, name: str) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])
    a, b = values[:, None].expand(6, 6), values[None].expand(6, 6)
    rig.compare(name, BINARY[name](a, b), a, b)
    rig.run()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_a_rotary_embedding_is_rounded_as_its_parts_are(rig: Rig, dtype: torch.dtype) -> None:
    for batch, heads, tokens, columns in [(1, 32, 1, 128), (2, 3, 5, 6), (1, 1, 1, 2), (2, 40, 1, 34), (1, 2, 3, 1024), (0, 2, 1, 4)]:
        x = random((batch, tokens, heads, columns), dtype).transpose(1, 2)
        cos, sin = (random((batch, 1, tokens, columns), dtype, seed=seed) for seed in (1, 2))
        whole = torch.zeros(batch, heads, tokens, columns + 3, dtype=dtype)
        operands = x, cos.expand(x.shape), sin.expand(x.shape)
        rig.compare("rotary", rotated(x, cos, sin), *operands, out=whole[..., :columns], tolerance=0.0)
    rig.run()


def test_a_rotary_embedding_of_what_is_not_finite(rig: Rig) -> None:
    x = torch.tensor([[math.nan, 1.0, math.inf, -0.0]]).bfloat16()
    cos, sin = torch.tensor([[1.0, 0.5, 0.0, -1.0]]).bfloat16(), torch.tensor([[0.0, 2.0, 3.0, -0.0]]).bfloat16()
    rig.compare("rotary", rotated(x, cos, sin), x, cos, sin, tolerance=0.0)
    rig.run()


def test_rotary_embeddings_of_other_forms_are_refused(threaded: dict[int, Runtime]) -> None:
    x = random((3, 6), torch.float32)
    for operands in ((x, x, x[:, :5], x), (x[:, :5], x[:, :5], x[:, :5], x[:, :5]), (x, x.bfloat16(), x, x), (x.T, x.T, x.T, x.T)):
        refused = Rig(threaded[1])
        refused.small("rotary", *(torch.empty_like(x) if value is x else value for value in operands))
        with pytest.raises(ValueError, match="rotary embedding"):
            refused.run()


def test_functions_of_truth_values_and_integers(rig: Rig) -> None:
    a, b = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    long = torch.tensor([-7, 7, -8, 2**40])
    for name, compute in LOGICAL.items():
        rig.compare(name, compute(a, b), a, b)
    rig.compare("not", ~a, a)
    rig.compare("floor_div", long // 4, long, 4)
    halves = torch.tensor([-7.5, 7.5, -8.0, 2.0])
    rig.compare("floor_div", halves // 2, halves, 2)
    rig.compare("where", torch.where(a, long, 2**40 + 1), a, long, 2**40 + 1)
    odd = torch.tensor([math.nan, 2.0, math.inf, 4.0])
    rig.compare("where", torch.where(b, 1.5, odd), b, 1.5, odd)
    x = torch.tensor([-1.0, 0.5, 19.0, 25.0])
    rig.compare("softplus", functional.softplus(x, beta=2.0, threshold=20.0), x, 2.0, 20.0)
    rig.compare("pow", x.abs().pow(1.5), x.abs(), 1.5)
    rig.run()


@pytest.mark.parametrize("source", NAMES, ids=name_of)
def test_a_copy_to_another_type(rig: Rig, source: torch.dtype) -> None:
    x = random((5, 33), source)
    for target in NAMES:
        rig.compare("copy", x.to(target), x, out=torch.empty(33, 5, dtype=target).T, tolerance=0.0)
    rig.run()


def test_a_result_may_be_an_operand(rig: Rig) -> None:
    x, other = random((3, 1100), torch.float32), random((3, 1100), torch.float32, seed=1)
    expected = (x + other).exp()
    rig.small("add", x, x, other)
    rig.small("exp", x, x)
    rig.run()
    equal(x, expected)


def along_rows(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "softmax":
        return x.softmax(-1)
    if name == "cumsum":
        return x.float().cumsum(-1).to(x.dtype)
    found: torch.Tensor = getattr(x, name)(-1, keepdim=True)
    return found


ROWS = [(1,), (7,), (3, 1), (2, 3, 9), (4, 130), (1, 2, 300)]


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("name", ["softmax", "sum", "mean", "amax", "cumsum"])
def test_an_operation_along_rows(rig: Rig, name: str, dtype: torch.dtype) -> None:
    for shape, form in itertools.product([*ROWS, (0, 4)], FORMS):
        x = strided(shape, dtype, form)
        rig.compare(name, along_rows(name, x), x, tolerance=1e-5 if dtype is torch.float32 else None)
    rig.run()


def test_rows_of_integers(rig: Rig) -> None:
    x = torch.randint(-(2**40), 2**40, (3, 5))
    rig.compare("sum", x.sum(-1, keepdim=True), x)
    rig.compare("amax", x.amax(-1, keepdim=True), x)
    rig.compare("cumsum", x.cumsum(-1), x)
    rig.compare("sum", (x > 0).sum(-1, keepdim=True), x > 0)
    rig.compare("sum", x.sum(-1, keepdim=True, dtype=torch.float32), x, tolerance=1e-5)
    rig.run()


@pytest.mark.parametrize("name", ["softmax", "sum", "mean", "amax", "cumsum"])
def test_rows_of_what_is_not_finite(rig: Rig, name: str) -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([[nan, 1.0, 2.0], [1.0, nan, 2.0], [1.0, 2.0, nan], [-inf, 1.0, 2.0], [-inf, -inf, -inf], [inf, 1.0, 2.0]])
    rig.compare(name, along_rows(name, x), x)
    rig.run()


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("rows", "columns", "chosen"), [(3, 6, 2), (2, 200, 3), (2, 200, 4), (1, 1, 1), (2, 8, 8), (5, 64, 6), (1, 9, 0)])
@pytest.mark.parametrize("values", ["random", "ties", "equal", "nan"])
def test_topk_chooses_as_pytorch_does(rig: Rig, values: str, rows: int, columns: int, chosen: int, dtype: torch.dtype) -> None:
    x = random((rows, columns), dtype)
    if values == "ties":
        x = x.round()
    elif values == "equal":
        x = torch.ones_like(x)
    elif values == "nan":
        x[:, ::3] = math.nan
    results = []
    for largest, ordered in itertools.product((True, False), repeat=2):
        found, ids = torch.empty(rows, chosen, dtype=dtype), torch.empty(rows, chosen, dtype=torch.int64)
        rig.small("topk", found, ids, x, numbers=[largest, ordered])
        results.append((found, ids, x.topk(chosen, largest=largest, sorted=ordered)))
    rig.run()
    for found, ids, expected in results:
        equal(found, expected.values, 0.0)
        assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize("dtype", NAMES, ids=name_of)
def test_gather_and_scatter(rig: Rig, dtype: torch.dtype) -> None:
    x = strided((3, 4, 7), dtype, "transposed")
    index = torch.randint(0, 7, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    rig.compare("gather", x.gather(-1, index), x, index)
    ordered = torch.rand(3, 4, 7, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :5].contiguous()
    values = random((3, 4, 6), dtype, seed=3)
    target, filled = random((3, 4, 7), dtype, seed=4), random((3, 4, 7), dtype, seed=5)
    rig.compare("scatter", target.scatter(-1, ordered, values), ordered, values, out=target, tolerance=0.0)
    rig.compare("scatter", filled.scatter(-1, index, 1), index, out=filled, tolerance=0.0, numbers=[1.0])
    rig.run()


@pytest.mark.parametrize("dtype", NAMES, ids=name_of)
def test_embedding(rig: Rig, dtype: torch.dtype) -> None:
    weight = random((11, 14), dtype)[:, 3:10]
    for index in (torch.tensor([[0, 10, 4]]), torch.tensor([3], dtype=torch.int32), torch.empty(0, dtype=torch.int64), torch.tensor(5)):
        rig.compare("embedding", functional.embedding(index.long(), weight), weight, index, tolerance=0.0)
    rig.run()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16], ids=name_of)
def test_arange(rig: Rig, dtype: torch.dtype) -> None:
    rig.compare("arange", torch.arange(3, 12, dtype=dtype), 3, 1, tolerance=0.0)
    rig.compare("arange", torch.arange(-4, 11, 3, dtype=dtype), -4, 3, out=torch.empty(10, dtype=dtype)[::2], tolerance=0.0)
    rig.compare("arange", torch.empty(0, dtype=dtype), 0, 1)
    rig.run()


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (2, 257)])
def test_a_norm(rig: Rig, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = random((rows, columns), dtype), random((columns,), dtype, seed=1)
    out, plain = torch.empty_like(x), torch.empty_like(x)
    rig.program.add_norm(NormSpec(NAMES[dtype], columns, 1e-5, 1.0), [rig.operand(each) for each in (out, x, weight)])
    rig.program.add_norm(NormSpec(NAMES[dtype], columns, 1e-5), [rig.operand(each) for each in (plain, x)])
    rig.run()
    scaled = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    equal(out, (scaled * (1 + weight.float())).to(dtype), 4 * TOLERANCE[dtype])
    equal(plain, scaled.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("first", [False, True])
def test_a_gated_norm(rig: Rig, threaded: dict[int, Runtime], first: bool, dtype: torch.dtype) -> None:
    """As the call of the runtime, which has tests of its own."""
    spec = NormSpec(NAMES[dtype], 74, 1e-5, rounds_first=True, gate="silu", group=37 if first else 74, gate_first=first)
    x, gate, weight = random((5, 74), dtype), random((5, 74), dtype, seed=1), random((74,), dtype, seed=2)
    out, expected = torch.empty_like(x), torch.empty_like(x)
    operands = [rig.operand(each) for each in (out, x, weight, gate)]
    rig.program.add_norm(spec, operands)
    rig.run()
    threaded[1].norm(spec, x, weight, expected, gate)
    assert torch.equal(out, expected)
    for wrong in (operands[:2], operands[:3], [*operands[:3], rig.operand(gate[:2])]):
        with pytest.raises(ValueError, match="norm"):
            rig.program.add_norm(spec, wrong)
            rig.run()


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", ["plain", "transposed", "broadcast", "rows"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("batch", "rows", "inner", "columns"), [(1, 1, 1, 1), (2, 3, 7, 5), (1, 9, 33, 70), (3, 1, 130, 257), (1, 2, 0, 4)]
)
def test_a_product(rig: Rig, batch: int, rows: int, inner: int, columns: int, biased: bool, layout: str, dtype: torch.dtype) -> None:
    a = random((batch, rows, inner), dtype)
    b = random((batch, inner, columns), dtype, seed=1)
    if layout == "transposed":
        b = random((batch, columns, inner), dtype, seed=1).mT
    elif layout == "broadcast":
        b = random((1, inner, columns), dtype, seed=1).expand(batch, inner, columns)
    elif layout == "rows":
        a, b = (
            random((batch, rows, inner + 3), dtype)[..., 2 : 2 + inner],
            random((batch, inner, columns + 5), dtype, seed=1)[..., :columns],
        )
    bias = random((columns,), dtype, seed=2) if biased else None
    out = torch.full((batch, rows, columns), math.nan, dtype=dtype)
    rig.program.add_matmul([rig.operand(each) for each in (out, a, b, *([] if bias is None else [bias]))])
    rig.run()
    wide = a.double() @ b.double() + (0 if bias is None else bias.double())
    bound = a.double().abs() @ b.double().abs() + 1
    assert bool(((out.double() - wide).abs() <= 2 * TOLERANCE[dtype] * bound).all())


def test_a_product_with_a_bias_for_all_columns(rig: Rig) -> None:
    a, b, bias, out = random((1, 2, 3), torch.float32), random((1, 3, 40), torch.float32), torch.tensor([2.0]), torch.empty(1, 2, 40)
    rig.program.add_matmul([rig.operand(each) for each in (out, a, b, bias)])
    rig.run()
    equal(out, a @ b + 2.0)


def mask_of(kind: str, heads: int, queries: int, keys: int, dtype: torch.dtype) -> torch.Tensor | None:
    shown = torch.ones(queries, keys).tril(keys - queries).bool() & (torch.arange(keys) % 5 != 1)
    if kind == "shown":
        return shown.expand(1, 1, queries, keys).contiguous()
    if kind == "added":
        return random((2, heads, queries, keys), dtype).masked_fill(~shown, -math.inf)
    return None


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("kind", ["none", "causal", "shown", "added"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 37), (3, 40), (60, 61)])
def test_attention(rig: Rig, queries: int, keys: int, kind: str, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, value_dim = 4, 2, 24, 16
    query = random((2, queries, heads, dim), dtype).transpose(1, 2)
    key, value = random((2, kv_heads, keys + 5, dim), dtype, 1)[:, :, :keys], random((2, kv_heads, keys, value_dim), dtype, 2)
    mask = mask_of(kind, heads, queries, keys, dtype)
    sinks = random((heads,), torch.float32, 3)
    found = []
    for sunk in (None, sinks):
        out = torch.full((2, queries, heads, value_dim), math.nan, dtype=dtype)
        reads = [each for each in (out, query, key, value, mask, sunk) if each is not None]
        options = {"mask": mask is not None, "sinks": sunk is not None}
        rig.program.add_attention([rig.operand(each) for each in reads], scale=0.2, softcap=30.0, causal=kind == "causal", **options)
        found.append(out)
    rig.run()
    scores = 0.2 * query.double() @ key.double().repeat_interleave(2, 1).mT
    scores = 30.0 * (scores / 30.0).tanh()
    if kind == "causal":
        scores = scores.masked_fill(~torch.ones(queries, keys).tril(keys - queries).bool(), -math.inf)
    elif mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    for out, sunk in zip(found, (None, sinks), strict=True):
        logits = scores if sunk is None else torch.cat([scores, sunk.double()[None, :, None, None].expand(2, heads, queries, 1)], -1)
        weights = logits.softmax(-1)[..., :keys]
        expected = (weights @ value.double().repeat_interleave(2, 1)).transpose(1, 2)
        assert float((out.double() - expected).norm()) <= 8 * TOLERANCE[dtype] * float(expected.norm())


@pytest.mark.parametrize(("numbers", "message"), [((0.0, 0.0), "scale must be positive"), ((1.0, -1.0), "softcap must be at least 0")])
def test_attention_refuses_the_numbers_that_the_kernel_refuses(rig: Rig, numbers: tuple[float, float], message: str) -> None:
    operands = [rig.operand(torch.zeros(1, 1, 2, 8)) for _ in range(7)]
    scale, softcap = numbers
    with pytest.raises(ValueError, match=message):
        rig.program.add_attention(operands[:4], scale=scale, softcap=softcap, causal=False, mask=False, sinks=False)
    pages = {"page_tokens": 32, "window": 0, "latent": False, "sinks": False, "key_start": 0, "value_start": 0}
    with pytest.raises(ValueError, match=message):
        rig.program.add_paged_attention(operands, scale=scale, softcap=softcap, **pages)


@pytest.mark.parametrize("threads", [1, 2])
def test_sizes_and_numbers_follow_the_position(threaded: dict[int, Runtime], threads: int) -> None:
    """Rows appended to a cache with room, and all of them read again."""
    program, room = Program(threaded[threads]), 32
    cache, new, total, out = torch.zeros(2, room, 3), torch.zeros(2, 1, 3), torch.zeros(2, 1), torch.zeros(1)
    for number, tensor in enumerate((cache, new, total, out)):
        program.bind(number, tensor.view(-1).view(torch.uint8))
    strides = ((0, 0, 3), fixed(3), fixed(1))
    program.add_small(
        "copy",
        [
            (0, "float32", (0, 3, 0), (fixed(2), fixed(1), fixed(3)), strides),
            (1, "float32", fixed(0), (fixed(2), fixed(1), fixed(3)), (fixed(3), fixed(3), fixed(1))),
        ],
    )
    rows = (0, "float32", fixed(1), (fixed(2), (1, 1, 0)), ((0, 0, 3), fixed(3)))
    program.add_small("sum", [(2, "float32", fixed(0), (fixed(2), fixed(1)), (fixed(1), fixed(1))), rows])
    program.add_small("copy", [(3, "float32", fixed(0), (fixed(1),), (fixed(1),)), (10.0, 2.0)])
    end = program.end_stage()
    program.check(0, room - 1, room)
    expected = torch.zeros(2)
    for position in range(room):
        new.copy_(torch.randn(2, 1, 3))
        expected += new[:, 0, 1]
        program.run(position, 0, end)
        torch.testing.assert_close(total[:, 0], expected)
        assert out.item() == 10.0 + 2.0 * position
    with pytest.raises(ValueError, match="was not checked"):
        program.run(room, 0, end)
    with pytest.raises(ValueError, match="leaves buffer 0"):
        program.check(0, room, room)


def test_programs_share_a_runtime_between_threads(threaded: dict[int, Runtime]) -> None:
    """Each on its own memory; the kernels called by themselves as well."""
    runtime = threaded[2]
    linear = PackedLinear(40, 40, "float32")
    linear.pack(torch.eye(40).mul(1.5).numpy())
    failures: list[object] = []

    def work(seed: int) -> None:
        rig, x = Rig(runtime), random((3, 40), torch.float32, seed)
        out, last = torch.empty_like(x), torch.empty_like(x)
        rig.program.add_linears([linear], [rig.operand(x), rig.operand(out)])
        rig.small("add", last, out, 1)
        rig.run()
        for turn in range(200):
            last.zero_()
            rig.program.run(0, 0, rig.program.end_stage())
            if not torch.allclose(last, 1.5 * x + 1):
                failures.append((seed, turn))
            runtime.linear(linear, x, out)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def place(tensor_form: tuple[int, str, int, tuple[int, ...], tuple[int, ...]]) -> tuple[Any, ...]:
    buffer, dtype, offset, sizes, strides = tensor_form
    return buffer, dtype, fixed(offset), tuple(map(fixed, sizes)), tuple(map(fixed, strides))


@pytest.mark.parametrize(
    "operand",
    [
        (0, "float32", 0, (17,), (1,)),
        (0, "float32", 1, (16,), (1,)),
        (0, "float32", -1, (1,), (1,)),
        (0, "float32", 0, (4, 2), (4, 4)),
        (0, "float32", 15, (2, 3), (-7, 1)),
        (0, "int64", 8, (1,), (1,)),
        (0, "float32", 0, (3, -1), (1, 1)),
    ],
    ids=str,
)
def test_an_operand_outside_its_buffer(rig: Rig, operand: Any) -> None:
    assert rig.buffer(torch.zeros(16)) == 0
    form = operand if operand != (0, "float32", 0, (4, 2), (4, 4)) else (0, "float32", 0, (4, 2), (5, 2))
    rig.program.add_small("copy", [place(form), place(form)])
    rig.program.end_stage()
    with pytest.raises(ValueError, match=r"leaves buffer 0|negative size"):
        rig.program.check(0, 0, 0)
    with pytest.raises(ValueError, match="was not checked"):
        rig.program.run(0, 0, 1)


@pytest.mark.parametrize(
    ("offset", "size", "stride", "last"),
    [
        (fixed(0), (0, 1, 0), (9, -1, 0), 9),  # (p - 1) (9 - p) is largest in the middle
        ((-20, 4, 0), (0, 1, 0), fixed(1), 5),  # nothing is read at 0; at 1 it begins before the buffer
    ],
)
def test_an_operand_outside_its_buffer_between_two_positions(rig: Rig, offset: Any, size: Any, stride: Any, last: int) -> None:
    """At both ends of the range, or at one of them, it is within."""
    rig.program.bind(0, torch.zeros(64, dtype=torch.uint8))
    rig.program.bind(1, torch.zeros(4, dtype=torch.uint8))
    x = (0, "float32", offset, (size,), (stride,))
    rig.program.add_small("copy", [(1, "float32", fixed(0), (size,), (fixed(0),)), x])
    rig.program.end_stage()
    with pytest.raises(ValueError, match="leaves buffer 0"):
        rig.program.check(0, last, 0)


def test_spans_of_kernels(rig: Rig) -> None:
    linear = PackedLinear(32, 32, "float32")
    linear.pack(torch.eye(32).numpy())
    x, out = torch.zeros(2, 32), torch.zeros(2, 32)
    rig.program.add_linears([linear], [rig.operand(x), rig.operand(out)])
    rig.small("copy", x, out)
    before = time.perf_counter_ns()
    rig.run()
    after, spent = time.perf_counter_ns(), rig.program.kernel_ns
    (began, ended), none = rig.program.spans()
    assert none == (0, 0)
    assert before <= began <= ended <= after
    assert spent == ended - began


def test_buffers_that_are_not_bound(rig: Rig) -> None:
    rig.program.add_small("copy", [place((3, "float32", 0, (1,), (1,))), (1.0, 0.0)])
    end = rig.program.end_stage()
    with pytest.raises(ValueError, match="buffer 3 is not bound"):
        rig.program.check(0, 0, 0)
    rig.program.bind(3, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="was not checked"):
        rig.program.run(0, 0, end)
    rig.program.check(0, 5, 0)
    for position, first, last in ((6, 0, end), (-1, 0, end)):
        with pytest.raises(ValueError, match="was not checked"):
            rig.program.run(position, first, last)
    for first, last in ((0, end + 1), (-1, end), (end, 0)):
        with pytest.raises(ValueError, match="no such stages"):
            rig.program.run(0, first, last)
    rig.program.bind(3, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="was not checked"):
        rig.program.run(0, 0, end)
    for number in (-1, 2**30):
        with pytest.raises(ValueError, match="out of range"):
            rig.program.bind(number, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        rig.program.bind(3, torch.zeros(1, dtype=torch.uint8).expand(1000))
    for first, last in ((-1, 0), (4, 3)):
        with pytest.raises(ValueError, match="no position"):
            rig.program.check(first, last, 0)


def test_a_bound_buffer_has_bytes(rig: Rig) -> None:
    """Its elements are counted as bytes, never more."""
    rig.program.add_small("copy", [place((0, "float32", 0, (16,), (1,))), (1.0, 0.0)])
    rig.program.end_stage()
    rig.program.bind(0, torch.zeros(4, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="leaves buffer"):
        rig.program.check(0, 0, 0)
    for scalar in (torch.tensor(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"bytes|leaves buffer|not bound"):
            rig.program.bind(0, scalar)
            rig.program.check(0, 0, 0)


def test_operations_added_after_the_check_are_checked(rig: Rig) -> None:
    x = torch.zeros(4)
    rig.small("copy", x, 1.0)
    rig.run()
    rig.small("copy", x, 2.0)
    end = rig.program.end_stage()
    with pytest.raises(ValueError, match="was not checked"):
        rig.program.run(0, 0, end)
    rig.program.check(0, 0, 0)
    rig.program.run(0, 0, end)
    assert x.tolist() == [2.0] * 4


X, IDS = torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "operands", "numbers"),
    [
        ("no_such_function", (X, X), ()),
        ("copy", (X,), ()),
        ("copy", (X, X, X), ()),
        ("copy", (1.0, X), ()),
        ("copy", (X, X[0]), ()),
        ("copy", (X, X[:, :3]), ()),
        ("add", (X, X), ()),
        ("where", (X, X, X), ()),
        ("softmax", (X, X[:, :3]), ()),
        ("softmax", (X, 1.0), ()),
        ("softmax", (X[0, 0], X[0, 0]), ()),
        ("sum", (X, X), ()),
        ("amax", (X[:, :1], torch.zeros(2, 0)), ()),
        ("mean", (X[:, :1], IDS), ()),
        ("topk", (X, IDS, X), ()),
        ("topk", (X, IDS, X[:, :3]), (1, 1)),
        ("topk", (X, X, X), (1, 1)),
        ("gather", (X, X, X), ()),
        ("gather", (X, IDS, IDS), ()),
        ("gather", (X, X[:1], IDS), ()),
        ("scatter", (X, X), (1,)),
        ("scatter", (X, IDS, X[:, :2]), ()),
        ("scatter", (X, IDS), ()),
        ("cumsum", (X, X[:, :2]), ()),
        ("arange", (X, 0.0, 1.0), ()),
        ("arange", (X[0], X[0], 1.0), ()),
        ("arange", (X[0], 1.0), ()),
        ("arange", (1.0, 1.0, 1.0), ()),
        ("embedding", (X, X), ()),
        ("embedding", (X, X, X), ()),
        ("embedding", (X, X, IDS), ()),
        ("embedding", (X, 1.0, IDS), ()),
        ("embedding", (X[:, :1], X, 1.0), ()),
        ("embedding", (1.0, X[:, :1], IDS[:1, :1]), ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_form(rig: Rig, name: str, operands: tuple[Any, ...], numbers: tuple[float, ...]) -> None:
    with pytest.raises((ValueError, IndexError)):
        rig.small(name, *operands, numbers=numbers)
        rig.run()


@pytest.mark.parametrize(
    "operands",
    [
        (X[None], X[None, :, :3], X[None]),
        (X[None], X[None], X[None]),
        (X[None, :, :2], X[None], X.mT[None], IDS[0, :2]),
        (X[None, :, :2], X[None], X.mT[None], X[0, :3]),
        (X[None, :, :2], X[None], X.mT[None], X[:, :2]),
        (X[None, :, :2], X[None], X.mT[None], 1.0),
        (X[None, :, :2], X[None], X.mT[None], torch.zeros(2, dtype=torch.float16)),
        (IDS[None, :, :2], IDS[None], IDS.mT[None]),
        (X[None, :, :2], X[None], torch.zeros(1, 8, 4)[:, ::2, ::2]),
        (X[:, :2], X, X.mT),
        (1.0, X[None], X.mT[None]),
    ],
)
def test_a_wrong_product(rig: Rig, operands: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"product|kernel|matmul"):
        rig.program.add_matmul([rig.operand(each) for each in operands])
        rig.run()


def test_wrong_kernels(rig: Rig, threaded: dict[int, Runtime]) -> None:
    linear = PackedLinear(8, 4, "float32")
    x, out = torch.zeros(2, 4), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="before its weights were packed"):
        rig.program.add_linears([linear], [rig.operand(x), rig.operand(out)])
    linear.pack(torch.zeros(8, 4).numpy())
    other = PackedLinear(8, 5, "float32")
    other.pack(torch.zeros(8, 5).numpy())
    with pytest.raises(ValueError, match="differ in form"):
        rig.program.add_linears([linear, other], [rig.operand(each) for each in (x, out, out)])
    for operands in ((x,), (), (x, out, out)):
        with pytest.raises((ValueError, IndexError)):
            rig.program.add_linears([linear], [rig.operand(each) for each in operands])
    with pytest.raises((ValueError, IndexError)):
        rig.program.add_linears([], [])
    for found in (torch.zeros(2, 7), torch.zeros(3, 8), torch.zeros(8, 2).T, torch.zeros(2, 8, dtype=torch.float16)):
        other_rig = Rig(threaded[1])
        other_rig.program.add_linears([linear], [other_rig.operand(x), other_rig.operand(found)])
        with pytest.raises(ValueError, match=r"linear layer|kernel"):
            other_rig.run()
    dense = make_layer(num_experts=4, hidden=32, intermediate=32, weight_type="int8")
    batch = make_batch(2, 2, dense)
    operands = [rig.operand(each) for each in (batch[0], *batch)]
    for threshold, counts in ((0.5, None), (0.0, np.zeros(2, np.int64))):
        with pytest.raises(ValueError, match="no threshold and count no neurons"):
            rig.program.add_experts(dense.packed, operands, threshold, counts)
    sparse = make_layer(num_experts=4, hidden=32, intermediate=32, weight_type="int8", sparse=True)
    for threshold in (-1.0, math.nan):
        with pytest.raises(ValueError, match="threshold"):
            rig.program.add_experts(sparse.packed, operands, threshold)
    with pytest.raises(ValueError, match="neuron_counts"):
        rig.program.add_experts(sparse.packed, operands, 0.5, np.zeros(3, np.int64))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["embedding", "gather", "scatter"])
def test_an_error_within_a_run_leaves_the_program_usable(threaded: dict[int, Runtime], name: str, threads: int) -> None:
    """An index out of range, in the second of three stages."""
    rig = Rig(threaded[threads])
    x, first, last, out = random((2, 32), torch.float32), torch.zeros(2, 32), torch.zeros(2, 32), torch.zeros(2, 32)
    linear = PackedLinear(32, 32, "float32")
    linear.pack(torch.eye(32).numpy())
    rig.program.add_linears([linear], [rig.operand(x), rig.operand(first)])
    ids = torch.zeros(2, 32, dtype=torch.int64)
    chosen = ids
    if name == "embedding":
        chosen = torch.zeros(2, dtype=torch.int64)
        rig.small("embedding", out, first, chosen)
    else:
        rig.small(name, *((out, first, ids) if name == "gather" else (out, ids, first)))
    rig.program.add_linears([linear], [rig.operand(out), rig.operand(last)])
    rig.run()
    expected = last.clone()
    kept = chosen.clone()
    for wrong in (-1, 64, 2**62, -(2**63)):
        chosen.view(-1)[-1] = wrong
        last.fill_(7.0)
        with pytest.raises(ValueError, match="out of range"):
            rig.program.run(0, 0, 3)
        assert bool((last == 7.0).all())
        chosen.copy_(kept)
        for _ in range(20):
            rig.program.run(0, 0, 3)
            assert torch.equal(last, expected)


def test_experts_that_there_are_not(rig: Rig) -> None:
    """-1 and the number of experts are padding, as in the runtime; other ids are refused."""
    layer = make_layer(num_experts=4, hidden=32, intermediate=32)
    x, index, weights = make_batch(3, 2, layer)
    out = torch.full_like(x, math.nan)
    rig.program.add_experts(layer.packed, [rig.operand(each) for each in (out, x, index, weights)])
    index[0, 0], index[1] = -1, 4
    rig.run()
    assert torch.equal(out[1], torch.zeros(32))
    assert torch.isfinite(out).all()
    for wrong in (-2, 5, 2**62):
        index[2, 1] = wrong
        with pytest.raises(ValueError, match="expert ids are"):
            rig.program.run(0, 0, 1)
    index[2, 1] = -1
    rig.program.run(0, 0, 1)
    assert torch.isfinite(out).all()


class LoopRig(Rig):
    """A program whose token chooses a row of `table` as its logits, with a position that counts."""

    def __init__(self, runtime: Runtime, table: torch.Tensor) -> None:
        super().__init__(runtime)
        self.token, self.position = torch.zeros(1, dtype=torch.int64), torch.full((3, 1), 5)
        self.logits = torch.empty(1, table.shape[1], dtype=table.dtype)
        self.small("embedding", self.logits, table, self.token)
        self.program.end_stage()
        self.program.set_loop([self.operand(each) for each in (self.logits, self.token, self.position)])
        self.program.check(0, 100, 0)

    def greedy(self, token: int, count: int = 1, ends: Sequence[int] = (), longest_ns: int = 10**12) -> list[int]:
        return self.program.greedy(0, token, count, ends, longest_ns)


VOCABULARIES = [1, 2, 15, 16, 17, 1000, 1023, 1024, 1025, 1040, 2048, 2049, 5003]  # around lanes of 16 and strips of 1024


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_likeliest_token(threaded: dict[int, Runtime], vocabulary: int, dtype: torch.dtype) -> None:
    """The first of equal ones or the first that is not a number, as PyTorch's argmax, at every border of lanes and strips."""
    inf, nan, last = math.inf, math.nan, vocabulary - 1
    rows = [random((vocabulary,), dtype, seed) for seed in range(6)]
    rows += [torch.full((vocabulary,), value, dtype=dtype) for value in (-inf, inf, nan, 0.0, -0.0, -3.0)]
    rows += [random((vocabulary,), dtype, 7).round(), -random((vocabulary,), dtype, 8).abs() - 1]
    places = sorted({place for place in (0, 1, 15, 16, 17, 1007, 1023, 1024, 1025, 2047, 2048, last - 1, last) if 0 <= place <= last})
    for place in places:
        for value, after in ((9.0, 9.0), (9.0, -inf), (inf, inf), (nan, inf), (inf, nan), (-1.0, -1.0), (nan, nan), (-0.0, 0.0)):
            row = torch.full((vocabulary,), -inf if value < 1 else -2.0, dtype=dtype)
            row[place + 1 :: 3] = after
            row[place] = value
            rows.append(row)
    table = torch.stack(rows)
    rig = LoopRig(threaded[1], table)
    found = [rig.greedy(token)[0] for token in range(len(rows))]
    for row, token in zip(rows, found, strict=True):
        isnan = row.isnan().nonzero()
        assert token == int(isnan[0] if isnan.numel() else (row == row.max()).nonzero()[0])
        assert token == int(row.argmax()) or int((row == row.max()).sum()) > 1  # PyTorch may return any of equal ones
    found_logits = np.empty((1, vocabulary), np.float32)
    for token in (0, 7, len(rows) - 1):
        rig.program.follow(3, [token], found_logits)
        assert torch.equal(torch.from_numpy(found_logits[0]).nan_to_num(7.0), table[token].float().nan_to_num(7.0))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_loop_feeds_each_token_after_the_other(threaded: dict[int, Runtime], threads: int) -> None:
    """A cycle through all 101 tokens."""
    size = 101
    following = torch.randperm(size, generator=torch.Generator().manual_seed(1)).roll(1)
    table = torch.zeros(size, size)
    table[torch.arange(size), following] = 1.0
    expected = [int(following[3])]
    while len(expected) < 50:
        expected.append(int(following[expected[-1]]))
    rig = LoopRig(threaded[threads], table)
    assert rig.greedy(3, 0) == []
    assert rig.greedy(3, -4) == []
    assert (rig.position.flatten().tolist(), rig.program.fed) == ([5, 5, 5], 0)
    assert rig.program.step_ns == []
    assert rig.greedy(3, 50) == expected
    assert len(rig.program.step_ns) == 50 and min(rig.program.step_ns) > 0
    assert rig.position.flatten().tolist() == [55, 55, 55], "each step counts"
    assert rig.program.fed == 50
    assert int(rig.token) == expected[-2]
    repeated = expected.index(expected[20])
    assert rig.greedy(3, 50, [expected[20], 1000, -1]) == expected[: repeated + 1]
    assert rig.greedy(3, 50, [expected[0]]) == expected[:1]
    assert rig.greedy(3, 50, [3]) == expected[: expected.index(3) + 1] if 3 in expected else expected  # the token that is fed ends nothing
    assert rig.greedy(3, 50, longest_ns=0) == expected[:1], "the first is computed in any case"


def test_a_loop_of_several_sequences(threaded: dict[int, Runtime]) -> None:
    table = random((7, 5), torch.bfloat16, 3)
    rig = Rig(threaded[2])
    tokens, positions, logits = torch.zeros(3, dtype=torch.int64), torch.tensor([4, 9, 2]), torch.empty(3, 5, dtype=table.dtype)
    rig.small("embedding", logits, table, tokens)
    rig.program.end_stage()
    rig.program.set_loop([rig.operand(each) for each in (logits, tokens, positions)])
    rig.program.check(0, 100, 0)
    rig.program.run(5, 0, 1)
    found = np.empty((3, 5), np.float32)
    rig.program.follow(6, [5, 0, 6], found)
    assert torch.equal(torch.from_numpy(found), table[[5, 0, 6]].float())
    assert (tokens.tolist(), positions.tolist()) == ([5, 0, 6], [5, 10, 3])
    for wrong in ([1, 2], [1, 2, 3, 4], []):
        with pytest.raises(ValueError, match="as many as the loop feeds"):
            rig.program.follow(6, wrong, found)
    with pytest.raises(ValueError, match="of one sequence"):
        rig.program.greedy(6, 0, 1, [], 10**12)


def test_a_loop_may_go_back_and_gives_logits_of_some_tokens(threaded: dict[int, Runtime]) -> None:
    """As a draft is drawn, and drawn again behind the tokens that stand: three tokens, of which the last one has logits."""
    table = random((7, 5), torch.float32, 3)
    rig = Rig(threaded[2])
    tokens, positions, rows = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2]), torch.empty(3, 5)
    logits = torch.empty(1, 5)
    rig.small("embedding", rows, table, tokens)
    rig.small("copy", logits, rows[2:])
    rig.program.end_stage()
    rig.program.set_loop([rig.operand(each) for each in (logits, tokens, positions)])
    rig.program.check(0, 100, 0)
    rig.program.run(0, 0, 1)
    found = np.empty((1, 5), np.float32)
    for position in (1, 4, 2, 2, 40):
        rig.program.follow(position, [5, 0, position % 7], found)
        assert torch.equal(torch.from_numpy(found), table[[position % 7]])
        assert (tokens.tolist(), positions.tolist()) == ([5, 0, position % 7], [position, position + 1, position + 2])


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_a_loop_gives_the_states_of_each_step(threaded: dict[int, Runtime], dtype: torch.dtype) -> None:
    states, table = random((5, 3), dtype, 1), torch.zeros(5, 5)
    table[torch.arange(5), (torch.arange(5) + 1) % 5] = 1.0  # each token is followed by the next one
    rig = Rig(threaded[1])
    token, hidden, logits = torch.zeros(1, dtype=torch.int64), torch.empty(1, 3, dtype=dtype), torch.empty(1, 5)
    rig.small("embedding", hidden, states, token)
    rig.small("embedding", logits, table, token)
    rig.program.end_stage()
    rig.program.set_loop([rig.operand(each) for each in (logits, token)], rig.operand(hidden))
    rig.program.check(0, 100, 0)
    found = torch.full((1, 8, 3), 7.0, dtype=dtype)
    assert rig.program.greedy(0, 3, 7, [], 10**12, found.view(torch.uint8).flatten()) == [4, 0, 1, 2, 3, 4, 0]
    assert torch.equal(found[0, :7], states[[3, 4, 0, 1, 2, 3, 4]])
    assert found[0, 7].tolist() == [7.0] * 3, "as many as were asked for"
    with pytest.raises(ValueError, match="bytes for the states of each step"):
        rig.program.greedy(0, 3, 9, [], 10**12, found.view(torch.uint8).flatten())
    assert rig.program.greedy(0, 3, 2, [], 10**12) == [4, 0], "without them"
    plain = LoopRig(threaded[1], table)
    with pytest.raises(ValueError, match="no hidden states"):
        plain.program.greedy(0, 3, 1, [], 10**12, found.view(torch.uint8).flatten())


def test_a_loop_that_fails(threaded: dict[int, Runtime]) -> None:
    table = torch.zeros(4, 6)
    table[:, 5] = 1.0  # a token that has no row
    rig = LoopRig(threaded[1], table)
    for token in (5, -1, 2**62):
        with pytest.raises(ValueError, match="out of range"):
            rig.greedy(token)
        with pytest.raises(ValueError, match="out of range"):
            rig.program.follow(0, [token], np.empty((1, 6), np.float32))
    assert rig.program.fed == 0
    with pytest.raises(ValueError, match="out of range"):
        rig.greedy(0, 3)  # the second
    assert rig.program.fed == 1
    for position in (-1, 101):
        with pytest.raises(ValueError, match="was not checked"):
            rig.program.greedy(position, 0, 1, [], 10**12)
        with pytest.raises(ValueError, match="was not checked"):
            rig.program.follow(position, [0], np.empty((1, 6), np.float32))
    table[:, 5] = 0.0
    with pytest.raises(ValueError, match="was not checked"):
        rig.program.greedy(98, 0, 4, [], 10**12)  # its fourth position
    assert rig.greedy(0, 3) == [0, 0, 0]
    for wrong in (np.empty((1, 5), np.float32), np.empty(6, np.float32), np.empty((2, 3), np.float32), np.empty((), np.float32)):
        with pytest.raises(ValueError, match="logits are"):
            rig.program.follow(0, [0], wrong)
    for unfit in (np.empty((1, 6), np.float64), np.empty((1, 12), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            rig.program.follow(0, [0], unfit)


def test_wrong_operands_of_a_loop(threaded: dict[int, Runtime]) -> None:
    token, logits = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 8)
    for operands in (
        (),
        (logits,),
        (logits, torch.zeros(1)),
        (logits, torch.zeros(1, dtype=torch.int32)),
        (logits, token, torch.zeros(1)),
        (torch.zeros(8, dtype=torch.int64), token),
        (torch.zeros(8, dtype=torch.bool), token),
        (1.0, token),
        (logits, 1.0),
        (logits, token, 1.0),
        (logits, torch.zeros(2, dtype=torch.int64)),
        (logits, torch.zeros(0, dtype=torch.int64)),
        (torch.zeros(1, 0), token),
        (torch.zeros(8, 2)[:, 0], token),
        (logits, token, torch.zeros(4, 2, dtype=torch.int64)[:, 0]),
    ):
        rig = Rig(threaded[1])
        rig.small("copy", logits, 1.0)
        with pytest.raises(ValueError):
            rig.program.set_loop([rig.operand(each) for each in operands])
            rig.run()
            rig.program.greedy(0, 0, 1, [], 10**12)
    rig = Rig(threaded[1])
    rig.small("copy", logits, 1.0)
    rig.run()
    for call in (lambda: rig.program.greedy(0, 0, 1, [], 10**12), lambda: rig.program.follow(0, [0], np.empty((1, 0), np.float32))):
        with pytest.raises(ValueError, match="no loop"):
            call()
    rig.program.set_loop([rig.operand(each) for each in (logits, token)])
    with pytest.raises(ValueError, match="was not checked"):
        rig.program.greedy(0, 0, 1, [], 10**12)


def test_an_integer_division_by_zero(rig: Rig) -> None:
    x = torch.tensor([4, 5])
    rig.small("floor_div", x, x, 0)
    with pytest.raises(ValueError, match="division by zero"):
        rig.run()


def paced(pace: Pace, runs: int, shared_us: Callable[[int], float], alone_us: float) -> list[bool]:
    """Which of the runs are computed by one thread, where a shared run `i` and one alone take these times."""
    chosen = []
    for run in range(runs):
        chosen.append(pace.alone)
        pace.took(int(1e3 * (alone_us if pace.alone else shared_us(run))))
    return chosen


def waiting(run: int) -> float:
    """A short run in four finds all threads on a core; the others wait for a time slice."""
    return 400 if run % 4 == 0 else 4000


def test_runs_are_shared_out_on_a_quiet_machine() -> None:
    assert not any(paced(Pace(2), 3000, lambda run: 400 + run % 7 * 40, 300))


def test_one_thread_never_waits() -> None:
    assert not any(paced(Pace(1), 3000, waiting, 1))


def test_one_thread_computes_while_others_wait_for_cores() -> None:
    chosen = paced(Pace(2), 4000, waiting, 900)
    assert not chosen[0] and sum(chosen) > 0.9 * len(chosen)
    assert not all(chosen[1000:]), "all threads are tried again"


def test_all_threads_compute_again_on_cores_that_are_free() -> None:
    pace = Pace(2)
    assert any(paced(pace, 2000, waiting, 900))
    assert not any(paced(pace, 4000, lambda _: 400, 700)[2000:])


def test_one_thread_that_is_slower_is_hardly_tried() -> None:
    chosen = paced(Pace(2), 2000, lambda run: 5000 if run % 2 else 20000, 40000)
    assert 0 < sum(chosen) < 0.05 * len(chosen)


def test_one_thread_is_not_tried_where_it_cannot_be_faster() -> None:
    """Of 32, each thread's share is small: what the longest wait costs is less than what one thread would."""
    assert not any(paced(Pace(32), 2000, waiting, 9000))
