"""What speculation did and what it cost, in numbers that only grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Round:
    """One draft with its verification; a plain step is a round that drafts nothing.

    Attributes:
        confidences: q of each drafted token.
        judged: drafted tokens that were compared with the full model's choice; all up to the first that was not accepted.
        accepted: how many of those stood.
        emitted: tokens the text grew by.
    """

    confidences: Sequence[float]
    judged: int
    accepted: int
    emitted: int
    draft_ms: float
    verify_ms: float


@dataclass(slots=True)
class Statistics:
    """Sums over all rounds of one model."""

    rounds: int = 0  # with a draft
    drafted: int = 0
    round_tokens: int = 0
    plain_tokens: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plain_ms: float = 0.0
    judged_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    agreeing_tokens: float = 0.0  # tokens of lossy rounds that the lossless rule would have let stand, in expectation
    lossy_tokens: int = 0
    negative_log_likelihood: float = 0.0  # of those tokens, under the full model

    def add(self, done: Round) -> None:
        if not done.confidences:
            self.plain_tokens += done.emitted
            self.plain_ms += done.draft_ms + done.verify_ms
            return
        self.rounds += 1
        self.drafted += len(done.confidences)
        self.round_tokens += done.emitted
        self.draft_ms += done.draft_ms
        self.verify_ms += done.verify_ms
        while len(self.judged_at) < done.judged:
            self.judged_at.append(0)
            self.accepted_at.append(0)
        for position in range(done.judged):
            self.judged_at[position] += 1
            self.accepted_at[position] += position < done.accepted

    def add_lossy(self, log_probability: float, agreement: float) -> None:
        """Counts one token of a lossy round: its log probability under the full model, and whether it would have stood."""
        self.lossy_tokens += 1
        self.agreeing_tokens += agreement
        self.negative_log_likelihood -= log_probability

    @property
    def tokens_per_round(self) -> float | None:
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position in the draft: the share of tokens that stood where all before them had."""
        return tuple(accepted / judged for accepted, judged in zip(self.accepted_at, self.judged_at, strict=True))

    @property
    def agreement(self) -> float | None:
        """The share of tokens of lossy rounds that the lossless rule would have let stand."""
        return self.agreeing_tokens / self.lossy_tokens if self.lossy_tokens else None

    @property
    def perplexity(self) -> float | None:
        """Of the tokens of lossy rounds, under the full model."""
        return math.exp(self.negative_log_likelihood / self.lossy_tokens) if self.lossy_tokens else None

    def as_mapping(self) -> Mapping[str, object]:
        """Every figure by name, for programs that show them."""
        return {
            "rounds": self.rounds,
            "tokens_per_round": self.tokens_per_round,
            "acceptance_by_position": self.acceptance,
            "drafted_tokens": self.drafted,
            "accepted_tokens": sum(self.accepted_at),
            "round_tokens": self.round_tokens,
            "plain_tokens": self.plain_tokens,
            "draft_ms": self.draft_ms,
            "verify_ms": self.verify_ms,
            "plain_ms": self.plain_ms,
            "agreement": self.agreement,
            "perplexity": self.perplexity,
        }

    def line(self) -> str:
        """`2.31 tokens a round, accepted 0.72 0.64 0.60, ...`; one line for people."""
        if not self.rounds:
            return "no draft yet"
        shares = " ".join(f"{share:.2f}" for share in self.acceptance)
        text = f"{self.tokens_per_round:.2f} tokens a round, accepted by position {shares}, {self.plain_tokens} tokens without a draft"
        if self.agreement is not None and self.perplexity is not None:
            text += f"; {self.agreement:.1%} as lossless decoding has it, perplexity {self.perplexity:.2f} under the full model"
        return text
