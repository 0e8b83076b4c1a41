"""A model's modules as rules see them: path, class names, kinds and layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

from torch import nn

from moegraft.injection.rulefile import Match
from moegraft.injection.rulefile.layers import layer_of
from moegraft.operators.base import Kind
from moegraft.operators.structure import kinds


class ModelModules:
    """Every module of a model by path, outer modules before what they hold; the model's own path is empty."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_path: dict[str, nn.Module] = dict(model.named_modules())
        self._kinds: dict[str, frozenset[Kind]] = {}
        self._by_kind: dict[Kind, frozenset[str]] = {}
        self._layers: dict[str, int | None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __getitem__(self, path: str) -> nn.Module:
        return self._by_path[path]

    @property
    def model_class(self) -> str:
        return type(self._model).__name__

    def kinds(self, path: str) -> frozenset[Kind]:
        found = self._kinds.get(path)
        if found is None:
            found = self._kinds[path] = kinds(path, self._by_path[path], self._model)
        return found

    def layer(self, path: str) -> int | None:
        if path not in self._layers:
            self._layers[path] = layer_of(path)
        return self._layers[path]

    def matching(self, match: Match) -> list[str]:
        """The paths that `match` takes when no other rule is before it, in the model's order.

        The model itself has no name and no layer: only its kind and its class can match it.
        """
        paths: Iterable[str] = self._by_path
        if match.layers is not None:
            layers = match.layers
            paths = [path for path in paths if self.layer(path) in layers]
        if match.name is not None:
            search = re.compile(match.name).search
            paths = [path for path in paths if path and search(path)]
        if match.class_name is not None:
            fitting = {cls for cls in set(map(type, self._by_path.values())) if has_class(cls, match.class_name)}
            paths = [path for path in paths if type(self._by_path[path]) in fitting]
        if match.kind is not None:
            of_kind = self._of_kind(match.kind)
            paths = [path for path in paths if path in of_kind]
        return list(paths)

    def _of_kind(self, kind: Kind) -> frozenset[str]:
        found = self._by_kind.get(kind)
        if found is None:
            found = self._by_kind[kind] = frozenset(path for path in self if kind in self.kinds(path))
        return found

    @cached_property
    def words(self) -> list[str]:
        """Every name that is a part of a path."""
        return sorted({part for path in self for part in path.split(".") if part and not part.isdecimal()})

    @cached_property
    def forms(self) -> dict[str, list[str]]:
        """Paths by what they are when every number in them is 0."""
        found: dict[str, list[str]] = {}
        for path in self:
            found.setdefault(re.sub(r"\d+", "0", path), []).append(path)
        return found


def has_class(cls: type, name: str) -> bool:
    """Whether `cls` or a base of it is called `name`. A dotted name need not be the full one: torch.nn.Linear is
    torch.nn.modules.linear.Linear. Nothing is imported to compare them."""
    package, _, bare = name.rpartition(".")
    return any(base.__name__ == bare and _is_in(base.__module__, package) for base in cls.__mro__)


def _is_in(module: str, package: str) -> bool:
    return not package or module == package or module.startswith(f"{package}.")
