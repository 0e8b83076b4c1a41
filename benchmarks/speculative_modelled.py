"""What do drafts gain where experts must be transferred? Rounds on modelled machines; every figure is marked `modelled`.

    python benchmarks/speculative_modelled.py --models deepseek-v2-lite moonlight-16b-a3b --bits 16 --link 19
    python benchmarks/speculative_modelled.py --models mixtral-8x7b --append
    python benchmarks/speculative_modelled.py --models mixtral-8x7b --ratios 0.25 --tokens 128 --name speculative_modelled_long --append
    python benchmarks/speculative_modelled.py --acceptance 0.8 --machine a100_amx36 --tokens 192 --append

The product's engine, prefetchers and schedules run on the virtual clock with synthetic routing and the bundled model's acceptance (run
`speculative.py rounds` first). Each row has its speed over two baselines without drafts:

- `over_load_on_demand`: every expert is transferred for every token and none is kept, the baseline of SS-MoE (WWW 2026), whose table has
  6.92 tokens/s for DeepSeek-V2-Lite and 6.22 for Moonlight. The model gives 6.8 for 16-bit experts over 19 GB/s, which agrees.
- `over_plain`: the same engine with the same slots. `gpu` transfers missing experts (LRU, with prefetch of the next layer), like the
  method; `hybrid` is moegraft's best configuration, CPU and GPU together.

`speculative_modelled_long.csv` has longer answers with a quarter of the experts in slots: in a few dozen tokens, chance and the schedule's
first probes have much influence.

The draft configurations: `draft`, the top-k experts; `+ ahead`, the verification's
experts are prefetched while drafting; `marginal`, the draft length by measured costs, otherwise a fixed length. Ways that were removed
since are in the history of the results: drafts without `+ ahead`, `resident` (by the likeliest experts with a slot), `resident_chosen` (by
those of the token's own experts that have a slot) and `scaled` (weights scaled to the sum of all) were slower.

`speculative_modelled_mtp.csv` has drafts by an MTP layer, marginal, on CPU and GPU together, with a quarter of the experts in slots, whose
tokens are accepted with a given chance: `+ ahead`, its states are shown to the body's routers. `of_bound` is the share of `bound` at the
acceptance that chance gave, and `needed` the acceptance at which the bound breaks even.

The upper bounds of the hybrid engine, by the arithmetic of `harness/draft_simulation.py` at the run's `acceptance` per token: `bound` for
drafts of the best length. `needed` is the acceptance at which `bound` reaches the target of 1.15.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from harness.draft_simulation import DraftBound, DraftSimulation, DraftWay, Played, Text
from harness.plots import curve, grouped, panels, save
from harness.record import Recorder, parser, read_rows
from harness.routing import MODELS, ModelShape, synthetic_trace
from harness.simulation import Simulation, System
from support.virtual_device import PROFILES

from moegraft.operators.decode.schedule import DraftSchedule, FixedSchedule, MarginalSchedule
from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.cache import CacheOptions
from moegraft.operators.offload.prefetch import PrefetchOptions

NO_PREFETCH = PrefetchOptions(policy="none", promote=False)
LOAD_ON_DEMAND = System("load_on_demand", "on_demand", CacheOptions(policy="lru"), NO_PREFETCH)
ENGINES = (
    System("gpu", "on_demand", CacheOptions(policy="lru"), PrefetchOptions(policy="next_layer", promote=False)),
    System("hybrid", "two_threshold", CacheOptions(), PrefetchOptions()),
)
FIXED, LONGEST = 4, 6
ABLATED_RATIO = 0.25  # ratio with all configurations; other ratios have only those with a schedule
WARM_TOKENS, BASELINE_TOKENS, LEFT_OVER = 200, 12, 16
TOLERANCE = 0.3
TARGET = 1.15
BOUND_TOKENS = 36
NAME, GIVEN_NAME = "speculative_modelled", "speculative_modelled_mtp"
GIVEN = ("of_bound", "least_round_ms")  # columns of the second file
Row = dict[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """The equal conditions of a comparison."""

    model: ModelShape
    machine: MachineProfile
    bits: float
    ratio: float
    tokens: int
    seed: int

    def traces(self) -> tuple[Text, Text]:
        """Return a trace to fill slots by, and one to replay; the last layer is that for multi-token prediction."""
        length = WARM_TOKENS + self.tokens + LEFT_OVER
        real, other = (synthetic_trace(self.model.name, length, self.seed, other_tokens=tokens, more_layers=1) for tokens in (None, 7))
        return Text(real, other), Text(real.part(WARM_TOKENS, length), other.part(WARM_TOKENS, length))

    def simulation(self, system: System, warm: Text, ratio: float, way: DraftWay | None = None) -> Simulation:
        model = self.model.with_layers(int(way is not None and way.mtp))
        return Simulation(model, self.machine, ratio, system, warm.real.part(0, WARM_TOKENS), self.bits)


def ways(top_k: int, ratio: float) -> Iterator[tuple[str, DraftWay, DraftSchedule]]:
    """Return the draft configurations by name; lossy ones differ in `tolerance`."""
    half = max(1, top_k // 2)  # one of the numbers of experts for which acceptance was measured
    for tolerance in (0.0, TOLERANCE):
        if ratio == ABLATED_RATIO:
            yield f"draft + ahead, {FIXED} tokens", DraftWay(half, tolerance=tolerance), FixedSchedule(FIXED)
        yield "draft + ahead, marginal", DraftWay(half, tolerance=tolerance), MarginalSchedule(LONGEST)


def given_ways(top_k: int) -> Iterator[tuple[str, DraftWay]]:
    """Return the configurations for which acceptance is given, by name."""
    yield "mtp", DraftWay(top_k, mtp=True, looks_ahead=False)
    yield "mtp + ahead", DraftWay(top_k, mtp=True)


def rows_of(case: Case, engines: Sequence[str]) -> Iterator[Row]:
    warm, text = case.traces()
    baseline = DraftSimulation(case.simulation(LOAD_ON_DEMAND, warm, 0.0), text, None, None).run(BASELINE_TOKENS)
    yield _row(case, "gpu", "load_on_demand", 0.0, baseline, baseline, baseline)
    for engine in (each for each in ENGINES if each.name in engines):
        plain = DraftSimulation(case.simulation(engine, warm, case.ratio), text, None, None).run(case.tokens)
        yield _row(case, engine.name, "plain", 0.0, plain, plain, baseline)
        bound: DraftBound | None = None
        for name, way, schedule in ways(case.model.top_k, case.ratio):
            played = DraftSimulation(case.simulation(engine, warm, case.ratio, way), text, way, schedule, case.seed).run(case.tokens)
            if engine.schedule == "two_threshold":
                bound = bound or bound_of(case, engine, warm, text, plain, way)
            limits = {} if bound is None else limits_of(bound, played)
            yield _row(case, engine.name, name, way.tolerance, played, plain, baseline) | limits


def rows_at(case: Case, acceptances: Sequence[float]) -> Iterator[Row]:
    """Yield rows of drafts on CPU and GPU together whose tokens are accepted with given chances."""
    engine = next(each for each in ENGINES if each.name == "hybrid")
    warm, text = case.traces()
    plain = DraftSimulation(case.simulation(engine, warm, case.ratio), text, None, None).run(case.tokens)
    yield _row(case, engine.name, "plain", 0.0, plain, plain, plain) | dict.fromkeys(GIVEN, "")
    bound: DraftBound | None = None
    for name, way in given_ways(case.model.top_k):
        bound = bound or bound_of(case, engine, warm, text, plain, way)
        for acceptance in acceptances:
            drafted = dataclasses.replace(way, acceptance=acceptance)
            base = case.simulation(engine, warm, case.ratio, way)
            played = DraftSimulation(base, text, drafted, MarginalSchedule(LONGEST), case.seed).run(case.tokens)
            row, found = _row(case, engine.name, name, 0.0, played, plain, plain), played.statistics
            # What chance gave in this run; at least without drafts.
            limit = max(1.0, bound.best_gain(sum(found.accepted_at) / max(1, sum(found.compared_at))))
            needed = bound.acceptance_for(1.0)
            row |= {"acceptance": acceptance, "bound": round(limit, 3), "needed": "none" if needed is None else round(needed, 3)}
            row |= {"of_bound": round(plain.ms_per_token / played.ms_per_token / limit, 3)}
            yield row | {"least_round_ms": " ".join(f"{ms:.3f}" for ms in bound.round_ms)}


def bound_of(case: Case, engine: System, warm: Text, text: Text, plain: Played, way: DraftWay) -> DraftBound:
    """Return the bound of drafts by as many experts as those of `way`, or by an MTP layer."""
    certain, round_ms = dataclasses.replace(way, acceptance=1.0), []
    for length in range(1, LONGEST + 1):
        base = case.simulation(engine, warm, case.ratio, way)
        found = DraftSimulation(base, text, certain, FixedSchedule(length)).run(min(case.tokens, BOUND_TOKENS))
        round_ms.append(found.least_ms / found.statistics.rounds)
    return DraftBound(plain.ms_per_token, round_ms)


def limits_of(bound: DraftBound, played: Played) -> Row:
    """Return the columns of the upper bounds at the acceptance of a run."""
    judged = sum(played.statistics.compared_at)
    if not judged:
        return {}
    acceptance, needed = sum(played.statistics.accepted_at) / judged, bound.acceptance_for(TARGET)
    limits = {"acceptance": round(acceptance, 3), "bound": round(bound.best_gain(acceptance), 3)}
    return {**limits, "needed": "none" if needed is None else round(needed, 3)}


def _row(case: Case, engine: str, way: str, tolerance: float, played: Played, plain: Played, baseline: Played) -> Row:
    verify, found = played.parts["verify"], played.statistics
    tokens_per_round = found.tokens_per_round
    return {
        "device": f"modelled {case.machine.name}",
        "link_gb_s": case.machine.link_gb_s,
        "bits_per_weight": case.bits,
        "model": case.model.name,
        "cache_ratio": 0.0 if way == "load_on_demand" else case.ratio,
        "engine": engine,
        "way": way,
        "tolerance": tolerance,
        "ms_per_token": round(played.ms_per_token, 3),
        "tokens_s": round(1e3 / played.ms_per_token, 2),
        "over_load_on_demand": round(baseline.ms_per_token / played.ms_per_token, 3),
        "over_plain": round(plain.ms_per_token / played.ms_per_token, 3),
        "tokens_per_round": "" if tokens_per_round is None else round(tokens_per_round, 3),
        "drafted_share": round(found.round_tokens / played.tokens, 3),
        "kept_share": round(float(np.mean(played.kept)), 3) if played.kept else "",
        "draft_demands": played.draft_demands,
        "verify_experts": round(verify.experts / verify.layers, 2) if verify.layers else "",
        "verify_missing": round(verify.missing / verify.layers, 2) if verify.layers else "",
        "tokens": played.tokens,
        "schedule": played.schedule,
        **dict.fromkeys(("acceptance", "bound", "needed"), ""),
    }


def plot(rows: list[dict[str, str]]) -> None:
    """Plot the speed over loading on demand, and over the same engine without drafts, by cache ratio."""
    figure, grid = panels(2, len({row["model"] for row in rows}), (5.2, 4.25))
    for (above, below), (model, mine) in zip(grid.T, grouped(rows, lambda row: row["model"]).items(), strict=True):
        shown = sorted(
            (row for row in mine if "marginal" in row["way"] or row["way"] == "plain"), key=lambda row: float(row["cache_ratio"])
        )
        for (engine, way, tolerance), line in grouped(shown, lambda row: (row["engine"], row["way"], row["tolerance"])).items():
            label, style = f"{engine}: {way}{', adaptive' if float(tolerance) else ''}", "--o" if engine == "gpu" else "-s"
            curve(above, line, "cache_ratio", "over_load_on_demand", style, label)
            curve(below, line, "cache_ratio", "over_plain", style, label)
        facts = shown[0]
        above.set(title=f"{model}: {facts['bits_per_weight']} bits, {facts['link_gb_s']} GB/s", ylabel="over load on demand")
        above.legend(fontsize=5)
        below.set(xlabel="share of experts with a slot", ylabel="over the same engine without drafts")
        below.axhline(1, color="grey", linewidth=0.5)
    figure.suptitle("Drafts where experts must be brought (modelled)")
    save(figure, NAME, dpi=110)


def plot_given(rows: list[dict[str, str]]) -> None:
    """Plot the bound of each model and machine by acceptance, whose crossing of 1 is the break-even, and the runs."""
    by_model = grouped([row for row in rows if row["way"] != "plain"], lambda row: row["model"])
    figure, grid = panels(1, len(by_model), (4.4, 3.6))
    for axes, (model, mine) in zip(grid.flat, by_model.items(), strict=True):
        for (device, line), colour in zip(grouped(mine, lambda row: row["device"]).items(), ("C0", "C1", "C2", "C3"), strict=False):
            runs = [row for row in line if row["way"] == "mtp + ahead"]
            least = [float(ms) for ms in runs[0]["least_round_ms"].split()]
            plain_ms = float(runs[0]["ms_per_token"]) * float(runs[0]["over_plain"])
            chances = np.linspace(0, 1, 51)
            gains = [DraftBound(plain_ms, least).best_gain(float(chance)) for chance in chances]
            axes.plot(chances, gains, color=colour, label=f"{device.removeprefix('modelled ')}: bound")
            axes.plot([float(row["acceptance"]) for row in runs], [float(row["over_plain"]) for row in runs], "s", color=colour)
        axes.axhline(1, color="grey", linewidth=0.5)
        axes.set(title=model, xlabel="acceptance", ylabel="over the same engine without drafts")
        axes.legend(fontsize=6)
    figure.suptitle("Drafts by an MTP layer, a quarter of the experts in slots (modelled)")
    save(figure, GIVEN_NAME, dpi=110)


def main() -> None:
    options = parser(__doc__, tokens=96, seed=0)
    options.add_argument("--machine", default="a6000_10core", choices=list(PROFILES))
    options.add_argument("--link", type=float, help="GB/s of the link; default: the machine's")
    options.add_argument("--bits", type=float, default=4.5, help="bits per weight")
    options.add_argument("--models", nargs="+", default=["deepseek-v2-lite", "moonlight-16b-a3b", "mixtral-8x7b"], choices=list(MODELS))
    options.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.25, 0.5, 0.75])
    options.add_argument("--engines", nargs="+", default=[engine.name for engine in ENGINES])
    options.add_argument("--name", default=NAME, help="name of the file; only the default one is plotted")
    options.add_argument("--acceptance", nargs="+", type=float, help=f"only drafts by an MTP layer, accepted so often, as {GIVEN_NAME}")
    options.add_argument("--append", action="store_true", help="keep rows of other conditions in the file")
    given = options.parse_args()
    machine = PROFILES[given.machine]
    if given.link is not None:
        machine = dataclasses.replace(machine, link_gb_s=given.link)
    if given.acceptance:
        given.name, given.ratios = GIVEN_NAME, [ABLATED_RATIO]
    replaces = ("device", "model", "engine", "cache_ratio") if given.append else ()
    rows = Recorder(given.name, ("torch", "numpy"), replaces=replaces, write=given.write)
    for model in given.models:
        for ratio in given.ratios:
            case = Case(MODELS[model], machine, given.bits, ratio, given.tokens, given.seed)
            for row in rows_at(case, given.acceptance) if given.acceptance else rows_of(case, given.engines):
                rows.add(row)
    if given.write and given.name == NAME:
        plot(read_rows(NAME))
    elif given.write and given.acceptance:
        plot_given(read_rows(GIVEN_NAME))


if __name__ == "__main__":
    main()
