"""The cache that the prompts of a conversation share, prompts in chunks, and checkpoints of what cannot be cropped: states and windows.

A chunk limits the memory of a prompt's activations.

Keys and values of full attention can be cropped to any earlier token. Recurrent and convolution states stand for all tokens so far, and a
sliding window has dropped the tokens before it: a prompt that changes the last tokens of the conversation can only go on from a position
at which these were copied. Chat templates do change them: they leave out an answer's reasoning, or end a turn with other tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, QuantizedCache

from moegraft.injection.cli.images import ImageInputs
from moegraft.injection.injected import new_cache
from moegraft.operators.base import CACHE
from moegraft.operators.cache_form import layer_types, name_layers
from moegraft.operators.decode.mtp import read_chunk
from moegraft.operators.decode.mtp_layers import asked_states, mtp_layers, read_states
from moegraft.operators.decode.pages import LayerInPages
from moegraft.operators.decode.states import (
    TENSORS,
    SavedStates,
    attention_part,
    has_states,
    keeps_nothing,
    moves_states,
    passes_are_split,
    why_not_split,
)
from moegraft.operators.errors import human_bytes

logger = logging.getLogger(__name__)
PREFILL_CHUNK = 2048  # tokens
APPENDABLE = (DynamicLayer, DynamicSlidingWindowLayer)  # layers to which tokens can be appended in chunks
# Tokens of a model with states: a chunk and the rest have several each, as one alone is a step of decoding, which may round otherwise
# (Nemotron-H limits its time steps in prompts only).
LEAST_STATE_CHUNK = 4
CHECKPOINT_TOKENS = 2048  # of a prompt between two checkpoints, at least
CHECKPOINT_BYTES = 1 << 30  # of the checkpoints of one cache
# What a template writes after the last message, such as a mark that begins the answer's reasoning, which the next prompt may not have. The
# checkpoint at the end of a prompt is before it.
OPENING_TOKENS = 8
LEAST_TOKENS = 64  # that a checkpoint saves: it ends a forward pass, and one over a few tokens takes as long as some decode steps


def why_not_appendable(model: PreTrainedModel) -> str | None:
    """Return the reason why this model cannot prefill in chunks; None if it can.

    Tokens are appended to layers of attention in their dtype, to those with recurrent or convolution states, and to both in one.
    """
    cache, names = DynamicCache(config=model.config.get_text_config(decoder=True)), layer_types(model.config)
    bad = []
    for number, layer in enumerate(cache.layers):
        part = attention_part(layer)
        appendable = part in APPENDABLE or (part is None and has_states(layer))
        if not appendable and not keeps_nothing(layer):
            bad.append(number)
    if bad:
        return name_layers(cache.layers, bad, names)[0]
    reason = why_not_split(model, cache, names)
    if reason is None and not all(passes_are_split(module) for module in model.modules() if moves_states(module)):
        return "its layers keep states, and moegraft has not loaded it"
    return reason


def chunk_size(model: PreTrainedModel, chunk_tokens: int) -> int:
    """Return the tokens of a model's chunks where `chunk_tokens` are asked for; 0 where it computes prompts at once."""
    if not chunk_tokens or why_not_appendable(model) is not None:
        return 0
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return max(chunk_tokens, LEAST_STATE_CHUNK) if any(map(has_states, layers)) else chunk_tokens


@torch.no_grad()
def read_ahead(model: PreTrainedModel, token_ids: list[int], cache: DynamicCache | None, chunk_tokens: int) -> DynamicCache | None:
    """Compute a prompt chunk by chunk until at most `chunk_tokens` are left, which `generate` computes.

    Args:
        token_ids: the whole prompt; `cache` may hold its beginning.
        cache: None for a new one.
        chunk_tokens: 0 leaves everything to `generate`; see `chunk_size`.

    Returns:
        The cache; `cache` itself, None included, if no chunk was computed.
    """
    computed = tokens_in(cache)
    if len(token_ids) - computed <= chunk_tokens:
        return cache
    chunk_tokens = chunk_size(model, chunk_tokens)
    if not chunk_tokens or len(token_ids) - computed <= chunk_tokens:
        return cache
    cache = cache if cache is not None else new_cache(model)
    stateful = any(map(has_states, cache.layers))
    call: Any = model
    # The logits of a chunk are not used, and with a large vocabulary they would be the largest tensor.
    extra: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    drafts = mtp_layers(model) is not None
    if drafts:
        extra["output_hidden_states"] = asked_states(model)
    while (left := len(token_ids) - computed) > chunk_tokens:
        size = chunk_tokens - 1 if stateful and left == chunk_tokens + 1 else chunk_tokens
        chunk = torch.tensor([token_ids[computed : computed + size]], device=model.device)
        outputs = call(input_ids=chunk, use_cache=True, **{CACHE: cache}, **extra)
        computed += size
        if drafts:
            read_chunk(model, cache, torch.tensor([token_ids[: computed + 1]], device=model.device), read_states(model, outputs))
    return cache


class Checkpoint:
    """A copy of the states and sliding windows of a cache after its first `tokens` tokens, which are all that it holds.

    Attributes:
        nbytes: of the copy.
    """

    def __init__(self, cache: Cache, tokens: int) -> None:
        self.tokens = tokens
        self._states = SavedStates(cache)
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        layers: list[Any] = cache.layers  # without a common type
        for number, layer in enumerate(layers):
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
                self._windows[number] = _copy(layer.keys), _copy(layer.values)
        self.nbytes = self._states.nbytes + sum(each.nbytes for pair in self._windows.values() for each in pair)

    def restore(self, cache: Cache) -> None:
        """Crop a cache that holds these tokens and later ones; of a new cache of the model, set the states and windows alone."""
        layers: list[Any] = cache.layers
        for number, layer in enumerate(layers):
            if number in self._windows:
                keys, values = (each.clone() for each in self._windows[number])
                if not layer.is_initialized:
                    layer.lazy_initialization(keys, values)
                layer.keys, layer.values, layer.cumulative_length = keys, values, self.tokens
            elif isinstance(layer, DynamicLayer | LayerInPages) and (extra := layer.get_seq_length() - self.tokens) > 0:
                kind: Any = DynamicLayer if has_states(layer) else type(layer)  # a layer that has states as well refuses to crop
                kind.crop(layer, -extra)
        self._states.restore(cache)


class PromptCache:
    """A key-value cache and the tokens that it holds, kept between prompts, with checkpoints of its states and sliding windows.

    The next prompt goes on from the last token that it shares, or from the latest checkpoint before it where the cache cannot be cropped.
    Checkpoints are made at the end of each prompt and of each answer, and every `CHECKPOINT_TOKENS` tokens of a prompt. A quantised cache
    of transformers can only be extended. The log reports once what is computed again.

    Args:
        checkpoint_bytes: of all checkpoints; the one that saves the fewest tokens is dropped first.
    """

    def __init__(self, model: PreTrainedModel, checkpoint_bytes: int = CHECKPOINT_BYTES) -> None:
        self._model = model
        self._most_bytes = checkpoint_bytes
        self._token_ids: list[int] = []
        self._cache: DynamicCache | None = None
        # By cache, as several prompts may be computed alternately: a cache that is lost loses its checkpoints.
        self._checkpoints: WeakKeyDictionary[Cache, list[Checkpoint]] = WeakKeyDictionary()
        self._logged: set[str] = set()

    @property
    def contents(self) -> tuple[list[int], DynamicCache | None]:
        """The tokens in the cache, and the cache."""
        return self._token_ids, self._cache

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Those of the cache , the earliest first."""
        return self._of(self._cache)

    def lines(self) -> list[str]:
        """Describe the states and checkpoints of the cache, where it has any."""
        layers: list[Any] = [] if self._cache is None else self._cache.layers
        states = [state for layer in filter(has_states, layers) for name in TENSORS for state in getattr(layer, name).values()]
        state_bytes = sum(state.nbytes for state in states if state is not None)
        lines = [f"states: {human_bytes(state_bytes)} after {len(self._token_ids):,} tokens"] if state_bytes else []
        if self.checkpoints:
            places = ", ".join(f"{checkpoint.tokens:,}" for checkpoint in self.checkpoints)
            lines.append(f"checkpoints: {human_bytes(self.checkpoint_bytes(self._cache))}, after {places} tokens")
        return lines

    def checkpoint_bytes(self, cache: Cache | None) -> int:
        """Return the bytes of the checkpoints of a cache, which the caller may own."""
        return sum(checkpoint.nbytes for checkpoint in self._of(cache))

    def _of(self, cache: Cache | None) -> list[Checkpoint]:
        return [] if cache is None else self._checkpoints.get(cache, [])

    def take(self, token_ids: list[int], images: ImageInputs | None = None) -> tuple[DynamicCache | None, int]:
        """Return the cache cropped to tokens that it shares with a prompt, and their number.

        The caller owns the cache from then on. `keep` gives it back; after an interrupted answer it is lost.

        Args:
            token_ids: of a prompt with `images`, its `cache_ids`.
        """
        cache, cached_ids = self._cache, self._token_ids
        self.drop()
        most = min(len(cached_ids), len(token_ids[:-1]))  # the last token has to be computed
        shared = next((place for place in range(most) if cached_ids[place] != token_ids[place]), most)
        shared = shared if images is None else images.usable(shared)
        if cache is None or not shared:
            return None, 0
        if shared == len(cached_ids):
            self.checkpoint(cache, 0)
            return cache, shared
        fixed = _why_not_cropped(cache)
        if fixed is None:
            cache.crop(shared - len(cached_ids))  # negative: that many tokens are removed; older versions read 0 as "all"
        else:
            earlier = [checkpoint for checkpoint in self._of(cache) if checkpoint.tokens <= shared]
            earlier = [each for each in earlier if images is None or images.usable(each.tokens) == each.tokens]
            if not earlier:
                self._log_once(f"an earlier part of the conversation changed, and {fixed} cannot be cropped: all of it is computed again")
                return None, 0
            shared = earlier[-1].tokens
            earlier[-1].restore(cache)
        self._checkpoints[cache] = [checkpoint for checkpoint in self._of(cache) if checkpoint.tokens <= shared]
        return cache, shared

    def read_ahead(self, token_ids: list[int], cache: DynamicCache | None, chunk_tokens: int) -> DynamicCache | None:
        """Compute a prompt in chunks as `read_ahead` does, with the checkpoints that the model needs, the last near its end."""
        end = len(token_ids) - OPENING_TOKENS
        computed = tokens_in(cache)
        saved = max([computed, *(checkpoint.tokens for checkpoint in self._of(cache))])
        if end - saved >= LEAST_TOKENS and self._needs_checkpoints(cache):
            cache = new_cache(self._model) if cache is None else cache
            while computed < end:
                left = end - computed
                step = left if not chunk_tokens or left <= chunk_tokens else min(chunk_tokens, left - LEAST_STATE_CHUNK)
                read_ahead(self._model, token_ids[: computed + step + 2], cache, step)
                if tokens_in(cache) == computed:
                    break
                computed = tokens_in(cache)
                self.checkpoint(cache, CHECKPOINT_TOKENS if computed < end else 0)
        return read_ahead(self._model, token_ids, cache, chunk_tokens)

    def generate(
        self, token_ids: list[int], cache: DynamicCache | None, images: ImageInputs | None, chunk_tokens: int, **arguments: Any
    ) -> None:
        """Let the model generate an answer to a prompt, whose beginning `cache` has, and keep the cache.

        Args:
            cache: from `take`, or with more of the prompt.
            images: of the prompt, which is then computed as a whole; otherwise it is in chunks, as `read_ahead` computes it.
            arguments: of the model's `generate`, such as a streamer, which gets the answer.
        """
        cache = self.read_ahead(token_ids, cache, chunk_tokens) if images is None else cache
        of_images = {} if images is None else images.generate_arguments(tokens_in(cache))
        prompt = torch.tensor([token_ids], device=self._model.device)
        model: Any = self._model  # torch types every attribute of a module as a tensor
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=1,  # beams cannot be streamed, nor can several sequences
            num_return_sequences=1,
            max_length=None,  # max_new_tokens alone decides
            return_dict_in_generate=True,
            **{CACHE: cache},
            **of_images,
            **arguments,
        )
        cache_ids = token_ids if images is None else images.cache_ids
        self.keep([*cache_ids, *made.sequences[0, len(token_ids) :].tolist()], made.get(CACHE))

    def checkpoint(self, cache: DynamicCache | None, least_tokens: int = CHECKPOINT_TOKENS) -> None:
        """Make a checkpoint of a cache that needs it, unless fewer than `least_tokens` tokens follow the latest one."""
        tokens, before = tokens_in(cache), self._of(cache)
        if cache is not None and self._needs_checkpoints(cache) and tokens - (before[-1].tokens if before else 0) >= max(least_tokens, 1):
            self._add(cache, tokens)

    def keep(self, token_ids: list[int], cache: Any, checkpoints: Sequence[Checkpoint] = ()) -> None:
        """Keep the cache that `generate` returned, or one with its checkpoints; the last of `token_ids` may not be in the cache yet."""
        reason = None if isinstance(cache, QuantizedCache) else self._why_not_reused(cache)
        if reason is not None:
            self._log_once(f"each turn computes the whole conversation again: {reason}")
            return
        self._cache, self._token_ids = cache, token_ids[: cache.get_seq_length()]
        if checkpoints:
            self._checkpoints[cache] = list(checkpoints)

    def drop(self) -> None:
        self._cache, self._token_ids = None, []

    def _needs_checkpoints(self, cache: Cache | None) -> bool:
        """Whether a cache that can be kept, None for a new one, may come to hold what cannot be cropped."""
        if not self._most_bytes or why_not_appendable(self._model) is not None:
            return False
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True)) if cache is None else cache
        fixed = any(has_states(layer) or isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers)
        return fixed and not isinstance(cache, QuantizedCache) and self._why_not_reused(cache) is None

    def _why_not_reused(self, cache: Any) -> str | None:
        coded = isinstance(cache, Cache) and any(isinstance(layer, LayerInPages) for layer in cache.layers)
        if type(cache) is not DynamicCache and not coded:
            return f"a cache of {type(cache).__name__} cannot be kept"
        if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
            return "its cache does not count tokens"
        return why_not_appendable(self._model)

    def _add(self, cache: DynamicCache, tokens: int) -> None:
        checkpoints = [checkpoint for checkpoint in self._of(cache) if checkpoint.tokens < tokens]
        checkpoints.append(Checkpoint(cache, tokens))
        while checkpoints and sum(checkpoint.nbytes for checkpoint in checkpoints) > self._most_bytes:
            places = [0, *(checkpoint.tokens for checkpoint in checkpoints)]
            saves = [after - before for before, after in zip(places, places[2:], strict=False)]  # of each but the latest
            del checkpoints[saves.index(min(saves)) if saves else 0]
        self._checkpoints[cache] = checkpoints

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning("%s", message)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a window that is initialised has keys and values"
    return tensor.clone(memory_format=torch.contiguous_format)


def tokens_in(cache: DynamicCache | None) -> int:
    return 0 if cache is None else cache.get_seq_length()


def _why_not_cropped(cache: Cache) -> str | None:
    """Return what in a cache cannot be cropped, None if everything can."""
    if isinstance(cache, QuantizedCache):
        return "a quantised cache"
    if any(has_states(layer) for layer in cache.layers):
        return "a recurrent state"
    windows = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    return "a sliding window" if any(layer.cumulative_length >= layer.sliding_window for layer in windows) else None
