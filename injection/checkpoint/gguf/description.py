"""The keys of a GGUF file that describe its model: written from a config, and read to one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PretrainedConfig

from moegraft.injection.checkpoint.gguf.families import FAMILIES, Family, family_of
from moegraft.injection.checkpoint.gguf.files import find_parts, merge, open_file
from moegraft.injection.checkpoint.gguf.model import COMPUTED
from moegraft.injection.checkpoint.gguf.vocabulary import read_vocabulary
from moegraft.operators.atomic_file import user_cache, write_file
from moegraft.operators.errors import CheckpointError, UnsupportedModelError, error_sentence

# What values of other types and lengths than those that are expected lead to.
MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, StrictDataclassError)
SHARED_SIZES = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
# Keys, without the architecture in front, and the config's names of their values: the first that a config has.
NAMES: Mapping[str, tuple[str, ...]] = {
    "attention.head_count": ("num_attention_heads",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.scale": ("attention_multiplier",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "embedding_scale": ("embedding_multiplier",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_shared_feed_forward_length": SHARED_SIZES,
    "expert_used_count": ("num_experts_per_tok",),
    "logit_scale": ("logits_scaling",),
    "moe_latent_size": ("moe_latent_size",),
    "residual_scale": ("residual_multiplier",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"),
    "ssm.group_count": ("n_groups", "mamba_n_groups", "linear_num_key_heads"),
    "ssm.state_size": ("ssm_state_size", "mamba_d_state", "linear_key_head_dim"),
    "ssm.time_step_rank": ("mamba_num_heads", "mamba_n_heads", "linear_num_value_heads"),
    "vocab_size": ("vocab_size",),
}
HEAD_DIMS = ("mamba_head_dim", "mamba_d_head", "linear_value_head_dim")
GATINGS = {"softmax": ExpertGatingFuncType.SOFTMAX.value, "sigmoid": ExpertGatingFuncType.SIGMOID.value}


def keys_of(config: PretrainedConfig, further: int = 0) -> dict[str, Any]:
    """Return the keys that describe a model with `further` MTP layers, and their values.

    Raises:
        UnsupportedModelError: GGUF files of this family cannot be loaded.
    """
    family, rope = family_of(config), rope_of(config)
    keys: dict[str, Any] = {"block_count": config.num_hidden_layers + further, "nextn_predict_layers": further}
    for key, names in NAMES.items():
        value = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
        value = value[0] if isinstance(value, list) else value
        keys[key] = float(value) if value is not None and key.endswith(("scale", "epsilon")) else value
    keys["expert_feed_forward_length"] = getattr(config, family.expert_size, None)
    if family.apart:
        keys["feed_forward_length"] = [config.moe_intermediate_size * (kind == "moe") for kind in layer_types(config)]
    else:
        keys["feed_forward_length"] = getattr(config, "intermediate_size", None)
    if getattr(config, "moe_num_shared_experts", None):
        keys["expert_shared_feed_forward_length"] = config.moe_num_shared_experts * config.moe_intermediate_size
    if family.is_latent:
        rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
        keys |= {"attention.kv_lora_rank": rank, "attention.key_length": rank + rotated, "attention.value_length": rank}
        keys |= {"attention.key_length_mla": config.qk_nope_head_dim + rotated, "attention.value_length_mla": config.v_head_dim}
        keys["rope.dimension_count"] = rotated
    else:
        head = _head_dim(config)
        keys |= {"attention.key_length": head, "attention.value_length": head}
        keys["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    if family.alternates:
        keys["attention.sliding_window"] = config.sliding_window
    if family.has_interval:
        keys["full_attention_interval"] = interval(layer_types(config))
    if "ssm.time_step_rank" in keys:
        of_head = next((getattr(config, name) for name in HEAD_DIMS if hasattr(config, name)), 0)
        keys["ssm.inner_size"] = (keys["ssm.time_step_rank"] or 0) * of_head
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        keys["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"] if family.is_latent else None
        keys |= {f"rope.scaling.yarn_{name}": _as_float(rope.get(name)) for name in ("beta_fast", "beta_slow")}
    # Of these, zero is a value.
    keys = {key: value for key, value in keys.items() if value}
    keys["attention.head_count_kv"] = 1 if family.is_latent else _key_value_heads(config)
    keys["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    if family.is_latent:
        keys["attention.q_lora_rank"] = config.q_lora_rank or 0
    if family.rotates_sections:
        keys["rope.dimension_sections"] = [*rope.get("mrope_section", (11, 11, 10)), 0]
    if hasattr(config, "position_embedding_type"):
        keys["rope.scaling.finetuned"] = config.position_embedding_type == "rope"
    if family.gating is not None:
        normalises = family.gating == "sigmoid" and bool(getattr(config, "norm_topk_prob", True))
        scale = float(getattr(config, "routed_scaling_factor", 1.0))
        keys |= {"leading_dense_block_count": dense_layers(config), "expert_weights_scale": scale, "expert_weights_norm": normalises}
        keys["expert_gating_func"] = GATINGS[family.gating]
        if hasattr(config, "n_shared_experts"):
            keys["expert_shared_count"] = config.n_shared_experts
        if hasattr(config, "moe_layer_interval"):
            keys["interleave_moe_layer_step"] = config.moe_layer_interval
        if groups(config) > 1:
            keys |= {"expert_group_count": groups(config), "expert_group_used_count": config.topk_group}
    return keys


def _as_float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_of(config: PretrainedConfig) -> Mapping[str, Any]:
    """Return the parameters of rotary embeddings, empty where there are none."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters


def layer_types(config: PretrainedConfig) -> list[str]:
    """Return the type of each layer."""
    kinds: list[str] = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return kinds


def interval(kinds: Sequence[str]) -> int:
    """Return the distance of layers with full attention, from the place of the first one."""
    return [*kinds, "full_attention"].index("full_attention") + 1


def dense_layers(config: PretrainedConfig) -> int:
    """Return how many layers at the beginning have no experts."""
    kinds = getattr(config, "mlp_layer_types", None)
    if hasattr(config, "num_dense_layers"):
        return int(config.num_dense_layers)
    if kinds is not None:
        return [*kinds, "sparse"].index("sparse")
    return int(getattr(config, "first_k_dense_replace", getattr(config, "moe_layer_start_index", 0)))


def groups(config: PretrainedConfig) -> int:
    """Return the number of groups of experts, 1 if experts are chosen among all."""
    count = getattr(config, "n_group", None) or 1
    chosen = getattr(config, "topk_method", None) != "greedy" and (getattr(config, "topk_group", None) or count) < count
    return int(count) if chosen else 1


def _key_value_heads(config: PretrainedConfig) -> int | list[int]:
    """Return the number in all layers, or in each where layers with none are thereby recurrent."""
    family, heads = family_of(config), int(config.num_key_value_heads)
    if family.recurrent is None or family.has_interval:
        return heads
    return [heads * (kind == "full_attention") for kind in layer_types(config)]


def config_of(fields: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> PretrainedConfig:
    """Return the config of the model that a file's keys describe: the first of its architecture's model types that these fit.

    Args:
        fields: the keys, with arrays as lists.
        tensors: the shapes of the model's tensors.

    Raises:
        UnsupportedModelError: the keys do not state all that transformers needs, or state what it does not have.
    """
    architecture = fields.get("general.architecture")
    keys = {key.removeprefix(f"{architecture}."): _shortest(value) for key, value in fields.items() if key.startswith(f"{architecture}.")}
    reasons = []
    for model_type, family in FAMILIES.items():
        if family.architecture != architecture:
            continue
        if family.unwritten is not None:
            reasons.append(family.unwritten)
            continue
        try:
            return _Reading(model_type, family, keys, tensors).config()
        except (_UnfitError, *MALFORMED) as error:
            reasons.append(f"it has no key {error}" if isinstance(error, KeyError) else error_sentence(error))
    reason = "; ".join(dict.fromkeys(reasons)) or f"the architecture {str(architecture)[:100]!r} is not supported"
    raise UnsupportedModelError(f"the file alone does not describe its model ({reason})")


def _shortest(value: Any) -> Any:
    """Return the number with the fewest digits that is the same in float32, in which files have numbers."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class _UnfitError(Exception):
    """What a key states is not in the config of a model type."""


class _Reading:
    """Reads a config of one model type from keys, which are taken out one by one: what is left is not in the config."""

    def __init__(self, model_type: str, family: Family, keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> None:
        self._family, self._keys, self._tensors = family, dict(keys), tensors
        self._class = CONFIG_MAPPING[model_type]
        self._default = self._class()
        self._values: dict[str, Any] = dict(family.requires)

    def config(self) -> PretrainedConfig:
        family, values = self._family, self._values
        layers = self._keys.pop("block_count") - self._keys.get("nextn_predict_layers", 0)
        if not 0 < layers < len(self._tensors):
            raise _UnfitError(f"{layers} layers, and {len(self._tensors)} tensors")
        if not self._keys.get("expert_count"):
            raise _UnfitError("it has no experts")
        self._put(self._keys.pop("nextn_predict_layers", 0), "num_nextn_predict_layers", needed=False)
        values["vocab_size"] = self._tensors["token_embd.weight"][0]
        self._keys["vocab_size"] = values["vocab_size"]
        values["tie_word_embeddings"] = "output.weight" not in self._tensors
        for name, tensor in (("attention_bias", "attn_q.bias"), ("qkv_bias", "attn_q.bias"), ("use_qk_norm", "attn_q_norm.weight")):
            if name not in family.requires:
                self._put(any(each.endswith(tensor) for each in self._tensors), name, needed=False)
        if family.normalises is not None:
            values["norm_topk_prob"] = family.normalises
        if family.ignores_windows:
            self._keys.pop("attention.sliding_window", None)
            values["sliding_window"] = None
        self._read_layers(layers)
        self._read_attention()
        self._read_rope()
        if family.gating is not None:
            self._read_gating(family.gating)
        self._read_sizes()
        if self._keys:
            raise _UnfitError(f"{self._class.model_type} has nothing for {', '.join(sorted(self._keys)[:3])}")
        return self._class(**values)

    def _put(self, value: object, *names: str, needed: bool = True) -> None:
        """Set the first of these names that the config has."""
        name = next((name for name in names if hasattr(self._default, name)), None)
        if name is not None:
            self._values[self._class.attribute_map.get(name, name)] = value
        elif needed:
            raise _UnfitError(f"{self._class.model_type} has no {names[0]}")

    def _read_layers(self, layers: int) -> None:
        family, kinds = self._family, ["full_attention"] * layers
        heads = self._keys.pop("attention.head_count_kv")
        of_layers = heads if isinstance(heads, list) else [heads] * layers
        widths = self._keys.pop("feed_forward_length") if family.apart else [0] * layers
        if family.recurrent is not None:
            every = self._keys.pop("full_attention_interval", 4) if family.has_interval else 0
            stated = self._keys.pop("attention.recurrent_layers", None)
            for layer, count in enumerate(of_layers[:layers]):
                if stated[layer] if stated else (layer + 1) % every if every else not count:
                    kinds[layer] = "moe" if widths[layer] else family.recurrent
            self._put(kinds, "layer_types")
        if not family.apart:
            self._values["num_hidden_layers"] = layers
        self._values["num_key_value_heads"] = self._keys["attention.head_count"] if family.is_latent else max(of_layers)
        # Files of older converters do not state how many layers at the beginning have no experts, nor what function scores have.
        dense = next((layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" in self._tensors), 0)
        self._keys.pop("leading_dense_block_count", None)
        self._put(["dense"] * dense + ["sparse"] * (layers - dense), "mlp_layer_types", needed=False)
        self._put(dense, "num_dense_layers", "first_k_dense_replace", "moe_layer_start_index", needed=dense > 0 and not family.apart)
        self._put(layers - 1, "moe_layer_end_index", needed=False)

    def _read_attention(self) -> None:
        keys, head = self._keys, self._keys["embedding_length"] // self._keys["attention.head_count"]
        if self._family.is_latent:
            rotated, rank = keys.pop("rope.dimension_count"), keys.pop("attention.kv_lora_rank")
            self._values |= {"q_lora_rank": keys.pop("attention.q_lora_rank", 0) or None, "kv_lora_rank": rank, "qk_rope_head_dim": rotated}
            self._values["qk_nope_head_dim"] = keys.pop("attention.key_length_mla") - rotated
            self._values["v_head_dim"] = keys.pop("attention.value_length_mla")
            self._expect("attention.key_length", rank + rotated)
            self._expect("attention.value_length", rank)
            return
        width = keys.pop("attention.key_length", head)
        self._expect("attention.value_length", width)
        if width != head or hasattr(self._default, "head_dim"):
            self._values["head_dim"] = width
        if self._family.alternates:
            self._values["sliding_window"] = keys.pop("attention.sliding_window")

    def _expect(self, key: str, *values: object) -> None:
        """Take a key that may state nothing else."""
        if key in self._keys and (value := self._keys.pop(key)) not in values:
            raise _UnfitError(f"{key} is {value}, and transformers computes {values[0]}")

    def _read_rope(self) -> None:
        keys, parameters = self._keys, dict(rope_of(self._default))
        theta, dimensions = keys.pop("rope.freq_base", 10000.0), keys.pop("rope.dimension_count", None)
        factor = keys.pop("rope.scaling.factor", None)
        kind = keys.pop("rope.scaling.type", "linear" if factor else "none")
        finetuned = keys.pop("rope.scaling.finetuned", None)
        self._put("rope" if finetuned else None, "position_embedding_type", needed=False)
        sections = keys.pop("rope.dimension_sections", None)
        if not parameters:
            return
        if computed := [name for name in self._tensors if name.startswith(COMPUTED)]:
            raise _UnfitError(f"rotary frequencies are in {computed[0]}, and no key states how they are scaled")
        parameters = {name: parameters[name] for name in ("truncate", "partial_rotary_factor") if name in parameters}
        parameters |= {"rope_type": "default" if kind == "none" else kind, "rope_theta": float(theta)}
        head = self._values.get("head_dim") or keys["embedding_length"] // keys["attention.head_count"]
        if dimensions is not None and (dimensions != head or "partial_rotary_factor" in parameters):
            parameters["partial_rotary_factor"] = dimensions / head
        if sections is not None:
            parameters["mrope_section"] = sections[:3]
        if kind in ("linear", "yarn"):
            parameters["factor"] = factor
        elif kind != "none":
            raise _UnfitError(f"rotary embeddings of the type {kind}")
        original = keys.pop("rope.scaling.original_context_length", None)
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = original
            for name in ("beta_fast", "beta_slow"):
                if (value := keys.pop(f"rope.scaling.yarn_{name}", None)) is not None:
                    parameters[name] = value
            if self._family.is_latent:
                scale = round(keys.pop("rope.scaling.yarn_log_multiplier") / 0.1, 6)
                parameters |= {"mscale": scale, "mscale_all_dim": scale}
        self._values["rope_parameters"] = parameters

    def _read_gating(self, gating: str) -> None:
        keys = self._keys
        has_bias = any(name.endswith("exp_probs_b.bias") for name in self._tensors)
        if self._family.is_latent and keys.get("expert_gating_func", GATINGS["sigmoid" if has_bias else "softmax"]) != GATINGS[gating]:
            raise _UnfitError(f"the function of the router's scores is not {gating}")
        self._expect("expert_gating_func", GATINGS[gating])
        self._expect("interleave_moe_layer_step", 1, 0)
        chosen, count = keys.pop("expert_group_used_count", 1), keys.pop("expert_group_count", 1)
        self._put(count, "n_group", needed=False)
        self._put(chosen, "topk_group", needed=False)
        self._put("greedy" if count <= 1 else "group_limited_greedy", "topk_method", needed=False)
        if gating == "softmax":
            self._expect("expert_weights_norm", False)
        # Families whose configs have no such field normalise always, and ignore the key.
        normalises = keys.pop("expert_weights_norm", False)
        if "norm_topk_prob" not in self._values:
            self._put(normalises, "norm_topk_prob", needed=False)
        scale = keys.pop("expert_weights_scale", 0.0) or 1.0  # both mean that nothing is scaled
        if scale != self._values.get("routed_scaling_factor"):
            self._put(scale, "routed_scaling_factor", needed=scale != 1.0)

    def _read_sizes(self) -> None:
        keys = self._keys
        # Not all converters state the size of shared experts, or state it rightly.
        shared = next((shape[0] for name, shape in self._tensors.items() if name.endswith(".ffn_up_shexp.weight")), 0)
        keys.pop("expert_shared_feed_forward_length", None)
        self._put(keys.pop("expert_shared_count", 0), "n_shared_experts", needed=False)
        self._put(shared // keys.get("expert_feed_forward_length", 1), "moe_num_shared_experts", needed=False)
        if shared == 0 and any(hasattr(self._default, name) for name in SHARED_SIZES):
            raise _UnfitError(f"{self._class.model_type} has shared experts")
        self._put(shared, *SHARED_SIZES, needed=False)
        names = {**NAMES, "expert_feed_forward_length": (self._family.expert_size,), "feed_forward_length": ("intermediate_size",)}
        if "ssm.inner_size" in keys:
            self._put(keys.pop("ssm.inner_size") // keys["ssm.time_step_rank"], *HEAD_DIMS)
        # Tensors' shapes do not show these, and a config has defaults of its own.
        epsilon = "attention.layer_norm_epsilon" if "attention.layer_norm_epsilon" in keys else "attention.layer_norm_rms_epsilon"
        for key in names.keys() & {*keys, "context_length", "expert_used_count", epsilon}:
            self._put(keys.pop(key), *names[key])


def folder_of(path: Path) -> Path:
    """Return a folder in the user's cache with the config and the tokenizer that GGUF files have, as Hugging Face has them.

    Args:
        path: a file, any part of a split one, or a folder with the parts of one model.

    Raises:
        CheckpointError: a file is damaged or missing, or the folder cannot be written.
        UnsupportedModelError: what the files state is not all that is needed.
    """
    parts = find_parts(path)
    return _folder_of(tuple(parts), tuple(part.stat().st_mtime_ns for part in parts))


@lru_cache(maxsize=1)  # the tokenizer is read first, and then the model
def _folder_of(parts: tuple[Path, ...], changed: tuple[int, ...]) -> Path:
    files = [open_file(part) for part in parts]
    first = files[0]
    try:
        fields = {**first.fields, **{key: first.array(key) for key in first.arrays}}
        config = config_of(fields, {name: tensor.shape for name, tensor in merge(files).items()})
        contents = read_vocabulary(fields)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, contents["generation_config.json"].get(name))
    except UnsupportedModelError as error:
        hint = "give the folder or hub id that it was made from as the model, and the file as its weights (--gguf, gguf=)"
        raise UnsupportedModelError(f"{first.path}: {error}; {hint}") from error
    except MALFORMED as error:
        raise CheckpointError(f"{first.path}: the vocabulary is damaged ({error_sentence(error)}); download the file again") from error
    texts = {name: json.dumps(body) for name, body in {**contents, "config.json": config.to_dict()}.items()}
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()[:12]
    try:
        folder = user_cache("gguf") / f"{first.path.stem}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            if not (folder / name).is_file():
                write_file(folder / name, text)
    except OSError as error:
        reason = f"the config and tokenizer of {first.path} cannot be written ({error.strerror})"
        raise CheckpointError(f"{error.filename}: {reason}; set XDG_CACHE_HOME to a folder that can be written") from error
    return folder
