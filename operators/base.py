"""The interface of operators: modules with a name and typed options that load their own weights from a weight source.

Planning, loading, predictions and programs know an operator through these classes alone. What only some operators have, they offer as
objects: `Traits` of their options, and a `Packing` of their weights.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.weights import PackedWeights, WeightSource

if TYPE_CHECKING:
    from transformers import Cache, PretrainedConfig, PreTrainedModel

    from moegraft.operators.cache_form import QuantisedForm
    from moegraft.operators.context import InjectionContext
    from moegraft.operators.draft import BatchDrafts, DraftSettings
    from moegraft.operators.sparsity import LayerSparsity, SparsityOptions
    from moegraft.operators.timeline import Timeline

MAX_REPLAYED_SEQUENCES = 8  # at once, in a decode step that is a native program

Kind = Literal["experts", "router", "linear", "attention", "norm", "recurrent", "model"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that an operator holds once loaded, by device name (`cpu`, `cuda:0`, and `disk` for mapped files)."""

    by_device: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.by_device.values())

    def part(self, held: int, whole: int) -> Footprint:
        """Return the bytes of `held` of `whole` equal experts."""
        return Footprint({device: size * held // whole for device, size in self.by_device.items()})


@dataclass(frozen=True, slots=True)
class DecodeLoss:
    """What passes of decoding compute otherwise than those of prompts.

    Attributes:
        text: what, as the end of a sentence.
        tokens: of one pass.
        settings: how experts run in it.
    """

    text: str
    tokens: int = 1
    settings: DraftSettings | None = None


@dataclass(frozen=True, slots=True)
class Traits:
    """What the options of a rule mean for the rest of the model.

    Attributes:
        identity: the options that change the model's output; a model with other ones does not reuse stored keys and values.
        devices: the GPUs that are asked for, such as `auto` or `cuda:1`; empty for the CPU.
        slots: how experts in host memory share slots on GPUs; None where they use no GPU.
        sparsity: which neurons of experts are left out; None where all are computed. It is the option `sparsity`.
        draft_sparsity: the share of neurons that drafts leave out; None where drafts leave out no more than other steps.
        cache_form: returns the form in which `generate` stores keys and values, for a model's config; None for the model's dtype.
        replays_steps: whether decode steps on the CPU may be replayed as native programs.
        undivided: why several processes cannot hold the experts together, of operators of the kind `experts`: a reason in the options,
            or an empty text where the operator does not join `InjectionContext.expert_group`; None where they can.
        mtp: whether the model gets the layers of its checkpoint for multi-token prediction.
        drafts: whether the operator drafts, and removes from the cache what the model rejects.
        drafting: how experts run while they draft; None where they do not draft.
        narrows: whether experts can be fewer while drafts ask for it (`InjectionContext.draft_switch`).
        decode_loss: what decode steps compute otherwise than prompts, at the cost of exactness; None where nothing.
        untrained: why a model with these options cannot be trained, not even adapters beside its frozen weights; None where it can.
        host_budget: returns the host memory in which all such operators of a model hold a part of their bytes on disk, given what is free;
            None where the system decides that, by its page cache.
    """

    identity: str
    devices: frozenset[str] = frozenset()
    slots: ExpertSlots | None = None
    sparsity: SparsityOptions | None = None
    draft_sparsity: float | None = None
    cache_form: Callable[[PretrainedConfig], QuantisedForm] | None = None
    replays_steps: bool = True
    undivided: str | None = ""
    mtp: bool = False
    drafts: bool = False
    drafting: DraftSettings | None = None
    narrows: bool = False
    decode_loss: DecodeLoss | None = None
    untrained: str | None = None
    host_budget: Callable[[int], int] | None = None


class Packing(ABC):
    """The weight types that an operator packs to, one of which its option `weights` chooses.

    Attributes:
        types: the values of that option.
        measured: the options to measure the operator's speed with, by weight type.
    """

    types: tuple[str, ...]
    measured: Mapping[str, Any]

    @abstractmethod
    def supports(self, options: Any, weight_type: str) -> bool:
        """Return whether the operator can compute with the stored formats of a GGUF file.

        Args:
            weight_type: the type to compute with instead of the one in `options`: a stored format such as `q4_k`, or one type for gate and
                up and one for down, as in `q4_k+q6_k`.
        """

    @abstractmethod
    def type_for(self, options: Any, dtype: torch.dtype) -> str:
        """Return the type that weights stored as `dtype` are packed to."""

    @abstractmethod
    def smaller(self, options: Any | None) -> Mapping[str, Any]:
        """Return options that may take fewer bytes, by the advice to write them into a rule, in ascending order of lost precision.

        Args:
            options: those of the rule; None for a module that no rule replaces.
        """

    def options_for(self, path: str, module: nn.Module, options: Any, resolve: Callable[[str], str] | None) -> Any:
        """Return the options of a rule for one module, which may be on meta.

        Args:
            resolve: returns the weight type that one in a rule means for this module, whose weights are stored in blocks; None where
                they are not.

        Raises:
            OSError, MoegraftError: a file that the options name cannot be read, or is for another model.
        """
        return options if resolve is None else replace(options, weights=resolve(str(options.weights)))


class Operator(nn.Module, ABC):
    """A module that replaces one of the model's own.

    A subclass names itself and its options class. It reports whether it can replace a module and how many bytes it will hold, is built
    before any weight is read, and loads its weights. `moegraft.operators.registry` or the entry-point group `moegraft.operators`
    registers it by name.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    options_type: ClassVar[type[Any]]  # a frozen dataclass; its fields are the options a rule file may give
    summary: ClassVar[str]  # one line for listings
    sparsity: LayerSparsity | None = None  # the threshold and counts of an operator that leaves neurons out
    packing: ClassVar[Packing | None] = None  # of an operator with the option `weights`
    uncaptured: ClassVar[str | None] = None  # why a CUDA graph cannot capture decode steps with this operator; None where it can

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, module: nn.Module, options: Any) -> str | None:
        """Return why this operator cannot replace `module` with `options`, or None where it can; reads structure, never weights."""

    @classmethod
    @abstractmethod
    def footprint(cls, module: nn.Module, options: Any, dtype: torch.dtype) -> Footprint:
        """Return the bytes that the operator will hold for `module`, whose weights are stored as `dtype`."""

    @classmethod
    def traits(cls, options: Any) -> Traits:
        """Return what `options` mean for the rest of the model."""
        return Traits(repr(options))

    @classmethod
    @abstractmethod
    def build(cls, module: nn.Module, options: Any, context: InjectionContext) -> Self:
        """Create the operator for `module`, which may be on meta; the new operator holds no weights yet."""

    @abstractmethod
    def placement(self) -> str:
        """Return one line for users: what this operator computes, in which weight type, on which device."""

    @abstractmethod
    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        """Take every weight from `source`, piece by piece, calling `advance(bytes_read)` after each.

        Raises:
            CheckpointError: a piece is missing, of the wrong shape, or cannot be read.
        """

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        """Prepare for the first forward pass; called once, when the whole model is loaded. An operator must not keep `model`.

        Args:
            path: the path of the module that this operator replaced or works in.
        """

    def statistics(self) -> Mapping[str, object]:
        """Return the operator's counters and measurements so far, by name, for programs that show them."""
        return {}

    def weight_samples(self) -> Iterator[bytes]:
        """Yield bytes that differ where the operator's weights do, without those that are parameters or buffers of PyTorch.

        `moegraft.operators.weights.sampled` takes them from packed bytes.
        """
        return iter(())

    def packed_weights(self) -> PackedWeights | None:
        """Return the loaded weights as `load` takes them from `source.packed`; None where it reads those of a checkpoint alone."""
        return None

    @property
    def weight_type(self) -> str | None:
        """The type of the weights that the operator computes with; None where it is not known."""
        return None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # `copy.deepcopy` and pickle would have to duplicate packed weights and threads.
        raise UnsupportedModelError(f"{self.name} cannot be copied or pickled: leave its module out of the rules")


class InPlaceOperator(Operator):
    """An operator that works within a stock module and holds no weights; other rules may replace parts of that module."""

    @classmethod
    def footprint(cls, module: nn.Module, options: Any, dtype: torch.dtype) -> Footprint:
        return Footprint({})

    @classmethod
    def traits(cls, options: Any) -> Traits:
        return Traits("")  # the operator computes what its module does, up to rounding

    def load(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        raise AssertionError(f"{self.name} takes no weights")

    def set_aside(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `module`, the one that the operator works in, computes itself."""
        return nullcontext()


class ModelOperator(InPlaceOperator):
    """An operator that serves some calls of a model's `generate` and hands all others to the stock method, with the reason in the log.

    Every call is given the model, so that an operator does not keep its model alive.
    """

    kind = "model"
    uncaptured = "an operator of the model's own decodes"

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options
        self._logged: set[str] = set()

    @classmethod
    def unsupported_reason(cls, module: nn.Module, options: Any) -> str | None:
        from transformers import GenerationMixin, PreTrainedModel

        if not isinstance(module, PreTrainedModel) or not isinstance(module, GenerationMixin):
            return f"{type(module).__name__} does not generate text"
        return "it has an encoder and a decoder" if module.config.is_encoder_decoder else None

    @property
    def operators(self) -> Sequence[ModelOperator]:
        """The operators of the model: this one alone, if it does not stand for several."""
        return (self,)

    @classmethod
    def conflict(cls, model: nn.Module, options: Any, traits: Mapping[str, Sequence[Traits]]) -> str | None:
        """Return why the operator cannot work beside the model's others, and what to do, or None where it can.

        Args:
            model: with the structure of the stock model.
            traits: what the options of all operators mean, by the paths of the modules that they replace or work in.
        """
        return None

    def new_cache(self, model: PreTrainedModel) -> Cache | None:
        """Return an empty key-value cache as `generate` creates it, for callers that fill it first; None for transformers' own."""
        return None

    def batch_drafts(self) -> BatchDrafts | None:
        """Return drafts for texts that a server decodes together without `generate`; None where the operator has to decode itself."""
        return None

    def record_rounds(self, timelines: Sequence[Timeline]) -> bool:
        """Add the spans of the operator's rounds to `timelines` from now on; return False where it decodes without rounds."""
        return False

    @abstractmethod
    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute `model.generate(*args, **kwargs)`; `plain` is the stock method, bound to the model."""

    def warn_once(self, message: str) -> None:
        """Log a warning the first time that it occurs."""
        if message not in self._logged:
            self._logged.add(message)
            logging.getLogger(type(self).__module__).warning("%s: %s", self.name, message)

    def extra_repr(self) -> str:
        return ", ".join(f"{field.name}={getattr(self.options, field.name)}" for field in fields(self.options))


class ModelOperators(ModelOperator):
    """Several operators of one model: each of them hands the calls of `generate` that it does not answer itself to the next one.

    Args:
        operators: in the order of their rules.
    """

    def __init__(self, operators: Sequence[ModelOperator]) -> None:
        super().__init__(None)
        self._operators = tuple(operators)
        self.name = " and ".join(operator.name for operator in operators)  # type: ignore[misc] # not of the class

    @classmethod
    def build(cls, module: nn.Module, options: Any, context: InjectionContext) -> NoReturn:
        raise AssertionError("rules name each of them")

    @property
    def operators(self) -> Sequence[ModelOperator]:
        return self._operators

    def on_model_loaded(self, model: PreTrainedModel, path: str) -> None:
        for operator in self._operators:
            operator.on_model_loaded(model, path)

    def new_cache(self, model: PreTrainedModel) -> Cache | None:
        created = (operator.new_cache(model) for operator in self._operators)
        return next((cache for cache in created if cache is not None), None)

    def batch_drafts(self) -> BatchDrafts | None:
        drafts = (operator.batch_drafts() for operator in self._operators)
        return next((found for found in drafts if found is not None), None)

    def record_rounds(self, timelines: Sequence[Timeline]) -> bool:
        recorded = [operator.record_rounds(timelines) for operator in self._operators]
        return any(recorded)

    def generate(self, model: PreTrainedModel, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for operator in reversed(self._operators):
            plain = update_wrapper(partial(operator.generate, model, plain), plain)  # which has the signature of the stock method
        return plain(*args, **kwargs)

    def placement(self) -> str:
        return "; ".join(operator.placement() for operator in self._operators)

    def statistics(self) -> Mapping[str, object]:
        return {name: value for operator in self._operators for name, value in operator.statistics().items()}

    def extra_repr(self) -> str:
        return self.name


# The name of the cache among the arguments and outputs of a model: "cache" from transformers 5.24 on.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def with_cache_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call with the cache under the name that transformers uses now, as its own models take it."""
    older = next((name for name in ("past_key_values", "cache_params") if name in kwargs), None)
    if CACHE == "past_key_values" or older is None or CACHE in kwargs:
        return kwargs
    return {CACHE if name == older else name: value for name, value in kwargs.items()}


def call_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    others = bound.pop("kwargs", {})
    return {**bound, **others}


# Estimates of memory and speed, which planning and operators exchange before a weight is read.

GPU_MARGIN_SHARE, GPU_MARGIN_BYTES = 0.06, 768 << 20


def gpu_margin_bytes(total_bytes: int) -> int:
    """Return the bytes to leave free on a GPU of this size, for a prompt's activations, PyTorch's own blocks and the display."""
    return max(GPU_MARGIN_BYTES, int(GPU_MARGIN_SHARE * total_bytes))


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of one kind of layer on a CPU: GB/s of weights with one token, GFLOP/s with many."""

    decode_gbps: float
    prefill_gflops: float


@dataclass(frozen=True, slots=True)
class GpuRates:
    """The speed that a GPU reaches in practice.

    Attributes:
        gbps: bandwidth of its own memory.
        tflops: 16-bit arithmetic.
        link_gbps: bandwidth of copies from host memory.
        origin: where the figures are from, for people.
    """

    gbps: float
    tflops: float
    link_gbps: float
    origin: str

    def describe(self) -> str:
        return f"a GPU of {self.gbps:.4g} GB/s and {self.tflops:.3g} TFLOP/s behind a link of {self.link_gbps:.3g} GB/s ({self.origin})"


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The routed experts of one layer.

    Attributes:
        resident: share of the experts that have a slot on a GPU.
        left_out: share of the neurons that are left out.
        gated: whether the gate selects these neurons; otherwise the up projection does.
    """

    num_experts: int
    top_k: int
    expert_bytes: int
    bits_per_weight: float
    resident: float
    left_out: float = 0.0
    gated: bool = True


@dataclass(frozen=True, slots=True)
class SlotCount:
    """Slots on a GPU: `resident` experts stay there; `total` also counts the slots that other experts are loaded into."""

    resident: int
    total: int


class ExpertSlots(ABC):
    """How experts in host memory share the slots of a GPU. Layers with equal objects share slots."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens of the key-value cache to reserve memory for where slots take the free memory."""

    @property
    @abstractmethod
    def is_sized(self) -> bool:
        """Whether the rule gives the number of slots; otherwise they take the free memory."""

    @abstractmethod
    def with_ratio(self, ratio: float) -> Self:
        """Return a copy with slots for this share of the experts."""

    @abstractmethod
    def count(self, layers: int, num_experts: int, expert_bytes: int, free_bytes: int, share: float = 1.0) -> SlotCount:
        """Return the slots of `layers` layers on a GPU with `free_bytes` of memory for slots, of which they may take `share`."""

    @abstractmethod
    def layer_ms(self, layer: RoutedExperts, tokens: int, cpu: Rate, gpu: GpuRates, shared_ms: float) -> float:
        """Return the ms that one layer takes for `tokens` tokens with even routing.

        Args:
            shared_ms: time of the shared experts, which the GPU computes first while the CPU and the link work. The result includes it.
        """
