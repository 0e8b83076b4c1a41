"""`quantized_linear`: one linear layer packed to int8 or int4, computed by the same C++ kernels as the experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import nn

from moegraft.cpu_backend import PackedLinear, Runtime
from moegraft.operators.base import BuildContext, Footprint, Operator
from moegraft.operators.cpu import as_array, describe, rounded
from moegraft.operators.errors import CheckpointError
from moegraft.operators.traceable import linear, needs_gradient, register_linear
from moegraft.operators.weights import Part, WeightSource, codes_for


@dataclass(frozen=True, slots=True)
class QuantizedLinearOptions:
    """Options of `quantized_linear`.

    Attributes:
        weights: the type the weight is packed to: groups of 32 inputs with one 16-bit scale (GGUF's Q8_0 and Q4_0).
    """

    weights: Literal["int8", "int4"] = "int8"


class QuantizedLinear(Operator):
    """A linear layer: `forward(x (..., in_features)) -> (..., out_features)` in the dtype of `x`.

    Activations are quantised to int8 in groups of 32, sums are float32. For inference: a backward pass is refused.
    """

    name = "quantized_linear"
    kind = "linear"
    options_type = QuantizedLinearOptions
    summary = "a linear layer on the CPU with int8 or int4 weights, by the C++ kernel"

    def __init__(self, module: nn.Linear, options: QuantizedLinearOptions, runtime: Runtime) -> None:
        super().__init__()
        self.in_features = module.in_features
        self.out_features = module.out_features
        self.has_bias = module.bias is not None
        self.options = options
        self._runtime = runtime
        self._packed: PackedLinear | None = None
        self._number = register_linear(self)

    @classmethod
    def refuse(cls, module: nn.Module, options: QuantizedLinearOptions) -> str | None:
        if type(module) is not nn.Linear:
            return f"{type(module).__name__} is no plain torch.nn.Linear"
        return None

    @classmethod
    def footprint(cls, module: nn.Module, options: QuantizedLinearOptions, dtype: torch.dtype) -> Footprint:
        assert isinstance(module, nn.Linear), "refuse lets plain linears pass only"
        return Footprint({"cpu": PackedLinear.nbytes_for(module.out_features, module.in_features, options.weights)})

    @classmethod
    def build(cls, module: nn.Module, options: QuantizedLinearOptions, context: BuildContext) -> Self:
        assert isinstance(module, nn.Linear), "refuse lets plain linears pass only"
        return cls(module, options, context.shared(Runtime, lambda: Runtime(threads=context.threads)))

    def placement(self) -> str:
        return f"linear: {self.name}, {self.options.weights} on the CPU ({describe(self._runtime)})"

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        packed = PackedLinear(self.out_features, self.in_features, self.options.weights)
        codes = codes_for(source, "weight", 0, self.options.weights)
        if codes is not None:
            packed.pack_quantized(codes.codes, codes.scales)
            advance(codes.codes.size * source.dtype.itemsize)
        else:
            weight = self._checked(source, "weight", (self.out_features, self.in_features))
            packed.pack(as_array(weight))
            advance(weight.nbytes)
        if self.has_bias:
            bias = self._checked(source, "bias", (self.out_features,))
            packed.pack_bias(as_array(bias.float()))
            advance(bias.nbytes)
        self._packed = packed

    def _checked(self, source: WeightSource, part: Part, expected: tuple[int, ...]) -> torch.Tensor:
        piece = source.read(part)
        if tuple(piece.shape) != expected:
            raise CheckpointError(f"{source.origin(part)}: shape {tuple(piece.shape)} where the model has {expected}")
        return rounded(piece).contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or needs_gradient(x):
            y: torch.Tensor = linear(x, self.out_features, self._number)
            return y
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """What `forward` does, outside of any graph."""
        assert self._packed is not None, "forward before load: optimize_and_load loads every operator before it returns"
        rows = rounded(x.detach().to("cpu")).reshape(-1, self.in_features).contiguous()
        out = rows.new_empty(rows.shape[0], self.out_features)
        self._runtime.linear(self._packed, as_array(rows), as_array(out))
        return out.view(*x.shape[:-1], self.out_features).to(x.device, x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, weights={self.options.weights}"
