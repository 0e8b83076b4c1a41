"""Measurements kept in the user's cache folder, good for the machine and the versions that they were made with."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moegraft.injection.predict.gpu import GpuRates
from moegraft.injection.predict.measure import Measurements, Rate
from moegraft.operators.experts.self_test import kernel_isa, kernel_threads
from moegraft.operators.machine import probe_machine


def measurements_path() -> Path:
    """`$XDG_CACHE_HOME/moegraft/measurements.json`, by default in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moegraft" / "measurements.json"


def save(measured: Measurements) -> Path:
    """
    Raises:
        OSError: the cache folder cannot be written.
    """
    path = measurements_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"made_with": _made_with(), "measured": asdict(measured)}, indent=1), encoding="utf-8")
    return path


def load() -> Measurements | None:
    """What was measured on this machine with these versions; None where nothing was, or nothing that can be read."""
    try:
        data = json.loads(measurements_path().read_text(encoding="utf-8"))
        if data["made_with"] != _made_with():
            return None
        return _measurements(data["measured"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _measurements(data: dict[str, Any]) -> Measurements:
    rates = {kind: {name: Rate(**rate) for name, rate in data[kind].items()} for kind in ("experts", "linear")}
    gpu = data.get("gpu")
    return Measurements(**{**data, **rates, "gpu": None if gpu is None else GpuRates(**gpu)})


def _made_with() -> dict[str, Any]:
    """What rates depend on."""
    names = ("moegraft", "torch", "transformers")
    gpus = [gpu.name for gpu in probe_machine().gpus]
    found: dict[str, Any] = {"cpu": _cpu(), "threads": kernel_threads(), "isa": kernel_isa(), "gpus": gpus}
    return {**found, **{name: version(name) for name in names}}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
