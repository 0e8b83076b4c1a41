"""A model on meta with its checkpoint: the input of `plan` and `graft`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.files import open_checkpoint
from moegraft.injection.checkpoint.quantised import paired, quantisation_of
from moegraft.injection.checkpoint.sources import CheckpointWeights, StoredWeights
from moegraft.injection.model_source import (
    ModelSource,
    dequantising,
    find_model,
    is_quantised,
    meta_skeleton,
    refuse_quantised,
    resolve_folder,
    with_gguf,
)
from moegraft.operators.decode.mtp_layers import REPEATED, is_declared_mtp_key, why_no_mtp, with_declared_mtp
from moegraft.operators.errors import UnsupportedModelError


@dataclass(frozen=True)
class MetaModel:
    """A model without its weights.

    Attributes:
        skeleton: the stock model with every parameter on meta.
        stored: the dtype of the stored weights.
        dtype: the dtype of activations and of what is not replaced.
        has_weights: whether the weights are on this machine; planning needs none.
    """

    source: ModelSource
    skeleton: PreTrainedModel
    stored: torch.dtype
    dtype: torch.dtype
    has_weights: bool

    @property
    def model_type(self) -> str:
        return str(self.source.config.model_type)

    @property
    def model_class(self) -> str:
        return type(self.skeleton).__name__

    @property
    def unloadable(self) -> str | None:
        """The reason why this checkpoint can be planned but not loaded; None if it can be loaded."""
        if self.source.gguf is not None:
            return None
        try:
            refuse_quantised(self.source.folder, self.source.config)
        except UnsupportedModelError as error:
            return str(error)
        return None

    @cached_property
    def with_mtp(self) -> MetaModel:
        """The same model with its layers for multi-token prediction; itself where it has none, or they cannot be computed."""
        config = with_declared_mtp(self.source.config, self._mtp_tensors)
        if self.why_no_mtp is not None or (self._mtp_tensors is not None and not self._mtp_tensors):
            return self
        source = replace(self.source, config=config)
        return replace(self, source=source, skeleton=meta_skeleton(source, self.dtype, mtp=True))

    @property
    def why_no_mtp(self) -> str | None:
        """The reason why MTP layers cannot be computed; None if they can, should the checkpoint have them."""
        return why_no_mtp(self.model_class, with_declared_mtp(self.source.config, self._mtp_tensors))

    @property
    def mtp_bytes(self) -> int:
        """The bytes of the checkpoint's MTP layers as stored; 0 where it has none, or is not on this machine."""
        return sum((self._mtp_tensors or {}).values())

    @cached_property
    def _mtp_tensors(self) -> Mapping[str, int] | None:
        """The keys and bytes of the stored tensors of MTP layers; None if the weights are not on this machine."""
        if self.source.gguf is not None:
            return self.source.gguf.mtp_bytes(self.source.config)
        if not any(self.source.folder.glob("*.safetensors")):
            return None
        tensors, config = open_checkpoint(self.source.folder).tensors, self.source.config
        return {key: tensor.nbytes for key, tensor in tensors.items() if is_declared_mtp_key(key, config) and not key.endswith(REPEATED)}

    @cached_property
    def weights(self) -> StoredWeights | None:
        """The stored weights; None without `has_weights`. Their headers are read on first use.

        Raises:
            CheckpointError: a file is damaged, or does not fit the model.
        """
        return open_weights(self.source, self.skeleton) if self.has_weights else None


def build_meta_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    weights: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    gguf: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
) -> MetaModel:
    """Build the meta model that `plan` and `graft` work on. No weights are read.

    Args:
        model: a hub id or folder (planning needs only its config.json), or a model on meta.
        weights: whether the model will be loaded: the weights must be present, and those of a hub model are downloaded.
        checkpoint: the folder with the weights of a model on meta; by default its `name_or_path`.
        gguf: GGUF weights to use instead: a file, any part of a split one, or a folder with the parts of one model.
        dtype: the dtype of activations and of what is not replaced; by default the config's, else the checkpoint's.

    Raises:
        CheckpointError, UnsupportedModelError: the model does not exist, cannot be built or, with `weights`, cannot be loaded.
    """
    if isinstance(model, PreTrainedModel):
        named = checkpoint or model.config.name_or_path
        if not named:
            raise UnsupportedModelError(f"{type(model).__name__} is on meta: pass the folder with its weights as checkpoint=FOLDER")
        source = ModelSource(resolve_folder(named, weights=weights and gguf is None), model.config, type(model))
        source = source if gguf is None else with_gguf(source, gguf)
    else:
        source = find_model(model, trust_remote_code=trust_remote_code, weights=weights, gguf=gguf)
    # Their headers tell what a quantised checkpoint's weights will take.
    weights = weights or (gguf is None and is_quantised(source) and any(source.folder.glob("*.safetensors")))
    if weights and gguf is None:
        source = dequantising(source)
    stored = stored_dtype(source)
    rest = parse_dtype(dtype) or _own_dtype(source) or stored
    return MetaModel(source, meta_skeleton(source, rest), stored, rest, weights or gguf is not None)


def _own_dtype(source: ModelSource) -> torch.dtype | None:
    try:
        return parse_dtype(source.config.dtype)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source.folder / 'config.json'}: {error}") from error


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that `dtype` names; None for None and `auto`.

    Raises:
        UnsupportedModelError: a model cannot be computed in this dtype.
    """
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise UnsupportedModelError(f"dtype {dtype!r}: give 'float32', 'float16', 'bfloat16' or a torch dtype")
    return found


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
