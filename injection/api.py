"""The public Python interface, which `moegraft.injection` exports: `optimize_and_load`, and the steps that it consists of.

model = build_meta_model("path/or/hub-id", weights=True)  # or a model in memory
the_plan = plan(model, "cpu")                              # which operator replaces which module: data
grafted = graft(model, the_plan)                           # operators without weights; everything is checked
model = load(grafted)                                      # a PreTrainedModel with its weights
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch
from transformers import PreTrainedModel

from moegraft.injection.grafting import graft
from moegraft.injection.injected import injection_of, new_cache
from moegraft.injection.loading import load
from moegraft.injection.meta_model import MetaModel, build_meta_model, folder_rules, parse_dtype
from moegraft.injection.parallel import Processes, check_distributed_config, process_count, report_to_others, report_whole_model
from moegraft.injection.planning import Plan, plan
from moegraft.injection.progress import ProgressLine, progress_line
from moegraft.injection.rules import DEFAULT_RULES, RuleFile, read_rules
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry, load_registry

__all__ = ["build_meta_model", "graft", "load", "new_cache", "optimize_and_load", "plan", "read_rules"]

logger = logging.getLogger(__name__)
PLANNING, GRAFTING = "planning", "building the operators"
Rules = str | os.PathLike[str] | Mapping[str, Any] | RuleFile


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
    progress: bool | ProgressLine = True,
    dry_run: bool = False,
    threads: int = 0,
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    gguf: str | os.PathLike[str] | None = None,
    registry: OperatorRegistry | None = None,
    distributed_config: Any = None,
) -> PreTrainedModel | Plan:
    """Graft the operators that `rules` name into a stock Hugging Face model and stream its weights into them.

    Args:
        model: a hub id or folder; a GGUF file with the weights, config and tokenizer of a model; a model on meta, whose weights are at
            `checkpoint` or its `name_or_path`; or a loaded model, which is changed in place: each replaced module is freed as soon as its
            operator has the weights.
        rules: the path of a rule file, the name of a shipped one, its content as a mapping, or a `RuleFile` from `read_rules`. By default
            the rules that the model's folder states, as `save_pretrained` of an injected model writes them, else `cpu`.
        dtype: the dtype of activations and of what is not replaced; by default the config's, else the checkpoint's.
        vars: values for the rule file's `${...}`; they override its own.
        progress: whether to show on stderr what takes longer than two seconds, or the line to show it on.
        dry_run: read no weights, change nothing, and return the `Plan`.
        threads: CPU threads of the operators; 0: one for each physical core this process may use, less up to two that GPUs need.
        device_map, attn_implementation, trust_remote_code: as in `from_pretrained`, for what is not replaced.
        checkpoint: the folder with the weights of a model on meta.
        gguf: GGUF weights to load instead of the checkpoint: a file, any part of a split one, or a folder with the parts of one model.
            Config and tokenizer come from `model`. `weights: stored` keeps experts in Q8_0 and Q4_0 without another rounding; `stored`
            and `int8` keep experts and linear layers in other types, such as Q4_K and MXFP4, too.
        registry: the operators that rules may name; by default all that are installed.
        distributed_config: transformers' `DistributedConfig`, with the number of processes as `tp_size` and `ep_size` and an empty
            `tp_plan`. Needed by nothing: what torchrun has set decides.

    Returns:
        A PreTrainedModel of the stock class's name in eval mode, with `model.moegraft` (the plan and what runs where). Of several
        processes, started by torchrun, the one of rank 0 returns this model, whose experts are divided over all of them, unless the rule
        file has `parallel: {shares: none}`. The others return a model without weights but those experts: its `generate` returns the token
        ids of rank 0's `generate`, and `model.moegraft.follow()` computes until rank 0 ends.

    Raises:
        RuleFileError: every mistake of the rules, with line and column.
        CheckpointError, UnsupportedModelError, ThresholdsError, NotEnoughMemoryError: before any weight is read where possible; no
            half-built model is left.
    """
    started_together = process_count() > 1 and not dry_run
    try:
        registry = registry or load_registry()
        rule_file = _read_rules(folder_rules(model) if rules is None else rules, vars, registry)
        if distributed_config is not None:
            check_distributed_config(distributed_config, process_count())
    except Exception as error:
        if started_together:
            logger.error("%s (all processes that load this model end with this error)", error)
            report_to_others(error)
        raise

    def opened() -> MetaModel | PreTrainedModel:
        if isinstance(model, PreTrainedModel) and not _is_on_meta(model, checkpoint):
            changes = {  # options that would have no effect, as a loaded model keeps its dtype, devices and attention
                "dtype": parse_dtype(dtype) not in (None, model.dtype),
                "device_map": device_map is not None,
                "attn_implementation": attn_implementation not in (None, model.config._attn_implementation),
                "checkpoint": checkpoint is not None,
                "gguf": gguf is not None,
            }
            given = ", ".join(name for name, changed in changes.items() if changed)
            if given:
                raise UnsupportedModelError(
                    f"{given}: this {type(model).__name__} is loaded already; set it on the model before, or pass its folder or hub id"
                )
            return model
        if isinstance(model, str | os.PathLike | PreTrainedModel):
            return build_meta_model(
                model, weights=not dry_run, checkpoint=checkpoint, gguf=gguf, dtype=dtype, trust_remote_code=trust_remote_code
            )
        raise UnsupportedModelError(
            f"model is a {type(model).__name__}: give a hub id, a folder, or a PreTrainedModel (compile it afterwards)"
        )

    options: dict[str, Any] = {
        "threads": threads,
        "device_map": device_map,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    line = progress_line(progress)
    if started_together and rule_file.shares != "none":
        return _load_divided(opened, rule_file, registry, options, progress=line)
    if started_together:
        report_whole_model()
    with line.stage(PLANNING):
        target = opened()
        the_plan = plan(target, rule_file, registry=registry)
    log_notices(the_plan)
    if dry_run:
        return the_plan
    with line.stage(GRAFTING):
        grafted = graft(target, the_plan, **options)
    return load(grafted, progress=line)


def _load_divided(
    opened: Callable[[], MetaModel | PreTrainedModel],
    rules: RuleFile,
    registry: OperatorRegistry,
    options: dict[str, Any],
    *,
    progress: ProgressLine,
) -> PreTrainedModel:
    """Load this process's share of a model; where one process fails, all do."""
    with Processes() as processes:
        with processes.agreed():
            threads = options["threads"] or processes.threads
            torch.set_num_threads(threads)  # torchrun sets 1
            processes.take_cores(threads)
            target = opened()
            if not isinstance(target, MetaModel):
                raise UnsupportedModelError(
                    "this model is in memory, and several processes share a checkpoint: pass its folder or hub id, or set "
                    "'parallel: {shares: none}' in the rule file for a whole model in each process"
                )
            with progress.stage(PLANNING):
                whole = plan(target, rules, registry=registry)
        shares = processes.divide(rules.shares, whole)
        with processes.agreed():
            the_plan = plan(target, rules, registry=registry, shares=shares)
            if shares.rank == 0:
                log_notices(the_plan)
            group = processes.group(shares)
            model = load(graft(target, the_plan, **{**options, "threads": threads}, expert_group=group), progress=progress)
        injection = injection_of(model)
        assert injection is not None, "what load returns is injected"
        group.weight_samples = processes.weight_samples(injection.operators)
    group.start()
    return model


def log_notices(the_plan: Plan) -> None:
    for notice in the_plan.notices:
        logger.log(logging.WARNING if notice.severity == "warning" else logging.INFO, "%s", notice)


def _is_on_meta(model: PreTrainedModel, checkpoint: object) -> bool:
    """Whether the weights of a model still have to be loaded; a model that is partly on meta needs a checkpoint."""
    on_meta = [parameter.is_meta for parameter in model.parameters()]
    return any(on_meta) and (bool(checkpoint) or all(on_meta))


def _read_rules(rules: Rules | None, vars: Mapping[str, object] | None, registry: OperatorRegistry) -> RuleFile:
    if rules is None:
        logger.info("no rules given: the shipped file '%s' is used", DEFAULT_RULES)
    if isinstance(rules, RuleFile):
        if vars:
            raise UnsupportedModelError("vars: this rule file is read already, with its variables; pass vars to read_rules instead")
        return rules
    if not isinstance(rules, str | os.PathLike | Mapping | None):
        raise UnsupportedModelError(f"rules are a path, the name of shipped ones or a mapping, not of type {type(rules).__name__}")
    if not isinstance(vars, Mapping | None):
        raise UnsupportedModelError(f"vars is a mapping of variables to values, not of type {type(vars).__name__}")
    return read_rules(DEFAULT_RULES if rules is None else rules, vars=vars, registry=registry)
