"""Writing a model to a GGUF file: which tensors it has, the type of each, the keys that describe the model, and the streaming of weights.

Names, orders of dimensions and keys are those of llama.cpp's converter, so that llama.cpp loads the file, and so does this package.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
import yaml
from gguf import GGML_QUANT_VERSION, GGUFValueType, GGUFWriter
from gguf import GGMLQuantizationType as BlockType
from gguf.gguf_writer import WriterState
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from moegraft.injection.checkpoint.gguf.description import dense_layers, groups, interval, keys_of, layer_types, rope_of
from moegraft.injection.checkpoint.gguf.families import FAMILIES, change_of, family_of
from moegraft.injection.checkpoint.gguf.model import Names, experts_name
from moegraft.injection.checkpoint.gguf.vocabulary import add_vocabulary
from moegraft.injection.checkpoint.keymap import Target
from moegraft.injection.checkpoint.sources import StoredWeights, read_parameter, target_of
from moegraft.injection.rules.rule import Layers, parse_layers
from moegraft.operators.atomic_file import new_file
from moegraft.operators.decode.mtp_layers import count_mtp_layers, mtp_layers
from moegraft.operators.errors import CheckpointError, UnsupportedModelError
from moegraft.operators.layout import read_layout, why_unsupported
from moegraft.operators.weight_formats import ENCODED, FORMATS, GGUF_TYPES, fitting_type
from moegraft.operators.weights import Part, reordered

if TYPE_CHECKING:
    from moegraft.injection.meta_model import MetaModel

ALIGNMENT = 32
Advance = Callable[[int], None]

# What may have a type of its own. `attention` and `dense` are linear layers, `dense` also those of shared experts.
ROLES = ("gate", "up", "down", "attention", "dense", "embedding", "output")
OTHER_TYPE = "Q8_0"  # of the roles that only experts' types are given for
# Types of these names are those of whole files, in which llama.cpp mixes types of matrices.
_MIXTURE = re.compile(r"(?P<type>I?Q[2-8]_K|IQ[1-4])_(?:XS|S|M|L|XL)", re.IGNORECASE)
_CHOICE = re.compile(r"(?:(?P<role>[a-z]+)(?:@(?P<layers>[0-9,\-]+))?=)?(?P<type>\w+)")


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """The type of matrices of one role, or of all; in some layers, or in all. Of the choices for a matrix the last counts."""

    role: str | None
    layers: Layers | None
    type: str

    def fits(self, role: str, layer: int | None) -> bool:
        return self.role in (None, role) and (self.layers is None or layer in self.layers)

    def __str__(self) -> str:
        where = "" if self.layers is None else f"@{self.layers}"
        return self.type if self.role is None else f"{self.role}{where}={self.type}"


class Choices:
    """The choices for a model's matrices, and which of them counted for one."""

    def __init__(self, choices: Sequence[TypeChoice]) -> None:
        self._choices = choices
        self._fitted = [False] * len(choices)
        self._counted = [False] * len(choices)

    def type_of(self, role: str, layer: int | None) -> str:
        fitting = [place for place, choice in enumerate(self._choices) if choice.fits(role, layer)]
        for place in fitting:
            self._fitted[place] = True
        if not fitting:
            return OTHER_TYPE
        self._counted[fitting[-1]] = True
        return self._choices[fitting[-1]].type

    def check_all_counted(self) -> None:
        """
        Raises:
            UnsupportedModelError: a choice is the type of no matrix that `type_of` was called for.
        """
        for choice, fitted, counted in zip(self._choices, self._fitted, self._counted, strict=True):
            if not fitted:
                raise UnsupportedModelError(f"types: '{choice}' fits no matrix of this model; leave it out, or correct its role or layers")
            if not counted:
                reason = "counts for no matrix, as later types replace it"
                raise UnsupportedModelError(f"types: '{choice}' {reason}; leave it out, or give it after them")


def read_types(text: str) -> tuple[TypeChoice, ...]:
    """Read the types of a file's matrices: `Q4_K`, `gate=Q4_K,up=Q4_K,down=Q6_K,down@0-3=Q8_0`, a mapping such as
    `{gate: Q4_K, down@0-3: Q8_0}`, or a YAML file with one.

    Raises:
        ValueError: a type or a role is unknown, or layers are written in another form.
        OSError: the YAML file cannot be read.
    """
    inline = text.lstrip().startswith("{")
    if not inline and not text.endswith((".yaml", ".yml")):
        return tuple(_choice(part.strip()) for part in text.split(","))
    try:
        parsed = yaml.safe_load(text if inline else Path(text).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{text}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(parsed, dict) or not parsed:
        raise ValueError(f"{text}: expected a mapping of {', '.join(ROLES)} or all to types, such as 'down: Q6_K' or 'down@0-3: Q8_0'")
    try:
        return tuple(_choice(f"{role}={name}" if role != "all" else str(name)) for role, name in parsed.items())
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def _choice(text: str) -> TypeChoice:
    match = _CHOICE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r}: give TYPE, ROLE=TYPE or ROLE@LAYERS=TYPE, as in Q4_K, down=Q6_K or down@0-3=Q8_0")
    known = FORMATS.get(match["type"].lower())  # as rule files spell it
    role, name = match["role"], known.gguf if known is not None and known.gguf is not None else match["type"].upper()
    if role is not None and role not in ROLES:
        raise ValueError(f"unknown role '{role}' in '{text}'; the roles are {', '.join(ROLES)}")
    if name not in ENCODED:
        mixture = _MIXTURE.fullmatch(name)
        hint = "" if mixture is None else "; types of matrices can be mixed, as in Q4_K,down=Q6_K"
        raise ValueError(f"type '{match['type']}' cannot be written; the types are {', '.join(ENCODED)}{hint}")
    return TypeChoice(role, None if match["layers"] is None else parse_layers(match["layers"]), name)


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """One tensor of the file.

    Attributes:
        shape: as in PyTorch.
        wanted: the type that was asked for; another than `type` where rows are no whole number of its blocks.
        matrices: how many matrices are read and written one after the other: experts, or 1.
        read: returns a matrix or vector by its number.
        importance: the key of the importance of its inputs; None if it has none.
        columns: as `Change` has them, for this config.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    wanted: str
    matrices: int
    read: Callable[[int], torch.Tensor]
    importance: str | None = None
    columns: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64)) * GGUF_TYPES[self.type].nbytes(self.shape[-1])


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A file before its weights are read.

    Attributes:
        left_out: the parameters of image and sound towers, which llama.cpp has in a file of their own.
        further: how many MTP layers there are, after the body's.
    """

    config: PretrainedConfig
    tensors: tuple[ExportTensor, ...]
    left_out: tuple[str, ...] = ()
    further: int = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def weights(self) -> int:
        return sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in self.tensors)

    def by_type(self) -> Mapping[str, int]:
        """Return the bytes in each type."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.type] += tensor.nbytes
        return dict(sizes.most_common())

    def fallbacks(self) -> list[ExportTensor]:
        """Return the tensors that are stored in another type than the one asked for."""
        return [tensor for tensor in self.tensors if tensor.type != tensor.wanted]


def with_written_mtp(meta: MetaModel) -> MetaModel:
    """Return the model with its MTP layers where files of its family have them, as far as they can be computed; else the same model."""
    family = FAMILIES.get(meta.source.config.get_text_config().model_type)
    return meta.with_mtp if family is not None and family.mtp else meta


def plan_export(weights: StoredWeights, skeleton: PreTrainedModel, types: Sequence[TypeChoice]) -> ExportPlan:
    """Return the tensors of a model's GGUF file.

    Raises:
        UnsupportedModelError: llama.cpp computes this model otherwise; this package cannot describe it; or a choice is the type of no
            matrix.
        CheckpointError: a parameter is missing.
    """
    choices = Choices(types)
    config = skeleton.config.get_text_config()
    reason = why_not_exportable(config)
    if reason is not None:
        raise UnsupportedModelError(reason)
    tensors: list[ExportTensor] = []
    further = count_mtp_layers(skeleton)
    names = Names(config, further)
    experts = [path for path, module in skeleton.named_modules() if why_unsupported(module) is None]
    if not experts:
        raise UnsupportedModelError(f"{type(skeleton).__name__} has no experts, and GGUF files are written of mixtures of experts alone")
    for path in experts:
        tensors += _expert_tensors(path, skeleton.get_submodule(path), names, weights, choices)
    inside = tuple(f"{path}." for path in experts)
    towers: list[str] = []
    if config is not skeleton.config:  # what is outside of the language model
        own = [skeleton.get_decoder(), skeleton.get_output_embeddings(), mtp_layers(skeleton)]
        prefixes = tuple(f"{path}." for path, module in skeleton.named_modules() if any(module is part for part in own))
        towers = [parameter for parameter in skeleton.state_dict() if not parameter.startswith(prefixes)]
    for parameter, value in skeleton.state_dict().items():
        if parameter in skeleton.all_tied_weights_keys or parameter.startswith(inside) or parameter in towers:
            continue
        name, parts = names.stored(parameter), names.parts(parameter, len(value))
        if not value.numel():
            raise UnsupportedModelError(
                f"{parameter} has no elements, as where a model has no shared experts: llama.cpp has no such tensors"
            )
        if name is None and not parts:
            raise UnsupportedModelError(f"{parameter}: GGUF files of this architecture have no tensor for this parameter")
        target = target_of(parameter, weights.keymap, weights.tensors, skeleton)
        layer = names.layer(parameter) if "layers." in parameter else None
        if name is not None and name.endswith("attn_kv_b.weight"):
            tensors += _split_key_value(name, parameter, layer, target, weights, skeleton, choices)
            continue
        first = 0
        for part, rows in (parts or {str(name): len(value)}).items():
            of_part, shape = slice(first, first + rows), tuple(value.shape)
            tensors.append(_tensor(part, parameter, layer, of_part, shape, target, weights, skeleton, choices))
            first += rows
    choices.check_all_counted()
    return ExportPlan(config, tuple(tensors), tuple(towers), further)


def _expert_tensors(path: str, module: nn.Module, names: Names, weights: StoredWeights, choices: Choices) -> Iterator[ExportTensor]:
    layout, source, layer = read_layout(module), weights.source(path, "experts"), names.layer(path)
    for part in layout.parts():
        shape = (layout.num_experts, *layout.part_shape(part))
        bias = part.endswith("_bias")
        wanted = "F32" if bias else choices.type_of(part, layer)

        def read(expert: int, part: Part = part) -> torch.Tensor:
            return source.read(part, expert)

        key = None if bias else f"{path}.{part}"
        yield ExportTensor(experts_name(layer, part), shape, fitting_type(wanted, shape[-1]), wanted, layout.num_experts, read, key)


def _tensor(
    name: str,
    parameter: str,
    layer: int | None,
    part: slice,
    shape: tuple[int, ...],
    target: Target,
    weights: StoredWeights,
    skeleton: PreTrainedModel,
    choices: Choices,
) -> ExportTensor:
    """Return the tensor of a parameter of `shape`, or of the part of it that has these rows in the file's order."""
    config = skeleton.config.get_text_config()
    change = change_of(config, parameter)
    tied = parameter in skeleton.all_tied_weights_keys.values()
    role = _role(name, tied=tied)
    order = None if change.rows is None else torch.from_numpy(np.argsort(change.rows(config, shape[0])))
    columns = None if change.columns is None else change.columns(config)
    shape = (part.stop - part.start, *shape[1:])
    shape = shape if change.shape is None else change.shape(config, shape)
    wanted = "F32" if role is None or len(shape) == 1 else choices.type_of(role, layer)

    def read(_: int) -> torch.Tensor:
        values = read_parameter(target, weights.tensors, skeleton)
        values = values[part] if order is None else values[order[part]]
        values = values if columns is None else reordered(values, columns)
        return (values if change.store is None else change.store(values.float())).reshape(shape)

    module = parameter.rpartition(".")[0]
    key = None if len(shape) == 1 or (role == "embedding") else "output" if role == "output" else module
    return ExportTensor(name, shape, fitting_type(wanted, shape[-1]), wanted, 1, read, key, columns)


def _split_key_value(
    name: str, parameter: str, layer: int | None, target: Target, weights: StoredWeights, skeleton: PreTrainedModel, choices: Choices
) -> Iterator[ExportTensor]:
    """Return `kv_b_proj` of latent attention as two tensors: the keys', each head's matrix transposed, and the values'."""
    config = skeleton.config.get_text_config()
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank

    def read(part: slice) -> torch.Tensor:
        return read_parameter(target, weights.tensors, skeleton).reshape(heads, -1, rank)[:, part]

    wanted = choices.type_of("attention", layer)
    for letter, shape, read_part, key in (
        ("k", (heads, rank, nope), lambda _: read(slice(nope)).transpose(1, 2), None),  # what text feeds into a row is not measured
        ("v", (heads, config.v_head_dim, rank), lambda _: read(slice(nope, None)), parameter.rpartition(".")[0]),
    ):
        yield ExportTensor(name.replace("_kv_b", f"_{letter}_b"), shape, fitting_type(wanted, shape[-1]), wanted, 1, read_part, key)


def _role(name: str, *, tied: bool) -> str | None:
    """Return the role of a matrix; None for those that keep float32. An embedding that is also the output has the output's type."""
    if name == "token_embd.weight":
        return "output" if tied else "embedding"
    if name == "output.weight":
        return "output"
    kind = re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", name)
    if re.fullmatch(r"attn_(?!.*(norm|sinks)$).*|ssm_(in|out|ba|alpha|beta)|shortconv\.(in|out)_proj", kind):
        return "attention"
    return "dense" if re.fullmatch(r"ffn_(gate|up|down|latent_up|latent_down)(_shexp)?|nextn\.eh_proj", kind) else None


def why_not_exportable(config: PretrainedConfig) -> str | None:
    """Return why no GGUF file of a model can be written that llama.cpp computes as transformers does; None if one can."""
    name = config.model_type
    if name not in FAMILIES:
        written = ", ".join(each for each, row in FAMILIES.items() if row.unwritten is None)
        return f"model type '{name}' cannot be written to GGUF files; supported are {written}"
    family = FAMILIES[name]
    if family.unwritten is not None:
        return f"model type '{name}' is loaded from GGUF files, and not written to them: {family.unwritten}"
    if family.normalises not in (None, bool(getattr(config, "norm_topk_prob", None))):
        return f"norm_topk_prob is {config.norm_topk_prob} in the config, and llama.cpp computes {name} models as if it were not"
    dense = [layer for layer in getattr(config, "mlp_only_layers", None) or () if layer < config.num_hidden_layers]
    if dense or getattr(config, "decoder_sparse_step", 1) != 1:
        return f"some layers have no experts (mlp_only_layers, decoder_sparse_step), which llama.cpp does not support in {name} models"
    for field, only in {"hidden_act": "silu", **family.requires}.items():
        value = getattr(config, field, only)
        value = "silu" if value == "swish" else value  # two names of one function
        if (tuple(value) if isinstance(value, list) else value) != only:
            return f"{field} is {getattr(config, field)} in the config, and GGUF files of {name} models mean {only}"
    if getattr(config, "clip_qkv", None) is not None:
        return f"clip_qkv is {config.clip_qkv} in the config, which llama.cpp does not support in {name} models"
    if family.needs_equal_heads and config.num_key_value_heads != config.num_attention_heads:
        return f"llama.cpp requires as many key-value heads as attention heads in {name} models"
    kinds = layer_types(config)
    alternating = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(len(kinds))]
    if kinds != alternating if family.alternates else not set(kinds) <= {"full_attention", family.recurrent, *["moe"] * family.apart}:
        return f"llama.cpp does not support these layer_types in {name} models: {', '.join(dict.fromkeys(kinds))}"
    if family.has_interval and any((kind == "full_attention") is bool((layer + 1) % interval(kinds)) for layer, kind in enumerate(kinds)):
        return f"in {name} models every n-th layer has full attention in llama.cpp, and layer_types has another order"
    if family.ignores_windows and getattr(config, "sliding_window", None) is not None:
        return f"sliding_window is {config.sliding_window} in the config, which llama.cpp ignores in {name} models"
    used = config.num_experts_per_tok
    if isinstance(used, list) and len(set(used)) > 1:
        return f"layers choose {min(used)} to {max(used)} experts, and the same number in all layers in llama.cpp"
    sizes = [getattr(config, f"linear_{kind}_head_dim", None) for kind in ("key", "value")]
    if sizes[0] != sizes[1]:
        return f"heads of keys and values have {sizes[0]} and {sizes[1]} dimensions (linear_key_head_dim), and the same in llama.cpp"
    if family.gating is not None:
        reason = _why_not_of_deepseek_kind(config)
        if reason is not None:
            return reason
    rope = rope_of(config)
    kind = str(rope.get("rope_type", "default"))
    # Of latents, llama.cpp scales the scores as well if rotary embeddings are linear.
    supported = ("default", "yarn") if family.is_latent else ("default", "yarn", "linear")
    if kind not in supported:
        return f"rotary embeddings of the type {kind} cannot be described in {name} models; supported are {', '.join(supported)}"
    if kind == "yarn":
        scale = 0.1 * math.log(rope["factor"])
        computed = 1.0 if family.is_latent else scale + 1.0
        over, under = float(rope.get("mscale") or 0.0), float(rope.get("mscale_all_dim") or 0.0)
        factor = rope.get("attention_factor") or ((scale * over + 1.0) / (scale * under + 1.0) if over and under else computed)
        if not math.isclose(factor, computed, rel_tol=1e-4):
            return f"attention_factor of the rotary embeddings is {factor}, and llama.cpp computes {computed:.4g} in {name} models"
    return None


def _why_not_of_deepseek_kind(config: PretrainedConfig) -> str | None:
    name, rope = config.model_type, rope_of(config)
    kinds, last = getattr(config, "mlp_layer_types", None), config.num_hidden_layers - 1
    if getattr(config, "moe_layer_end_index", last) < last:
        return f"llama.cpp does not support layers without experts after layers with experts (moe_layer_end_index) in {name} models"
    if kinds and kinds != ["dense"] * dense_layers(config) + ["sparse"] * (len(kinds) - dense_layers(config)):
        return f"llama.cpp does not support layers without experts after layers with experts (mlp_layer_types) in {name} models"
    if getattr(config, "topk_method", None) == "group_limited_greedy" and groups(config) > 1:
        return "llama.cpp chooses groups of experts by their two best, and topk_method: group_limited_greedy by their best"
    if not FAMILIES[name].is_latent:
        return None
    if config.attention_bias:
        return f"attention_bias is true in the config, and llama.cpp has no such biases in {name} models"
    if not getattr(config, "rope_interleave", True):
        return f"rope_interleave is false in the config, and llama.cpp rotates neighbouring columns in {name} models"
    if rope.get("rope_type") == "yarn" and (not rope.get("mscale_all_dim") or rope.get("mscale") != rope["mscale_all_dim"]):
        return f"mscale and mscale_all_dim of the rotary embeddings differ, which llama.cpp does not support in {name} models"
    return None


def describe(writer: GGUFWriter, plan: ExportPlan, name: str) -> None:
    """Add the keys that describe the model."""
    writer.add_name(name)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    types = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    for key, value in keys_of(plan.config, plan.further).items():
        writer.add_key_value(f"{writer.arch}.{key}", value, types.get(type(value), GGUFValueType.ARRAY))


def _header(plan: ExportPlan, folder: Path, name: str) -> tuple[bytes, list[str]]:
    """Return everything before the weights, and notices."""
    family = family_of(plan.config)
    writer = GGUFWriter(None, family.architecture)
    describe(writer, plan, name)
    notices = add_vocabulary(writer, folder, plan.config.vocab_size, family.splits)
    if not rope_of(plan.config).get("truncate", True):
        notices.append("llama.cpp rounds the bounds of YaRN's ramp, which this model does not (truncate: false): its logits differ")
    for tensor in plan.tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, BlockType[tensor.type])
    header = io.BytesIO()
    writer.fout, writer.state = [header], WriterState.EMPTY  # type: ignore[list-item]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    content = header.getvalue()
    return content + bytes(-len(content) % ALIGNMENT), notices


def write_export(
    plan: ExportPlan,
    path: str | os.PathLike[str],
    folder: Path,
    name: str,
    importance: Mapping[str, torch.Tensor],
    advance: Advance,
    *,
    replace: bool = False,
) -> list[str]:
    """Write the file; one matrix is in memory at a time. Return notices for the user.

    Args:
        folder: with the tokenizer.
        name: of the model, for the file's description.
        importance: by the keys of the plan's tensors, (columns,) or (experts, columns); inputs of other tensors matter equally.
        advance: called with a number of bytes written; the sum is `plan.nbytes`.

    Raises:
        CheckpointError: a weight cannot be read, or is not finite.
        OSError: the file cannot be written; what was at `path` is unchanged.
    """
    header, notices = _header(plan, folder, name)
    if plan.left_out:
        first = plan.left_out[0]
        notices.append(
            f"parameters of image or sound towers are left out ({len(plan.left_out)}, such as {first}): llama.cpp has them in another file"
        )
    with new_file(path, replace=replace) as file:
        padded = len(header) + sum(tensor.nbytes + -tensor.nbytes % ALIGNMENT for tensor in plan.tensors)
        os.posix_fallocate(file.fileno(), 0, padded)  # a full disk shows before hours of work
        file.write(header)
        for tensor in plan.tensors:
            _write_tensor(file, tensor, importance.get(tensor.importance or ""), advance)
    return notices


def _write_tensor(file: BinaryIO, tensor: ExportTensor, importance: torch.Tensor | None, advance: Advance) -> None:
    for number in range(tensor.matrices):
        values = tensor.read(number)
        rows = values.reshape(-1, values.shape[-1])
        if not bool(rows.sum(dtype=torch.float32).isfinite()) and not bool(rows.isfinite().all()):
            where = f"{tensor.name}[{number}]" if tensor.matrices > 1 else tensor.name
            raise CheckpointError(f"{where}: a weight is NaN or infinite; download the checkpoint again")
        influence = importance if importance is None or importance.ndim == 1 else importance[number]
        influence = influence if influence is None or tensor.columns is None else reordered(influence, tensor.columns)
        packed = GGUF_TYPES[tensor.type].encode(rows, influence)
        file.write(packed.tobytes())
        advance(packed.nbytes)
    file.write(bytes(-tensor.nbytes % ALIGNMENT))
