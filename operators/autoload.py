"""Registers moegraft in transformers as soon as its registers have been imported, without importing them, or torch, before.

Importing `moegraft.injection` calls `register`. Where `moegraft doctor --autoload on` was run, importing torch does so too, by its entry
points for backends (`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns these off), so that programs load folders that name moegraft unchanged. That is
why this module is not a part of `moegraft.injection`: torch imports it in every program of an environment.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

METHOD = "moegraft"  # the quantisation method, and the implementation of stock experts
# The modules with transformers' registers, and ours that register themselves there when they are imported.
REGISTERS = {
    "transformers.quantizers.auto": "moegraft.injection.in_transformers",
    "transformers.integrations.moe": "moegraft.injection.stock_experts",
}
MARKER = Path(sys.prefix) / "etc" / "moegraft" / "autoload"  # of this environment; present: on


def register() -> None:
    """Register the quantisation method and the implementation of experts, now or as soon as transformers has the registers; once."""
    for theirs, ours in REGISTERS.items():
        if _is_imported(theirs):
            import_module(ours)
        elif not any(isinstance(finder, _After) and finder.module == theirs for finder in sys.meta_path):
            sys.meta_path.insert(0, _After(theirs, ours))


def _is_imported(name: str) -> bool:
    """Whether a module has been imported to its end."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def switch(*, on: bool) -> None:
    """Let importing torch register moegraft in this environment from now on, or not.

    Raises:
        OSError: the environment cannot be written.
    """
    if on:
        MARKER.parent.mkdir(parents=True, exist_ok=True)
        MARKER.touch()
    else:
        MARKER.unlink(missing_ok=True)


def is_installed() -> bool:
    """Whether torch finds this module by its entry points; not where moegraft runs from a checkout that is not installed."""
    from importlib.metadata import entry_points  # takes longer than the rest of this module, which every import of torch waits for

    return any(each.value.startswith(f"{__name__}:") for each in entry_points(group="torch.backends"))


def on_torch_import() -> None:
    """Register at the import of torch where this environment asks for it. Never raises: a program that uses torch must start."""
    try:
        if MARKER.exists():
            register()
    except Exception:  # noqa: BLE001
        return


class _After(MetaPathFinder):
    """Imports `then` at the end of the first import of `module`; if that has begun already, with the first import after it."""

    def __init__(self, module: str, then: str) -> None:
        self.module = module
        self._then = then

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.module:
            if _is_imported(self.module):
                sys.meta_path.remove(self)
                import_module(self._then)
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_import(module: ModuleType) -> None:
            execute(module)
            import_module(self._then)

        spec.loader.exec_module = execute_and_import  # type: ignore[method-assign] # of this loader, which loads one module
        return spec
