"""Multi-token prediction: layers of a checkpoint that predict the tokens after the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2).

The layers are transformers' `MtpModel`, as the submodule `mtp` of an injected model: rules match their modules and operators replace them
like those of the body. The embedding, head and rotary embedding are the model's own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Cache, PreTrainedModel, modeling_layers

from moegraft.operators.decode.acceptance import AcceptanceRule, DraftToken
from moegraft.operators.decode.drafts import Drafter, draw
from moegraft.operators.decode.loop import DecodedSequence
from moegraft.operators.decode.rollback import CacheMark, longest_rewind, unsupported_cache_reason
from moegraft.operators.draft import DraftSwitch
from moegraft.operators.errors import error_sentence

MTP = "mtp"  # the submodule of an injected model
MANY = 8  # tokens that a draft feeds before its own; more count as preparation
_SHARED = ("embed_tokens", "shared_head", "rotary_emb")
_NUMBERED = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")


def mtp_layers(model: nn.Module) -> Any:
    """Return the MTP layers of a model, an `MtpModel`; None where none were added."""
    return model._modules.get(MTP)


def why_no_mtp(model: PreTrainedModel) -> str | None:
    """Return why MTP layers cannot be added to a stock model; None where they can, if the checkpoint has them."""
    library = getattr(modeling_layers, "MtpModel", None)
    if not hasattr(library, "forward_layer"):
        return f"transformers {transformers.__version__} cannot compute MTP layers one by one; install 5.23 or newer"
    if not _layer_count(model):
        return (
            f"transformers computes no MTP layers of {type(model).__name__}, or its config states none (num_mtp_layers or "
            "num_nextn_predict_layers); draft with 'experts' or 'ngram'"
        )
    try:
        cache = new_mtp_cache(model)
    except ValueError as error:
        return f"transformers cannot build the MTP layers of {type(model).__name__} from this config ({error_sentence(error)})"
    return unsupported_cache_reason(cache)


def _layer_count(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None) or 0


def new_mtp_cache(model: PreTrainedModel) -> Any:
    """Return an empty cache of the MTP layers of a model."""
    from transformers.cache_utils import MtpCache

    return MtpCache(config=model.config.get_mtp_config())


def add_mtp_layers(model: PreTrainedModel) -> None:
    """Add empty MTP layers to a stock model, on the device and in the dtype that are PyTorch's defaults at the moment."""
    from transformers.modeling_layers import MtpModel

    layers = MtpModel(model, _layer_count(model))
    for name in _SHARED:
        layers._modules.pop(name, None)
        vars(layers)[name] = None
    model.add_module(MTP, layers)


def share_with_mtp(model: PreTrainedModel) -> None:
    """Let the MTP layers of a loaded model compute with its embedding, head and rotary embedding, which stay its own submodules."""
    decoder: Any = model.get_decoder()
    embedding: Any = model.get_input_embeddings()
    if hasattr(embedding, "embed_norm"):  # a part of the model's layer alone
        embedding = copy.copy(embedding)
        embedding._modules = {**embedding._modules, "embed_norm": nn.Identity()}
    shared = embedding, model.lm_head, getattr(decoder, "rotary_emb", None)
    vars(mtp_layers(model)).update(zip(_SHARED, shared, strict=True))


def mtp_key(key: str, body_layers: int) -> str | None:
    """Return the name by which transformers' conversions know a stored tensor of MTP layers; None for another tensor.

    Checkpoints number these layers after those of the body (DeepSeek, GLM), or have them under `mtp.` (Inkling, Mellum).
    """
    numbered = _NUMBERED.match(key)
    if numbered is not None and int(numbered[1]) >= body_layers:
        return f"{MTP}.layers.{int(numbered[1]) - body_layers}.mtp_block.{key[numbered.end() :]}"
    bare = key.removeprefix("model.")
    return bare if bare.startswith(f"{MTP}.") else None


@dataclass(slots=True)
class _Streams:
    """What MTP layers have computed of one sequence.

    Attributes:
        cache: of each layer, those entries whose tokens are in the sequence.
        waiting: of each layer, the states (1, T, H) before it, up to the latest, of positions without an entry.
        latest: the first layer's last state (1, 1, H).
        position: of the body's next state.
    """

    cache: Any
    waiting: list[list[torch.Tensor]]
    position: int
    latest: torch.Tensor | None = None


class MtpDrafter(Drafter):
    """The MTP layers: layer k predicts the token k + 2 positions after a state of the body, from it and the k + 1 tokens between them.

    Drafts longer than there are layers feed the last layer's own states back to it. What drafts add to the layers' caches is removed.

    Args:
        confidence: a draft ends after a token of lower probability.
        kept: what was computed of texts that a later call may go on with, by the model's cache.
    """

    feeds = False  # the model's cache
    reads_hidden_states = True

    def __init__(self, model: PreTrainedModel, confidence: float, switch: DraftSwitch, kept: MutableMapping[Any, _Streams]) -> None:
        self._layers = mtp_layers(model)
        self._confidence = confidence
        self._switch = switch
        self._kept = kept
        self._streams = _Streams(new_mtp_cache(model), [[] for _ in self._layers.layers], 0)
        self._last = len(self._layers.layers) - 1

    def begin(self, sequence: DecodedSequence) -> None:
        states = sequence.hidden_states
        assert states is not None, "the sequence was asked for them"
        first = sequence.length - 1 - states.shape[1]
        earlier = self._kept.pop(sequence.cache, None)
        if earlier is not None and earlier.position == first:
            self._streams = earlier
        self.keep(sequence, states.shape[1])
        self._settle_all(sequence)  # now: a round that measures drafts does not measure the prompt

    def keep(self, sequence: DecodedSequence, tokens: int) -> None:
        assert sequence.hidden_states is not None, "the sequence was asked for them"
        self._streams.waiting[0].append(sequence.hidden_states[:, :tokens])
        self._streams.position = sequence.length - 1

    def end(self, sequence: DecodedSequence) -> None:
        if sequence.cache is not None:
            self._kept[sequence.cache] = self._streams

    def draft(
        self, sequence: DecodedSequence, rule: AcceptanceRule, length: int, continues: Callable[[Sequence[float]], bool]
    ) -> list[DraftToken]:
        streams = self._streams
        longest = longest_rewind(streams.cache)
        if longest is not None:
            length = min(length, longest - self._last)
        if length < 1:
            return []
        if sum(each.shape[1] for each in streams.waiting[0]) > MANY:  # plain steps came before: the next draft will take less time
            self._switch.preparations += 1
        self._settle_all(sequence)
        marks: list[CacheMark] = []
        assert streams.latest is not None, "the prompt has a token"
        states: torch.Tensor = streams.latest

        def logits_after(tokens: Sequence[int]) -> torch.Tensor:
            nonlocal states
            number = min(len(tokens), self._last)
            if len(tokens) == len(marks) <= self._last:
                marks.append(CacheMark(Cache(layers=[streams.cache.layers[number]]), 2))
                if number:
                    states = torch.cat([*streams.waiting[number], *([states] if number > 1 else [])], dim=1)
            if tokens:
                fed = states if len(tokens) <= self._last else states[:, -1:]
                states = self._feed(number, fed, sequence.followed_by(tokens))
            logits: torch.Tensor = self._layers._project_to_logits(states[:, -1:])[0, -1]
            return logits.to(torch.float32)

        try:
            return draw(sequence, rule, length, continues, self._confidence, logits_after)
        finally:
            for mark in marks:
                mark.rewind()

    def _settle_all(self, sequence: DecodedSequence) -> None:
        for number in range(self._last + 1):
            self._settle(number, sequence.input_ids)

    def _settle(self, number: int, ids: torch.Tensor) -> None:
        """Feed a layer all states whose tokens are in the sequence `ids`: of the layers after the first, the latest one's is not."""
        waiting = self._streams.waiting
        size = sum(each.shape[1] for each in waiting[number]) - (number > 0)
        if size < 1:
            return
        before = torch.cat(waiting[number], dim=1)
        states = self._feed(number, before[:, :size], ids)
        waiting[number] = [before[:, size:]]
        if number == 0:
            self._streams.latest = states[:, -1:]
        if number < self._last:
            waiting[number + 1].append(states)

    def _feed(self, number: int, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Feed a layer states (1, T, H), each with one of the last T tokens of `ids`; return its own states."""
        end, size = ids.shape[1], states.shape[1]
        positions = torch.arange(end - size, end, device=ids.device)[None]
        made: torch.Tensor = self._layers.forward_layer(
            number, states, position_ids=positions, mtp_cache=self._streams.cache, input_ids=ids[:, -size:]
        )
        return made
