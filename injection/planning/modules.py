"""A model's modules as rules see them: path, class names, kinds and layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from re import compile as compile_regex

from torch import nn

from moegraft.injection.rulefile import Match
from moegraft.injection.rulefile.layers import layer_of
from moegraft.operators.base import Kind
from moegraft.operators.structure import kinds


class ModelModules:
    """Every module of a model by path, outer modules before what they hold; the model's own path is empty."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_path = dict(model.named_modules())
        self._kinds: dict[str, frozenset[Kind]] = {}
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
        """The paths that `match` takes when no other rule is before it."""
        takes = self.test(match)
        return [path for path in self if takes(path)]

    def test(self, match: Match) -> Callable[[str], bool]:
        """A test of paths. The model itself has no name and no layer: only its kind and its class can match it."""
        tests: list[Callable[[str], bool]] = []
        if match.layers is not None:
            layers = match.layers
            tests.append(lambda path: self.layer(path) in layers)
        if match.name is not None:
            search = compile_regex(match.name).search
            tests.append(lambda path: bool(path) and search(path) is not None)
        if match.class_name is not None:
            class_name = match.class_name
            tests.append(lambda path: has_class(type(self._by_path[path]), class_name))
        if match.kind is not None:
            kind = match.kind
            tests.append(lambda path: kind in self.kinds(path))
        return lambda path: all(test(path) for test in tests)


@lru_cache(maxsize=4096)
def has_class(cls: type[nn.Module], name: str) -> bool:
    """Whether `cls` or a base of it is called `name`. A dotted name need not be the full one: torch.nn.Linear is
    torch.nn.modules.linear.Linear. Nothing is imported to compare them."""
    package, _, bare = name.rpartition(".")
    return any(base.__name__ == bare and _is_in(base.__module__, package) for base in cls.__mro__)


def _is_in(module: str, package: str) -> bool:
    return not package or module == package or module.startswith(f"{package}.")
