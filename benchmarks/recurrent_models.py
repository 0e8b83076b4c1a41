"""Do models with recurrent layers run faster than with transformers and llama.cpp, and do a second turn and drafts pay?

    python benchmarks/recurrent_models.py    # a Qwen3-Next- and a Granite-4-H-shaped model; about ten minutes on two cores
    python benchmarks/recurrent_models.py --parts drafts --shapes qwen3-next

Each model has four layers, three of them recurrent, and 64 experts. A checkpoint with random weights is written, and from it a GGUF file in
8 bits; moegraft computes the file as it is stored, and llama.cpp the same file, each in a process of its own. transformers computes the
checkpoint in bfloat16. Providers alternate in each round, and logits are compared first. `ratio` is the median over rounds of moegraft's
rate over the provider's. `second turn` is the time to the first token of a prompt that goes on after one of 4,000 tokens and its answer,
whose last tokens it changes, beside that of computing it again.

`drafts` (`results/recurrent_drafts.csv`) has tokens/s of greedy and of sampled texts with drafts by fewer experts and by n-grams, and their
ratio to decoding without. The greedy texts of random weights repeat themselves, which n-grams predict; of sampled ones hardly a draft is
accepted, and the schedule has to switch drafts off. Greedy texts are equal to plain ones in float32.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.llama_cpp import is_installed
from harness.models import VOCABULARY, injected, random_model
from harness.peers import PeerFailed, PeerProcess
from harness.record import Recorder, parser
from harness.rounds import alternate, median_ratio, percentiles
from harness.whole_models import (
    Opener,
    Phases,
    check_logits,
    decode_rate,
    llama_cpp,
    ours_from_file,
    phases_of,
    prompt_rate,
    random_tokens,
)
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, PreTrainedConfig, Qwen3NextConfig

from moegraft.injection.cli.chat.prompt_cache import PREFILL_CHUNK, PromptCache
from moegraft.injection.cli.moegraft import app
from moegraft.injection.demo import demo_path

OURS, LLAMA, STOCK = "ours", "llama.cpp", "stock"
RULES = "extends: cpu\nrules: []\n"
CONTEXT, NEW = 8, 32  # tokens before and of a decode phase
PROMPTS = (512, 4096)
LIMIT = 0.3  # relative difference of logits: rounding to 8 bits and bfloat16 sends some tokens to other experts
TURN, QUESTION, ANSWER = 4000, 40, 8  # tokens
DRAFT_PROMPT, DRAFT_NEW = 48, 256  # tokens
PLAIN = "plain"
DRAFTS: Mapping[str, str] = {PLAIN: "", "half of the experts": "{draft_top_k: 5}", "n-grams": "{draft: ngram}"}
DRAFT_RULE = "- {{match: {{kind: model}}, replace: {{class: speculative_draft, kwargs: {}}}}}\n"


COMMON: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": VOCABULARY, "dtype": torch.bfloat16}
SHAPES: Mapping[str, PreTrainedConfig] = {
    "qwen3-next": Qwen3NextConfig(
        **{
            **COMMON,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_value_heads": 32,
        },
        **{"num_experts": 64, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True},
        shared_expert_intermediate_size=512,
    ),
    "granite-4-h": GraniteMoeHybridConfig(
        **{**COMMON, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48, "mamba_d_head": 64},
        **{"num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512, "shared_intermediate_size": 1024},
        **{"layer_types": ["mamba", "mamba", "mamba", "attention"], "mamba_d_state": 128, "mamba_n_groups": 1},
    ),
}


@contextmanager
def stock(folder: Path) -> Iterator[Phases]:
    with torch.inference_mode():
        yield phases_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval())


def rates(opened: Mapping[str, Opener], rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row of each phase and provider."""
    check_logits(opened, (CONTEXT,), LIMIT)
    (name, opener), (peer_name, peer_opener) = opened.items()
    with PeerProcess(name, *opener) as ours, PeerProcess(peer_name, *peer_opener) as theirs:
        peers = {name: ours, peer_name: theirs}
        phases: dict[str, tuple[Any, ...]] = {f"decode after {CONTEXT}": (decode_rate, CONTEXT, NEW)}
        phases |= {f"prompt of {tokens}": (prompt_rate, tokens) for tokens in PROMPTS}
        for phase, call in phases.items():
            taken = alternate({each: partial(peer.call, *call) for each, peer in peers.items()}, rounds)
            for each, measured in taken.items():
                ratio = round(median_ratio(taken[OURS], measured), 2)
                yield {"phase": phase, "provider": each, **percentiles(measured, "tokens_s", 1), "ratio": ratio}


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
    exact = {name: text(injected(folder, with_drafts("cpu-exact", name), dtype=torch.float32), None, NEW) for name in DRAFTS}
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


PARTS = ("rates", "turns", "drafts")


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    options.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    given = options.parse_args()
    packages = ("torch", "transformers", "llama-cpp-python")
    measured = {name for name, of in (("recurrent_models", PARTS[:2]), ("recurrent_drafts", PARTS[2:])) if {*of} & {*given.parts}}
    files = {name: Recorder(name, packages, replaces=("shape", "hardware"), write=given.write) for name in sorted(measured)}
    for shape in given.shapes:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            random_model(SHAPES[shape]).save_pretrained(folder)
            for file in demo_path().glob("tokenizer*"):  # a GGUF file has one
                shutil.copy(file, folder)
            command = ["quantize", "--model", temporary, "--weights", "Q8_0", "--out", str(folder / "model.gguf")]
            app(command, standalone_mode=False)
            ours: Opener = (ours_from_file, folder, RULES)
            peers: dict[str, Opener] = {STOCK: (stock, folder)} | ({LLAMA: (llama_cpp, folder)} if is_installed() else {})
            for name, peer in peers.items() if "rates" in given.parts else ():
                try:
                    for row in rates({OURS: ours, name: peer}, given.rounds):
                        files["recurrent_models"].add({"shape": shape, "beside": name, **row})
                except PeerFailed as failed:
                    files["recurrent_models"].add({"shape": shape, "beside": name, "failure": str(failed)})
            for row in second_turn(folder, given.rounds) if "turns" in given.parts else ():
                files["recurrent_models"].add({"shape": shape, **row})
            for row in drafts(folder, given.rounds) if "drafts" in given.parts else ():
                files["recurrent_drafts"].add({"shape": shape, **row})


if __name__ == "__main__":
    main()
