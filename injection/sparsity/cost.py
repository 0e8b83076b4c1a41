"""What leaving neurons out costs a model on a text: how well it predicts, and how often it says the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from moegraft.injection.sparsity.targets import ExpertsLayer
from moegraft.injection.verify.logits import compare_logits
from moegraft.operators.sparse.layer import LayerSparsity, whole
from moegraft.operators.sparse.options import Counts, Mode
from moegraft.operators.sparse.thresholds import HeldOut


@dataclass(frozen=True, slots=True)
class Trial:
    """One target, and for each layer its threshold and the share of routed neurons that it is to leave out."""

    target: float
    counts: Counts
    mode: Mode
    layers: Mapping[str, tuple[float, float]]


def judge(
    model: PreTrainedModel,
    layers: Sequence[ExpertsLayer],
    states: Mapping[str, LayerSparsity],
    trials: Sequence[Trial],
    windows: Sequence[torch.Tensor],
    advance: Callable[[int], None],
) -> list[HeldOut]:
    """Each trial beside the model with every neuron, window by window; `states` are the layers of `model` by path."""
    tallies = [_Tally() for _ in trials]
    with whole(states.values()):
        for window in windows:
            for state in states.values():
                state.set_threshold(0.0, 0.0)
            dense = logits_of(model, window)
            advance(len(window))
            for trial, tally in zip(trials, tallies, strict=True):
                for path, (threshold, share) in trial.layers.items():
                    states[path].set_threshold(threshold, share)
                tally.add(dense, logits_of(model, window), window)
                tally.count(layers, states)
                advance(len(window))
    return [tally.result(trial) for trial, tally in zip(trials, tallies, strict=True)]


def logits_of(model: PreTrainedModel, window: torch.Tensor) -> torch.Tensor:
    """(T, V), on the CPU, of `window (T,)` int64."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=window[None].to(model.device), use_cache=False).logits
    return logits[0].to("cpu")


@dataclass(slots=True)
class _Tally:
    """Sums over the windows of one trial."""

    dense_nats: float = 0.0
    nats: float = 0.0
    predicted: int = 0
    agreed: float = 0.0
    positions: int = 0
    left_out: float = 0.0
    routed_neurons: float = 0.0
    shared_neurons: float = 0.0

    def add(self, dense: torch.Tensor, sparse: torch.Tensor, window: torch.Tensor) -> None:
        found = compare_logits(dense, sparse, window)
        self.dense_nats += math.log(found.stock_perplexity) * (len(window) - 1)
        self.nats += math.log(found.injected_perplexity) * (len(window) - 1)
        self.predicted += len(window) - 1
        self.agreed += found.top1_agreement * len(window)
        self.positions += len(window)

    def count(self, layers: Sequence[ExpertsLayer], states: Mapping[str, LayerSparsity]) -> None:
        for layer in layers:
            active, neurons = states[layer.path].counts.tolist()
            self.left_out += neurons - active
            self.routed_neurons += neurons
            self.shared_neurons += neurons * layer.shared_intermediate / (layer.top_k * layer.intermediate)

    def result(self, trial: Trial) -> HeldOut:
        return HeldOut(
            target=trial.target,
            counts=trial.counts,
            mode=trial.mode,
            achieved=self.left_out / (self.routed_neurons + (self.shared_neurons if trial.counts == "total" else 0.0)),
            dense_perplexity=math.exp(self.dense_nats / self.predicted),
            perplexity=math.exp(self.nats / self.predicted),
            agreement=self.agreed / self.positions,
        )
