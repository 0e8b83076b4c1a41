"""From the options of a command to a model that answers, with its tokenizer."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moegraft.injection.cli.exits import error_sentence
from moegraft.injection.cli.model_options import ModelOptions
from moegraft.injection.cli.terminal import Terminal
from moegraft.operators.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from moegraft.injection.plan import Plan


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with what a chat needs beside it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def context_tokens(self) -> int | None:
        """Positions the model was made for, prompt and answer together; None where its config sets no bound."""
        bound = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return bound if isinstance(bound, int) and bound > 0 else None

    def placement(self) -> list[str]:
        """Lines that say what runs where."""
        injection: Any = self.model.moegraft
        return list(injection.placement())


def plan_only(options: ModelOptions) -> Plan:
    """The plan for these options; reads no weights.

    Raises:
        MoegraftError: what keeps the model from being loaded so.
    """
    from moegraft.injection import optimize_and_load

    _quiet_libraries()
    return optimize_and_load(_model_of(options), options.rules, dry_run=True, **_load_arguments(options))


def load_model(options: ModelOptions, terminal: Terminal) -> LoadedModel:
    """Loads model and tokenizer; the tokenizer first, so that what is wrong with it is said before weights are read.

    Raises:
        MoegraftError: the model, its tokenizer or the rules cannot be used.
    """
    import torch

    from moegraft.injection import optimize_and_load

    _quiet_libraries()
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options)
    progress = terminal.notices.is_terminal and not terminal.quiet
    model = optimize_and_load(_model_of(options), options.rules, progress=progress, **_load_arguments(options))
    return LoadedModel(options.model or "the bundled model", model, tokenizer)


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    """
    Raises:
        CheckpointError, UnsupportedModelError: no such model, or no tokenizer beside it.
    """
    from transformers import AutoTokenizer

    from moegraft.injection.model_source import find_model

    folder = find_model(_model_of(options), trust_remote_code=options.trust_remote_code).folder
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        # What transformers and tokenizers raise for a missing or damaged file varies by file.
        raise CheckpointError(f"{folder}: no tokenizer can be read from this folder ({error_sentence(error)})") from error
    return tokenizer


def _model_of(options: ModelOptions) -> str:
    if options.model is not None:
        return options.model
    from moegraft.injection.demo import demo_path

    return os.fspath(demo_path())


def _load_arguments(options: ModelOptions) -> dict[str, Any]:
    return {
        "dtype": options.dtype,
        "vars": options.vars(),
        "threads": options.threads,
        "trust_remote_code": options.trust_remote_code,
    }


def _quiet_libraries() -> None:
    # Their warnings advise programmers on arguments that this program sets, and would land in the middle of an answer.
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity(logging.ERROR)
