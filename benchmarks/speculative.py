"""Does drafting pay where all experts are in memory, and what do MTP layers foresee? The bundled model.

    python benchmarks/speculative.py mtp foresight speed

- mtp (`speculative_mtp.csv`): rounds of the model's MTP layer, with the rules `cpu`, in greedy text and with the model's own sampling
  settings; and how many of the greedy texts are those of plain decoding, in float32 with the rules `cpu-exact`.
- foresight (`speculative_foresight.csv`): the share of the chosen experts that a router names in advance, by layer: on the hidden states of
  1 to 3 layers before, as prefetching asks it, and on the state that the MTP layer has of the same token.
- speed (`speculative_speed.csv`): decoded tokens/s with draft configurations and without, interleaved. A draft of n tokens pays if the
  tokens per round exceed `needed = (n * draft_ms + verify_ms(n)) / plain_ms`; rows have both figures, and `schedule` is what the schedule
  has settled on. `moegraft drafts` measures these costs for any model.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from harness.models import injected
from harness.record import Recorder, parser
from harness.rounds import alternate, clock, median_ratio, percentiles, seconds
from harness.texts import held_out, pieces
from transformers import PreTrainedModel

from moegraft.injection.demo import demo_path
from moegraft.operators.decode.mtp import MtpStreams
from moegraft.operators.routing_trace import RoutedCall, watch_routing

PROMPT_TOKENS, NEW_TOKENS = 48, 128
MTP_DRAFT = 4
FORESIGHT_TOKENS = 1024  # the bundled model's context
PARTS = ("mtp", "foresight", "speed")
EXACT = "extends: cpu-exact\n"  # in int8, values of a pass over several tokens are rounded otherwise on some CPUs, and text may change
TIMED_ROUNDS = 50  # the first of each length prepare programs and take many times as long; of fewer rounds no time is reported
SPEED_PROVIDERS: Mapping[str, Mapping[str, object] | None] = {
    "plain": None,
    "1 expert, 1 token": {"draft_top_k": 1, "max_draft": 1, "schedule": "fixed"},
    "1 expert, 3 tokens": {"draft_top_k": 1, "max_draft": 3, "schedule": "fixed"},
    "2 experts, 3 tokens": {"draft_top_k": 2, "max_draft": 3, "schedule": "fixed"},
    "2 experts, marginal": {"draft_top_k": 2, "max_draft": 5, "schedule": "marginal"},
    "ngram, 3 tokens": {"draft": "ngram", "max_draft": 3, "schedule": "fixed"},
    "ngram, marginal": {"draft": "ngram", "max_draft": 5, "schedule": "marginal"},
    "mtp, 1 token": {"draft": "mtp", "max_draft": 1, "schedule": "fixed"},
    "mtp, 2 tokens": {"draft": "mtp", "max_draft": 2, "schedule": "fixed"},
    "mtp, marginal": {"draft": "mtp", "max_draft": 5, "schedule": "marginal"},
}
MEASURED = ("schedule", "tokens_per_round", "needed", "draft_step_ms", "verify_ms", "drafted_share")
Row = dict[str, object]


def draft_rule(options: Mapping[str, object]) -> str:
    kwargs = ", ".join(f"{name}: {value}" for name, value in options.items())
    return f"- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{{kwargs}}}}}\n"


def generate(model: PreTrainedModel, ids: torch.Tensor, seed: int | None = None, new_tokens: int = NEW_TOKENS) -> torch.Tensor:
    """Generate text, greedy or sampled with a seed."""
    if seed is not None:
        torch.manual_seed(seed)
    arguments: dict[str, Any] = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": seed is not None}
    found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return found


def mtp(prompts: Sequence[torch.Tensor], new_tokens: int, rows: Recorder) -> None:
    options = {"draft": "mtp", "max_draft": MTP_DRAFT, "schedule": "fixed"}
    # In int8, values of a pass over several tokens are rounded otherwise now and then: the logits of the rules `cpu` differ by 0.03 then.
    plain, exact = (load(each, EXACT, dtype="float32") for each in (None, options))
    same = sum(torch.equal(generate(plain, ids, None, new_tokens), generate(exact, ids, None, new_tokens)) for ids in prompts)
    for sampled in (False, True):
        model = load(options)
        for seed, ids in enumerate(prompts):
            generate(model, ids, seed if sampled else None, new_tokens)
        found = model.moegraft.model_operator.statistics()
        row: Row = {"decoding": "sampled" if sampled else "greedy", "max_draft": MTP_DRAFT, "prompts": len(prompts)}
        row |= {"new_tokens": new_tokens, "same_text": "" if sampled else same}
        row |= {f"position_{at}": round(share, 3) for at, share in enumerate(found["acceptance_by_position"], 1)}
        rows.add({**row, "tokens_per_round": round(found["tokens_per_round"], 3), "rounds": found["rounds"]})


@torch.inference_mode()
def foresight(text: torch.Tensor, rows: Recorder) -> None:
    """Record the recall of routers that are asked in advance, in one pass over `text` (T,)."""
    model = load({"draft": "mtp"}, EXACT)
    calls: list[RoutedCall] = []
    with watch_routing(model, calls.append):
        states = model(text[None], output_hidden_states=True, use_cache=False).hidden_states[-1]
    of_tokens, _ = MtpStreams(model).feed(0, states[:, :-1], text[1:].tolist(), len(text))  # of the token that follows each state
    for layer, call in enumerate(calls):
        asked = {f"{depth} before": calls[layer - depth].router_input[1:] for depth in (1, 2, 3) if layer >= depth}
        for source, tokens in {**asked, "MTP layer": of_tokens[0]}.items():
            named, chosen = call.router.route(tokens), call.top_k_index[1:]
            recall = float((chosen[:, :, None] == named[:, None, :]).any(-1).float().mean())
            rows.add({"layer": layer, "asked on": source, "tokens": len(tokens), "recall": round(recall, 3)})


def load(options: Mapping[str, object] | None, base: str = "extends: cpu\nvars: {weights: stored}\n", **more: Any) -> PreTrainedModel:
    """Load the bundled model with the rules `cpu`, or others, and, with `options`, a draft."""
    rules = base + ("" if options is None else f"rules:\n{draft_rule(options)}")
    loaded = injected(demo_path(), rules, threads=torch.get_num_threads(), **more)
    if loaded.moegraft.model_operator is not None:
        loaded.moegraft.model_operator.clock = clock
    return loaded


def speed(prompts: Sequence[torch.Tensor], rounds: int, rows: Recorder) -> None:
    """Record each provider's tokens/s. Text is sampled, since the model's greedy text repeats itself.

    Raises:
        AssertionError: a draft changes the greedy text of plain decoding in float32.
    """
    expected = generate(load(None, EXACT, dtype="float32"), prompts[0])
    for name, options in SPEED_PROVIDERS.items():
        if options is not None:
            assert torch.equal(generate(load(options, EXACT, dtype="float32"), prompts[0]), expected), f"{name} changed the text"
    models = {name: load(options) for name, options in SPEED_PROVIDERS.items()}

    def rates(model: PreTrainedModel) -> list[float]:
        return [NEW_TOKENS / seconds(lambda: generate(model, ids, seed), clock) for seed, ids in enumerate(prompts)]  # noqa: B023

    taken = alternate({name: lambda model=model: rates(model) for name, model in models.items()}, rounds)  # type: ignore[misc]
    by_name = {name: [rate for each in found for rate in each] for name, found in taken.items()}
    plain_ms = 1000 / statistics.median(by_name["plain"])
    for name, model in models.items():
        row: Row = {"provider": name, "new_tokens": NEW_TOKENS, **percentiles(by_name[name], "tokens_s", 1)}
        row |= {"against_plain": round(median_ratio(by_name[name], by_name["plain"]), 3), "plain_ms": round(plain_ms, 3)}
        row |= dict.fromkeys(MEASURED, "")
        operator = model.moegraft.model_operator
        found = {"rounds": 0} if operator is None else operator.statistics()
        if found["rounds"]:
            row |= {"schedule": found["schedule"]}
            row |= {"tokens_per_round": round(found["tokens_per_round"], 3)}
            row |= {"drafted_share": round(found["round_tokens"] / (found["round_tokens"] + found["plain_tokens"]), 3)}
        if found["rounds"] >= TIMED_ROUNDS:
            row |= {"needed": round((found["draft_ms"] + found["verify_ms"]) / found["rounds"] / plain_ms, 3)}
            row |= {"draft_step_ms": round(found["draft_ms"] / found["drafted_tokens"], 3)}
            row |= {"verify_ms": round(found["verify_ms"] / found["rounds"], 3)}
        rows.add({**row, "threads": torch.get_num_threads(), "clock": "CPU time" if torch.get_num_threads() == 1 else "wall"})


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("parts", nargs="+", choices=PARTS)
    options.add_argument("--prompts", type=int, default=12)
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="use 1 on a shared machine, for CPU time")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    prompts = pieces(held_out(), given.prompts, PROMPT_TOKENS)
    for part in given.parts:
        rows = Recorder(f"speculative_{part}", write=given.write)
        match part:
            case "mtp":
                mtp(prompts, NEW_TOKENS, rows)
            case "foresight":
                foresight(pieces(held_out(), 1, FORESIGHT_TOKENS)[0].flatten(), rows)
            case "speed":
                speed(prompts[: max(1, given.prompts // 3)], given.rounds, rows)


if __name__ == "__main__":
    main()
