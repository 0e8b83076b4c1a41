"""The layout of the project holds: imports point down only, and importing does no work."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.programs import Program

# What each part may import of ours, the more specific part first.
ROOT_PARTS = {"operators", "operators/context", "cpu_backend"}
MAY_IMPORT = {
    "operators/experts": {"operators/experts", "operators/offload", "operators/kernels", *ROOT_PARTS},
    "operators/offload": {"operators/offload", "operators/kernels", *ROOT_PARTS},
    "operators/kernels": {"operators/kernels", *ROOT_PARTS},
    "operators/cpu_ops": {"operators/cpu_ops", "operators/decode", "operators/linear", "operators/kernels", *ROOT_PARTS},
    "operators/linear": {"operators/kernels", *ROOT_PARTS},
    "operators/decode": {"operators/decode", "operators/offload", *ROOT_PARTS},
    "operators/speculative": {"operators/eagle3", "operators/decode", "operators/linear", *ROOT_PARTS},
    "operators/eagle3": {"operators/linear", *ROOT_PARTS},
    "operators/kv_cache": {"operators/decode", *ROOT_PARTS},
    # The one object a model whose members its operators share; each is imported when an operator first asks for it.
    "operators/context": {"operators/decode", "operators/offload", "operators/kernels", *ROOT_PARTS},
    "operators": {"operators", "operators/context", "cpu_backend"},
    "cpu_backend": {"cpu_backend"},
    "rules": {"rules"},
    # Rule files know the interface of operators, and programs what `model.moegraft` offers.
    "injection/rules": {"injection/rules", "operators", "rules"},
    # What is particular to an operator is asked of the `Operator` interface.
    "injection": {"injection", "injection/rules", "operators", "operators/context", "operators/decode", "rules"},
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


# What injection may know of operators: their interface, what several of them share, and decoding. No particular operator, engine or draft.
INTERFACE = {
    "atomic_file",
    "autoload",
    "base",
    "block_encoding",
    "cache_form",
    "context",
    "cpu",
    "decode.cache",
    "decode.cuda_graph",
    "decode.draft_costs",
    "decode.loop",
    "decode.mtp",
    "decode.mtp_layers",
    "decode.native.record",
    "decode.native.steps",
    "decode.pages",
    "decode.sampling",
    "decode.replay",
    "decode.state_pool",
    "decode.states",
    "draft",
    "errors",
    "expert_group",
    "layout",
    "machine",
    "reference",
    "registry",
    "router_maps",
    "routing",
    "routing_trace",
    "schedule",
    "sparsity",
    "structure",
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


def test_every_shipped_file_keeps_the_machine_out() -> None:
    for file in [*SOURCES, *ROOT.glob("[!.]*.*"), *(ROOT / "rules").glob("*.yaml")]:
        if file.is_file():
            assert "/work/" not in file.read_text(encoding="utf-8"), file


def documented_walks() -> list[list[str]]:
    """Return the files of each table in CONTRIBUTING.md whose rows are numbered: of rules, of experts on the CPU and on a GPU."""
    walks: list[list[str]] = []
    last = 0
    for number, path in re.findall(r"^\| (\d+) \| `([^`]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE):
        if int(number) <= last or not walks:
            walks.append([])
        walks[-1].append(path)
        last = int(number)
    return walks


def statements(file: Path) -> dict[int, int]:
    """Return the number of statements of each function by the line that it begins in, without nested functions and docstrings."""

    def count(node: ast.AST) -> int:
        inner = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.FunctionDef | ast.ClassDef)]
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return (isinstance(node, ast.stmt) and not text) + sum(map(count, inner))

    functions = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)]
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): count(node) - 1 for node in functions}


# What is passed on the way from a rule to the swapped module and changes nothing, as CONTRIBUTING.md has it.
PASSED = (
    *("injection/rules/rule.py", "injection/rules/document.py", "injection/rules/patterns.py", "injection/progress.py"),
    *("injection/parallel.py", "injection/meta_model.py", "injection/calibration.py", "injection/checkpoint/sources.py"),
)
TRACED = """
import sys
from pathlib import Path

import support.emulated
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from moegraft.injection import optimize_and_load
from moegraft.operators.registry import load_registry

config = Qwen3MoeConfig(
    vocab_size=96, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_experts=8, num_experts_per_tok=2, dtype=torch.float32,
)
model, registry, functions = Qwen3MoeForCausalLM(config).eval(), load_registry(), {}

def record(frame, event, argument):
    if event == "call" and not frame.f_code.co_name.startswith("<"):
        functions.setdefault((frame.f_code.co_filename, frame.f_code.co_firstlineno))

sys.setprofile(record)
model = optimize_and_load(model, sys.argv[1], registry=registry, progress=False)
with torch.inference_mode():
    model(torch.arange(3)[None])
sys.setprofile(None)
ours = set(sys.argv[2:])
for file, line in functions:
    if str(Path(file).resolve()) in ours:
        print(Path(file).resolve(), line)
"""


def traced(rules: Path) -> list[tuple[str, int]]:
    """Return the functions of ours that loading a small model and its first forward pass call, by file and line, in order."""
    program = Program(["-c", TRACED, str(rules), *map(str, SOURCES)], os.environ)
    output, errors = program.communicate()
    assert program.returncode == 0, errors
    calls = [line.rpartition(" ") for line in output.splitlines()]
    return [(Path(file).relative_to(ROOT).as_posix(), int(line)) for file, _, line in calls]


def test_the_walk_from_a_rule_to_the_swapped_module_is_the_real_one(tmp_path: Path) -> None:
    """In at most 10 files with 5 returns. A function is read at its first call; one of at most two statements where it is called."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "version: 1\nvars: {weights: int8}\nrules:\n- id: experts\n  match: {kind: experts, layers: '0-1', name: mlp}\n"
        "  replace: {class: hybrid_experts, kwargs: {weights: '${weights}'}}\n  expect: 2\n"
    )
    documented = documented_walks()[0]
    sizes = {path.relative_to(ROOT).as_posix(): statements(path) for path in SOURCES}
    visits: list[str] = []
    for file, line in traced(rules):
        of_injection = file.startswith("injection/") and file not in PASSED
        if (of_injection or file in documented) and sizes[file][line] > 2 and visits[-1:] != [file]:
            visits.append(file)
    walk = list(dict.fromkeys(visits))
    assert walk == documented and len(walk) <= 10
    assert len(visits) - len(walk) <= 5, f"returns to earlier files: {visits}"


def test_the_paths_to_the_experts_are_short_and_real(tmp_path: Path) -> None:
    """From the README to the experts on the CPU in at most 8 files, and on a GPU in at most 14."""
    rules = tmp_path / "rules.yaml"
    for text, path in zip(("{}", "{gpu: emulated, cache: {slots: 3}, schedule: on_demand}"), documented_walks()[1:], strict=True):
        rules.write_text(f"- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {text}}}\n")
        called = {file for file, _ in traced(rules)}
        # What has no function of Python that the emulated device calls.
        others = {file for file in path if file.endswith((".md", ".cpp")) or file.startswith("operators/kernels/")}
        assert set(path) - others <= called and all((ROOT / file).is_file() for file in others)
    assert len(documented_walks()[1]) <= 8 and len(documented_walks()[2]) <= 14 - 6
