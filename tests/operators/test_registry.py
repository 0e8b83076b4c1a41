"""The registry: built-in operators, operators of other packages, and mistakes of such packages."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.registry import OperatorRegistry, load_registry

PACKAGE = """
from moegraft.operators.experts.hybrid import HybridExperts

class Taken(HybridExperts):
    pass

class NoOperator:
    name = "nothing"
"""


def install(folder: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package like pip: a module, and metadata with an entry point."""
    (folder / "outside_package.py").write_text(PACKAGE)
    info = folder / "outside_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[moegraft.operators]\noutside = outside_package:{target}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "outside_package", raising=False)


def test_built_in_operators_are_registered() -> None:
    registry = load_registry()
    assert {"hybrid_experts", "quantized_linear"} <= set(registry)
    assert registry["hybrid_experts"] is HybridExperts


@pytest.mark.parametrize(
    ("target", "message"), [("Taken", "two operators are named 'hybrid_experts'"), ("NoOperator", "is not an operator")]
)
def test_mistakes_of_packages_are_named(target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, target, monkeypatch)
    with pytest.raises(ValueError, match=message) as caught:
        load_registry()
    assert "outside_package" in str(caught.value)


def test_options_must_be_a_frozen_dataclass() -> None:
    @dataclass
    class Loose:
        size: int = 1

    class Operator(HybridExperts):
        name = "loose"
        options_type = Loose

    with pytest.raises(ValueError, match="frozen dataclass"):
        OperatorRegistry([Operator])
