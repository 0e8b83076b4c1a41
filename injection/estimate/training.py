"""The forecast of training LoRA adapters beside a plan's packed weights on the CPU: memory of a step, and tokens per second.

Adapters are those of all linear layers but the head, in float32, with AdamW; the activations of each decoder layer are checkpointed at its
input and computed again in the backward pass, one layer at a time. Bytes are those of tensors: glibc's allocator may keep several times as
much of what was freed, unless MALLOC_MMAP_THRESHOLD_ is set (rules/guide/training.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from moegraft.injection.estimate.forecast import Work, missing_rates, work_of
from moegraft.injection.estimate.measure import Measurements
from moegraft.injection.estimate.memory import PlannedModel
from moegraft.injection.planning import LAYER
from moegraft.operators.layout import experts_per_token, read_layout
from moegraft.operators.structure import kinds
from moegraft.operators.weight_formats import FLOAT_TYPES

FLOAT = 4  # bytes of a float32
# Of an adapter's parameters: themselves, their gradients, and AdamW's two moments.
KEPT_PER_PARAMETER = 4 * FLOAT
# Of a layer's vectors of the hidden size, in float32: the residual stream, the inputs of norms, what they are multiplied by, and gradients.
LAYER_WIDTHS = 8
ATTENTION_BACKWARD = 2.5  # in operations: five products instead of two (FlashAttention-2, arXiv 2307.08691)
# Bytes that PyTorch's element-wise operations read and write in two forward passes and one backward pass, for each element of a vector in
# bfloat16: the sums over their inputs and outputs, in the types that transformers' modules and PEFT's layers have them in.
NORM_BYTES = 2 * 36 + 84
RESIDUAL_BYTES = 2 * 6 + 6
ROTARY_BYTES = 2 * 20 + 24
WRITTEN_FIRST_READ = 1.4  # two fifths of these bytes are written, and a processor reads what it writes into its cache first
# Of an adapter, with its two products, whose operands are as long as the layer's input and output and only `rank` wide.
ADAPTER_INPUT_BYTES = 2 * (6 + 4) + 12 + 8
ADAPTER_OUTPUT_BYTES = 2 * (24 + 4) + 20 + 8
LOGIT_BYTES = 6 + 8 + 12 + 6  # of one logit: cast, logarithm of softmax, its gradient, cast; not computed again


@dataclass(frozen=True, slots=True)
class TrainingLoad:
    """Steps of `batch` rows of `length` tokens, with adapters of rank `rank`."""

    batch: int
    length: int
    rank: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """Bytes in host memory and speed of training.

    Attributes:
        parameters: of the adapters, which learn.
        weights: of operators and of what is not replaced.
        program: of Python and its libraries.
        adapters: their parameters, gradients and the optimiser's state.
        checkpoints: the inputs of all layers of one step.
        layer: what the backward pass of one layer holds, the kernels' memory included.
        head: the logits of one step and what their gradients take.
        tokens_s: None where `missing` weight types have no measured rate, or none are measured.
        left_out: what takes more time than `tokens_s` has, and why it is not predicted; empty where all is.
    """

    load: TrainingLoad
    parameters: int
    weights: int
    program: int
    adapters: int
    checkpoints: int
    layer: int
    head: int
    tokens_s: float | None
    missing: tuple[str, ...] = ()
    left_out: str = ""

    @property
    def step(self) -> int:
        """What a step holds beyond weights and adapters, at most: the head's memory is free again before the last layer's is taken."""
        return self.checkpoints + max(self.layer, self.head)

    @property
    def peak(self) -> int:
        return self.weights + self.program + self.adapters + self.step


def training_forecast(planned: PlannedModel, load: TrainingLoad, measured: Measurements | None) -> TrainingForecast:
    """Predict the memory and the speed of training.

    Raises:
        UnsupportedModelError: the config does not give the number of experts per token.
    """
    meta_model = planned.meta_model
    skeleton, itemsize = meta_model.skeleton, meta_model.dtype.itemsize
    head = skeleton.get_output_embeddings()
    linears = {path: module for path, module in skeleton.named_modules() if isinstance(module, nn.Linear) and module is not head}
    parameters = sum(load.rank * (module.in_features + module.out_features) for module in linears.values())
    hidden = int(getattr(meta_model.source.config.get_text_config(), "hidden_size", 0))
    layers = _layer_bytes(planned, linears, load, hidden)
    vocabulary = 0 if head is None else int(head.weight.shape[0])  # type: ignore[union-attr] # an embedding or a linear layer
    tokens_s, missing = _tokens_s(planned, linears, load, measured)
    left_out = ""
    if _attention_operations(planned, load) is None:
        left_out = "recurrent layers, which are not predicted"
    elif measured is None or measured.attention_gflops is None:
        left_out = "attention, whose rate is not measured; run: moegraft doctor --measure"
    return TrainingForecast(
        load=load,
        parameters=parameters,
        weights=planned.plan.bytes_by_device.get("cpu", 0),
        program=psutil.Process().memory_info().rss,  # this process has loaded the same libraries and no weights
        adapters=KEPT_PER_PARAMETER * parameters,
        checkpoints=len(layers) * load.tokens * hidden * itemsize,
        layer=max(layers.values(), default=0),
        # Logits, their logarithms of softmax, and two gradients in float32, of which one is cast.
        head=load.tokens * vocabulary * (itemsize + 3 * FLOAT),
        tokens_s=tokens_s,
        missing=missing,
        left_out=left_out,
    )


def _layer_bytes(planned: PlannedModel, linears: Mapping[str, nn.Linear], load: TrainingLoad, hidden: int) -> dict[str, int]:
    """Return the bytes that the backward pass of each decoder layer holds, by the beginning of its path."""
    itemsize = planned.meta_model.dtype.itemsize
    found: dict[str, int] = {}
    for path, module in planned.meta_model.skeleton.named_modules():
        match = LAYER.search(f"{path}.")
        if match is None:
            continue
        per_token = 0
        if path in linears:  # of the adapter: its input in float32, both products; and the layer's own output
            per_token = module.in_features * FLOAT + 2 * module.out_features * FLOAT + module.out_features * itemsize + load.rank * FLOAT
        elif "experts" in kinds(path, module, planned.meta_model.skeleton):
            layout = read_layout(module)
            # Of the kernels: gradients of gate and up for each of a token's experts, in front of the products with transposed weights.
            per_token = experts_per_token(planned.meta_model.source.config) * layout.intermediate * (2 if layout.gated else 1) * itemsize
        layer = path[: match.end() - 1]
        found.setdefault(layer, load.tokens * LAYER_WIDTHS * hidden * FLOAT)
        found[layer] += load.tokens * per_token
    return found


def _tokens_s(
    planned: PlannedModel, linears: Mapping[str, nn.Linear], load: TrainingLoad, measured: Measurements | None
) -> tuple[float | None, tuple[str, ...]]:
    if measured is None:
        return None, ()
    works = work_of(planned)
    in_dtype = [replace(work, weights=FLOAT_TYPES[planned.meta_model.dtype]) for work in works if work.kind == "experts"]
    missing = missing_rates([*works, *in_dtype], measured)
    if missing:
        return None, missing
    return load.tokens / sum(_step_seconds(works, planned, linears, load, measured)), ()


def _step_seconds(
    works: list[Work], planned: PlannedModel, linears: Mapping[str, nn.Linear], load: TrainingLoad, measured: Measurements
) -> Iterator[float]:
    """Yield the times of a step: each layer's forward pass twice, as checkpoints have it computed again, and its backward pass.

    The head is counted as a layer, though it is computed once. Optimiser and routing are left out.
    """
    layers = int(getattr(planned.meta_model.source.config.get_text_config(), "num_hidden_layers", 0))
    yield 3 * layers * measured.layer_overhead_ms / 1e3
    for work in works:
        yield 2 * work.seconds(measured, load.tokens) + _backward_seconds(work, planned.meta_model.dtype, load, measured)
    yield WRITTEN_FIRST_READ * load.tokens * _bytes_per_token(planned, linears) / (measured.read_gbps * 1e9)
    operations = _attention_operations(planned, load)
    if measured.attention_gflops is not None and operations is not None:
        yield (2 + ATTENTION_BACKWARD) * operations / (measured.attention_gflops * 1e9)


def _backward_seconds(work: Work, dtype: torch.dtype, load: TrainingLoad, measured: Measurements) -> float:
    """Return the time of the gradients of a module's inputs: of a linear layer, one product of the same size.

    Of packed experts, gate and up are computed again, which are two thirds of a forward pass at most, and products with all transposed
    weights follow in the model's dtype, into which each weight is expanded once.
    """
    forward_s = work.seconds(measured, load.tokens)
    if work.kind != "experts":
        return forward_s
    expanded = work.weight_count * dtype.itemsize / (measured.read_gbps * 1e9)
    return 2 / 3 * forward_s + replace(work, weights=FLOAT_TYPES[dtype]).seconds(measured, load.tokens) + expanded


def _attention_operations(planned: PlannedModel, load: TrainingLoad) -> float | None:
    """Return the operations of causal attention in one forward pass of all layers; None where a layer is of another kind."""
    config = planned.meta_model.source.config.get_text_config()
    layers, heads = (int(getattr(config, name, 0) or 0) for name in ("num_hidden_layers", "num_attention_heads"))
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kinds_of_layers = named or ["full_attention"] * layers
    if not heads or not set(kinds_of_layers) <= {"full_attention", "sliding_attention"}:
        return None
    widths = sum(_head_widths(config))
    window = int(getattr(config, "sliding_window", None) or load.length)
    pairs = 0.0  # of a token and one that it sees, in a row
    for kind in kinds_of_layers:
        reach = load.length if kind == "full_attention" else min(window, load.length)
        pairs += reach * (load.length - reach / 2)
    return 2.0 * load.batch * pairs * heads * widths


def _head_widths(config: object) -> tuple[int, int]:
    """Return the widths of a head's keys and values."""
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(getattr(config, "num_attention_heads", 1), 1)
    if getattr(config, "v_head_dim", None):  # multi-head latent attention
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim), int(config.v_head_dim)  # type: ignore[attr-defined]
    return int(width), int(width)


def _bytes_per_token(planned: PlannedModel, linears: Mapping[str, nn.Linear]) -> int:
    """Return what a step's element-wise operations read and write for a token in all layers, the adapters' products included."""
    config = planned.meta_model.source.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    found = 0
    for path, module in planned.meta_model.skeleton.named_modules():
        if LAYER.search(f"{path}.") is None:
            continue
        if path in linears:
            found += ADAPTER_INPUT_BYTES * module.in_features + ADAPTER_OUTPUT_BYTES * module.out_features
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 1:  # a norm, of each head or of a layer's vector
            of_heads = re.search(r"\.([qk])_(layer)?norm$", path) if weight.numel() == _head_widths(config)[0] else None
            count = 1 if of_heads is None else heads if of_heads[1] == "q" else keys
            found += NORM_BYTES * count * weight.numel()
            if of_heads is None and weight.numel() == getattr(config, "hidden_size", 0):  # in front of each residual block
                found += RESIDUAL_BYTES * weight.numel()
    layers = int(getattr(config, "num_hidden_layers", 0))
    head = planned.meta_model.skeleton.get_output_embeddings()
    found += 0 if head is None else LOGIT_BYTES * int(head.weight.shape[0])  # type: ignore[union-attr] # an embedding or a linear layer
    return found + layers * ROTARY_BYTES * (heads + keys) * _head_widths(config)[0]
