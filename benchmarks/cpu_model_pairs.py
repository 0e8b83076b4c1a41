"""Is decoding on the CPU faster than llama.cpp's? Layers of Qwen3-30B-A3B's shapes from one GGUF file, the providers interleaved; and, in
formats that their files have, four layers of gpt-oss-20b (mxfp4) and of DeepSeek-V2-Lite (q4_k, iq3_s).

`cpu_model.py` measures providers minutes apart, in which the memory of a shared machine may change its speed by half. Here each round
decodes with one provider and then with the other; `ratio` is the median over rounds of moegraft's rate over llama.cpp's. Reading the
weights of a token and its cache is what limits decoding: `of_read_limit` is the median of moegraft's rate over what the bandwidth read just
before would allow. Both providers' logits are compared first. Each runs in a process of its own; if one crashes, the row has its `failure`
in place of figures.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from harness.llama_cpp import TYPES, cache_bytes, is_installed, write_model
from harness.models import cpu_rules, qwen3_config
from harness.peers import PeerFailed, PeerProcess
from harness.probe import ReadProbe
from harness.record import Recorder, hardware, parser
from harness.rounds import alternate, busy, percentiles
from harness.whole_models import Opener, check_logits, decode_rate, llama_cpp, ours_from_file
from load_memory import stored_config

FAMILY_LAYERS = 4
FAMILIES = {"mxfp4": "mxfp4", "q4_k": "fp8", "iq3_s": "fp8"}  # the checkpoints of `load_memory.py` with the shapes of gpt-oss and DeepSeek
LOGITS_AFTER = (2, 4, 8, 12, 24)  # tokens; rounding of activations sends some of them to other experts, hence the median
LOGITS_LIMIT = 0.15  # relative difference of the two providers' logits


def measure(
    opened: Mapping[str, Opener], rounds: int, tokens: int, contexts: Sequence[int], limit: Callable[[int], float]
) -> list[dict[str, object]]:
    """Return the rows of a pair of providers, moegraft first, up to the phase in which the process of one ends, if it does.

    `limit` returns the tokens per second, after a number of tokens, that the bandwidth measured in the call allows.
    """
    rows: list[dict[str, object]] = []
    context = 0
    (our_name, our_opener), (their_name, their_opener) = opened.items()
    try:
        with PeerProcess(our_name, *our_opener) as ours, PeerProcess(their_name, *their_opener) as theirs:
            for context in contexts:
                calls: dict[str, Callable[[], float]] = {
                    "limit": partial(limit, context),
                    "ours": partial(ours.call, decode_rate, context, tokens),
                    "theirs": partial(theirs.call, decode_rate, context, tokens),
                }
                rows.append({"context": context, "rounds": rounds, **figures(alternate(calls, rounds))})
    except PeerFailed as failed:
        rows.append({"context": context, "rounds": rounds, "failure": str(failed)})
    return rows


def figures(rates: Mapping[str, Sequence[float]]) -> dict[str, object]:
    ours, theirs, most = rates["ours"], rates["theirs"], rates["limit"]
    ratios = percentiles([one / other for one, other in zip(ours, theirs, strict=True)], "ratio", 2)
    return {
        "ours_tokens_s": round(statistics.median(ours), 1),
        "llama_cpp_tokens_s": round(statistics.median(theirs), 1),
        "ratio": ratios.pop("p50_ratio"),
        **ratios,
        "of_read_limit": round(statistics.median(one / limit for one, limit in zip(ours, most, strict=True)), 2),
    }


def main() -> None:
    options = parser(__doc__, rounds=11, new=48)
    options.add_argument("--weights", nargs="+", default=["int4", "int8", "bfloat16"], choices=list(TYPES))
    options.add_argument("--layers", type=int, default=6, help="of Qwen3-30B-A3B's shapes; other numbers than 6 have a file of their own")
    options.add_argument("--contexts", type=int, nargs="+", default=(8, 512, 2048))
    options.add_argument("--busy", type=int, default=0, help="processes that keep cores busy meanwhile; the rows have a file of their own")
    given = options.parse_args()
    if not is_installed():
        raise SystemExit("llama-cpp-python is not installed; harness/llama_cpp.py explains how to build it")
    probe, here = ReadProbe(torch.get_num_threads()), {"hardware": hardware()}
    for weights in given.weights:
        family = weights in FAMILIES
        config = stored_config(FAMILIES[weights], layers=FAMILY_LAYERS) if family else qwen3_config(given.layers)
        name = "cpu_model_pairs_stored" if family else f"cpu_model_pairs{f'_{given.layers}' if given.layers != 6 else ''}"
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            config.save_pretrained(folder)
            token_bytes = write_model(folder / "model.gguf", config, weights)
            rules = "extends: cpu\n" if family else cpu_rules(weights)
            opened: dict[str, Opener] = {f"ours-{weights}": (ours_from_file, folder, rules), f"llama.cpp-{weights}": (llama_cpp, folder)}
            about = {"layers": config.num_hidden_layers, "weights": weights} | ({"busy_processes": given.busy} if given.busy else {})
            about["logits_error"] = round(check_logits(opened, LOGITS_AFTER, LOGITS_LIMIT), 4)
            about |= {"model": config.model_type} if family else {}
            rows = Recorder(
                name + "_busy" * bool(given.busy),
                ("torch", "transformers", "llama-cpp-python"),
                replaces=("weights", "busy_processes", "hardware"),
                write=given.write,
            )
            with busy(given.busy):
                for row in measure(
                    opened,
                    given.rounds,
                    given.new,
                    given.contexts,
                    lambda context: probe.median() / (token_bytes + cache_bytes(config, context)),  # noqa: B023  called at once
                ):
                    rows.add({**about, **row, **here})


if __name__ == "__main__":
    main()
