"""What does a native program save of a decode step on the CPU? One model decodes alternately layer by layer and by its program.

`ratio` is the median over rounds of the time layer by layer over that of the program. With `--busy N`, N processes keep cores busy
meanwhile, which shows how both give way. A model is the bundled one, a provider of `cpu_model.py`, or a model type of
tests/support/family_rows.py, as the tiny random model of its tests.

`--trace` measures nothing else: it writes the kernels of one token, layer by layer and in its program, to results/step_timeline.csv (of
many steps the fastest, which other programs disturb least) and draws them in results/step_timeline.svg. `--picture` only draws.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from cpu_model import provider
from record import RESULTS, percentiles, seconds, write_rows
from support.families import build_model, served_cases
from support.family_rows import FamilyCase
from transformers import PreTrainedModel

import moegraft.injection.demo
from moegraft.injection import optimize_and_load

DEMO = "bundled"


def family(name: str) -> FamilyCase | None:
    return next((case for case in served_cases() if case.model_type == name), None)


@contextmanager
def opened(name: str, layers: int) -> Iterator[PreTrainedModel]:
    if name == DEMO:
        yield optimize_and_load(Path(moegraft.injection.demo.__file__).parent, "cpu", progress=False)
    elif case := family(name):
        yield optimize_and_load(build_model(case), "cpu", progress=False)
    else:
        with provider(name, layers) as model:
            yield model


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep as many cores busy while the body runs."""
    context = multiprocessing.get_context("spawn")
    running = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()


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
        replay = shared.replay
        measured = decode_ms(model, context, tokens)
        pairs = []
        with busy(processes):
            for _ in range(rounds + 1):  # the first is a warm-up, in which the program is made
                pair = []
                for shared.replay in (replay, None):
                    pair.append(measured())
                pairs.append(pair)
        shared.replay = replay
        steps = model.moegraft.statistics()["decode_steps"]  # type: ignore[union-attr]
        assert steps["replayed_steps"] > tokens * rounds / 2, f"{name}: steps were not replayed: {steps}"
    native, usual = zip(*pairs[1:], strict=True)
    tiny = f"tiny model of {model.config.get_text_config().num_hidden_layers} layers"
    return {
        "model": DEMO if name == DEMO else tiny if family(name) else f"{layers} layers of Qwen3-30B-A3B",
        "provider": name,
        "context": context,
        "busy_processes": processes,
        "rounds": rounds,
        "layer_by_layer_ms": round(statistics.median(usual), 3),
        **percentiles(native, "program_ms", 3),
        "ratio": round(statistics.median(one / other for one, other in zip(usual, native, strict=True)), 2),
    }


def trace(name: str, layers: int, context: int, tokens: int) -> list[dict[str, object]]:
    """Return the kernels of one step in both ways: the fastest of `tokens` steps, which follow `context` and as many more tokens."""
    rows: list[dict[str, object]] = []
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
            rows.append({**step, "kernel": "step", "start_us": 0.0, "end_us": round(1e3 * took_ms, 1)})
            for span in spans:
                if span.lane == "CPU":
                    start_us, end_us = (round(1e3 * (moment_ms - start_ms), 1) for moment_ms in (span.start_ms, span.end_ms))
                    rows.append({**step, "kernel": span.name, "start_us": start_us, "end_us": end_us})
    return rows


COLOURS = {"experts": "#d9730d", "linear": "#2f6db5", "attention": "#3a8f4d", "router": "#8b57c2", "norm": "#b5a12f", "matmul": "#4aa3a8"}
WIDTH, LANE, LEFT = 1000, 46, 20  # pixels of the picture


def picture(rows: Sequence[Mapping[str, str]]) -> str:
    """Return an SVG of the rows of `trace`: a lane for each way, on one scale of time."""
    steps = [row for row in rows if row["kernel"] == "step"]
    longest = max(float(row["end_us"]) for row in steps)
    scale = (WIDTH - 2 * LEFT) / longest
    height = 60 + 2 * LANE * len(steps)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, step in enumerate(steps):
        top, end_us = 30 + 2 * LANE * number, float(step["end_us"])
        kernels = [row for row in rows if row["way"] == step["way"] and row is not step]
        inside = sum(float(row["end_us"]) - float(row["start_us"]) for row in kernels)
        title = f"{step['way']}: {end_us / 1e3:.2f} ms, of which {(end_us - inside) / 1e3:.2f} ms outside kernels"
        parts.append(f'<text x="{LEFT}" y="{top - 8}">{title}</text>')
        parts.append(f'<rect x="{LEFT}" y="{top}" width="{end_us * scale:.1f}" height="{LANE}" fill="#e6e6e6"/>')
        for row in kernels:
            start, width = float(row["start_us"]) * scale, (float(row["end_us"]) - float(row["start_us"])) * scale
            parts.append(
                f'<rect x="{LEFT + start:.2f}" y="{top}" width="{max(width, 0.3):.2f}" height="{LANE}" fill="{COLOURS[row["kernel"]]}"/>'
            )
    found = {row["kernel"] for row in rows}
    for place, kernel in enumerate(kernel for kernel in COLOURS if kernel in found):
        parts.append(f'<rect x="{LEFT + 110 * place}" y="{height - 30}" width="12" height="12" fill="{COLOURS[kernel]}"/>')
        parts.append(f'<text x="{LEFT + 110 * place + 18}" y="{height - 19}">{kernel}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw() -> Path:
    with (RESULTS / "step_timeline.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    path = RESULTS / "step_timeline.svg"
    path.write_text(picture(rows), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[DEMO, "ours-int4", "ours-int8", "ours-bfloat16"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8])
    parser.add_argument("--busy", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--picture", action="store_true")
    arguments = parser.parse_args()
    if arguments.trace:
        print(write_rows("step_timeline", trace(arguments.models[0], arguments.layers, arguments.contexts[0], arguments.tokens)))
    if arguments.trace or arguments.picture:
        print(draw())
        return
    rows = []
    for name in arguments.models:
        for context in arguments.contexts:
            for processes in arguments.busy:
                rows.append(measure(name, arguments.layers, context, arguments.tokens, arguments.rounds, processes))
                print(rows[-1], flush=True)
    if not arguments.no_write:
        print(write_rows("step_programs", rows))


if __name__ == "__main__":
    main()
