"""How close does each schedule come to the optimum, and how long does a plan take?

    python benchmarks/schedulers.py makespan speed

- makespan: makespan over the exact optimum by schedule, model shape, modelled machine, stage and share of experts cached, without and with
  experts in flight. Routing is synthetic (`_synthetic_routing.py`); a layer holds the experts that were used most before, and each problem
  scales its machine's costs for the CPU, the GPU and the link by factors of 0.9 to 1.1.
- speed: microseconds per plan, in C++ alone and through Python, and per call of `gains`.

`layer_map` has all experts of a share of the layers on the GPU, the other schedules a share of each layer's experts; the figure of
`layer_map` is the mean over both kinds of layers.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from _model_shapes import MODELS
from _synthetic_routing import synthetic_trace
from matplotlib.figure import Figure
from numpy.typing import NDArray
from record import RESULTS, write_rows
from support.optimum import ProblemStruct, compile_library, optimum
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


def draw_problem(
    random: np.random.Generator, trace: Trace, model: str, machine: MachineProfile, tokens: int, ratio: float, in_flight: int = 0
) -> LayerProblem:
    """Draw the problem of one layer in one step of the trace; the `in_flight` missing experts with the most tokens are in flight."""
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
    missing = np.flatnonzero(arrival_ms)
    coming = missing[np.argsort(-loads[active][missing], kind="stable")][:in_flight]
    arrival_ms[coming] = (random.uniform(0.1, 1.0) + np.arange(len(coming))) * transfer_ms
    return LayerProblem(
        loads[active].astype(np.int32),
        machine.cpu_ms(loads[active], nbytes) * cpu,
        machine.gpu_ms(loads[active], nbytes) * gpu,
        arrival_ms,
        transfer_ms,
        machine.first_cpu_ms(nbytes) * cpu,
        link_free_ms=float(arrival_ms[coming].max(initial=0.0)),
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


def cells(problems: int, in_flight: int) -> Iterator[tuple[str, str, str, float, dict[ScheduleName, NDArray[np.float64]]]]:
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
                        problem = draw_problem(random, trace, model, machine, tokens, ratio, in_flight)
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


def makespan(problems: int) -> None:
    rows: list[Row] = []
    pooled: dict[tuple[str, str, ScheduleName], list[NDArray[np.float64]]] = {}
    for model, stage, machine, ratio, over in cells(problems, 0):
        for name in SCHEDULES:
            rows.append({"schedule": name, "model": model, "machine": machine, "stage": stage, "cached": ratio, **summary(over[name])})
            pooled.setdefault((model, stage, name), []).append(over[name])
    print(write_rows("schedulers", rows, ("numpy",)))
    show({key: np.concatenate(values) for key, values in pooled.items()})
    plot({key: np.concatenate(values) for key, values in pooled.items()})
    rows = []
    for in_flight in (1, 2, 4):
        flying: dict[tuple[str, str, ScheduleName], list[NDArray[np.float64]]] = {}
        for model, stage, _, _, over in cells(max(1, problems // 4), in_flight):
            for name in ("fixed", "on_demand", "greedy", "two_threshold"):
                flying.setdefault((model, stage, name), []).append(over[name])  # type: ignore[index,arg-type]
        for (model, stage, name), values in flying.items():
            row: Row = {"schedule": name, "model": model, "stage": stage, "in_flight": in_flight}
            rows.append(row | summary(np.concatenate(values)))
    print(write_rows("schedulers_in_flight", rows, ("numpy",)))


def show(pooled: dict[tuple[str, str, ScheduleName], NDArray[np.float64]]) -> None:
    for name in SCHEDULES:
        of_name = [values for key, values in pooled.items() if key[2] == name]
        mean, p99, worst = (np.mean([v.mean() for v in of_name]), max(np.percentile(v, 99) for v in of_name), max(v.max() for v in of_name))
        print(f"{name:14s} mean of stages {mean:.5f}, highest p99 {p99:.4f}, worst {worst:.3f}")


def plot(pooled: dict[tuple[str, str, ScheduleName], NDArray[np.float64]]) -> None:
    """Plot the p99 excess over the optimum by stage, with a panel per model; values below 0.001% are drawn at 0.001%."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    for model, axes in zip(MODELS, figure.subplots(1, len(MODELS), sharey=True), strict=True):
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
    figure.savefig(RESULTS / "schedulers.png", dpi=110)
    print(RESULTS / "schedulers.png")


class PlannerClock:
    """A timer of the planner's C++ code alone."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._library = compile_library([Path(__file__).with_name("_planner_speed.cpp")], Path(self._folder.name))

    def run(self, what: str, schedule: str, problems: list[LayerProblem], repeats: int) -> NDArray[np.float64]:
        """Return microseconds per call, (repeats,), of `time_plans` or `time_gains`."""
        given = (ProblemStruct * len(problems))(*map(ProblemStruct.of, problems))
        pass_us = np.empty(repeats)
        getattr(self._library, what)(schedule.encode(), given, len(problems), repeats, ctypes.c_void_p(pass_us.ctypes.data))
        return pass_us


def python_us(schedule: ScheduleName, problems: list[LayerProblem], repeats: int) -> NDArray[np.float64]:
    """Return the microseconds to create a problem from its arrays and plan it."""
    scheduler = Scheduler(schedule)
    pass_us = np.empty(repeats)
    for repeat in range(-1, repeats):
        start = perf_counter()
        for given in problems:
            costs = (given.cpu_ms, given.gpu_ms, given.arrival_ms, given.transfer_ms, given.first_cpu_ms)
            scheduler.plan(0, LayerProblem(given.loads, *costs, 0.0, 0.0, given.link_free_ms))
        if repeat >= 0:
            pass_us[repeat] = (perf_counter() - start) * 1e6 / len(problems)
    return pass_us


def speed(problems: int, repeats: int) -> None:
    clock = PlannerClock()
    random = np.random.default_rng(2)
    rows: list[Row] = []
    for model in MODELS:
        trace = synthetic_trace(model, TRACE_TOKENS)
        for stage, tokens in STAGES.items():
            for in_flight in (0, 2):
                drawn = [
                    draw_problem(random, trace, model, PROFILES["a6000_10core"], tokens, ratio, in_flight)
                    for ratio in RATIOS
                    for _ in range(problems)
                ]
                for name in PLANNED:
                    timed = {"plan": clock.run("time_plans", name, drawn, repeats), "python": python_us(name, drawn, repeats)}
                    timed["gains"] = clock.run("time_gains", name, drawn, repeats)
                    row: Row = {"schedule": name, "model": model, "stage": stage, "in_flight": in_flight}
                    row["experts"] = f"{np.mean([len(problem.loads) for problem in drawn]):.1f}"
                    for what, pass_us in timed.items():
                        row |= {f"{what}_{q}_us": f"{np.percentile(pass_us, int(q[1:])):.3f}" for q in ("p20", "p50", "p80")}
                    rows.append(row | {"load_average": f"{os.getloadavg()[0]:.2f}"})
                print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    print(write_rows("schedulers_speed", rows, ("numpy",)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("makespan", "speed"))
    parser.add_argument("--problems", type=int, default=400, help="problems per cell")
    parser.add_argument("--repeats", type=int, default=25, help="timed passes")
    arguments = parser.parse_args()
    if "makespan" in arguments.parts:
        makespan(arguments.problems)
    if "speed" in arguments.parts:
        speed(max(1, arguments.problems // 4), arguments.repeats)


if __name__ == "__main__":
    main()
