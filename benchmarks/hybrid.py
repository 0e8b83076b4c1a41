"""How fast is a model whose experts do not fit the GPU? Decode and prefill by schedule, cache and prefetch, beside other systems' methods.

The product's own engine runs on the virtual clock of a modelled machine, with the shapes of three models at their full number of layers and
synthetic routing (`_synthetic_routing.py`); every figure is marked `modelled`. The systems are:

- `all_cpu`: KTransformers' default, all experts on the CPU; `fixed`: its map of hot experts; `layer_map`: llama.cpp's whole layers;
- `on_demand`: LRU and loading on demand, which represents AdapMoE with `next_layer` prefetch;
- `+scheduling`, `+prefetch`, `+cache`, `all`: HybriMoE's ablation (Table III) over `fixed`, and all three together;
- `bound`: all three, with the choices of later layers known.

Under every system, shared experts run on the GPU while the CPU and the link serve the routed ones; with `--alone` they run one after the
other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from _hybrid_simulation import Figures, Simulation, System
from _model_shapes import MODELS
from _synthetic_routing import synthetic_trace
from record import percentiles, with_speedups, write_rows
from support.virtual_device import PROFILES

from moegraft.operators.offload.cache import CacheOptions
from moegraft.operators.offload.prefetch import PrefetchOptions
from moegraft.operators.timeline import Timeline, write_trace

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
TRACED_TOKENS = 4


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


def traced(model: str, machine: str, ratio: float, system: System, seed: int, *, beside: bool) -> Timeline:
    """Return the timeline of a few decoded tokens, by the virtual clock."""
    trace = synthetic_trace(model, WARM_TOKENS + TRACED_TOKENS, seed)
    simulation = Simulation(MODELS[model], PROFILES[machine], ratio, system, trace.part(0, WARM_TOKENS))
    timeline = simulation.engine.timings.timeline = Timeline(simulation.device.name)
    simulation.run(trace.part(WARM_TOKENS, trace.num_tokens), beside=beside)
    return timeline


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="a6000_10core", choices=list(PROFILES))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    parser.add_argument("--systems", nargs="+", default=[system.name for system in SYSTEMS])
    parser.add_argument("--phases", nargs="+", default=["decode", "prefill"], choices=["decode", "prefill"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="run shared experts and routed ones one after the other")
    parser.add_argument("--trace", type=Path, help="only write a timeline of the first model and ratio under the last system")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    systems = [system for system in SYSTEMS if system.name in arguments.systems]
    if arguments.trace is not None:
        model, ratio, beside = arguments.models[0], arguments.ratios[0], not arguments.alone
        write_trace(arguments.trace, [traced(model, arguments.machine, ratio, systems[-1], arguments.seed, beside=beside)])
        return
    rows: list[dict[str, object]] = []
    for model in arguments.models:
        for ratio in arguments.ratios:
            for phase in arguments.phases:
                measurement = measured(model, arguments.machine, ratio, systems, phase, arguments.seed, beside=not arguments.alone)
                found = with_speedups(list(measurement), ("device", "model", "phase", "tokens", "cache_ratio"), "mean_ms")
                for row in found:
                    print(*(f"{name}={value}" for name, value in row.items() if name not in ("device", "p20_ms", "p80_ms")), flush=True)
                rows += found
    if not arguments.no_write:
        print(write_rows("hybrid_modelled", rows, ("torch", "numpy")))


if __name__ == "__main__":
    main()
