"""`load()`, the last step: stream the weights into a grafted model, one expert at a time."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from moegraft.injection.checkpoint.loader import CheckpointLoader
from moegraft.injection.checkpoint.sources import live_source
from moegraft.injection.graft import GraftedModel, Injection, place
from moegraft.injection.progress import byte_bar
from moegraft.operators.base import Operator


def load(grafted: GraftedModel, *, progress: bool = True) -> PreTrainedModel:
    """Fill a grafted model with its weights; a model in memory is changed in place.

    Args:
        grafted: from `graft`; it can be loaded once.
        progress: whether to show a bar in bytes on stderr.

    Returns:
        A PreTrainedModel of the stock class's name in eval mode, with `model.moegraft`.

    Raises:
        ValueError: the grafted model has been loaded before.
        CheckpointError: a weight cannot be read. No half-built model is left: one in memory still answers, with the modules that have
            not been replaced.
    """
    if grafted.loaded:
        raise ValueError("this grafted model has been loaded already; graft the plan again for another model")
    grafted.loaded = True
    if grafted.checkpoint is not None:
        model = _from_checkpoint(grafted, grafted.checkpoint, progress)
    else:
        assert grafted.model is not None, "a grafted model has a checkpoint or is in memory"
        model = _in_memory(grafted, grafted.model, progress)
    model.eval()
    grafted.sparsity.apply(model)
    for path, operator in grafted.injection.operators.items():
        operator.on_model_loaded(model, path)
    return model


def _from_checkpoint(grafted: GraftedModel, checkpoint: CheckpointLoader, progress: bool) -> PreTrainedModel:
    injection = grafted.injection
    with byte_bar(checkpoint.total_bytes, enabled=progress) as advance:
        model = checkpoint.load_rest(grafted.model_class, advance, operators=injection.replacing, **grafted.options)
        model.moegraft = injection  # type: ignore[assignment] # nn.Module declares its attributes as modules
        checkpoint.load_operators(advance)
    return model


def _in_memory(grafted: GraftedModel, model: PreTrainedModel, progress: bool) -> PreTrainedModel:
    """Replace modules one by one, so that each is freed as soon as its operator has its weights."""
    injection = grafted.injection
    total_bytes = sum(parameter.nbytes for path in injection.replacing for parameter in model.get_submodule(path).parameters())
    loaded: dict[str, Operator] = {}
    try:
        with byte_bar(total_bytes, enabled=progress) as advance:
            for path, operator in injection.replacing.items():
                operator.load(live_source(path, model.get_submodule(path)), advance)
                place(model, path, operator)
                loaded[path] = operator
    except BaseException:
        # What was replaced is freed: the model still answers, but must not be saved as if it were whole.
        if loaded:
            _mark(model, grafted, replace(injection, operators=loaded))
        raise
    _mark(model, grafted, injection)
    return model


def _mark(model: PreTrainedModel, grafted: GraftedModel, injection: Injection) -> None:
    model.__class__ = grafted.model_class
    model.moegraft = injection  # type: ignore[assignment] # nn.Module declares its attributes as modules
