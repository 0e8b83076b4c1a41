"""What leaving neurons out gains with a CPU and a GPU, modelled: decode of whole models on the virtual clock, by schedule.

Devices charge for the rows that a token needs, and transfers bring whole experts (profiles.py): what gains by leaving neurons out is
computed where it is. The routing is made up (`_synthetic_routing.py`), and no GPU has measured it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from _hybrid_simulation import Simulation
from _model_shapes import MODELS
from _synthetic_routing import synthetic_trace
from hybrid import DECODE_TOKENS, SYSTEMS, WARM_TOKENS
from record import write_rows

from moegraft.operators.offload.devices.base import Neurons
from moegraft.operators.offload.devices.profiles import PROFILES

COMPARED = ("all_cpu", "fixed", "on_demand", "greedy", "all")
LEFT_OUT = (0.0, 0.5, 0.85, 0.95)


def rows_of(model: str, machine: str, ratio: float, seed: int) -> Iterator[dict[str, object]]:
    trace = synthetic_trace(model, WARM_TOKENS + DECODE_TOKENS, seed)
    warm, play = trace.part(0, WARM_TOKENS), trace.part(WARM_TOKENS, trace.num_tokens)
    for system in (system for system in SYSTEMS if system.name in COMPARED):
        whole_ms = None
        for left_out in LEFT_OUT:
            sparse = replace(system, neurons=Neurons.without(left_out, gated=True) if left_out else None)
            figures = Simulation(MODELS[model], PROFILES[machine], ratio, sparse, warm).run(play)
            mean_ms = float(figures.step_ms.mean())
            whole_ms = whole_ms or mean_ms
            yield {
                "device": f"modelled {machine}",
                "model": model,
                "phase": "decode",
                "cache_ratio": ratio,
                "system": system.name,
                "left_out": left_out,
                "mean_ms": round(mean_ms, 3),
                "over_whole": round(whole_ms / mean_ms, 3),
                "on_cpu": round(figures.cpu, 3),
                "on_gpu": round(figures.gpu, 3),
                "on_link": round(figures.link, 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="a6000_10core", choices=list(PROFILES))
    parser.add_argument("--models", nargs="+", default=["deepseek-v2-lite", "qwen2-57b-a14b", "mixtral-8x7b"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        for ratio in arguments.ratios:
            for row in rows_of(model, arguments.machine, ratio, arguments.seed):
                print(*(f"{name}={value}" for name, value in row.items() if name != "device"), flush=True)
                rows.append(row)
    if not arguments.no_write:
        print(write_rows("sparse_modelled", rows, ("numpy",)))


if __name__ == "__main__":
    main()
