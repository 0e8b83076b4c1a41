"""What running shared experts beside the routed ones saves, modelled: decode of whole models on the virtual clock, both ways.

Shared experts are `shared_share` of what a layer takes on the GPU besides its routed ones (profiles.py: by the weights that are read).
`alone` they run before the routed experts are handed over, as the blocks of transformers have it; `beside`, while the CPU and the link are
at work. The routing is made up (`_synthetic_routing.py`), the engine's plans do not know of them, and no GPU has measured it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from _hybrid_simulation import Simulation, System
from _model_shapes import MODELS
from _synthetic_routing import synthetic_trace
from hybrid import DECODE_TOKENS, SYSTEMS, WARM_TOKENS
from record import write_rows

from moegraft.operators.offload.devices.profiles import PROFILES

COMPARED = ("all_cpu", "fixed", "on_demand", "greedy", "all")


def rows_of(model: str, machine: str, ratio: float, seed: int) -> Iterator[dict[str, object]]:
    trace = synthetic_trace(model, WARM_TOKENS + DECODE_TOKENS, seed)
    warm, play = trace.part(0, WARM_TOKENS), trace.part(WARM_TOKENS, trace.num_tokens)

    def mean_ms(system: System, *, beside: bool) -> float:
        return float(Simulation(MODELS[model], PROFILES[machine], ratio, system, warm).run(play, beside=beside).step_ms.mean())

    for system in (system for system in SYSTEMS if system.name in COMPARED):
        alone_ms, beside_ms = mean_ms(system, beside=False), mean_ms(system, beside=True)
        yield {
            "device": f"modelled {machine}",
            "model": model,
            "phase": "decode",
            "cache_ratio": ratio,
            "system": system.name,
            "alone_ms": round(alone_ms, 3),
            "beside_ms": round(beside_ms, 3),
            "saved": round(1 - beside_ms / alone_ms, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="a6000_10core", choices=list(PROFILES))
    parser.add_argument("--models", nargs="+", default=[name for name, shape in MODELS.items() if shape.shared_share > 0])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        for ratio in arguments.ratios:
            for row in rows_of(model, arguments.machine, ratio, arguments.seed):
                print(*(f"{name}={value}" for name, value in row.items()), flush=True)
                rows.append(row)
    if not arguments.no_write:
        print(write_rows("shared_experts_modelled", rows, ("numpy",)))


if __name__ == "__main__":
    main()
