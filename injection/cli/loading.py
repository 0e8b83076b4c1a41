"""From the options of a command to a model that answers, with its tokenizer. Imports torch: commands import this when they run."""

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
from moegraft.injection.cli.model_options import ModelOptions
from moegraft.injection.cli.terminal import Terminal
from moegraft.injection.demo import demo_path
from moegraft.injection.graft import Injection
from moegraft.injection.model_source import find_model
from moegraft.injection.plan import Plan
from moegraft.injection.rulefile import RuleFile
from moegraft.injection.tokenizer import read_tokenizer


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
