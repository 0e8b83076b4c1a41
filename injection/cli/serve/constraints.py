"""Answers that must follow a JSON Schema or a grammar, by the package llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

# Between the parts of a JSON text: a space, or a line break with an indentation. With any number, small models write nothing else.
WHITESPACE = r"( |\n[ \t]{0,40})"


def with_whitespace(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON Schema with the white space that is allowed between the parts of the text."""
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


class GrammarError(ValueError):
    """A grammar or schema that cannot be followed; the message may be shown to the client."""


class Constraint:
    """The tokens by which one answer may go on."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._held: list[int] = []  # tokens that the matcher has consumed

    def restrict(self, logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """Return `logits` (V,) with -inf for all tokens that cannot follow the tokens of `answer`.

        An answer that a draft continued and a verification cut is followed back. One that has left the grammar, as a draft may, is not
        restricted: its tokens are not accepted.
        """
        shared = next((place for place, pair in enumerate(zip(self._held, answer, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(self._held), len(answer)) if shared is None else shared
        if shared < len(self._held):
            self._matcher.rollback(len(self._held) - shared)
            del self._held[shared:]
        following = list(answer[shared:])
        taken = self._matcher.try_consume_tokens(following)
        self._held += following[:taken]
        if taken < len(following):
            return logits
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: logits.shape[-1]]).to(logits.device, torch.bool)
        return logits.masked_fill(~allowed, -torch.inf)


class Grammars:
    """Makes constraints for the tokens of one model.

    Args:
        vocabulary: the number of the model's logits.
        ends: the tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = ends
        self._lock = threading.Lock()
        self._prepared: Any = None

    def constraint(self, form: Mapping[str, Any] | str) -> Constraint:
        """Return a constraint by a JSON Schema, or by a grammar in llguidance's form of Lark.

        Raises:
            GrammarError: the grammar is wrong or too large, or the model's tokenizer is of no kind that can be followed.
        """
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise GrammarError("this server lacks the package llguidance: pip install 'moegraft[serve]'") from error
        if isinstance(form, str):
            grammar = LLMatcher.grammar_from_lark(form)
        else:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(with_whitespace(form)))
        with self._lock:
            if self._prepared is None:
                try:
                    given: Any = self._tokenizer
                    self._prepared = from_tokenizer(given, n_vocab=self._vocabulary, eos_token=list(self._ends))
                except Exception as error:
                    raise GrammarError(f"the tokens of this model cannot be followed by a grammar ({error})") from error
        if problem := LLMatcher.validate_grammar(grammar, self._prepared):
            raise GrammarError(problem.strip())
        return Constraint(LLMatcher(self._prepared, grammar))
