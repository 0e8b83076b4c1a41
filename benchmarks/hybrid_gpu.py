"""The hybrid systems on a real GPU: time to the first token by prompt length, time between tokens, layer by layer and captured.

    python benchmarks/hybrid_gpu.py                           # all systems, on prompts of random tokens
    python benchmarks/hybrid_gpu.py --prompt-sets FOLDER      # models with random weights, layers cut to what fits
    python benchmarks/hybrid_gpu.py --checkpoint FOLDER ...   # a model with its own weights and routing

Each system is a rule file over the same weights (`_gpu_systems.py`); its logits are first compared with those of `all_cpu`. Prompts are
drawn from the sets in FOLDER (`_prompts.py`), or are random tokens without a folder. `--gpu emulated --scale 16` runs the same code on any
machine with a sixteenth of the widths, to test it; its times mean nothing. Times between tokens are measured after the shortest prompt.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from _gpu_systems import SHAPES, SYSTEMS, system
from _prompts import read_sets, sampled
from record import percentiles, with_speedups, write_rows
from transformers import AutoTokenizer, PreTrainedModel, StoppingCriteria

from moegraft.injection.demo import demo_path
from moegraft.operators.offload.devices.cuda import why_no_cuda
from moegraft.operators.offload.engine import Engine
from moegraft.operators.timeline import Timeline

TOLERANCE = 0.05  # relative difference of bfloat16 logits that are summed in another order
Row = dict[str, object]


def prompts_of(arguments: argparse.Namespace, tokens: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return a prompt (1, tokens) by set."""
    if arguments.prompt_sets is None:
        return {"random": torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))}
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint or demo_path(), model_max_length=1 << 20)
    return sampled(read_sets(arguments.prompt_sets), tokenizer, tokens, vocabulary)


class Stamps(StoppingCriteria):
    """A streamer that records the time of each token."""

    def __init__(self) -> None:
        self.at_s = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.at_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def token_ms(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, stamps: Stamps | None = None) -> list[float]:
    """Return the ms of each token; the first includes the prompt."""
    stamps = stamps or Stamps()
    settings = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[stamps], **settings)
    return [1e3 * (after - before) for before, after in pairwise(stamps.at_s)]


def busy(model: PreTrainedModel, run: Callable[[], object]) -> dict[str, float]:
    """Return the share of the time that each device was busy, measured in a run of its own; captured steps report only the link."""
    engine = next(iter(engines_of(model)), None)
    if engine is None:
        return {}
    engine.timings.timeline = timeline = Timeline(engine.device.name)
    start_ms = engine.device.now_ms()
    run()
    engine.device.synchronize()
    engine.timings.collect()
    took_ms = engine.device.now_ms() - start_ms
    engine.timings.timeline = None
    return {f"{lane.lower()}_busy": round(timeline.busy_ms(lane) / took_ms, 3) if took_ms else 0.0 for lane in ("CPU", "GPU", "link")}


def engines_of(model: PreTrainedModel) -> list[Engine]:
    """None in a stock model."""
    return list(model.moegraft.context.gpu_engines) if hasattr(model, "moegraft") else []


def measure(model: PreTrainedModel, about: Mapping[str, object], arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    vocabulary = model.config.get_text_config().vocab_size
    for tokens in arguments.prompts:
        new_tokens = arguments.new_tokens if tokens == arguments.prompts[0] else 1
        for name, prompt in prompts_of(arguments, tokens, vocabulary).items():
            ids = prompt.to(model.device)
            token_ms(model, ids, new_tokens)  # warms up
            replayed = sum(engine.statistics.replayed for engine in engines_of(model))
            runs = [token_ms(model, ids, new_tokens) for _ in range(arguments.rounds)]
            replayed = sum(engine.statistics.replayed for engine in engines_of(model)) - replayed
            found = {"prompt_set": name, "prompt_tokens": tokens}
            rows.append({**about, "phase": "first token", **found, **percentiles([run[0] for run in runs], "ms", 3), "steps_replayed": 0})
            if new_tokens > 1:
                each = percentiles([ms for run in runs for ms in run[1:]], "ms", 3)
                rows.append({**about, "phase": "next token", **found, **each, "steps_replayed": replayed})
            shares = busy(model, partial(token_ms, model, ids, new_tokens))
            for row in rows[-1 - (new_tokens > 1) :]:
                row |= shares
                print(*(f"{column}={value}" for column, value in row.items()), flush=True)
    return rows


def compared(shape: str, ratio: float, arguments: argparse.Namespace) -> list[Row]:
    """Measure all systems on one model, with the difference of their logits from those of `all_cpu`, which quantises activations."""
    rows: list[Row] = []
    expected: torch.Tensor | None = None
    for name in ["all_cpu", *(name for name in arguments.systems if name != "all_cpu")]:
        with system(name, shape, ratio, arguments) as model:
            vocabulary = model.config.get_text_config().vocab_size
            probe = torch.randint(0, vocabulary, (1, 9), generator=torch.Generator().manual_seed(2)).to(model.device)
            logits = model(probe).logits.float().cpu()
            expected = logits if expected is None else expected
            answer = compared_logits(logits, expected)
            if not answer["logits_error"] <= TOLERANCE:
                print(
                    f"{shape}, {name}: logits differ from those of all_cpu by more than {TOLERANCE:.0%}: {answer}",
                    file=sys.stderr,
                    flush=True,
                )
            cut = f"{shape}, {arguments.layers} layers, 1/{arguments.scale} of the widths" if arguments.checkpoint is None else shape
            about = {"gpu": arguments.gpu, "model": cut, "weights": arguments.weights, "cache_ratio": ratio, "system": name, **answer}
            rows += measure(model, about, arguments)
    return rows


def compared_logits(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Return the relative error of logits, the share of tokens with the same best one, and the mean KL divergence in nats."""
    right, given = expected.log_softmax(-1), found.log_softmax(-1)
    return {
        "logits_error": round(float((found - expected).norm() / expected.norm()), 5),
        "same_top_1": round(float((found.argmax(-1) == expected.argmax(-1)).float().mean()), 4),
        "kl": round(float((right.exp() * (right - given)).sum(-1).mean()), 6),
    }


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="cuda:0")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--checkpoint", type=Path, help="a model's folder instead of shapes")
    parser.add_argument("--prompt-sets", type=Path, help="a folder with chatgpt_prompts.csv, mt_bench.jsonl, vicuna_bench.jsonl")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 128, 512, 1024])
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="of the CPU's part; 0: one for each core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    reason = why_no_cuda() if arguments.gpu.startswith("cuda") else None
    if reason is not None:
        systems = ", ".join(arguments.systems)
        parser.exit(2, f"{reason}: with a GPU this measures {systems}; --gpu emulated --scale 16 tests the code\n")
    if arguments.gpu == "emulated":
        import support.emulated  # noqa: F401  which rules name
    return arguments


@torch.inference_mode()
def main() -> None:
    arguments = arguments_of()
    shapes = arguments.models if arguments.checkpoint is None else [arguments.checkpoint.name]
    rows = [row for shape in shapes for ratio in arguments.ratios for row in compared(shape, ratio, arguments)]
    if not arguments.no_write:
        conditions = ("model", "cache_ratio", "phase", "prompt_set", "prompt_tokens")
        print(write_rows("hybrid_gpu", with_speedups(rows, conditions, "p50_ms"), ("torch", "transformers", "triton")))


if __name__ == "__main__":
    main()
