"""What does a native program save of a decode step on the CPU? One model decodes alternately layer by layer and by its program.

`ratio` is the median over rounds of the time layer by layer over that of the program. With `--busy N`, N processes keep cores busy
meanwhile, which shows how both give way.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from cpu_model import provider
from record import percentiles, seconds, write_rows
from transformers import PreTrainedModel

import moegraft.injection.demo
from moegraft.injection import optimize_and_load

DEMO = "bundled"


@contextmanager
def opened(name: str, layers: int) -> Iterator[PreTrainedModel]:
    if name == DEMO:
        yield optimize_and_load(Path(moegraft.injection.demo.__file__).parent, "cpu", progress=False)
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
        measured = decode_ms(model, context, tokens)
        pairs = []
        with busy(processes):
            for _ in range(rounds + 1):  # the first is a warm-up, in which the program is made
                pair = []
                for shared.replays_steps in (True, False):
                    pair.append(measured())
                pairs.append(pair)
        shared.replays_steps = True
        steps = model.moegraft.statistics()["decode_steps"]  # type: ignore[union-attr]
        assert steps["replayed_steps"] > tokens * rounds / 2, f"{name}: steps were not replayed: {steps}"
    native, usual = zip(*pairs[1:], strict=True)
    return {
        "model": "bundled" if name == DEMO else f"{layers} layers of Qwen3-30B-A3B",
        "provider": name,
        "context": context,
        "busy_processes": processes,
        "rounds": rounds,
        "layer_by_layer_ms": round(statistics.median(usual), 3),
        **percentiles(native, "program_ms", 3),
        "ratio": round(statistics.median(one / other for one, other in zip(usual, native, strict=True)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[DEMO, "ours-int4", "ours-int8", "ours-bfloat16"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8])
    parser.add_argument("--busy", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
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
