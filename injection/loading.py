"""`load()`, the last step: stream the weights into a grafted model, one expert at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from moegraft.injection.checkpoint.loader import CheckpointLoader
from moegraft.injection.checkpoint.sources import live_source
from moegraft.injection.grafting import GraftedModel
from moegraft.injection.injected import Injection, place
from moegraft.injection.progress import ProgressLine, progress_line
from moegraft.operators.base import Operator
from moegraft.operators.decode.states import split_passes

LOADING = "loading and packing the weights"


def load(grafted: GraftedModel, *, progress: bool | ProgressLine = True) -> PreTrainedModel:
    """Fill a grafted model with its weights; a model in memory is changed in place.

    Args:
        grafted: from `graft`; it can be loaded once.
        progress: whether to show a line on stderr, or the line.

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
            model = _from_checkpoint(grafted, grafted.checkpoint, line)
        else:
            assert grafted.model is not None, "a grafted model has a checkpoint or is in memory"
            model = _in_memory(grafted, grafted.model, line)
    model.eval()
    with line.stage("preparing the operators"):
        grafted.sparsity.apply(model)
        for path, operator in grafted.injection.operators.items():
            operator.on_model_loaded(model, path)
        split_passes(model)  # last: operators may compute each token of a pass
    return model


def _from_checkpoint(grafted: GraftedModel, checkpoint: CheckpointLoader, line: ProgressLine) -> PreTrainedModel:
    injection = grafted.injection
    if injection.follows:
        with torch.device("meta"):
            model = grafted.model_class(checkpoint.config, operators=injection.replacing)  # type: ignore[call-arg] # of injected classes
        model.moegraft = injection  # type: ignore[assignment] # nn.Module declares its attributes as modules
        checkpoint.load_operators(lambda size: None)
        return model
    with line.stage(LOADING, checkpoint.total_bytes) as advance:
        model = checkpoint.load_rest(grafted.model_class, advance, operators=injection.replacing, **grafted.options)
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
