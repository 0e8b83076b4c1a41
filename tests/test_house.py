"""The layout of the project holds: imports point down only, and importing does no work."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

# What each part may import of ours, the more specific part first.
ROOT_PARTS = {"operators", "operators/context", "cpu_backend"}
MAY_IMPORT = {
    "operators/experts": {"operators/experts", "operators/offload", "operators/sparse", "operators/kernels", *ROOT_PARTS},
    "operators/offload": {"operators/offload", "operators/sparse", "operators/kernels", *ROOT_PARTS},
    "operators/sparse": {"operators/sparse", "operators/kernels", *ROOT_PARTS},
    "operators/kernels": {"operators/kernels", *ROOT_PARTS},
    "operators/cpu_ops": {"operators/cpu_ops", *ROOT_PARTS},
    "operators/linear": {"operators/kernels", *ROOT_PARTS},
    "operators/speculative": {"operators/speculative", *ROOT_PARTS},
    "operators/kv_cache": ROOT_PARTS,
    # The one object a model whose members its operators share; each is imported when an operator first asks for it.
    "operators/context": {"operators/offload", "operators/sparse", "operators/kernels", *ROOT_PARTS},
    "operators": {"operators", "operators/context", "cpu_backend"},
    "cpu_backend": {"cpu_backend"},
    "rules": {"rules"},
    # Rule files know the interface of operators, and programs what `model.moegraft` offers.
    "injection/rules": {"injection/rules", "operators", "rules"},
    # What is particular to an operator is asked of the `Operator` interface.
    "injection": {"injection", "injection/rules", "operators", "operators/context", "rules"},
}


def part_of(path: str) -> str:
    return next(part for part in MAY_IMPORT if path == part or path.startswith((f"{part}/", f"{part}.py")))


def imported_modules(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.append(node.module or "")
    return [name for name in found if name.split(".")[0] == "moegraft"]


# What injection may know of operators: their interface, and what several of them share. No particular operator, engine or draft.
INTERFACE = {
    "activations",
    "atomic_file",
    "base",
    "block_encoding",
    "cache_form",
    "context",
    "draft",
    "errors",
    "estimates",
    "expert_group",
    "experts_layer",
    "layout",
    "machine",
    "paged_cache",
    "reference",
    "registry",
    "routing_trace",
    "self_test",
    "sparsity",
    "structure",
    "thresholds",
    "timeline",
    "weight_formats",
    "weights",
}
SOURCES = sorted(path for folder in ("injection", "operators", "cpu_backend", "rules") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_down(file: Path) -> None:
    own = part_of(file.relative_to(ROOT).as_posix())
    for module in imported_modules(file):
        other = part_of("/".join(module.split(".")[1:]))
        assert other in MAY_IMPORT[own], f"{file}: {own} must not import {module}"


@pytest.mark.parametrize("file", sorted((ROOT / "injection").rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_injection_knows_no_particular_operator(file: Path) -> None:
    prefix = "moegraft.operators."
    imported = {name.removeprefix(prefix) for name in imported_modules(file) if name.startswith(prefix)}
    assert imported <= INTERFACE, f"{file}: {', '.join(sorted(imported - INTERFACE))}: ask it of the `Operator` interface"


def test_there_is_no_root_package() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "moegraft").exists()


def test_importing_starts_nothing() -> None:
    """No thread and no output; and what prints help needs no torch."""
    code = (
        "import moegraft.injection.cli.local_chat, sys, threading;"
        "assert threading.active_count() == 1; assert 'torch' not in sys.modules, 'torch';"
        "import moegraft.operators.registry, moegraft.cpu_backend; assert threading.active_count() == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_machine_without_triton_runs_everything_on_the_cpu() -> None:
    """Triton is an extra: nothing that a CPU needs may import it."""
    code = (
        "import sys; sys.modules['triton'] = None;"
        "from moegraft.operators.registry import load_registry; load_registry();"
        "import moegraft.operators.offload.model_experts, moegraft.injection.cli.models"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_shipped_file_keeps_the_machine_out() -> None:
    for file in [*SOURCES, *ROOT.glob("[!.]*.*"), *(ROOT / "rules").glob("*.yaml")]:
        if file.is_file():
            assert "/work/" not in file.read_text(encoding="utf-8"), file


def test_the_reading_paths_are_short_and_there() -> None:
    """From the README to the experts on the CPU in at most 8 files, and on a GPU in at most 14."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"^\| (\d+) \| `([^`]+)` \|", text, re.MULTILINE)
    turn = next(place for place, (number, _) in enumerate(paths) if place and int(number) <= int(paths[place - 1][0]))
    on_cpu, on_gpu = paths[:turn], paths[turn:]
    assert len(on_cpu) <= 8 and int(on_gpu[-1][0]) <= 14
    assert all((ROOT / path).is_file() for _, path in paths)
