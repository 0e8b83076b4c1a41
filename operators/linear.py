"""`quantized_linear`: one linear layer packed to int8, int4 or 16 bits, computed by the experts' kernels, on the CPU or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import torch
from torch import nn

from moegraft.cpu_backend import PackedLinear, Runtime
from moegraft.operators.base import Footprint, Operator, Packing, Traits
from moegraft.operators.context import InjectionContext
from moegraft.operators.cpu import as_array, describe, element_name, is_plain, rounded
from moegraft.operators.custom_ops import linear, needs_gradient, register
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.kernels.launch import why_unavailable
from moegraft.operators.weights import PackedWeights, Segments, StoredBlocks, WeightSource, WeightTypes, codes_for, reordered, sampled

if TYPE_CHECKING:
    from moegraft.operators.kernels.linear import PackedLinearOnGpu


logger = logging.getLogger(__name__)
WEIGHT_TYPES = Literal["stored", "bfloat16", "float16", "int8", "int4"]


def _weight_type(options: QuantizedLinearOptions, dtype: torch.dtype) -> str:
    if options.weights != "stored":
        return options.weights
    return "float32" if dtype == torch.float64 else element_name(dtype)


def _parts(rows: int, weight_type: str) -> list[tuple[int, str]]:
    """Return the rows and the type of each tensor that a layer is packed as."""
    types = WeightTypes.parse(weight_type)
    return [(rows, weight_type)] if types.rows is None else list(zip(types.rows, (types.gate_up, types.down), strict=True))


@dataclass(frozen=True, slots=True)
class QuantizedLinearOptions:
    """Options of `quantized_linear`.

    Attributes:
        weights: the type the weight is packed to; `stored` keeps that of the checkpoint. int8 and int4 have groups of 32 inputs with one
            16-bit scale (GGUF's Q8_0 and Q4_0); blocks of integers from a GGUF file or a quantised checkpoint that have no more bits
            stay as they are. bfloat16 and float16 round nothing that is stored so, and a single token's product reads them at
            the memory's speed.
        gpu: the device that holds and computes it: `none`, the CPU; `auto`, the first GPU; or one such as `cuda:1`. Without a CUDA GPU
            and Triton it is the CPU, which is logged. Of all GPUs, an NVIDIA H100 alone has run it.
    """

    weights: WEIGHT_TYPES = "int8"
    gpu: str = "none"

    def __post_init__(self) -> None:
        if self.gpu not in ("none", "auto") and not (self.gpu.startswith("cuda:") and self.gpu[5:].isdigit()):
            raise ValueError(f"gpu must be 'none', 'auto' or a device such as 'cuda:0', not '{self.gpu}'")

    @property
    def device(self) -> torch.device:
        """The device that is asked for, which need not exist."""
        return torch.device({"none": "cpu", "auto": "cuda:0"}.get(self.gpu, self.gpu))


class LinearPacking(Packing):
    """The weight types of `quantized_linear`."""

    types = get_args(WEIGHT_TYPES)
    measured: Mapping[str, Any] = {"int8": QuantizedLinearOptions(), "int4": QuantizedLinearOptions(weights="int4")}

    def supports(self, options: QuantizedLinearOptions, weight_type: str) -> bool:
        return options.gpu == "none" or WeightTypes.parse(weight_type).rows is None

    def type_for(self, options: QuantizedLinearOptions, dtype: torch.dtype) -> str:
        return _weight_type(options, dtype)

    def smaller(self, options: QuantizedLinearOptions | None) -> Mapping[str, QuantizedLinearOptions]:
        advice = "'quantized_linear' with 'weights: int8' and 'gpu: auto' for the linear layers"
        return {} if options is not None else {advice: QuantizedLinearOptions()}


class QuantizedLinear(Operator):
    """A linear layer: `forward(x (..., in_features)) -> (..., out_features)` in the dtype of `x`.

    For int8 and int4 weights activations are quantised to int8 in groups of 32 on the CPU; on a GPU they keep their dtype. Sums are
    float32. The weight has no gradient; the input does, on the CPU.
    """

    name = "quantized_linear"
    kind = "linear"
    options_type = QuantizedLinearOptions
    packing = LinearPacking()
    summary = "a linear layer with int8, int4 or 16-bit weights, on the CPU by the C++ kernel or on a GPU by Triton kernels"

    def __init__(self, module: nn.Linear, options: QuantizedLinearOptions, runtime: Runtime, device: torch.device) -> None:
        super().__init__()
        self.in_features = module.in_features
        self.out_features = module.out_features
        self.has_bias = module.bias is not None
        self.options = options
        self._weight_type: str = options.weights  # what `stored` means is known when the weights are loaded
        self._runtime = runtime
        self._device = device
        self._columns: tuple[int, int] | None = None  # the order of the packed columns, as `Codes` has it
        self._packed: list[PackedLinear] = []  # the parts of a layer that is stored in several tensors
        self._segments: Segments | None = None  # of which this is the order
        self._on_gpu: PackedLinearOnGpu | None = None
        self._bias_bytes = b""  # to tell weights apart
        self._number = register(self)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            raise AttributeError(
                f"quantized_linear holds packed weights and no parameter '{name}': leave this linear layer out of the rule, or call "
                "model.eval() where a layer of Mamba-2 reads it in training"
            )
        return super().__getattr__(name)

    @property
    def qweight(self) -> torch.Tensor:
        """An empty tensor on the layer's device: PEFT places adapters by this name, which quantised layers of others have."""
        return torch.empty(0, dtype=torch.uint8, device=self._device)

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: QuantizedLinearOptions) -> str | None:
        if type(module) is not nn.Linear:
            return f"{type(module).__name__} is not a plain torch.nn.Linear"
        return None

    @classmethod
    def traits(cls, options: QuantizedLinearOptions) -> Traits:
        if options.gpu == "none":
            return Traits(options.weights)
        return Traits(options.weights, devices=frozenset({options.gpu}), untrained="layers on GPUs have no gradients; set gpu: none")

    @classmethod
    def footprint(cls, module: nn.Module, options: QuantizedLinearOptions, dtype: torch.dtype) -> Footprint:
        assert isinstance(module, nn.Linear), "unsupported_reason refuses all others"
        parts = _parts(module.out_features, _weight_type(options, dtype))
        nbytes = sum(PackedLinear.nbytes_for(rows, module.in_features, weight_type) for rows, weight_type in parts)
        return Footprint({"cpu" if options.gpu == "none" or why_unavailable() else str(options.device): nbytes})

    @classmethod
    def build(cls, module: nn.Module, options: QuantizedLinearOptions, context: InjectionContext) -> Self:
        assert isinstance(module, nn.Linear), "unsupported_reason refuses all others"
        device = options.device
        reason = why_unavailable() if device.type == "cuda" else None
        if reason is not None:
            context.warn_once(logger, f"quantized_linear stays on the CPU: {reason}")
            device = torch.device("cpu")
        return cls(module, options, context.runtime, device)

    @property
    def weight_type(self) -> str:
        return self._weight_type

    def weight_samples(self) -> Iterator[bytes]:
        for packed in [self._on_gpu.packed] if self._on_gpu is not None else [part.buffer for part in self._packed]:
            yield sampled(packed.reshape(1, -1))
        yield self._bias_bytes

    def placement(self) -> str:
        where = f"the CPU ({describe(self._runtime)})" if self._device.type == "cpu" else str(self._device)
        return f"linear: {self.name}, {self._weight_type} on {where}"

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        self._weight_type = _weight_type(self.options, source.dtype)
        parts = _parts(self.out_features, self._weight_type)
        segments = None if len(parts) == 1 else source.segments()
        stored = bias = None
        if segments is None:
            sizes = {"weight": PackedLinear.nbytes_for(self.out_features, self.in_features, self._weight_type)}
            stored = source.packed(self._form(), sizes | ({"bias": 4 * self.out_features} if self.has_bias else {}))
        if stored is not None:
            packed = [self._divided(PackedLinear(self.out_features, self.in_features, self._weight_type))]
            packed[0].pack_bytes(stored["weight"])
            bias = torch.from_numpy(stored["bias"].view(np.float32).copy()) if self.has_bias else None
            advance(sum(array.nbytes for array in stored.values()))
        else:
            sources = [source] if segments is None else segments.sources
            packed = [self._pack(each, *part, advance) for each, part in zip(sources, parts, strict=True)]
            if self.has_bias:
                bias = rounded(source.read_shaped("bias", (self.out_features,))).contiguous().float()
                advance(bias.numel() * source.dtype.itemsize)
        if bias is not None:
            assert segments is None, "no layer that is stored in several tensors has a bias"
            packed[0].pack_bias(as_array(bias))
            self._bias_bytes = as_array(bias).tobytes()
        if self._device.type == "cpu":
            self._packed, self._segments = packed, None if segments is None else replace(segments, sources=())
        else:
            # Triton need not be installed where there is no GPU.
            from moegraft.operators.kernels.linear import PackedLinearOnGpu

            # A copy, as torch wants memory that may be written to.
            packed_bytes = torch.from_numpy(packed[0].buffer.copy()).to(self._device)
            bias = None if bias is None else bias.to(self._device)
            self._on_gpu = PackedLinearOnGpu(self.out_features, self.in_features, self._weight_type, packed_bytes, bias)

    def packed_weights(self) -> PackedWeights | None:
        if self._segments is not None or self._columns is not None:  # of a file in blocks, which is as small
            return None
        matrix = self._packed[0].buffer if self._on_gpu is None else self._on_gpu.packed.cpu().numpy()
        bias = np.frombuffer(self._bias_bytes, np.uint8)
        return PackedWeights(self._form(), {"weight": matrix, **({"bias": bias} if self.has_bias else {})})

    def _form(self) -> dict[str, str | int | bool]:
        return {"weights": self._weight_type, "rows": self.out_features, "columns": self.in_features, "bias": self.has_bias}

    def _divided(self, packed: PackedLinear) -> PackedLinear:
        self._runtime.divide(packed)
        return packed

    def _pack(self, source: WeightSource, rows: int, weight_type: str, advance: Callable[[int], None]) -> PackedLinear:
        packed = self._divided(PackedLinear(rows, self.in_features, weight_type))
        codes = codes_for(source, "weight", 0, weight_type)
        if isinstance(codes, StoredBlocks):
            packed.pack_blocks(codes.blocks)
        elif codes is not None:
            packed.pack_quantized(codes.codes, codes.scales)
        if codes is not None:
            self._columns = codes.columns
            advance(codes.elements * source.dtype.itemsize)
        else:
            weight = rounded(source.read_shaped("weight", (rows, self.in_features))).contiguous()
            packed.pack(as_array(weight))
            advance(weight.nbytes)
        return packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or needs_gradient(x):
            y: torch.Tensor = linear(x, self.out_features, self._number)
            return y
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Compute `forward` outside of any graph."""
        if self._columns is not None:
            x = reordered(x, self._columns)
        if self._on_gpu is not None:
            y = self._on_gpu.forward(rounded(x.detach()).to(self._device))
            return y.to(x.device, x.dtype)
        assert self._packed, "load comes before forward"
        plain = type(x) is torch.Tensor and is_plain(x) and x.shape[-1] == self.in_features
        rows = x if plain else rounded(x.detach().to("cpu")).reshape(-1, self.in_features).contiguous()
        outs = [rows.new_empty((*rows.shape[:-1], packed.rows)) for packed in self._packed]
        for packed, out in zip(self._packed, outs, strict=True):
            if plain:
                self._runtime.linear(packed, rows, out)
            else:
                self._runtime.linear(packed, as_array(rows), as_array(out))
        y = outs[0] if self._segments is None else self._segments.outputs(torch.cat(outs, dim=-1))
        return y if plain else y.view(*x.shape[:-1], self.out_features).to(x.device, x.dtype)

    def on_gpu(self) -> PackedLinearOnGpu | None:
        """Return the layer's kernel on a GPU, of inputs in the order of the model's columns; None for all others."""
        return None if self._columns is not None else self._on_gpu

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input (..., in_features), from that of the output (..., out_features).

        Raises:
            UnsupportedModelError: a GPU computes the layer.
        """
        if self._on_gpu is not None:
            raise UnsupportedModelError(f"{self.name} has no backward pass: {self.traits(self.options).untrained}")
        rows = rounded(gradient.detach().to("cpu")).reshape(-1, self.out_features)
        rows = rows if self._segments is None else self._segments.stored(rows)
        found = rows.new_zeros(len(rows), self.in_features)
        for packed, of_part in zip(self._packed, rows.split([packed.rows for packed in self._packed], dim=-1), strict=True):
            of_input = torch.empty_like(found)
            self._runtime.linear_gradient(packed, of_part.contiguous(), of_input)
            found = of_input if len(self._packed) == 1 else found + of_input
        if self._columns is not None:
            found = reordered(found, self._columns[::-1])
        return found.view(*gradient.shape[:-1], self.in_features).to(gradient.device, gradient.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, weights={self._weight_type}"


class JointLinear:
    """Linear layers of one input on a GPU, computed in one product. The layers keep their weights, as views of one tensor.

    Args:
        layers: as `of` returns it for them.
        product: (..., in_features) -> the outputs of all layers side by side.
    """

    def __init__(self, layers: Sequence[nn.Module], product: Callable[[torch.Tensor], torch.Tensor], rows: Sequence[int]) -> None:
        self._layers, self._product, self._rows = layers, product, rows
        self._places = [_place(layer) for layer in layers]

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> Self | None:
        """Return the joint layer, or None where the layers differ in form, or are neither plain nor packed on a GPU."""
        if any(_is_changed(layer) for layer in layers):
            return None
        if all(type(layer) is nn.Linear for layer in layers):
            return cls._of_plain([layer for layer in layers if isinstance(layer, nn.Linear)])
        kernels = [layer.on_gpu() if isinstance(layer, QuantizedLinear) else None for layer in layers]
        packed = [kernel for kernel in kernels if kernel is not None]
        joint = packed[0].joined(packed) if len(packed) == len(layers) else None
        return None if joint is None else cls(layers, joint.forward, [kernel.matrix.outputs for kernel in packed])

    @classmethod
    def _of_plain(cls, layers: Sequence[nn.Linear]) -> Self | None:
        forms = {(layer.weight.shape[1], layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        shared = len({id(parameter) for parameter in parameters}) < len(parameters)
        if len(forms) > 1 or shared or any(type(parameter) is not nn.Parameter for parameter in parameters):
            return None
        rows = [layer.out_features for layer in layers]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        for number, layer in enumerate(layers):
            layer.weight.data = weight.split(rows)[number]
            if bias is not None:
                layer.bias.data = bias.split(rows)[number]
        return cls(layers, partial(nn.functional.linear, weight=weight, bias=bias), rows)

    def outputs(self, layers: Sequence[nn.Module], x: torch.Tensor) -> Sequence[torch.Tensor] | None:
        """Return the outputs for `x` (..., in_features), parts of one tensor; None where these are other layers, as with adapters."""
        same = all(given is layer for given, layer in zip(layers, self._layers, strict=True))
        watched = any(layer._forward_hooks or layer._forward_pre_hooks or _is_changed(layer) for layer in layers)
        if not same or watched or [*map(_place, layers)] != self._places:
            return None
        outputs: Sequence[torch.Tensor] = self._product(x).split(self._rows, dim=-1)
        return outputs


def _is_changed(layer: nn.Module) -> bool:
    """Whether a layer computes more than its class, as with a parametrization, or with a `forward` that accelerate puts in its place."""
    return type(layer) not in (nn.Linear, QuantizedLinear) or "forward" in vars(layer)


def _place(layer: nn.Module) -> object:
    """Where a layer's weights are, to notice others."""
    if isinstance(layer, QuantizedLinear):
        return layer.on_gpu()
    return [parameter.data_ptr() for parameter in layer.parameters()]
