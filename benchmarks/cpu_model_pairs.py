"""Is decoding on the CPU faster than llama.cpp's? Both hold six layers of Qwen3-30B-A3B's shapes in the same weight type and take turns.

`cpu_model.py` measures one provider after the other, minutes apart, in which a shared machine's memory may get faster or slower by half.
Here each round decodes with one and then with the other; `ratio` is the median over rounds of ours over theirs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from cpu_model import DECODES, Phases, llama_cpp, ours_or_stock
from llama_cpp_peer import GGUF_TYPES
from record import write_rows


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def decode_rate(phases: Phases, context: int, tokens: int) -> float:
    """Tokens a second of all tokens but the first, whose time is mostly the prompt's."""
    one = seconds(lambda: phases.decode(1, context))
    return (tokens - 1) / (seconds(lambda: phases.decode(tokens, context)) - one)


def measure(weights: str, layers: int, rounds: int, tokens: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with ours_or_stock(f"ours-{weights}", layers) as ours, llama_cpp(f"llama.cpp-{weights}", layers) as theirs:
        for phase, context in DECODES.items():
            for phases in (ours, theirs):
                phases.decode(tokens, context)
            pairs = [(decode_rate(ours, context, tokens), decode_rate(theirs, context, tokens)) for _ in range(rounds)]
            ratios = statistics.quantiles([a / b for a, b in pairs], n=10)
            rows.append(
                {
                    "weights": weights,
                    "phase": phase,
                    "rounds": rounds,
                    "ours_tokens_s": round(statistics.median(a for a, _ in pairs), 1),
                    "llama_cpp_tokens_s": round(statistics.median(b for _, b in pairs), 1),
                    "ratio": round(ratios[4], 2),
                    "p20_ratio": round(ratios[1], 2),
                    "p80_ratio": round(ratios[7], 2),
                }
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", default=list(GGUF_TYPES), choices=list(GGUF_TYPES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--new", type=int, default=48)
    arguments = parser.parse_args()
    rows = [row for weights in arguments.weights for row in measure(weights, arguments.layers, arguments.rounds, arguments.new)]
    print(write_rows("cpu_model_pairs", rows, ("torch", "transformers", "llama-cpp-python")))


if __name__ == "__main__":
    main()
