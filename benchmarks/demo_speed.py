"""How fast does the bundled model answer, injected and stock? Prefill and decode tokens/s, providers interleaved in one run.

In so small a model, Python and attention take as much time as the experts: the figures are those of the whole program, not of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness.record import Recorder, parser
from harness.rounds import alternate, percentiles, seconds
from harness.texts import held_out, pieces
from transformers import AutoModelForCausalLM, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path


def load(provider: str) -> PreTrainedModel:
    """Load `stock`, `stock-NAME` with an experts implementation of transformers, or the model with a rule file."""
    if provider.startswith("stock"):
        _, _, implementation = provider.partition("-")
        chosen = {"experts_implementation": implementation} if implementation else {}
        return AutoModelForCausalLM.from_pretrained(demo_path(), dtype="auto", **chosen).eval()
    return optimize_and_load(demo_path(), provider, progress=False)


def main() -> None:
    options = parser(__doc__, rounds=9)
    options.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    options.add_argument("--new", type=int, default=64, help="decoded tokens")
    given = options.parse_args()
    (ids,) = pieces(held_out(), 1, given.prompt)
    models = {name: load(name) for name in ("stock", "stock-eager", "cpu-exact", "cpu")}
    greedy = {"do_sample": False, "min_new_tokens": given.new, "max_new_tokens": given.new}
    calls: dict[tuple[str, str], Callable[[], float]] = {}
    for name, model in models.items():
        calls[name, "prefill"] = lambda model=model: seconds(lambda: model(ids, logits_to_keep=1))  # type: ignore[misc]
        calls[name, "decode"] = lambda model=model: seconds(lambda: model.generate(ids[:, :16], **greedy))  # type: ignore[misc]
    rows = Recorder("demo_speed", write=given.write)
    with torch.inference_mode():
        reference = models["stock"](ids).logits.float()
        for (name, phase), taken in alternate(calls, given.rounds).items():
            error = (models[name](ids).logits.float() - reference).abs().max() / reference.abs().max()
            tokens = ids.shape[1] if phase == "prefill" else given.new
            rates = percentiles([tokens / each for each in taken], "tokens_s", 1)
            rows.add({"provider": name, "phase": phase, "tokens": tokens, **rates, "max_rel_error": f"{float(error):.1e}"})


if __name__ == "__main__":
    main()
