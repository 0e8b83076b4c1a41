"""Is decoding on the CPU faster than llama.cpp's? Layers of Qwen3-30B-A3B's shapes from one GGUF file, the providers interleaved; and, in
formats that their files have, four layers of gpt-oss-20b (mxfp4) and of DeepSeek-V2-Lite (q4_k, iq3_s).

`cpu_model.py` measures providers minutes apart, in which the memory of a shared machine may change its speed by half. Here each round
decodes with one provider and then with the other; `ratio` is the median over rounds of moegraft's rate over llama.cpp's. Reading the
weights of a token and its cache is what limits decoding: `of_read_limit` is the median of moegraft's rate over what the bandwidth read just
before would allow. Each provider runs in a process of its own; if one crashes, the row has its `failure` in place of figures.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peer_process import PeerFailed, PeerProcess
from _probe import ReadProbe
from cpu_model import Opener, Phases, config, llama_cpp_phases, phases_of, rule_file
from llama_cpp_peer import FAMILY_TYPES, GGUF_TYPES, LlamaCpp, Sizes, write_family, write_model
from load_memory import stored_config
from numpy.typing import NDArray
from record import RESULTS, hardware, percentiles, write_rows
from step_programs import busy

from moegraft.injection import optimize_and_load
from moegraft.operators.weight_formats import FORMATS

CONTEXTS = (8, 512, 2048)
PROBES = 24  # reads of 64 MiB whose median is the bandwidth
LOGITS_AFTER = (2, 4, 8, 12, 24)  # tokens; rounding of activations sends some of them to other experts, hence the median
LOGITS_LIMIT = 0.15  # relative difference of the two providers' logits
FAMILY_LAYERS = 4


@contextmanager
def ours(folder: Path, weights: str) -> Iterator[Phases]:
    with rule_file(weights) as rules, torch.inference_mode():
        yield phases_of(optimize_and_load(folder, "cpu" if weights in FAMILY_TYPES else rules, gguf=folder / "model.gguf", progress=False))


@contextmanager
def theirs(folder: Path) -> Iterator[Phases]:
    with LlamaCpp(folder / "model.gguf", torch.get_num_threads()) as peer:
        yield llama_cpp_phases(peer)


def decode_rate(phases: Phases, context: int, tokens: int) -> float:
    """Return tokens per second of all tokens except the first, which includes the prompt."""
    return (tokens - 1) / phases.decode(tokens, context)


def token_bytes(sizes: Sizes, weights: str, context: int) -> int:
    """Return the bytes that a token after `context` others must read: weights, bfloat16 routers, bfloat16 keys and values."""
    query, pairs = sizes.heads * sizes.head_dim, sizes.key_value_heads * sizes.head_dim
    layer = sizes.hidden * (2 * query + 2 * pairs) + sizes.top_k * 3 * sizes.hidden * sizes.intermediate
    packed = FORMATS[weights].nbytes(sizes.layers * layer + sizes.vocab * sizes.hidden)
    return packed + 2 * sizes.layers * (sizes.experts * sizes.hidden + 2 * pairs * context)


def cache_bytes(config: Any, context: int) -> int:
    """Return the bytes of bfloat16 keys and values that transformers' caches hold after `context` tokens."""
    if config.model_type == "deepseek_v2":
        return int(2 * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * context)
    held = sum(min(context, config.sliding_window) if kind == "sliding_attention" else context for kind in config.layer_types)
    return int(4 * config.num_key_value_heads * config.head_dim * held)


def logits_error(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def measure(
    weights: str,
    opened: Mapping[str, Opener],
    rounds: int,
    tokens: int,
    contexts: tuple[int, ...],
    limit: Callable[[int], float],
    processes: int = 0,
) -> list[dict[str, object]]:
    """Return the rows of a pair of providers, up to the phase in which the process of one ends, if it does.

    `limit` returns the tokens per second, after a number of tokens, that the bandwidth measured in the call allows. `processes` keep as
    many cores busy meanwhile.
    """
    rows: list[dict[str, object]] = []
    context = 0
    (our_name, our_opener), (their_name, their_opener) = opened.items()
    try:
        with PeerProcess(our_name, *our_opener) as ours, PeerProcess(their_name, *their_opener) as theirs, busy(processes):
            for context in contexts:
                rates = []
                for _ in range(rounds + 1):
                    most = limit(context)
                    rates.append((ours.call(decode_rate, context, tokens), theirs.call(decode_rate, context, tokens), most))
                rows.append({"weights": weights, "context": context, "rounds": rounds, **figures(rates[1:])})  # the first is a warm-up
                print(rows[-1], flush=True)
    except PeerFailed as failed:
        rows.append({"weights": weights, "context": context, "rounds": rounds, "failure": str(failed)})
        print(rows[-1], flush=True)
    return rows


def measure_family(weights: str, rounds: int, tokens: int, contexts: tuple[int, ...], probe: ReadProbe) -> list[dict[str, object]]:
    """Return the rows of a family's model, after a check that both providers have the same logits."""
    family = stored_config("mxfp4" if weights == "mxfp4" else "fp8", layers=FAMILY_LAYERS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        family.save_pretrained(folder)
        weight_bytes = write_family(folder / "model.gguf", family, weights)

        def limit(context: int) -> float:
            return statistics.median(probe.run() for _ in range(PROBES)) / (weight_bytes + cache_bytes(family, context))

        opened: dict[str, Opener] = {f"ours-{weights}": (ours, folder, weights), f"llama.cpp-{weights}": (theirs, folder)}
        found = []
        for provider, opener in opened.items():
            with PeerProcess(provider, *opener) as peer:
                found.append([peer.call(logits_of, context) for context in LOGITS_AFTER])
        error = statistics.median(logits_error(a, b) for a, b in zip(*found, strict=True))
        if not error <= LOGITS_LIMIT:
            raise SystemExit(f"{family.model_type} {weights}: the providers' logits differ by {error:.2e}; not measured")
        about = {"model": family.model_type, "layers": FAMILY_LAYERS, "logits_error": round(error, 4)}
        return [{**about, **row} for row in measure(weights, opened, rounds, tokens, contexts, limit)]


def logits_of(phases: Phases, context: int) -> NDArray[np.float32]:
    return phases.logits(context)


def figures(rates: list[tuple[float, float, float]]) -> dict[str, object]:
    ratios = percentiles([ours / theirs for ours, theirs, _ in rates], "ratio", 2)
    return {
        "ours_tokens_s": round(statistics.median(ours for ours, _, _ in rates), 1),
        "llama_cpp_tokens_s": round(statistics.median(theirs for _, theirs, _ in rates), 1),
        "ratio": ratios.pop("p50_ratio"),
        **ratios,
        "of_read_limit": round(statistics.median(ours / most for ours, _, most in rates), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", default=list(GGUF_TYPES), choices=[*GGUF_TYPES, *FAMILY_TYPES])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--busy", type=int, nargs="+", default=[0], help="processes that keep cores busy meanwhile")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--new", type=int, default=48)
    arguments = parser.parse_args()
    if find_spec("llama_cpp") is None:
        raise SystemExit("llama-cpp-python is not installed; llama_cpp_peer.py explains how to build it")
    sizes, probe = Sizes(layers=arguments.layers), ReadProbe(torch.get_num_threads())
    rows: list[dict[str, object]] = []
    packages = ("torch", "transformers", "llama-cpp-python")
    for weights in arguments.weights:
        if weights in FAMILY_TYPES:
            found = measure_family(weights, arguments.rounds, arguments.new, tuple(arguments.contexts), probe)
            print(write_rows("cpu_model_pairs_stored", [*other_rows("cpu_model_pairs_stored", [weights]), *found], packages))
            continue

        def limit(context: int, weights: str = weights) -> float:
            return statistics.median(probe.run() for _ in range(PROBES)) / token_bytes(sizes, weights, context)

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config(arguments.layers).save_pretrained(folder)
            write_model(folder / "model.gguf", sizes, weights)
            opened = {f"ours-{weights}": (ours, folder, weights), f"llama.cpp-{weights}": (theirs, folder)}
            for processes in arguments.busy:
                found = measure(weights, opened, arguments.rounds, arguments.new, tuple(arguments.contexts), limit, processes)
                rows += [
                    {"layers": arguments.layers, **({"busy_processes": processes} if any(arguments.busy) else {}), **row} for row in found
                ]
    if rows:
        name = "cpu_model_pairs" if arguments.layers == 6 else f"cpu_model_pairs_{arguments.layers}"
        name += "_busy" * any(arguments.busy)
        print(write_rows(name, [*other_rows(name, arguments.weights), *rows], packages))


def other_rows(name: str, weights: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of earlier results in other formats than `weights`, or of another machine."""
    path = RESULTS / f"{name}.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["weights"] not in weights or row["hardware"] != hardware()]


if __name__ == "__main__":
    main()
