"""How fast does the bundled model answer, injected and stock? Prefill and decode tokens/s, providers interleaved in one run.

In so small a model, Python and attention take as much time as the experts: the figures are those of the whole program, not of a kernel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from record import percentiles, seconds, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"


def load(provider: str) -> PreTrainedModel:
    """Load `stock`, `stock-NAME` with an experts implementation of transformers, or the model with a rule file."""
    if provider.startswith("stock"):
        _, _, implementation = provider.partition("-")
        chosen = {"experts_implementation": implementation} if implementation else {}
        return AutoModelForCausalLM.from_pretrained(demo_path(), dtype="auto", **chosen).eval()
    return optimize_and_load(demo_path(), provider, progress=False)


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
            rates = percentiles([tokens / each for each in taken], "tokens_s", 1)
            rows.append({"provider": name, "phase": phase, "tokens": tokens, **rates, "max_rel_error": f"{float(error):.1e}"})
            print(rows[-1])
    print(write_rows("demo_speed", rows))


if __name__ == "__main__":
    main()
