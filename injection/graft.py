"""`graft()`, the second step: build a plan's operators and the class of model that carries them, and check all that needs no weights."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel

from moegraft.injection.checkpoint.loader import CheckpointLoader
from moegraft.injection.checkpoint.sources import live_source, refuse_meta
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.plan import Plan
from moegraft.operators.base import InPlaceOperator, ModelOperator, Operator
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import NotEnoughMemoryError, UnsupportedModelError
from moegraft.operators.machine import Machine, probe_machine
from moegraft.operators.timeline import Timeline

if TYPE_CHECKING:
    from moegraft.injection.sparsity_setup import SparsitySetup

logger = logging.getLogger(__name__)
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Injection:
    """The plan, operators and shared state of an injected model, as `model.moegraft`.

    Attributes:
        operators: by the path of the module that each replaced or works in; the empty path has the model's own operator, if any.
        context: what the operators share.
    """

    plan: Plan
    operators: Mapping[str, Operator]
    context: InjectionContext

    @property
    def replacing(self) -> dict[str, Operator]:
        """The operators that take a module's place and its weights."""
        return {path: operator for path, operator in self.operators.items() if not isinstance(operator, InPlaceOperator)}

    @property
    def model_operator(self) -> ModelOperator | None:
        """The operator of kind `model`, which replaces nothing and answers `generate`."""
        found = self.operators.get("")
        return found if isinstance(found, ModelOperator) else None

    @property
    def drafting(self) -> bool:
        """Whether the calling thread draws a draft."""
        return self.context.draft_switch.settings is not None

    def statistics(self) -> dict[str, object]:
        """Return what operators did so far: `modules` by path, `sparsity` by target, and `devices`, each GPU that experts share."""
        modules = {path or "(the model)": found for path, operator in self.operators.items() if (found := operator.statistics())}
        return {"modules": modules, **self.context.statistics()}

    def device_counts(self) -> list[tuple[str, Mapping[str, object]]]:
        """Return the counters of each GPU that experts share, with its name; they only grow."""
        return self.context.device_counts()

    @contextmanager
    def timelines(self) -> Iterator[list[Timeline]]:
        """Record the work of GPUs that experts share and the rounds of drafts while the body runs; empty where there is neither."""
        operator = self.model_operator
        with self.context.timelines() as devices:
            timelines = devices or [Timeline("CPU")]
            recorded = operator is not None and operator.record_rounds(timelines)
            try:
                yield timelines if devices or recorded else []
            finally:
                if operator is not None:
                    operator.record_rounds([])

    def placement(self) -> list[str]:
        """Return what runs where, a line for each group of equal operators."""
        groups: dict[str, int] = {}
        for operator in self.operators.values():
            groups[operator.placement()] = groups.get(operator.placement(), 0) + 1
        return [f"{count} x {line}" for line, count in groups.items()]

    def close(self) -> None:
        """End transfers and free the GPUs' slots; the model computes no more."""
        self.context.close()


@dataclass(slots=True)
class GraftedModel:
    """A model whose operators are built and hold no weights yet: what `load` fills, once.

    Attributes:
        injection: becomes `model.moegraft`.
        model_class: the stock class with the operators in place.
        checkpoint: the weights' files; None for a model in memory.
        model: the model in memory, unchanged until `load`; None for a checkpoint.
        sparsity: the thresholds of layers that leave neurons out.
        options: those of `from_pretrained`, for what is not replaced.
    """

    injection: Injection
    model_class: type[PreTrainedModel]
    checkpoint: CheckpointLoader | None
    model: PreTrainedModel | None
    sparsity: SparsitySetup
    options: Mapping[str, Any] = field(default_factory=dict)
    loaded: bool = False


def graft(
    model: MetaModel | PreTrainedModel,
    plan: Plan,
    *,
    threads: int = 0,
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> GraftedModel:
    """Build the operators of a plan. Every check that can be made without reading weights is made here; `model` is not changed.

    Args:
        model: what the plan was made for: a model from `build_meta_model(..., weights=True)`, or one in memory.
        threads: CPU threads of the operators; 0: one for each physical core this process may use.
        device_map, attn_implementation: as in `from_pretrained`, for what is not replaced of a checkpoint; by default the GPUs that the
            operators share with it.
        trust_remote_code: whether a calibration may run the tokenizer's own code.

    Raises:
        CheckpointError: a file or key is damaged, missing, or does not fit the model.
        NotEnoughMemoryError: the plan needs more host memory than is free.
        ThresholdsError: there are no thresholds for layers that leave neurons out, or they are another model's.
        UnsupportedModelError: operators cannot work together, or a module's weights are not in memory.
    """
    from moegraft.injection.sparsity_setup import prepare_sparsity  # which reads `Injection`

    machine = probe_machine()
    if isinstance(model, MetaModel):
        skeleton, folder, dtype = model.skeleton, model.source.folder, model.dtype
        weights = model.weights
        if weights is None:
            raise UnsupportedModelError("this meta model has no weights; make it with build_meta_model(..., weights=True)")
        weights.log_conversions({swap.module: swap.weight_type for swap in plan.swaps if swap.weight_type is not None}, dtype)
        device_map = device_map or infer_device_map(plan, machine)
        check_memory(plan, machine, on_cpu=device_map in (None, "cpu"))
    else:
        skeleton, folder, dtype = model, Path(model.config.name_or_path or os.devnull), model.dtype
        for swap in plan.swaps:
            if not swap.in_place:
                refuse_meta(swap.module, model.get_submodule(swap.module))
    sparsity = prepare_sparsity(plan, skeleton, folder if folder.is_dir() else None, trust_remote_code=trust_remote_code)

    context = InjectionContext(machine=machine, dtype=dtype, threads=threads)
    operators = {swap.module: swap.operator_type.build(skeleton.get_submodule(swap.module), swap.options, context) for swap in plan.swaps}
    for operator in operators.values():
        operator.check()
    injection = Injection(plan, operators, context)

    checkpoint = None
    if isinstance(model, MetaModel):
        assert model.weights is not None, "checked above"
        checkpoint = CheckpointLoader(model.source, model.weights, skeleton, injection.replacing)
    sparsity.check_weights(checkpoint.source if checkpoint is not None else lambda path: live_source(path, skeleton.get_submodule(path)))
    base = model.source.model_class if isinstance(model, MetaModel) else type(model)
    return GraftedModel(
        injection,
        _injected_class(base, captures=context.decode_steps is not None),
        checkpoint,
        None if isinstance(model, MetaModel) else model,
        sparsity,
        {"dtype": dtype, "device_map": device_map, "attn_implementation": attn_implementation},
    )


def infer_device_map(plan: Plan, machine: Machine) -> Any:
    """Return a device map for all but the operators' weights: the GPUs that operators compute on; None: the CPU."""
    devices = {device for swap in plan.swaps for device in swap.operator_type.devices_wanted(swap.options)}
    if not devices or not machine.gpus:
        return None
    if len(devices) == 1 and "auto" not in devices:
        return {"": next(iter(devices))}
    return {"": "cuda:0"} if len(machine.gpus) == 1 else "auto"


def check_memory(plan: Plan, machine: Machine, *, on_cpu: bool = True) -> None:
    """
    Args:
        on_cpu: whether what is not replaced stays on the CPU.

    Raises:
        NotEnoughMemoryError: the plan's host memory is more than the machine has free.
    """
    needed = plan.bytes_by_device.get("cpu", 0) if on_cpu else sum(swap.footprint.by_device.get("cpu", 0) for swap in plan.swaps)
    if needed > machine.available_bytes:
        raise NotEnoughMemoryError(
            f"this plan needs {needed / GIB:.1f} GiB of memory and {machine.available_bytes / GIB:.1f} GiB are free; "
            "a smaller weight type (weights: int4 in the rule file) or a smaller model would fit"
        )
    mapped = plan.bytes_by_device.get("disk", 0)
    if needed + mapped > machine.available_bytes:
        logger.warning(
            "%.1f GiB of packed experts and %.1f GiB of memory free: experts that do not fit are read from disk as they are used, "
            "at the disk's speed",
            mapped / GIB,
            machine.available_bytes / GIB,
        )


def place(model: PreTrainedModel, path: str, operator: Operator) -> None:
    """Put one operator in a module's place."""
    parent, _, leaf = path.rpartition(".")
    block = model.get_submodule(parent)
    setattr(block, leaf, operator)
    # Some families would fill the experts' parameters from the block above them, where there are none any more. What is stored
    # needs no filling, for a checkpoint that lacks a parameter is refused; buffers that are not stored do.
    if not block._non_persistent_buffers_set:
        block._is_hf_initialized = True  # type: ignore[assignment] # transformers' own mark
    # transformers records ties when it builds a model; a tie of a replaced layer would restore its parameter, or miss it.
    model.all_tied_weights_keys = _ties_outside(model.all_tied_weights_keys, [path])


class InjectedModel:
    """What an injected model does differently from its stock class."""

    moegraft: Injection

    def save_pretrained(self, *args: object, **kwargs: object) -> NoReturn:
        """
        Raises:
            UnsupportedModelError: always; the experts are packed for a kernel, and a checkpoint without them could not be loaded.
        """
        raise UnsupportedModelError(
            f"an injected model cannot be saved: {len(self.moegraft.replacing)} of its modules hold weights packed for their operator, "
            "not parameters; save the stock model (AutoModelForCausalLM.from_pretrained) or copy the checkpoint it was loaded from"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the stock module's, of what is left of it, with a warning once it lacks weights."""
        found: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc] # of the stock class, which comes after this one
        replaced = self.moegraft.replacing if hasattr(self, "moegraft") else {}
        if replaced:
            warnings.warn(
                f"the state_dict of an injected model lacks the packed weights of its {len(replaced)} operators "
                f"({next(iter(replaced))}, ...): it restores no model; take the stock model's, or the checkpoint it was loaded from",
                stacklevel=2,
            )
        return found

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """
        Raises:
            UnsupportedModelError: always; `copy.deepcopy` and pickle would have to duplicate packed weights and threads.
        """
        raise UnsupportedModelError("an injected model cannot be copied or pickled; load it again with optimize_and_load")


def _injected_class(base: type[PreTrainedModel], *, captures: bool) -> type[PreTrainedModel]:
    """Create a subclass of `base`, under its name, that takes `operators` in place of modules as it is built.

    Args:
        captures: whether decode steps may be captured; the forward pass of other models is the stock one.
    """

    def __init__(
        self: PreTrainedModel, config: PretrainedConfig, *args: Any, operators: Mapping[str, Operator] | None = None, **kwargs: Any
    ) -> None:
        # An argument and not a member of the class: the class would keep operators alive after their model.
        base.__init__(self, config, *args, **kwargs)
        for path, operator in (operators or {}).items():
            place(self, path, operator)

    @functools.wraps(base.get_expanded_tied_weights_keys)
    def get_expanded_tied_weights_keys(self: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, str]:
        # `tie_weights` asks again: only layers that the model still has are tied.
        ties = base.get_expanded_tied_weights_keys(self, *args, **kwargs)
        return _ties_outside(ties, (path for path, module in self.named_modules() if isinstance(module, Operator)))

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        stock = functools.partial(base.generate, self)  # type: ignore[attr-defined] # only generating classes have it
        operator = self.moegraft.model_operator
        if operator is not None:
            return operator.generate(self, stock, *args, **kwargs)
        steps = self.moegraft.context.decode_steps
        return stock(*args, **(kwargs if steps is None else steps.generation(self, args, kwargs)))

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = None if torch.compiler.is_compiling() else self.moegraft.context.decode_steps
        if steps is None:
            return base.forward(self, *args, **kwargs)
        return steps.forward(self, functools.partial(base.forward, self), args, kwargs, drafting=self.moegraft.drafting)

    members: dict[str, Callable[..., Any]] = {"__init__": __init__, "get_expanded_tied_weights_keys": get_expanded_tied_weights_keys}
    if issubclass(base, GenerationMixin):
        members["generate"] = functools.wraps(base.generate)(generate)
    if captures:
        members["forward"] = forward
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    # Both names are kept: transformers looks classes up by name and source file, and users read them.
    return type(base.__name__, (InjectedModel, base), {**members, **names})


def _ties_outside(ties: Mapping[str, str], paths: Iterable[str]) -> dict[str, str]:
    replaced = tuple(f"{path}." for path in paths)
    return {name: tie for name, tie in ties.items() if not name.startswith(replaced)}


def injection_of(model: PreTrainedModel) -> Injection | None:
    """Return `model.moegraft`; None for a stock model."""
    found = getattr(model, "moegraft", None)
    return found if isinstance(found, Injection) else None


def decode_steps_of(model: PreTrainedModel) -> Any:
    """Return what captures a model's decode steps; None for stock models, and where no rule asks for it."""
    injection = injection_of(model)
    return None if injection is None else injection.context.decode_steps


def new_cache(model: PreTrainedModel) -> Any:
    """Return an empty key-value cache of the kind that the model's `generate` makes."""
    injection = injection_of(model)
    operator = None if injection is None else injection.model_operator
    made = None if operator is None else operator.new_cache(model)
    return DynamicCache(config=model.config.get_text_config(decoder=True)) if made is None else made
