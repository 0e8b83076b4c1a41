"""Helpers that tests of several folders share."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]  # of the repository


def import_benchmark(name: str) -> ModuleType:
    """Import a script of `benchmarks/`, where scripts import each other by their bare names."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
