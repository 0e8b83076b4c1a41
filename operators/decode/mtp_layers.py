"""Layers for multi-token prediction (MTP): which of them a checkpoint has, and how they are built.

The layers are transformers' `MtpModel`, as the submodule `mtp` of an injected model: rules match their modules and operators replace them
like those of the body. The embedding, head and rotary embedding are the model's own. Families for which transformers declares no MTP layers
have them in the form of Qwen3-Next: one layer of the family's own class with full attention, under `mtp.`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_layers

from moegraft.operators.decode.rollback import unsupported_cache_reason
from moegraft.operators.errors import error_sentence
from moegraft.operators.structure import MTP

REPEATED = (".embed_tokens.weight", ".shared_head.head.weight")  # of layers in some checkpoints, the same as the model's
_SHARED = ("embed_tokens", "shared_head", "rotary_emb")
_NUMBERED = re.compile(r"^(?:.*\.)?layers\.(\d+)\.")
_UNDER_MTP = re.compile(rf"^(?:model\.)?{MTP}\.layers\.(\d+)\.")
_QWEN_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # Qwen3.5's config; what vLLM reads of Qwen3-Next's, which has none


def mtp_layers(model: nn.Module) -> Any:
    """Return the MTP layers of a model, an `MtpModel` or what was added with its interface; None where nothing was."""
    return model._modules.get(MTP)


def count_mtp_layers(model: nn.Module) -> int:
    """Return how many MTP layers were added to a model."""
    layers = mtp_layers(model)
    return 0 if layers is None else len(layers.layers)


def body_layers(config: PretrainedConfig) -> int:
    """Return how many layers a model has without its MTP layers, whose numbers follow."""
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def why_no_mtp(model_class: str, config: PretrainedConfig) -> str | None:
    """Return why MTP layers cannot be added to a stock model; None where they can, if the checkpoint has them.

    Args:
        config: as `with_declared_mtp` returns it.
    """
    library = getattr(modeling_layers, "MtpModel", None)
    if not hasattr(library, "forward_layer"):
        return f"transformers {transformers.__version__} cannot compute MTP layers one by one; install 5.23 or newer"
    count = _layer_count(config)
    stated = next((name for name in _QWEN_COUNTS if getattr(config.get_text_config(decoder=True), name, None)), None)
    if not count and stated is not None:
        return (
            f"the config of {model_class} states MTP layers ({stated}), and the checkpoint has none that can be computed: their tensors "
            "(mtp.fc.weight, mtp.layers.0) are in none of its files, mtp.safetensors included; complete the folder, or draft with "
            "'experts' or 'ngram'"
        )
    if not count:
        return (
            f"neither transformers nor the config of {model_class} declares MTP layers (num_mtp_layers, num_nextn_predict_layers or "
            "mtp_num_hidden_layers), and the checkpoint has none in the form of Qwen3-Next (mtp.fc.weight, mtp.layers.0); draft with "
            "'experts' or 'ngram'"
        )
    if count > 1 and not _declared_by_transformers(config):
        return f"{model_class} has {count} MTP layers that share one mtp.fc, and only one is computed; draft with 'experts' or 'ngram'"
    from transformers.cache_utils import MtpCache

    try:
        cache: Any = MtpCache(config=_mtp_config(config))
    except ValueError as error:
        return f"transformers cannot build the MTP layers of {model_class} from this config ({error_sentence(error)})"
    return unsupported_cache_reason(cache)


def with_declared_mtp(config: PretrainedConfig, keys: Collection[str] | None) -> PretrainedConfig:
    """Return a config with `num_mtp_layers`: the same where transformers' class has it, else a copy, if there are MTP layers.

    Args:
        keys: of the checkpoint's tensors, where they are at hand: they show which layers are dense, and how many there are if the config
            does not state it.
    """
    if _declared_by_transformers(config):
        return config
    text = config.get_text_config(decoder=True)
    found = {key.removeprefix("model.") for key in keys or () if mtp_key(key, body_layers(config)) is not None}
    stated: int | None = next((count for name in _QWEN_COUNTS if (count := getattr(text, name, None)) is not None), None)
    if keys is None:
        count = getattr(text, _QWEN_COUNTS[0], None) or 0  # others use the second name for layers of other forms
    elif f"{MTP}.fc.weight" not in found:
        count = 0
    else:
        count = len({match[1] for key in found if (match := _UNDER_MTP.match(key))}) if stated is None else stated
    if not count:
        return config
    declared = copy.deepcopy(config)
    text = declared.get_text_config(decoder=True)
    text.num_mtp_layers = count
    dense = [text.num_hidden_layers + number for number in range(count) if f"{MTP}.layers.{number}.mlp.gate_proj.weight" in found]
    if dense and hasattr(text, "mlp_only_layers"):
        text.mlp_only_layers = sorted({*text.mlp_only_layers, *dense})
    return declared


def _declared_by_transformers(config: PretrainedConfig) -> bool:
    text = type(config.get_text_config(decoder=True))
    return hasattr(text, "num_mtp_layers") or "num_mtp_layers" in text.attribute_map


def _layer_count(config: PretrainedConfig) -> int:
    return getattr(config.get_text_config(decoder=True), "num_mtp_layers", None) or 0


def _mtp_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the MTP layers alone, numbered from 0; ValueError if it does not state their kinds where there are several."""
    if _declared_by_transformers(config):
        return config.get_mtp_config()  # type: ignore[no-any-return, attr-defined] # of 5.23 and newer
    declared = copy.deepcopy(config)
    text = declared.get_text_config(decoder=True)
    if getattr(text, "layer_types", None) is not None:
        text.mtp_layer_types = ["full_attention"] * text.num_mtp_layers
    own = declared.get_mtp_config()  # type: ignore[attr-defined]
    if hasattr(own, "mlp_only_layers"):
        own.mlp_only_layers = [number - text.num_hidden_layers for number in text.mlp_only_layers if number >= text.num_hidden_layers]
    if hasattr(own, "decoder_sparse_step"):
        own.decoder_sparse_step = 1
    return own  # type: ignore[no-any-return]


def asked_states(model: nn.Module) -> int | tuple[int, ...]:
    """Return `output_hidden_states` of the passes of a model whose states are drafted from: MTP layers read the last ones."""
    return getattr(mtp_layers(model), "reads", -1)


def read_states(model: nn.Module, outputs: Any) -> torch.Tensor:
    """Return the states of a pass that was asked for `asked_states`, (B, T, H of all of them)."""
    asked, states = asked_states(model), outputs.hidden_states
    if isinstance(asked, int):
        found: torch.Tensor = states[-1]
        return found
    chosen = [each for each in states if each is not None]  # a program returns those of all layers as one
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)


def foresees_experts(model: nn.Module) -> bool:
    """Return whether the layers that draft compute states like the body's last ones, on which its routers can be asked."""
    return asked_states(model) == -1


def layers_cache(model: PreTrainedModel) -> Any:
    """Return an empty cache of the MTP layers that were added to a model."""
    from transformers.cache_utils import MtpCache

    return MtpCache(config=mtp_layers(model).config)


def add_mtp_layers(model: PreTrainedModel) -> None:
    """Add empty MTP layers to a stock model, on the device and in the dtype that are PyTorch's defaults at the moment."""
    from transformers.modeling_layers import MtpModel

    decoder: Any = model.get_decoder()
    # MtpModel takes the classes of the layer and of its norms from the last layer; linear attention has a gated norm.
    attending = [layer for layer in decoder.layers if hasattr(layer, "self_attn")]
    parts = SimpleNamespace(
        config=SimpleNamespace(get_mtp_config=lambda: _mtp_config(model.config)),
        get_decoder=lambda: SimpleNamespace(layers=attending or decoder.layers, rotary_emb=getattr(decoder, "rotary_emb", None)),
        get_input_embeddings=model.get_input_embeddings,
        lm_head=model.lm_head,
    )
    layers = MtpModel(parts, _layer_count(model.config))  # type: ignore[arg-type] # all that it reads of a model
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
    vars(mtp_layers(model)).update(zip(_SHARED, shared, strict=True), streams=WeakKeyDictionary())  # by the model's cache


def mtp_key(key: str, first: int) -> str | None:
    """Return the name by which transformers' conversions know a stored tensor of MTP layers; None for another tensor.

    Checkpoints number these layers after those of the body (DeepSeek, GLM), or have them under `mtp.` (Qwen3-Next, Inkling, Mellum).

    Args:
        first: the number of the first layer after the body.
    """
    numbered = _NUMBERED.match(key)
    if numbered is not None and int(numbered[1]) >= first:
        return f"{MTP}.layers.{int(numbered[1]) - first}.mtp_block.{key[numbered.end() :]}"
    bare = key.removeprefix("model.")
    return bare if bare.startswith(f"{MTP}.") else None


def is_declared_mtp_key(key: str, config: PretrainedConfig) -> bool:
    """Whether a stored tensor is under `mtp.`, or of one of as many layers after the body as the config declares."""
    numbered = _NUMBERED.match(key)
    first, text = body_layers(config), config.get_text_config(decoder=True)
    if numbered is None or key.removeprefix("model.").startswith(f"{MTP}."):
        return mtp_key(key, first) is not None
    stated = max(getattr(text, name, None) or 0 for name in ("num_mtp_layers", *_QWEN_COUNTS))
    return first <= int(numbered[1]) < first + stated
