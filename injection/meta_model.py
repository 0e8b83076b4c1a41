"""A model on meta: what every question that needs no weights is answered from."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.loader import open_weights, stored_dtype
from moegraft.injection.model_source import ModelSource, find_model, meta_skeleton, refuse_quantised
from moegraft.injection.plan import Plan, plan, settle_stored
from moegraft.injection.rules import RuleFile
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model without its weights.

    Attributes:
        stored: the dtype of the stored weights.
        dtype: that of what is not replaced.
        unloadable: why this checkpoint cannot be loaded although it can be planned, or None.
    """

    source: ModelSource
    skeleton: PreTrainedModel
    stored: torch.dtype
    dtype: torch.dtype
    unloadable: str | None

    @property
    def model_type(self) -> str:
        return str(self.source.config.model_type)

    @property
    def model_class(self) -> str:
        return type(self.skeleton).__name__

    def plan(self, rules: RuleFile, registry: OperatorRegistry) -> Plan:
        """
        Raises:
            RuleErrors: as `moegraft.injection.plan.plan`.
        CheckpointError: a GGUF file does not fit the config.
        """
        planned = plan(self.skeleton, rules, registry=registry, dtype=self.stored, model_type=self.model_type)
        if self.source.gguf is None:
            return planned
        return settle_stored(planned, open_weights(self.source, self.skeleton), self.skeleton, registry, self.stored)


def build_meta_model(
    model: str | os.PathLike[str], *, trust_remote_code: bool = False, gguf: str | os.PathLike[str] | None = None
) -> MetaModel:
    """Build the meta model of a hub id or folder, which needs only a config.json; of `gguf`, the headers are read.

    Raises:
        CheckpointError, UnsupportedModelError: no such model, or none that can be built.
    """
    source = find_model(model, trust_remote_code=trust_remote_code, weights=False, gguf=gguf)
    stored = stored_dtype(source)
    dtype = source.config.dtype if isinstance(source.config.dtype, torch.dtype) else stored
    return MetaModel(source, meta_skeleton(source, dtype), stored, dtype, _why_unloadable(source))


def _why_unloadable(source: ModelSource) -> str | None:
    if source.gguf is not None:
        return None
    try:
        refuse_quantised(source.folder, source.config)
    except UnsupportedModelError as error:
        return str(error)
    return None
