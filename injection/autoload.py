"""Registers moegraft in transformers as soon as transformers has been imported, without importing it, or torch, before.

Importing `moegraft.injection` calls `register`. Where `moegraft doctor --autoload on` was run, importing torch does so too, by its entry
points for backends (`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns these off), so that programs load folders that name moegraft unchanged.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

NEEDED = "transformers.modeling_utils"  # with it, transformers' registers can be imported
MARKER = Path(sys.prefix) / "etc" / "moegraft" / "autoload"  # of this environment; present: on


def register() -> None:
    """Register the quantisation method and the implementation of experts, now or right after transformers is imported; once."""
    if NEEDED in sys.modules:
        import moegraft.injection.in_transformers  # noqa: F401 # the import registers
    elif not any(isinstance(finder, _AfterTransformers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTransformers())


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
    return any(each.value.startswith(f"{__name__}:") for each in entry_points(group="torch.backends"))


def on_torch_import() -> None:
    """Register at the import of torch where this environment asks for it. Never raises: a program that uses torch must start."""
    try:
        if MARKER.exists():
            register()
    except Exception:  # noqa: BLE001
        return


class _AfterTransformers(MetaPathFinder):
    """Lets the import of `NEEDED` register moegraft at its end."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != NEEDED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign] # of this loader, which loads one module
        return spec
