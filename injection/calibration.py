"""`calibrate`: thresholds for a model from a text, and what leaving neurons out by them costs on text they were not made from.

Text of many kinds for a calibration when nobody gave one: prose, talk, instructions, code, figures, several languages.

What leaving neurons out costs a model on a text: how well it predicts, and how often it says the same.

How the layers of one model get their thresholds while it is loaded: from a file that is for its weights, or by calibrating.

A picture of a layer's activations: how large they are, and how unevenly its neurons are used.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from moegraft.injection.checkpoint.loader import CheckpointLoader, open_weights
from moegraft.injection.checks import ExpertsLayer, draft_sparsity, experts_layer, sparsity_options
from moegraft.injection.graft import Injection
from moegraft.injection.model_source import ModelSource, meta_skeleton
from moegraft.injection.plan import Plan
from moegraft.injection.rules import RuleFile
from moegraft.injection.tokenizer import read_tokenizer
from moegraft.injection.verify import compare_logits, injection_of
from moegraft.operators.errors import CheckpointError, ThresholdsError, UnsupportedModelError
from moegraft.operators.registry import OperatorRegistry
from moegraft.operators.sparse.calibration import BINS, LOWEST, PER_OCTAVE, Calibration, calibrating, quantiles
from moegraft.operators.sparse.layer import LayerSparsity, sparsity_of, whole
from moegraft.operators.sparse.thresholds import (
    FILE_NAME,
    GRID,
    HeldOut,
    LayerThresholds,
    Mode,
    Scope,
    SparsityOptions,
    Thresholds,
    read_thresholds,
    weights_hash,
)
from moegraft.operators.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Trial:
    """One target, and for each layer its threshold and the share of routed neurons that it is to leave out."""

    target: float
    scope: Scope
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
            scope=trial.scope,
            mode=trial.mode,
            achieved=self.left_out / (self.routed_neurons + (self.shared_neurons if trial.scope == "total" else 0.0)),
            dense_perplexity=math.exp(self.dense_nats / self.predicted),
            perplexity=math.exp(self.nats / self.predicted),
            agreement=self.agreed / self.positions,
        )


LEAST_TOKENS = 64
WHOLE = SparsityOptions(0.0, "routed")
Advance = Callable[[int], None]


def _silent(tokens: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How a calibration is run.

    Attributes:
        targets: tried on the held-out text.
        scope, mode: of those targets, as rules have them.
        window: tokens of one forward pass.
        held_out: share of the text, its end, that only judges.
    """

    targets: tuple[float, ...] = (0.5, 0.7, 0.85)
    scope: Scope = "routed"
    mode: Mode = "layer"
    window: int = 512
    held_out: float = 0.2

    def __post_init__(self) -> None:
        for target in self.targets:
            SparsityOptions(target, self.scope)
            if not target:
                raise ValueError("target 0 leaves nothing out: there is nothing to measure")
        if self.window < 2:
            raise ValueError(f"window must be 2 or more, not {self.window}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is a share between 0 and 1, not {self.held_out}")


@dataclass(frozen=True, slots=True)
class TextSource:
    """What a calibration was made from, for its file.

    Attributes:
        model: as the user names it.
        layers: of the stock model, in its order.
        weights: their `weights_hash`, by path.
        text_sha256: of the text's bytes.
    """

    model: str
    model_type: str
    layers: Sequence[ExpertsLayer]
    weights: Mapping[str, str]
    text_sha256: str


def sparse_rules(rules: RuleFile, registry: OperatorRegistry, sparsity: SparsityOptions = WHOLE) -> RuleFile:
    """The rules with `sparsity` wherever an operator has that option; by default every neuron, in the layout that can leave some out.

    Raises:
        UnsupportedModelError: no rule names such an operator.
    """
    found = []
    changed = 0
    for rule in rules.rules:
        options: Any = rule.options
        if rule.operator is not None and any(field.name == "sparsity" for field in fields(registry[rule.operator].options_type)):
            options = replace(options, sparsity=sparsity)
            changed += 1
        found.append(replace(rule, options=options))
    if not changed:
        raise UnsupportedModelError(
            f"{rules.files[0]}: none of its rules names an operator that can leave neurons out; give the experts to hybrid_experts"
        )
    return replace(rules, rules=tuple(found))


def describe_source(model: PreTrainedModel, source: ModelSource, *, name: str, text_sha256: str) -> TextSource:
    """What identifies an injected model's sparse layers, read off the checkpoint that it was loaded from.

    Raises:
        UnsupportedModelError: no layer of the model can leave neurons out.
    """
    operators = {path: operator for path, operator in injection_of(model).operators.items() if sparsity_of(operator) is not None}
    if not operators:
        raise UnsupportedModelError("no layer of this model can leave neurons out; load it with 'sparsity' in its rules")
    skeleton = meta_skeleton(source, torch.float32)
    stream = CheckpointLoader(source, open_weights(source, skeleton), skeleton, operators)
    layers = [experts_layer(path, skeleton) for path in operators]
    weights = {layer.path: weights_hash(stream.source(layer.path), layer.num_experts) for layer in layers}
    return TextSource(name, str(source.config.model_type), layers, weights, text_sha256)


def sparse_layers(model: PreTrainedModel) -> dict[str, LayerSparsity]:
    """The layers of an injected model that can leave neurons out, by path."""
    injection = getattr(model, "moegraft", None)
    operators = injection.operators if isinstance(injection, Injection) else {}
    return {path: found for path, operator in operators.items() if (found := sparsity_of(operator)) is not None}


def collect(
    model: PreTrainedModel, layers: Sequence[ExpertsLayer], windows: Sequence[torch.Tensor], advance: Advance = _silent
) -> Calibration:
    """One pass over `windows`, each (T,) int64, with every neuron computed; `advance(tokens)` is called after each."""
    found = sparse_layers(model)
    sizes = {layer.path: (layer.num_experts, layer.intermediate) for layer in layers}
    with calibrating({path: found[path] for path in sizes}, sizes) as made:
        for window in windows:
            run_base(model, window)
            advance(len(window))
    return made


def window_of(model: PreTrainedModel, wanted: int) -> int:
    """`wanted` tokens, or as many as the model was made for."""
    bound = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(wanted, bound) if isinstance(bound, int) and bound > 0 else wanted


def run_base(model: PreTrainedModel, window: torch.Tensor) -> None:
    """A forward pass without the head, whose logits nobody asked for."""
    with torch.inference_mode():
        model.base_model(input_ids=window[None].to(model.device), use_cache=False)


def cut(model: PreTrainedModel, ids: torch.Tensor, options: CalibrationOptions) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The windows that make thresholds and those that judge them.

    Raises:
        UnsupportedModelError: the text has fewer than `LEAST_TOKENS` tokens.
    """
    if len(ids) < LEAST_TOKENS:
        raise UnsupportedModelError(f"the text has {len(ids)} tokens; {LEAST_TOKENS} are needed, and some ten thousand say more")
    window = min(window_of(model, options.window), len(ids) // 4)  # at least four, so that both sides have one
    windows = [part for part in ids.split(window) if len(part) > 1]
    wanted = options.held_out * sum(map(len, windows))
    judging = 1
    while sum(map(len, windows[-judging:])) < wanted and judging < len(windows) - 1:
        judging += 1
    return windows[:-judging], windows[-judging:]


def calibrate(
    model: PreTrainedModel, about: TextSource, ids: torch.Tensor, options: CalibrationOptions, advance: Advance = _silent
) -> tuple[Thresholds, Calibration]:
    """Thresholds of every layer in `about`, with what the targets cost.

    Args:
        model: as `optimize_and_load` gives it for `sparse_rules`.
        ids: (T,) int64, the text.
        advance: called with tokens; in all `work_tokens` of them.

    Raises:
        UnsupportedModelError: the text is too short, a target cannot be reached, or the model computes what is not finite.
    """
    making, judging = cut(model, ids, options)
    routed = [_routed_targets(about.layers, target, options) for target in options.targets]
    calibration = collect(model, about.layers, making, advance)
    found = Thresholds(
        model=about.model,
        model_type=about.model_type,
        text_sha256=about.text_sha256,
        tokens=sum(map(len, making)),
        held_out_tokens=sum(map(len, judging)),
        top_k=about.layers[0].top_k,
        layers={layer.path: _layer_thresholds(layer, calibration, about) for layer in about.layers},
        all_layers=quantiles(calibration.all_bins(), GRID),
    )
    trials = [
        Trial(
            target,
            options.scope,
            options.mode,
            {path: (found.threshold(path, share, options.mode), share) for path, share in shares.items()},
        )
        for target, shares in zip(options.targets, routed, strict=True)
    ]
    return replace(found, held_out=tuple(judge(model, about.layers, sparse_layers(model), trials, judging, advance))), calibration


def work_tokens(model: PreTrainedModel, ids: torch.Tensor, options: CalibrationOptions) -> int:
    """What a calibration will report to `advance` in all."""
    making, judging = cut(model, ids, options)
    return sum(map(len, making)) + sum(map(len, judging)) * (1 + len(options.targets))


def _routed_targets(layers: Sequence[ExpertsLayer], target: float, options: CalibrationOptions) -> dict[str, float]:
    try:
        targets = {layer.path: layer.routed_target(SparsityOptions(target, options.scope)) for layer in layers}
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    if max(targets.values()) > GRID[-1]:
        raise UnsupportedModelError(f"target {target:g} means {max(targets.values()):.4g} of the routed neurons; {GRID[-1]:g} is the most")
    return targets


def _layer_thresholds(layer: ExpertsLayer, calibration: Calibration, about: TextSource) -> LayerThresholds:
    bins = calibration.layers[layer.path].bins
    if not bins.any():
        raise UnsupportedModelError(f"no token reached {layer.path}: its thresholds cannot be found from text alone")
    return LayerThresholds(
        layer.num_experts, layer.hidden, layer.intermediate, layer.shared_intermediate, about.weights[layer.path], quantiles(bins, GRID)
    )


CALIBRATION_TEXT = '''\
The harbour was quiet when the ferry came in. Two men in yellow coats caught the ropes, and a dog that belonged to neither of them ran up \
and down the quay, barking at the water. Nobody got off but an old woman with a basket of pears. She looked at the clock above the customs \
house, which had stopped years ago at ten past four, set her own watch by it, and walked up the hill without asking anyone the way.

"You are late," said her brother.
"By the clock I am early."
"That clock has been wrong since the war."
"Then it is the only thing in this town that has not changed its mind."

How to repair a dripping tap. First close the valve under the basin and open the tap until no water comes. Take off the handle; most are \
held by one screw below a small cap. Unscrew the bonnet with a wrench of 17 mm and draw out the spindle. At its end sits a rubber washer: \
replace it if it is hard, torn or worn on one side. Clean the seat with a cloth, grease the thread lightly, and put everything together in \
the opposite order. If the tap still drips after that, the seat itself is damaged and has to be ground or renewed.

A glacier is a river that moves too slowly to be seen. Snow that falls on its upper part is pressed into ice by the snow of later years, \
and the ice creeps downhill under its own weight, a few centimetres to some metres a day. Where more melts than flows in, it ends. Since \
1850 the glaciers of the Alps have lost about two thirds of their volume, and the loss has become faster: between 2000 and 2020 it was \
roughly 1.3 cubic kilometres a year.

def median(values: list[float]) -> float:
    """The middle of the sorted values, or the mean of the two in the middle."""
    if not values:
        raise ValueError("median of nothing")
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2

for (int row = 0; row < rows; ++row) {
  float sum = bias ? bias[row] : 0.0f;
  for (int col = 0; col < cols; ++col) sum += weight[row * cols + col] * x[col];
  out[row] = sum;
}

SELECT country, COUNT(*) AS orders, SUM(price * quantity) AS total FROM orders JOIN customers USING (customer_id)
WHERE ordered_at >= '2023-01-01' GROUP BY country HAVING total > 10000 ORDER BY total DESC;

{"name": "sensor-17", "unit": "degC", "readings": [21.5, 21.7, 21.6, null, 22.0], "ok": true}

Question: A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive?
Answer: 210 / 84 = 2.5, so it travels for two and a half hours and arrives at 12:10.

Question: Let f(x) = x^2 - 6x + 5. Where is f smallest?
Answer: f'(x) = 2x - 6 is zero at x = 3, and f(3) = 9 - 18 + 5 = -4. As f'' = 2 > 0, this is the minimum.

Dear Ms Okafor, thank you for your letter of 3 March. We are sorry that the second parcel did not reach you. A replacement was sent \
today by registered mail and should arrive within five working days; you need not return anything. With kind regards, the service team.

The council voted on Tuesday, by 31 to 14, to close the inner ring road to cars on Sundays. Shop owners had warned of losses, while two \
schools and the hospital supported the plan. The rule will be tried for six months from April and then judged by counts of visitors, \
bus delays and air quality at nine stations.

Der Wald war im Winter stiller als sonst, nur der Schnee fiel manchmal von den Ästen. Wer früh genug aufstand, sah die Spuren der Rehe \
bis an den Zaun. Niemand wusste, warum sie jedes Jahr wiederkamen.

Le boulanger ouvre sa boutique à six heures. Il connaît le nom de tous ses clients, et presque toujours ce qu'ils vont acheter. Quand il \
pleut, il laisse la porte ouverte pour que l'on sente le pain jusque sur la place.

El médico le recomendó caminar media hora cada día y dormir con la ventana abierta. Al cabo de un mes se sentía mejor, aunque no habría \
sabido decir por qué.

春天来了。河边的柳树先绿了。孩子们放学以后在桥上放风筝。老人们坐在茶馆里下棋。

- 500 g flour, 10 g salt, 7 g dried yeast, 320 ml lukewarm water
- Mix, knead for ten minutes, let rise for an hour under a cloth
- Shape two loaves, let rise again, bake at 230 °C for 25 to 30 minutes

She had learned the trick from her grandfather: to find a fault in a long cable, measure in the middle. If the middle is sound, the fault \
is beyond it; if not, before it. Measure again in the middle of what is left. After ten steps a thousand metres have become one. "It works \
for cables," he used to say, "and for most arguments."
'''


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SparseSwap:
    """One layer that will leave neurons out; `file` has its thresholds, None where they have to be found.

    Attributes:
        draft: what drafts leave out, as the options count; None: no more than is always left out.
    """

    layer: ExpertsLayer
    options: SparsityOptions
    file: Path | None
    draft: float | None

    @property
    def targets(self) -> tuple[float, ...]:
        """Shares of routed neurons: what is always left out, and what drafts leave out."""
        always = self.layer.routed_target(self.options)
        return (always,) if self.draft is None else (always, self.layer.draft_target(self.options, self.draft))


@dataclass(frozen=True, slots=True)
class SparsitySetup:
    """All that is decided before weights are read.

    Attributes:
        windows: (T,) int64 each, the bundled text; none where no layer needs a calibration.
    """

    swaps: tuple[_SparseSwap, ...]
    files: Mapping[Path, Thresholds]
    windows: tuple[torch.Tensor, ...]

    def check_weights(self, source_of: Callable[[str], WeightSource]) -> None:
        """
        Raises:
            ThresholdsError: a file was made from other weights than those that `source_of(path)` gives.
        """
        for swap in self.swaps:
            if swap.file is None:
                continue
            thresholds = self.files[swap.file]
            if thresholds.layers[swap.layer.path].weights != weights_hash(source_of(swap.layer.path), swap.layer.num_experts):
                raise ThresholdsError(
                    f"{swap.file}: made from other weights: those of {swap.layer.path} are not the ones of '{thresholds.model}' "
                    "(nor is a checkpoint that was rounded since); calibrate this model with moegraft calibrate"
                )

    def apply(self, model: PreTrainedModel) -> None:
        """Gives every layer of the loaded model its threshold, and calibrates those without a file."""
        states = sparse_layers(model)
        found = self._calibrated(model) if self.windows else {}
        for swap in self.swaps:
            path, targets, file = swap.layer.path, swap.targets, swap.file
            thresholds = (
                found[path] if file is None else [self.files[file].threshold(path, target, swap.options.mode) for target in targets]
            )
            states[path].set_threshold(thresholds[0], targets[0])
            if swap.draft is not None:
                states[path].set_draft_threshold(thresholds[1], targets[1])

    def _calibrated(self, model: PreTrainedModel) -> dict[str, list[float]]:
        """By layer, a threshold for each of its targets."""
        start = time.perf_counter()
        swaps = [swap for swap in self.swaps if swap.file is None]
        made = collect(model, [swap.layer for swap in swaps], self.windows)
        found = {}
        for swap in swaps:
            bins = made.all_bins() if swap.options.mode == "global" else made.layers[swap.layer.path].bins
            if not bins.any():
                raise ThresholdsError(f"{swap.layer.path}: text does not reach this layer; leave its experts whole, or give 'thresholds'")
            found[swap.layer.path] = [quantiles(bins, [target])[0] if target else 0.0 for target in swap.targets]
        logger.warning(
            "sparsity: no thresholds file, so %d layers were calibrated on %d tokens of a bundled text (%.1f s); "
            "'moegraft calibrate --text FILE' writes a file from a text like yours and says what the sparsity costs",
            len(swaps),
            sum(map(len, self.windows)),
            time.perf_counter() - start,
        )
        return found


def prepare_sparsity(the_plan: Plan, model: PreTrainedModel, folder: Path | None, *, trust_remote_code: bool = False) -> SparsitySetup:
    """Reads every thresholds file that a plan needs.

    Args:
        model: with its own modules; it may be on meta.
        folder: the model's checkpoint; None where it has none.

    Raises:
        ThresholdsError: a file is not for this model, or there is none and nothing to calibrate with.
    """
    swaps = tuple(_sparse_swaps(the_plan, model, folder))
    files = {path: read_thresholds(path) for path in dict.fromkeys(swap.file for swap in swaps) if path is not None}
    for swap in swaps:
        reason = None if swap.file is None else swap.layer.why_unfit(files[swap.file])
        if reason is not None:
            raise ThresholdsError(f"{swap.file}: {reason}; calibrate this one with moegraft calibrate")
    for path in files:
        logger.info("sparsity: thresholds of %s", path)
    missing = any(swap.file is None for swap in swaps)
    return SparsitySetup(swaps, files, _bundled_windows(model, folder, trust_remote_code) if missing else ())


def _sparse_swaps(the_plan: Plan, model: PreTrainedModel, folder: Path | None) -> Iterable[_SparseSwap]:
    own = folder / FILE_NAME if folder is not None and (folder / FILE_NAME).is_file() else None
    draft = draft_sparsity(swap.options for swap in the_plan.swaps)
    for swap in the_plan.swaps:
        options = sparsity_options(swap.options)
        if options is not None and (options.target or draft is not None):
            yield _SparseSwap(experts_layer(swap.module, model), options, options.thresholds or own, draft)


def _bundled_windows(model: PreTrainedModel, folder: Path | None, trust_remote_code: bool) -> tuple[torch.Tensor, ...]:
    """
    Raises:
        ThresholdsError: there is no tokenizer.
    """
    mend = "give the file's path as 'thresholds' of 'sparsity'; moegraft calibrate writes it"
    if folder is None:
        raise ThresholdsError(f"sparsity has no thresholds, and this model no folder with a tokenizer to calibrate with; {mend}")
    try:
        tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise ThresholdsError(f"sparsity has no thresholds, and cannot calibrate: {error}; {mend}") from error
    ids = torch.tensor(tokenizer(CALIBRATION_TEXT, verbose=False)["input_ids"])
    return tuple(ids.split(window_of(model, CalibrationOptions().window)))


PER_BAR = PER_OCTAVE // 8  # bins in one bar


def activation_report(calibration: Calibration, path: Path, *, layer: str | None = None, expert: int | None = None) -> None:
    """Writes a PNG: left, the magnitudes of `act(gate)` in a layer, those that the hot quantile leaves out and those it keeps; right, how
    often each neuron of one expert is kept.

    The two views of the published study (its figure 3, c and d), on a logarithmic axis.

    Args:
        layer: the path of an experts module; by default the first.
        expert: by default the one that most tokens went to.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    layer = layer or next(iter(calibration.layers))
    found = calibration.layers[layer]
    expert = int(found.routed.argmax()) if expert is None else expert
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    magnitudes, neurons = figure.subplots(1, 2)
    bars = found.bins.reshape(BINS // PER_BAR, PER_BAR).sum(axis=1)
    edges = 2.0 ** (LOWEST + np.arange(len(bars) + 1) * PER_BAR / PER_OCTAVE)
    shown = np.flatnonzero(bars)
    kept = edges[:-1] >= found.quantile(found.hot)
    for part, colour, text in ((~kept, "tab:blue", f"lowest {100 * found.hot:g} %"), (kept, "tab:orange", "the rest")):
        magnitudes.bar(edges[:-1], np.where(part, bars, 0), width=np.diff(edges), align="edge", color=colour, label=text)
    magnitudes.set(xscale="log", yscale="log", xlim=(edges[shown[0]], edges[shown[-1] + 1]), xlabel="|act(gate)|", ylabel="activations")
    magnitudes.set_title(f"{layer}, {found.count:,} activations", fontsize="medium")
    magnitudes.legend(loc="upper left")
    counts = np.sort(found.active[expert].numpy())[::-1]
    neurons.bar(np.arange(len(counts)), counts, width=1.0, color="tab:orange")
    neurons.axhline(float(counts.mean()), color="black", linewidth=0.8, label=f"mean {counts.mean():.1f}")
    neurons.set(xlabel="neurons, the most active first", ylabel="tokens that it is active for")
    title = f"expert {expert}, {int(found.routed[expert]):,} tokens; {int((counts == 0).sum())} of {len(counts)} neurons never active"
    neurons.set_title(title, fontsize="medium")
    neurons.legend()
    figure.savefig(path, dpi=150, format="png")
