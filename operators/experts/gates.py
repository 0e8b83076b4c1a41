"""Which gate an experts module applies, found by asking the module rather than by knowing its family."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import nn

from moegraft.cpu_backend import GateSpec, activations
from moegraft.operators.experts.reference import reference_activation, reference_gate

# A clamp wider than this cannot be told from no clamp by probing, and no model's activations reach it.
PROBE_RANGE = 64.0
TOLERANCE = 1e-5  # float32 evaluations of one formula in two orders of operations differ by less


# The probes are float32 whatever the caller's default dtype: `torch.set_default_dtype(torch.bfloat16)` would blur them.
def _values(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _grid(low: float, high: float, count: int) -> torch.Tensor:
    return torch.linspace(low, high, count, dtype=torch.float32)


def _scalars(module: nn.Module) -> list[float]:
    """The numbers a module holds: its clamps and scales are among them, whatever it calls them."""
    held = (value for value in vars(module).values() if isinstance(value, int | float) and not isinstance(value, bool))
    return sorted({float(value) for value in held if 0 < value < PROBE_RANGE})


def _evaluate(module: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The module's own gate at every pair of the two vectors: (G, U)."""
    pairs_gate, pairs_up = torch.meshgrid(gate, up, indexing="ij")
    apply: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate  # type: ignore[assignment]
    # A width of two has one neuron, whose gate comes first in both layouts (concatenated and interleaved).
    pairs = torch.stack([pairs_gate.flatten(), pairs_up.flatten()], dim=-1)
    return apply(pairs).view(len(gate), len(up))


def _match_activation(module: nn.Module, values: torch.Tensor, curve: torch.Tensor) -> tuple[str, float] | None:
    plain = [(name, 1.0) for name in activations()]
    scaled = [("silu", alpha) for alpha in (1.702, *_scalars(module))]
    for name, alpha in plain + scaled:
        if torch.allclose(reference_activation(name, values, alpha), curve, rtol=TOLERANCE, atol=TOLERANCE):
            return name, alpha
    return None


def recognise_gate(module: nn.Module) -> GateSpec | None:
    """The gate of an experts module as the kernel describes it, or None when it is of another form.

    The module's `_apply_gate` (or `act_fn` where it has no gate) is evaluated on a grid and compared with every form the
    kernel knows, limits taken from the numbers the module holds; only a form that agrees on the whole grid is returned.
    Weights are not read, so the module may be on meta.
    """
    with torch.no_grad(), torch.device("cpu"):
        if not getattr(module, "has_gate", True):
            return _recognise_ungated(module)
        if not _splits_as_stored(module):
            return None
        near = _grid(-0.9, 0.9, 37)
        at_zero, at_one = _evaluate(module, near, _values(0.0, 0.9)).unbind(-1)
        found = _match_activation(module, near, (at_one - at_zero) / 0.9)
        if found is None:
            return None
        name, alpha = found
        offset = float((at_zero / ((at_one - at_zero) / 0.9)).nan_to_num(0.0)[-1])
        return _with_limits(module, name, alpha, round(offset, 3))


def _splits_as_stored(module: nn.Module) -> bool:
    """Whether `_apply_gate` takes gate and up from where the storage flag says they are."""
    apply: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate  # type: ignore[assignment]
    first, second = _values(0.3, -0.7), _values(0.5, 0.9)  # (gate, up) of two neurons
    joined = torch.cat([first[:1], second[:1], first[1:], second[1:]]) if module.is_concatenated else torch.cat([first, second])
    return torch.allclose(apply(joined), torch.cat([apply(first), apply(second)]), rtol=TOLERANCE, atol=TOLERANCE)


def _recognise_ungated(module: nn.Module) -> GateSpec | None:
    values = _grid(-8.0, 8.0, 257)
    act: Callable[[torch.Tensor], torch.Tensor] = module.act_fn  # type: ignore[assignment]
    found = _match_activation(module, values, act(values))
    return None if found is None else GateSpec(activation=found[0], alpha=found[1])


def _with_limits(module: nn.Module, name: str, alpha: float, offset: float) -> GateSpec | None:
    """Fits the clamps one axis at a time, then demands agreement on the whole grid."""
    gate = up = _grid(-PROBE_RANGE, PROBE_RANGE, 129)
    limits = [math.inf, *_scalars(module)]
    make = partial(GateSpec, activation=name, alpha=alpha, up_offset=offset)
    small = _values(0.5)  # inside every clamp
    specs = [make(up_limit=limit) for limit in limits]
    up_limit = _closest(specs, small, up, _evaluate(module, small, up).flatten()).up_limit
    specs = [make(up_limit=up_limit, gate_limit=first, act_limit=second) for first, second in product(limits, repeat=2)]
    spec = _closest(specs, gate, small, _evaluate(module, gate, small).flatten())
    # An activation's own rounding is multiplied by up, so the absolute tolerance grows with the range of up.
    agrees = torch.allclose(
        reference_gate(spec, gate[:, None], up[None, :]), _evaluate(module, gate, up), rtol=TOLERANCE, atol=TOLERANCE * PROBE_RANGE
    )
    return spec if agrees else None


def _closest(specs: list[GateSpec], gate: torch.Tensor, up: torch.Tensor, expected: torch.Tensor) -> GateSpec:
    """The first spec of least error: a clamp before a saturating activation and one after it nearly agree."""
    return min(specs, key=lambda spec: float((reference_gate(spec, gate, up) - expected).abs().max()))
