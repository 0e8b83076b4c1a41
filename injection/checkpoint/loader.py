"""The loading of a checkpoint into a grafted model: operators read their weights one expert at a time, transformers the others."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from moegraft.injection.checkpoint.files import LazyTensor, open_checkpoint
from moegraft.injection.checkpoint.keymap import KeyMap
from moegraft.injection.checkpoint.quantised import paired, quantisation_of
from moegraft.injection.checkpoint.sources import CheckpointWeights, StoredWeights
from moegraft.injection.model_source import ModelSource
from moegraft.operators.base import Operator
from moegraft.operators.errors import CheckpointError
from moegraft.operators.weights import WeightSource

logger = logging.getLogger(__name__)
SHOWN_KEYS = 5


def stored_dtype(source: ModelSource) -> torch.dtype:
    """Return the dtype of the stored weights; the config's dtype if the weights are not on this machine."""
    if source.gguf is not None:
        return source.gguf.float_dtype
    # A hub model that is only planned has an index in its folder, and no weights.
    if not any(source.folder.glob("*.safetensors")):
        dtype = source.config.dtype
        return dtype if isinstance(dtype, torch.dtype) else torch.float32
    return open_checkpoint(source.folder).float_dtype


def open_weights(source: ModelSource, skeleton: PreTrainedModel) -> StoredWeights:
    """Open the stored weights of a model, whose headers are read.

    Raises:
        CheckpointError: a file or key is damaged, or does not fit the model.
    """
    if source.gguf is not None:
        from moegraft.injection.checkpoint.gguf.model import GgufWeights

        return GgufWeights(source.gguf, skeleton)
    checkpoint = open_checkpoint(source.folder)
    settings = source.quantised or quantisation_of(source.config)
    return CheckpointWeights(checkpoint if settings is None else paired(checkpoint, settings), skeleton)


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
        taken = _taken(keymap, operators)
        self._rest = {key: tensor for key, tensor in weights.tensors.items() if key not in taken}
        read = {key for target in keymap.targets.values() for key in target.all_keys}
        self.total_bytes = sum(weights.tensors[key].nbytes for key in read)
        self._generation_config = _generation_config(source.folder)
        _refuse_missing(source, keymap, operators)
        _check_unread(source, keymap, operators)
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
        model.config.name_or_path = str(self._source.folder)
        if self._generation_config is not None:
            model.generation_config = self._generation_config
        return model

    def load_operators(self, advance: Callable[[int], None]) -> None:
        """Load the weights of every operator; a source is dropped as soon as its operator has them."""
        self._rest.clear()
        for path, operator in self._operators.items():
            operator.load(self._sources.pop(path), advance)
        gc.collect()


def _generation_config(folder: Path) -> GenerationConfig | None:
    if not (folder / GENERATION_CONFIG_NAME).is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / GENERATION_CONFIG_NAME}: not a readable generation config; download it again") from error


def _taken(keymap: KeyMap, operators: Mapping[str, Operator]) -> set[str]:
    """Return the keys that only operators read. A key that other modules need as well (a split projection) is read twice."""
    own = tuple(f"{path}." for path in operators)
    taken = {key for name, target in keymap.targets.items() if name.startswith(own) for key in target.all_keys}
    kept = {key for name, target in keymap.targets.items() if not name.startswith(own) for key in target.all_keys}
    return taken - kept


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_KEYS} more" if len(names) > SHOWN_KEYS else ""
    return ", ".join(names[:SHOWN_KEYS]) + more


def _refuse_missing(source: ModelSource, keymap: KeyMap, operators: Mapping[str, Operator]) -> None:
    own = tuple(f"{path}." for path in operators)
    missing = [name for name in keymap.missing if not name.startswith(own)]
    if missing:
        raise CheckpointError(f"{source.folder}: nothing in this checkpoint feeds {_some(missing)}; a shard or keys are missing")


def _check_unread(source: ModelSource, keymap: KeyMap, operators: Mapping[str, Operator]) -> None:
    """Refuse unread keys of replaced modules, which mean a wrong checkpoint. Elsewhere transformers only warns, and so does this."""
    extra = [key for key in keymap.unread if key.startswith(tuple(f"{path}." for path in operators))]
    if extra:
        raise CheckpointError(f"{source.folder}: nothing in the model reads {_some(extra)}")
    if keymap.unread:
        logger.warning("%s: nothing in the model reads %s", source.folder, _some(list(keymap.unread)))


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
