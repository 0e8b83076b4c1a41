"""Opening the pool of a server's sequences: its memory, and the comparison of a few tokens' logits with those of the model's own cache."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from moegraft.injection.cli.images import ImageInputs
from moegraft.injection.cli.serve.pages import MOST_CHECKPOINTS, SequencePool
from moegraft.injection.injected import injection_of
from moegraft.operators.base import CACHE
from moegraft.operators.cache_form import layer_types
from moegraft.operators.decode.cache import new_cache
from moegraft.operators.decode.mtp import PagedStreams, example_cache
from moegraft.operators.decode.pages import PAGE_TOKENS, PagedCache, PagedSequence, PagePool, pages_of, token_bytes
from moegraft.operators.decode.state_pool import StatePool
from moegraft.operators.decode.states import has_states, state_tensors
from moegraft.operators.draft import BatchDrafts
from moegraft.operators.machine import probe_machine
from moegraft.operators.structure import counts_cached_tokens, sees_whole_images

logger = logging.getLogger(__name__)
MOST_RAGGED = 64  # tokens of prompts in a pass of decoding
PAST_SHARE = 8  # of the memory, for the states after each token of a draft, at most


class UnbatchableError(Exception):
    """Sequences of a model cannot be computed together."""


def default_limit(model: PreTrainedModel) -> int:
    """Return half of the memory that is free on the model's device and that no experts in files will fill, in bytes."""
    machine, injection = probe_machine(), injection_of(model)
    gpus = [gpu.free_bytes for gpu in machine.gpus] if model.device.type == "cuda" else []
    promised = 0 if injection is None else injection.context.framed_layers.unfilled_bytes
    return (min(gpus) if gpus else max(0, machine.available_bytes - promised)) // 2


def open_pool(
    model: PreTrainedModel,
    *,
    limit: int | None,
    prefix_bytes: int | None,
    most: int,
    context: int | None,
    coded: bool = False,
    drafts: BatchDrafts | None = None,
    images: ImageInputs | None = None,
) -> SequencePool:
    """Return a pool for the sequences of a model, which has computed a few tokens in it with the logits of its own cache.

    Args:
        limit: bytes of keys, values and recurrent states. By default those of `default_limit`, and at most what `most + 4` whole contexts
            need.
        prefix_bytes: of these, for prefixes; by default half. Checkpoints of states have at most half of that.
        most: sequences at once.
        context: tokens of one sequence.
        coded: whether keys and values are stored as codes, so that logits may differ more from those of the model's own cache.
        drafts: if the model drafts: keys and values of MTP layers are in the pages as well, and a part of the limit is for the states after
            each token of a draft.
        images: a prompt with images, whose logits have to be those of the model's own cache as well.

    Raises:
        UnbatchableError: the forward pass fails on a few tokens, or computes other logits beside another sequence.
    """
    counting = next((module for module in model.modules() if counts_cached_tokens(module)), None)
    if counting is not None:  # not seen in the logits of a few tokens, as the scale of queries is 1 up to thousands
        kind = type(counting).__name__
        raise UnbatchableError(f"{kind} scales queries by the number of tokens in the cache, which is one for all sequences of a batch")
    try:
        example, expected = _stock_steps(model)
        noise = _off(_stock_steps(model, singly=3)[1], expected)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # what a single answer by `generate` may not need
        raise UnbatchableError(f"it cannot compute a few tokens with a cache of its own ({error})") from error
    layers: list[Any] = list(example.layers)  # without a common type
    body = len(layers)
    mtp = _mtp_example(model) if drafts is not None and drafts.by_mtp_layers else None
    verified = 0 if drafts is None else drafts.longest + 1  # tokens of the longest pass over a draft
    layers += [] if mtp is None else mtp.layers
    grown = [each for layer in layers for each in (getattr(layer, "keys", None), getattr(layer, "values", None)) if each is not None]
    size = sum(token_bytes(each, coded=coded) for each in grown)  # of a token
    if not size:
        raise UnbatchableError("it has no layers of attention, whose keys and values would be stored in pages")
    state_bytes = sum(tensor.nbytes for tensor in state_tensors(example).values())
    if limit is None:
        limit = default_limit(model)
        if context is not None:
            limit = min(limit, (most + 4) * (pages_of(context) * PAGE_TOKENS * size + (1 + MOST_CHECKPOINTS + verified) * state_bytes))
    prefix_bytes = limit // 2 if prefix_bytes is None else min(prefix_bytes, limit)
    running = checkpoints = past_rows = 0
    if state_bytes:
        running = max(2, min(most, limit // 2 // state_bytes))
        checkpoints = min(prefix_bytes // 2 // state_bytes, (most + 4) * MOST_CHECKPOINTS)
        past_rows = min(running, limit // PAST_SHARE // (verified * state_bytes)) if verified else 0
    pages = (limit - (running + checkpoints + past_rows * verified) * state_bytes) // (size * PAGE_TOKENS)
    try:
        if pages < 1:
            raise ValueError("the limit has no room for a page")
        places = {"running": running, "checkpoints": checkpoints, "past_rows": past_rows, "past_tokens": verified}
        states = StatePool(example, **places) if state_bytes else None
        most_tokens, rows = min(context or pages * PAGE_TOKENS, pages * PAGE_TOKENS), most * max(1, verified) + MOST_RAGGED
        stored = Cache(layers=layers)
        own = range(body, len(layers))
        memory = PagePool(stored, pages, most_sequences=rows, most_tokens=most_tokens, coded=coded, states=states, cleared=own)
    except torch.AcceleratorError:
        raise
    except (ValueError, RuntimeError) as error:  # the latter: there is not enough memory
        raise UnbatchableError(f"its keys and values cannot be stored in pages ({error})") from error
    # Operators that read pages know these kinds of layers, and no tokens of images that see later ones; the model's own masks are right.
    known = set(layer_types(model.config)) <= KNOWN_LAYERS and (images is None or not sees_whole_images(model.config))
    reason = "its attention is of a kind that is not computed over codes"
    for offers_pages in (each for each in (True, False) if (known if each else not coded)):
        caches = [cache := PagedCache(memory, example, offers_pages=offers_pages)]
        streams = None
        if drafts is not None and mtp is not None:
            injection = injection_of(model)
            ours = None if injection is None else injection.context
            switch, engines = (None, None) if ours is None else (ours.draft_switch, ours.gpu_engines_in_use)
            given = {"first": body, "longest": drafts.longest}
            streams = PagedStreams(model, memory, mtp, **given, switch=switch, engines=engines, offers_pages=offers_pages)
            caches.append(streams.cache)
        pool = SequencePool(model, cache, prefix_bytes, streams)
        try:
            _check(model, pool, expected, noise)
            if images is not None:
                _check_images(model, pool, images)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 # the model's own code computes with states that it does not expect
            reason = str(error)
            continue
        for each in caches:
            each.offers_pages = False
        if any(each.gathers for each in caches):
            logger.info("serve: keys and values are gathered from their pages, as not all of the model's attention reads pages")
        pool.ragged = states is None and not cache.gathers and _computes_ragged(model, pool, expected, noise)
        return pool
    raise UnbatchableError(f"it cannot compute sequences of several lengths together ({reason})")


KNOWN_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp", "dummy"}
_PROBES = ([1, 2, 3, 4, 5], [*range(3, 3 + 2 * PAGE_TOKENS - 3)])  # prompts, of which one begins a second page


def _stock_steps(model: PreTrainedModel, singly: int = 1) -> tuple[DynamicCache, torch.Tensor]:
    """Return a cache with tokens, and the logits that follow both probes, (2, V), whose last `singly` tokens are computed one by one."""
    call: Any = model
    steps = []
    with torch.inference_mode():
        for prompt in _probes(model):
            cache = new_cache(model)
            call(input_ids=torch.tensor([prompt[:-singly]], device=model.device), use_cache=True, **{CACHE: cache})
            for token in prompt[-singly:]:  # a step that returns no cache is not recorded: no other will be over this one
                output = call(input_ids=torch.tensor([[token]], device=model.device), use_cache=False, **{CACHE: cache})
            steps.append(output.logits[0, -1].float())
    return cache, torch.stack(steps)


def _mtp_example(model: PreTrainedModel) -> Cache:
    try:
        cache = example_cache(model)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        raise UnbatchableError(f"its MTP layers cannot compute a token ({error})") from error
    if any(map(has_states, cache.layers)):
        raise UnbatchableError("its MTP layers keep recurrent or convolution states, of which a batch has none")
    return cache


def _probes(model: PreTrainedModel) -> list[list[int]]:
    embeddings: Any = model.get_input_embeddings()
    return [[token % embeddings.weight.shape[0] for token in prompt] for prompt in _PROBES]


@contextmanager
def _begun(model: PreTrainedModel, pool: SequencePool) -> Iterator[tuple[list[PagedSequence], list[list[int]]]]:
    """Yield sequences for both probes, and these, in inference mode."""
    prompts = _probes(model)
    sequences = [pool.begin(prompt, len(prompt)) for prompt in prompts]
    try:
        with torch.inference_mode():
            yield sequences, prompts
    finally:
        for sequence in sequences:
            pool.end(sequence)


def _off(computed: torch.Tensor, expected: torch.Tensor) -> float:
    return float((computed - expected).norm() / expected.norm())


def _check(model: PreTrainedModel, pool: SequencePool, expected: torch.Tensor, noise: float) -> None:
    """Compare the logits after both probes, which are computed in parts, with `expected`.

    Args:
        noise: by how much the model's own logits differ where the last tokens are computed one by one: by other kernels, and quantised
            activations and routers make more of a last bit.

    Raises:
        ValueError: they differ.
    """
    with _begun(model, pool) as (sequences, prompts):
        for sequence, prompt in zip(sequences, prompts, strict=True):
            pool.forward([sequence], [prompt[:-3]])
        pool.forward(sequences, [prompt[-3:-1] for prompt in prompts])
        computed = pool.step(sequences, [prompt[-1] for prompt in prompts])
        # Tokens that a head cannot draft have -inf.
        finite = pool.streams is None or bool((pool.draft(sequences, [[*prompt, 0] for prompt in prompts]) < math.inf).all())
    if not finite:
        raise ValueError("drafted logits over pages are not finite")
    off = _off(computed, expected)
    if not off <= max(4 * noise, _tolerance(model, pool)):
        raise ValueError(f"logits over pages differ by {off:.1e} from the model's own")


def _computes_ragged(model: PreTrainedModel, pool: SequencePool, expected: torch.Tensor, noise: float) -> bool:
    """Return whether a pass over different numbers of tokens of both probes has the logits `expected`."""
    try:
        with _begun(model, pool) as (sequences, prompts):
            pool.forward(sequences[:1], [prompts[0][:1]])
            computed = pool.forward_ragged(sequences, [prompts[0][1:], prompts[1]], [1, 1])
        off = _off(computed, expected)
        if off <= max(4 * noise, _tolerance(model, pool)):
            return True
        reason: object = f"its logits differ by {off:.1e} from the model's own"
    except Exception as error:  # noqa: BLE001 # the model's own code may need rows of one sequence
        reason = error
    logger.info("serve: passes have equally many tokens of each sequence, as one with different numbers failed: %s", reason)
    return False


def _tolerance(model: PreTrainedModel, pool: SequencePool) -> float:
    return 1e-3 if model.dtype == torch.float32 and not pool.coded else 0.1


def _check_images(model: PreTrainedModel, pool: SequencePool, images: ImageInputs) -> None:
    """Compare the logits of a token after a prompt with images, which is computed in parts, with those of the model's own cache."""
    call: Any = model
    ids, token, device = images.token_ids, images.token_ids[-1:], model.device
    with torch.inference_mode():
        cache = new_cache(model)
        given = images.arguments(0, len(ids))
        call(input_ids=torch.tensor([ids], device=device), use_cache=True, **{CACHE: cache}, **given)
        place = torch.tensor([[len(ids) + images.position_shift]], device=device)
        output = call(input_ids=torch.tensor([token], device=device), use_cache=False, position_ids=place, **{CACHE: cache})
        sequence = pool.begin(ids, len(ids) + 1, multiple=0, images=images)
        try:
            pool.forward([sequence], [ids[: images.end]], **images.arguments(0, images.end))
            sequence.position_shift = images.position_shift
            pool.forward([sequence], [ids[images.end :]])
            off = _off(pool.step([sequence], token), output.logits[:, -1].float())
        finally:
            pool.end(sequence)
    if not off <= _tolerance(model, pool):
        raise ValueError(f"logits after an image over pages differ by {off:.1e} from the model's own")
