"""`cpu_norm`: root-mean-square norms by the C++ kernel.

Shapes: N columns.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from moegraft.cpu_backend import NormSpec, Runtime
from moegraft.operators.cpu import element_name, is_plain
from moegraft.operators.cpu_ops.in_place import CpuForwardOperator, NotRecognisedError, probe_forward
from moegraft.operators.custom_ops import needs_gradient

_TOLERANCE = 1e-5  # relative, in float32
_ROUNDED_OTHERWISE = 0.02  # share of 16-bit results that may differ by a last bit, as sums in another order make them


class CpuNorm(CpuForwardOperator):
    """A root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467) in one call where PyTorch makes eight.

    Whether weights are stored around 0 or 1, and where the module rounds, is found by comparing it with the kernel on random rows. Of the
    gated norms in recurrent layers, those that multiply the norm with a gate are computed in this way, and the gate by PyTorch. The module
    itself computes on a GPU, with gradients, in graphs of `torch.compile`, and in other dtypes or sizes than at load.
    """

    name = "cpu_norm"
    kind = "norm"
    summary = "root-mean-square norms by the C++ kernel, on the CPU"
    attribute_names = ("variance_epsilon", "eps", "epsilon")

    def fit(self, module: nn.Module, weight: torch.Tensor, value: float) -> None:
        generator = torch.Generator().manual_seed(0)
        columns = weight.numel()
        # Epsilon matters for small rows.
        rows = torch.randn(8, columns, generator=generator) * torch.logspace(-4, 1, 8)[:, None]
        weights = torch.randn(columns, generator=generator)
        dtypes = dict.fromkeys((torch.float32, weight.dtype))
        samples = [(rows.to(dtype), weights.to(dtype)) for dtype in dtypes]
        if "gate" in inspect.signature(type(module).forward).parameters:
            self._fit_gated(module, samples, float(value))
            return
        expected = [probe_forward(module, rows, {"weight": weights}) for rows, weights in samples]
        for offset, rounds_first in itertools.product((0.0, 1.0), (True, False)):
            specs = [NormSpec(element_name(dtype), columns, float(value), offset, rounds_first) for dtype in dtypes]
            found = (normalised(self.runtime, spec, *sample) for spec, sample in zip(specs, samples, strict=True))
            if all(_agree(*pair) for pair in zip(found, expected, strict=True)):
                self._spec = specs[-1]
                return
        raise NotRecognisedError("it is no root-mean-square norm of a form that the kernel has")

    def _fit_gated(self, module: nn.Module, samples: Sequence[tuple[torch.Tensor, torch.Tensor]], epsilon: float) -> None:
        gate = torch.randn(samples[0][0].shape, generator=torch.Generator().manual_seed(1))
        expected = [probe_forward(module, rows, {"weight": weights}, gate.to(rows.dtype)) for rows, weights in samples]
        stored = samples[-1][1].dtype
        acts: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (nn.functional.silu, torch.sigmoid)
        for self._act, inner, rounds_first in itertools.product(acts, (stored, torch.float32), (True, False)):
            agree = []
            for (rows, weights), wanted in zip(samples, expected, strict=True):
                dtype = inner if rows.dtype == stored else rows.dtype
                self._spec, self._inner = NormSpec(element_name(dtype), weights.numel(), epsilon, 0.0, rounds_first), dtype
                agree.append(_agree(self._gated(rows, weights, gate.to(rows.dtype)), wanted))
            if all(agree):
                self.more_arguments = 1
                return
        raise NotRecognisedError("it is no product of a root-mean-square norm and a gate")

    def _gated(self, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        rows = normalised(self.runtime, self._spec, x.to(self._inner), weight.to(self._inner))
        return (rows * self._act(gate.float())).to(x.dtype)

    def compute(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor) -> torch.Tensor | None:
        if not is_plain(x):
            return None
        if not more:
            return normalised(self.runtime, self._spec, x, weight)
        (gate,) = more
        known = type(gate) is torch.Tensor and gate.shape == x.shape and gate.dtype == x.dtype
        return self._gated(x, weight, gate) if known and not needs_gradient(gate) else None


def normalised(runtime: Runtime, spec: NormSpec, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the norm of every row of `x` (..., N), contiguous and on the CPU, in the dtype of `x` and `weight` (N,)."""
    out = torch.empty_like(x)
    runtime.norm(spec, x, weight, out)
    return out


def _agree(found: torch.Tensor, expected: object) -> bool:
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if found.dtype == torch.float32:
        return float((found - expected).norm()) <= _TOLERANCE * float(expected.norm())
    same = float((found == expected).float().mean())
    return same >= 1 - _ROUNDED_OTHERWISE and torch.allclose(found.float(), expected.float(), rtol=0.02)
