"""What makes a draft token acceptable, and does drafting pay? The method's observations (SS-MoE, Figure 2) on a checkpoint, and speed.

    python benchmarks/speculative.py rounds quality tasks sparsity mtp plot --text talk=questions.txt --text prose=essay.txt
    python benchmarks/speculative.py speed
    python benchmarks/speculative.py mtp-speed budget --rounds 10

- rounds (`results/speculative_drafts.csv`, `speculative_confidence.csv`): the model continues held-out text with many draft configurations.
  Columns are acceptance by position and by the draft's confidence, the mean share of the router's weight that the drafting experts have,
  and the share of a verification's experts that the draft's routers had chosen for the same token (`recall`, without the first layer).
- quality (`speculative_quality.csv`): perplexity of held-out text with r experts per token, and the share of the router's weight of the
  first r.
- tasks (`speculative_tasks.csv`): rounds on each given text and on the held-out text. The demo model knows one kind of text; its drafts on
  other texts say little about the tasks.
- sparsity (`speculative_sparsity.csv`): rounds of drafts that leave neurons out, with all experts of a token and with half of them.
  `bytes_share` is the share of the routed experts' bytes that a draft reads: whole gates, and the remaining rows of up and down.
- mtp (`speculative_mtp.csv`): rounds of the bundled model's MTP layer, with the rules `cpu`, in greedy text and with the model's own
  sampling settings, which do not depend on the machine's load; and how many of the greedy texts are those of plain decoding, in
  float32 with the rules `cpu-exact`.
- foresight (`speculative_foresight.csv`): the share of the bundled model's chosen experts that a router names in advance, by layer: on the
  hidden states of 1 to 3 layers before, as prefetching asks it, and on the state that the MTP layer has of the same token.
- speed (`speculative_speed.csv`): decoded tokens/s of the bundled model with draft configurations and without, interleaved. A draft of n
  tokens pays if the tokens per round exceed `needed = (n * draft_ms + verify_ms(n)) / plain_ms`; rows have both figures, and `schedule` is
  what the schedule has settled on.
- mtp-speed (`speculative_mtp_speed.csv`): tokens/s of `draft: mtp` with its measured schedule against plain decoding, alternating, on a
  model of Mellum's shapes with few layers and one MTP layer, without the time of a text of one token, which is the prompt's. Weights are
  random and the acceptance of each token is forced, so the text is not plain's. `predicted` is the best of
  `plain_ms * (1 + a + ... + a^n) / (n * draft_ms + verify_ms(n))` over n, 0 included; its costs are measured before, by fixed drafts of n
  tokens. The text without forced acceptance is compared with plain decoding's first.
- budget (`speculative_budget.csv`): what `expert_budget` costs and gains: perplexity of held-out text by the bundled model in passes of as
  many tokens as a verification has (`quality`), and ms of the verification of MTP drafts on the model of mtp-speed in int4, by rounds
  that alternate (`time`). `experts` is how many different ones the tokens of such a pass have in a layer.
- plot: `speculative_drafts.png` from these files.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.models import injected, random_model
from harness.plots import curve, grouped, panels, save
from harness.record import Recorder, parser, read_rows
from harness.rounds import alternate, clock, median_ratio, percentiles, seconds
from harness.texts import held_out, pieces
from transformers import AutoConfig, MellumConfig, PreTrainedModel

from moegraft.injection.demo import demo_path
from moegraft.operators.decode.drafts import Drafting
from moegraft.operators.decode.mtp import MtpStreams
from moegraft.operators.decode.sampling import AcceptanceRule, DraftToken, Greedy
from moegraft.operators.decode.schedule import FixedSchedule, Round
from moegraft.operators.draft import DraftSettings
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.routing_trace import RoutedCall, watch_routing

MAX_DRAFT = 8
PROMPT_TOKENS, NEW_TOKENS, QUALITY_TOKENS = 48, 128, 256
MTP_DRAFT = 4
FORESIGHT_TOKENS = 1024  # the bundled model's context
PARTS = ("rounds", "quality", "tasks", "sparsity", "mtp", "foresight", "speed", "mtp-speed", "budget", "plot")
EXACT = "extends: cpu-exact\n"  # in int8, values of a pass over several tokens are rounded otherwise on some CPUs, and text may change
TOLERANCE = 0.3
BINS = 10
SPARSITIES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
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
MTP_SPEED_DRAFT, MTP_ACCEPTANCES = 3, (0.7, 0.0)
QUALITY_BUDGETS, TIME_BUDGETS = (None, 12, 10, 8, 6, 4), (None, 24, 20, 16, 12, 8)
MEASURED = ("schedule", "tokens_per_round", "needed", "draft_step_ms", "verify_ms", "drafted_share")
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Way:
    """One configuration of drafts.

    Attributes:
        sparsity: share of neurons that drafts leave out; None for none.
    """

    top_k: int
    tolerance: float = 0.0
    sampled: bool = False
    sparsity: float | None = None

    def rules(self) -> str:
        draft: dict[str, object] = {"draft_top_k": self.top_k, "max_draft": MAX_DRAFT, "schedule": "fixed"}
        if self.tolerance:
            draft |= {"mode": "adaptive", "tolerance": self.tolerance}
        experts = "{}"
        if self.sparsity is not None:
            draft |= {"draft_sparsity": self.sparsity}
            experts = "{sparsity: {target: 0, scope: routed}}"
        return f"rules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {experts}}}\n{draft_rule(draft)}"

    def named(self) -> Row:
        """Return the configuration as columns of a row."""
        return {"draft_top_k": self.top_k, "tolerance": self.tolerance, "decoding": "sampled" if self.sampled else "greedy"}


def draft_rule(options: Mapping[str, object]) -> str:
    kwargs = ", ".join(f"{name}: {value}" for name, value in options.items())
    return f"- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{{kwargs}}}}}\n"


@dataclass(slots=True)
class Rounds:
    """The recorded rounds.

    Attributes:
        kept: the router's weight of a draft token's experts over the weight of those it chose, for every call of a layer.
        recall: share of a verification's experts that the draft's routers had chosen for the same token, by layer.
        left_out: share of neurons that drafts left out, by layer.
    """

    rounds: list[Round] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    recall: dict[int, list[float]] = field(default_factory=dict)
    left_out: list[float] = field(default_factory=list)

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


def draft_rounds(model: str | Path, way: Way, prompts: Sequence[torch.Tensor], new_tokens: int) -> Rounds:
    """Continue each prompt (1, P) by `new_tokens` tokens, and return the recorded rounds."""
    loaded, found = injected(model, way.rules(), threads=torch.get_num_threads()), Rounds()
    schedule: Any = loaded.moegraft.model_operator._schedule
    record = schedule.record

    def kept(done: Round) -> None:
        record(done)
        if done.confidences:
            found.rounds.append(done)

    schedule.record = kept
    _Watch(loaded, found)
    for seed, ids in enumerate(prompts):
        generate(loaded, ids, seed if way.sampled else None, new_tokens)
    if way.sparsity is not None:
        layers: list[Any] = [module for module in loaded.modules() if isinstance(module, HybridExperts)]
        found.left_out = [layer.statistics()["sparsity"]["draft_routed_sparsity"] for layer in layers]
    return found


def ways(experts: int) -> Iterator[Way]:
    for top_k in range(1, experts):
        yield from (Way(top_k), Way(top_k, sampled=True), Way(top_k, tolerance=TOLERANCE))


def rounds(model: str, prompts: Sequence[torch.Tensor], new_tokens: int, *, write: bool) -> None:
    by_way, by_confidence = (Recorder(name, write=write) for name in ("speculative_drafts", "speculative_confidence"))
    for way in ways(AutoConfig.from_pretrained(model).num_experts_per_tok):
        found = draft_rounds(model, way, prompts, new_tokens)
        by_way.add({**way.named(), **found.row()})
        for number in range(BINS):
            stood = [each for confidence, each in found.judged() if min(int(confidence * BINS), BINS - 1) == number]
            bounds = {"confidence_from": number / BINS, "confidence_to": (number + 1) / BINS, "judged": len(stood), "accepted": sum(stood)}
            by_confidence.add({**way.named(), "kept_share": round(found.kept_share, 3), **bounds})


def sparsity(model: str, prompts: Sequence[torch.Tensor], new_tokens: int, rows: Recorder) -> None:
    experts = AutoConfig.from_pretrained(model).num_experts_per_tok
    for top_k in dict.fromkeys((experts, max(1, experts // 2))):
        for share in SPARSITIES:
            for sampled in (False, True):
                way = Way(top_k, sampled=sampled, sparsity=share)
                found = draft_rounds(model, way, prompts, new_tokens)
                left_out = statistics.mean(found.left_out)
                bytes_share = round(top_k / experts * (1 + 2 * (1 - left_out)) / 3, 3)
                about = {"draft_sparsity": share, "left_out": round(left_out, 3), "bytes_share": bytes_share}
                rows.add({**about, **way.named(), **found.row()})


def tasks(model: str, texts: Mapping[str, str], count: int, new_tokens: int, rows: Recorder) -> None:
    top_k = max(1, AutoConfig.from_pretrained(model).num_experts_per_tok // 2)
    for name, text in texts.items():
        for way in (Way(top_k), Way(top_k, tolerance=TOLERANCE)):
            found = draft_rounds(model, way, pieces(text, count, PROMPT_TOKENS, model), new_tokens)
            rows.add({"text": name, **way.named(), **found.row()})


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


@torch.inference_mode()
def quality(model: str, texts: Sequence[torch.Tensor], rows: Recorder) -> None:
    """Record perplexity and kept weight by number of experts per token."""
    loaded = injected(model, EXACT, threads=torch.get_num_threads())
    shares: list[torch.Tensor] = []
    for operator in loaded.moegraft.operators.values():
        operator.register_forward_pre_hook(lambda module, args: shares.append(_cumulative(args[2])))
    for top_k in range(1, AutoConfig.from_pretrained(model).num_experts_per_tok + 1):
        shares.clear()
        with loaded.moegraft.context.draft_switch.drafting(DraftSettings(top_k)):
            losses = [float(loaded(ids, labels=ids).loss) for ids in texts]
        weight = round(float(torch.stack(shares).mean(0)[top_k - 1]), 4)
        found = {"experts": top_k, "perplexity": round(math.exp(statistics.mean(losses)), 3), "weight_share": weight}
        rows.add({**found, "tokens": sum(ids.numel() for ids in texts)})


def _cumulative(top_k_weights: torch.Tensor) -> torch.Tensor:
    """Return the mean share of the first r experts, (K,)."""
    ordered = top_k_weights.float().sort(-1, descending=True).values
    return (ordered.cumsum(-1) / ordered.sum(-1, keepdim=True)).mean(0)


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


class ForcedAcceptance(Greedy):
    """Accept each draft token with the same probability, whatever it is."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = random.Random(seed)

    def accepts(self, draft: DraftToken, scores: torch.Tensor) -> bool:
        return self._random.random() < self._share


@contextmanager
def forced_acceptance(share: float, seed: int) -> Iterator[None]:
    begin = Drafting.begin

    def forced(self: Drafting, *args: Any) -> AcceptanceRule:
        begin(self, *args)
        return ForcedAcceptance(share, seed)

    Drafting.begin = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        Drafting.begin = begin  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Measured ms of a plain step, of a draft by its tokens, and of their verification."""

    plain_ms: float
    draft_ms: Mapping[int, float]
    verify_ms: Mapping[int, float]

    def best(self, acceptance: float) -> tuple[float, int]:
        """Return the best speed relative to plain decoding that any length gives, and that length."""
        rounds = {
            tokens: self.plain_ms * sum(acceptance**at for at in range(tokens + 1)) / (self.draft_ms[tokens] + self.verify_ms[tokens])
            for tokens in self.draft_ms
        }
        return max((1.0, 0), *((ratio, tokens) for tokens, ratio in rounds.items()))


def round_costs(model: PreTrainedModel, plain_ms: float, ids: torch.Tensor, acceptance: float, new_tokens: int) -> RoundCosts:
    """Measure rounds of each number of drafted tokens, after a text of each that prepares programs."""
    operator: Any = model.moegraft.model_operator
    kept, draft_ms, verify_ms = operator._schedule, {}, {}
    for tokens in range(1, MTP_SPEED_DRAFT + 1):
        operator._schedule = Recorded(tokens)
        for seed in range(2):
            with forced_acceptance(acceptance, seed):
                operator._schedule.rounds.clear()
                generate(model, ids, new_tokens=new_tokens)
        timed = [done for done in operator._schedule.rounds if len(done.confidences) == tokens and not done.prepared]
        draft_ms[tokens] = statistics.median(done.draft_ms for done in timed)
        verify_ms[tokens] = statistics.median(done.verify_ms for done in timed)
    operator._schedule = kept
    return RoundCosts(plain_ms, draft_ms, verify_ms)


class Recorded(FixedSchedule):
    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.rounds: list[Round] = []

    def record(self, done: Round) -> None:
        self.rounds.append(done)


def mtp_model(layers: int, weights: str = "int8") -> tuple[PreTrainedModel, torch.Tensor]:
    """Return a random model of Mellum's shapes that drafts with its MTP layer, and a prompt."""
    config = MellumConfig(num_hidden_layers=layers, num_mtp_layers=1, mtp_layer_types=["full_attention"], dtype=torch.bfloat16)
    draft = draft_rule({"draft": "mtp", "max_draft": MTP_SPEED_DRAFT, "confidence": 0})
    model = injected(
        random_model(config, mtp=True), f"extends: cpu\nvars: {{weights: {weights}}}\nrules:\n{draft}", threads=torch.get_num_threads()
    )
    model.moegraft.model_operator.clock = clock
    return model, torch.randint(20, config.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))


def budget(layers: int, new_tokens: int, rounds: int, texts: Sequence[torch.Tensor], rows: Recorder) -> None:
    """Record the quality and the time of verifications with a limited number of experts per layer."""
    loaded = injected(demo_path(), EXACT, threads=torch.get_num_threads())
    switch, counts = loaded.moegraft.context.draft_switch, list[int]()

    def count(module: object, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        index, _ = switch.narrow(*inputs[1:])
        counts.append(len(index[index >= 0].unique()))

    for layer in loaded.moegraft.operators.values():
        if isinstance(layer, HybridExperts):
            layer.register_forward_pre_hook(count)
    for experts in QUALITY_BUDGETS:
        counts.clear()
        loss = statistics.mean(_passes_loss(loaded, ids, experts) for ids in texts)
        found: Row = {"figure": "quality", "budget": experts or "all", "pass_tokens": MAX_DRAFT + 1}
        found |= {"experts": round(statistics.mean(counts), 2), "perplexity": round(math.exp(loss), 3)}
        rows.add({**found, "tokens": sum(ids.numel() for ids in texts)})
    model, ids = mtp_model(layers, "int4")
    operator: Any = model.moegraft.model_operator
    lossless, taken = operator.options, dict[int | None, list[float]]()
    operator._schedule = Recorded(MTP_SPEED_DRAFT)
    for number in range(rounds + 1):
        for experts in TIME_BUDGETS:
            operator.options = lossless if experts is None else replace(lossless, mode="adaptive", expert_budget=experts)
            operator._schedule.rounds.clear()
            with forced_acceptance(MTP_ACCEPTANCES[0], number):
                generate(model, ids, new_tokens=new_tokens)
            whole = [done for done in operator._schedule.rounds if len(done.confidences) == MTP_SPEED_DRAFT and not done.prepared]
            if number:  # the first round prepares programs
                taken.setdefault(experts, []).append(statistics.median(done.verify_ms for done in whole))
    for experts, figures in taken.items():
        row: Row = {
            "figure": "time",
            "budget": experts or "all",
            "pass_tokens": MTP_SPEED_DRAFT + 1,
            **percentiles(figures, "verify_ms", 3),
        }
        row |= {"of_all": round(median_ratio(figures, taken[None]), 3), "layers": layers, "rounds": rounds}
        rows.add({**row, "threads": torch.get_num_threads()})


def _passes_loss(model: PreTrainedModel, ids: torch.Tensor, experts: int | None) -> float:
    """Return the cross-entropy of a text (1, T) in passes of a verification's tokens."""
    call: Any = model
    logits, cache = [], None
    with torch.inference_mode(), model.moegraft.context.draft_switch.drafting(DraftSettings(budget=experts)):
        for part in ids.split(MAX_DRAFT + 1, dim=1):
            output = call(input_ids=part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
    return float(torch.nn.functional.cross_entropy(torch.cat(logits, 1)[0, :-1].float(), ids[0, 1:]))


def mtp_speed(layers: int, new_tokens: int, rounds: int, rows: Recorder) -> None:
    """Record the speed of MTP drafts for each forced acceptance.

    Raises:
        AssertionError: drafts change the text.
    """
    model, ids = mtp_model(layers)
    operator, stock, replay = model.moegraft.model_operator, type(model).__mro__[2], model.moegraft.context.replay
    wanted = {"attention_mask": torch.ones_like(ids), "do_sample": False}

    def plain(count: int = new_tokens) -> torch.Tensor:
        stock_generate = partial(stock.generate, model)  # type: ignore[attr-defined] # only generating classes have it
        found: torch.Tensor = replay.generate(model, stock_generate, (ids,), wanted | {"min_new_tokens": count, "max_new_tokens": count})
        return found

    def rate(decode: Callable[[int], object]) -> float:
        return (new_tokens - 1) / (seconds(lambda: decode(new_tokens), clock) - seconds(lambda: decode(1), clock))

    assert torch.equal(generate(model, ids, new_tokens=new_tokens), plain()), "drafts change the text"
    for acceptance in MTP_ACCEPTANCES:
        costs = round_costs(model, 1e3 / max(rate(plain) for _ in range(3)), ids, acceptance, new_tokens)
        predicted, best = costs.best(acceptance)
        operator._schedule = operator._new_schedule()
        before = operator.statistics()
        seed = itertools.count()

        def drafted() -> float:
            with forced_acceptance(acceptance, next(seed)):  # noqa: B023
                return rate(lambda count: generate(model, ids, new_tokens=count))

        taken = alternate({"plain": lambda: rate(plain), "mtp": drafted}, rounds)
        found = operator.statistics()
        with_drafts, without = (found[name] - before[name] for name in ("round_tokens", "plain_tokens"))
        row: Row = {"layers": layers, "acceptance": acceptance, "new_tokens": new_tokens, "predicted": round(predicted, 3), "best": best}
        row |= {"against_plain": round(median_ratio(taken["mtp"], taken["plain"]), 3), "plain_ms": round(costs.plain_ms, 3)}
        row |= {f"draft_{tokens}_ms": round(each, 3) for tokens, each in costs.draft_ms.items()}
        row |= {f"verify_{tokens}_ms": round(each, 3) for tokens, each in costs.verify_ms.items()}
        row |= {f"{name}_{key}": each for name, rates in taken.items() for key, each in percentiles(rates, "tokens_s", 2).items()}
        row |= {"drafted_share": round(with_drafts / (with_drafts + without), 3)}
        rows.add({**row, "rounds": rounds, "threads": torch.get_num_threads()})


def label(row: Mapping[str, str]) -> str:
    return f"{row['draft_top_k']} experts{', adaptive' if float(row['tolerance']) else ''}"


def plot() -> None:
    figure, ((by_position, by_confidence, by_bytes), (by_experts, by_text, unused)) = panels(2, 3, (5.6, 4.2))
    unused.axis("off")
    names = ("drafts", "confidence", "sparsity", "quality", "tasks")
    ways, judged, sparse, quality, texts = (read_rows(f"speculative_{name}") for name in names)
    ways, judged, sparse = ([row for row in rows if row["decoding"] == "greedy"] for rows in (ways, judged, sparse))
    for row in ways:
        shares = [{"at": at + 1, "share": row[f"position_{at + 1}"] or "nan"} for at in range(MAX_DRAFT)]
        curve(by_position, shares, "at", "share", "--o" if float(row["tolerance"]) else "-o", label(row))
    by_position.set(title="Drafted tokens that stand, by position (greedy)", xlabel="position in the draft", ylim=(0, 1.02))
    for name, rows in grouped((row for row in judged if not float(row["tolerance"]) and int(row["judged"]) >= 10), label).items():
        x = [float(row["confidence_from"]) + 0.5 / BINS for row in rows]
        by_confidence.plot(x, [int(row["accepted"]) / int(row["judged"]) for row in rows], "-o", markersize=3, label=name)
    by_confidence.set(title="... by the draft's confidence", xlabel="q of the drafted token", ylim=(0, 1.02))
    for top_k, rows in grouped(sparse, lambda row: int(row["draft_top_k"])).items():
        curve(by_bytes, rows, "bytes_share", "tokens_per_round", label=f"{top_k} experts, neurons left out")
        for row in rows:
            by_bytes.annotate(row["draft_sparsity"], (float(row["bytes_share"]), float(row["tokens_per_round"])), fontsize=6)
    whole = max(int(row["draft_top_k"]) for row in sparse)
    fewer = [{**row, "share": int(row["draft_top_k"]) / whole} for row in ways if not float(row["tolerance"])]
    curve(by_bytes, fewer, "share", "tokens_per_round", "-s", "fewer experts, whole", markersize=4)
    by_bytes.set(title=f"Tokens a round of {MAX_DRAFT} drafted (greedy), by what a draft reads", xlabel="share of the experts' bytes")
    curve(by_experts, quality, "experts", "perplexity", label="perplexity", color="tab:red")
    by_experts.set(title="Quality and router weight by experts per token", xlabel="experts per token, r", xticks=range(1, len(quality) + 1))
    by_experts.set_ylabel("perplexity of held-out text", color="tab:red")
    right = by_experts.twinx()
    curve(right, quality, "experts", "weight_share", "-s", color="tab:blue")
    right.set_ylabel("share of the router's weight", color="tab:blue")
    right.set_ylim(0, 1.02)
    for shift, (tolerance, rows) in zip((0, 0.4), grouped(texts, lambda row: row["tolerance"]).items(), strict=True):
        places = [shift + number for number in range(len(rows))]
        by_text.bar(places, [float(row["tokens_per_round"]) for row in rows], 0.38, label=f"tolerance {tolerance}")
        by_text.set_xticks(places, [row["text"] for row in rows])
    by_text.set(title=f"Tokens a round of {MAX_DRAFT} drafted, by text")
    for axes in (by_position, by_confidence, by_bytes, by_experts, by_text):
        axes.legend(fontsize=6)
    save(figure, "speculative_drafts", dpi=110)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("parts", nargs="+", choices=PARTS)
    options.add_argument("--model", default=str(demo_path()))
    options.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="a text for tasks; may be repeated")
    options.add_argument("--prompts", type=int, default=12)
    options.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    options.add_argument("--rounds", type=int, default=3, help="of speed and mtp")
    options.add_argument("--layers", type=int, default=6, help="of mtp, beside the MTP layer")
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="use 1 on a shared machine, for CPU time")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    prompts = pieces(held_out(), given.prompts, PROMPT_TOKENS, given.model)
    for part in given.parts:
        match part:
            case "rounds":
                rounds(given.model, prompts, given.new_tokens, write=given.write)
            case "plot":
                plot()
            case _:
                rows = Recorder(f"speculative_{part.replace('-', '_')}", write=given.write)
        match part:
            case "quality":
                quality(given.model, pieces(held_out(), 2 * given.prompts, QUALITY_TOKENS, given.model), rows)
            case "sparsity":
                sparsity(given.model, prompts, given.new_tokens, rows)
            case "tasks":
                texts = {name: Path(path).read_text(encoding="utf-8") for name, _, path in (each.partition("=") for each in given.text)}
                tasks(given.model, {"held out": held_out(), **texts}, given.prompts, given.new_tokens, rows)
            case "mtp":
                mtp(prompts, given.new_tokens, rows)
            case "foresight":
                foresight(pieces(held_out(), 1, FORESIGHT_TOKENS)[0].flatten(), rows)
            case "speed":
                speed(prompts[: max(1, given.prompts // 3)], given.rounds, rows)
            case "budget":
                texts_of_budget = pieces(held_out(), given.prompts, QUALITY_TOKENS, given.model)
                budget(given.layers, given.new_tokens, given.rounds, texts_of_budget, rows)
            case "mtp-speed":
                mtp_speed(given.layers, given.new_tokens, given.rounds, rows)


if __name__ == "__main__":
    main()
