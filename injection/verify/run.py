"""The two forward passes of a verification, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from moegraft.injection.model_source import ModelSource
from moegraft.injection.verify.layers import LayerError, injection_of, stock_in_place
from moegraft.injection.verify.logits import LogitsError, compare_logits
from moegraft.injection.verify.stock import StockModules
from moegraft.operators.sparse.layer import achieved, sparsity_of, total_counts, whole


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found.

    Attributes:
        layers: in the order of the model.
        unreached: injected modules that text does not pass, such as those of a vision tower.
        left_out: share of routed neurons that the injected logits are without; None where rules ask for no sparsity. Layers are
            compared with every neuron.
    """

    tokens: int
    layers: tuple[LayerError, ...]
    unreached: tuple[str, ...]
    logits: LogitsError
    left_out: float | None = None

    @property
    def first_bad(self) -> LayerError | None:
        return next((layer for layer in self.layers if not layer.ok), None)

    @property
    def ok(self) -> bool:
        return self.first_bad is None and self.logits.kl_nats == self.logits.kl_nats  # NaN is no KL


def verify(model: PreTrainedModel, source: ModelSource, ids: torch.Tensor) -> Verification:
    """Compares an injected model with the stock model of its checkpoint.

    Args:
        model: as `optimize_and_load` returns it.
        source: what it was loaded from.
        ids: (T,) int64 tokens of real text, 2 or more.

    Raises:
        CheckpointError, NotEnoughMemoryError: a stock module cannot be made.
    """
    stock = StockModules(source)
    layers: list[LayerError] = []
    sparse = [found for operator in injection_of(model).operators.values() if (found := sparsity_of(operator)) is not None]
    with torch.no_grad():
        with whole(sparse), stock_in_place(model, stock, layers):
            stock_logits = _logits(model, ids)
        before = total_counts(sparse)
        injected_logits = _logits(model, ids)
    wanted = [swap.module for swap in injection_of(model).plan.swaps if not swap.in_place]
    by_path = {layer.module: layer for layer in layers}
    return Verification(
        tokens=len(ids),
        layers=tuple(by_path[path] for path in wanted if path in by_path),
        unreached=tuple(path for path in wanted if path not in by_path),
        logits=compare_logits(stock_logits, injected_logits, ids),
        left_out=achieved(total_counts(sparse) - before) if any(layer.threshold for layer in sparse) else None,
    )


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """(T, V), on the CPU."""
    logits: torch.Tensor = model(input_ids=ids[None].to(model.device), use_cache=False).logits
    return logits[0].to("cpu")
