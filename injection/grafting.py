"""`graft()` and `load()`, the steps after `plan()`.

`graft` builds a plan's operators and the class of the injected model, and makes all checks that need no weights; `load` streams the weights
into them, one expert at a time.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from moegraft.injection.checkpoint.files import LazyTensor
from moegraft.injection.checkpoint.keymap import KeyMap
from moegraft.injection.checkpoint.packed import StoredPacked
from moegraft.injection.checkpoint.sources import StoredWeights, live_source, refuse_meta
from moegraft.injection.injected import Injection, injected_class, place
from moegraft.injection.meta_model import MetaModel, ModelSource
from moegraft.injection.planning import Plan
from moegraft.injection.progress import ProgressLine, progress_line
from moegraft.operators.base import Operator
from moegraft.operators.cache_form import kv_cache
from moegraft.operators.context import InjectionContext
from moegraft.operators.decode.states import split_passes
from moegraft.operators.errors import CheckpointError, NotEnoughMemoryError, UnsupportedModelError, human_bytes
from moegraft.operators.expert_group import ExpertGroup
from moegraft.operators.machine import Machine, probe_machine, threads_beside_gpu
from moegraft.operators.weights import WeightSource, WeightTypes

if TYPE_CHECKING:
    from moegraft.injection.calibration import SparsitySetup
    from moegraft.operators.decode.replay import StepReplay

logger = logging.getLogger(__name__)
LOADING = "loading and packing the weights"
SHOWN_KEYS = 5


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
        device_map = device_map or infer_device_map(_devices_wanted(plan), machine)
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
    if threads == 0 and not on_cpu and _devices_wanted(plan) and machine.gpus:
        threads = threads_beside_gpu()
    context = InjectionContext(dtype=dtype, threads=threads, expert_group=expert_group)
    operators = {swap.module: swap.operator_type.build(skeleton.get_submodule(swap.module), swap.options, context) for swap in plan.swaps}
    if context.gpu_engines_in_use is not None:
        context.gpu_engines_in_use.cache = replace(kv_cache(skeleton), form=plan.cache_form(skeleton.config))
    context.replay = _step_replay(plan, context)
    stock = isinstance(model, MetaModel) and model.source.gguf is None and model.source.quantised is None
    injection = Injection(plan, operators, context, folder if stock else None)
    if injection.model_operator is not None:
        injection.model_operator.check()

    checkpoint = None
    if isinstance(model, MetaModel):
        assert model.weights is not None, "checked above"
        checkpoint = CheckpointLoader(model.source, model.weights, skeleton, injection.replacing)
    if sparsity is not None:
        sparsity.check_weights(
            checkpoint.source if checkpoint is not None else lambda path: live_source(path, skeleton.get_submodule(path))
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


def _devices_wanted(plan: Plan) -> set[str]:
    return {device for swap in plan.swaps for device in swap.traits.devices}


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


def load(grafted: GraftedModel, *, progress: bool | ProgressLine = True, rest: PreTrainedModel | None = None) -> PreTrainedModel:
    """Fill a grafted model with its weights; a model in memory is changed in place.

    Args:
        grafted: from `graft`; it can be loaded once.
        progress: whether to show a line on stderr, or the line.
        rest: a model of `grafted.model_class` with the operators in place and all weights but theirs, where transformers has loaded these
            from the checkpoint; by default they are loaded here.

    Returns:
        A PreTrainedModel of the stock class's name in eval mode, with `model.moegraft`.

    Raises:
        ValueError: the grafted model has been loaded before.
        CheckpointError: a weight cannot be read. No half-built model is left: a model in memory still runs, with the modules that
            have not been replaced.
    """
    if grafted.loaded:
        raise ValueError("this grafted model has been loaded already; graft the plan again for another model")
    grafted.loaded = True
    line = progress_line(progress)
    with _library_bars_hidden():
        if grafted.checkpoint is not None:
            model = _from_checkpoint(grafted, grafted.checkpoint, rest, line)
        else:
            assert grafted.model is not None, "a grafted model has a checkpoint or is in memory"
            model = _in_memory(grafted, grafted.model, line)
    model.eval()
    with line.stage("preparing the operators"):
        if grafted.sparsity is not None:
            grafted.sparsity.apply(model)
        for path, operator in grafted.injection.operators.items():
            operator.on_model_loaded(model, path)
        split_passes(model)  # last: operators may compute each token of a pass
    return model


def _from_checkpoint(
    grafted: GraftedModel, checkpoint: CheckpointLoader, rest: PreTrainedModel | None, line: ProgressLine
) -> PreTrainedModel:
    injection = grafted.injection
    if injection.follows:
        with torch.device("meta"):
            model = grafted.model_class(checkpoint.config, operators=injection.replacing)  # type: ignore[call-arg] # of injected classes
        model.moegraft = injection  # type: ignore[assignment] # nn.Module declares its attributes as modules
        checkpoint.load_operators(lambda size: None)
        return model
    with line.stage(LOADING, checkpoint.total_bytes) as advance:
        model = rest or checkpoint.load_rest(grafted.model_class, advance, operators=injection.replacing, **grafted.options)
        model.moegraft = injection  # type: ignore[assignment] # nn.Module declares its attributes as modules
        checkpoint.load_operators(advance)
    return model


def _in_memory(grafted: GraftedModel, model: PreTrainedModel, line: ProgressLine) -> PreTrainedModel:
    """Replace modules one by one, so that each is freed as soon as its operator has its weights."""
    injection = grafted.injection
    total_bytes = sum(parameter.nbytes for path in injection.replacing for parameter in model.get_submodule(path).parameters())
    loaded: dict[str, Operator] = {}
    try:
        with line.stage(LOADING, total_bytes) as advance:
            for path, operator in injection.replacing.items():
                operator.load(live_source(path, model.get_submodule(path)), advance)
                place(model, path, operator)
                loaded[path] = operator
    except BaseException:
        # The replaced modules are freed: the model still runs, but must not be saved as if it were complete.
        if loaded:
            _mark(model, grafted, replace(injection, operators=loaded))
        raise
    _mark(model, grafted, injection)
    return model


def _mark(model: PreTrainedModel, grafted: GraftedModel, injection: Injection) -> None:
    model.__class__ = grafted.model_class
    model.moegraft = injection  # type: ignore[assignment] # nn.Module declares its attributes as modules


@contextmanager
def _library_bars_hidden() -> Iterator[None]:
    """Hide the progress bars of transformers while the body runs."""
    shown_before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown_before:
            transformers_logging.enable_progress_bar()


class CheckpointLoader:
    """One checkpoint and the model that it is loaded into. The constructor makes every check that needs only headers.

    Raises:
        CheckpointError: a file or key is damaged, missing, or does not fit the model.
    """

    def __init__(self, source: ModelSource, weights: StoredWeights, skeleton: PreTrainedModel, operators: Mapping[str, Operator]) -> None:
        self._source = source
        self._operators = operators
        self._weights = weights
        keymap = weights.keymap
        self._sources = {path: self.source(path) for path in operators}
        taken = keys_taken(keymap, operators)
        read = {key for target in keymap.targets.values() for key in target.all_keys}
        rest = read - taken
        self._rest = {key: tensor for key, tensor in weights.tensors.items() if key in rest}
        packed = [source.nbytes for source in self._sources.values() if isinstance(source, StoredPacked)]
        self.total_bytes = sum(weights.tensors[key].nbytes for key in read) + sum(packed)
        self._generation_config: GenerationConfig | None = None
        if (file := source.folder / GENERATION_CONFIG_NAME).is_file():
            try:
                self._generation_config = GenerationConfig.from_pretrained(source.folder)
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{file}: not a readable generation config; download it again") from error
        _check_keys(source, keymap, operators, packed=bool(weights.packed))
        _check_rest(skeleton, keymap, weights.tensors, taken)

    @property
    def config(self) -> PretrainedConfig:
        return self._source.config

    def source(self, path: str) -> WeightSource:
        """Return the weights of the operator at `path`."""
        return self._weights.source(path, self._operators[path].kind)

    def load_rest(self, model_class: type[PreTrainedModel], advance: Callable[[int], None], **options: Any) -> PreTrainedModel:
        """Load everything but the operators' weights with transformers' own loader; `advance(bytes)` is called as tensors are read."""
        for tensor in self._rest.values():
            tensor.on_read, tensor.kept = advance, True
        given = {name: value for name, value in options.items() if value is not None}
        try:
            loaded: Any = model_class.from_pretrained(
                None, config=self._source.config, state_dict=dict(self._rest), output_loading_info=True, **given
            )
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error) and "conver" not in str(error):
                raise
            raise CheckpointError(f"{self._source.folder}: the weights do not fit the model: {str(error).strip()}") from error
        model: PreTrainedModel = loaded[0]
        info = loaded[1]
        if info["missing_keys"]:
            raise CheckpointError(f"{self._source.folder}: nothing in this checkpoint feeds {_some(sorted(info['missing_keys']))}")
        model.config.name_or_path = model.name_or_path = str(self._source.folder)  # PEFT writes the second
        if self._generation_config is not None:
            model.generation_config = self._generation_config
        return model

    def load_operators(self, advance: Callable[[int], None]) -> None:
        """Load the weights of every operator; a source is dropped as soon as its operator has them."""
        self._rest.clear()
        for path, operator in self._operators.items():
            operator.load(self._sources.pop(path), advance)
        gc.collect()


def keys_taken(keymap: KeyMap, operators: Iterable[str]) -> set[str]:
    """Return the keys that only operators at these paths read. A key that other modules need as well (a split projection) is read twice."""
    prefixes = tuple(f"{path}." for path in operators)
    taken = {key for name, target in keymap.targets.items() if name.startswith(prefixes) for key in target.all_keys}
    others = {key for name, target in keymap.targets.items() if not name.startswith(prefixes) for key in target.all_keys}
    return taken - others


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_KEYS} more" if len(names) > SHOWN_KEYS else ""
    return ", ".join(names[:SHOWN_KEYS]) + more


def _check_keys(source: ModelSource, keymap: KeyMap, operators: Mapping[str, Operator], *, packed: bool) -> None:
    """Refuse missing keys, and unread ones of replaced modules, which mean a wrong checkpoint; of others transformers only warns."""
    prefixes = tuple(f"{path}." for path in operators)
    missing = [name for name in keymap.missing if not name.startswith(prefixes)]
    if missing:
        why = "a shard or keys are missing"
        if packed:
            why = "these rules leave modules that it holds packed: load it with those in its config.json"
        raise CheckpointError(f"{source.folder}: nothing in this checkpoint feeds {_some(missing)}; {why}")
    extra = [key for key in keymap.unread if key.startswith(prefixes)]
    if extra:
        raise CheckpointError(f"{source.folder}: nothing in the model reads {_some(extra)}")
    if source.left_out:
        name = source.model_class.__name__
        logger.warning("%s: only %s is loaded, which writes text; left out are %s", source.folder, name, ", ".join(source.left_out))
    unread = [key for key in keymap.unread if not key.startswith(tuple(f"{part}." for part in source.left_out))]
    if unread:
        logger.warning("%s: nothing in the model reads %s", source.folder, _some(unread))


def _check_rest(skeleton: PreTrainedModel, keymap: KeyMap, tensors: Mapping[str, LazyTensor], taken: set[str]) -> None:
    state = skeleton.state_dict()
    for name, target in keymap.targets.items():
        if target.converter is not None or target.all_keys[0] in taken:
            continue
        tensor, parameter = tensors[target.all_keys[0]], state[name]
        if tensor.shape != tuple(parameter.shape):
            raise CheckpointError(f"{tensor.origin}: shape {tensor.shape}, and the model has {tuple(parameter.shape)}")
        if parameter.is_floating_point() and tensor.dtype is None:
            raise CheckpointError(f"{tensor.origin}: dtype {tensor.stored_dtype}, and the model has {parameter.dtype}")
