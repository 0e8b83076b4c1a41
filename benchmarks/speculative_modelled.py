"""What do drafts gain where experts must be transferred? Rounds on modelled machines; every figure is marked `modelled`.

    python benchmarks/speculative_modelled.py --models deepseek-v2-lite moonlight-16b-a3b --bits 16 --link 19
    python benchmarks/speculative_modelled.py --models mixtral-8x7b --append
    python benchmarks/speculative_modelled.py --models mixtral-8x7b --ratios 0.25 --tokens 128 --name speculative_modelled_long --append

The product's engine, prefetchers and schedules run on the virtual clock with synthetic routing and the bundled model's acceptance (run
`speculative.py rounds` first). Each row has its speed over two baselines without drafts:

- `over_load_on_demand`: every expert is transferred for every token and none is kept, the baseline of SS-MoE (WWW 2026), whose table has
  6.92 tokens/s for DeepSeek-V2-Lite and 6.22 for Moonlight. The model gives 6.8 for 16-bit experts over 19 GB/s, which agrees.
- `over_plain`: the same engine with the same slots. `gpu` transfers missing experts (LRU, with prefetch of the next layer), like the
  method; `hybrid` is moegraft's best configuration, CPU and GPU together.

`speculative_modelled_long.csv` has longer answers with a quarter of the experts in slots: in a few dozen tokens, chance and the schedule's
first probes have much influence.

The draft configurations: `draft`, the top-k experts; `resident`, the likeliest of all experts with a slot; `+ ahead`, the verification's
experts are prefetched while drafting; `marginal`, the draft length by measured costs, otherwise a fixed length. Rows of ways that were
removed since are the reason: drafts without `+ ahead`, with `resident_chosen` (only those of the token's own experts that have a slot) and
`scaled` (weights scaled to the sum of all) were slower.

The upper bounds of the hybrid engine, by the arithmetic of `harness/draft_simulation.py` at the run's `acceptance` per token: `bound` for
drafts of the best length. `needed` is the acceptance at which `bound` reaches the target of 1.15.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from harness.draft_simulation import Costs, DraftBound, DraftSimulation, DraftWay, Played, Text, Verification
from harness.plots import curve, grouped, panels, save
from harness.record import Recorder, parser, read_rows
from harness.routing import MODELS, ModelShape, synthetic_trace
from harness.simulation import Simulation, System, rest_layer_ms
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
BOUND_TOKENS = 48
NAME = "speculative_modelled"
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
        """Return a trace to fill slots by, and one to replay."""
        length = WARM_TOKENS + self.tokens + LEFT_OVER
        whole = Text(
            synthetic_trace(self.model.name, length, self.seed), synthetic_trace(self.model.name, length, self.seed, other_tokens=7)
        )
        return whole, Text(whole.real.part(WARM_TOKENS, length), whole.other.part(WARM_TOKENS, length))

    def simulation(self, system: System, warm: Text, ratio: float) -> Simulation:
        return Simulation(self.model, self.machine, ratio, system, warm.real.part(0, WARM_TOKENS), self.bits)


def ways(top_k: int, ratio: float) -> Iterator[tuple[str, DraftWay, DraftSchedule]]:
    """Return the draft configurations by name; lossy ones differ in `tolerance`."""
    half = max(1, top_k // 2)  # one of the numbers of experts for which acceptance was measured
    for tolerance in (0.0, TOLERANCE):
        if ratio == ABLATED_RATIO:
            yield f"draft + ahead, {FIXED} tokens", DraftWay(half, "any", tolerance), FixedSchedule(FIXED)
            yield f"resident + ahead, {FIXED} tokens", DraftWay(top_k, "resident", tolerance), FixedSchedule(FIXED)
            yield "resident + ahead, 1 token", DraftWay(top_k, "resident", tolerance), FixedSchedule(1)
        yield "draft + ahead, marginal", DraftWay(half, "any", tolerance), MarginalSchedule(LONGEST)
        yield "resident + ahead, marginal", DraftWay(top_k, "resident", tolerance), MarginalSchedule(LONGEST)


def rows_of(case: Case, engines: Sequence[str]) -> Iterator[Row]:
    warm, text = case.traces()
    baseline = DraftSimulation(case.simulation(LOAD_ON_DEMAND, warm, 0.0), text, None, None).run(BASELINE_TOKENS)
    yield _row(case, "gpu", "load_on_demand", 0.0, baseline, baseline, baseline)
    for engine in (each for each in ENGINES if each.name in engines):
        plain = DraftSimulation(case.simulation(engine, warm, case.ratio), text, None, None).run(case.tokens)
        yield _row(case, engine.name, "plain", 0.0, plain, plain, baseline)
        bound = bound_of(case, engine, warm, text, plain) if engine.schedule == "two_threshold" else None
        for name, way, schedule in ways(case.model.top_k, case.ratio):
            played = DraftSimulation(case.simulation(engine, warm, case.ratio), text, way, schedule, case.seed).run(case.tokens)
            limits = limits_of(bound, played) if bound is not None and way.resident else {}
            yield _row(case, engine.name, name, way.tolerance, played, plain, baseline) | limits


def bound_of(case: Case, engine: System, warm: Text, text: Text, plain: Played) -> DraftBound:
    """Return the bound of drafts by resident experts."""
    model, machine = case.model, case.machine
    size, one = model.expert_bytes(case.bits), np.ones(1)
    gpu, cpu = (float(cost(one, size, case.bits)[0]) for cost in (machine.gpu_ms, machine.cpu_ms))
    rest = [rest_layer_ms(model, machine, count + 1) for count in range(LONGEST + 1)]
    costs = Costs(plain.ms_per_token / model.layers, rest, gpu, cpu, machine.first_cpu_ms(size), machine.transfer_ms(size))
    way, verifications = DraftWay(model.top_k, "resident"), []
    for length in range(1, LONGEST + 1):
        base = case.simulation(engine, warm, case.ratio)
        found = DraftSimulation(base, text, way, FixedSchedule(length), certain=True).run(min(case.tokens, BOUND_TOKENS)).parts["verify"]
        verifications.append(Verification(found.experts / found.layers, found.missing / found.layers))
    return DraftBound(costs, verifications, model.top_k)


def limits_of(bound: DraftBound, played: Played) -> Row:
    """Return the columns of the upper bounds for the number of experts that drafted."""
    judged = sum(played.statistics.compared_at)
    if not judged:
        return {}
    bound = dataclasses.replace(bound, top_k=played.parts["draft"].experts / played.parts["draft"].layers)
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


def main() -> None:
    options = parser(__doc__, tokens=96, seed=0)
    options.add_argument("--machine", default="a6000_10core", choices=list(PROFILES))
    options.add_argument("--link", type=float, help="GB/s of the link; default: the machine's")
    options.add_argument("--bits", type=float, default=4.5, help="bits per weight")
    options.add_argument("--models", nargs="+", default=["deepseek-v2-lite", "moonlight-16b-a3b", "mixtral-8x7b"], choices=list(MODELS))
    options.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.25, 0.5, 0.75])
    options.add_argument("--engines", nargs="+", default=[engine.name for engine in ENGINES])
    options.add_argument("--name", default=NAME, help="name of the file; only the default one is plotted")
    options.add_argument("--append", action="store_true", help="keep rows of other conditions in the file")
    given = options.parse_args()
    machine = PROFILES[given.machine]
    if given.link is not None:
        machine = dataclasses.replace(machine, link_gb_s=given.link)
    replaces = ("model", "engine", "cache_ratio") if given.append else ()
    rows = Recorder(given.name, ("torch", "numpy"), replaces=replaces, write=given.write)
    for model in given.models:
        for ratio in given.ratios:
            for row in rows_of(Case(MODELS[model], machine, given.bits, ratio, given.tokens, given.seed), given.engines):
                rows.add(row)
    if given.write and given.name == NAME:
        plot(read_rows(NAME))


if __name__ == "__main__":
    main()
