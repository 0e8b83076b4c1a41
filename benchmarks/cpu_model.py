"""How fast is a whole model on the CPU? Six layers of Qwen3-30B-A3B's shapes, random weights: a prompt of 512, and decode after 8 and after
512 tokens, by provider.

Providers are moegraft by weight type of experts and linear layers, with its attention kernel; stock transformers; and llama.cpp with the
same shapes where `llama-cpp-python` and `gguf` are installed (`llama_cpp_peer.py` explains how to build it). The limit of decode is reading
the weights, so a read-bandwidth probe runs beside each provider. Memory does not hold two of the models: providers run one after the other,
each in a process of its own, and their ratios to the probe are the best comparison. The row of a provider that crashes has its `failure`.

    python benchmarks/cpu_model.py --prompts 512 4096 --providers ours-int4 llama.cpp-int4    # prompts alone, in a file of their own
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peer_process import PeerFailed, PeerProcess
from llama_cpp_peer import GGUF_TYPES, LlamaCpp, Sizes, write_model
from numpy.typing import NDArray
from record import percentiles, write_rows
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.generation.streamers import BaseStreamer

from moegraft.injection import optimize_and_load

PROMPT = 512
LONGEST = 4096  # tokens of the longest prompt of a benchmark
DECODES = {"decode": 8, f"decode-{PROMPT}": PROMPT}  # tokens of context
PHASES = (*DECODES, f"prompt-{PROMPT}")
DISTINCT_EXPERTS = 8  # the others are copies at other addresses, as far apart as a real model's
RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}}}}}
- match: {{kind: attention}}
  replace: {{class: cpu_attention}}
- match: {{kind: norm}}
  replace: {{class: cpu_norm}}
- match: {{kind: router}}
  replace: {{class: cpu_router}}
"""
LINEAR_RULE = """
- match: {{kind: linear}}
  replace: {{class: quantized_linear, kwargs: {{weights: {weights}}}}}
"""


def config(layers: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=8192,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        dtype=torch.bfloat16,
    )


def make_model(layers: int) -> PreTrainedModel:
    """Return a bfloat16 model with random routers, whose experts repeat `DISTINCT_EXPERTS` random ones."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(layers))
    model = model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        drawn = torch.empty(DISTINCT_EXPERTS, *parameter.shape[1:]) if ".experts." in name else torch.empty(parameter.shape)
        drawn.normal_(std=0.02) if parameter.dim() > 1 else drawn.fill_(1.0)
        repeated = drawn.repeat(parameter.shape[0] // DISTINCT_EXPERTS, 1, 1) if ".experts." in name else drawn
        parameter.data.copy_(repeated)
    model.model.rotary_emb.__init__(config=model.config)  # recreates its buffers, which `to_empty` cleared
    return model.eval()


@contextmanager
def rule_file(weights: str, linear: bool = True) -> Iterator[str]:
    """Yield the path of a rule file with experts, and linear layers if asked, in a weight type."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as rules:
        rules.write(RULES.format(weights=weights) + (LINEAR_RULE.format(weights=weights) if linear else ""))
        rules.flush()
        yield rules.name


@contextmanager
def provider(name: str, layers: int) -> Iterator[PreTrainedModel]:
    """Yield the phases of `stock` or of one of moegraft's weight types; the model is freed at the end."""
    model = make_model(layers)
    if name != "stock":
        weights = name.removeprefix("ours-")
        with rule_file(weights.removesuffix("-experts"), linear=not weights.endswith("-experts")) as rules:
            model = optimize_and_load(model, rules, progress=False)
    try:
        yield model
    finally:
        del model
        gc.collect()


def timed(run: Callable[[], object], rounds: int) -> list[float]:
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def read_gbps() -> float:
    """Return the median bandwidth of reading 1 GiB with PyTorch's own threads."""
    block = torch.ones(1 << 28)
    return block.nbytes / statistics.median(timed(lambda: block.sum(), 5)) / 1e9


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of a provider: `decode(n, context)` generates n tokens after a prompt of `context` and returns the seconds from the first
    to the last, `prefill(n)` reads a prompt of n tokens, and `logits(context)` returns those of the token after a prompt."""

    decode: Callable[[int, int], float]
    prefill: Callable[[int], object]
    logits: Callable[[int], NDArray[np.float32]]


Opener = tuple[Any, ...]  # a function that returns a context of Phases, and its arguments


class Clock(BaseStreamer):
    """The times at which `generate` passes on a prompt and each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def phases_of(model: PreTrainedModel) -> Phases:
    """Return the phases of a transformers model, with our operators or without."""
    prompt = random_tokens(model.config.vocab_size)[None]

    def decode(tokens: int, context: int) -> float:
        clock = Clock()
        model.generate(prompt[:, :context], do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, streamer=clock)
        _, first, *_, last = clock.times
        return last - first

    def logits(context: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = model(prompt[:, :context]).logits[0, -1].float().numpy()
        return found

    return Phases(decode, lambda count: model(prompt[:, :count], logits_to_keep=1), logits)


def random_tokens(vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (LONGEST,), generator=torch.Generator().manual_seed(1))


def llama_cpp_phases(peer: LlamaCpp) -> Phases:
    tokens = random_tokens(peer.vocab).tolist()

    def decode(count: int, context: int) -> float:
        peer.prefill(tokens[:context])
        start = time.perf_counter()
        peer.decode(count - 1)
        return time.perf_counter() - start

    def logits(context: int) -> NDArray[np.float32]:
        peer.prefill(tokens[:context])
        return peer.logits().copy()

    return Phases(decode, lambda count: peer.prefill(tokens[:count]), logits)


@contextmanager
def ours_or_stock(name: str, layers: int) -> Iterator[Phases]:
    with provider(name, layers) as model, torch.inference_mode():
        yield phases_of(model)


@contextmanager
def llama_cpp(name: str, layers: int) -> Iterator[Phases]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, Sizes(layers=layers), name.removeprefix("llama.cpp-"))
        with LlamaCpp(path, torch.get_num_threads()) as peer:
            yield llama_cpp_phases(peer)


def measure(phases: Phases, phase: str, rounds: int, new_tokens: int) -> dict[str, object]:
    if phase in DECODES:
        context, tokens = DECODES[phase], new_tokens - 1
        times = [phases.decode(new_tokens, context) for _ in range(rounds + 1)][1:]
    else:
        tokens = int(phase.removeprefix("prompt-"))
        times = timed(lambda: phases.prefill(tokens), rounds)
    return {**percentiles([tokens / taken for taken in times], "tokens_s", 1), "read_probe_gb_s": round(read_gbps(), 1)}


def provider_rows(name: str, opener: Opener, rounds: int, new_tokens: int, phases: Sequence[str] = PHASES) -> list[dict[str, object]]:
    """Return the rows of a provider's phases, up to the phase in which its process ends, if it does."""
    rows: list[dict[str, object]] = []
    phase = "load"
    try:
        with PeerProcess(name, *opener) as peer:
            for phase in phases:
                rows.append({"provider": name, "phase": phase, **peer.call(measure, phase, rounds, new_tokens)})
                print(rows[-1], flush=True)
    except PeerFailed as failed:
        rows.append({"provider": name, "phase": phase, "failure": failed.reason})
        print(rows[-1], flush=True)
    return rows


def openers(layers: int) -> dict[str, Opener]:
    """Return the openers of all providers: moegraft, transformers, and llama.cpp where it is installed."""
    ours = ["ours-int4", "ours-int8", "ours-bfloat16", "ours-int8-experts", "stock"]
    found: dict[str, Opener] = {name: (ours_or_stock, name, layers) for name in ours}
    if find_spec("llama_cpp") and find_spec("gguf"):
        found |= {name: (llama_cpp, name, layers) for name in (f"llama.cpp-{weights}" for weights in GGUF_TYPES)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--providers", nargs="+", help="default: all installed providers")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument(
        "--prompts", type=int, nargs="+", metavar="TOKENS", help=f"measure prompts of these lengths alone, at most {LONGEST}"
    )
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    phases = [f"prompt-{tokens}" for tokens in arguments.prompts] if arguments.prompts else PHASES
    known = openers(arguments.layers)
    if unknown := set(arguments.providers or ()) - set(known):
        parser.error(f"no provider is named {', '.join(sorted(unknown))}; expected {', '.join(known)}")
    rows = [
        row for name in arguments.providers or known for row in provider_rows(name, known[name], arguments.rounds, arguments.new, phases)
    ]
    if not arguments.no_write:
        print(write_rows("cpu_prompts" if arguments.prompts else "cpu_model", rows, ("torch", "transformers", "llama-cpp-python")))


if __name__ == "__main__":
    main()
