"""What an answer cost, in the words that are shown for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Token counts and seconds of one answer."""

    prompt_tokens: int
    kept_tokens: int  # of the prompt, still known from the turn before
    generated_tokens: int
    first_token_s: float  # from asking to the first token
    decode_s: float  # from the first token to the last

    @property
    def prefill_tokens_per_s(self) -> float:
        return (self.prompt_tokens - self.kept_tokens) / self.first_token_s if self.first_token_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None for an answer of one token: there was no step to time."""
        return (self.generated_tokens - 1) / self.decode_s if self.generated_tokens > 1 and self.decode_s else None

    def line(self) -> str:
        computed = f" ({self.prompt_tokens - self.kept_tokens} new)" if self.kept_tokens else ""
        decode = f" at {self.decode_tokens_per_s:.1f} tokens/s" if self.decode_tokens_per_s else ""
        return (
            f"prompt: {_tokens(self.prompt_tokens)}{computed} at {self.prefill_tokens_per_s:.1f} tokens/s, "
            f"first token after {self.first_token_s:.2f} s; answer: {_tokens(self.generated_tokens)}{decode}"
        )


@dataclass(slots=True)
class ChatStats:
    """Sums over the answers of one program run."""

    answers: int = 0
    computed_tokens: int = 0
    prefill_s: float = 0.0
    generated_tokens: int = 0
    decode_steps: int = 0
    decode_s: float = 0.0

    def add(self, stats: AnswerStats) -> None:
        self.answers += 1
        self.computed_tokens += stats.prompt_tokens - stats.kept_tokens
        self.prefill_s += stats.first_token_s
        self.generated_tokens += stats.generated_tokens
        self.decode_steps += max(0, stats.generated_tokens - 1)
        self.decode_s += stats.decode_s

    def line(self) -> str:
        if not self.answers:
            return "no answer yet"
        prefill = f" at {self.computed_tokens / self.prefill_s:.1f} tokens/s" if self.prefill_s else ""
        decode = f" at {self.decode_steps / self.decode_s:.1f} tokens/s" if self.decode_s else ""
        return (
            f"answers so far: {self.answers}; computed of prompts: {_tokens(self.computed_tokens)}{prefill}; "
            f"generated: {_tokens(self.generated_tokens)}{decode}"
        )


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
