"""Rounds of drafting and verifying on a modelled machine: the real engine and the real schedules on the virtual clock.

Nothing is computed, so the acceptance of a drafted token is drawn from a trained checkpoint's rates (`speculative_confidence.csv`) at the
share of the router's weight that the draft's experts have. The draft's routing differs from the full model's as much as that of the
checkpoint (`recall` in `speculative_drafts.csv`). Rejected tokens of a draft are other tokens at the same positions.

Drafts by an MTP layer run one more layer of the model's kind, which is the engine's last, and the head. Their acceptance is given. The
layer's state is shown to the routers of all layers of the body, whose choices are right as often as those of the bundled model's MTP layer
(`speculative_foresight.csv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harness.record import read_rows
from harness.routing import MTP_NOISE, PREDICTION_NOISE, SPREAD, ModelShape
from harness.simulation import Simulation, _Counted, head_ms, rest_layer_ms
from moegraft.operators.decode.schedule import DraftSchedule, Round, Statistics
from moegraft.operators.offload.devices.base import Work
from moegraft.operators.offload.scheduler import DraftStep, LayerStep, Prediction
from moegraft.operators.routing_trace import Trace

NOISES = np.linspace(0.0, 1.2, 13)
SAMPLE_TOKENS = 40


@dataclass(frozen=True, slots=True)
class DraftWay:
    """One configuration of drafts.

    Attributes:
        top_k: experts of a draft.
        mtp: whether an MTP layer drafts, which is the engine's last.
        tolerance: 0 for lossless, or a tolerance that was measured with the checkpoint.
        acceptance: the chance that a drafted token is accepted after accepted ones; None for what was measured with the checkpoint.
        looks_ahead: whether the MTP layer's states are shown to the routers of the body.
    """

    top_k: int
    mtp: bool = False
    tolerance: float = 0.0
    acceptance: float | None = None
    looks_ahead: bool = True

    def drafts(self) -> MeasuredDrafts:
        """Return what decides on the drafted tokens."""
        return MeasuredDrafts(self.tolerance) if self.acceptance is None else GivenDrafts(self.acceptance)


@dataclass(frozen=True, slots=True)
class _Point:
    """A measured configuration of the checkpoint; arrays are (B,), by bin of confidence."""

    kept_share: float
    recall: float
    confidences: NDArray[np.float64]
    judged: NDArray[np.float64]
    accepted: NDArray[np.float64]


class MeasuredDrafts:
    """The acceptance of the checkpoint's greedy drafts by the share of the router's weight that their experts kept."""

    def __init__(self, tolerance: float) -> None:
        chosen = [row for row in read_rows("speculative_confidence") if _is(row, tolerance)]
        ways = {row["draft_top_k"]: row for row in read_rows("speculative_drafts") if _is(row, tolerance)}
        found = []
        for top_k, way in ways.items():
            bins = [row for row in chosen if row["draft_top_k"] == top_k]
            middle = [(float(row["confidence_from"]) + float(row["confidence_to"])) / 2 for row in bins]
            judged, accepted = (np.array([float(row[name]) for row in bins]) for name in ("judged", "accepted"))
            found.append(_Point(float(way["kept_share"]), float(way["recall"]), np.array(middle), judged, accepted))
        self._points = sorted(found, key=lambda point: point.kept_share)

    def draw(self, kept_share: float, rng: np.random.Generator) -> tuple[float, bool]:
        """Draw a token's confidence, and whether it is accepted, from the nearest configurations below and above, in proportion.

        Outside the measured shares, the outermost configuration is used, so that no draft is better than any measured one.
        """
        shares = [point.kept_share for point in self._points]
        above = min(int(np.searchsorted(shares, kept_share)), len(shares) - 1)
        low, high = self._points[max(above - 1, 0)], self._points[above]
        width = high.kept_share - low.kept_share
        towards = 1.0 if width <= 0 else np.clip((kept_share - low.kept_share) / width, 0, 1)
        point = high if rng.random() < towards else low
        at = int(rng.choice(len(point.judged), p=point.judged / point.judged.sum()))
        return float(point.confidences[at]), bool(rng.random() < point.accepted[at] / point.judged[at])

    def recall(self, kept_share: float) -> float:
        return float(np.interp(kept_share, [point.kept_share for point in self._points], [point.recall for point in self._points]))


class GivenDrafts(MeasuredDrafts):
    """Drafts whose tokens are accepted with a given chance, which is also what the drafter expects of each."""

    def __init__(self, acceptance: float) -> None:
        super().__init__(0.0)  # for the recall of drafts by fewer experts
        self._acceptance = acceptance

    def draw(self, kept_share: float, rng: np.random.Generator) -> tuple[float, bool]:
        return self._acceptance, bool(rng.random() < self._acceptance)


def _is(row: dict[str, str], tolerance: float) -> bool:
    return float(row["tolerance"]) == tolerance


@dataclass(slots=True)
class Text:
    """The routing of the text's tokens, and of other tokens at the same positions."""

    real: Trace
    other: Trace


@dataclass(slots=True)
class Parts:
    """Experts that were needed, and those of them without a slot, summed over the layers of one kind of step."""

    layers: int = 0
    experts: int = 0
    missing: int = 0

    def add(self, step: LayerStep, there: NDArray[np.bool_]) -> None:
        self.layers += 1
        self.experts += len(step.experts)
        self.missing += int((~there[step.experts]).sum())


@dataclass(slots=True)
class Played:
    """The result of a run, in ms of the virtual clock; `parts` by "plain", "draft" and "verify"."""

    took_ms: float = 0.0
    tokens: int = 0
    statistics: Statistics = field(default_factory=Statistics)
    parts: dict[str, Parts] = field(default_factory=lambda: {name: Parts() for name in ("plain", "draft", "verify")})
    kept: list[float] = field(default_factory=list)
    draft_demands: int = 0
    schedule: str = ""

    @property
    def ms_per_token(self) -> float:
        return self.took_ms / self.tokens


class DraftSimulation:
    """Generation of a text with drafts, or by plain steps, over a `Simulation`'s engine."""

    def __init__(self, base: Simulation, text: Text, way: DraftWay | None, schedule: DraftSchedule | None, seed: int = 0) -> None:
        self._base = base
        self._text = text
        self._way = way
        self._schedule = schedule
        self._rng, self._accepting = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        self._measured = None if way is None else way.drafts()
        self._mtp = way is not None and way.mtp
        self._layers = base.model.layers - self._mtp
        self._head_ms = head_ms(base.model, base.machine)
        self._recalls = noise_recalls(base.model, text.real)
        self._compute = base.device.stream("compute")
        self.played = Played()

    def run(self, tokens: int) -> Played:
        place, played, device = 0, self.played, self._base.device
        start_ms = device.now_ms()
        while played.tokens < tokens:
            done = self._round(place)
            place += done.generated
            played.tokens += done.generated
            played.statistics.add(done)
            if self._schedule is not None:
                self._schedule.record(done)
        played.took_ms = device.now_ms() - start_ms
        played.schedule = self._schedule.state() if self._schedule is not None else ""
        return played

    def _round(self, place: int) -> Round:
        device = self._base.device
        start_ms = device.now_ms()
        planned = self._schedule.plan(self._text.real.num_tokens) if self._schedule is not None else 0
        confidences: list[float] = []
        accepted, stands = 0, True
        while len(confidences) < planned:
            token = self._token(place + len(confidences), real=stands)
            confidence, stood = self._draft_by_mtp(token) if self._mtp else self._draft(token)
            confidences.append(confidence)
            stands = stands and stood
            accepted += stands
            assert self._schedule is not None, "only a schedule plans drafts"
            if not self._schedule.continues(confidences):
                break
        drafted_ms = device.now_ms()
        fed = [self._token(place + at, real=at <= accepted) for at in range(len(confidences) + 1)]
        self._pass(fed, "verify" if confidences else "plain")
        judged = min(accepted + 1, len(confidences))
        return Round(confidences, judged, accepted, accepted + 1, drafted_ms - start_ms, device.now_ms() - drafted_ms)

    def _token(self, place: int, *, real: bool) -> Trace:
        trace = self._text.real if real else self._text.other
        return trace.part(place, place + 1)

    def _draft(self, token: Trace) -> tuple[float, bool]:
        """Run one draft step; return its confidence and whether the token is accepted."""
        way = self._way
        assert way is not None and self._measured is not None, "drafts have a configuration"
        kept: list[float] = []
        share = float(np.mean(self.played.kept[-8:])) if self.played.kept else 0.5
        noise = float(np.interp(-self._measured.recall(share), -self._recalls, NOISES))
        demanded = self._base.engine.cache.queue.statistics.demanded
        for layer in range(self._layers):
            scores = token.scores[0, layer]
            logits = np.log(scores) + SPREAD * noise * (self._rng.normal(size=len(scores)) if layer else 0.0)
            order = np.argsort(-logits, kind="stable").astype(np.int64)
            whole = order[: self._base.model.top_k]
            few = whole[: way.top_k]
            scores = np.exp(logits - logits.max())
            kept.append(float(scores[few].sum() / scores[whole].sum()))
            step = LayerStep.of(layer, few[None], None, self._predictions([token], layer), DraftStep(whole[None], way.top_k))
            self._layer(step, 1, "draft")
        self._head()
        self.played.kept.append(float(np.mean(kept)))
        self.played.draft_demands += self._base.engine.cache.queue.statistics.demanded - demanded
        return self._measured.draw(self.played.kept[-1], self._accepting)

    def _draft_by_mtp(self, token: Trace) -> tuple[float, bool]:
        """Run the MTP layer on one token, and show its state to the body's routers."""
        assert self._way is not None and self._measured is not None, "drafts have a configuration"
        self._layer(LayerStep.of(self._layers, token.chosen[:, self._layers], token.scores[:, self._layers]), 1, "draft")
        self._head()
        if self._way.looks_ahead:
            logits = np.log(token.scores[0, : self._layers])
            noisy = logits + SPREAD * MTP_NOISE * self._rng.normal(size=logits.shape)
            chosen = np.argsort(-noisy, axis=-1, kind="stable")[:, : self._base.model.top_k]
            self._base.engine.expect_verification([Prediction.of(layer, each[None]) for layer, each in enumerate(chosen)])
        return self._measured.draw(0.0, self._accepting)

    def _head(self) -> None:
        self._base.device.launch(self._compute, None, Work("dense", cost_ms=self._head_ms))
        self._compute.record().wait()

    def _pass(self, tokens: Sequence[Trace], kind: str) -> None:
        for layer in range(self._layers):
            chosen = np.concatenate([token.chosen[:, layer] for token in tokens])
            scores = np.concatenate([token.scores[:, layer] for token in tokens])
            self._layer(LayerStep.of(layer, chosen, scores, self._predictions(tokens, layer)), len(tokens), kind)
        self._head()

    def _layer(self, step: LayerStep, tokens: int, kind: str) -> None:
        device, engine = self._base.device, self._base.engine
        device.launch(self._compute, None, Work("dense", cost_ms=rest_layer_ms(self._base.model, self._base.machine, tokens)))
        self._compute.record().wait()
        self.played.parts[kind].add(step, engine.cache.slots.slot_of(step.layer) >= 0)
        engine.run(step, _Counted())

    def _predictions(self, tokens: Sequence[Trace], layer: int) -> list[Prediction]:
        depth = min(self._base.system.prefetch.depth(len(tokens)), len(PREDICTION_NOISE))
        later = range(layer + 1, min(layer + 1 + depth, self._base.model.layers))
        return [Prediction.of(each, np.concatenate([token.predicted[each - layer - 1, :, each] for token in tokens])) for each in later]


def noise_recalls(model: ModelShape, trace: Trace) -> NDArray[np.float64]:
    """Return, for each of `NOISES`, the share of a token's experts that are still chosen, which falls with the noise."""
    rng = np.random.default_rng(0)
    logits = np.log(trace.scores[:SAMPLE_TOKENS])
    found = []
    for noise in NOISES:
        noisy = logits + SPREAD * noise * rng.normal(size=logits.shape)
        named = np.argsort(-noisy, axis=-1, kind="stable")[..., : model.top_k]
        chosen = trace.chosen[:SAMPLE_TOKENS]
        found.append(float((chosen[..., :, None] == named[..., None, :]).any(-1).mean()))
    return np.asarray(found)
