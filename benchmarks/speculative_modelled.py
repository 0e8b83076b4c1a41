"""What do drafts by an MTP layer gain where experts must be transferred? Rounds on modelled machines; every figure is marked `modelled`.

    python benchmarks/speculative_modelled.py --acceptance 0.8 --machine a100_amx36 --tokens 192 --append

The product's engine, prefetchers and schedule run on the virtual clock with synthetic routing, on CPU and GPU together, and with slots for
a quarter of the experts (`results/speculative_modelled_mtp.csv`). Drafted tokens are accepted with given chances, and the schedule chooses
the draft's length by measured costs. With `+ ahead`, the layer's states are shown to the body's routers. `over_plain` is the speed over
that without drafts, `bound` the most that it can be at the acceptance that chance gave (`harness/draft_simulation.py`), `of_bound` the
share of it, and `needed` the acceptance at which the bound breaks even.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from harness.draft_simulation import DraftBound, DraftSimulation, DraftWay, Played, Text
from harness.plots import grouped, panels, save
from harness.record import Recorder, parser, read_rows
from harness.routing import MODELS, ModelShape, synthetic_trace
from harness.simulation import Simulation, System
from support.virtual_device import PROFILES

from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.options import CacheOptions
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.schedule import DraftSchedule, FixedSchedule, MarginalSchedule

ENGINE = System("hybrid", "two_threshold", CacheOptions(), PrefetchOptions())
RATIO = 0.25  # of the experts have a slot
LONGEST = 6
WARM_TOKENS, LEFT_OVER, BOUND_TOKENS = 200, 16, 36
NAME = "speculative_modelled_mtp"
WAYS = {"mtp": False, "mtp + ahead": True}  # whether states are shown to the routers of the body
Row = dict[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """The equal conditions of a comparison."""

    model: ModelShape
    machine: MachineProfile
    bits: float
    tokens: int
    seed: int

    def traces(self) -> tuple[Text, Text]:
        """Return a trace to fill slots by, and one to replay; the last layer is that for multi-token prediction."""
        length = WARM_TOKENS + self.tokens + LEFT_OVER
        real, other = (synthetic_trace(self.model.name, length, self.seed, other_tokens=tokens, more_layers=1) for tokens in (None, 7))
        return Text(real, other), Text(real.part(WARM_TOKENS, length), other.part(WARM_TOKENS, length))

    def simulation(self, warm: Text, *, drafts: bool) -> Simulation:
        model = self.model.with_layers(int(drafts))
        return Simulation(model, self.machine, RATIO, ENGINE, warm.real.part(0, WARM_TOKENS), self.bits)

    def plain(self, warm: Text, text: Text) -> Played:
        return DraftSimulation(self.simulation(warm, drafts=False), text, None, None).run(self.tokens)

    def drafted(self, warm: Text, text: Text, way: DraftWay, schedule: DraftSchedule, tokens: int) -> Played:
        return DraftSimulation(self.simulation(warm, drafts=True), text, way, schedule, self.seed).run(tokens)


def rows_at(case: Case, acceptances: Sequence[float]) -> Iterator[Row]:
    """Yield rows of plain decoding and of drafts whose tokens are accepted with given chances."""
    warm, text = case.traces()
    plain = case.plain(warm, text)
    yield _row(case, "plain", plain, plain)
    bound = bound_of(case, warm, text, plain)
    needed = bound.acceptance_for(1.0)
    for (name, looks_ahead), acceptance in product(WAYS.items(), acceptances):
        played = case.drafted(warm, text, DraftWay(acceptance, looks_ahead), MarginalSchedule(LONGEST), case.tokens)
        row, found = _row(case, name, played, plain), played.statistics
        # What chance gave in this run; at least without drafts.
        limit = max(1.0, bound.best_gain(sum(found.accepted_at) / max(1, sum(found.compared_at))))
        row |= {"acceptance": acceptance, "bound": round(limit, 3), "needed": "none" if needed is None else round(needed, 3)}
        row |= {"of_bound": round(plain.ms_per_token / played.ms_per_token / limit, 3)}
        yield row | {"least_round_ms": " ".join(f"{ms:.3f}" for ms in bound.round_ms)}


def bound_of(case: Case, warm: Text, text: Text, plain: Played) -> DraftBound:
    """Return the bound of drafts whose states are not shown to the body's routers."""
    certain, round_ms, tokens = DraftWay(1.0, looks_ahead=False), [], min(case.tokens, BOUND_TOKENS)
    for length in range(1, LONGEST + 1):
        found = case.drafted(warm, text, certain, FixedSchedule(length), tokens)
        round_ms.append(found.least_ms / found.statistics.rounds)
    return DraftBound(plain.ms_per_token, round_ms)


def _row(case: Case, way: str, played: Played, plain: Played) -> Row:
    verify, found = played.parts["verify"], played.statistics
    tokens_per_round = found.tokens_per_round
    return {
        "device": f"modelled {case.machine.name}",
        "link_gb_s": case.machine.link_gb_s,
        "bits_per_weight": case.bits,
        "model": case.model.name,
        "cache_ratio": RATIO,
        "way": way,
        "ms_per_token": round(played.ms_per_token, 3),
        "tokens_s": round(1e3 / played.ms_per_token, 2),
        "over_plain": round(plain.ms_per_token / played.ms_per_token, 3),
        "tokens_per_round": "" if tokens_per_round is None else round(tokens_per_round, 3),
        "drafted_share": round(found.round_tokens / played.tokens, 3),
        "verify_experts": round(verify.experts / verify.layers, 2) if verify.layers else "",
        "verify_missing": round(verify.missing / verify.layers, 2) if verify.layers else "",
        "tokens": played.tokens,
        "schedule": played.schedule,
        **dict.fromkeys(("acceptance", "bound", "needed", "of_bound", "least_round_ms"), ""),
    }


def plot(rows: list[dict[str, str]]) -> None:
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
    save(figure, NAME, dpi=110)


def main() -> None:
    options = parser(__doc__, tokens=96, seed=0)
    options.add_argument("--machine", default="a6000_10core", choices=list(PROFILES))
    options.add_argument("--link", type=float, help="GB/s of the link; default: the machine's")
    options.add_argument("--bits", type=float, default=4.5, help="bits per weight")
    options.add_argument("--models", nargs="+", default=["deepseek-v2-lite", "moonlight-16b-a3b", "mixtral-8x7b"], choices=list(MODELS))
    options.add_argument("--acceptance", nargs="+", type=float, default=[0.8], help="chances that a drafted token is accepted")
    options.add_argument("--append", action="store_true", help="keep rows of other conditions in the file")
    given = options.parse_args()
    machine = PROFILES[given.machine]
    if given.link is not None:
        machine = dataclasses.replace(machine, link_gb_s=given.link)
    replaces = ("device", "model") if given.append else ()
    rows = Recorder(NAME, ("torch", "numpy"), replaces=replaces, write=given.write)
    for model in given.models:
        for row in rows_at(Case(MODELS[model], machine, given.bits, given.tokens, given.seed), given.acceptance):
            rows.add(row)
    if given.write:
        plot(read_rows(NAME))


if __name__ == "__main__":
    main()
