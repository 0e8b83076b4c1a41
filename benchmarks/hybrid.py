"""How fast is a model whose experts do not fit the GPU? Decode and prefill by schedule, cache and prefetch, beside other systems' methods.

The product's own engine runs on the virtual clock of a modelled machine, with the shapes of three models at their full number of layers and
synthetic routing (`harness/routing.py`); every figure is marked `modelled`. The systems are:

- `all_cpu`: KTransformers' default, all experts on the CPU; `fixed`: its map of hot experts; `layer_map`: llama.cpp's whole layers;
- `on_demand`: LRU and loading on demand, which represents AdapMoE with `next_layer` prefetch;
- `+scheduling`, `+prefetch`, `+cache`, `all`: HybriMoE's ablation (Table III) over `fixed`, and all three together;
- `bound`: all three, with the choices of later layers known.

Under every system, shared experts run on the GPU while the CPU and the link serve the routed ones; with `--alone` they run one after the
other. `--plot` only draws the file's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from harness.plots import panels, save
from harness.record import Recorder, parser, read_rows
from harness.rounds import percentiles
from harness.routing import MODELS, synthetic_trace
from harness.simulation import Figures, Simulation, System
from support.virtual_device import PROFILES

from moegraft.operators.offload.options import CacheOptions
from moegraft.operators.offload.prefetch import PrefetchOptions

NO_PREFETCH = PrefetchOptions(policy="none", promote=False)
IMPACT = PrefetchOptions(policy="impact", lookahead=3)
MRS = CacheOptions(policy="mrs")
LRU = CacheOptions(policy="lru")
SYSTEMS = (
    System("all_cpu", "all_cpu", LRU, NO_PREFETCH),
    System("fixed", "fixed", LRU, NO_PREFETCH),
    System("layer_map", "layer_map", LRU, NO_PREFETCH),
    System("on_demand", "on_demand", LRU, NO_PREFETCH),
    System("on_demand+next_layer", "on_demand", LRU, PrefetchOptions(policy="next_layer", promote=False)),
    System("+scheduling", "greedy", LRU, NO_PREFETCH),
    System("+prefetch", "fixed", LRU, PrefetchOptions(policy="impact", promote=False)),
    System("+cache", "fixed", MRS, PrefetchOptions(policy="none", promote=True)),
    System("greedy", "greedy", MRS, IMPACT),
    System("all", "two_threshold", MRS, IMPACT),
    System("bound", "two_threshold", MRS, IMPACT, foresight="perfect"),
)
PROMPTS = (32, 128, 512, 1024)
WARM_TOKENS = 200  # tokens of the profile that determines the hot experts
DECODE_TOKENS = 60


def measured(
    model: str, machine: str, ratio: float, systems: Sequence[System], phase: str, seed: int, *, beside: bool
) -> Iterator[dict[str, object]]:
    """Measure the time between tokens (decode), or the time to the first token by length of the prompt (prefill)."""
    for batch in PROMPTS if phase == "prefill" else (1,):
        trace = synthetic_trace(model, WARM_TOKENS + (batch if phase == "prefill" else DECODE_TOKENS), seed)
        warm, play = trace.part(0, WARM_TOKENS), trace.part(WARM_TOKENS, trace.num_tokens)
        for system in systems:
            figures = Simulation(MODELS[model], PROFILES[machine], ratio, system, warm).run(play, batch, beside=beside)
            yield _row(model, machine, ratio, system, phase, batch, figures)


def _row(model: str, machine: str, ratio: float, system: System, phase: str, tokens: int, figures: Figures) -> dict[str, object]:
    return {
        "device": f"modelled {machine}",
        "model": model,
        "phase": phase,
        "tokens": tokens,
        "cache_ratio": ratio,
        "system": system.name,
        "mean_ms": round(float(figures.step_ms.mean()), 3),
        **percentiles(figures.step_ms, "ms", 3),
        "tokens_s": round(1e3 * tokens / float(figures.step_ms.mean()), 2),
        "hit_rate": round(figures.hit_rate, 3),
        "cpu_busy": round(figures.cpu, 3),
        "gpu_busy": round(figures.gpu, 3),
        "link_busy": round(figures.link, 3),
        "planned_over_taken": round(figures.predicted_over_measured, 3),
        "host_us_per_layer": round(figures.host_us, 1),
    }


def with_speedups(rows: Sequence[Mapping[str, object]]) -> Iterator[dict[str, object]]:
    """Yield each row with its speed over the systems `all_cpu` and `fixed` at an equal number of tokens."""
    ms = {(row["system"], row["tokens"]): float(str(row["mean_ms"])) for row in rows}
    for row in rows:
        own = ms[row["system"], row["tokens"]]
        over = {f"over_{name}": round(ms.get((name, row["tokens"]), float("nan")) / own, 3) for name in ("all_cpu", "fixed")}
        yield {**row, **over}


SHOWN = ("all_cpu", "layer_map", "fixed", "on_demand+next_layer", "greedy", "all", "bound")
ABLATION = ("fixed", "+scheduling", "+prefetch", "+cache", "all")


def draw_bars(axes: Any, rows: Sequence[Mapping[str, str]], systems: Sequence[str], column: str) -> None:
    """Draw a group per cache ratio with a bar per system."""
    ratios = sorted({row["cache_ratio"] for row in rows}, key=float)
    found = {(row["system"], row["cache_ratio"]): float(row[column]) for row in rows}
    width = 0.8 / len(systems)
    for place, system in enumerate(systems):
        values = [found.get((system, ratio), 0.0) for ratio in ratios]
        axes.bar([index + place * width for index in range(len(ratios))], values, width, label=system)
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(ratios))], [f"{float(ratio):.0%}" for ratio in ratios])
    axes.set_xlabel("experts with a slot")
    axes.set_ylim(top=1.45 * axes.get_ylim()[1])  # room for the legend


def plot() -> None:
    """Plot decode and prefill by system, and the ablation of HybriMoE's Table III."""
    rows = read_rows("hybrid_modelled")
    models = sorted({row["model"] for row in rows})
    figure, grid = panels(3, len(models), (5, 11 / 3))
    for model, (decode, prefill, ablation) in zip(models, grid.T, strict=True):
        own = [row for row in rows if row["model"] == model]
        decoded = [row for row in own if row["phase"] == "decode"]
        draw_bars(decode, decoded, SHOWN, "tokens_s")
        decode.set(title=f"{model}: decode", ylabel="tokens/s")
        for system in SHOWN:
            found = [row for row in own if (row["phase"], row["cache_ratio"], row["system"]) == ("prefill", "0.25", system)]
            seconds = [float(row["mean_ms"]) / 1e3 for row in found]
            prefill.plot([int(row["tokens"]) for row in found], seconds, marker="o", label=system)
        prefill.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="s to the first token", title="prefill, 25% of the experts")
        draw_bars(ablation, decoded, ABLATION, "over_fixed")
        ablation.set(title="ablation, decode", ylabel="times the fixed map")
    for axes in grid.flat:
        axes.legend(fontsize=7, loc="upper left", ncols=2)
    figure.suptitle(f"{rows[0]['device']}: the engine on a virtual clock, made-up routing")
    save(figure, "hybrid_modelled")


def main() -> None:
    options = parser(__doc__, seed=0, plot=True)
    options.add_argument("--machine", default="a6000_10core", choices=list(PROFILES))
    options.add_argument("--models", nargs="+", default=[name for name in MODELS if name != "moonlight-16b-a3b"], choices=list(MODELS))
    options.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    options.add_argument("--systems", nargs="+", default=[system.name for system in SYSTEMS])
    options.add_argument("--phases", nargs="+", default=["decode", "prefill"], choices=["decode", "prefill"])
    options.add_argument("--alone", action="store_true", help="run shared experts and routed ones one after the other")
    given = options.parse_args()
    if given.plot:
        plot()
        return
    systems, beside = [system for system in SYSTEMS if system.name in given.systems], not given.alone
    rows = Recorder("hybrid_modelled", ("torch", "numpy"), write=given.write)
    for model, ratio, phase in product(given.models, given.ratios, given.phases):
        for row in with_speedups(list(measured(model, given.machine, ratio, systems, phase, given.seed, beside=beside))):
            rows.add(row)
    if given.write:
        plot()


if __name__ == "__main__":
    main()
