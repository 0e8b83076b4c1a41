"""Regular expressions from rule files, matched to module paths in bounded time.

The syntax is that of `re`. The package `regex` does the search: it supports this syntax and a time limit.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

import regex

MAX_LENGTH = 500
# `regex` compiles a repeated part once for each required repetition: (((a+)+)+)+ takes time and memory for 2^4 letters.
MAX_EXPANDED = 4096
PATTERN_SECONDS = 1.0  # for all modules of a model; a common pattern takes about a microsecond for each
TOTAL_SECONDS = 10.0  # for all patterns of a rule file
TRIAL_SECONDS = 0.1
TRIAL_PATHS = (
    "model.layers.10.self_attn.kv_a_proj_with_mqa",
    "model.language_model.layers.10.mlp.shared_expert.gate_proj",
    "model.layers.10.mlp.experts",
    "lm_head",
)
HINT = r"repeats inside repeats, as in (\w+\.?)+, and alternatives that overlap try every way to divide a path; write one repeat: [\w.]+"
_TOKEN = re.compile(
    r"(?P<atom>\\N\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?#[^)]*\))"
    r"|(?P<repeat>(?:(?P<once>\+)|[*?]|\{(?P<least>\d*)(?:,\d*)?\})[+?]?)"
    r"|(?P<open>\((?:\?(?P<verbose>[aiLmsu]*x))?)"
    r"|(?P<close>\))"
    r"|.",
    re.DOTALL,
)
_IN_SET = re.compile(r"\\.|\[", re.DOTALL)


class SlowPatternError(ValueError):
    """The search for a pattern was stopped; the message continues a sentence that begins with the pattern."""


@dataclass(slots=True)
class Patterns:
    """Searches paths for patterns, with a time limit for each pattern over all its paths, and one for all patterns."""

    pattern_seconds: float = PATTERN_SECONDS
    total_seconds: float = TOTAL_SECONDS
    _compiled: dict[str, regex.Pattern[str]] = field(default_factory=dict)
    _left: dict[str, float] = field(default_factory=dict)

    def found_in(self, pattern: str, path: str) -> bool:
        """Whether `re.search` would find `pattern` in `path`.

        Raises:
            ValueError: the pattern is invalid, or takes too long (SlowPatternError), in this or an earlier call.
        """
        compiled = self._compiled.get(pattern)
        if compiled is None:
            compiled = self._compiled[pattern] = _compile(pattern)
        left = self._left.get(pattern, self.pattern_seconds)
        if left <= 0:
            raise SlowPatternError(f"takes too long to match to the names of modules; {HINT}")
        if self.total_seconds <= 0:
            raise SlowPatternError(f"is not searched for: all patterns together take too long; {HINT}")
        begin = time.thread_time()
        try:
            matched = compiled.search(path, timeout=min(left, self.total_seconds)) is not None
        except (TimeoutError, MemoryError):
            self._left[pattern] = 0.0
            raise SlowPatternError(f"takes too long to match to '{path}'; {HINT}") from None
        finally:
            spent = time.thread_time() - begin
            self.total_seconds -= spent
            self._left[pattern] = min(left - spent, self._left.get(pattern, left))
        return matched


def why_unusable(pattern: str) -> str | None:
    """Return the reason why a pattern cannot be used, as the end of a sentence that begins with it; None if it can."""
    trial = Patterns(TRIAL_SECONDS)
    try:
        for path in TRIAL_PATHS:
            trial.found_in(pattern, path)
    except SlowPatternError as error:
        return str(error)
    except ValueError as error:
        return f"is not a valid regular expression: {error}"
    return None


def _compile(pattern: str) -> regex.Pattern[str]:
    if len(pattern) > MAX_LENGTH:
        raise ValueError(f"it has {len(pattern)} characters, and at most {MAX_LENGTH} are allowed")
    try:
        re.compile(pattern)
        return regex.compile(_for_regex(pattern), regex.VERSION0)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _for_regex(pattern: str) -> str:
    """Return a pattern that `re` accepts, with a backslash before what has another meaning in `regex`: a{e} and [[:alpha:]]."""
    written: list[str] = []
    sizes = [0]  # the expanded size of each open group
    last = 0
    for token in _TOKEN.finditer(pattern):
        text = token[0]
        if text.startswith("["):
            text = "[" + _IN_SET.sub(lambda part: "\\[" if part[0] == "[" else part[0], text[1:])
        written.append("\\{" if text == "{" else text)
        if token["verbose"] is not None:
            raise ValueError("the flag x is not supported; write the pattern without it, without spaces and comments")
        if token["open"] is not None:
            sizes.append(0)
            continue
        if token["repeat"] is not None:
            grown = last * (1 if token["once"] else int(token["least"] or 0))
        else:
            last = grown = 1 + (sizes.pop() if token["close"] is not None and len(sizes) > 1 else 0)
        sizes[-1] += grown
        if sizes[-1] > MAX_EXPANDED:
            raise ValueError("repeats inside repeats make it too large; write one repeat")
    return "".join(written)
