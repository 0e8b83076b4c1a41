"""`cpu_norm` and `fused_norm`: root-mean-square norms by the C++ kernel and, on a GPU, by a Triton kernel.

Shapes: N columns.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from moegraft.cpu_backend import NormSpec, Runtime
from moegraft.operators.cpu import element_name, is_dense
from moegraft.operators.cpu_ops.in_place import CpuForwardOperator, NotRecognisedError, probe_forward
from moegraft.operators.custom_ops import needs_gradient

Form = Callable[..., torch.Tensor]  # of the rows, the weight and, for some, the gate

_MOST_GROUP_COLUMNS = 8192  # of the kernel
_ROUNDINGS = tuple(itertools.product((0.0, 1.0), (True, False)))  # what weights are stored around, and whether rounding comes first as well
_TOLERANCE = 1e-5  # relative, in float32
_ROUNDED_OTHERWISE = 0.02  # share of 16-bit results that may differ by a last bit, as sums in another order make them


class CpuNorm(CpuForwardOperator):
    """A root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467) in one call where PyTorch makes eight.

    Whether weights are stored around 0 or 1, where the module rounds, and where it multiplies with a function of its gate, as norms of
    recurrent layers do, is found by comparing it with the kernel on random rows. The
    module itself computes on a GPU, with gradients, in graphs of `torch.compile`, and in other dtypes or sizes than at load.
    """

    name = "cpu_norm"
    kind = "norm"
    summary = "root-mean-square norms by the C++ kernel, on the CPU"
    attribute_names = ("variance_epsilon", "eps", "epsilon")

    def fit(self, module: nn.Module, weight: torch.Tensor, value: float) -> None:
        owner: Any = type(module)
        gated = "gate" in inspect.signature(owner.forward).parameters
        generator = torch.Generator().manual_seed(0)
        columns = weight.numel()
        # Epsilon matters for small rows.
        rows = torch.randn(8, columns, generator=generator) * torch.logspace(-4, 1, 8)[:, None]
        weights, gates = torch.randn(columns, generator=generator), 3 * torch.randn(8, columns, generator=generator)
        dtypes = dict.fromkeys((torch.float32, weight.dtype))
        samples = [[each.to(weight.device, dtype) for each in (rows, weights, *[gates] * gated)] for dtype in dtypes]
        expected = [probe_forward(module, rows, {"weight": weights}, *others) for rows, weights, *others in samples]
        for form in self._gated_forms(module, columns, float(value)) if gated else self._forms(columns, float(value)):
            if all(_agree(form(*sample), result) for sample, result in zip(samples, expected, strict=True)):
                self._form, self.arguments = form, 1 + gated
                return
        raise NotRecognisedError("it is no root-mean-square norm of a form that the kernel has")

    def compute(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor | None:
        x = x.contiguous()  # queries beside their gates are a part of another tensor
        gates = all(type(each) is torch.Tensor and (each.shape, each.dtype, each.device) == (x.shape, x.dtype, x.device) for each in others)
        plain = is_dense(x) and gates and not needs_gradient(*others)
        return self._form(x, weight, *others) if plain else None

    def _forms(self, columns: int, epsilon: float) -> Iterator[Form]:
        for offset, rounds_first in _ROUNDINGS:
            yield partial(_norm, self.runtime, (columns, epsilon, offset, rounds_first))

    def _gated_forms(self, module: nn.Module, columns: int, epsilon: float) -> Iterator[Form]:
        """Yield the gated norms of recurrent layers: with the function of the gate before the norm or after it, in float32."""
        group = getattr(module, "group_size", columns)
        forms = [(columns, False, False), (columns, False, True), (group, True, False)]
        for gate, (size, first, wide) in itertools.product(("silu", "sigmoid"), forms):
            if size <= _MOST_GROUP_COLUMNS and columns % size == 0:
                yield partial(_norm, self.runtime, (columns, epsilon, 0.0, True, gate, size, first, wide))


class FusedNorm(CpuNorm):
    """`cpu_norm` for modules on the CPU; on a GPU a Triton kernel in one launch, without the gated forms.

    Where Triton is missing or cannot compile, PyTorch's operations compute on the GPU.
    """

    name = "fused_norm"
    summary = "root-mean-square norms in one kernel: of C++ on the CPU, of Triton on a GPU"
    device_types = ("cpu", "cuda")

    def _forms(self, columns: int, epsilon: float) -> Iterator[Form]:
        if not self.on_gpu:
            yield from super()._forms(columns, epsilon)
            return
        # Triton need not be installed where there is no GPU.
        from moegraft.operators.kernels.small import MAX_COLUMNS, norm

        for offset, rounds_first in _ROUNDINGS if columns <= MAX_COLUMNS else ():
            yield partial(norm, epsilon=epsilon, offset=offset, rounds_first=rounds_first)

    @property
    def form(self) -> tuple[float, float, bool]:
        """Epsilon, offset and whether it rounds first, in the terms of `kernels.small.norm`, of an operator on a GPU."""
        form: Any = self._form
        epsilon, offset, rounds_first = (form.keywords[name] for name in ("epsilon", "offset", "rounds_first"))
        return epsilon, offset, rounds_first

    def _gated_forms(self, module: nn.Module, columns: int, epsilon: float) -> Iterator[Form]:
        return iter(()) if self.on_gpu else super()._gated_forms(module, columns, epsilon)


@lru_cache(maxsize=128)
def _spec(
    dtype: torch.dtype,
    columns: int,
    epsilon: float,
    offset: float,
    rounds_first: bool,
    gate: str = "",
    group: int = 0,
    gate_first: bool = False,
    wide: bool = False,
) -> NormSpec:
    element_type = element_name(dtype)
    return NormSpec(element_type, columns, epsilon, offset, rounds_first, gate=gate, group=group, gate_first=gate_first, wide=wide)


def _norm(runtime: Runtime, form: tuple[Any, ...], x: torch.Tensor, weight: torch.Tensor, *gates: torch.Tensor) -> torch.Tensor:
    """Return normalised rows; `form` is what `_spec` is given beside the dtype."""
    out = torch.empty_like(x)
    runtime.norm(_spec(x.dtype, *form), x, weight, out, *[gate.contiguous() for gate in gates])
    return out


def _agree(computed: torch.Tensor, expected: object) -> bool:
    if not isinstance(expected, torch.Tensor) or expected.shape != computed.shape or expected.dtype != computed.dtype:
        return False
    if computed.dtype == torch.float32:
        return float((computed - expected).norm()) <= _TOLERANCE * float(expected.norm())
    same = float((computed == expected).float().mean())
    return same >= 1 - _ROUNDED_OTHERWISE and torch.allclose(computed.float(), expected.float(), rtol=0.02)
