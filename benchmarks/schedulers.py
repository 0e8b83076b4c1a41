"""How close does each schedule come to the optimum? The makespan of a layer over the exact optimum, by schedule, model shape and stage.

Also by modelled machine and share of experts cached. Routing is synthetic (`harness/routing.py`); a layer holds the experts that were used
most before, and each problem scales its machine's costs for the CPU, the GPU and the link by factors of 0.9 to 1.1. `layer_map` has all
experts of a share of the layers on the GPU, the other schedules a share of each layer's experts; its figure is the mean over both kinds of
layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from harness.plots import panels, save
from harness.record import Recorder, parser
from harness.routing import MODELS, synthetic_trace
from numpy.typing import NDArray
from support.optimum import optimum
from support.virtual_device import PROFILES

from moegraft.cpu_backend import Planner
from moegraft.operators.experts.forecast import MachineProfile
from moegraft.operators.offload.scheduler import SCHEDULES, LayerProblem, ScheduleName, Scheduler
from moegraft.operators.routing_trace import Trace

STAGES = {"decode": 1, "verify x4": 4, "verify x8": 8, "prefill 32": 32, "prefill 128": 128, "prefill 512": 512}  # tokens
RATIOS = (0.25, 0.5, 0.75)
TRACE_TOKENS = 3072
PAST_TOKENS = 64  # earlier tokens that determine a layer's resident experts
PLANNED = tuple(name for name in SCHEDULES if name != "layer_map")
Row = dict[str, object]


def draw_problem(random: np.random.Generator, trace: Trace, model: str, machine: MachineProfile, tokens: int, ratio: float) -> LayerProblem:
    """Draw the problem of one layer in one step of the trace."""
    shape = MODELS[model]
    nbytes = shape.expert_bytes()
    layer = int(random.integers(len(trace.layers)))
    start = int(random.integers(PAST_TOKENS, trace.num_tokens - tokens + 1))
    past, loads = (
        np.bincount(trace.chosen[first:end, layer].ravel(), minlength=shape.num_experts)
        for first, end in ((start - PAST_TOKENS, start), (start, start + tokens))
    )
    slots = round(ratio * shape.num_experts)
    resident = np.argsort(-past, kind="stable")[:slots]
    active = np.flatnonzero(loads)
    cpu, gpu, link = random.uniform(0.9, 1.1, 3)
    transfer_ms = machine.transfer_ms(nbytes) * link
    arrival_ms = np.where(np.isin(active, resident), 0.0, np.inf)
    return LayerProblem(
        loads[active].astype(np.int32),
        machine.cpu_ms(loads[active], nbytes) * cpu,
        machine.gpu_ms(loads[active], nbytes) * gpu,
        arrival_ms,
        transfer_ms,
        machine.first_cpu_ms(nbytes) * cpu,
    )


def makespans(schedulers: dict[ScheduleName, Scheduler], problem: LayerProblem, ratio: float) -> dict[ScheduleName, float]:
    found = {}
    for name, scheduler in schedulers.items():
        plan = scheduler.plan(0, problem)
        found[name] = plan.makespan_ms
    everything = replace(problem, arrival_ms=np.zeros_like(problem.arrival_ms))
    on_gpu = Planner("on_demand").makespan(everything, np.zeros(len(problem.loads), bool))
    found["layer_map"] = ratio * on_gpu + (1 - ratio) * found["all_cpu"]
    return found


def cells(problems: int) -> Iterator[tuple[str, str, str, float, dict[ScheduleName, NDArray[np.float64]]]]:
    """Return the ratios to the optimum by model, stage, machine and share of experts cached."""
    schedulers = {name: Scheduler(name) for name in PLANNED}
    random = np.random.default_rng(1)
    for model in MODELS:
        trace = synthetic_trace(model, TRACE_TOKENS)
        for stage, tokens in STAGES.items():
            for machine in PROFILES.values():
                for ratio in RATIOS:
                    over: dict[ScheduleName, list[float]] = {name: [] for name in SCHEDULES}
                    for _ in range(problems):
                        problem = draw_problem(random, trace, model, machine, tokens, ratio)
                        best_ms = optimum(problem)
                        for name, makespan_ms in makespans(schedulers, problem, ratio).items():
                            assert name == "layer_map" or makespan_ms >= best_ms * (1 - 1e-9), f"{name} beats the optimum on {problem}"
                            over[name].append(makespan_ms / best_ms)
                    yield model, stage, machine.name, ratio, {name: np.array(values) for name, values in over.items()}


def summary(values: NDArray[np.float64]) -> Row:
    return {
        "problems": len(values),
        "mean": f"{values.mean():.5f}",
        "p99": f"{np.percentile(values, 99):.5f}",
        "worst": f"{values.max():.5f}",
    }


def plot(pooled: dict[tuple[str, str, ScheduleName], NDArray[np.float64]]) -> None:
    """Plot the p99 excess over the optimum by stage, with a panel per model; values below 0.001% are drawn at 0.001%."""
    figure, (grid,) = panels(1, len(MODELS), (4.3, 4.6))
    for model, axes in zip(MODELS, grid, strict=True):
        for name in SCHEDULES:
            excess = [100 * (np.percentile(pooled[model, stage, name], 99) - 1) for stage in STAGES]
            axes.plot(list(STAGES), np.maximum(excess, 1e-3), marker="o", label=name)
        axes.axhline(0.5, color="black", linestyle=":", linewidth=1, label="0.5%")
        axes.set_yscale("log")
        axes.set_title(model)
        axes.tick_params(axis="x", rotation=30)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("p99 of the excess over the optimum, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle("One layer's makespan by schedule: four modelled machines, 25, 50 and 75% of the experts cached, drawn routing")
    save(figure, "schedulers", dpi=110)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--problems", type=int, default=400, help="problems per cell")
    given = options.parse_args()
    rows, pooled = Recorder("schedulers", ("numpy",), write=given.write), dict[tuple[str, str, ScheduleName], list[NDArray[np.float64]]]()
    for model, stage, machine, ratio, over in cells(given.problems):
        for name, values in over.items():
            rows.add({"schedule": name, "model": model, "machine": machine, "stage": stage, "cached": ratio, **summary(values)})
            pooled.setdefault((model, stage, name), []).append(values)
    if given.write:
        plot({key: np.concatenate(values) for key, values in pooled.items()})


if __name__ == "__main__":
    main()
