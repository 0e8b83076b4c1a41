"""Answers that must follow a JSON Schema or a grammar, by the package llguidance."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

TOKEN_S, SPARE_S = 0.01, 1.0  # CPU time of a grammar: for each token of an answer, and beyond that for all of them
# Of a JSON text: a space behind commas and colons, and no other. Where white space is free, weak models write little else.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def grammars(start: Mapping[str, Any] | str, form: Mapping[str, Any] | str | None = None) -> str:
    """Return the grammar of an answer, as JSON for llguidance; Lark in `start` may refer to `form` as `@form`.

    Each is a JSON Schema, or text in llguidance's form of Lark. Two grammars do not share the names of their rules.
    """
    named = [{}, {"name": "form"}]
    both = [start] if form is None else [start, form]
    return json.dumps(
        {
            "grammars": [
                {**name, **({"lark_grammar": each} if isinstance(each, str) else {"json_schema": compact(each)})}
                for name, each in zip(named, both, strict=False)
            ]
        }
    )


def from_gbnf(grammar: str) -> str:
    """Return a grammar in llguidance's form of Lark; one in GBNF, which llama.cpp reads, is recognised by a rule's `::=`.

    Raises:
        GrammarError: the grammar in GBNF is wrong.
    """
    if re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE) is None:
        return grammar
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        return str(gbnf_to_lark(grammar))
    except ImportError as error:
        raise GrammarError(MISSING) from error
    except Exception as error:  # its own errors have no type of their own
        raise GrammarError(f"the grammar in GBNF cannot be read: {error}") from error


def compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON Schema whose texts have little white space."""
    return {**schema, "x-guidance": COMPACT}


class GrammarError(ValueError):
    """A grammar or schema that cannot be followed; the message may be shown to the client."""


MISSING = "this server lacks the package llguidance: pip install 'moegraft[serve]'"


class Constraint:
    """The tokens by which one answer may go on.

    The CPU time for each is bounded in the mean. With an ambiguous grammar, as `s: s s | "a"`, it grows with the square of the answer's
    length and more, and all other answers wait for it.

    Attributes:
        drafts: whether drafts of the answer may be followed; not after one that had to be forgotten.
    """

    def __init__(self, matcher: Any) -> None:
        self._first = matcher  # has consumed nothing
        self._matcher = matcher.deep_copy()
        self._consumed: list[int] = []  # tokens that the matcher has consumed
        self._left_s = SPARE_S
        self.drafts = True

    def restrict(self, logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
        """Return `logits` (V,) with -inf for all tokens that cannot follow the tokens of `answer`.

        An answer that a draft continued and a verification cut is followed back. One that has left the grammar, as a draft may, is not
        restricted: its tokens are not accepted.

        Raises:
            GrammarError: the grammar has become too large, or takes too long.
        """
        began_s = time.thread_time()
        shared = next((place for place, pair in enumerate(zip(self._consumed, answer, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(self._consumed), len(answer)) if shared is None else shared
        if shared < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - shared)
            del self._consumed[shared:]
        following = list(answer[shared:])
        taken = self._matcher.try_consume_tokens(following)
        self._consumed += following[:taken]
        mask = None if taken < len(following) else self._matcher.compute_bitmask()
        if self._matcher.is_error():  # for good; its mask ends the answer, as if it were complete
            raise GrammarError(f"the answer cannot follow its grammar any further: {self._matcher.get_error().strip()}")
        took_s = time.thread_time() - began_s
        self._left_s = min(SPARE_S, self._left_s + TOKEN_S * max(1, len(following)) - took_s)
        if self._left_s < 0:
            raise GrammarError(
                f"the answer cannot follow its grammar any further: its next token took {1e3 * took_s:.0f} ms of CPU time, and in the mean "
                f"no more than {1e3 * TOKEN_S:.0f} ms are allowed; an ambiguous rule, as 's: s s | \"a\"', has ever more readings"
            )
        if mask is None:
            return logits
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: logits.shape[-1]]).to(logits.device, torch.bool)
        return logits.masked_fill(~allowed, -torch.inf)

    def restart(self) -> None:
        """Forget a draft whose tokens have made the grammar too large: a matcher with an error follows nothing any more."""
        self._matcher = self._first.deep_copy()
        self._consumed = []
        self._left_s = SPARE_S
        self.drafts = False

    def copy(self) -> Constraint:
        """Return a constraint by the same grammar for another answer."""
        return Constraint(self._first)


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

    def constraint(self, grammar: str) -> Constraint:
        """Return a constraint by a grammar as `grammars` makes it.

        Raises:
            GrammarError: the grammar is wrong or too large, or the model's tokenizer is of no kind that can be followed.
        """
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise GrammarError(MISSING) from error
        with self._lock:
            if self._prepared is None:
                try:
                    given: Any = self._tokenizer
                    self._prepared = from_tokenizer(given, n_vocab=self._vocabulary, eos_token=list(self._ends))
                except Exception as error:
                    raise GrammarError(f"the tokens of this model cannot be followed by a grammar ({error})") from error
        matcher = LLMatcher(self._prepared, grammar)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        return Constraint(matcher)
