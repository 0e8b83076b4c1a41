"""What drafts cost a loaded model: the time of drafting and of verifying n tokens, and the acceptance at which rounds pay.

Rounds are those of decoding, over a given text: a logits processor replaces each choice, of a draft and of the full model, by the text's
next token, so that every draft is accepted and a verification needs the experts of real text. Rounds of all lengths are interleaved with
plain steps, and times are medians, so that what disturbs a machine for a while disturbs all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from moegraft.operators.context import InjectionContext
from moegraft.operators.decode.drafts import Drafter, Drafting, ExpertsDrafter, NgramDrafter
from moegraft.operators.decode.loop import DecodedSequence, Decoding
from moegraft.operators.decode.mtp import MtpDrafter
from moegraft.operators.decode.mtp_layers import mtp_layers
from moegraft.operators.decode.sampling import AcceptanceRule, DraftToken
from moegraft.operators.draft import DraftSettings
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.schedule import DraftSchedule, Round, Statistics

LONGEST = 7  # tokens of a draft: programs verify up to 8 tokens, one of which was not drafted
PROMPT = 64  # tokens before the first round
CALL_TOKENS = 256  # generated in one call of `generate`, after which the text goes on behind a new prompt
MAX_UNTIMED = 24  # rounds of a length in sequence that prepare programs, after which the length is timed as it is


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """The costs of rounds of one drafter; the entry i of a sequence is of drafts of i + 1 tokens.

    Attributes:
        drafter: its name, as users know it.
        plain_ms: a step without a draft.
        draft_ms, verify_ms: of the whole draft, and of its verification.
    """

    drafter: str
    plain_ms: float
    draft_ms: Sequence[float]
    verify_ms: Sequence[float]

    def gain(self, length: int, acceptance: float) -> float:
        """Return the speed over plain steps, of drafts whose tokens are each accepted with chance `acceptance` after accepted ones."""
        tokens = sum(acceptance**count for count in range(length + 1))
        return tokens * self.plain_ms / (self.draft_ms[length - 1] + self.verify_ms[length - 1])

    def best(self, acceptance: float) -> tuple[int, float]:
        """Return the draft length with the largest gain, and that gain; a length of 0 has a gain of 1."""
        lengths = range(1, len(self.draft_ms) + 1)
        return max([(0, 1.0), *((length, self.gain(length, acceptance)) for length in lengths)], key=lambda found: found[1])

    def needed(self, length: int) -> float | None:
        """Return the acceptance at break-even, to 1e-4; None where drafts of this length lose even if every token is accepted."""
        low, high = 0.0, 1.0
        if self.gain(length, high) < 1:
            return None
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (low, middle) if self.gain(length, middle) >= 1 else (middle, high)
        return high


def measure_draft_costs(
    model: PreTrainedModel,
    context: InjectionContext,
    text: torch.Tensor,  # (T,) int64
    *,
    longest: int = LONGEST,
    rounds: int = 11,
    settings: DraftSettings | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[DraftCosts]:
    """Return the costs of every drafter that a loaded model has: fewer experts, MTP layers and n-grams.

    Args:
        context: the model's own (`model.moegraft.context`).
        text: continued from its beginning where it ends.
        longest: tokens of the longest draft.
        rounds: of each length, of which the median counts.
        settings: how experts draft; None where fewer experts do not.

    Raises:
        UnsupportedModelError: the model's cache keeps rejected tokens, so that nothing is drafted.
    """
    switch = context.draft_switch
    drafters: dict[str, Drafter] = {"ngram": _Lookup()}
    if settings is not None and switch.layers:
        drafters = {f"experts ({settings.top_k} per token)": ExpertsDrafter(switch, settings), **drafters}
    if (layers := mtp_layers(model)) is not None:
        by_layers = MtpDrafter(model, switch, context.replay, context.gpu_engines_in_use)
        drafters = {getattr(layers, "drafter", "mtp"): by_layers, **drafters}
    found = []
    for name, drafter in drafters.items():
        schedule = _Interleaved(longest, rounds)
        reasons: list[str] = []
        drafting = Drafting(
            max_draft=longest,
            drafter=drafter,
            schedule=schedule,
            statistics=Statistics(),
            switch=switch,
            warn_once=reasons.append,
            clock=clock,
        )
        for prompt, forced in _calls(text, longest, schedule):
            if isinstance(drafter, _Lookup):
                drafter.forced = forced
            GenerationMixin.generate(  # not the model's own, which warns of other loops than its own
                model,  # type: ignore[arg-type] # every model that drafts is one
                prompt.to(model.device),
                attention_mask=torch.ones_like(prompt, device=model.device),
                custom_generate=Decoding(context.replay, drafting),
                logits_processor=LogitsProcessorList([forced]),
                do_sample=False,
                max_new_tokens=CALL_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
            if reasons:
                raise UnsupportedModelError(f"no drafts to measure: {reasons[0]}")
        ms = [schedule.taken[length] for length in range(1, longest + 1)]
        draft_ms, verify_ms = ([median(each[part] for each in of_length) for of_length in ms] for part in (0, 1))
        found.append(DraftCosts(name, median(sum(each) for each in schedule.taken[0]), draft_ms, verify_ms))
    return found


def _calls(text: torch.Tensor, longest: int, schedule: _Interleaved) -> Iterator[tuple[torch.Tensor, _Forced]]:
    """Yield prompts (1, P) and what forces the text behind each, until every length is timed."""
    endless = text.repeat(1 + (PROMPT + CALL_TOKENS) // len(text) + 1)
    start = 0
    while not schedule.done:
        part = endless[start : start + PROMPT + CALL_TOKENS]
        yield part[None, :PROMPT], _Forced(part.tolist())
        start = (start + CALL_TOKENS) % len(text)


class _Forced(LogitsProcessor):
    """Makes the text's own token the only one that can follow."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[-1]
        scores.fill_(float("-inf"))
        scores[:, self.tokens[place] if place < len(self.tokens) else 0] = 0.0
        return scores


class _Lookup(NgramDrafter):
    """An n-gram drafter that always finds the text's next tokens: only the time of its search is measured."""

    forced: _Forced

    def draft(
        self, sequence: DecodedSequence, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        super().draft(sequence, rule, length, continues)
        return [DraftToken(token) for token in self.forced.tokens[sequence.length : sequence.length + length]]


class _Interleaved(DraftSchedule):
    """Drafts of all lengths from 0, in a new order each time, until each was timed often enough.

    Attributes:
        taken: ms of draft and verification, by the length of the draft.
    """

    def __init__(self, longest: int, rounds: int) -> None:
        self._longest = longest
        self._rounds = rounds
        self._order: list[int] = []
        self._random = random.Random(0)
        self._untimed = dict.fromkeys(range(longest + 1), 0)
        self.taken: Mapping[int, list[tuple[float, float]]] = {length: [] for length in range(longest + 1)}

    @property
    def done(self) -> bool:
        return all(len(times) >= self._rounds for times in self.taken.values())

    def plan(self, limit: int) -> int:
        if not self._order:
            self._order = [length for length, times in self.taken.items() if len(times) < self._rounds]
            self._random.shuffle(self._order)
        return min(self._order.pop(), limit) if self._order else 0

    def state(self) -> str:
        return f"all lengths up to {self._longest}"

    def record(self, done: Round) -> None:
        length = len(done.confidences)
        self._untimed[length] += done.prepared
        if not done.prepared or self._untimed[length] > MAX_UNTIMED:
            self.taken[length].append((done.draft_ms, done.verify_ms))
