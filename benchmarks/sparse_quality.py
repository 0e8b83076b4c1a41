"""How much quality does a model lose when neurons are left out? Perplexity and next tokens by sparsity; by default the bundled model.

    python benchmarks/sparse_quality.py                                   # the bundled model on held-out text
    python benchmarks/sparse_quality.py --model FOLDER --text FILE --name NAME

- routed: neurons of routed experts are left out; routed+shared: also neurons of shared experts, where a model has them.
- threshold: one threshold of |act(gate)| per layer from other text, the criterion of operators. topk: the largest neurons of each token and
  expert are kept, an oracle that needs sorting. (Older rows have groups of neurons, ranked by the group's largest.)
- `sparse_groups.csv`: the share of neurons that a kernel computes if thresholds are applied to whole groups; with `hot_first`, each
  expert's neurons are first sorted by how often they are active.

The score is the share of correct next tokens. The cutoff is the sparsity up to which 95 % of the full model's score is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from harness.masked_experts import Keep, Sites, find_sites, masked
from harness.plots import curve, grouped, panels, save
from harness.record import Recorder, parser
from harness.texts import held_out, token_ids
from transformers import AutoModelForCausalLM, PreTrainedModel

from moegraft.injection.calibration import ActivationHistogram, quantiles
from moegraft.injection.demo import demo_path

SPARSITIES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99)
GROUPS = (4, 8, 16, 32)
GROUP_SPARSITIES = (0.7, 0.85, 0.95)
KEPT_SCORE = 0.95
HOT = 0.9  # the quantile of the text so far that an activation reaches if its neuron is active
Row = dict[str, object]


class Activity(ActivationHistogram):
    """A histogram that also counts how often each neuron is active, (E, I) int64."""

    def __init__(self, num_experts: int, intermediate: int) -> None:
        super().__init__(num_experts)
        self.active = torch.zeros(num_experts, intermediate, dtype=torch.int64)

    def add(self, top_k_index: torch.Tensor, acted: torch.Tensor) -> None:
        super().add(top_k_index, acted)
        if not self.bins.any():
            return
        # One pass cannot know the quantile of the whole text; the quantile of the text so far ranks neurons equally well.
        reached = acted.flatten(0, 1).abs().float() >= quantiles(self.bins, [HOT])[0]
        self.active.index_add_(0, top_k_index.flatten(), reached.to(torch.int64))


@dataclass(frozen=True, slots=True)
class Bench:
    """A model with its texts, and the histograms of its activations on the calibration text."""

    model: PreTrainedModel
    sites: Sites
    making: Sequence[torch.Tensor]
    judging: Sequence[torch.Tensor]
    histograms: Mapping[str, Activity]


@dataclass(slots=True)
class Score:
    """Sums over a text."""

    nats: float = 0.0
    right: int = 0
    agreed: int = 0
    predicted: int = 0

    def row(self) -> Row:
        perplexity = float(torch.tensor(self.nats / self.predicted, dtype=torch.float64).exp())
        shares = {"right_next_token": self.right / self.predicted, "same_next_token": self.agreed / self.predicted}
        return {"perplexity": round(perplexity, 4), **{name: round(share, 4) for name, share in shares.items()}}


class Counting:
    """A criterion on some paths, with counts of the neurons that it leaves out there."""

    def __init__(self, keep: Keep, paths: Sequence[str]) -> None:
        self._keep, self._paths = keep, frozenset(paths)
        self.routed = [0, 0]  # neurons left out, and all neurons
        self.shared = [0, 0]

    def __call__(self, path: str, expert: int | None, acted: torch.Tensor) -> torch.Tensor:
        kept = self._keep(path, expert, acted) if path in self._paths else torch.ones_like(acted, dtype=torch.bool)
        counts = self.shared if expert is None else self.routed
        counts[0] += kept.numel() - int(kept.sum())
        counts[1] += kept.numel()
        return kept

    def row(self) -> Row:
        routed, total = self.routed[0] / self.routed[1], (self.routed[0] + self.shared[0]) / (self.routed[1] + self.shared[1])
        return {"routed_sparsity": round(routed, 4), "total_sparsity": round(total, 4)}


def load(name: str | None, text: Path | None, tokens: int, window: int) -> Bench:
    path = demo_path() if name is None else name
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval().requires_grad_(False)
    ids = token_ids(held_out() if text is None else text.read_text(encoding="utf-8"), path)[: 2 * tokens]
    if len(ids) < 4 * window:
        raise SystemExit(f"the text has {len(ids)} tokens; {4 * window} are needed")
    windows = list(ids.split(window))
    sites = find_sites(model)
    histograms = {path: Activity(layout.num_experts, layout.intermediate) for path, layout in sites.routed.items()}
    histograms |= {path: Activity(1, width) for path, width in sites.shared.items()}
    bench = Bench(model, sites, windows[: len(windows) // 2], windows[len(windows) // 2 :], histograms)

    def look(path: str, expert: int | None, acted: torch.Tensor) -> torch.Tensor:
        histograms[path].add(torch.full((len(acted), 1), expert or 0), acted[:, None])
        return torch.ones_like(acted, dtype=torch.bool)

    run(bench, look, bench.making)
    return bench


def run(bench: Bench, keep: Keep, windows: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode(), masked(bench.model, bench.sites, keep):
        for window in windows:
            bench.model(window[None], use_cache=False)


def judge(bench: Bench, keep: Keep, whole: list[torch.Tensor] | None) -> tuple[Score, list[torch.Tensor]]:
    """Score the next tokens of the held-out text, and return the likeliest ones; `whole` has those of the model with every neuron."""
    score, likeliest = Score(), []
    with torch.inference_mode(), masked(bench.model, bench.sites, keep):
        for index, window in enumerate(bench.judging):
            logits = bench.model(window[None], use_cache=False).logits[0, :-1].float()
            following = window[1:]
            best = logits.argmax(-1)
            likeliest.append(best)
            score.nats += float(torch.nn.functional.cross_entropy(logits, following, reduction="sum"))
            score.right += int((best == following).sum())
            score.agreed += int((best == (best if whole is None else whole[index])).sum())
            score.predicted += len(following)
    return score, likeliest


def threshold_keep(bench: Bench, sparsity: float) -> Keep:
    found = {path: quantiles(histogram.bins, [sparsity])[0] for path, histogram in bench.histograms.items()}
    return lambda path, expert, acted: acted.abs() >= found[path]


def topk_keep(sparsity: float) -> Keep:
    def keep(path: str, expert: int | None, acted: torch.Tensor) -> torch.Tensor:
        kept = max(1, round(acted.shape[-1] * (1 - sparsity)))
        largest = acted.abs().topk(kept, dim=-1).indices
        return torch.zeros_like(acted, dtype=torch.bool).scatter_(-1, largest, True)

    return keep


def hot_first(histogram: Activity) -> torch.Tensor:
    """Return each expert's neurons in descending order of activity, ties by index, (E, I) int64."""
    return histogram.active.argsort(dim=-1, descending=True, stable=True)


class Grouping:
    """Groups of `size` neurons, in their own order or sorted by activity."""

    def __init__(self, bench: Bench, size: int, hot: bool) -> None:
        self._size = size
        self._orders = {path: hot_first(histogram) for path, histogram in bench.histograms.items()} if hot else None

    def largest(self, path: str, expert: int | None, values: torch.Tensor) -> torch.Tensor:
        """Return the largest value of each neuron's group: (n, I) -> (n, I)."""
        width = values.shape[-1]
        order = torch.arange(width) if self._orders is None else self._orders[path][expert or 0]
        padded = torch.nn.functional.pad(values[:, order], (0, -width % self._size))
        groups = padded.view(len(values), -1, self._size).amax(-1, keepdim=True)
        spread = groups.expand(-1, -1, self._size).flatten(1)[:, :width]
        return torch.empty_like(values).index_copy_(1, order, spread)


def criteria(bench: Bench) -> Iterator[tuple[str, str, float, Keep, Sequence[str]]]:
    """Yield (criterion, scope, sparsity, keep, paths)."""
    scopes = {"routed": tuple(bench.sites.routed)} | ({"routed+shared": bench.sites.paths} if bench.sites.shared else {})
    for scope, paths in scopes.items():
        for sparsity in SPARSITIES:
            yield "threshold", scope, sparsity, threshold_keep(bench, sparsity), paths
            yield "topk", scope, sparsity, topk_keep(sparsity), paths


def quality(bench: Bench, name: str, rows: Recorder) -> None:
    whole_score, whole = judge(bench, lambda path, expert, acted: torch.ones_like(acted, dtype=torch.bool), None)
    none = {"target": 0.0, "routed_sparsity": 0.0, "total_sparsity": 0.0}
    rows.add({"model": name, "criterion": "none", "scope": "", **none, **whole_score.row()})
    for criterion, scope, sparsity, keep, paths in criteria(bench):
        counting = Counting(keep, paths)
        score, _ = judge(bench, counting, whole)
        rows.add({"model": name, "criterion": criterion, "scope": scope, "target": sparsity, **counting.row(), **score.row()})


def cutoff(rows: Sequence[Row], criterion: str, scope: str, measure: str = "right_next_token") -> float:
    """Return the routed sparsity up to which `KEPT_SCORE` of the score is kept, by linear interpolation."""
    least = KEPT_SCORE * float(str(rows[0][measure]))
    before = (0.0, float(str(rows[0][measure])))
    for row in rows:
        if (row["criterion"], row["scope"]) != (criterion, scope):
            continue
        here = (float(str(row["routed_sparsity"])), float(str(row[measure])))
        if here[1] < least:
            return before[0] + (here[0] - before[0]) * (before[1] - least) / (before[1] - here[1])
        before = here
    return before[0]


def whole_groups(keep: Keep, grouping: Grouping) -> Keep:
    """Return a criterion that keeps the whole group of every neuron that `keep` keeps."""
    return lambda path, expert, acted: grouping.largest(path, expert, keep(path, expert, acted).float()) > 0


def groups(bench: Bench, name: str, rows: Recorder) -> None:
    """Record the share of computed neurons if every neuron above the threshold includes its group."""
    for sparsity, size, hot in product(GROUP_SPARSITIES, (1, *GROUPS), (False, True)):
        counting = Counting(whole_groups(threshold_keep(bench, sparsity), Grouping(bench, size, hot)), tuple(bench.sites.routed))
        run(bench, counting, bench.judging)
        active = 1 - counting.routed[0] / counting.routed[1]
        rows.add({"model": name, "target": sparsity, "group": size, "hot_first": hot, "computed_share": round(active, 4)})


def draw(rows: Sequence[Row], group_rows: Sequence[Row], name: str) -> None:
    """Plot the score and the perplexity by sparsity with the cutoffs, and the share of neurons that groups compute."""
    figure, ((score, perplexity, computed),) = panels(1, 3, (5, 4.5))
    for (criterion, scope), points in grouped(rows[1:], lambda row: (str(row["criterion"]), str(row["scope"]))).items():
        at, shown = cutoff(rows, criterion, scope), [rows[0], *points]
        style = "-o" if criterion == "threshold" else "--o"
        line = curve(score, shown, "routed_sparsity", "right_next_token", style, f"{criterion}, {scope}: cutoff {100 * at:.1f} %")
        score.axvline(at, color=line.get_color(), linewidth=0.6)
        curve(perplexity, shown, "routed_sparsity", "perplexity", style, f"{criterion}, {scope}", color=line.get_color())
    score.axhline(KEPT_SCORE * float(str(rows[0]["right_next_token"])), color="grey", linewidth=0.6, linestyle=":")
    score.set(xlabel="routed sparsity", ylabel="next tokens that are right", title=str(rows[0]["model"]))
    perplexity.set(xlabel="routed sparsity", ylabel="perplexity", yscale="log")
    for (target, hot), found in grouped(group_rows, lambda row: (row["target"], row["hot_first"])).items():
        curve(computed, found, "group", "computed_share", "o--" if hot else "o-", f"{target}{', hot first' if hot else ''}")
    computed.set_xscale("log", base=2)
    computed.set(xlabel="neurons a group", ylabel="share of computed neurons", title="what groups bring along, by routed sparsity")
    computed.set_xticks((1, *GROUPS), labels=map(str, (1, *GROUPS)))
    for axes in (score, perplexity, computed):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    save(figure, name, dpi=80)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", help="hub id or folder; default: the bundled model")
    options.add_argument("--name", help="name of the model in results and their files")
    options.add_argument("--text", type=Path, help="default: the bundled model's held-out text")
    options.add_argument("--tokens", type=int, default=8192, help="of each half of the text: one for thresholds, the other for scores")
    options.add_argument("--window", type=int, default=512)
    given = options.parse_args()
    name = given.name or ("demo" if given.model is None else Path(given.model).name)
    suffix = "" if given.model is None else f"_{name}"
    bench = load(given.model, given.text, given.tokens, given.window)
    rows, group_rows = (Recorder(f"{kind}{suffix}", write=given.write) for kind in ("sparse_quality", "sparse_groups"))
    quality(bench, name, rows)
    groups(bench, name, group_rows)
    for criterion, scope in dict.fromkeys((str(row["criterion"]), str(row["scope"])) for row in rows.rows[1:]):
        at = cutoff(rows.rows, criterion, scope)
        print(f"{criterion}, {scope}: {KEPT_SCORE:.0%} of the score up to {at:.1%} of the routed neurons")
    if given.write:
        draw(rows.rows, group_rows.rows, f"sparse_quality{suffix}")


if __name__ == "__main__":
    main()
