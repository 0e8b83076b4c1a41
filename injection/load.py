"""`optimize_and_load`: rules and a model in, a stock-looking PreTrainedModel with operators inside out."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.loader import CheckpointLoader, open_weights, stored_dtype
from moegraft.injection.checkpoint.sources import live_source, refuse_meta
from moegraft.injection.graft import Injection, build_operators, injected, injected_class, make_ready, place, replacing
from moegraft.injection.model_source import ModelSource, dequantising, find_model, meta_skeleton, resolve_folder, with_gguf
from moegraft.injection.plan import Plan, plan, settle_stored, weight_types
from moegraft.injection.progress import byte_bar
from moegraft.injection.rules import RuleFile, default_rules, read_rules
from moegraft.injection.sparsity_setup import prepare_sparsity
from moegraft.operators.base import Operator
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import NotEnoughMemoryError, UnsupportedModelError
from moegraft.operators.machine import Machine, probe_machine
from moegraft.operators.registry import OperatorRegistry, load_registry

logger = logging.getLogger(__name__)
GIB = 1 << 30
Rules = str | os.PathLike[str] | RuleFile


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of `optimize_and_load`, past the model and rules."""

    dtype: torch.dtype | None
    vars: Mapping[str, object] | None
    progress: bool
    threads: int
    device_map: str | dict[str, Any] | None
    attn_implementation: str | None
    trust_remote_code: bool
    registry: OperatorRegistry


@overload
def optimize_and_load(model: Any, rules: Any = None, *, dry_run: Literal[True], **options: Any) -> Plan: ...
@overload
def optimize_and_load(model: Any, rules: Any = None, *, dry_run: Literal[False] = False, **options: Any) -> PreTrainedModel: ...
def optimize_and_load(  # type: ignore[misc] # the overloads spell out only what decides the type of the result
    model: str | os.PathLike[str] | PreTrainedModel,
    rules: Rules | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    vars: Mapping[str, object] | None = None,
    progress: bool = True,
    dry_run: bool = False,
    threads: int = 0,
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    gguf: str | os.PathLike[str] | None = None,
    registry: OperatorRegistry | None = None,
) -> PreTrainedModel | Plan:
    """Grafts the operators that `rules` name into a stock Hugging Face model and streams its weights into them.

    Args:
        model: a hub id or folder; a model on meta, whose weights are at `checkpoint` or its `name_or_path`; or a loaded model,
            which is changed in place: each replaced module is freed as its operator takes over.
        rules: a rule file, the name of a shipped one, or what `read_rules` made of one; by default the one for the model's type, else
            `cpu`.
        dtype: of what is not replaced, and of activations; by default the config's, else the checkpoint's.
        vars: values for the rule file's `${...}`, over its own.
        progress: a bar in bytes on stderr.
        dry_run: read no weights, change nothing, and return the `Plan`.
        threads: CPU threads of the operators; 0: one for each physical core this process may use.
        device_map, attn_implementation, trust_remote_code: as in `from_pretrained`, for what is not replaced.
        checkpoint: the folder with the weights of a model on meta.
        gguf: the weights instead: a GGUF file, any part of a split one, or a folder with those of one model. Experts in Q8_0 and Q4_0
            are kept as they are by `weights: stored`, experts and linear layers in Q4_K and Q6_K by `stored` and `int8`; config and
            tokenizer are those of `model`.
        registry: the operators that rules may name; by default all that are installed.

    Returns:
        A PreTrainedModel of the stock class's name in eval mode, with `model.moegraft` (the plan and what runs where).

    Raises:
        RuleFileError: every mistake of the rules, with line and column.
        CheckpointError, UnsupportedModelError, ThresholdsError, NotEnoughMemoryError: before any weight is read where that can be
            known, and never with a half-built model left behind.
    """
    request = _Request(
        dtype=_torch_dtype(dtype),
        vars=vars,
        progress=progress,
        threads=threads,
        device_map=device_map,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        registry=registry or load_registry(),
    )
    if isinstance(model, str | os.PathLike):
        source = find_model(model, trust_remote_code=trust_remote_code, weights=not dry_run, gguf=gguf)
    elif not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model is a {type(model).__name__}: give a hub id, a folder, or a PreTrainedModel (compile it afterwards)"
        )
    elif any(parameter.is_meta for parameter in model.parameters()) and (checkpoint or all(p.is_meta for p in model.parameters())):
        source = ModelSource(_folder_of(model, checkpoint, weights=not dry_run and gguf is None), model.config, type(model))
        source = source if gguf is None else with_gguf(source, gguf)
    else:
        _refuse_load_options(model, request, checkpoint, gguf)
        return _graft_loaded(model, rules, request, dry_run)
    return _plan_only(source, rules, request) if dry_run else _load(source, rules, request)


def _torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise UnsupportedModelError(f"dtype {dtype!r}: give 'float32', 'float16', 'bfloat16' or a torch dtype")
    return found


def _folder_of(model: PreTrainedModel, checkpoint: str | os.PathLike[str] | None, *, weights: bool) -> Path:
    named = checkpoint or model.config.name_or_path
    if not named:
        raise UnsupportedModelError(f"{type(model).__name__} is on meta: pass the folder with its weights as checkpoint=FOLDER")
    return resolve_folder(named, weights=weights)


def _refuse_load_options(model: PreTrainedModel, request: _Request, checkpoint: object, gguf: object) -> None:
    """What a loaded model was loaded with stays; an option that would be ignored is refused."""
    options = {
        "dtype": request.dtype not in (None, model.dtype),
        "device_map": request.device_map is not None,
        "attn_implementation": request.attn_implementation not in (None, model.config._attn_implementation),
        "checkpoint": checkpoint is not None,
        "gguf": gguf is not None,
    }
    given = [name for name, changes in options.items() if changes]
    if given:
        raise UnsupportedModelError(
            f"{', '.join(given)}: this {type(model).__name__} is loaded already; set it on the model before, or pass its folder or hub id"
        )


def _plan_for(model: PreTrainedModel, rules: Rules | None, request: _Request, dtype: torch.dtype) -> Plan:
    model_type = model.config.model_type
    if rules is None:
        rules = default_rules(model_type)
        logger.info("no rules given: the shipped file '%s' is used for model type '%s'", rules, model_type)
    if isinstance(rules, RuleFile) and request.vars:
        raise UnsupportedModelError("vars: these rules have been read with theirs; give them to read_rules")
    rule_file = rules if isinstance(rules, RuleFile) else read_rules(rules, vars=request.vars, registry=request.registry)
    the_plan = plan(model, rule_file, registry=request.registry, dtype=dtype, model_type=model_type)
    for notice in the_plan.notices:
        logger.log(logging.WARNING if notice.severity == "warning" else logging.INFO, "%s", notice)
    return the_plan


def _rest_dtype(source: ModelSource, request: _Request, stored: torch.dtype) -> torch.dtype:
    return request.dtype or _torch_dtype(source.config.dtype) or stored


def _plan_only(source: ModelSource, rules: Rules | None, request: _Request) -> Plan:
    stored = stored_dtype(source)
    skeleton = meta_skeleton(source, _rest_dtype(source, request, stored))
    the_plan = _plan_for(skeleton, rules, request, stored)
    if source.gguf is None:  # of a hub model there may be no weights here
        return the_plan
    return settle_stored(the_plan, open_weights(source, skeleton), skeleton, request.registry, stored)


def _load(source: ModelSource, rules: Rules | None, request: _Request) -> PreTrainedModel:
    if source.gguf is None:
        source = dequantising(source)
    stored = stored_dtype(source)
    dtype = _rest_dtype(source, request, stored)
    skeleton = meta_skeleton(source, dtype)
    the_plan = _plan_for(skeleton, rules, request, stored)
    weights = open_weights(source, skeleton)
    the_plan = settle_stored(the_plan, weights, skeleton, request.registry, stored)
    weights.tell_conversions(weight_types(the_plan), dtype)
    machine = probe_machine()
    device_map = request.device_map or infer_device_map(the_plan, machine)
    check_memory(the_plan, machine, on_cpu=device_map in (None, "cpu"))
    sparsity = prepare_sparsity(the_plan, request.registry, skeleton, source.folder, trust_remote_code=request.trust_remote_code)
    context = InjectionContext(machine=machine, dtype=dtype, threads=request.threads)
    operators = build_operators(skeleton, the_plan, request.registry, context)
    stream = CheckpointLoader(source, weights, skeleton, replacing(operators))
    sparsity.check_weights(stream.source)
    with byte_bar(stream.total_bytes, enabled=request.progress) as advance:
        model = stream.load_rest(
            injected_class(source.model_class, replacing(operators)),
            advance,
            dtype=dtype,
            device_map=device_map,
            attn_implementation=request.attn_implementation,
        )
        model = injected(model, source.model_class, Injection(the_plan, operators, context))
        stream.load_operators(advance)
    sparsity.apply(model)
    make_ready(model, operators)
    return model


def infer_device_map(the_plan: Plan, machine: Machine) -> Any:
    """A device map for all but the operators' weights: the GPUs that a rule wants its experts to share; None: the CPU."""
    wanted = {gpu for swap in the_plan.swaps if (gpu := getattr(swap.options, "gpu", "none")) not in ("none", None)}
    devices = {device for gpu in wanted for device in gpu.split(",") if not device.startswith("emulated")}
    if not devices or not machine.gpus:
        return None
    named = sorted(devices - {"auto"})
    if len(named) == 1 and "auto" not in devices:
        return {"": named[0]}
    return {"": "cuda:0"} if len(machine.gpus) == 1 else "auto"


def check_memory(the_plan: Plan, machine: Machine, *, on_cpu: bool = True) -> None:
    """
    Raises:
        NotEnoughMemoryError: the plan's host memory is more than the machine has free.
    """
    needed = the_plan.bytes_by_device.get("cpu", 0) if on_cpu else sum(swap.footprint.by_device.get("cpu", 0) for swap in the_plan.swaps)
    if needed > machine.available_bytes:
        raise NotEnoughMemoryError(
            f"this plan needs {needed / GIB:.1f} GiB of memory and {machine.available_bytes / GIB:.1f} GiB are free; "
            "a smaller weight type (weights: int4 in the rule file) or a smaller model would fit"
        )
    mapped = the_plan.bytes_by_device.get("disk", 0)
    if needed + mapped > machine.available_bytes:
        logger.warning(
            "%.1f GiB of packed experts and %.1f GiB of memory free: experts that do not fit are read from disk as they are used, "
            "at the disk's speed",
            mapped / GIB,
            machine.available_bytes / GIB,
        )


def _graft_loaded(model: PreTrainedModel, rules: Rules | None, request: _Request, dry_run: bool) -> PreTrainedModel | Plan:
    if isinstance(getattr(model, "moegraft", None), Injection):
        raise UnsupportedModelError(f"this {type(model).__name__} has been injected already; load it anew to apply other rules")
    the_plan = _plan_for(model, rules, request, model.dtype)
    if dry_run:
        return the_plan
    for swap in the_plan.swaps:
        if not swap.in_place:
            refuse_meta(swap.module, model.get_submodule(swap.module))
    named = Path(model.config.name_or_path or os.devnull)
    sparsity = prepare_sparsity(
        the_plan, request.registry, model, named if named.is_dir() else None, trust_remote_code=request.trust_remote_code
    )
    sparsity.check_weights(lambda path: live_source(path, model.get_submodule(path)))
    context = InjectionContext(machine=probe_machine(), dtype=model.dtype, threads=request.threads)
    operators = build_operators(model, the_plan, request.registry, context)
    total_bytes = sum(p.nbytes for path in replacing(operators) for p in model.get_submodule(path).parameters())
    placed: dict[str, Operator] = {}
    try:
        with byte_bar(total_bytes, enabled=request.progress) as advance:
            for path, operator in replacing(operators).items():
                module = model.get_submodule(path)
                operator.load(live_source(path, module), advance)
                placed[path] = operator
                place(model, path, operator)
    except BaseException:
        # What was replaced is freed: the model still answers, but must not be saved as if it were whole.
        if placed:
            injected(model, type(model), Injection(the_plan, placed, context))
        raise
    model = injected(model, type(model), Injection(the_plan, operators, context))
    sparsity.apply(model)
    make_ready(model, operators)
    return model
