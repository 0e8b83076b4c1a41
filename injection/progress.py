"""Progress bars: one in bytes for a whole load, one in tokens for a pass over a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm
from transformers.utils import logging as transformers_logging


@contextmanager
def byte_bar(total_bytes: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yields `advance(bytes)`; the bar goes to stderr, and transformers' own bars are silent meanwhile."""
    shown_before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with tqdm(total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc="Loading", disable=not enabled) as bar:
            yield lambda size: bar.update(size) and None
    finally:
        if shown_before:
            transformers_logging.enable_progress_bar()


@contextmanager
def token_bar(total_tokens: int, text: str, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yields `advance(tokens)`; the bar goes to stderr."""
    with tqdm(total=total_tokens, unit=" tokens", unit_scale=True, desc=text, disable=not enabled) as bar:
        yield lambda tokens: bar.update(tokens) and None
