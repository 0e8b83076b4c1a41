"""Calls of the kernels with random shapes, strides, dtypes, ids and values: right, or refused by TypeError or ValueError; nothing else.

    pytest tests/cpu_backend/test_random_calls.py              # 200 calls for each instruction set
    pytest --long tests/cpu_backend/test_random_calls.py       # 20,000; with sanitizers: test_sanitizers.py

Outputs have guards around them, so that a write outside shows without sanitizers too. A NaN or an infinity in one row changes no other row.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.kernel_cases import ROUNDING, TOLERANCE, WEIGHT_TYPES, as_array, make_batch, make_layer, relative_error

from moegraft.cpu_backend import GateSpec, NormSpec, PackedLinear, RouterSpec, Runtime, activations

Array = NDArray[Any]
SHORT, LONG, CHUNK = 200, 20_000, 1000
GUARD = 64  # bytes on each side
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ODD = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100, 129)
SPECIAL = (float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 3e38, 0.0, -0.0)


class Guarded:
    """An output with bytes around it that must stay."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self._bytes = np.full(size + 2 * GUARD, 0xA5, np.uint8)
        self._end = GUARD + size
        self.array: Array = self._bytes[GUARD : self._end].view(dtype).reshape(shape)

    @property
    def whole(self) -> bool:
        return bool((self._bytes[:GUARD] == 0xA5).all() and (self._bytes[self._end :] == 0xA5).all())


def tensor_of(array: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(dtype).clone() if dtype is torch.bfloat16 else torch.from_numpy(array.copy())


def strided(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Return equal values in memory with gaps, the last dimension contiguous."""
    if tensor.dim() < 2 or chance.random() < 0.6:
        return tensor
    wide = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] + chance.randint(1, 9)))
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def damaged(arguments: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Change one argument; most changes are mistakes."""
    name = chance.choice(sorted(arguments))
    value = arguments[name]
    if not isinstance(value, np.ndarray):
        return {**arguments, name: chance.choice([None, -1, float("nan"), "x", value])}
    changed: Any
    match chance.randrange(8):
        case 0:
            changed = value.astype(chance.choice([np.float64, np.int32, np.int64, np.uint16, np.float32, np.bool_]))
        case 1:
            changed = value[..., : max(0, value.shape[-1] - 1)]
        case 2:
            changed = value[:-1] if len(value) else value
        case 3:
            changed = np.asfortranarray(value) if value.ndim > 1 else value[::2]
        case 4:
            changed = value[None]
        case 5:
            changed = np.empty((0, *value.shape[1:]), value.dtype)
        case 6:
            changed = value[::-1]
        case _:
            changed = value.copy()
            if value.dtype == np.int64 and value.size:
                changed.flat[chance.randrange(value.size)] = chance.choice((-2, -(2**63), 2**31, 2**40, 10**6))
    return {**arguments, name: changed}


def _run(call: Callable[..., None], arguments: dict[str, Any], out: list[Guarded], chance: random.Random) -> bool:
    """Call, sometimes with a mistake; return whether the result is that of the right call."""
    if chance.random() < 0.4:
        with np.errstate(all="ignore"):
            changed = damaged(arguments, chance)
        with suppress(TypeError, ValueError):
            call(**changed)
        assert all(each.whole for each in out), "a write outside of an output"
        return False
    call(**arguments)
    assert all(each.whole for each in out), "a write outside of an output"
    return True


def _others_equal(call: Callable[[Array], Array], x: torch.Tensor, chance: random.Random) -> None:
    """A special value in row r of `x` (T, ...) changes no other row of the result (T, ...)."""
    usual = call(as_array(x)).copy()
    row = chance.randrange(len(x))
    special = x.clone()
    special[row, ..., chance.randrange(x.shape[-1])] = chance.choice(SPECIAL)
    found = call(as_array(special))
    others = [other for other in range(len(x)) if other != row]
    assert np.array_equal(found[others].view(np.uint8), usual[others].view(np.uint8)), "a value in one row changes another"


def experts(runtime: Runtime, chance: random.Random) -> None:
    weight_type, dtype = chance.choice(WEIGHT_TYPES), chance.choice(list(DTYPES.values()))
    count, top_k = chance.choice((1, 2, 3, 8)), chance.randint(1, 3)
    gated, sparse = chance.random() < 0.7, chance.random() < 0.3
    spec = GateSpec(chance.choice(activations())) if gated else GateSpec("relu")
    seed = chance.randrange(1000)
    layer = make_layer(
        weight_type,
        count,
        chance.choice(ODD),
        chance.choice(ODD),
        gated=gated,
        bias=chance.random() < 0.3,
        spec=spec,
        sparse=sparse,
        seed=seed,
    )
    tokens = chance.choice((0, 1, 2, 3, 9, 33))
    x, index, weights = make_batch(tokens, min(top_k, count), layer, dtype, seed)
    if index.numel() and chance.random() < 0.3:
        index.view(-1)[chance.randrange(index.numel())] = chance.choice((-1, count))
    out = Guarded(tuple(x.shape), as_array(x).dtype)
    arguments = {"hidden_states": as_array(x), "top_k_index": index.numpy(), "top_k_weights": weights.numpy(), "out": out.array}
    if not _run(lambda **given: runtime.forward(layer.packed, **given), arguments, [out], chance) or not tokens:
        return
    expected = layer.reference(x, index, weights)
    scale = float(layer.reference(x.abs(), index, weights).norm())
    off = float((tensor_of(out.array, dtype).double() - expected).norm()) / max(float(expected.norm()), 0.05 * scale, 1e-30)
    assert off <= 4 * TOLERANCE[weight_type] + 2 * ROUNDING[dtype], f"{weight_type} {dtype} {layer.shape} off by {off:.1e}"

    def call(states: Array) -> Array:
        runtime.forward(layer.packed, states, index.numpy(), weights.numpy(), out.array)
        return out.array

    _others_equal(call, x, chance)


def linears(runtime: Runtime, chance: random.Random) -> None:
    weight_type, dtype = chance.choice(("float16", "bfloat16", "int8", "int4")), chance.choice(list(DTYPES.values()))
    rows, cols, tokens = chance.choice(ODD), chance.choice(ODD), chance.choice((0, 1, 2, 5, 17, 65))
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    packed = PackedLinear(rows, cols, weight_type)
    packed.pack((torch.randn(rows, cols, generator=generator) / cols**0.5).numpy())
    x = torch.randn(tokens, cols, generator=generator).to(dtype)
    out = Guarded((tokens, rows), as_array(x).dtype)
    if not _run(lambda **given: runtime.linear(packed, **given), {"x": as_array(x), "out": out.array}, [out], chance) or not tokens:
        return
    weight = torch.from_numpy(packed.unpack()).double()
    expected, scale = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    off = float((tensor_of(out.array, dtype).double() - expected).norm() / (expected.norm() + 0.05 * scale.norm()))
    assert off <= 2 * TOLERANCE[weight_type] + 2 * ROUNDING[dtype], f"{weight_type} {dtype} ({rows}, {cols}) off by {off:.1e}"

    def call(states: Array) -> Array:
        runtime.linear(packed, states, out.array)
        return out.array

    _others_equal(call, x, chance)


def norms(runtime: Runtime, chance: random.Random) -> None:
    name = chance.choice(sorted(DTYPES))
    cols, tokens = chance.choice(ODD), chance.choice((0, 1, 3, 20))
    x, weight = torch.randn(tokens, cols).to(DTYPES[name]), torch.randn(cols).to(DTYPES[name])
    spec = NormSpec(name, cols, chance.choice((0.0, 1e-6)), chance.choice((0.0, 1.0)), chance.random() < 0.5)
    out = Guarded((tokens, cols), as_array(x).dtype)
    arguments = {"x": as_array(x), "weight": as_array(weight), "out": out.array}
    if _run(lambda **given: runtime.norm(spec, **given), arguments, [out], chance) and tokens:

        def call(states: Array) -> Array:
            runtime.norm(spec, states, as_array(weight), out.array)
            return out.array

        _others_equal(call, x, chance)


def routers(runtime: Runtime, chance: random.Random) -> None:
    name = chance.choice(sorted(DTYPES))
    hidden, count, tokens = chance.choice(ODD), chance.choice((1, 2, 6, 16, 33)), chance.choice((0, 1, 2, 8))
    groups = chance.choice([number for number in (1, 2, 3) if count % number == 0])
    top_k = chance.randint(1, count // groups)
    spec = RouterSpec(
        hidden, count, top_k, element_type=name, logits_type="float32", weights_type="float32", groups=groups, kept_groups=1,
        score=chance.choice(("softmax", "sigmoid")), group_score="largest", normalise=chance.random() < 0.5,
    )  # fmt: skip
    x, weight = torch.randn(tokens, hidden).to(DTYPES[name]), torch.randn(count, hidden).to(DTYPES[name])
    f4 = np.dtype(np.float32)
    logits, weights, index = Guarded((tokens, count), f4), Guarded((tokens, top_k), f4), Guarded((tokens, top_k), np.dtype(np.int64))
    arguments = {"x": as_array(x), "weight": as_array(weight), "logits": logits.array, "weights": weights.array, "index": index.array}
    if not _run(lambda **given: runtime.route(spec, **given), arguments, [logits, weights, index], chance) or not tokens:
        return
    expected = x.double() @ weight.double().T
    assert relative_error(torch.from_numpy(logits.array.copy()), expected) <= 1e-5
    special = x.clone()
    special[0, 0] = chance.choice(SPECIAL)
    runtime.route(spec, as_array(special), as_array(weight), logits.array, weights.array, index.array)
    assert ((index.array >= 0) & (index.array < count)).all(), "a choice that is no expert"


def attentions(runtime: Runtime, chance: random.Random) -> None:
    dtype = chance.choice(list(DTYPES.values()))
    batch, heads_each, kv_heads = chance.choice((1, 2)), chance.choice((1, 2, 3)), chance.choice((1, 2))
    queries, keys = chance.choice((1, 2, 7, 33)), chance.choice((1, 3, 17, 65))
    width, value_width = chance.choice((8, 16, 24, 64)), chance.choice((8, 16, 40))
    generator = torch.Generator().manual_seed(chance.randrange(1000))

    def draw(*shape: int) -> torch.Tensor:
        return strided(torch.randn(*shape, generator=generator).to(dtype), chance)

    query, key, value = (
        draw(batch, kv_heads * heads_each, queries, width),
        draw(batch, kv_heads, keys, width),
        draw(batch, kv_heads, keys, value_width),
    )
    out = Guarded((batch, queries, kv_heads * heads_each, value_width), as_array(query).dtype)
    arguments: dict[str, Any] = {"query": as_array(query), "key": as_array(key), "value": as_array(value), "out": out.array}
    arguments |= {"scale": width**-0.5, "causal": chance.random() < 0.5 and queries <= keys, "softcap": chance.choice((0.0, 0.0, 5.0))}
    if not _run(lambda **given: runtime.attention(**given), arguments, [out], chance) or arguments["causal"] or arguments["softcap"]:
        return
    spread = [each.double().repeat_interleave(heads_each, 1) for each in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query.double(), *spread).transpose(1, 2)
    assert relative_error(tensor_of(out.array, dtype), expected) <= {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def products(runtime: Runtime, chance: random.Random) -> None:
    dtype = chance.choice(list(DTYPES.values()))
    batch, rows, inner, cols = chance.choice((1, 2)), chance.choice((1, 2, 8)), chance.choice(ODD), chance.choice(ODD)
    a, b = torch.randn(batch, rows, inner).to(dtype), torch.randn(batch, inner, cols).to(dtype)
    turned = b.transpose(1, 2).contiguous().transpose(1, 2) if chance.random() < 0.5 else b
    out = Guarded((batch, rows, cols), as_array(a).dtype)
    right = {"a": as_array(strided(a, chance)), "b": as_array(turned), "out": out.array}
    if _run(lambda **given: runtime.matmul(**given), right, [out], chance):
        expected = a.double() @ b.double()
        scale = a.double().abs() @ b.double().abs()
        off = float((tensor_of(out.array, dtype).double() - expected).norm() / (expected.norm() + 0.05 * scale.norm()))
        assert off <= 1e-5 + 2 * ROUNDING[dtype]


CALLS = (experts, experts, linears, norms, routers, attentions, products)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        count = LONG if metafunc.config.getoption("--long") else SHORT
        chunks = [(isa, first, min(CHUNK, count - first)) for isa in Runtime.available_isas() for first in range(0, count, CHUNK)]
        metafunc.parametrize(("isa", "first", "count"), chunks)


def test_random_calls(isa: str, first: int, count: int) -> None:
    """On one thread, on the runtime's own threads, and one call in eight on PyTorch's, which wait for work at the cost of all others."""
    one, own, shared = Runtime(1, isa), Runtime(2, isa, share_threads=False), Runtime(2, isa)
    for number in range(first, first + count):
        chance = random.Random(number)
        torch.manual_seed(number)
        act = chance.choice(CALLS)
        runtime = shared if number % 8 == 0 else chance.choice((one, own))
        torch.set_num_threads(2 if runtime is shared else 1)
        assert runtime.shares_threads == (runtime is not own)  # with one thread, both are the caller
        try:
            act(runtime, chance)
        except BaseException as error:
            error.add_note(f"call {number}: {act.__name__} with {isa}")
            raise
        finally:
            torch.set_num_threads(1)
