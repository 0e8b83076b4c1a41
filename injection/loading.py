"""`load()`, the last step: stream the weights into a grafted model, one expert at a time."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from moegraft.injection.checkpoint.files import LazyTensor
from moegraft.injection.checkpoint.keymap import KeyMap
from moegraft.injection.checkpoint.packed import StoredPacked
from moegraft.injection.checkpoint.sources import ModuleSource, StoredWeights
from moegraft.injection.injected import Injection, parameter_states, place
from moegraft.injection.meta_model import ModelSource
from moegraft.injection.progress import ProgressLine, progress_line
from moegraft.operators.base import Operator
from moegraft.operators.decode.states import split_passes
from moegraft.operators.errors import CheckpointError
from moegraft.operators.weights import WeightSource

if TYPE_CHECKING:
    from moegraft.injection.grafting import GraftedModel

logger = logging.getLogger(__name__)
LOADING = "loading and packing the weights"
SHOWN_KEYS = 5


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
    grafted.injection.loaded.update(parameter_states(model))
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
                operator.load(ModuleSource(path, model.get_submodule(path)), advance)
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

    Attributes:
        new_head: the weights of a head for another task than the checkpoint's, which transformers initialises.

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
        self.new_head = _new_head(source, keymap)
        _check_keys(source, keymap, operators, self.new_head, packed=bool(weights.packed))
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
        if missing := sorted(set(info["missing_keys"]).difference(self.new_head)):
            raise CheckpointError(f"{self._source.folder}: nothing in this checkpoint feeds {_some(missing)}")
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


def _new_head(source: ModelSource, keymap: KeyMap) -> list[str]:
    """Return the weights beside the base model that a checkpoint of another class has no place for, such as those of a classifier."""
    base = f"{source.model_class.base_model_prefix}."
    if source.gguf is not None or source.model_class.__name__ in (source.config.architectures or [source.model_class.__name__]):
        return []
    return [name for name in keymap.missing if not name.startswith(base) and any(known.startswith(base) for known in keymap.targets)]


def _check_keys(source: ModelSource, keymap: KeyMap, operators: Collection[str], new_head: Collection[str], *, packed: bool) -> None:
    """Refuse missing keys, and unread ones of replaced modules, which mean a wrong checkpoint; of others transformers only warns."""
    prefixes = tuple(f"{path}." for path in operators)
    missing = [name for name in keymap.missing if name not in new_head and not name.startswith(prefixes)]
    if missing:
        why = "a shard or keys are missing"
        if packed:
            why = "these rules leave modules that it holds packed: load it with those in its config.json"
        raise CheckpointError(f"{source.folder}: nothing in this checkpoint feeds {_some(missing)}; {why}")
    extra = [key for key in keymap.unread if key.startswith(prefixes)]
    if extra:
        raise CheckpointError(f"{source.folder}: nothing in the model reads {_some(extra)}")
    if new_head:
        logger.warning("%s: %s are new, as the checkpoint is of another class: train them", source.folder, _some(list(new_head)))
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
