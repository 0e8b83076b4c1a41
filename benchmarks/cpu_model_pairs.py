"""Is decoding on the CPU faster than llama.cpp's? Six layers of Qwen3-30B-A3B's shapes in the same weight type, interleaved.

`cpu_model.py` measures providers minutes apart, in which the memory of a shared machine may change its speed by half. Here each round
decodes with one provider and then with the other; `ratio` is the median over rounds of moegraft's rate over llama.cpp's. Each runs in a
process of its own; if one crashes, the row has its `failure` in place of figures.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from importlib.util import find_spec

from _peer_process import PeerFailed, PeerProcess
from cpu_model import DECODES, Opener, Phases, llama_cpp, ours_or_stock
from llama_cpp_peer import GGUF_TYPES
from record import percentiles, seconds, write_rows


def decode_rate(phases: Phases, context: int, tokens: int) -> float:
    """Return tokens per second of all tokens except the first, which includes the prompt."""
    one = seconds(lambda: phases.decode(1, context))
    return (tokens - 1) / (seconds(lambda: phases.decode(tokens, context)) - one)


def measure(weights: str, opened: Mapping[str, Opener], rounds: int, tokens: int) -> list[dict[str, object]]:
    """Return the rows of a pair of providers, up to the phase in which the process of one ends, if it does."""
    rows: list[dict[str, object]] = []
    phase = "load"
    (our_name, our_opener), (their_name, their_opener) = opened.items()
    try:
        with PeerProcess(our_name, *our_opener) as ours, PeerProcess(their_name, *their_opener) as theirs:
            for phase, context in DECODES.items():
                pairs = [(ours.call(decode_rate, context, tokens), theirs.call(decode_rate, context, tokens)) for _ in range(rounds + 1)]
                rows.append({"weights": weights, "phase": phase, "rounds": rounds, **figures(pairs[1:])})  # the first is a warm-up
                print(rows[-1], flush=True)
    except PeerFailed as failed:
        rows.append({"weights": weights, "phase": phase, "rounds": rounds, "failure": str(failed)})
        print(rows[-1], flush=True)
    return rows


def figures(pairs: list[tuple[float, float]]) -> dict[str, object]:
    ratios = percentiles([a / b for a, b in pairs], "ratio", 2)
    return {
        "ours_tokens_s": round(statistics.median(a for a, _ in pairs), 1),
        "llama_cpp_tokens_s": round(statistics.median(b for _, b in pairs), 1),
        "ratio": ratios.pop("p50_ratio"),
        **ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", default=list(GGUF_TYPES), choices=list(GGUF_TYPES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--new", type=int, default=48)
    arguments = parser.parse_args()
    if find_spec("llama_cpp") is None:
        raise SystemExit("llama-cpp-python is not installed; llama_cpp_peer.py explains how to build it")
    rows: list[dict[str, object]] = []
    for weights in arguments.weights:
        names = {f"ours-{weights}": ours_or_stock, f"llama.cpp-{weights}": llama_cpp}
        opened = {name: (open_peer, name, arguments.layers) for name, open_peer in names.items()}
        rows += measure(weights, opened, arguments.rounds, arguments.new)
    print(write_rows("cpu_model_pairs", rows, ("torch", "transformers", "llama-cpp-python")))


if __name__ == "__main__":
    main()
