"""The mapping from checkpoint keys to parameters, by transformers' own renaming and conversion tables.

Only this module and `sources` use transformers' loading internals (`core_model_loading`, `conversion_mapping`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from moegraft.operators.decode.mtp_layers import REPEATED, body_layers, is_declared_mtp_key, mtp_key, mtp_layers
from moegraft.operators.layout import read_layout, why_unsupported
from moegraft.operators.structure import MTP, is_experts


@dataclass(slots=True)
class Target:
    """One parameter and the stored keys that it is read from.

    Attributes:
        keys: by source pattern, in the natural order in which transformers stacks them; the pattern is "" for a key that is not
            converted.
        converter: transformers' conversion of the keys; None for a key that is not converted.
    """

    name: str
    keys: dict[str, list[str]] = field(default_factory=dict)
    converter: WeightConverter | None = None

    @property
    def all_keys(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The stored keys of every parameter.

    Attributes:
        targets: by the parameter's name.
        unread: keys of no parameter, except those that the family declares, and those of MTP layers that are not used.
        missing: parameters without keys, except tied ones and those that the family may leave out.
    """

    targets: Mapping[str, Target]
    unread: tuple[str, ...]
    missing: tuple[str, ...]

    def under(self, module: str) -> dict[str, Target]:
        """Return the targets of one module's parameters, by parameter name."""
        prefix = f"{module}."
        return {name[len(prefix) :]: target for name, target in self.targets.items() if name.startswith(prefix)}


def map_keys(skeleton: PreTrainedModel, keys: Iterable[str]) -> KeyMap:
    """Map stored keys to the parameters and buffers of `skeleton`, the stock model on meta."""
    transforms = [*get_model_conversion_mapping(skeleton), *_conversions_of_mtp_layers(skeleton)]
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converters += _conversions_of_each_expert(skeleton, converters)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = skeleton.state_dict()
    prefix = skeleton.base_model_prefix
    targets: dict[str, Target] = {}
    unread = []
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            unread.append(key)
            continue
        target = targets.setdefault(name, Target(name))
        target.keys.setdefault(pattern or "", []).append(key)
        if pattern is not None:
            target.converter = by_pattern[pattern]
    for target in list(targets.values()):  # transformers renames the keys of a converter to the first of its results only
        if target.converter is not None:
            first, *others = target.converter.target_patterns
            for other in others:
                name = target.name.replace(first, other)
                targets.setdefault(name, Target(name, target.keys, target.converter))
    unread = [key for key in unread if not _ignored(skeleton._keys_to_ignore_on_load_unexpected, key)]
    if mtp_layers(skeleton) is None:
        unread = [key for key in unread if not is_declared_mtp_key(key, skeleton.config)]
    else:  # files repeat the embedding or head
        unread = [key for key in unread if not (key.startswith(f"{MTP}.") and key.endswith(REPEATED))]
    return KeyMap(targets, tuple(unread), tuple(missing_names(skeleton, targets)))


def _conversions_of_mtp_layers(skeleton: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions of a language model in a larger one for its MTP layers: transformers applies them to that model alone."""
    layers = mtp_layers(skeleton)
    if layers is None or layers.config.model_type == skeleton.config.model_type:
        return []
    conversions: list[WeightTransform] = get_checkpoint_conversion_mapping(layers.config.model_type) or []
    for transform in conversions:
        transform.scope_prefix, transform.base_model_prefix = MTP, skeleton.base_model_prefix
    return conversions


def _conversions_of_each_expert(skeleton: PreTrainedModel, converters: Sequence[WeightConverter]) -> list[WeightConverter]:
    """Return the conversions of experts that are stored one by one, as quantisers store those of every family, where transformers has none.

    Llama 4's are stored together in the model's own order otherwise.
    """
    experts = next((module for path, module in skeleton.named_modules() if is_experts(path, module)), None)
    if experts is None or why_unsupported(experts) is not None or (layout := read_layout(experts)).interleaved or layout.bias:
        return []
    known = [pattern.replace("\\", "") for converter in converters for pattern in converter.target_patterns]
    if any(f"experts.{name}" in pattern for pattern in known for name in layout.matrices):
        return []
    in_order = [Transpose(1, 2)] if layout.transposed else []
    gate_up = [f"experts.*.{part}_proj.weight" for part in (("gate", "up") if layout.gated else ("up",))]
    join = [Concatenate(1)] if layout.gated else []
    return [
        WeightConverter(gate_up, f"experts.{layout.parameter('up')}", [MergeModulelist(0), *join, *in_order]),
        WeightConverter("experts.*.down_proj.weight", "experts.down_proj", [MergeModulelist(0), *in_order]),
    ]


def mtp_names(skeleton: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Return the names under which the tensors of MTP layers are mapped to a model that has these: transformers renames them first."""
    if mtp_layers(skeleton) is None:
        return {}
    first = body_layers(skeleton.config)
    renamings: list[WeightRenaming] = get_checkpoint_conversion_mapping("MtpModel") or []
    names = {key: name for key in keys if (name := mtp_key(key, first)) is not None}
    return {key: f"{MTP}.{rename_source_key(name.removeprefix(f'{MTP}.'), renamings, [])[0]}" for key, name in names.items()}


def _ignored(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def missing_names(skeleton: PreTrainedModel, targets: Collection[str]) -> list[str]:
    """Return the parameters and buffers that are not in `targets`, except tied ones and those that the family may leave out."""
    tied = skeleton.all_tied_weights_keys
    lacking = [
        name for name in skeleton.state_dict() if name not in targets and not _ignored(skeleton._keys_to_ignore_on_load_missing, name)
    ]
    # Of two tied parameters either one may be stored: transformers copies it to the other.
    return [name for name in lacking if tied.get(name) not in targets and not any(tied.get(t) == name for t in targets)]
