"""How fast does the bundled model answer, injected and stock? Prefill and decode tokens/s, providers interleaved in one run.

The model is small enough that Python and attention weigh as much as the experts: a whole-program figure, not a kernel's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"


def load(provider: str) -> PreTrainedModel:
    """`stock` and `stock-NAME` (an experts implementation of transformers), else a rule file."""
    if provider.startswith("stock"):
        _, _, implementation = provider.partition("-")
        chosen = {"experts_implementation": implementation} if implementation else {}
        return AutoModelForCausalLM.from_pretrained(demo_path(), dtype="auto", **chosen).eval()
    return optimize_and_load(demo_path(), provider, progress=False)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rate_percentiles(times: list[float], tokens: int) -> dict[str, float]:
    """p20, p50 and p80 of tokens/s."""
    cuts = statistics.quantiles([tokens / taken for taken in times], n=10)
    return {"p20": round(cuts[1], 1), "p50": round(cuts[4], 1), "p80": round(cuts[7], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="decoded tokens")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    ids = torch.tensor([tokenizer(TEXT.read_text(encoding="utf-8")[-8000:])["input_ids"][: arguments.prompt]])
    models = {name: load(name) for name in ("stock", "stock-eager", "cpu-exact", "cpu")}
    greedy = {"do_sample": False, "min_new_tokens": arguments.new, "max_new_tokens": arguments.new}
    reference = models["stock"](ids).logits.float()
    times: dict[tuple[str, str], list[float]] = {}
    with torch.inference_mode():
        for round_number in range(arguments.rounds + 1):
            for name, model in models.items():
                prefill = seconds(lambda model=model: model(ids, logits_to_keep=1))  # type: ignore[misc]
                whole = seconds(lambda model=model: model.generate(ids[:, :16], **greedy))  # type: ignore[misc]
                if round_number:  # the first round warms up
                    times.setdefault((name, "prefill"), []).append(prefill)
                    times.setdefault((name, "decode"), []).append(whole)
        rows = []
        for (name, phase), taken in times.items():
            error = (models[name](ids).logits.float() - reference).abs().max() / reference.abs().max()
            tokens = ids.shape[1] if phase == "prefill" else arguments.new
            rates = rate_percentiles(taken, tokens)
            rows.append({"provider": name, "phase": phase, "tokens": tokens, **rates, "max_rel_error": f"{float(error):.1e}"})
            print(rows[-1])
    print(write_rows("demo_speed", rows))


if __name__ == "__main__":
    main()
