"""Does drafting with fewer experts pay? The acceptance rate, the cost of a round, and the speed compared with plain decoding.

    python benchmarks/speculative.py acceptance speed long lossy shapes

- acceptance: the share of accepted tokens by number of drafting experts and position in the draft, when the bundled model continues
  held-out text of the kind it was trained on.
- speed: decoded tokens/s of draft configurations and of plain decoding, interleaved in one run. A draft of n tokens pays if the tokens per
  round exceed `needed = (n * draft_ms + verify_ms(n)) / plain_ms`; rows have both figures.
- long: the same over long answers, plain and with the schedule that stops drafting where it does not pay.
- lossy: the speed and the quality of the adaptive mode.
- shapes: `needed` for one layer of Qwen3-30B-A3B's shapes in CPU memory, beside the n + 1 tokens per round of a draft that is always
  accepted; weights and routing are random, so only costs are measured. Also `needed` by the bytes that are read, `(n * (c0 + r * g) + c0 +
  U * g) / (c0 + K * g)`, where g is the bytes of one expert, c0 those of everything else, and U the number of distinct experts of n + 1
  tokens, `E * (1 - (1 - K / E) ** (n + 1))`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from record import percentiles, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.draft import DraftSettings
from moegraft.operators.speculative.rollback import CacheMark

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"
HELD_OUT = 9 / 10  # the demo model was trained on the text before
PROMPT_TOKENS, NEW_TOKENS, LONG_TOKENS = 48, 128, 900
TIMED_ROUNDS = 50  # the first of each length prepare programs and take many times as long; of fewer rounds no time is reported
Providers = Mapping[str, Mapping[str, object] | None]  # None for plain decoding
SPEED_PROVIDERS: Providers = {
    "plain": None,
    "1 expert, 1 token": {"draft_top_k": 1, "max_draft": 1, "schedule": "fixed"},
    "1 expert, 3 tokens": {"draft_top_k": 1, "max_draft": 3, "schedule": "fixed"},
    "2 experts, 3 tokens": {"draft_top_k": 2, "max_draft": 3, "schedule": "fixed"},
    "2 experts, marginal": {"draft_top_k": 2, "max_draft": 5, "schedule": "marginal"},
    "ngram, 3 tokens": {"draft": "ngram", "max_draft": 3, "schedule": "fixed"},
    "ngram, marginal": {"draft": "ngram", "max_draft": 5, "schedule": "marginal"},
}
LOSSY_PROVIDERS: Providers = {
    "plain": None,
    "lossless": {"mode": "lossless"},
    "tolerance 0.3, confidence 0.3": {"mode": "adaptive", "tolerance": 0.3, "confidence": 0.3},
    "tolerance 0.3": {"mode": "adaptive", "tolerance": 0.3},
    "tolerance 0.6": {"mode": "adaptive", "tolerance": 0.6},
}
MEASURED = ("tokens_per_round", "needed", "draft_step_ms", "verify_ms", "drafted_share")
Row = dict[str, object]


def prompts(count: int) -> list[torch.Tensor]:
    """Return evenly spaced pieces of the held-out text, each (1, PROMPT_TOKENS)."""
    text = TEXT.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(demo_path(), model_max_length=len(text))(text[int(len(text) * HELD_OUT) :])["input_ids"]
    step = (len(ids) - PROMPT_TOKENS) // count
    return [torch.tensor([ids[start : start + PROMPT_TOKENS]]) for start in range(0, step * count, step)]


def clock() -> float:
    """Return the time in seconds; CPU time if there is one thread, which other processes hardly affect."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def load(
    model: str | Path | PreTrainedModel, options: Mapping[str, object] | None, *, int4: bool = False, dtype: str | None = None
) -> PreTrainedModel:
    """Load the model with its experts on the CPU and, with `options`, a draft; `int4` for experts and attention in 4 bits."""
    lines = ["version: 1", "extends: cpu", f"vars: {{weights: {'int4' if int4 else 'stored'}}}"]
    if options is not None:
        kwargs = ", ".join(f"{name}: {value}" for name, value in options.items())
        lines += ["rules:", "- match: {kind: model}", f"  replace: {{class: speculative_draft, kwargs: {{{kwargs}}}}}"]
        if int4:
            lines += ["- match: {kind: linear, name: self_attn}", "  replace: {class: quantized_linear, kwargs: {weights: int4}}"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        loaded = optimize_and_load(model, file.name, dtype=dtype, threads=torch.get_num_threads(), progress=False)
    if operator_of(loaded) is not None:
        operator_of(loaded).clock = clock
    return loaded


def generate(model: PreTrainedModel, ids: torch.Tensor, seed: int | None = None, new_tokens: int = NEW_TOKENS) -> torch.Tensor:
    """Generate text, greedy or sampled with a seed."""
    if seed is not None:
        torch.manual_seed(seed)
    arguments: dict[str, Any] = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": seed is not None}
    found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return found


def operator_of(model: PreTrainedModel) -> Any:
    return model.moegraft.model_operator


def acceptance(count: int) -> list[Row]:
    """Return acceptance by number of drafting experts, greedy and sampled, for positions 1 to 5."""
    experts = AutoModelForCausalLM.from_pretrained(demo_path()).config.num_experts_per_tok
    rows: list[Row] = []
    for top_k in range(1, experts):
        for sampled in (False, True):
            model = load(demo_path(), {"draft_top_k": top_k, "max_draft": 5, "schedule": "fixed"})
            for number, ids in enumerate(prompts(count)):
                generate(model, ids, seed=number if sampled else None)
            found = operator_of(model).statistics()
            positions = {f"position_{at + 1}": round(share, 3) for at, share in enumerate(found["acceptance_by_position"])}
            way = {"draft_top_k": top_k, "of": experts, "decoding": "sampled" if sampled else "greedy"}
            rows.append({**way, **positions, "tokens_per_round": round(found["tokens_per_round"], 3), "rounds": found["rounds"]})
            print(rows[-1], flush=True)
    return rows


def check_lossless(providers: Providers) -> None:
    """Check that lossless providers generate the greedy text of plain decoding in float32.

    Raises:
        AssertionError: the texts differ.
    """
    ids = prompts(1)[0]
    expected = generate(load(demo_path(), None, dtype="float32"), ids)
    for name, options in providers.items():
        if options is not None and options.get("mode") != "adaptive":
            assert torch.equal(generate(load(demo_path(), options, dtype="float32"), ids), expected), f"{name} changed the text"


def timed(
    providers: Providers, count: int, rounds: int, new_tokens: int = NEW_TOKENS
) -> tuple[dict[str, PreTrainedModel], dict[str, list[float]]]:
    """Return tokens/s of each provider by round and prompt, interleaved; text is sampled, since the model's greedy text repeats itself."""
    check_lossless(providers)
    models = {name: load(demo_path(), options) for name, options in providers.items()}
    texts = prompts(count)
    for model in models.values():
        generate(model, texts[0], seed=0)
    rates: dict[str, list[float]] = {name: [] for name in models}
    for round_number in range(rounds):
        for ids in texts:
            for name, model in models.items():
                start = clock()
                generate(model, ids, round_number, new_tokens)
                rates[name].append(new_tokens / (clock() - start))
    return models, rates


def speed(providers: Providers, count: int, rounds: int, new_tokens: int = NEW_TOKENS) -> list[Row]:
    models, rates = timed(providers, count, rounds, new_tokens)
    plain_ms = 1000 / statistics.median(rates["plain"])
    rows: list[Row] = []
    for name, model in models.items():
        against = [one / plain for one, plain in zip(rates[name], rates["plain"], strict=True)]
        row: Row = {"provider": name, "new_tokens": new_tokens, **percentiles(rates[name], "tokens_s", 1)}
        row |= {"against_plain": round(statistics.median(against), 3), "plain_ms": round(plain_ms, 3)}
        row |= dict.fromkeys(MEASURED, "")
        found = operator_of(model).statistics() if operator_of(model) is not None else {"rounds": 0}
        if found["rounds"]:
            row |= {"tokens_per_round": round(found["tokens_per_round"], 3)}
            row |= {"drafted_share": round(found["round_tokens"] / (found["round_tokens"] + found["plain_tokens"]), 3)}
        if found["rounds"] >= TIMED_ROUNDS:
            per_round = (found["draft_ms"] + found["verify_ms"]) / found["rounds"]
            row |= {"needed": round(per_round / plain_ms, 3)}
            row |= {"draft_step_ms": round(found["draft_ms"] / found["drafted_tokens"], 3)}
            row |= {"verify_ms": round(found["verify_ms"] / found["rounds"], 3)}
        rows.append(row)
        print(row, flush=True)
    return rows


def lossy(count: int, rounds: int) -> list[Row]:
    base = {"draft_top_k": 2, "max_draft": 3, "schedule": "fixed"}
    providers = {name: None if options is None else {**base, **options} for name, options in LOSSY_PROVIDERS.items()}
    models, rates = timed(providers, count, rounds)
    reference = [generate(models["plain"], ids) for ids in prompts(count)]
    rows: list[Row] = []
    for name, model in models.items():
        texts = [generate(model, ids) for ids in prompts(count)]
        same = [float((text == other)[0, PROMPT_TOKENS:].float().mean()) for text, other in zip(texts, reference, strict=True)]
        against = [one / plain for one, plain in zip(rates[name], rates["plain"], strict=True)]
        found = operator_of(model).statistics() if operator_of(model) is not None else {}
        row: Row = {"provider": name, **percentiles(rates[name], "tokens_s", 1), "against_plain": round(statistics.median(against), 3)}
        row |= {"tokens_per_round": _rounded(found.get("tokens_per_round")), "agreement": _rounded(found.get("agreement"))}
        row |= {"same_tokens_as_plain": round(statistics.mean(same), 3), "perplexity": round(perplexity(models["plain"], texts), 3)}
        rows.append(row)
        print(row, flush=True)
    return rows


def _rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 3)


@torch.inference_mode()
def perplexity(model: PreTrainedModel, texts: list[torch.Tensor]) -> float:
    """Return the perplexity of the continuations under the full model."""
    losses = []
    for text in texts:
        log_p = model(text).logits[0, PROMPT_TOKENS - 1 : -1].float().log_softmax(-1)
        losses.append(-log_p.gather(1, text[0, PROMPT_TOKENS:, None]).mean())
    return float(torch.stack(losses).mean().exp())


@torch.inference_mode()
def shapes(rounds: int) -> list[Row]:
    """Return the times of a draft step with r experts and of verifying n tokens, in plain steps, for a layer of Qwen3-30B-A3B's shapes."""
    config = Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=1024,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=768,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stock = empty.to_empty(device="cpu").eval()
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config)
    rows: list[Row] = []
    model = load(stock, {"draft_top_k": 1}, int4=True)
    held = {swap.module: swap.footprint.total_bytes for swap in model.moegraft.plan.swaps}
    expert_bytes = next(size for path, size in held.items() if path.endswith(".experts")) / 128
    rest_bytes = sum(size for path, size in held.items() if not path.endswith(".experts"))
    switch = model.moegraft.context.draft_switch
    cache = model(input_ids=torch.arange(64)[None], use_cache=True).past_key_values

    def step(tokens: int) -> Callable[[], object]:
        def run() -> None:
            mark = CacheMark(cache)
            with torch.no_grad():
                model(input_ids=torch.randint(1024, (1, tokens)), past_key_values=cache, use_cache=True)
            mark.rewind(keep=1)  # a program is made of two steps at other positions

        return run

    actions = {("verify", tokens): step(tokens) for tokens in range(1, 7)} | {("draft", top_k): step(1) for top_k in (1, 2, 4)}
    times: dict[tuple[str, int], list[float]] = {action: [] for action in actions}
    for _ in range(rounds):
        for (kind, number), run in actions.items():
            with switch.drafting(DraftSettings(number)) if kind == "draft" else nullcontext():
                start = clock()
                run()
                times[kind, number].append((clock() - start) * 1e3)
    ms = {action: statistics.median(taken) for action, taken in times.items()}
    for top_k in (1, 2, 4):
        for length in (1, 2, 3, 5):
            needed = (length * ms["draft", top_k] + ms["verify", length + 1]) / ms["verify", 1]
            row: Row = {"shape": "1 layer of Qwen3-30B-A3B, int4", "draft_top_k": top_k, "max_draft": length}
            row |= {"plain_ms": round(ms["verify", 1], 3), "draft_step_ms": round(ms["draft", top_k], 3)}
            row |= {"verify_ms": round(ms["verify", length + 1], 3), "needed": round(needed, 3)}
            row |= {"needed_by_bytes": round(_needed_by_bytes(length, top_k, rest_bytes, expert_bytes), 3)}
            row |= {"best_gain": round((length + 1) / needed, 3)}
            rows.append(row)
            print(rows[-1], flush=True)
    return rows


def _needed_by_bytes(length: int, top_k: int, rest: float, expert: float, experts: int = 128, chosen: int = 8) -> float:
    union = experts * (1 - (1 - chosen / experts) ** (length + 1))
    return (length * (rest + top_k * expert) + rest + union * expert) / (rest + chosen * expert)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("acceptance", "speed", "long", "lossy", "shapes"))
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="use 1 on a shared machine, for CPU time")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for part in arguments.parts:
        match part:
            case "acceptance":
                rows = acceptance(4 * arguments.prompts)
            case "speed":
                rows = speed(SPEED_PROVIDERS, arguments.prompts, arguments.rounds)
            case "long":
                providers = {name: options for name, options in SPEED_PROVIDERS.items() if name == "plain" or "marginal" in name}
                rows = speed(providers, arguments.prompts, arguments.rounds, LONG_TOKENS)
            case "lossy":
                rows = lossy(arguments.prompts, arguments.rounds)
            case _:
                rows = shapes(20 * arguments.rounds)
        timing = {"threads": arguments.threads, "clock": "CPU time" if arguments.threads == 1 else "wall"}
        print(write_rows(f"speculative_{part}", [{**row, **timing} for row in rows]))


if __name__ == "__main__":
    main()
