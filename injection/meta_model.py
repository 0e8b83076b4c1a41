"""A model on meta with its checkpoint: every question that needs no weights is answered from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint import StoredWeights
from moegraft.injection.checkpoint.loader import open_weights, stored_dtype
from moegraft.injection.model_source import (
    ModelSource,
    dequantising,
    find_model,
    meta_skeleton,
    refuse_quantised,
    resolve_folder,
    with_gguf,
)
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry

if TYPE_CHECKING:
    from moegraft.injection.plan import Plan
    from moegraft.injection.rules import RuleFile


@dataclass(frozen=True)
class MetaModel:
    """A model without its weights.

    Attributes:
        skeleton: the stock model with every parameter on meta.
        stored: the dtype of the stored weights.
        dtype: that of what is not replaced.
        has_weights: whether the weights are here; planning needs none.
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

    def plan(self, rules: RuleFile, registry: OperatorRegistry) -> Plan:
        """Return `moegraft.injection.plan.plan` of this model."""
        from moegraft.injection.plan import plan

        return plan(self, rules, registry=registry)

    @property
    def unloadable(self) -> str | None:
        """Why this checkpoint cannot be loaded although it can be planned, or None."""
        if self.source.gguf is not None:
            return None
        try:
            refuse_quantised(self.source.folder, self.source.config)
        except UnsupportedModelError as error:
            return str(error)
        return None

    @cached_property
    def weights(self) -> StoredWeights | None:
        """The stored weights, opened by their headers on first use; None where they are not here.

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
    """Build the meta model that `plan` and `graft` work on; the weights themselves are not read.

    Args:
        model: a hub id or folder, of which planning needs only the config.json; or a model on meta.
        weights: whether the weights are to be loaded, and so have to be here; those of a hub model are downloaded.
        checkpoint: the folder with the weights of a model on meta, by default its `name_or_path`.
        gguf: a GGUF file, any part of a split one, or a folder with those of one model, which holds the weights instead.
        dtype: of what is not replaced, and of activations; by default the config's, else the checkpoint's.

    Raises:
        CheckpointError, UnsupportedModelError: no such model, or none that can be built or, with `weights`, loaded.
    """
    if isinstance(model, PreTrainedModel):
        named = checkpoint or model.config.name_or_path
        if not named:
            raise UnsupportedModelError(f"{type(model).__name__} is on meta: pass the folder with its weights as checkpoint=FOLDER")
        source = ModelSource(resolve_folder(named, weights=weights and gguf is None), model.config, type(model))
        source = source if gguf is None else with_gguf(source, gguf)
    else:
        source = find_model(model, trust_remote_code=trust_remote_code, weights=weights, gguf=gguf)
    if weights and gguf is None:
        source = dequantising(source)
    stored = stored_dtype(source)
    rest = parse_dtype(dtype) or parse_dtype(source.config.dtype) or stored
    return MetaModel(source, meta_skeleton(source, rest), stored, rest, weights or gguf is not None)


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that a caller or a config names; None for `auto` and where none is named.

    Raises:
        UnsupportedModelError: it is no dtype that a model can be computed in.
    """
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise UnsupportedModelError(f"dtype {dtype!r}: give 'float32', 'float16', 'bfloat16' or a torch dtype")
    return found
