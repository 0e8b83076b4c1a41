"""What does a native program save of a decode step on the CPU? One model decodes alternately layer by layer and by its program.

`ratio` is the median over rounds of the time layer by layer over that of the program. With `--busy N`, N processes keep cores busy
meanwhile, which shows how both give way. A model is the bundled one, one of Qwen3-30B-A3B's shapes (`ours-` and a weight type), or a model
type of tests/support/family_rows.py, as the tiny random model of its tests.

`--trace` measures nothing else: it writes the kernels of one token, layer by layer and in its program, to results/step_timeline.csv (of
many steps the fastest, which other programs disturb least) and draws them in results/step_timeline.svg. `--picture` only draws.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from harness.plots import panels, save
from harness.record import Recorder, parser, read_rows
from harness.rounds import alternate, busy, median_ratio, percentiles, seconds
from harness.whole_models import provider
from support.families import build_model, served_cases
from support.family_rows import FamilyCase
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path

DEMO = "bundled"


def family(name: str) -> FamilyCase | None:
    return next((case for case in served_cases() if case.model_type == name), None)


@contextmanager
def opened(name: str, layers: int) -> Iterator[PreTrainedModel]:
    if name == DEMO:
        yield optimize_and_load(demo_path(), "cpu", progress=False)
    elif case := family(name):
        yield optimize_and_load(build_model(case), "cpu", progress=False)
    else:
        with provider(name, layers) as model:
            yield model


def decode_ms(model: PreTrainedModel, context: int, tokens: int) -> Callable[[], float]:
    """Return what measures the ms of a token but the first, whose time is mostly the prompt's."""
    vocabulary = model.config.get_text_config().vocab_size
    prompt = torch.randint(20, vocabulary, (1, context), generator=torch.Generator().manual_seed(1))

    def generate(count: int) -> object:
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0)

    return lambda: 1e3 * (seconds(lambda: generate(tokens)) - seconds(lambda: generate(1))) / (tokens - 1)


def measure(name: str, layers: int, context: int, tokens: int, rounds: int, processes: int) -> dict[str, object]:
    with opened(name, layers) as model, torch.inference_mode():
        shared = model.moegraft.context  # type: ignore[union-attr]
        decode, replay = decode_ms(model, context, tokens), shared.replay

        def replaying(replays: bool) -> float:
            shared.replay = replay if replays else None
            return decode()

        with busy(processes):
            taken = alternate({way: lambda way=way: replaying(way) for way in (True, False)}, rounds)  # type: ignore[misc]
        shared.replay = replay
        steps = model.moegraft.statistics()["decode_steps"]  # type: ignore[union-attr]
        assert steps["replayed_steps"] > tokens * rounds / 2, f"{name}: steps were not replayed: {steps}"
    tiny = f"tiny model of {model.config.get_text_config().num_hidden_layers} layers"
    kind = DEMO if name == DEMO else tiny if family(name) else f"{layers} layers of Qwen3-30B-A3B"
    about = {"model": kind, "provider": name, "context": context, "busy_processes": processes, "rounds": rounds}
    about |= {"layer_by_layer_ms": round(statistics.median(taken[False]), 3), **percentiles(taken[True], "program_ms", 3)}
    return {**about, "ratio": round(median_ratio(taken[False], taken[True]), 2)}


def trace(name: str, layers: int, context: int, tokens: int) -> Iterator[dict[str, object]]:
    """Yield the kernels of one step in both ways: the fastest of `tokens` steps, which follow `context` and as many more tokens."""
    with opened(name, layers) as model, torch.inference_mode():
        injection = model.moegraft
        replay = injection.context.replay  # type: ignore[union-attr]
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.randint(20, vocabulary, (1, context + 2 * tokens), generator=torch.Generator().manual_seed(1))
        for way, replays in (("layer by layer", False), ("program", True)):
            injection.context.replay = replay if replays else None  # type: ignore[union-attr]
            cache = model(input_ids=ids[:, :context], use_cache=True).past_key_values
            steps = []
            with injection.timelines() as (timeline,):  # type: ignore[union-attr]
                for place in range(context, context + 2 * tokens):
                    kernels, start_ms = len(timeline.spans), 1e3 * time.perf_counter()
                    model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True)
                    steps.append((1e3 * time.perf_counter() - start_ms, start_ms, timeline.spans[kernels:]))
            took_ms, start_ms, spans = min(steps[tokens:], key=lambda step: step[0])
            step = {"provider": name, "layers": layers, "context": context, "way": way}
            yield {**step, "kernel": "step", "start_us": 0.0, "end_us": round(1e3 * took_ms, 1)}
            for span in spans:
                if span.lane == "CPU":
                    start_us, end_us = (round(1e3 * (moment_ms - start_ms), 1) for moment_ms in (span.start_ms, span.end_ms))
                    yield {**step, "kernel": span.name, "start_us": start_us, "end_us": end_us}


def picture() -> None:
    """Draw the rows of `trace`: a lane for each way, on one scale of time."""
    rows = read_rows("step_timeline")
    kinds = [kind for kind in dict.fromkeys(row["kernel"] for row in rows) if kind != "step"]
    figure, ((axes,),) = panels(1, 1, (10, 3))
    for lane, step in enumerate(row for row in rows if row["kernel"] == "step"):
        spans = {kind: [span_ms(row) for row in rows if (row["way"], row["kernel"]) == (step["way"], kind)] for kind in kinds}
        whole = span_ms(step)
        outside = whole[1] - sum(width for found in spans.values() for _, width in found)
        axes.broken_barh([whole], (-lane - 0.3, 0.6), color="#e6e6e6")
        axes.text(0, -lane + 0.35, f"{step['way']}: {whole[1]:.2f} ms, of which {outside:.2f} ms outside kernels")
        for number, (kind, found) in enumerate(spans.items()):
            axes.broken_barh(found, (-lane - 0.3, 0.6), color=f"C{number}", label="" if lane else kind)
    axes.set(xlabel="ms", yticks=[])
    axes.legend(ncols=len(kinds), loc="lower right", fontsize="small")
    save(figure, "step_timeline", kind="svg")


def span_ms(row: Mapping[str, str]) -> tuple[float, float]:
    """Return the start and the length."""
    start, end = float(row["start_us"]) / 1e3, float(row["end_us"]) / 1e3
    return start, end - start


def main() -> None:
    options = parser(__doc__, layers=6, tokens=48, rounds=7)
    options.add_argument("--models", nargs="+", default=[DEMO, "ours-int4", "ours-int8", "ours-bfloat16"])
    options.add_argument("--contexts", type=int, nargs="+", default=[8])
    options.add_argument("--busy", type=int, nargs="+", default=[0])
    options.add_argument("--trace", action="store_true")
    options.add_argument("--picture", action="store_true")
    given = options.parse_args()
    if given.trace:
        rows = Recorder("step_timeline", write=given.write)
        for row in trace(given.models[0], given.layers, given.contexts[0], given.tokens):
            rows.add(row)
    if given.picture or (given.trace and given.write):
        picture()
    if given.trace or given.picture:
        return
    rows = Recorder("step_programs", write=given.write)
    for name in given.models:
        for context in given.contexts:
            for processes in given.busy:
                rows.add(measure(name, given.layers, context, given.tokens, given.rounds, processes))


if __name__ == "__main__":
    main()
