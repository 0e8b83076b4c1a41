"""What makes a draft token acceptable, and does drafting pay where all experts are in memory? The bundled model.

    python benchmarks/speculative.py rounds mtp foresight speed

- rounds (`results/speculative_drafts.csv` and `.png`, `speculative_confidence.csv`): the model continues held-out text greedily with
  several draft configurations. Columns are acceptance by position and by the draft's confidence, the mean share of the router's weight
  that the drafting experts have, and the share of a verification's experts that the draft's routers had chosen for the same token
  (`recall`, without the first layer).
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness.models import injected
from harness.plots import curve, grouped, panels, save
from harness.record import Recorder, parser, read_rows
from harness.rounds import alternate, clock, median_ratio, percentiles, seconds
from harness.texts import held_out, pieces
from transformers import AutoConfig, PreTrainedModel

from moegraft.injection.demo import demo_path
from moegraft.operators.decode.mtp import MtpStreams
from moegraft.operators.decode.schedule import Round
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.routing_trace import RoutedCall, watch_routing

MAX_DRAFT = 8
PROMPT_TOKENS, NEW_TOKENS = 48, 128
MTP_DRAFT = 4
FORESIGHT_TOKENS = 1024  # the bundled model's context
PARTS = ("rounds", "mtp", "foresight", "speed")
EXACT = "extends: cpu-exact\n"  # in int8, values of a pass over several tokens are rounded otherwise on some CPUs, and text may change
TOLERANCE = 0.3
BINS = 10
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


@dataclass(frozen=True, slots=True)
class Way:
    """One configuration of drafts."""

    top_k: int
    tolerance: float = 0.0

    def rules(self) -> str:
        draft: dict[str, object] = {"draft_top_k": self.top_k, "max_draft": MAX_DRAFT, "schedule": "fixed"}
        if self.tolerance:
            draft |= {"mode": "adaptive", "tolerance": self.tolerance}
        return f"rules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts}}\n{draft_rule(draft)}"

    def named(self) -> Row:
        """Return the configuration as columns of a row."""
        return {"draft_top_k": self.top_k, "tolerance": self.tolerance}


def draft_rule(options: Mapping[str, object]) -> str:
    kwargs = ", ".join(f"{name}: {value}" for name, value in options.items())
    return f"- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{{kwargs}}}}}\n"


@dataclass(slots=True)
class Rounds:
    """The recorded rounds.

    Attributes:
        kept: the router's weight of a draft token's experts over the weight of those it chose, for every call of a layer.
        recall: share of a verification's experts that the draft's routers had chosen for the same token, by layer.
    """

    rounds: list[Round] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    recall: dict[int, list[float]] = field(default_factory=dict)

    @property
    def kept_share(self) -> float:
        return statistics.mean(self.kept)

    def row(self) -> Row:
        """Return the mean figures, and the acceptance by position."""
        later = [statistics.mean(each) for layer, each in self.recall.items() if layer]
        found: Row = {"kept_share": round(self.kept_share, 3), "recall": round(statistics.mean(later), 3)}
        found |= {"tokens_per_round": round(statistics.mean(done.generated for done in self.rounds), 3)}
        for at in range(MAX_DRAFT):
            judged = sum(at < done.compared for done in self.rounds)
            found[f"position_{at + 1}"] = round(sum(at < done.accepted for done in self.rounds) / judged, 3) if judged else ""
        return {**found, "rounds": len(self.rounds)}

    def judged(self) -> list[tuple[float, bool]]:
        """Return the draft's confidence in each judged token, and whether it was accepted."""
        return [(done.confidences[at], at < done.accepted) for done in self.rounds for at in range(done.compared)]


class _Watch:
    """Records every layer's routing before and after it is reduced for a draft."""

    def __init__(self, model: PreTrainedModel, found: Rounds) -> None:
        self._found = found
        self._switch = model.moegraft.context.draft_switch
        self._drafted: dict[int, list[torch.Tensor]] = {}
        for number, operator in enumerate(module for module in model.modules() if isinstance(module, HybridExperts)):
            self._look(operator, number)

    def _look(self, operator: HybridExperts, number: int) -> None:
        def watch(module: object, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            _, top_k_index, top_k_weights = inputs
            settings = self._switch.settings
            if settings is not None:
                index, _ = self._switch.narrow(top_k_index, top_k_weights)
                self._found.kept.append(float(top_k_weights[index >= 0].sum() / top_k_weights.sum()))
                self._drafted.setdefault(number, []).append(top_k_index[0].clone())
            else:
                self._compare(number, top_k_index)

        operator.register_forward_pre_hook(watch)

    def _compare(self, number: int, chosen: torch.Tensor) -> None:
        drafted = self._drafted.pop(number, [])
        if len(drafted) == len(chosen) - 1:
            pairs = zip(drafted, chosen, strict=False)  # the last token fed was not fed to the draft
            self._found.recall.setdefault(number, []).extend(float(torch.isin(real, named).float().mean()) for named, real in pairs)


def generate(model: PreTrainedModel, ids: torch.Tensor, seed: int | None = None, new_tokens: int = NEW_TOKENS) -> torch.Tensor:
    """Generate text, greedy or sampled with a seed."""
    if seed is not None:
        torch.manual_seed(seed)
    arguments: dict[str, Any] = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": seed is not None}
    found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return found


def draft_rounds(way: Way, prompts: Sequence[torch.Tensor], new_tokens: int) -> Rounds:
    """Continue each prompt (1, P) by `new_tokens` tokens, and return the recorded rounds."""
    loaded, found = injected(demo_path(), way.rules(), threads=torch.get_num_threads()), Rounds()
    schedule: Any = loaded.moegraft.model_operator._schedule
    record = schedule.record

    def kept(done: Round) -> None:
        record(done)
        if done.confidences:
            found.rounds.append(done)

    schedule.record = kept
    _Watch(loaded, found)
    for ids in prompts:
        generate(loaded, ids, None, new_tokens)
    return found


def ways(experts: int) -> Iterator[Way]:
    for top_k in range(1, experts):
        yield from (Way(top_k), Way(top_k, tolerance=TOLERANCE))


def rounds(prompts: Sequence[torch.Tensor], new_tokens: int, *, write: bool) -> None:
    by_way, by_confidence = (Recorder(name, write=write) for name in ("speculative_drafts", "speculative_confidence"))
    for way in ways(AutoConfig.from_pretrained(demo_path()).num_experts_per_tok):
        found = draft_rounds(way, prompts, new_tokens)
        by_way.add({**way.named(), **found.row()})
        for number in range(BINS):
            stood = [each for confidence, each in found.judged() if min(int(confidence * BINS), BINS - 1) == number]
            bounds = {"confidence_from": number / BINS, "confidence_to": (number + 1) / BINS, "judged": len(stood), "accepted": sum(stood)}
            by_confidence.add({**way.named(), "kept_share": round(found.kept_share, 3), **bounds})
    if write:
        plot()


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


def label(row: Mapping[str, str]) -> str:
    return f"{row['draft_top_k']} experts{', adaptive' if float(row['tolerance']) else ''}"


def plot() -> None:
    """Plot the acceptance of greedy drafts by position and by confidence."""
    figure, ((by_position, by_confidence),) = panels(1, 2, (5.6, 4.2))
    ways, judged = read_rows("speculative_drafts"), read_rows("speculative_confidence")
    for row in ways:
        shares = [{"at": at + 1, "share": row[f"position_{at + 1}"] or "nan"} for at in range(MAX_DRAFT)]
        curve(by_position, shares, "at", "share", "--o" if float(row["tolerance"]) else "-o", label(row))
    by_position.set(title="Drafted tokens that stand, by position (greedy)", xlabel="position in the draft", ylim=(0, 1.02))
    for name, rows in grouped((row for row in judged if not float(row["tolerance"]) and int(row["judged"]) >= 10), label).items():
        x = [float(row["confidence_from"]) + 0.5 / BINS for row in rows]
        by_confidence.plot(x, [int(row["accepted"]) / int(row["judged"]) for row in rows], "-o", markersize=3, label=name)
    by_confidence.set(title="... by the draft's confidence", xlabel="q of the drafted token", ylim=(0, 1.02))
    for axes in (by_position, by_confidence):
        axes.legend(fontsize=6)
    save(figure, "speculative_drafts", dpi=110)


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("parts", nargs="+", choices=PARTS)
    options.add_argument("--prompts", type=int, default=12)
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="use 1 on a shared machine, for CPU time")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    prompts = pieces(held_out(), given.prompts, PROMPT_TOKENS)
    for part in given.parts:
        if part == "rounds":
            rounds(prompts, NEW_TOKENS, write=given.write)
            continue
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
