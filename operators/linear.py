"""`quantized_linear`: one linear layer packed to int8, int4 or 16 bits, computed by the experts' kernels, on the CPU or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import nn

from moegraft.cpu_backend import PackedLinear, Runtime
from moegraft.operators.base import BuildContext, Footprint, Operator
from moegraft.operators.cpu import ELEMENT_CODES, as_array, describe, is_plain, rounded
from moegraft.operators.custom_ops import linear, needs_gradient, register_linear
from moegraft.operators.errors import CheckpointError
from moegraft.operators.kernels.launch import why_unavailable
from moegraft.operators.weights import Part, SuperBlocks, WeightSource, codes_for

if TYPE_CHECKING:
    from moegraft.operators.kernels.linear import PackedLinearOnGpu


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuantizedLinearOptions:
    """Options of `quantized_linear`.

    Attributes:
        weights: the type the weight is packed to: int8 and int4 have groups of 32 inputs with one 16-bit scale (GGUF's Q8_0 and Q4_0).
            A GGUF file's Q4_K or Q6_K of no more bits stays as it is on the CPU.
            bfloat16 and float16 round nothing that is stored so, and a single token's product reads them at the memory's speed.
        gpu: the device that holds and computes it: `none`, the CPU; `auto`, the first GPU; or one such as `cuda:1`. Without a CUDA GPU
            and Triton it is the CPU, and the log says so. The GPU kernels have not run on a GPU yet.
    """

    weights: Literal["bfloat16", "float16", "int8", "int4"] = "int8"
    gpu: str = "none"

    def __post_init__(self) -> None:
        if self.gpu not in ("none", "auto") and not (self.gpu.startswith("cuda:") and self.gpu[5:].isdigit()):
            raise ValueError(f"gpu is 'none', 'auto' or a device such as 'cuda:0', not '{self.gpu}'")

    @property
    def device(self) -> torch.device:
        """Where it is asked for, whether there is such a device or not."""
        return torch.device({"none": "cpu", "auto": "cuda:0"}.get(self.gpu, self.gpu))


class QuantizedLinear(Operator):
    """A linear layer: `forward(x (..., in_features)) -> (..., out_features)` in the dtype of `x`.

    For int8 and int4 weights activations are quantised to int8 in groups of 32 on the CPU; on a GPU they keep their dtype. Sums are
    float32. For inference: a backward pass is refused.
    """

    name = "quantized_linear"
    kind = "linear"
    options_type = QuantizedLinearOptions
    summary = "a linear layer with int8, int4 or 16-bit weights, on the CPU by the C++ kernel or on a GPU by Triton kernels"

    def __init__(self, module: nn.Linear, options: QuantizedLinearOptions, runtime: Runtime, device: torch.device) -> None:
        super().__init__()
        self.in_features = module.in_features
        self.out_features = module.out_features
        self.has_bias = module.bias is not None
        self.options = options
        self._runtime = runtime
        self._device = device
        self._packed: PackedLinear | None = None
        self._on_gpu: PackedLinearOnGpu | None = None
        self._number = register_linear(self)

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: QuantizedLinearOptions) -> str | None:
        if type(module) is not nn.Linear:
            return f"{type(module).__name__} is no plain torch.nn.Linear"
        return None

    @classmethod
    def supports_weight_type(cls, options: QuantizedLinearOptions, weight_type: str) -> bool:
        return options.gpu == "none"

    @classmethod
    def footprint(cls, module: nn.Module, options: QuantizedLinearOptions, dtype: torch.dtype) -> Footprint:
        assert isinstance(module, nn.Linear), "refuse lets plain linears pass only"
        held = PackedLinear.nbytes_for(module.out_features, module.in_features, options.weights)
        return Footprint({"cpu" if options.gpu == "none" or why_unavailable() else str(options.device): held})

    @classmethod
    def build(cls, module: nn.Module, options: QuantizedLinearOptions, context: BuildContext) -> Self:
        assert isinstance(module, nn.Linear), "refuse lets plain linears pass only"
        device = options.device
        reason = why_unavailable() if device.type == "cuda" else None
        if reason is not None:
            context.shared(_Notice, lambda: _Notice(reason))
            device = torch.device("cpu")
        return cls(module, options, context.shared(Runtime, lambda: Runtime(threads=context.threads)), device)

    def placement(self) -> str:
        where = f"the CPU ({describe(self._runtime)})" if self._device.type == "cpu" else str(self._device)
        return f"linear: {self.name}, {self.options.weights} on {where}"

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        packed = PackedLinear(self.out_features, self.in_features, self.options.weights)
        codes = codes_for(source, "weight", 0, self.options.weights)
        if isinstance(codes, SuperBlocks):
            packed.pack_super_blocks(codes.blocks)
        elif codes is not None:
            packed.pack_quantized(codes.codes, codes.scales)
        if codes is not None:
            advance(codes.elements * source.dtype.itemsize)
        else:
            weight = self._checked(source, "weight", (self.out_features, self.in_features))
            packed.pack(as_array(weight))
            advance(weight.nbytes)
        bias = self._checked(source, "bias", (self.out_features,)).float() if self.has_bias else None
        if bias is not None:
            packed.pack_bias(as_array(bias))
            advance(bias.numel() * source.dtype.itemsize)
        if self._device.type == "cpu":
            self._packed = packed
        else:
            self._on_gpu = self._moved(packed, bias)

    def _moved(self, packed: PackedLinear, bias: torch.Tensor | None) -> PackedLinearOnGpu:
        # Triton need not be installed where no GPU is
        from moegraft.operators.kernels.linear import PackedLinearOnGpu

        # copied, so that the tensor has memory that may be written, as torch wants it
        packed_bytes = torch.from_numpy(packed.buffer.copy()).to(self._device)
        values = None if bias is None else bias.to(self._device)
        return PackedLinearOnGpu(self.out_features, self.in_features, self.options.weights, packed_bytes, values)

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
        if self._on_gpu is not None:
            y = self._on_gpu.forward(rounded(x.detach()).to(self._device))
            return y.to(x.device, x.dtype)
        assert self._packed is not None, "forward before load: optimize_and_load loads every operator before it returns"
        if type(x) is torch.Tensor and is_plain(x) and x.shape[-1] == self.in_features:
            y = x.new_empty((*x.shape[:-1], self.out_features))
            code = ELEMENT_CODES[x.dtype]
            self._runtime.linear_at(self._packed, code, x.data_ptr(), x.numel() // self.in_features, y.data_ptr())
            return y
        rows = rounded(x.detach().to("cpu")).reshape(-1, self.in_features).contiguous()
        out = rows.new_empty(rows.shape[0], self.out_features)
        self._runtime.linear(self._packed, as_array(rows), as_array(out))
        return out.view(*x.shape[:-1], self.out_features).to(x.device, x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, weights={self.options.weights}"


class _Notice:
    """Says once for each model that its linear layers stay on the CPU."""

    def __init__(self, reason: str) -> None:
        logger.warning("quantized_linear stays on the CPU: %s", reason)
