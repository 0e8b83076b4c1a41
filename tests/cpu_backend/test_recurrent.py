"""The kernels of recurrent layers against their rules in float64, for every instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import recurrent as reference

from moegraft.cpu_backend import Runtime

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # relative; the rules compute in float32


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= tolerance * float(expected.norm())


DELTA_SHAPES = [
    # B, T, G, H, K, V
    (1, 1, 2, 4, 128, 128),  # a step of Qwen3-Next's heads
    (2, 70, 1, 3, 128, 128),  # many tokens, grouped heads
    (1, 5, 2, 2, 16, 64),  # one block of columns
    (2, 3, 2, 2, 24, 72),  # a vector and columns beyond it
    (1, 4, 3, 6, 7, 5),  # below a vector
    (1, 2, 1, 1, 1, 1),
]


def delta_operands(shape: Sequence[int], by_channel: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    batch, tokens, groups, heads, keys, columns = shape
    query, key = (random(batch, tokens, groups, keys, seed=seed, dtype=dtype) for seed in (1, 2))
    value = random(batch, tokens, heads, columns, seed=3, dtype=dtype)
    decay = -random(batch, tokens, heads, *([keys] if by_channel else []), seed=4).abs()
    beta = random(batch, tokens, heads, seed=5, dtype=dtype).sigmoid()
    return [query, key, value, decay, beta]


def run_delta(
    runtime: Runtime, tensors: Sequence[torch.Tensor], before: torch.Tensor | None, epsilon: float = 1e-6, past: Sequence[torch.Tensor] = ()
) -> reference.Pair:
    value, keys = tensors[2], tensors[1].shape[3]
    out = torch.empty(value.shape, dtype=value.dtype)
    state = torch.empty(value.shape[0], value.shape[2], keys, value.shape[3])
    runtime.recurrent("delta_rule", [out, state, *tensors, before], [keys**-0.5, epsilon], past)
    return out, state


@pytest.mark.parametrize("by_channel", [False, True], ids=["one decay", "decay by channel"])
@pytest.mark.parametrize("shape", DELTA_SHAPES)
def test_delta_rule(runtime: Runtime, shape: tuple[int, ...], by_channel: bool) -> None:
    batch, _, _, heads, keys, columns = shape
    tensors = delta_operands(shape, by_channel, torch.float32)
    for before, epsilon in ((None, 1e-6), (random(batch, heads, keys, columns, seed=6), 1e-6), (None, -1.0)):
        if epsilon < 0:  # keys of any length let the state grow
            tensors = [tensors[0], tensors[1] / keys**0.5, *tensors[2:]]
        expected = reference.delta_rule(*tensors, before, scale=keys**-0.5, epsilon=epsilon)
        for found, wanted in zip(run_delta(runtime, tensors, before, epsilon), expected, strict=True):
            assert_close(found, wanted, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_delta_rule_rounds_only_its_output(runtime: Runtime, dtype: torch.dtype) -> None:
    tensors = delta_operands((1, 9, 1, 2, 32, 64), False, dtype)
    out, state = run_delta(runtime, tensors, None)
    expected = reference.delta_rule(*tensors, None, scale=32**-0.5, epsilon=1e-6)
    assert_close(out, expected[0], TOLERANCES[dtype])
    assert_close(state, expected[1], TOLERANCES[torch.float32])


CONV_SHAPES = [
    # B, C, T, taps
    (1, 200, 1, 4),  # a step; channels beyond whole units
    (2, 64, 40, 4),  # a prompt in pieces
    (1, 3, 5, 1),  # one tap needs no past
    (2, 70, 17, 8),  # the most taps
]


def run_conv(
    runtime: Runtime,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    silu: bool,
    past: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    batch, channels, tokens = x.shape
    out = torch.empty(batch, tokens, channels, dtype=x.dtype).transpose(1, 2)
    runtime.recurrent("short_conv", [out, state, x, weight, bias], [float(silu)], past)
    return out


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("adjacent", ["channels", "tokens", "neither"])
@pytest.mark.parametrize("shape", CONV_SHAPES)
def test_short_conv(runtime: Runtime, shape: tuple[int, ...], adjacent: str, dtype: torch.dtype) -> None:
    batch, channels, tokens, taps = shape
    x = random(batch, channels, tokens, seed=1, dtype=dtype)
    if adjacent == "channels":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif adjacent == "neither":
        x = torch.stack([x, x], -1)[..., 0]
    weight, bias = random(channels, taps, seed=2, dtype=dtype), random(channels, seed=3, dtype=dtype)
    for columns, given, silu in ((0, bias, True), (taps, None, True), (taps + 2, bias, False)):
        state = random(batch, channels, columns, seed=4, dtype=dtype) if columns else None
        expected, left = reference.short_conv(x, weight, given, state, silu=silu)
        assert_close(run_conv(runtime, x, weight, given, state, silu), expected, TOLERANCES[dtype])
        if state is not None:
            assert torch.equal(state.double(), left)


SCAN_SHAPES = [
    # B, T, H, C, G, N
    (1, 1, 4, 64, 2, 128),  # a step of Mamba-2's heads
    (2, 21, 6, 8, 3, 32),
    (1, 5, 40, 1, 1, 16),  # Mamba: heads of one channel, more than a unit's
    (2, 3, 3, 5, 1, 7),  # below a vector
    (1, 2, 18, 1, 2, 20),  # two groups within a unit, and columns beyond a vector
]


def scan_operands(shape: Sequence[int], by_column: bool, dtype: torch.dtype) -> list[Any]:
    batch, tokens, heads, channels, groups, columns = shape
    x, z = (random(batch, tokens, heads, channels, seed=seed, dtype=dtype) for seed in (1, 8))
    dt = random(batch, tokens, heads, seed=2, dtype=dtype)
    a = -random(heads, *([columns] if by_column else []), seed=3).exp()
    b, c = (random(batch, tokens, groups, columns, seed=seed, dtype=dtype) for seed in (4, 5))
    d, bias = (random(heads, seed=seed) for seed in (6, 7))
    return [x, dt, a, b, c, d, bias, z]


def run_scan(
    runtime: Runtime,
    tensors: Sequence[Any],
    before: torch.Tensor | None,
    softplus: bool = True,
    limits: tuple[float, float] = (0.0, 1e30),
    past: Sequence[torch.Tensor] = (),
) -> reference.Pair:
    x, columns = tensors[0], tensors[3].shape[3]
    out = torch.empty(x.shape, dtype=x.dtype)
    state = torch.empty(x.shape[0], x.shape[2], x.shape[3], columns)
    runtime.recurrent("selective_scan", [out, state, *tensors, before], [float(softplus), *limits], past)
    return out, state


@pytest.mark.parametrize("by_column", [False, True], ids=["one decay", "decay by column"])
@pytest.mark.parametrize("shape", SCAN_SHAPES)
def test_selective_scan(runtime: Runtime, shape: tuple[int, ...], by_column: bool) -> None:
    batch, _, heads, channels, _, columns = shape
    tensors = scan_operands(shape, by_column, torch.float32)
    state = random(batch, heads, channels, columns, seed=9)
    forms: list[tuple[list[Any], torch.Tensor | None, bool, tuple[float, float]]] = [
        (tensors, None, True, (0.0, 1e30)),
        (tensors, state, True, (0.1, 0.9)),
        ([*tensors[:5], None, None, None], state, False, (0.0, 1e30)),  # without D, bias and gate
    ]
    for operands, before, softplus, limits in forms:
        expected = reference.selective_scan(*operands, before, softplus=softplus, limits=limits)
        for found, wanted in zip(run_scan(runtime, operands, before, softplus, limits), expected, strict=True):
            assert_close(found, wanted, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_selective_scan_rounds_only_its_output(runtime: Runtime, dtype: torch.dtype) -> None:
    tensors = scan_operands((1, 9, 3, 16, 1, 32), False, dtype)
    out, state = run_scan(runtime, tensors, None)
    expected = reference.selective_scan(*tensors, None, softplus=True)
    assert_close(out, expected[0], TOLERANCES[dtype])
    assert_close(state, expected[1], 2 * TOLERANCES[torch.float32])


@pytest.mark.parametrize("rule", ["delta_rule", "decay by channel", "short_conv", "selective_scan", "decay by column"])
def test_tokens_one_by_one_are_equal_bit_for_bit(runtime: Runtime, rule: str) -> None:
    """Drafts are verified several at once, and must have the results and states of plain decoding."""
    state: torch.Tensor | None
    if rule == "short_conv":
        x, weight, state = random(2, 70, 9, seed=1), random(70, 4, seed=2), random(2, 70, 4, seed=3)
        before, after, steps = state.clone(), list[torch.Tensor](), list[torch.Tensor]()
        for t in range(9):
            steps.append(run_conv(runtime, x[..., t : t + 1], weight, None, state, True))
            after.append(state.clone())
        at_once, past = before.clone(), list(torch.empty(8, 2, 70, 4))
        found = run_conv(runtime, x, weight, None, at_once, True, past)
        assert torch.equal(found, torch.cat(steps, -1))
        assert all(map(torch.equal, [*past, at_once], after))
        past = list(torch.empty(3, 2, 70, 4))  # of the last tokens, whose earlier columns are in x
        joined = run_conv(runtime, torch.cat([before, x], -1), weight, None, None, True, past)
        assert torch.equal(joined[..., 4:], found)
        assert all(map(torch.equal, past, after[5:8]))
        return
    if rule == "selective_scan" or rule == "decay by column":
        shape = (1, 9, 20, 1, 1, 20) if rule == "decay by column" else (2, 9, 4, 7, 2, 40)
        tensors, before = scan_operands(shape, rule == "decay by column", torch.float32), None
        moved, past = (0, 1, 3, 4, 7), list(torch.empty(8, shape[0], shape[2], shape[3], shape[5]))
        found, last = run_scan(runtime, tensors, None, past=past)
    else:
        tensors, before = delta_operands((2, 9, 1, 2, 24, 90), rule == "decay by channel", torch.float32), None
        moved, past = (0, 1, 2, 3, 4), list(torch.empty(8, 2, 2, 24, 90))
        found, last = run_delta(runtime, tensors, None, past=past)
    steps, after, state = [], [], before
    for t in range(9):
        part = [tensor[:, t : t + 1] if place in moved else tensor for place, tensor in enumerate(tensors)]
        out, state = run_scan(runtime, part, state) if len(tensors) == 8 else run_delta(runtime, part, state)
        steps.append(out)
        after.append(state)
    assert torch.equal(found, torch.cat(steps, 1))
    assert all(map(torch.equal, [*past, last], after))
    at_once = run_scan(runtime, tensors, None) if len(tensors) == 8 else run_delta(runtime, tensors, None)
    assert all(map(torch.equal, at_once, (found, last)))


def test_a_state_is_updated_in_place(runtime: Runtime) -> None:
    tensors, state = delta_operands((1, 3, 1, 2, 32, 64), False, torch.float32), random(1, 2, 32, 64, seed=6)
    expected = run_delta(runtime, tensors, state)
    out = torch.empty_like(expected[0])
    runtime.recurrent("delta_rule", [out, state, *tensors, state], [32**-0.5, 1e-6])
    assert torch.equal(out, expected[0])
    assert torch.equal(state, expected[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda operands: operands.pop(), "another number of operands"),
        (lambda operands: operands.__setitem__(6, operands[6][:, :1]), "shapes do not fit together"),
        (lambda operands: operands.__setitem__(1, operands[1].double().float().transpose(2, 3)), "a state is not"),
        (lambda operands: operands.__setitem__(4, operands[4].transpose(2, 3).contiguous().transpose(2, 3)), "not contiguous"),
        (lambda operands: operands.__setitem__(2, operands[2].expand(1, 3, 1, 8).repeat(1, 1, 3, 1)), "shapes do not fit together"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    runtime = Runtime(threads=1)
    tensors = delta_operands((1, 3, 1, 2, 8, 8), False, torch.float32)
    operands = [torch.empty(1, 3, 2, 8), torch.empty(1, 2, 8, 8), *tensors, None]
    change(operands)
    with pytest.raises(ValueError, match=message):
        runtime.recurrent("delta_rule", operands, [1.0, 0.0])
    with pytest.raises(ValueError, match="unknown rule"):
        runtime.recurrent("another", [], [])


@pytest.mark.parametrize(
    ("past", "message"),
    [
        (lambda state: [torch.empty(1, 2, 8, 8)], "not one for each token but the last"),
        (lambda state: [torch.empty(1, 2, 8, 8), torch.empty(1, 2, 8, 4)], "another form"),
        (lambda state: [torch.empty(1, 2, 8, 8), state], "memory of another state"),
        (lambda state: [state.clone()] * 2, "memory of another state"),
    ],
)
def test_past_states_that_do_not_fit_are_refused(past: Any, message: str) -> None:
    state = torch.empty(1, 2, 8, 8)
    operands = [torch.empty(1, 3, 2, 8), state, *delta_operands((1, 3, 1, 2, 8, 8), False, torch.float32), None]
    with pytest.raises(ValueError, match=message):
        Runtime(threads=1).recurrent("delta_rule", operands, [1.0, 0.0], past(state))
    x, weight, out = torch.randn(1, 4, 3), torch.randn(4, 2), torch.empty(1, 4, 3)
    for wrong in ([torch.empty(1, 4, 2)] * 3, [torch.empty(1, 3, 2)], [x[..., :2]]):
        with pytest.raises(ValueError, match="short_conv: "):
            Runtime(threads=1).recurrent("short_conv", [out, None, x, weight, None], [0.0], wrong)
