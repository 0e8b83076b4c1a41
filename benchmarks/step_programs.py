"""What does a native program save of a decode step on the CPU? One model decodes alternately layer by layer and by its program.

`ratio` is the median over rounds of the time layer by layer over that of the program. With `--busy N`, N processes keep cores busy
meanwhile, which shows how both give way. A model is the bundled one, one of Qwen3-30B-A3B's shapes (`ours-` and a weight type), or a model
type of tests/support/family_rows.py, as the tiny random model of its tests.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from harness.models import config_of, cpu_rules, injected, random_model
from harness.record import Recorder, parser
from harness.rounds import alternate, busy, median_ratio, percentiles, seconds
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
        yield injected(random_model(config_of("qwen3-30b-a3b", layers)), cpu_rules(name.removeprefix("ours-")))


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


def main() -> None:
    options = parser(__doc__, layers=6, tokens=48, rounds=7)
    options.add_argument("--models", nargs="+", default=[DEMO, "ours-int4", "ours-int8", "ours-bfloat16"])
    options.add_argument("--contexts", type=int, nargs="+", default=[8])
    options.add_argument("--busy", type=int, nargs="+", default=[0])
    given = options.parse_args()
    rows = Recorder("step_programs", write=given.write)
    for name in given.models:
        for context in given.contexts:
            for processes in given.busy:
                rows.add(measure(name, given.layers, context, given.tokens, given.rounds, processes))


if __name__ == "__main__":
    main()
