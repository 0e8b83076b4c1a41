"""From the options of a command to rules, a meta model or a loaded model. Imports torch: commands import this when they run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.options import ModelOptions, OptionsError, StatedMachine
from moegraft.injection.cli.output import Terminal
from moegraft.injection.demo import demo_path
from moegraft.injection.estimate.forecast import TargetMachine
from moegraft.injection.estimate.measure import Measurements
from moegraft.injection.estimate.planned import budget_of
from moegraft.injection.graft import Injection
from moegraft.injection.meta_model import MetaModel, build_meta_model
from moegraft.injection.model_source import find_model
from moegraft.injection.plan import Plan
from moegraft.injection.rules import RuleFile, default_rules, read_rules
from moegraft.injection.tokenizer import read_tokenizer
from moegraft.operators.machine import probe_machine
from moegraft.operators.registry import OperatorRegistry, load_registry


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with what a chat needs beside it; `placement` gives lines that say what runs where."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    placement: Callable[[], list[str]]

    @property
    def context_tokens(self) -> int | None:
        """Positions the model was made for, prompt and answer together; None where its config sets no bound."""
        bound = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return bound if isinstance(bound, int) and bound > 0 else None


def plan_only(options: ModelOptions) -> Plan:
    """The plan for these options; reads no weights.

    Raises:
        MoegraftError: what keeps the model from being loaded so.
    """
    quiet_libraries()
    return optimize_and_load(model_of(options), options.rules, dry_run=True, **_load_arguments(options))


def load_model(options: ModelOptions, terminal: Terminal, rules: RuleFile | None = None) -> LoadedModel:
    """Loads model and tokenizer; `rules` stand for those that the options name.

    Raises:
        MoegraftError: the model, its tokenizer or the rules cannot be used.
    """
    quiet_libraries()
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options)  # first, so that what is wrong with it is said before weights are read
    progress = terminal.notices.is_terminal and not terminal.quiet
    arguments = _load_arguments(options) if rules is None else {**_load_arguments(options), "vars": None}
    model = optimize_and_load(model_of(options), rules or options.rules, progress=progress, **arguments)
    injection = model.moegraft
    assert isinstance(injection, Injection), "optimize_and_load leaves what it did on the model"
    return LoadedModel(options.model or "the bundled model", model, tokenizer, injection.placement)


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    """
    Raises:
        CheckpointError, UnsupportedModelError: no such model, or no tokenizer beside it.
    """
    folder = find_model(model_of(options), trust_remote_code=options.trust_remote_code, weights=False).folder
    return read_tokenizer(folder, trust_remote_code=options.trust_remote_code)


def model_of(options: ModelOptions) -> str:
    """The model that is meant: a hub id or folder, or the bundled one's folder."""
    return os.fspath(demo_path()) if options.model is None else options.model


def _load_arguments(options: ModelOptions) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "vars": options.vars(),
        "gguf": options.gguf,
        "threads": options.threads,
        "trust_remote_code": options.trust_remote_code,
    }


def quiet_libraries() -> None:
    """Silences what transformers would say."""
    # Their warnings advise programmers on arguments that this program sets, and would land in the middle of an answer.
    transformers_logging.set_verbosity(logging.ERROR)


@dataclass(frozen=True, slots=True)
class ModelAndRules:
    """Rules and the model that they are for."""

    meta_model: MetaModel
    rules: RuleFile
    registry: OperatorRegistry


def open_meta_model(options: ModelOptions) -> MetaModel:
    """
    Raises:
        CheckpointError, UnsupportedModelError: no such model, or none that can be built.
    """
    quiet_libraries()
    return build_meta_model(model_of(options), trust_remote_code=options.trust_remote_code, gguf=options.gguf)


def model_and_rules(options: ModelOptions) -> ModelAndRules:
    """
    Raises:
        RuleErrors: mistakes that show without a model.
        CheckpointError, UnsupportedModelError: no such model, or none that can be built.
    """
    registry = load_registry()
    # Rules first: what is wrong with them shows at once, where a model takes seconds.
    rules = read_rules(options.rules, vars=options.vars(), registry=registry) if options.rules else None
    found = open_meta_model(options)
    if rules is None:
        rules = read_rules(default_rules(found.model_type), vars=options.vars(), registry=registry)
    return ModelAndRules(found, rules, registry)


def machinery_of(measured: Measurements | None, stated: StatedMachine) -> TargetMachine:
    """This machine, with what the options state of another.

    Raises:
        OptionsError: a bandwidth is stated and there is no GPU that it would be of.
    """
    machine = probe_machine()
    of_gpu = measured.gpu if measured is not None else None
    budget = budget_of(machine, stated.gpus, of_gpu, gbps=stated.gpu_bandwidth, link_gbps=stated.link_bandwidth)
    if budget is None and not (stated.gpu_bandwidth is None and stated.link_bandwidth is None):
        raise OptionsError(
            "--gpu-bandwidth and --link-bandwidth are of a GPU, and none is here: state its memory, too, as --gpu-memory 24GiB"
        )
    return TargetMachine(machine.available_bytes if stated.ram is None else stated.ram, measured, budget)
