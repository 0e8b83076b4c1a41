"""Weight sources of operators: experts and linear layers in a safetensors checkpoint, read from the mapped files, or in memory."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

from moegraft.injection.checkpoint.files import SUPPORTED, Checkpoint, LazyTensor, stored_identity
from moegraft.injection.checkpoint.keymap import KeyMap, Target, map_keys, mtp_names
from moegraft.injection.checkpoint.packed import MARK, packed_modules
from moegraft.injection.checkpoint.quantised import Quantised
from moegraft.operators.errors import CheckpointError, UnsupportedModelError
from moegraft.operators.layout import ExpertsLayout, read_layout
from moegraft.operators.weight_formats import FLOAT_TYPES, STORED_FORMATS
from moegraft.operators.weights import Codes, Part, StoredBlocks, StoredTypes, WeightSource, WeightTypes, narrowest, widest

logger = logging.getLogger(__name__)
T = TypeVar("T")


def convert(target: Target, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> torch.Tensor:
    """Read every key of `target`, and return the whole parameter as transformers' own converter makes it.

    Raises:
        CheckpointError: the result is missing or of another shape than the skeleton's parameter.
    """
    converter = deepcopy(target.converter)
    assert converter is not None, f"{target.name} is stored as it is"
    for pattern, keys in target.keys.items():
        for key in keys:
            # transformers declares a Future, and calls any callable.
            converter.add_tensor(target.name, key, pattern, partial(tensors[key].__getitem__, ...))  # type: ignore[arg-type]
    made = converter.convert(target.name, model=skeleton, config=skeleton.config).get(target.name)
    whole: torch.Tensor | None = made[0] if isinstance(made, list) else made
    expected = tuple(skeleton.get_parameter(target.name).shape)
    if whole is None or tuple(whole.shape) != expected:
        shape = None if whole is None else tuple(whole.shape)
        raise CheckpointError(f"{tensors[target.all_keys[0]].origin}: converts to shape {shape}, and the model has {expected}")
    return whole


def read_parameter(target: Target, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> torch.Tensor:
    """Return a whole parameter, converted where transformers converts it."""
    return tensors[target.all_keys[0]][...] if target.converter is None else convert(target, tensors, skeleton)


def target_of(name: str, keymap: KeyMap, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> Target:
    """Return the target of a parameter, or of one that it is tied to.

    Raises:
        CheckpointError: the checkpoint has none of them.
    """
    ties = skeleton.all_tied_weights_keys
    tied = (name, ties.get(name, ""), *(other for other, tie in ties.items() if tie == name))
    target = next((keymap.targets[each] for each in tied if each in keymap.targets), None)
    if target is None:
        raise _missing(tensors, name)
    return target


def _missing(tensors: Mapping[str, LazyTensor], name: str) -> CheckpointError:
    folder = next(iter(tensors.values())).file.parent
    why = "a shard or keys are missing, or the folder has it packed by its rules: use the stock model"
    return CheckpointError(f"{folder}: no key of this checkpoint provides {name}; {why}")


class _Store(Protocol):
    """The storage of one parameter; `piece` reads one part of one expert, or a part of a linear layer."""

    def piece(self, part: Part, expert: int) -> torch.Tensor: ...

    def codes(self, part: Part, expert: int, weight_type: str) -> Codes | StoredBlocks | None:
        """Return a piece in the codes of a kernel's type; None if that type cannot hold it without rounding."""
        ...

    @property
    def weight_types(self) -> set[_WeightType]: ...

    def origin(self, part: Part, expert: int) -> str: ...


@dataclass(frozen=True, slots=True)
class _WeightType:
    """The kernels' type of a stored tensor: the smallest that holds it without rounding, and the same of those that they quantise to."""

    stored: str
    packed: str


def _weight_type(tensor: LazyTensor, *, as_codes: bool) -> _WeightType:
    quantised = _quantised(tensor)
    if quantised is None:
        name = "float32" if tensor.dtype is None else FLOAT_TYPES[tensor.dtype]
        return _WeightType(name, name)
    if not (as_codes and quantised.lossless_types):
        return _WeightType(quantised.converted_type, quantised.converted_type)
    packed = [name for name in quantised.lossless_types if name not in STORED_FORMATS]
    return _WeightType(quantised.lossless_types[0], packed[0] if packed else quantised.converted_type)


def _quantised(tensor: LazyTensor) -> Quantised | None:
    return tensor.conversion if isinstance(tensor.conversion, Quantised) else None


class _LastExpert(threading.local):
    """The slice of an expert that a thread read last: gate and up share one."""

    def __init__(self) -> None:
        self._key: object = None
        self._value: Any = None

    def read(self, expert: int, read: Callable[[int], T]) -> T:
        if self._key != (expert, read):
            self._key = self._value = None  # before the memory of the next one is needed
            self._value, self._key = read(expert), (expert, read)
        value: T = self._value
        return value


class _Stored:
    """A parameter in tensors that are read as they are: one for all experts, of which one's slice is read at a time, or one for each.

    Args:
        by_part: the tensors of each part, by expert; of a linear layer, and of all experts, one.
        layout: that parts are cut by; None where each tensor is one part.
        sliced: whether a tensor holds all experts, (E, ...).
        as_codes: whether codes are of matrices in `nn.Linear` orientation, as which they are read.
    """

    def __init__(
        self, by_part: Mapping[Part, Sequence[LazyTensor]], layout: ExpertsLayout | None, *, sliced: bool = False, as_codes: bool = True
    ) -> None:
        self._by_part = by_part
        self._layout = layout
        self._sliced = sliced
        self._as_codes = as_codes
        self._latest = _LastExpert()

    def _tensor(self, part: Part, expert: int) -> LazyTensor:
        return self._by_part[part][0 if self._sliced else expert]

    def piece(self, part: Part, expert: int) -> torch.Tensor:
        tensor = self._tensor(part, expert)
        stored = self._latest.read(expert, tensor.__getitem__) if self._sliced else tensor[...]
        return stored if self._layout is None else self._layout.cut(part, stored)

    def codes(self, part: Part, expert: int, weight_type: str) -> Codes | StoredBlocks | None:
        quantised = _quantised(self._tensor(part, expert)) if self._as_codes else None
        if quantised is None:
            return None
        stored = self._latest.read(expert, quantised.read) if self._sliced else quantised.read(None)
        matrix = stored if self._layout is None else stored.rows(self._layout.rows(part))
        packed = matrix.packed_as(weight_type)
        if packed is None and weight_type in STORED_FORMATS and weight_type in quantised.lossless_types:
            reason = f"a weight or scale is NaN or too large for {weight_type}; download it again, or set another type"
            raise CheckpointError(f"{self.origin(part, expert)}: {reason}")
        return packed

    @property
    def weight_types(self) -> set[_WeightType]:
        return {_weight_type(tensor, as_codes=self._as_codes) for tensors in self._by_part.values() for tensor in tensors}

    def origin(self, part: Part, expert: int) -> str:
        return self._tensor(part, expert).origin + (f"[{expert}]" if self._sliced else "")


class _Converted:
    """A parameter in a form that only transformers' converter can read: the first piece converts all of it."""

    def __init__(self, layout: ExpertsLayout | None, target: Target, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> None:
        self._layout = layout
        self._target = target
        self._tensors = tensors
        self._skeleton = skeleton
        self._whole: torch.Tensor | None = None
        self._lock = threading.Lock()

    def piece(self, part: Part, expert: int) -> torch.Tensor:
        with self._lock:
            if self._whole is None:
                self._whole = convert(self._target, self._tensors, self._skeleton)
        return self._whole if self._layout is None else self._layout.cut(part, self._whole[expert])

    def codes(self, part: Part, expert: int, weight_type: str) -> None:
        return None

    @property
    def weight_types(self) -> set[_WeightType]:
        return {_weight_type(self._tensors[key], as_codes=False) for key in self._target.all_keys}

    def origin(self, part: Part, expert: int) -> str:
        return self._tensors[self._target.all_keys[0]].origin


class CheckpointSource(WeightSource):
    """A `WeightSource` over one module's part of a checkpoint.

    Args:
        stores: by part.
        targets: of the module's parameters, by name.
        tensors: of the checkpoint.
    """

    def __init__(self, stores: Mapping[Part, _Store], targets: Mapping[str, Target], tensors: Mapping[str, LazyTensor]) -> None:
        self._stores = stores
        self._all_tensors = [tensors[key] for target in targets.values() for key in target.all_keys]
        matrices = [tensors[key] for name, target in targets.items() if not name.endswith("bias") for key in target.all_keys]
        self._dtype = widest(tensor.dtype for tensor in matrices if tensor.dtype is not None)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def fingerprint(self) -> str | None:
        return stored_identity(extent for tensor in self._all_tensors for extent in tensor.extents)

    def parts(self) -> Sequence[Part]:
        return tuple(self._stores)

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        return self._stores[part].piece(part, expert)

    def read_codes(self, part: Part, expert: int, weight_type: str) -> Codes | StoredBlocks | None:
        return self._stores[part].codes(part, expert, weight_type)

    def stored_types(self) -> StoredTypes | None:
        """Return the weight types of matrices of which some are quantised, a linear layer's as that of all parts; None if none is."""
        if not any(_quantised(tensor) for tensor in self._all_tensors):
            return None
        whole = self._stores.get("weight")
        gate_up, down = ((whole or self._stores[part]).weight_types for part in ("up", "down"))
        return StoredTypes(
            narrowest({each.packed for each in gate_up | down}),
            narrowest({each.stored for each in gate_up}),
            narrowest({each.stored for each in down}),
        )

    def origin(self, part: Part, expert: int = 0) -> str:
        return self._stores[part].origin(part, expert)


def _experts_source(
    module: str, layout: ExpertsLayout, targets: Mapping[str, Target], tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel
) -> CheckpointSource:
    """Return the source of one experts module.

    Raises:
        CheckpointError: a parameter, an expert or a part is missing, or of the wrong shape or dtype.
    """
    stores: dict[str, _Store] = {}
    for name in dict.fromkeys(map(layout.parameter, layout.parts())):
        target = targets.get(name)
        if target is None:
            raise _missing(tensors, f"{module}.{name}")
        _check_dtypes([tensors[key] for key in target.all_keys])
        stores[name] = _store(layout, target, tensors, skeleton)
    return CheckpointSource({part: stores[layout.parameter(part)] for part in layout.parts()}, targets, tensors)


def _check_shape(tensor: LazyTensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise CheckpointError(f"{tensor.origin}: shape {tensor.shape}, and the model has {expected}")


def _check_dtypes(tensors: Sequence[LazyTensor]) -> None:
    for tensor in tensors:
        if tensor.dtype is None:
            raise CheckpointError(f"{tensor.origin}: weights of dtype {tensor.stored_dtype} cannot be read; {SUPPORTED}")


def _store(layout: ExpertsLayout, target: Target, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> _Store:
    parts = [part for part in layout.parts() if layout.parameter(part) == target.name.rpartition(".")[2]]
    if target.converter is None:
        tensor = tensors[target.all_keys[0]]
        _check_shape(tensor, tuple(skeleton.get_parameter(target.name).shape))
        quantised = _quantised(tensor)
        as_linear = quantised is None or quantised.transposed == layout.transposed
        if quantised is not None and quantised.halves and (layout.interleaved or not as_linear):
            raise CheckpointError(
                f"{tensor.origin}: gate and up have a scale each, and are no halves of its rows in this model, as which they are read; "
                "quantise the model again with one scale for both, or load the floating-point checkpoint or a GGUF file instead"
            )
        return _Stored({part: [tensor] for part in parts}, layout, sliced=True, as_codes=as_linear)
    operations = list(target.converter.operations)
    last = operations[-1]
    transposes = isinstance(last, Transpose) and (last.dim0, last.dim1, last.check_dims) == (1, 2, False)
    operations = operations[:-1] if transposes else operations
    stacked = bool(operations) and isinstance(operations[0], MergeModulelist)
    joined = len(operations) == 2 and isinstance(operations[1], Concatenate)
    fused = not joined and len(parts) > 1
    as_linear = transposes == layout.transposed and not (fused and layout.transposed)
    plain = as_linear and not layout.interleaved and len(target.converter.target_patterns) == 1
    if not (stacked and (joined or len(operations) == 1) and plain):
        return _Converted(layout, target, tensors, skeleton)
    patterns = [pattern for pattern in target.converter.source_patterns if pattern in target.keys]
    columns = [_by_expert(layout, [tensors[key] for key in target.keys[pattern]]) for pattern in patterns]
    if not fused and len(columns) != len(parts):
        lacking = [pattern for pattern in target.converter.source_patterns if pattern not in target.keys]
        raise _missing(tensors, f"{target.name} (no key matches {', '.join(lacking)})")
    by_part = {part: columns[0 if fused else position] for position, part in enumerate(parts)}
    for part, stored in by_part.items() if not fused else ():
        for tensor in stored:
            _check_shape(tensor, layout.part_shape(part))
    return _Stored(by_part, layout if fused else None)


def _by_expert(layout: ExpertsLayout, tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
    """Return the tensors by the expert number in their keys, one for each expert."""
    number = re.compile(r"experts\.(\d+)\.")
    by_number: dict[int, LazyTensor] = {}
    for tensor in tensors:
        match = number.search(tensor.key)
        if match is None:
            raise CheckpointError(f"{tensor.origin}: no expert number in this key")
        by_number[int(match[1])] = tensor
    extra = [expert for expert in sorted(by_number) if expert >= layout.num_experts]
    if extra:
        raise CheckpointError(f"{by_number[extra[0]].origin}: the model has only {layout.num_experts} experts, numbered from 0")
    lacking = [expert for expert in range(layout.num_experts) if expert not in by_number]
    if lacking:
        example = number.sub(f"experts.{lacking[0]}.", tensors[0].key)
        raise CheckpointError(f"{tensors[0].file}: {example} is missing, as are {len(lacking)} of {layout.num_experts} experts in all")
    return [by_number[expert] for expert in range(layout.num_experts)]


def _linear_source(module: str, keymap: KeyMap, tensors: Mapping[str, LazyTensor], skeleton: PreTrainedModel) -> CheckpointSource:
    """Return the source of a linear layer's weight and, where it has one, bias; a tied weight is read where it is stored.

    Raises:
        CheckpointError: a part is missing or of the wrong shape or dtype.
    """
    stores: dict[Part, _Store] = {}
    targets: dict[str, Target] = {}
    parts: tuple[Part, ...] = ("weight", "bias")
    for part in parts:
        name = f"{module}.{part}"
        if getattr(skeleton.get_submodule(module), part) is None:
            continue
        target = targets[part] = target_of(name, keymap, tensors, skeleton)
        stored = [tensors[key] for key in target.all_keys]
        _check_dtypes(stored)
        if target.converter is None:
            _check_shape(stored[0], tuple(skeleton.get_parameter(name).shape))
            stores[part] = _Stored({part: stored}, None)
        else:
            stores[part] = _Converted(None, target, tensors, skeleton)
    return CheckpointSource(stores, targets, tensors)


class StoredWeights(Protocol):
    """The stored weights of one model: safetensors or GGUF. Headers are read when it is opened, tensors on access."""

    @property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """The tensors by key, as in `keymap`."""
        ...

    @property
    def keymap(self) -> KeyMap: ...

    @property
    def packed(self) -> Mapping[str, WeightSource]:
        """The modules whose weights are stored as the kernels read them, by path; the tensors do not include theirs."""
        ...

    def source(self, path: str, kind: str) -> WeightSource:
        """Return the weights for an operator of `kind` that replaces the module at `path`."""
        ...

    def stored_types(self, path: str) -> StoredTypes | None:
        """Return the weight types of the experts or linear layer at `path` if it is stored in blocks; None if it has a dtype."""
        ...

    def log_conversions(self, weight_types: Mapping[str, WeightTypes], dtype: torch.dtype) -> None:
        """Log which stored types are converted.

        Args:
            weight_types: of the replaced modules, by path.
            dtype: of what is not replaced.
        """
        ...


class CheckpointWeights:
    """The weights of a safetensors checkpoint."""

    def __init__(self, checkpoint: Checkpoint, skeleton: PreTrainedModel) -> None:
        renamed = mtp_names(skeleton, checkpoint.tensors)
        self.packed = packed_modules(checkpoint.tensors)
        stock = {key: tensor for key, tensor in checkpoint.tensors.items() if key.rpartition(MARK)[0] not in self.packed}
        self.tensors: Mapping[str, LazyTensor] = {renamed.get(key, key): tensor for key, tensor in stock.items()}
        self.keymap = map_keys(skeleton, self.tensors)
        self._skeleton = skeleton
        self._quantised = {key: found for key, tensor in self.tensors.items() if (found := _quantised(tensor)) is not None}
        self.keymap = replace(self.keymap, unread=tuple(key for key in self.keymap.unread if not self._is_no_bias(key)))

    def source(self, path: str, kind: str) -> WeightSource:
        return self.packed.get(path) or self._stock_source(path, kind)

    def _stock_source(self, path: str, kind: str) -> CheckpointSource:
        if kind == "experts":
            layout = read_layout(self._skeleton.get_submodule(path))
            return _experts_source(path, layout, self.keymap.under(path), self.tensors, self._skeleton)
        assert kind == "linear", f"operators of kind {kind} take no weights"
        return _linear_source(path, self.keymap, self.tensors, self._skeleton)

    def _is_no_bias(self, key: str) -> bool:
        """Whether a key is a bias of zeros beside quantised weights, which AutoGPTQ writes for layers without a bias."""
        module, _, name = key.rpartition(".")
        return name == "bias" and f"{module}.weight" in self._quantised and not self.tensors[key][...].any()

    def stored_types(self, path: str) -> StoredTypes | None:
        if not self._quantised:
            return None
        kind = "linear" if isinstance(self._skeleton.get_submodule(path), nn.Linear) else "experts"
        return self._stock_source(path, kind).stored_types()

    def log_conversions(self, weight_types: Mapping[str, WeightTypes], dtype: torch.dtype) -> None:
        """Log the formats of quantised weights that are converted; floating-point types are converted only where the user sets a dtype."""
        converted = dict(self._quantised)
        for path, of_module in weight_types.items():
            for parameter, target in self.keymap.under(path).items():
                weight_type = of_module.down if parameter.startswith("down") else of_module.gate_up
                for key in target.all_keys:
                    if key in converted and weight_type in converted[key].lossless_types:
                        del converted[key]
        if converted:
            formats = ", ".join(sorted({quantised.format for quantised in converted.values()}))
            logger.warning(
                "%s: %d weights in %s, the first of them %s, are converted through float32: those of replaced modules to the rule's "
                "weight type, all others to %s",
                next(iter(self.tensors.values())).file.parent,
                len(converted),
                formats,
                next(iter(converted)),
                str(dtype).removeprefix("torch."),
            )


class ModuleSource(WeightSource):
    """A `WeightSource` over an experts module or a linear layer in memory; pieces are views, on the CPU."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path = path
        self._layout = None if isinstance(module, nn.Linear) else read_layout(module)
        parts: Sequence[Part] = ("weight", "bias") if self._layout is None else self._layout.parts()
        found = {part: getattr(module, self._name(part)) for part in parts}
        self._parameters: dict[Part, torch.Tensor] = {part: each.detach() for part, each in found.items() if each is not None}

    def _name(self, part: Part) -> str:
        return part if self._layout is None else self._layout.parameter(part)

    @property
    def dtype(self) -> torch.dtype:
        return widest(parameter.dtype for part, parameter in self._parameters.items() if not part.endswith("bias"))

    def parts(self) -> Sequence[Part]:
        return tuple(self._parameters)

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        stored = self._parameters[part]
        return (stored if self._layout is None else self._layout.cut(part, stored[expert])).to("cpu")

    def origin(self, part: Part, expert: int = 0) -> str:
        return f"{self._path}.{self._name(part)}" + ("" if self._layout is None else f"[{expert}]")


def refuse_meta(path: str, module: nn.Module) -> None:
    """
    Raises:
        UnsupportedModelError: the module's weights are not in memory.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        raise UnsupportedModelError(
            f"{path}: its weights are not in memory (on meta, or offloaded by accelerate); pass the model's folder or hub id instead, "
            "or the whole model on meta with checkpoint=FOLDER"
        )
