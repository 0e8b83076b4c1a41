"""How fast is a whole model on the CPU, beside llama.cpp on the same file or transformers? Decoding and prompts, by model and weights.

    python benchmarks/cpu_model.py                                            # six layers of Qwen3-30B-A3B's shapes
    python benchmarks/cpu_model.py --layers 24 --weights int4
    python benchmarks/cpu_model.py --contexts 4096 16384 32768 --sampled --prompts 16384 --rounds 3    # long contexts are read once
    python benchmarks/cpu_model.py --contexts 8 512 --sampled --prompts 512 --beside llama.cpp ik_llama.cpp ik_llama.cpp-rtr
    python benchmarks/cpu_model.py --weights int4 --contexts 8 --sampled --prompts --busy 2    # beside other work
    python benchmarks/cpu_model.py --model gpt-oss-20b --layers 4 --weights mxfp4
    python benchmarks/cpu_model.py --model deepseek-v2-lite --layers 4 --weights q4_k iq3_s
    python benchmarks/cpu_model.py --layers 2 --weights all --contexts 8 --sampled --prompts 8 512 --beside llama.cpp ik_llama.cpp-rtr
                                                        # every type of a file; two layers are those of `cpu_formats.csv`
    python benchmarks/cpu_model.py --layers 12 --weights int4 --vocabulary 151936 --contexts 512 --prompts    # sampling from Qwen3's
    python benchmarks/cpu_model.py --model qwen3-next --layers 4 --weights int8 --beside stock llama.cpp    # and granite-4-h

Weights are random, and moegraft computes those of a GGUF file as they are stored. Beside llama.cpp alone, the file repeats few experts;
beside `stock`, which is transformers in bfloat16, it is quantised from a checkpoint, which takes minutes.

Memory may change its speed by half within minutes on a shared machine. So each round runs one provider and then the other, each in a
process of its own; `ratio` is the median over rounds of moegraft's rate over the peer's. Reading the weights of a token and its cache is
what limits decoding, and a prompt of few tokens, with all experts that these have; a long prompt is limited by the arithmetic, for which
oneDNN's product of two matrices stands, in int8 or in bfloat16 for weights in this. `of_limit` is the median of moegraft's rate over what
the bandwidth, or this product, allowed just before. Both providers' logits are compared first. If a process crashes, the row has its
`failure` in place of figures.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.checkpoints import write_gguf
from harness.llama_cpp import TYPES, TokenWeights, cache_bytes, is_installed, token_weights, write_model
from harness.models import SHAPES, VOCABULARY, config_of, cpu_rules, random_model
from harness.peers import PeerFailed, PeerProcess
from harness.probe import ReadProbe, gemm_probe
from harness.record import Recorder, hardware, parser
from harness.rounds import alternate, busy, percentiles, seconds
from harness.whole_models import (
    Opener,
    check_logits,
    decode_rate,
    experts_of,
    ik_llama_cpp,
    llama_cpp,
    ours,
    prompt_rate,
    sampled_rate,
    stock,
)

FORMATS_LAYERS = 2
PRODUCTS = 5  # whose median time is the limit of arithmetic
LOGITS_AFTER = (2, 4, 8, 12, 24)  # tokens; rounding of activations sends some of them to other experts, hence the median
LOGITS_LIMIT = {"stock": 0.3}  # relative difference of the two providers' logits; stock's weights are not rounded, those of others are
CHOSEN = ("int4", "int8", "bfloat16")  # by variables of the rules `cpu`; other types of files need none
PEERS: Mapping[str, Callable[..., Any]] = {
    "llama.cpp": llama_cpp,
    "ik_llama.cpp": ik_llama_cpp,
    "ik_llama.cpp-rtr": partial(ik_llama_cpp, repack=True),
    "stock": stock,
}


def measure(opened: Mapping[str, Opener], rounds: int, phases: Mapping[str, tuple[Any, ...]], limits: Limits) -> list[dict[str, object]]:
    """Return the rows of a pair of providers, moegraft first, up to the phase in which the process of one ends, if it does.

    Args:
        phases: a function of a provider's phases that returns a rate, and its arguments; a prompt's or a context's tokens come first.
    """
    rows, phase = list[dict[str, object]](), ""
    (our_name, our_opener), (their_name, their_opener) = opened.items()
    try:
        with PeerProcess(our_name, *our_opener) as ours, PeerProcess(their_name, *their_opener) as theirs:
            for phase, (rate, tokens, *more) in phases.items():
                calls: dict[str, Callable[[], float]] = {
                    "ours": partial(ours.call, rate, tokens, *more),
                    "theirs": partial(theirs.call, rate, tokens, *more),
                }
                experts = (ours.call(experts_of, tokens),) if rate is prompt_rate else ()
                calls = {"limit": partial(limits.prompt if experts else limits.decode, tokens, *experts), **calls}
                rows.append({"phase": phase, "rounds": rounds, **figures(alternate(calls, rounds))})
    except PeerFailed as failed:
        rows.append({"phase": phase, "rounds": rounds, "failure": str(failed)})
    return rows


@dataclass(frozen=True, slots=True)
class Limits:
    """The tokens per second that this machine allows, by what is measured in each call.

    Attributes:
        products: of oneDNN, and the multiplications and additions of one.
    """

    config: Any
    weights: TokenWeights
    probe: ReadProbe
    products: tuple[Callable[[], object], float]

    def decode(self, context: int) -> float:
        """Return the rate after `context` tokens, of which the bandwidth allows to read weights and cache."""
        chosen = self.config.num_experts_per_tok
        return self.probe.median() / (self.weights.read(chosen, chosen) + cache_bytes(self.config, context))

    def prompt(self, tokens: int, experts: float) -> float:
        """Return the rate of a prompt whose tokens have so many different experts in a layer."""
        product, operations = self.products
        rate = operations / statistics.median(seconds(product) for _ in range(PRODUCTS))
        reading_s = self.weights.read(experts, self.config.num_experts_per_tok) / self.probe.median()
        return tokens / max(reading_s, 2 * tokens * self.weights.multiplied / rate)


def figures(rates: Mapping[str, Sequence[float]]) -> dict[str, object]:
    ours, theirs = rates["ours"], rates["theirs"]
    ratios = percentiles([one / other for one, other in zip(ours, theirs, strict=True)], "ratio", 2)
    shares = [one / limit for one, limit in zip(ours, rates["limit"], strict=True)] if "limit" in rates else []
    return {
        "ours_tokens_s": round(statistics.median(ours), 1),
        "peer_tokens_s": round(statistics.median(theirs), 1),
        "ratio": ratios.pop("p50_ratio"),
        **ratios,
        "of_limit": round(statistics.median(shares), 2) if shares else "",
    }


def main() -> None:
    options = parser(__doc__, layers=6, rounds=11, new=48)
    options.add_argument("--model", default="qwen3-30b-a3b", choices=list(SHAPES), help="whose shapes the layers have")
    options.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens that the head and the choice of a token have")
    options.add_argument("--weights", nargs="+", default=CHOSEN, choices=["all", *TYPES])
    options.add_argument("--beside", nargs="+", default=["llama.cpp"], choices=list(PEERS))
    options.add_argument("--busy", type=int, default=0, help="other processes that each keep a core busy")
    options.add_argument("--contexts", type=int, nargs="*", default=(8, 512, 2048), help="tokens before those that are decoded")
    options.add_argument("--sampled", type=int, nargs="*", default=(512,), help="tokens before those that are sampled")
    options.add_argument("--prompts", type=int, nargs="*", default=(512,), help="tokens of prompts")
    given = options.parse_args()
    missing = [name for name in given.beside if name != "stock" and not is_installed(name)]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: not installed; harness/llama_cpp.py explains how to build it")
    phases = {f"decode after {tokens}": (decode_rate, tokens, given.new) for tokens in given.contexts}
    phases |= {f"sampled after {tokens}": (sampled_rate, tokens, given.new) for tokens in given.sampled}
    phases |= {f"prompt of {tokens}": (prompt_rate, tokens) for tokens in given.prompts}
    size = "" if given.vocabulary == VOCABULARY else f", vocabulary of {given.vocabulary}"
    load = f", {given.busy} busy processes" if given.busy else ""
    phases = {f"{phase}{size}{load}": calls for phase, calls in phases.items()}
    probe, config = ReadProbe(torch.get_num_threads()), config_of(given.model, given.layers, vocab_size=given.vocabulary)
    about = {"model": given.model, "layers": config.num_hidden_layers, "hardware": hardware()}
    keys = ("model", "layers", "weights", "beside", "phase", "hardware")
    packages = ("torch", "transformers", "llama-cpp-python", "ik-llama-cpp-python")
    rows = Recorder("cpu_formats" if given.layers == FORMATS_LAYERS else "cpu_model", packages, replaces=keys, write=given.write)
    for weights in TYPES if "all" in given.weights else given.weights:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            path = folder / "model.gguf"
            if "stock" in given.beside:
                random_model(config).save_pretrained(folder)
                write_gguf(folder, TYPES[weights][0])
            else:
                config.save_pretrained(folder)
                write_model(path, config, weights)
            limits = Limits(config, token_weights(path, config), probe, gemm_probe("bfloat16" if weights == "bfloat16" else "int8"))
            our_opener: Opener = (ours, folder, cpu_rules(weights) if weights in CHOSEN else "extends: cpu\n")
            for name in given.beside:
                opened: dict[str, Opener] = {f"ours-{weights}": our_opener, f"{name}-{weights}": (PEERS[name], folder)}
                found = {**about, "weights": weights, "beside": name}
                try:
                    error = round(check_logits(opened, LOGITS_AFTER, LOGITS_LIMIT.get(name, 0.15)), 4)
                except PeerFailed as failed:
                    rows.add({**found, "phase": next(iter(phases)), "rounds": given.rounds, "failure": str(failed)})
                    continue
                with busy(given.busy):
                    for row in measure(opened, given.rounds, phases, limits):
                        rows.add({**found, "logits_error": error, **row})


if __name__ == "__main__":
    main()
