"""Do a second turn and drafts pay in models with recurrent layers? Their rates beside transformers and llama.cpp: `cpu_model.py`.

    python benchmarks/recurrent_models.py    # a Qwen3-Next- and a Granite-4-H-shaped model; about five minutes on two cores
    python benchmarks/recurrent_models.py --parts drafts --shapes qwen3-next

Each model has four layers, three of them recurrent, and 64 experts of random weights in a GGUF file in 8 bits.

- turns (`results/recurrent_models.csv`): the time to the first token of a prompt that goes on after one of 4,000 tokens and its answer,
  whose last tokens it changes, beside that of computing it again.
- drafts (`results/recurrent_drafts.csv`): tokens/s of greedy and of sampled texts with drafts by fewer experts and by n-grams, and their
  ratio to decoding without. The greedy texts of random weights repeat themselves, which n-grams predict; of sampled ones hardly a draft is
  accepted, and the schedule has to switch drafts off. Greedy texts are equal to plain ones in float32.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from harness.checkpoints import write_gguf
from harness.models import config_of, injected, random_model
from harness.record import Recorder, parser
from harness.rounds import alternate, median_ratio, percentiles
from harness.whole_models import random_tokens

from moegraft.injection.cli.chat.prompt_cache import PREFILL_CHUNK, PromptCache

RULES = "extends: cpu\n"
SHAPES = ("qwen3-next", "granite-4-h")
TURN, QUESTION, ANSWER = 4000, 40, 8  # tokens
DRAFT_PROMPT, DRAFT_NEW, CHECKED_NEW = 48, 256, 32  # tokens
PLAIN = "plain"
DRAFTS: Mapping[str, str] = {PLAIN: "", "half of the experts": "{draft_top_k: 5}", "n-grams": "{draft: ngram}"}
DRAFT_RULE = "- {{match: {{kind: model}}, replace: {{class: speculative_draft, kwargs: {}}}}}\n"


@torch.inference_mode()
def second_turn(folder: Path, rounds: int) -> Iterator[dict[str, object]]:
    model: Any = injected(folder, RULES, gguf=folder / "model.gguf")
    ids = random_tokens(model.config.vocab_size).tolist()
    first, second = ids[:TURN], [*ids[: TURN - 4], *ids[-QUESTION:]]

    def answer(cache: PromptCache, prompt: list[int], tokens: int) -> float:
        start = time.perf_counter()
        held, _ = cache.take(prompt)
        held = cache.read_ahead(prompt, held, PREFILL_CHUNK)
        arguments = {"past_key_values": held, "max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True}
        made = model.generate(torch.tensor([prompt]), **arguments)
        cache.keep(made.sequences[0].tolist(), made.past_key_values)
        return time.perf_counter() - start

    def kept() -> float:
        cache = PromptCache(model)
        answer(cache, first, ANSWER)
        return answer(cache, second, 1)

    taken = alternate({"kept": kept, "computed again": lambda: answer(PromptCache(model), second, 1)}, rounds)
    for name, measured in taken.items():
        ratio = round(statistics.median(measured) / statistics.median(taken["computed again"]), 3)
        yield {"phase": "second turn", "provider": name, **percentiles([each * 1e3 for each in measured], "ms", 1), "ratio": ratio}


def with_drafts(rules: str, name: str) -> str:
    """Return rules with a way to draft added."""
    added = DRAFT_RULE.format(DRAFTS[name]) if DRAFTS[name] else ""
    return f"extends: {rules}\nrules:{' []' if not added else ''}\n{added}"


def text(model: Any, seed: int | None, tokens: int) -> torch.Tensor:
    """Return a text, greedy or sampled with a seed."""
    ids = random_tokens(model.config.vocab_size)[None, :DRAFT_PROMPT]
    torch.manual_seed(seed or 0)
    arguments = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": seed is not None}
    made: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return made


def drafts(folder: Path, rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row of each way to draft and kind of text."""
    exact = {name: text(injected(folder, with_drafts("cpu-exact", name), dtype=torch.float32), None, CHECKED_NEW) for name in DRAFTS}
    for name, made in exact.items():
        if not torch.equal(made, exact[PLAIN]):
            raise SystemExit(f"{name}: the greedy text in float32 is another; not measured")
    models: dict[str, Any] = {name: injected(folder, with_drafts("cpu", name), gguf=folder / "model.gguf") for name in DRAFTS}

    def rate(name: str, seed: int | None) -> float:
        start = time.perf_counter()
        text(models[name], seed, DRAFT_NEW)
        return DRAFT_NEW / (time.perf_counter() - start)

    for kind, seed in (("greedy", None), ("sampled", 1)):
        taken = alternate({name: lambda name=name: rate(name, seed) for name in models}, rounds)  # type: ignore[misc]  # noqa: B023
        for name, measured in taken.items():
            ratio = round(median_ratio(measured, taken[PLAIN]), 3)
            yield {"text": kind, "drafts": name, **percentiles(measured, "tokens_s", 1), "ratio": ratio}


PARTS: Mapping[str, tuple[str, Callable[[Path, int], Iterator[dict[str, object]]]]] = {
    "turns": ("recurrent_models", second_turn),
    "drafts": ("recurrent_drafts", drafts),
}


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    options.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    given = options.parse_args()
    files = {part: Recorder(PARTS[part][0], replaces=("shape", "hardware"), write=given.write) for part in given.parts}
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            random_model(config_of(shape, 4)).save_pretrained(folder)
            write_gguf(folder, "Q8_0")
            for part, rows in files.items():
                for row in PARTS[part][1](folder, given.rounds):
                    rows.add({"shape": shape, **row})


if __name__ == "__main__":
    main()
