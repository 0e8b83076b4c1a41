"""The keys and values of the texts that a server reads and decodes, and of conversations that have ended, within a limit of bytes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel

from moegraft.injection.cli.chat.conversation import PromptCache
from moegraft.injection.injected import injection_of
from moegraft.operators.cache_form import layer_types
from moegraft.operators.machine import probe_machine
from moegraft.operators.paged_cache import PAGE_TOKENS, NoPagesError, PagedCache, PagedSequence, PagePool, pages_of, windows_of

logger = logging.getLogger(__name__)
IntArray = NDArray[np.int64]


class Batch:
    """Sequences that are decoded together, one token per step. Shorter ones begin with padding, which is masked.

    Rows are in the order of `add`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self._cache: DynamicCache | None = None
        self._padding: list[int] = []  # tokens before each sequence

    def __len__(self) -> int:
        return len(self._padding)

    @property
    def padded_tokens(self) -> int:
        """Tokens of all rows, with their padding; any thread may ask."""
        cache = self._cache
        return len(self) * cache.get_seq_length() if cache is not None else 0

    def add(self, cache: DynamicCache) -> None:
        """Append the cache of one sequence. If that fails, as for lack of memory, the other sequences are unchanged."""
        if self._cache is None:
            self._cache, self._padding = cache, [0]
            return
        mine, new = self._cache.get_seq_length(), cache.get_seq_length()
        length = max(mine, new)
        try:
            for layer, other in zip(_layers(self._cache), _layers(cache), strict=True):
                pairs = [(getattr(layer, name), getattr(other, name)) for name in ("keys", "values")]
                joined = [torch.cat([pad(states, (0, 0, length - states.shape[-2], 0)) for states in pair]) for pair in pairs]
                layer.keys, layer.values = joined
        except Exception:
            for layer in _layers(self._cache):  # views, which need no memory
                layer.keys, layer.values = (states[: len(self), :, states.shape[-2] - mine :] for states in (layer.keys, layer.values))
            raise
        self._padding = [*(padding + length - mine for padding in self._padding), length - new]

    def copy(self, row: int) -> DynamicCache:
        """Return a copy of one sequence's cache, without padding."""
        assert self._cache is not None, "there is a sequence to copy"
        copied, padding = DynamicCache(config=self._model.config.get_text_config(decoder=True)), self._padding[row]
        for layer, other in zip(_layers(self._cache), _layers(copied), strict=True):
            other.update(layer.keys[row : row + 1, :, padding:].clone(), layer.values[row : row + 1, :, padding:].clone())
        return copied

    def remove(self, row: int) -> None:
        """Remove one sequence."""
        assert self._cache is not None, "there is a sequence to remove"
        self._padding.pop(row)
        common = min(self._padding, default=0)
        rest = [index for index in range(len(self._padding) + 1) if index != row]
        if rest:
            for layer in _layers(self._cache):
                layer.keys, layer.values = layer.keys[rest, :, common:], layer.values[rest, :, common:]
        self._padding = [padding - common for padding in self._padding]
        if not rest:
            self._cache = None

    def step(self, tokens: list[int]) -> torch.Tensor:
        """Compute one token of each sequence; return the logits of the next ones, (B, V) float32."""
        assert self._cache is not None and len(tokens) == len(self), "one token for each sequence"
        device, length = self._model.device, self._cache.get_seq_length() + 1
        padding = torch.tensor(self._padding, device=device)
        arguments: dict[str, Any] = {}
        if any(self._padding):
            arguments["attention_mask"] = (torch.arange(length, device=device)[None] >= padding[:, None]).long()
        output = self._model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            position_ids=(length - 1 - padding)[:, None],
            past_key_values=self._cache,
            use_cache=True,
            **arguments,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits


def cut(cache: DynamicCache, tokens: int) -> DynamicCache:
    """Crop every layer to the first `tokens`, also after a failed forward pass that left layers of different lengths."""
    for layer in _layers(cache):
        layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
    return cache


def _layers(cache: DynamicCache) -> list[Any]:
    return cache.layers  # without a common type


class Text:
    """One sequence of a server: a prompt that is read or an answer that is decoded.

    Attributes:
        total: tokens that it may have at its end, for which memory is promised.
        scope: whose it is: only texts of one scope share what they begin with.
    """

    def __init__(self, total: int, scope: str) -> None:
        self.total = total
        self.scope = scope
        self.cache: DynamicCache | None = None  # of PaddedTexts, until the text joins the batch
        self.sequence = PagedSequence()  # of PagedTexts

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values are held, while the prompt is read; any thread may ask."""
        cache = self.cache
        return self.sequence.tokens if cache is None else cache.get_seq_length()


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes of keys and values: the limit, what running texts may need until they end, and what is held for them and for ended ones."""

    limit: int
    promised: int
    used: int
    kept: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.promised)


def mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


class PagedTexts:
    """Texts whose keys and values are in pages (paged_cache.py), and the conversations that are kept after their end.

    A text is promised the pages of its whole length when it begins, so that no text runs out of memory. Kept conversations have the pages
    that are left, up to a limit of their own; the least recently used gives way first.

    Args:
        kept_bytes: for conversations that have ended.
    """

    shares_passes = True  # prompts may be read together

    def __init__(self, model: PreTrainedModel, cache: PagedCache, kept_bytes: int) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self._cache = cache
        self._pool = cache.pool
        self._promised = 0  # pages
        self._kept: list[_Kept] = []  # the most recently used one last
        self._most_kept = kept_bytes // self._pool.page_bytes
        injection = injection_of(model)
        self._steps = None if injection is None else injection.context.replay
        self._stepped: list[PagedSequence] = []  # the rows of the last step, which may go on
        self._continuation: Any = None  # of the last step, from `continuation` of `_steps`

    @property
    def memory(self) -> CacheMemory:
        size, kept = self._pool.page_bytes, self._kept_pages()
        return CacheMemory(size * self._pool.pages, size * self._promised, size * self._pool.used, size * kept)

    def needed_bytes(self, tokens: int) -> int:
        return pages_of(tokens) * self._pool.page_bytes

    def fits(self, total: int) -> bool:
        """Whether a text of `total` tokens can begin now."""
        return self._promised + pages_of(total) <= self._pool.pages

    def begin(self, token_ids: list[int], total: int, scope: str, *, multiple: int = 1) -> Text:
        """Begin a text, with what a kept conversation shares with its prompt, of which the last token is never shared.

        Args:
            multiple: so many tokens are shared, or a multiple of them; 0: none.
        """
        text = Text(total, scope)
        if multiple:
            self._share(text, np.array(token_ids[:-1]), multiple)
        self._promised += pages_of(total)
        return text

    def _share(self, text: Text, token_ids: IntArray, multiple: int) -> None:
        mine = [kept for kept in self._kept if kept.scope == text.scope]
        best = max(mine, key=lambda kept: kept.shared(token_ids), default=None)
        if best is None or not (shared := best.shared(token_ids) // multiple * multiple):
            return
        self._kept.remove(best)
        try:
            if shared % PAGE_TOKENS:
                self._make_room(1)
            text.sequence = self._pool.begin_with(best.sequence, shared)
        except NoPagesError:
            text.sequence = self._pool.begin_with(best.sequence, shared - shared % math.lcm(PAGE_TOKENS, multiple))
        finally:
            self._kept.append(best)

    def read(self, texts: Sequence[Text], token_ids: list[list[int]], **extra: Any) -> torch.Tensor:
        """Compute the next tokens of some texts, equally many of each; return the logits, (B, T, V).

        A text is unchanged if that fails.
        """
        self._stepped, self._continuation = [], None  # another pass may come between two steps
        tokens = len(token_ids[0])
        sequences = self._begin(texts, tokens)
        first = torch.tensor([each.tokens for each in sequences])
        output = self._model(
            input_ids=torch.tensor(token_ids),
            position_ids=first[:, None] + torch.arange(tokens),
            past_key_values=self._cache,
            use_cache=True,
            **extra,
        )
        self._cache.finish(tokens)
        logits: torch.Tensor = output.logits
        return logits

    def _begin(self, texts: Sequence[Text], tokens: int) -> list[PagedSequence]:
        sequences = [text.sequence for text in texts]
        self._make_room(sum(pages_of(each.tokens + tokens) - len(each.pages) for each in sequences))
        self._cache.begin(sequences, tokens)
        return sequences

    def join(self, text: Text) -> None:
        """Note that a prompt is read."""

    def crop(self, text: Text, tokens: int) -> None:
        """Drop all but the first `tokens` tokens of a text."""
        self._stepped, self._continuation = [], None
        self._pool.crop(text.sequence, tokens)

    def step(self, texts: Sequence[Text], tokens: list[int]) -> torch.Tensor:
        """Compute one token of each text; return the logits of the next ones, (B, V) float32."""
        continuation, self._continuation = self._continuation, None
        if continuation is not None and self._stepped == [text.sequence for text in texts]:
            self._begin(texts, 1)
            continued: torch.Tensor | None = continuation.step(tokens) if continuation.position == self._cache.longest else None
            if continued is not None:
                self._cache.finish(1)
                self._continuation = continuation
                return continued.clone()
        logits = self.read(texts, [[token] for token in tokens])[:, -1].float()
        if self._steps is not None:
            self._stepped = [text.sequence for text in texts]
            self._continuation = self._steps.continuation(self._cache)
        return logits

    def end(self, text: Text, token_ids: list[int] | None = None) -> None:
        """End a text, and keep those of its tokens that are given as a conversation."""
        self._promised -= pages_of(text.total)
        sequence, text.sequence = text.sequence, PagedSequence()
        self._pool.crop(sequence, len(token_ids or ()))
        if token_ids is None or not sequence.tokens or not self._most_kept:
            self._pool.release(sequence)
            return
        new = _Kept(np.array(token_ids[: sequence.tokens]), sequence, text.scope)
        for old in [old for old in self._kept if old.scope == new.scope and old.shared(new.token_ids) == len(old.token_ids)]:
            self._release(old)  # the new one begins with all of it
        self._kept.append(new)
        while self._kept_pages() > self._most_kept:
            self._release(self._kept[0])

    def drop_kept(self) -> None:
        for kept in self._kept[:]:
            self._release(kept)

    def _release(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._pool.release(kept.sequence)

    def _kept_pages(self) -> int:
        return len({page for kept in self._kept for page in kept.sequence.pages})

    def _make_room(self, pages: int) -> None:
        while self._kept and self._pool.free < pages:
            self._release(self._kept[0])


@dataclass(eq=False, slots=True)
class _Kept:
    """A conversation that has ended."""

    token_ids: IntArray
    sequence: PagedSequence
    scope: str

    def shared(self, token_ids: IntArray) -> int:
        """Return with how many tokens both begin."""
        size = min(len(self.token_ids), len(token_ids))
        differ = np.flatnonzero(self.token_ids[:size] != token_ids[:size])
        return int(differ[0]) if len(differ) else size


class PaddedTexts:
    """Texts in one cache of transformers' own, in which shorter ones begin with padding; each prompt is read in a cache of its own.

    The memory of a batch is its rows times the longest of them, which is what counts against the limit. Members as in `PagedTexts`.
    """

    shares_passes = False

    def __init__(self, model: PreTrainedModel, token_bytes: int, limit: int, kept_bytes: int) -> None:
        self._model: Any = model
        self._token_bytes = token_bytes
        self._limit = limit
        self._most_kept = min(kept_bytes, limit)
        self._kept: list[tuple[str, PromptCache]] = []  # scopes and caches; the most recently used one last
        self._texts: list[Text] = []  # all that have begun
        self._rows: list[Text] = []  # those in the batch
        self._batch = Batch(model)

    @property
    def memory(self) -> CacheMemory:
        reading = sum(text.tokens for text in self._texts if text.cache is not None)
        used = self._token_bytes * (reading + self._batch.padded_tokens)
        return CacheMemory(self._limit, self._promised(self._texts), used + self._kept_bytes(), self._kept_bytes())

    def _promised(self, texts: Sequence[Text]) -> int:
        return len(texts) * max((text.total for text in texts), default=0) * self._token_bytes

    def _kept_bytes(self) -> int:
        return sum(len(kept.held[0]) for _, kept in self._kept) * self._token_bytes

    def needed_bytes(self, tokens: int) -> int:
        return tokens * self._token_bytes

    def fits(self, total: int) -> bool:
        return self._promised([*self._texts, Text(total, "")]) <= self._limit

    def begin(self, token_ids: list[int], total: int, scope: str, *, multiple: int = 1) -> Text:
        text = Text(total, scope)
        best = max((each for each in self._kept if each[0] == scope), key=lambda each: each[1].shared(token_ids), default=None)
        shared = best[1].shared(token_ids) // multiple * multiple if best is not None and multiple else 0
        # A short common beginning is not worth cropping another conversation.
        if best is not None and shared and 2 * shared >= len(best[1].held[0]):
            self._kept.remove(best)
            text.cache, _ = best[1].take(token_ids[: shared + 1])
        self._texts.append(text)
        self._drop_for(self._promised(self._texts))
        return text

    def read(self, texts: Sequence[Text], token_ids: list[list[int]], **extra: Any) -> torch.Tensor:
        (text,) = texts
        if text.cache is None:
            text.cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        ids = torch.tensor(token_ids, device=self._model.device)
        held = text.cache.get_seq_length()
        try:
            logits: torch.Tensor = self._model(input_ids=ids, past_key_values=text.cache, use_cache=True, **extra).logits
        except Exception:
            cut(text.cache, held)
            raise
        return logits

    def join(self, text: Text) -> None:
        assert text.cache is not None, "its prompt is read"
        self._batch.add(text.cache)
        text.cache = None
        self._rows.append(text)

    def step(self, texts: Sequence[Text], tokens: list[int]) -> torch.Tensor:
        assert list(texts) == self._rows, "all texts that have joined, in their order"
        try:
            return self._batch.step(tokens)
        except Exception:
            self._batch = Batch(self._model)  # its layers may differ in length
            self._rows.clear()
            raise

    def end(self, text: Text, token_ids: list[int] | None = None) -> None:
        self._texts.remove(text)
        cache = text.cache
        if text in self._rows:
            row = self._rows.index(text)
            try:
                cache = self._batch.copy(row) if token_ids is not None and self._most_kept else None
            except RuntimeError:  # out of memory
                logger.exception("serve: the cache of an answer is not kept")
            self._rows.remove(text)
            self._batch.remove(row)
        if cache is None or not token_ids or not self._most_kept:
            return
        if len(token_ids) < cache.get_seq_length():
            cut(cache, len(token_ids))
        kept = PromptCache()
        kept.keep(token_ids, cache)
        if kept.held[1] is not None:
            self._kept.append((text.scope, kept))
            self._drop_for(self._promised(self._texts))

    def _drop_for(self, promised: int) -> None:
        """Drop kept conversations until they and the running texts fit."""
        while self._kept and self._kept_bytes() > min(self._most_kept, self._limit - promised):
            self._kept.pop(0)

    def drop_kept(self) -> None:
        self._kept.clear()


class UnbatchableError(Exception):
    """Texts of a model cannot be decoded together."""


def default_limit(model: PreTrainedModel) -> int:
    """Return half of the free memory of the model's device, in bytes."""
    machine = probe_machine()
    gpus = [gpu.free_bytes for gpu in machine.gpus] if model.device.type == "cuda" else []
    return (min(gpus) if gpus else machine.available_bytes) // 2


def open_texts(
    model: PreTrainedModel, *, limit: int | None, kept_bytes: int | None, most: int, context: int | None
) -> PagedTexts | PaddedTexts:
    """Return texts in pages if the model's attention reads these, else in a padded batch; the log has the reason.

    The model computes a few tokens in both ways, and pages are used only if its logits agree.

    Args:
        limit: bytes of keys and values. By default half of the free memory, and at most that of `most + 4` whole contexts.
        kept_bytes: of these, for conversations that have ended; by default half.
        most: texts at once.
        context: tokens of one text.

    Raises:
        UnbatchableError: a layer has a sliding window, which no padded batch can have, and attention does not read pages; or the forward
            pass fails on a few tokens.
    """
    try:
        example, expected = _stock_steps(model)
        states = [states for layer in _layers(example) for states in (layer.keys, layer.values)]
    except torch.AcceleratorError:
        raise
    except Exception as error:  # what a single answer by `generate` may not need
        raise UnbatchableError(f"it cannot compute a few tokens with a cache of its own ({error})") from error
    token_bytes = sum(each.nbytes // each.shape[2] for each in states if each is not None)
    if limit is None:
        limit = default_limit(model)
        if context is not None:
            limit = min(limit, (most + 4) * pages_of(context) * PAGE_TOKENS * token_bytes)
    kept_bytes = limit // 2 if kept_bytes is None else min(kept_bytes, limit)
    try:
        paged = _paged(model, example, limit // (token_bytes * PAGE_TOKENS), most, context)
        texts = PagedTexts(model, paged, kept_bytes)
        _check_pages(texts, expected)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # the model's own code computes with states that it does not expect
        if any(windows_of(example)):
            raise UnbatchableError(f"it has sliding windows, and its attention does not read keys in pages ({error})") from error
        logger.info("serve: shorter texts are padded to the longest in a batch: %s", error)
        return PaddedTexts(model, token_bytes, limit, kept_bytes)
    return texts


_PROBES = ([1, 2, 3], [*range(3, 3 + 2 * PAGE_TOKENS - 3)])  # prompts, of which one begins a second page


def _stock_steps(model: PreTrainedModel) -> tuple[DynamicCache, torch.Tensor]:
    """Return a cache with tokens, and the logits that follow both probes and one more token, (2, V)."""
    call: Any = model
    found = []
    with torch.inference_mode():
        for prompt in _probes(model):
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
            call(input_ids=torch.tensor([prompt[:-1]], device=model.device), past_key_values=cache, use_cache=True)
            output = call(input_ids=torch.tensor([prompt[-1:]], device=model.device), past_key_values=cache, use_cache=True)
            found.append(output.logits[0, -1].float())
    return cache, torch.stack(found)


def _probes(model: PreTrainedModel) -> list[list[int]]:
    embeddings: Any = model.get_input_embeddings()
    return [[token % embeddings.weight.shape[0] for token in prompt] for prompt in _PROBES]


def _paged(model: PreTrainedModel, example: DynamicCache, pages: int, most: int, context: int | None) -> PagedCache:
    if model.device.type != "cpu":
        raise ValueError("the model is not on the CPU")
    others = set(layer_types(model.config)) - {"full_attention", "sliding_attention"}
    if others:
        raise ValueError(f"it has layers of kind {', '.join(sorted(others))}")
    if pages < 1:
        raise ValueError("the limit has no room for a page")
    pool = PagePool(example, pages, most_sequences=most, most_tokens=min(context or pages * PAGE_TOKENS, pages * PAGE_TOKENS))
    return PagedCache(pool, windows_of(example))


def _check_pages(texts: PagedTexts, expected: torch.Tensor) -> None:
    model, opened = texts._model, []
    prompts = _probes(model)
    with torch.inference_mode():
        for prompt in prompts:
            opened.append(texts.begin(prompt, len(prompt), ""))
            texts.read(opened[-1:], [prompt[:-1]])
        found = texts.step(opened, [prompt[-1] for prompt in prompts])
    for text in opened:
        texts.end(text)
    off = float((found - expected).norm() / expected.norm())
    if not off <= (1e-3 if model.dtype == torch.float32 else 0.1):
        raise ValueError(f"logits over pages differ by {off:.1e} from the model's own")
