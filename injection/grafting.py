"""`graft()`, the second step: build a plan's operators and the class of the injected model, and make all checks that need no weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from moegraft.injection.checkpoint.sources import ModuleSource, refuse_meta
from moegraft.injection.injected import Injection, injected_class
from moegraft.injection.loading import CheckpointLoader
from moegraft.injection.meta_model import MetaModel
from moegraft.injection.planning import Plan
from moegraft.operators.base import ModelOperator, ModelOperators
from moegraft.operators.cache_form import kv_cache
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import NotEnoughMemoryError, UnsupportedModelError, human_bytes
from moegraft.operators.expert_group import ExpertGroup
from moegraft.operators.machine import Machine, probe_machine, threads_beside_gpu
from moegraft.operators.weights import WeightTypes

if TYPE_CHECKING:
    from moegraft.injection.calibration import SparsitySetup
    from moegraft.operators.decode.replay import StepReplay

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GraftedModel:
    """A model whose operators are built and hold no weights yet; `load` fills it, once.

    Attributes:
        injection: becomes `model.moegraft`.
        model_class: the stock class with the operators in place.
        checkpoint: the weights' files; None for a model in memory.
        model: the model in memory, unchanged until `load`; None for a checkpoint.
        sparsity: the thresholds of layers that leave neurons out; None where no layer does.
        options: keyword arguments of `from_pretrained`, for what is not replaced.
    """

    injection: Injection
    model_class: type[PreTrainedModel]
    checkpoint: CheckpointLoader | None
    model: PreTrainedModel | None
    sparsity: SparsitySetup | None
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
    expert_group: ExpertGroup | None = None,
) -> GraftedModel:
    """Build the operators of a plan, and make every check that needs no weights. `model` is not changed.

    Args:
        model: the model that was planned: one from `build_meta_model(..., weights=True)`, or one in memory.
        threads: CPU threads of the operators; 0: one for each physical core this process may use, less up to two that GPUs need.
        device_map, attn_implementation: as in `from_pretrained`, for what is not replaced of a checkpoint; `device_map` is by default
            the GPUs that the operators use.
        trust_remote_code: whether a calibration may run the tokenizer's own code.
        expert_group: the processes that hold the experts, with the shares of the plan.

    Raises:
        CheckpointError: a file or key is damaged, missing, or does not fit the model.
        NotEnoughMemoryError: the plan needs more host memory than is free.
        ThresholdsError: there are no thresholds for layers that leave neurons out, or they are another model's.
        UnsupportedModelError: operators cannot work together, or a module's weights are not in memory.
    """
    machine = probe_machine()
    if isinstance(model, MetaModel):
        model = model.with_mtp if plan.mtp else model
        skeleton, folder, dtype = model.skeleton, model.source.folder, model.dtype
        weights = model.weights
        if weights is None:
            raise UnsupportedModelError("this meta model has no weights; build it with build_meta_model(..., weights=True)")
        types = {swap.module: WeightTypes.parse(swap.weight_type) for swap in plan.swaps if swap.weight_type is not None}
        weights.log_conversions(types, dtype)
        device_map = device_map or infer_device_map(plan.devices, machine)
        on_cpu = device_map in (None, "cpu")
        check_memory(plan, machine, on_cpu=on_cpu)
    else:
        skeleton, folder, dtype = model, Path(model.config.name_or_path or os.devnull), model.dtype
        for swap in plan.swaps:
            if not swap.in_place:
                refuse_meta(swap.module, model.get_submodule(swap.module))
        on_cpu = all(parameter.device.type != "cuda" for parameter in skeleton.parameters())
    sparsity = None
    if any(swap.traits.sparsity is not None for swap in plan.swaps):
        from moegraft.injection.calibration import prepare_sparsity  # most chats start without it

        sparsity = prepare_sparsity(plan, skeleton, folder if folder.is_dir() else None, trust_remote_code=trust_remote_code)

    assert (None if expert_group is None else expert_group.shares) == plan.shares, "the plan is that of another group"
    if threads == 0 and not on_cpu and plan.devices and machine.gpus:
        threads = threads_beside_gpu()
    context = InjectionContext(dtype=dtype, threads=threads, expert_group=expert_group)
    built = [(swap.module, swap.operator_type.build(skeleton.get_submodule(swap.module), swap.options, context)) for swap in plan.swaps]
    operators = dict(built)
    of_model = [operator for _, operator in built if isinstance(operator, ModelOperator)]
    if len(of_model) > 1:
        operators[""] = ModelOperators(of_model)
    if context.gpu_engines_in_use is not None:
        context.gpu_engines_in_use.cache = replace(kv_cache(skeleton), form=plan.cache_form(skeleton.config))
    context.replay = _step_replay(plan, context)
    stock = isinstance(model, MetaModel) and model.source.gguf is None and model.source.quantised is None
    injection = Injection(plan, operators, context, folder.absolute() if stock else None)  # the working directory may change
    checkpoint = None
    if isinstance(model, MetaModel):
        assert model.weights is not None, "checked above"
        checkpoint = CheckpointLoader(model.source, model.weights, skeleton, injection.replacing)
        injection = replace(injection, new_head=checkpoint.new_head)
    if sparsity is not None:
        sparsity.check_weights(
            checkpoint.source if checkpoint is not None else lambda path: ModuleSource(path, skeleton.get_submodule(path))
        )
    base = model.source.model_class if isinstance(model, MetaModel) else type(model)
    return GraftedModel(
        injection,
        injected_class(base, captures=context.replay is not None or expert_group is not None, mtp=plan.mtp),
        checkpoint,
        None if isinstance(model, MetaModel) else model,
        sparsity,
        {"dtype": dtype, "device_map": device_map, "attn_implementation": attn_implementation},
    )


def _step_replay(plan: Plan, context: InjectionContext) -> StepReplay | None:
    """Return what replays decode steps, as captured graphs where experts run on a GPU, else as native programs; None where nothing can."""
    engines = context.gpu_engines_in_use
    if engines is not None and engines.may_open:
        from moegraft.operators.decode.cuda_graph import CudaGraphs

        return CudaGraphs(engines, context.draft_switch) if engines.captures else None
    if "runtime" not in vars(context) or not all(swap.traits.replays_steps for swap in plan.swaps):
        return None
    from moegraft.operators.decode.native.steps import NativePrograms

    return NativePrograms(context.runtime, context.draft_switch, vars(context).get("sparse_layers"))


def infer_device_map(devices: Set[str], machine: Machine) -> Any:
    """Return a device map for what is not replaced: the GPUs that operators compute on, `devices`; None for the CPU."""
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
        NotEnoughMemoryError: the plan needs more host memory than the machine has free.
    """
    needed = plan.bytes_by_device.get("cpu", 0) if on_cpu else sum(swap.footprint.by_device.get("cpu", 0) for swap in plan.swaps)
    if needed > machine.available_bytes:
        raise NotEnoughMemoryError(
            f"this plan needs {human_bytes(needed)} of memory and {human_bytes(machine.available_bytes)} are free; "
            "a smaller weight type (weights: int4 in the rule file) or a smaller model would fit"
        )
    mapped = sum(swap.footprint.by_device.get("disk", 0) for swap in plan.swaps if swap.traits.host_budget is None)
    if needed + mapped > machine.available_bytes:
        logger.warning(
            "%s of packed experts and %s of memory free: experts that do not fit are read from disk at each use, page by page; "
            "'memory: auto' beside cache_dir reads them whole and ahead",
            human_bytes(mapped),
            human_bytes(machine.available_bytes),
        )
