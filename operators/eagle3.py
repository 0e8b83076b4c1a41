"""EAGLE-3 heads: drafters with a checkpoint of their own, trained on the hidden states of one model (Li et al. 2025, arXiv:2503.01840).

A head reads the model's states after three layers, which one matrix brings to its own hidden size, and the embedding of the token after
each of them. One decoder layer over both predicts the token after that, in a vocabulary of the most frequent tokens. Longer drafts feed its
own states back to it. `Eagle3Head` has the interface of transformers' `MtpModel` with one layer, and takes its place as the model's
submodule `mtp`: drafts, caches, rollback, replay and batches are those of MTP layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.utils import output_capturing

from moegraft.operators.base import CACHE
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import CheckpointError, error_sentence
from moegraft.operators.linear import WEIGHT_TYPES, QuantizedLinear, QuantizedLinearOptions
from moegraft.operators.structure import MTP
from moegraft.operators.weights import Part, WeightSource

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # of SpecForge and LMSYS; of AngelSlim and vLLM
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
STATES = 3  # layers whose states a head reads
READ = f"EAGLE-3 heads are read ({' or '.join(ARCHITECTURES)})"
# Of other drafters, by a part of their architecture's name in lower case, the more specific first.
REFUSED = {
    "dflash": "a DFlash drafter denoises a block of tokens in one pass, and released ones are code of their own",
    "museglimmerassistant": "it drafts for Muse Glimmer, which has no experts",
    "dspark": "a DSpark drafter predicts a block of tokens in one pass, and transformers has no model of it",
    "eagle3speculator": "the speculators library numbers layers in another way; take the head that it was converted from",
    "eagle3draftmodel": "the speculators library numbers layers in another way; take the head that it was converted from",
    "gptossforcausallmeagle3": "its layer has experts",
    "eagle": "the first two versions of EAGLE read the last layer's states alone",
    "medusa": "Medusa heads do not read the tokens that were drafted before",
}
# What other trainers add to the form, by the name in the config and the value that leaves it out.
ADDITIONS = {
    "fc_norm": "EAGLE-3.1 normalises the states that it reads",
    "norm_output": "EAGLE-3.1 normalises the states that are fed back",
    "parallel_drafting": "P-EAGLE predicts all tokens of a draft in one pass",
}


def why_no_states(model_class: str) -> str | None:
    """Return why the states after some layers of a model cannot be had from its passes; None where they can."""
    if hasattr(output_capturing, "selected_hidden_states"):
        return None
    return f"transformers {transformers.__version__} cannot return the states of {model_class} after chosen layers; install 5.23 or newer"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the checkpoint."""

    file: Path
    key: str
    shape: tuple[int, ...]
    stored_as: str  # as the file's header has it

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.stored_as]

    @property
    def origin(self) -> str:
        return f"{self.file}: {self.key}"

    def read(self) -> torch.Tensor:
        """
        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            with safe_open(self.file, framework="pt") as file:
                found: torch.Tensor = file.get_tensor(self.key)
                return found
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.origin}: {error_sentence(error)}") from error


@dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """A head's checkpoint, checked against the model that it drafts for.

    Attributes:
        config: of its layer.
        reads: which of the model's hidden states it reads, counted as `hidden_states` of transformers: 0 is the embedding.
        read_size: of one of them.
        draft_vocabulary: tokens that the head can draft.
        norm_before_residual: whether the layer adds to the normalised state.
        tensors: by the names of SpecForge, which are those of the head's modules.
    """

    folder: Path
    config: LlamaConfig
    reads: tuple[int, ...]
    read_size: int
    draft_vocabulary: int
    norm_before_residual: bool
    tensors: Mapping[str, _Stored]

    @classmethod
    def open(cls, folder: Path, model: PretrainedConfig) -> Self:
        """Read the config and the headers of a head for a model with config `model`.

        Raises:
            CheckpointError: it is no EAGLE-3 head in the form that is computed, is damaged, or was trained for another model.
        """
        settings = _read_settings(folder)
        text = model.get_text_config(decoder=True)
        hidden, layers, vocabulary = int(text.hidden_size), int(text.num_hidden_layers), int(text.vocab_size)
        place = folder / CONFIG
        own = int(settings["hidden_size"])
        read_size = int(settings.get("target_hidden_size") or own)
        for name, found, wanted in (("hidden_size", read_size, hidden), ("vocab_size", int(settings["vocab_size"]), vocabulary)):
            if found != wanted:
                raise CheckpointError(
                    f"{place}: the head was trained for a model with {name} {found}, and this one has {wanted}; "
                    "take the head of this very model"
                )
        draft_vocabulary = int(settings.get("draft_vocab_size") or vocabulary)
        reads = _reads(settings, layers, place)
        if settings.get("model_type") == "llama4_text":  # whose config has the size of dense layers under a name of its own
            settings["intermediate_size"] = settings.get("intermediate_size_mlp", settings.get("intermediate_size"))
        windows = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")  # of the model, which heads do not have
        unread = ("architectures", "model_type", "torch_dtype", "dtype", "quantization_config", "auto_map", "eagle_config", *windows)
        try:
            config = LlamaConfig(**{name: value for name, value in settings.items() if name not in unread})
            config._attn_implementation = "sdpa"
            checkpoint = cls(
                folder,
                config,
                reads,
                read_size,
                draft_vocabulary,
                bool(settings.get("norm_before_residual", False)),
                _read_headers(folder),
            )
            head = Eagle3Head(checkpoint)
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{place}: no layer can be built from this config ({error_sentence(error)})") from error
        checkpoint._check_tensors(head, hidden, vocabulary)
        return checkpoint

    def _check_tensors(self, head: Eagle3Head, hidden: int, vocabulary: int) -> None:
        wanted = {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}
        reduced = self.draft_vocabulary != vocabulary
        shared = self.config.hidden_size == hidden  # the model's own embedding and head may be computed with
        optional = {name for name, use in (("embed_tokens.weight", shared), ("lm_head.weight", shared and not reduced)) if use}
        ignored = {"t2d", "midlayer.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"}
        if reduced:
            wanted["d2t"] = (self.draft_vocabulary,)
        else:
            ignored.add("d2t")
        found = self.tensors
        missing = sorted(wanted.keys() - found.keys() - optional)
        if missing:
            why = (
                f", which maps the {self.draft_vocabulary} tokens of its vocabulary to the model's {vocabulary}" if "d2t" in missing else ""
            )
            raise CheckpointError(f"{self.folder}: the head lacks {', '.join(missing)}{why}; complete the folder")
        for name, shape in wanted.items():
            if (stored := found.get(name)) is None:
                continue
            if stored.shape != shape:
                raise CheckpointError(f"{stored.origin} has the shape {stored.shape}, and by {CONFIG} it is {shape}")
            if stored.stored_as not in DTYPES and name != "d2t":
                raise CheckpointError(
                    f"{stored.origin} is stored as {stored.stored_as}, and heads are read in {', '.join(DTYPES)}; take the "
                    "head before it was quantised, and quantise it by 'weights: int8'"
                )
        others = sorted(found[name].key for name in found.keys() - wanted.keys() - ignored)
        if others:
            raise CheckpointError(
                f"{self.folder}: the head has tensors that are not computed with ({', '.join(others[:3])}): it is of another form; {READ}"
            )
        if reduced:
            self.targets(vocabulary)

    def nbytes(self, weights: WEIGHT_TYPES, dtype: torch.dtype) -> int:
        """Return the bytes of the loaded head.

        Args:
            weights: the type that its linear layers are packed to.
            dtype: of what is not packed.
        """
        held = 8 * self.config.vocab_size if "d2t" in self.tensors else 0
        options = QuantizedLinearOptions(weights)
        for name, module in Eagle3Head(self).named_modules():
            stored = self.tensors.get(f"{name}.weight")
            if isinstance(module, nn.Linear) and stored is not None:
                held += QuantizedLinear.footprint(module, options, stored.dtype).total_bytes
            elif stored is not None:
                held += sum(each.numel() for each in module.parameters(recurse=False)) * dtype.itemsize
        return held

    def targets(self, vocabulary: int) -> torch.Tensor:
        """Return the model's token for each token of the head's vocabulary, (draft_vocabulary,) int64.

        Raises:
            CheckpointError: the map is not one.
        """
        found = self.tensors["d2t"]
        stored = found.read()
        targets = stored.to(torch.int64) + torch.arange(len(stored))  # differences are stored
        if stored.is_floating_point() or int(targets.min()) < 0 or int(targets.max()) >= vocabulary or len(targets.unique()) < len(targets):
            raise CheckpointError(f"{found.origin}: not a map to {vocabulary} tokens, each at most once; download the head again")
        return targets


def _read_settings(folder: Path) -> dict[str, Any]:
    """Return the config of a head, whose form is checked."""
    place = folder / CONFIG
    try:
        settings = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{error_sentence(error)}: draft: {{model: FOLDER}} is the folder of a drafter's checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{place}: not JSON ({error}); download the file again") from error
    names = settings.get("architectures") if isinstance(settings, dict) else None
    architecture = str(names[0]) if isinstance(names, list) and names else None
    if architecture is None:
        raise CheckpointError(f"{place}: no 'architectures', so this is no drafter's checkpoint; {READ}")
    if architecture not in ARCHITECTURES:
        reason = next((why for part, why in REFUSED.items() if part in architecture.lower()), "it is not known to be a drafter")
        raise CheckpointError(f"{place}: {architecture} is not computed: {reason}; {READ}")
    for name, why in ADDITIONS.items():
        if settings.get(name):
            raise CheckpointError(f"{place}: {name}: {why}, which is not computed; {READ}")
    if settings.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"{place}: the head has {settings['num_hidden_layers']} layers, and heads of one layer are computed")
    eagle = settings.get("eagle_config") or {}
    if not isinstance(eagle, dict) or eagle.get("use_aux_hidden_state") is False:
        raise CheckpointError(f"{place}: eagle_config: the head does not read the states of {STATES} layers; {READ}")
    for name in ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads"):
        if not isinstance(settings.get(name), int):
            raise CheckpointError(f"{place}: {name} must be a whole number, not {settings.get(name)!r}")
    return dict(settings)


def _reads(settings: Mapping[str, Any], layers: int, place: Path) -> tuple[int, ...]:
    """Return which hidden states a head reads: those of the layers that its config states, else what SGLang and vLLM take."""
    stated = (settings.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if stated is None:
        reads = [2, layers // 2, layers - 3]
    elif isinstance(stated, list) and all(type(each) is int for each in stated):
        reads = [each + 1 for each in stated]  # after the layers with these numbers
    else:
        raise CheckpointError(f"{place}: eagle_aux_hidden_state_layer_ids must be a list of numbers, not {stated!r}")
    # The last layer's state leaves the model after its norm only.
    if len(set(reads)) != STATES or not all(0 <= each < layers for each in reads):
        named = "the usual layers" if stated is None else f"layers {stated}"
        raise CheckpointError(
            f"{place}: the head reads the states after {named} of a model with {layers}, and it must read {STATES} different ones before "
            "the last; take the head of this very model"
        )
    return tuple(sorted(reads))


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Return the tensors of a checkpoint by the names of SpecForge."""
    names: Sequence[str] = [WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / INDEX}: no map of tensors to files; download the file again") from error
    elif not (folder / WEIGHTS).is_file():
        others = ", ".join(sorted(each.name for each in folder.glob("*.bin"))) or "no file of weights"
        raise CheckpointError(f"{folder}: {WEIGHTS} is missing, and there is {others}; heads are read from safetensors files")
    found: dict[str, _Stored] = {}
    for name in names:
        path = folder / name
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 # no mapping
                    own = key.removeprefix("model.")
                    own = f"midlayer.{own[9:]}" if own.startswith("layers.0.") else own
                    part = file.get_slice(key)
                    found[own] = _Stored(path, key, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error_sentence(error)}; download the file again") from error
    return found


class _HeadSource(WeightSource):
    """The weights of one linear layer of a head."""

    def __init__(self, tensors: Mapping[str, _Stored], path: str) -> None:
        parts: Sequence[Part] = ("weight", "bias")
        self._tensors = {part: stored for part in parts if (stored := tensors.get(f"{path}.{part}")) is not None}

    @property
    def dtype(self) -> torch.dtype:
        return self._tensors["weight"].dtype

    def parts(self) -> Sequence[Part]:
        return tuple(self._tensors)

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        return self._tensors[part].read()

    def origin(self, part: Part, expert: int = 0) -> str:
        return self._tensors[part].origin


class Eagle3Head(nn.Module):
    """A head, on meta until `load`. Its modules are named as the tensors of SpecForge's checkpoints.

    Attributes:
        reads: which of the model's hidden states it reads.
        streams: what was computed of each sequence, by the model's cache.
    """

    drafter = "eagle-3"  # for users

    def __init__(self, checkpoint: Eagle3Checkpoint) -> None:
        super().__init__()
        config = self.config = checkpoint.config
        self.reads = checkpoint.reads
        self._read_size = STATES * checkpoint.read_size
        self._norm_before_residual = checkpoint.norm_before_residual
        self.streams: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        hidden = config.hidden_size
        with torch.device("meta"):
            self.embed_tokens: Any = nn.Embedding(config.vocab_size, hidden)
            self.fc = nn.Linear(self._read_size, hidden, bias=False)
            attention = LlamaAttention(config, 0)
            for name in ("q_proj", "k_proj", "v_proj"):  # of the embedding as well
                rows = getattr(attention, name).out_features
                setattr(attention, name, nn.Linear(2 * hidden, rows, bias=config.attention_bias))
            norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
            parts = {name: LlamaRMSNorm(hidden, eps=config.rms_norm_eps) for name in norms}
            self.midlayer = nn.ModuleDict({**parts, "self_attn": attention, "mlp": LlamaMLP(config)})
            self.norm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
            self.lm_head: Any = nn.Linear(hidden, checkpoint.draft_vocabulary, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self._places: torch.Tensor | None = None  # (V,) int64: of each token of the model in the head's logits; None where all are there

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Its one layer."""
        return (self.midlayer,)

    def load(self, checkpoint: Eagle3Checkpoint, weights: WEIGHT_TYPES, model: PreTrainedModel, context: InjectionContext) -> None:
        """Read the weights, and let the head compute with the model's embedding and logits where it has none of its own.

        Raises:
            CheckpointError: a tensor cannot be read.
        """
        device, dtype, options = model.device, context.dtype, QuantizedLinearOptions(weights)
        self.rotary_emb.to(device)
        for path, module in list(self.named_modules()):
            if path == "lm_head" and "lm_head.weight" not in checkpoint.tensors:
                vars(self)["lm_head"] = model.get_output_embeddings()
                del self._modules["lm_head"]
            elif path == "embed_tokens" and "embed_tokens.weight" not in checkpoint.tensors:
                vars(self)["embed_tokens"] = model.get_input_embeddings()
                del self._modules["embed_tokens"]
            elif isinstance(module, nn.Linear) and device.type == "cpu":
                packed = QuantizedLinear.build(module, options, context)
                packed.load(_HeadSource(checkpoint.tensors, path), lambda nbytes: None)
                parent, _, leaf = path.rpartition(".")
                setattr(self.get_submodule(parent), leaf, packed)
            else:
                for name, _ in list(module.named_parameters(recurse=False)):
                    stored = checkpoint.tensors[f"{path}.{name}"].read().to(device, dtype)
                    setattr(module, name, nn.Parameter(stored, requires_grad=False))
        if checkpoint.draft_vocabulary != self.config.vocab_size:
            places = torch.full((self.config.vocab_size,), checkpoint.draft_vocabulary)
            targets = checkpoint.targets(self.config.vocab_size)
            self._places = places.scatter(0, targets, torch.arange(len(targets))).to(device)

    def forward_layer(
        self, number: int, states: torch.Tensor, position_ids: torch.Tensor, mtp_cache: Any, input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's states, (B, T, H).

        Args:
            states: (B, T, 3 * H of the model) after its layers, or the head's own (B, T, H) of the tokens before.
            position_ids: (B, T) of the tokens.
            input_ids: (B, T), the token after each state.
        """
        if states.shape[-1] == self._read_size:
            states = self.fc(states)
        layer: Any = self.midlayer
        embedded = self.embed_tokens(input_ids).to(states.dtype)
        normed = layer["hidden_norm"](states)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedded,
            attention_mask=None,
            **{CACHE: mtp_cache},
            position_ids=position_ids,
        )
        attended, _ = layer["self_attn"](
            torch.cat([layer["input_layernorm"](embedded), normed], dim=-1),
            position_embeddings=self.rotary_emb(embedded, position_ids),
            attention_mask=mask,
            **{CACHE: mtp_cache},
        )
        states = (normed if self._norm_before_residual else states) + attended
        made: torch.Tensor = states + layer["mlp"](layer["post_attention_layernorm"](states))
        return made

    def _project_to_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V) over the model's vocabulary; tokens that the head cannot draft have -inf."""
        logits: torch.Tensor = self.lm_head(self.norm(states))
        if self._places is None:
            return logits
        none = logits.new_full((*logits.shape[:-1], 1), float("-inf"))
        padded = torch.cat([logits, none], dim=-1)
        mapped = padded.flatten(0, -2).T.index_select(0, self._places).T  # the form that native programs know
        return mapped.reshape(*logits.shape[:-1], len(self._places))


def add_eagle3_head(model: PreTrainedModel, folder: Path, weights: WEIGHT_TYPES, context: InjectionContext) -> None:
    """Give a loaded model an EAGLE-3 head, in place of MTP layers.

    Args:
        weights: the type that its linear layers are packed to, where the model is on the CPU; else they stay in the model's dtype.

    Raises:
        CheckpointError: as for `Eagle3Checkpoint.open` and `Eagle3Head.load`.
    """
    checkpoint = Eagle3Checkpoint.open(folder, model.config)
    head = Eagle3Head(checkpoint)
    head.load(checkpoint, weights, model, context)
    model.add_module(MTP, head.train(False))
