"""A model in GGUF files: its tensors are checked against the config and matched with the model's parameters.

Parameters and the weight sources of operators undo the changes of llama.cpp's converter.
"""

from __future__ import annotations

import logging
import math
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, Keys, get_tensor_name_map
from numpy.typing import NDArray
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from moegraft.injection.checkpoint.files import DTYPES, Conversion, Extent, LazyTensor, stored_identity
from moegraft.injection.checkpoint.gguf.families import change_of, family_of
from moegraft.injection.checkpoint.gguf.files import FLOATS, WHOLE, BlockTensor, Index, find_parts, merge, open_file
from moegraft.injection.checkpoint.keymap import KeyMap, Target, missing_names
from moegraft.operators.decode.mtp_layers import count_mtp_layers
from moegraft.operators.errors import CheckpointError, UnsupportedModelError
from moegraft.operators.layout import ExpertsLayout, read_layout, why_unsupported
from moegraft.operators.structure import MTP
from moegraft.operators.weights import (
    Codes,
    Part,
    Segments,
    StoredBlocks,
    StoredTypes,
    WeightSource,
    WeightTypes,
    narrowest,
    reordered,
    widest,
)

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Stored(Conversion):
    """The storage of one parameter."""

    shape: tuple[int, ...]

    @property
    @abstractmethod
    def tensors(self) -> Sequence[BlockTensor]: ...

    @property
    def extents(self) -> list[Extent]:
        return [tensor.extent for tensor in self.tensors]

    @property
    def dtype(self) -> torch.dtype:
        return widest(tensor.dtype for tensor in self.tensors)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return DTYPE_NAMES[self.dtype]


@dataclass(frozen=True)
class Plain(Stored):
    """A parameter in one tensor, which may have other dimensions of size 1, or in several that have its rows one after the other.

    Attributes:
        rows: the stored row of each row of the parameter; None if the order is the same.
        columns, kinds: as `Change` has them, for this config.
        load: the values from the stored ones; None if they are the same.
    """

    parts: tuple[BlockTensor, ...]
    shape: tuple[int, ...]
    rows: NDArray[np.int64] | None = None
    columns: tuple[int, int] | None = None
    kinds: tuple[int, tuple[int, ...]] | None = None
    load: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def tensors(self) -> Sequence[BlockTensor]:
        return self.parts

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        first = self.parts[0]
        whole = first.read() if len(self.parts) == 1 else torch.cat([part.read().to(self.dtype) for part in self.parts])
        values = whole.reshape(self.shape)
        if self.rows is not None:
            values = values[torch.from_numpy(self.rows)]
        if self.columns is not None:
            return reordered(values, self.columns[::-1])
        if self.load is not None:
            loaded = self.load(values)
            if not bool(loaded.isfinite().all()):
                raise CheckpointError(f"{self.parts[0].origin}: a value is out of the range of this tensor; download the file again")
            return loaded
        return values.clone() if len(self.parts) == 1 and self.rows is None and first.block_type in FLOATS else values

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2 and all(len(part.shape) == 2 for part in self.parts) and self.load is None

    @property
    def is_of_two_types(self) -> bool:
        """Whether it is in two tensors of different types, which can be multiplied with one after the other."""
        ordered = self.rows is None or self.kinds is not None
        return self.is_matrix and ordered and len(self.parts) == 2 and self.parts[0].kept_type != self.parts[1].kept_type

    def codes(self) -> Codes | StoredBlocks | None:
        """Return the codes; None if there are none, or if parts have blocks of different types."""
        found = [part.codes() for part in self.parts] if self.is_matrix else []
        order = slice(None) if self.rows is None else self.rows
        blocks = [each for each in found if isinstance(each, StoredBlocks)]
        codes = [each for each in found if isinstance(each, Codes)]
        if blocks and len(blocks) == len(found) and len({each.weight_type for each in blocks}) == 1:
            return StoredBlocks(_together([each.blocks for each in blocks])[order], blocks[0].weight_type, self.columns)
        if codes and len(codes) == len(found):
            values, scales = _together([each.codes for each in codes]), _together([each.scales for each in codes])
            return Codes(values[order], scales[order], max(each.bits for each in codes), self.columns)
        return None


def _together(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the rows of all arrays, without copying those of a single one."""
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


@dataclass(frozen=True)
class SplitKeyValue(Stored):
    """`kv_b_proj` of DeepSeek's attention, stored as `attn_k_b (heads, rank, nope)` and `attn_v_b (heads, v_dim, rank)`."""

    key: BlockTensor
    value: BlockTensor
    shape: tuple[int, ...]

    @property
    def tensors(self) -> Sequence[BlockTensor]:
        return (self.key, self.value)

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        key, value = self.key.read().transpose(1, 2), self.value.read()
        return torch.cat([key.to(self.dtype), value.to(self.dtype)], dim=1).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One part of all experts of a layer: one tensor (E, ...), `rows` of a tensor with gate and up, or one tensor per expert."""

    tensors: tuple[BlockTensor, ...]
    rows: slice | None = None

    def at(self, expert: int) -> tuple[BlockTensor, Index]:
        """Return the tensor that holds `expert`, and the expert's index in it."""
        if len(self.tensors) > 1:
            return self.tensors[expert], WHOLE
        return self.tensors[0], expert if self.rows is None else (expert, self.rows)


@dataclass(frozen=True)
class FusedExperts(Stored):
    """A fused parameter of an experts module that is not replaced: `gate_up_proj` or `down_proj`."""

    layout: ExpertsLayout
    parts: Mapping[Part, ExpertPart]
    shape: tuple[int, ...]

    @property
    def tensors(self) -> Sequence[BlockTensor]:
        return tuple(dict.fromkeys(tensor for part in self.parts.values() for tensor in part.tensors))

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for expert in range(self.layout.num_experts):
            for name, part in self.parts.items():
                tensor, where = part.at(expert)
                self.layout.cut(name, whole[expert]).copy_(tensor.read(where))
        return whole


def lazy(stored: Stored) -> LazyTensor:
    """Return a parameter as a `LazyTensor`."""
    first = stored.tensors[0]
    return LazyTensor(", ".join(tensor.name for tensor in stored.tensors[:2]), first.file, stored)


class GgufExperts(WeightSource):
    """A `WeightSource` over one experts module; pieces are read from the mapped file."""

    def __init__(self, parts: Mapping[Part, ExpertPart]) -> None:
        self._parts = parts

    @property
    def dtype(self) -> torch.dtype:
        return widest(tensor.dtype for name, part in self._parts.items() if not name.endswith("_bias") for tensor in part.tensors)

    @property
    def fingerprint(self) -> str | None:
        parts = [(f"{name} {part.rows}", tensor.extent) for name, part in self._parts.items() for tensor in part.tensors]
        return stored_identity(replace(extent, meaning=f"{part} {extent.meaning}") for part, extent in parts)

    def parts(self) -> Sequence[Part]:
        return tuple(self._parts)

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        tensor, index = self._parts[part].at(expert)
        return tensor.read(index)

    def read_codes(self, part: Part, expert: int, weight_type: str) -> Codes | StoredBlocks | None:
        tensor, index = self._parts[part].at(expert)
        return tensor.codes(index)

    def origin(self, part: Part, expert: int = 0) -> str:
        tensor, index = self._parts[part].at(expert)
        return tensor.origin if index == () else f"{tensor.origin}[{expert}]"


class GgufLinear(WeightSource):
    """A `WeightSource` over a linear layer."""

    def __init__(self, parts: Mapping[Part, Stored]) -> None:
        self._parts = parts

    @property
    def dtype(self) -> torch.dtype:
        return self._parts["weight"].dtype

    def parts(self) -> Sequence[Part]:
        return tuple(self._parts)

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        return self._parts[part][...]

    def read_codes(self, part: Part, expert: int, weight_type: str) -> Codes | StoredBlocks | None:
        stored = self._parts[part]
        return stored.codes() if isinstance(stored, Plain) else None

    def segments(self) -> Segments:
        weight = self._parts["weight"]
        assert isinstance(weight, Plain) and weight.is_of_two_types, "only such layers have the weight types of several tensors"
        sources = [GgufLinear({"weight": Plain((part,), part.shape)}) for part in weight.parts]
        return Segments(sources, *(weight.kinds or (1, tuple(part.shape[0] for part in weight.parts))))

    def origin(self, part: Part, expert: int = 0) -> str:
        return self._parts[part].tensors[0].origin


BLOCK = re.compile(r"blk\.(\d+)\.")
LAYER = re.compile(r"\blayers\.(\d+)\.")
REPEATED = (".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight")  # the model's own
NEXTN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head_norm"}  # beside the layer's own tensors
_IN_MTP = re.compile(rf"{MTP}\.layers\.\d+\.(?P<module>\w+)\.(?P<rest>.+)")
# Rotary frequencies, which transformers computes from the config.
COMPUTED = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")

# Names that llama.cpp's converter changes before it looks them up.
RENAMED = {
    ".gate.moe_statics.e_score_correction_bias": ".moe_statics.e_score_correction.bias",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".sinks": ".sinks.weight",
    ".layer_scalar": ".layer_scalar.weight",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
    ".expert_bias": ".expert_bias.bias",
    ".dt_bias": ".dt_proj.bias",
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
}


class Names:
    """The tensor names of one model's parameters, from the tables of the package `gguf`; `further` is the number of its MTP layers."""

    def __init__(self, config: PretrainedConfig, further: int = 0) -> None:
        self._config = config
        self.layers, self._further = int(config.num_hidden_layers), further
        family = family_of(config)
        self._layers, architecture = family.layers, family.architecture
        number = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
        self._table = get_tensor_name_map(number, self.layers + further)

    def stored(self, parameter: str) -> str | None:
        """Return the tensor name of a parameter; None if GGUF files have none for it."""
        further = _IN_MTP.fullmatch(parameter)
        if further is not None and further["module"] in NEXTN:
            return f"blk.{self.layer(parameter)}.nextn.{NEXTN[further['module']]}.{further['rest']}"
        if further is not None:
            parameter = f"model.layers.{self.layer(parameter)}.{further['rest']}"
        for end, other in RENAMED.items():
            if parameter.endswith(end):
                parameter = parameter.removesuffix(end) + other
        for old, new in (("model.language_model.", "model."), ("model.layers.", self._layers), (".forget_gate.", ".")):
            parameter = parameter.replace(old, new)
        name: str | None = self._table.get_name(parameter, try_suffixes=(".weight", ".bias", ".scale"))
        return name

    def parts(self, parameter: str, rows: int) -> dict[str, int]:
        """Return the tensors that a parameter is divided into, and the rows of each; none if one tensor holds it."""
        parts = change_of(self._config, parameter).parts
        if parts is None:
            return {}
        return {f"blk.{self.layer(parameter)}.{part}.weight": size for part, size in parts(self._config, rows).items()}

    def layer(self, module: str) -> int:
        """Return the number of a module's layer; those of MTP layers follow the body's."""
        match = LAYER.search(f"{module}.")
        assert match is not None, f"{module} is in no layer"
        return int(match[1]) + self.layers * module.startswith(f"{MTP}.")

    def ignored(self, tensor: str) -> bool:
        """Whether the model does not need a tensor: rotary frequencies, MTP layers that it does not have, and the embedding and head that
        files repeat in those that it has."""
        block = BLOCK.match(tensor)
        if block is None:
            return tensor.startswith(COMPUTED)
        return int(block[1]) >= self.layers + self._further or tensor.endswith(REPEATED)


def experts_name(layer: int, part: Part, *, fused: bool = False, expert: int | None = None) -> str:
    """Return the tensor name of a part: of all experts, of gate and up together if `fused`, or of one expert in files before 2024-04."""
    matrix, _, bias = part.partition("_")
    suffix = "bias" if bias else "weight"
    if expert is not None:
        return f"blk.{layer}.ffn_{matrix}.{expert}.{suffix}"
    return f"blk.{layer}.ffn_{'gate_up' if fused else matrix}_exps.{suffix}"


logger = logging.getLogger(__name__)
EMBEDDINGS = "token_embd.weight"  # rows are looked up, and no kernel is needed


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The opened files of one model, of which only headers are read."""

    path: Path
    tensors: Mapping[str, BlockTensor]

    @property
    def float_dtype(self) -> torch.dtype:
        """The dtype that most of the weights are read as: float32 for blocks."""
        stored: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            stored[tensor.dtype] += tensor.elements
        return stored.most_common(1)[0][0]

    def mtp_bytes(self, config: PretrainedConfig) -> dict[str, int]:
        """Return the bytes of the tensors of MTP layers, by names that show, as in safetensors, how many layers there are."""
        sizes = {}
        for name, tensor in self.tensors.items():
            block = BLOCK.match(name)
            if block is None or int(block[1]) < config.num_hidden_layers or name.endswith(REPEATED):
                continue
            layer, rest = int(block[1]) - config.num_hidden_layers, name[block.end() :]
            sizes[f"{MTP}.fc.weight" if rest == "nextn.eh_proj.weight" else f"{MTP}.layers.{layer}.{rest}"] = tensor.extent.nbytes
        return sizes if f"{MTP}.fc.weight" in sizes else {}


def open_gguf(path: Path, config: PretrainedConfig) -> GgufModel:
    """Open the files of a model.

    Args:
        path: a file, any part of a split one, or a folder with the parts of one model.

    Raises:
        CheckpointError: a file is damaged or missing, there are several models, or the model does not fit the config.
        UnsupportedModelError: GGUF files of this family cannot be loaded.
    """
    architecture = family_of(config).architecture
    files = [open_file(part) for part in find_parts(path)]
    tensors = merge(files)
    found = files[0].fields.get(Keys.General.ARCHITECTURE)
    if found != architecture:
        raise CheckpointError(
            f"{files[0].path}: the architecture is {str(found)[:100]!r}, and that of the config's model type, '{config.model_type}', "
            f"is '{architecture}'; give the folder or hub id that this file was made from"
        )
    if not tensors:
        raise CheckpointError(f"{files[0].path}: this file has no tensors, only a vocabulary; give the file with the weights")
    for tensor in tensors.values():
        tensor.check_type()
    blocks = files[0].integer(f"{architecture}.block_count")
    further = files[0].integer(f"{architecture}.nextn_predict_layers") or 0
    if blocks is not None and blocks - further != config.num_hidden_layers:
        raise CheckpointError(f"{files[0].path}: {blocks - further} layers, and the config has {config.num_hidden_layers}")
    # Models with the same shapes may differ in these numbers, such as Qwen3-30B-A3B and its later releases.
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if rope.get("rope_type") != "dynamic" else None  # of which files have the scaled one
    for key, name, value in (
        ("rope.freq_base", "rope_theta", theta),
        ("expert_used_count", "num_experts_per_tok", getattr(config, "num_experts_per_tok", None)),
    ):
        stated = files[0].fields.get(f"{architecture}.{key}")
        if isinstance(stated, int | float) and isinstance(value, int | float) and not math.isclose(stated, value, rel_tol=1e-4):
            text = "%s: %s is %s, and %s is %s in the config, which counts; give the folder or hub id that this file was made from"
            logger.warning(text, files[0].path, key, f"{stated:.7g}", name, f"{value:.7g}")
    return GgufModel(files[0].path, tensors)


class GgufWeights:
    """The parameters of a model in its GGUF files.

    Attributes:
        tensors: by the parameter's name.

    Raises:
        CheckpointError: from the constructor, if a tensor is missing, unknown or of the wrong shape.
    """

    def __init__(self, gguf: GgufModel, skeleton: PreTrainedModel) -> None:
        self._gguf = gguf
        self._skeleton = skeleton
        self._config = skeleton.config
        self._names = Names(self._config, count_mtp_layers(skeleton))
        self._read: set[str] = set()
        self._experts: dict[str, dict[Part, ExpertPart]] = {}
        self._stored: dict[str, Stored] = {}
        for path, module in skeleton.named_modules():
            if why_unsupported(module) is None:
                self._find_experts(path, module)
        self._find_rest()
        unknown = [tensor for name, tensor in gguf.tensors.items() if name not in self._read and not self._names.ignored(name)]
        if unknown:
            more = f" (and {len(unknown) - 1} more tensors)" if len(unknown) > 1 else ""
            raise CheckpointError(
                f"{unknown[0].origin}: the model has no parameter for this tensor{more}; check that file and config are of the same model"
            )
        self.tensors: Mapping[str, LazyTensor] = {name: lazy(stored) for name, stored in self._stored.items()}
        self.packed: Mapping[str, WeightSource] = {}
        self.keymap = KeyMap({name: Target(name, {"": [name]}) for name in self._stored}, unread=(), missing=())

    def source(self, path: str, kind: str) -> WeightSource:
        """Return the weights for an operator of `kind` that replaces the module at `path`."""
        if kind == "experts":
            return GgufExperts(self._experts[path])
        assert kind == "linear", f"operators of kind {kind} take no weights"
        return GgufLinear(self._held(path))

    def stored_types(self, path: str) -> StoredTypes | None:
        gate_up, down = self._matrices(path)
        if not down:
            return None
        whole = narrowest({tensor.weight_type for tensor in (*gate_up, *down)})
        weight = None if path in self._experts else self._held(path)["weight"]
        if isinstance(weight, Plain) and weight.is_of_two_types:
            first, second = weight.parts
            return StoredTypes(whole, first.kept_type, second.kept_type, (first.shape[0], second.shape[0]))
        return StoredTypes(whole, narrowest({tensor.kept_type for tensor in gate_up}), narrowest({tensor.kept_type for tensor in down}))

    def log_conversions(self, weight_types: Mapping[str, WeightTypes], dtype: torch.dtype) -> None:
        unchanged = set()
        for path, of_module in weight_types.items():
            for tensors, weight_type in zip(self._matrices(path), (of_module.gate_up, of_module.down), strict=True):
                unchanged |= {tensor.name for tensor in tensors if tensor.kept_type == weight_type}
        others = self._read - unchanged - {EMBEDDINGS}
        converted = [tensor for tensor in self._gguf.tensors.values() if tensor.name in others and tensor.is_stored]
        if converted:
            logger.warning(
                "%s: %d tensors in %s, the first of them %s, are converted through float32: those of replaced modules to the rule's weight "
                "type (int8 for 'stored'), all others to %s; experts and linear layers without sparsity keep them unchanged if their "
                "weights are 'stored' or have at least as many bits, such as int8",
                self._gguf.path,
                len(converted),
                ", ".join(sorted({tensor.block_type.name for tensor in converted})),
                converted[0].name,
                str(dtype).removeprefix("torch."),
            )

    def _matrices(self, path: str) -> tuple[Sequence[BlockTensor], Sequence[BlockTensor]]:
        """Return the tensors of gate and up and those of down; for a linear layer, its tensor as both."""
        if path in self._experts:
            parts = self._experts[path]
            gate_up = [tensor for name, part in parts.items() if name in ("gate", "up") for tensor in part.tensors]
            return gate_up, parts["down"].tensors
        weight = self._held(path).get("weight")
        matrix = weight.tensors if isinstance(weight, Plain) and weight.is_matrix else ()
        return matrix, matrix

    def _held(self, path: str) -> dict[Part, Stored]:
        """Return the stored parameters of a linear layer."""
        tied = self._skeleton.all_tied_weights_keys
        names: dict[Part, str] = {"weight": f"{path}.weight", "bias": f"{path}.bias"}
        held = {part: self._stored.get(name) or self._stored.get(tied.get(name, "")) for part, name in names.items()}
        return {part: stored for part, stored in held.items() if stored is not None}

    def _take(self, name: str, expected: tuple[int, ...], parameter: str) -> BlockTensor:
        """Return the tensor of a parameter, and mark it as read."""
        tensor = self._gguf.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self._gguf.path}: '{name}', the tensor of {parameter}, is missing; "
                "the file is incomplete, or belongs to another model than the config"
            )
        if [size for size in tensor.shape if size != 1] != [size for size in expected if size != 1]:
            raise CheckpointError(f"{tensor.origin}: shape {tensor.shape}, and the model has {expected}")
        self._read.add(name)
        return tensor

    def _find_experts(self, path: str, module: nn.Module) -> None:
        layout = read_layout(module)
        parts = {part: self._expert_part(path, layout, part) for part in layout.parts()}
        self._experts[path] = parts
        for name, parameter in module.named_parameters(recurse=False):
            own = {part: found for part, found in parts.items() if layout.parameter(part) == name}
            self._stored[f"{path}.{name}"] = FusedExperts(layout, own, tuple(parameter.shape))

    def _expert_part(self, path: str, layout: ExpertsLayout, part: Part) -> ExpertPart:
        layer, shape, parameter = self._names.layer(path), layout.part_shape(part), f"{path}.{layout.parameter(part)}"
        whole, fused = experts_name(layer, part), experts_name(layer, part, fused=True)
        if not part.startswith("down") and whole not in self._gguf.tensors and fused in self._gguf.tensors:
            both = self._take(fused, (layout.num_experts, 2 * shape[0], *shape[1:]), parameter)
            first = 0 if part.startswith("gate") else shape[0]
            return ExpertPart((both,), slice(first, first + shape[0]))
        if whole not in self._gguf.tensors and experts_name(layer, part, expert=0) in self._gguf.tensors:
            each = (experts_name(layer, part, expert=expert) for expert in range(layout.num_experts))
            return ExpertPart(tuple(self._take(name, shape, parameter) for name in each))
        return ExpertPart((self._take(whole, (layout.num_experts, *shape), parameter),))

    def _find_rest(self) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._skeleton.state_dict().items()}
        for name, shape in shapes.items():
            stored = None if name in self._stored else self._find(name, shape)
            if stored is not None:
                self._stored[name] = stored
        for name in missing_names(self._skeleton, self._stored):
            stored_name = self._names.stored(name)
            if stored_name is None:
                raise UnsupportedModelError(
                    f"{self._gguf.path}: files of this architecture have no tensor for {name}, which the config requires"
                )
            self._take(stored_name, shapes[name], name)

    def _find(self, parameter: str, shape: tuple[int, ...]) -> Stored | None:
        name, parts = self._names.stored(parameter), self._names.parts(parameter, shape[0] if shape else 1)
        if parts and name not in self._gguf.tensors:
            taken = tuple(self._take(part, (rows, *shape[1:]), parameter) for part, rows in parts.items())
            kinds = change_of(self._config, parameter).kinds
            return Plain(taken, shape, self._rows(parameter, shape), kinds=None if kinds is None else kinds(self._config))
        if name is None:
            return None
        if name.endswith("attn_kv_b.weight"):
            split = self._split_key_value(name, parameter, shape)
            if split is not None:
                return split
        if name not in self._gguf.tensors:
            return None
        change = change_of(self._config, parameter)
        tensor = self._take(name, shape if change.shape is None else change.shape(self._config, shape), parameter)
        rows = None if parts else self._rows(parameter, shape)
        return Plain((tensor,), shape, rows, None if change.columns is None else change.columns(self._config), load=change.load)

    def _rows(self, parameter: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        rows = change_of(self._config, parameter).rows
        return None if rows is None else rows(self._config, shape[0])

    def _split_key_value(self, name: str, parameter: str, shape: tuple[int, ...]) -> Stored | None:
        """Return `kv_b` from its two halves; None if the file has the whole, which is read even if the halves are there as well."""
        key_name, value_name = name.replace("_kv_b", "_k_b"), name.replace("_kv_b", "_v_b")
        if name in self._gguf.tensors:
            self._read |= {key_name, value_name}
            return None
        if key_name not in self._gguf.tensors:
            return None
        config = self._config
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        key = self._take(key_name, (heads, rank, config.qk_nope_head_dim), parameter)
        value = self._take(value_name, (heads, config.v_head_dim, rank), parameter)
        return SplitKeyValue(key, value, shape)
