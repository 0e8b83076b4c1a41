"""How fast is a whole model on the CPU? Six layers of Qwen3-30B-A3B's shapes, random weights: a prompt of 512, and decode after 8 and after
512 tokens, by provider.

Providers are moegraft by weight type of experts and linear layers, with its attention kernel; stock transformers; and llama.cpp with the
same shapes where `llama-cpp-python` and `gguf` are installed (`harness/llama_cpp.py` explains how to build it). The limit of decode is
reading the weights, so a read-bandwidth probe runs beside each phase. Memory does not hold two of the models: providers run one after the
other, each in a process of its own, and their ratios to the probe are the best comparison; `cpu_model_pairs.py` interleaves two. The row of
a provider that crashes has its `failure`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from harness.llama_cpp import is_installed
from harness.peers import PeerFailed, PeerProcess
from harness.probe import ReadProbe
from harness.record import Recorder, parser
from harness.rounds import alternate, percentiles
from harness.whole_models import Opener, decode_rate, llama_cpp_of, ours_or_stock, prompt_rate

PROMPT = 512


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
    phases: dict[str, tuple[Any, ...]] = {"decode": (decode_rate, 8, new_tokens), f"decode-{PROMPT}": (decode_rate, PROMPT, new_tokens)}
    try:
        with PeerProcess(name, *opener) as peer:
            for phase, call in (phases | {f"prompt-{PROMPT}": (prompt_rate, PROMPT)}).items():
                found = percentiles(alternate({phase: partial(peer.call, *call)}, rounds)[phase], "tokens_s", 1)
                rows.add({"provider": name, "phase": phase, **found, "read_probe_gb_s": round(probe.median() / 1e9, 1)})
    except PeerFailed as failed:
        rows.add({"provider": name, "phase": phase, "failure": failed.reason})


def main() -> None:
    options = parser(__doc__, layers=6, rounds=5, new=48)
    options.add_argument("--providers", nargs="+", help="default: all installed providers")
    given = options.parse_args()
    known, probe = openers(given.layers), ReadProbe(torch.get_num_threads())
    if unknown := set(given.providers or ()) - set(known):
        options.error(f"no provider is named {', '.join(sorted(unknown))}; expected {', '.join(known)}")
    rows = Recorder("cpu_model", ("torch", "transformers", "llama-cpp-python"), write=given.write)
    for name in given.providers or known:
        measure(name, known[name], given.rounds, given.new, rows, probe)


if __name__ == "__main__":
    main()
