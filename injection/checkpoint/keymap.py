"""Which checkpoint keys feed which parameter, by transformers' own renaming and conversion tables.

This is the one place that touches transformers' loading internals (`core_model_loading`, `conversion_mapping`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


@dataclass(slots=True)
class Target:
    """One parameter and the stored keys it is made of.

    Attributes:
        keys: by source pattern, in the natural order in which transformers stacks them; the pattern is "" where a key is
            taken as it is.
        converter: what makes the parameter out of the keys; None where a key is taken as it is.
    """

    name: str
    keys: dict[str, list[str]] = field(default_factory=dict)
    converter: WeightConverter | None = None

    @property
    def all_keys(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]


@dataclass(frozen=True, slots=True)
class KeyMap:
    """Every parameter that the checkpoint feeds, and the keys that feed none."""

    targets: Mapping[str, Target]
    unread: tuple[str, ...]
    missing: tuple[str, ...]  # parameters that nothing feeds, ties and those the family may leave out excepted

    def under(self, module: str) -> dict[str, Target]:
        """The targets of one module's own parameters, by parameter name."""
        prefix = f"{module}."
        return {name[len(prefix) :]: target for name, target in self.targets.items() if name.startswith(prefix)}


def map_keys(skeleton: PreTrainedModel, keys: Iterable[str]) -> KeyMap:
    """Maps stored keys to the parameters and buffers of `skeleton`, the stock model on meta."""
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
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
    _add_siblings(targets)
    return KeyMap(targets, tuple(_worth_telling(skeleton, unread)), tuple(missing_names(skeleton, targets)))


def _add_siblings(targets: dict[str, Target]) -> None:
    """A converter with several results feeds them all; transformers renames its keys to the first only."""
    for target in list(targets.values()):
        if target.converter is None:
            continue
        first, *others = target.converter.target_patterns
        for other in others:
            name = target.name.replace(first, other)
            targets.setdefault(name, Target(name, target.keys, target.converter))


def _ignored(patterns: Iterable[str] | None, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _worth_telling(skeleton: PreTrainedModel, unread: list[str]) -> list[str]:
    return [key for key in unread if not _ignored(skeleton._keys_to_ignore_on_load_unexpected, key)]


def missing_names(skeleton: PreTrainedModel, targets: Collection[str]) -> list[str]:
    """The parameters and buffers that are not among `targets`, ties and those the family may leave out excepted."""
    tied = skeleton.all_tied_weights_keys
    lacking = [
        name for name in skeleton.state_dict() if name not in targets and not _ignored(skeleton._keys_to_ignore_on_load_missing, name)
    ]
    # A tie is met from either end: transformers copies the one that is stored to the other.
    return [name for name in lacking if tied.get(name) not in targets and not any(tied.get(t) == name for t in targets)]
