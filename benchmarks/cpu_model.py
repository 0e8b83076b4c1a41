"""How fast is a whole model on the CPU? Six layers of Qwen3-30B-A3B's shapes, random weights: a prompt of 512, and decode after 8 and after
512 tokens, by provider.

Providers are moegraft by weight type of experts and linear layers, with its attention kernel; stock transformers; and llama.cpp with the
same shapes where `llama-cpp-python` and `gguf` are installed (`harness/llama_cpp.py` explains how to build it). The limit of decode is
reading the weights, so a read-bandwidth probe runs beside each phase. Memory does not hold two of the models: providers run one after the
other, each in a process of its own, and their ratios to the probe are the best comparison; `cpu_model_pairs.py` interleaves two. The row of
a provider that crashes has its `failure`. `--plot` only draws the file's rows.
"""

from __future__ import annotations

import torch
from harness.llama_cpp import is_installed
from harness.peers import PeerFailed, PeerProcess
from harness.plots import panels, save
from harness.probe import ReadProbe
from harness.record import Recorder, parser, read_rows
from harness.rounds import alternate, percentiles, seconds
from harness.whole_models import Opener, Phases, llama_cpp_of, ours_or_stock

PROMPT = 512
DECODES = {"decode": 8, f"decode-{PROMPT}": PROMPT}  # tokens of context
PHASES = (*DECODES, f"prompt-{PROMPT}")


def rates(phases: Phases, phase: str, rounds: int, new_tokens: int) -> list[float]:
    """Return the tokens per second of each round."""
    context, tokens = DECODES.get(phase), new_tokens - 1 if phase in DECODES else PROMPT

    def run() -> float:
        return seconds(lambda: phases.prefill(PROMPT)) if context is None else phases.decode(new_tokens, context)

    return [tokens / taken for taken in alternate({phase: run}, rounds)[phase]]


def openers(layers: int) -> dict[str, Opener]:
    """Return the openers of all providers: moegraft, transformers, and llama.cpp where it is installed."""
    ours = ("ours-int4", "ours-int8", "ours-bfloat16", "ours-int8-experts", "stock")
    found: dict[str, Opener] = {name: (ours_or_stock, name, layers) for name in ours}
    if is_installed():
        found |= {f"llama.cpp-{weights}": (llama_cpp_of, weights, layers) for weights in ("int4", "int8", "bfloat16")}
    return found


def measure(name: str, opener: Opener, rounds: int, new_tokens: int, rows: Recorder, probe: ReadProbe) -> None:
    """Record a provider's phases, up to the phase in which its process ends, if it does."""
    phase = "load"
    try:
        with PeerProcess(name, *opener) as peer:
            for phase in PHASES:
                found = percentiles(peer.call(rates, phase, rounds, new_tokens), "tokens_s", 1)
                rows.add({"provider": name, "phase": phase, **found, "read_probe_gb_s": round(probe.median() / 1e9, 1)})
    except PeerFailed as failed:
        rows.add({"provider": name, "phase": phase, "failure": failed.reason})


def plot() -> None:
    figure, ((axes,),) = panels(1, 1, (8, 5))
    rows = [row for row in read_rows("cpu_model") if row["phase"] == "decode" and row["p50_tokens_s"]]
    rates = [float(row["p50_tokens_s"]) for row in rows]
    errors = [[abs(float(row[f"{edge}_tokens_s"]) - rate) for rate, row in zip(rates, rows, strict=True)] for edge in ("p20", "p80")]
    axes.barh([row["provider"] for row in rows], rates, xerr=errors)
    axes.invert_yaxis()
    axes.set(xlabel="tokens/s, median, p20 to p80", title="decode, 6 layers of Qwen3-30B-A3B")
    save(figure, "cpu_model")


def main() -> None:
    options = parser(__doc__, layers=6, rounds=5, new=48, plot=True)
    options.add_argument("--providers", nargs="+", help="default: all installed providers")
    given = options.parse_args()
    if given.plot:
        plot()
        return
    known, probe = openers(given.layers), ReadProbe(torch.get_num_threads())
    if unknown := set(given.providers or ()) - set(known):
        options.error(f"no provider is named {', '.join(sorted(unknown))}; expected {', '.join(known)}")
    rows = Recorder("cpu_model", ("torch", "transformers", "llama-cpp-python"), write=given.write)
    for name in given.providers or known:
        measure(name, known[name], given.rounds, given.new, rows, probe)
    if given.write:
        plot()


if __name__ == "__main__":
    main()
