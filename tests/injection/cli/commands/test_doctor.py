"""`moegraft doctor`: the facts are those of this machine, each problem comes with its fix, and rates are kept and go stale."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from support import ROOT
from typer.testing import Result

from moegraft.injection.cli.commands import doctor as doctor_module
from moegraft.injection.cli.commands.doctor import Facts, Package, _rows, find_problems, gather, package
from moegraft.injection.estimate import measure as store
from moegraft.injection.estimate.measure import Measurements
from moegraft.operators import cpu
from moegraft.operators.base import Rate
from moegraft.operators.cpu import LIMITS, InstructionSet
from moegraft.operators.machine import Gpu

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
GIB = 1 << 30
RIGHT = dict.fromkeys(LIMITS, 0.0)


@pytest.fixture(scope="module")
def healthy() -> Facts:
    """A machine with nothing to complain of but that it has no GPU."""
    return Facts(
        python="CPython 3.11.7",
        platform="Linux",
        packages=(Package("torch", "2.13.0", ">=2.11", True),),
        cuda=None,
        compiler="g++ 13",
        cpu="a CPU",
        cpu_flags=frozenset({"avx2", "fma", "f16c"}),
        instruction_sets=(InstructionSet("scalar", True, RIGHT), InstructionSet("avx2", True, RIGHT)),
        isa="avx2",
        matrix_tokens={},
        default_isa="avx2",
        forced_isa=None,
        cores=8,
        quota_cores=None,
        kernel_threads=8,
        torch_threads=8,
        omp_num_threads=None,
        numa_nodes=1,
        kernel_nodes=1,
        forced_nodes=None,
        total_bytes=64 * GIB,
        available_bytes=50 * GIB,
        memory_limit_bytes=None,
        swap_bytes=0,
        pinned_limit_bytes=None,
        gpu_device=False,
        gpus=(),
    )


AVX512 = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
AMX_SETS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
AMX_REFUSED = tuple(InstructionSet(name, name != "amx", RIGHT if name != "amx" else {}) for name in AMX_SETS)
AMX_MACHINE: dict[str, Any] = {
    "cpu_flags": AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
    "instruction_sets": tuple(InstructionSet(name, True, RIGHT) for name in AMX_SETS),
    "isa": "amx",
    "default_isa": "amx",
    "matrix_tokens": {"bfloat16": 2, "int4": 12},
}
NEON = (InstructionSet("scalar", True, RIGHT), InstructionSet("neon", True, RIGHT))
GPU = (Gpu("a GPU", 24 * GIB, 20 * GIB),)


@pytest.mark.parametrize(
    ("changes", "severity", "what", "fix"),
    [
        ({"packages": (Package("torch", "2.1", ">=2.11", False),)}, "error", "torch 2.1 is installed", "pip install 'torch>=2.11'"),
        ({"packages": (Package("torch", None, ">=2.11", False),)}, "error", "torch is not installed", "pip install 'torch>=2.11'"),
        (
            {"instruction_sets": (InstructionSet("avx2", True, {"int8": 0.5}),)},
            "error",
            "wrong results with int8 weights",
            "ISA=scalar",
        ),
        ({"instruction_sets": (InstructionSet("avx2", True, {"int8": float("nan")}),)}, "error", "int8", "report"),
        (
            {"cpu_flags": AVX512},
            "warning",
            "has avx512",
            "g++ 12",
        ),
        (
            {"cpu_flags": frozenset({"asimd", "asimddp"}), "instruction_sets": NEON},
            "warning",
            "has neon_dotprod",
            "g++ 12",
        ),
        ({"isa": "scalar", "forced_isa": "scalar"}, "warning", "MOEGRAFT_ISA forces the kernel to run as scalar", "unset MOEGRAFT_ISA"),
        ({**AMX_MACHINE, "instruction_sets": AMX_REFUSED}, "warning", "does not allow this process to use it", "Linux 5.16"),
        ({"torch_threads": 1, "omp_num_threads": "1"}, "warning", "1 of 8 cores", "OMP_NUM_THREADS=8"),
        ({"numa_nodes": 2}, "warning", "2 NUMA nodes", "numactl --interleave=all"),
        ({"numa_nodes": 2, "kernel_nodes": 2}, "notice", "divided over 2 NUMA nodes", "MOEGRAFT_NODES=1"),
        ({"numa_nodes": 2, "kernel_nodes": 2, "forced_nodes": "2"}, "warning", "2 NUMA nodes", "numactl --interleave=all"),
        ({"available_bytes": GIB}, "warning", "1.0 GiB", "end other programs"),
        ({"gpu_device": True}, "warning", "this PyTorch is a CPU build", "CUDA build"),
        ({"gpus": GPU, "pinned_limit_bytes": 8 << 20}, "warning", "lock 8 MiB", "ulimit -l unlimited"),
        ({"gpus": GPU}, "notice", "run on an NVIDIA H100 alone, and not yet on a GPU", "hybrid"),
        ({"quota_cores": 2.0}, "notice", "2 of 8 cores", "more CPUs"),
        ({"compiler": None}, "notice", "no C++ compiler was found", "apt install g++"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_problem_has_its_fix(changes: dict[str, Any], severity: str, what: str, fix: str, healthy: Facts) -> None:
    found = [problem for problem in find_problems(replace(healthy, **changes)) if what in problem.what]
    assert [problem.severity for problem in found] == [severity]
    assert fix in found[0].fix


def test_a_healthy_machine_has_no_problem(healthy: Facts) -> None:
    assert [problem.severity for problem in find_problems(healthy)] == ["notice"]
    assert "no GPU is visible" in find_problems(healthy)[0].what


def test_the_gpu_that_ran_the_tests_is_no_problem(healthy: Facts) -> None:
    assert not find_problems(replace(healthy, gpus=(Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB),)))


def test_only_a_forced_instruction_set_is_a_problem(healthy: Facts) -> None:
    machine = replace(healthy, **AMX_MACHINE)
    for forced in (None, ""):
        assert [problem.severity for problem in find_problems(replace(machine, forced_isa=forced))] == ["notice"]
    problem = find_problems(replace(machine, isa="avx512_bf16", forced_isa="avx512_bf16"))[0]
    assert (problem.severity, problem.fix) == ("warning", "unset MOEGRAFT_ISA") and "instead of amx" in problem.what


def test_the_kernels_in_use_are_shown(healthy: Facts) -> None:
    rows = dict(_rows(replace(healthy, **AMX_MACHINE)))
    assert rows["kernel"].endswith("avx512_vnni (tested), avx512_bf16 (tested), amx (tested, in use)")
    assert rows["prompts"].startswith("matrix kernel of amx: bfloat16 from 2 tokens an expert, int4 from 12 tokens an expert;")
    assert "scalar (tested), avx2 (tested, in use)" in dict(_rows(healthy))["kernel"]
    assert dict(_rows(healthy))["prompts"] == "vector tiles"


@pytest.fixture(scope="module")
def facts() -> Facts:
    """Those of this machine, with a test of every instruction set."""
    return gather()


def test_the_facts_are_this_machine(facts: Facts) -> None:
    assert facts.cores == len(os.sched_getaffinity(0))
    assert 1 <= facts.kernel_threads <= facts.cores
    assert facts.torch_threads == torch.get_num_threads()
    assert 0 < facts.available_bytes <= facts.total_bytes
    assert facts.python.endswith(sys.version.split()[0])
    names = {found.name: found for found in facts.packages}
    assert names["torch"].version == torch.__version__ and names["torch"].ok and ">=" in names["torch"].wanted
    usable = [isa.name for isa in facts.instruction_sets if isa.usable]
    assert facts.isa in usable and set(facts.matrix_tokens) <= set(LIMITS)
    assert facts.forced_isa == os.environ.get("MOEGRAFT_ISA")
    assert facts.isa == facts.default_isa or facts.forced_isa


def test_packages_are_compared_with_the_required_version() -> None:
    assert package("torch", ">=1.0").ok
    assert not package("torch", ">=1000").ok
    assert package("no-such-package", ">=1") == Package("no-such-package", None, ">=1", False)
    assert package("no-such-package", "", optional=True).ok


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("", None)],
    ids=["no limit", "a core and a half", "no cgroup"],
)
def test_quota(text: str, cores: float | None) -> None:
    assert doctor_module._quota(text) == cores


def test_every_instruction_set_is_right_and_a_wrong_one_is_found(run: Run, monkeypatch: pytest.MonkeyPatch, facts: Facts) -> None:
    usable = [isa for isa in facts.instruction_sets if isa.usable]
    assert usable and all(set(isa.errors) == set(LIMITS) and not isa.wrong for isa in usable)
    right = cpu.reference_experts
    monkeypatch.setattr(cpu, "reference_experts", lambda *given, **more: 1.1 * right(*given, **more))
    result = run("doctor")
    assert result.exit_code == 1
    for isa in usable:
        assert f"error: the kernel's {isa.name} version computes wrong results with {', '.join(LIMITS)}" in result.stdout


def test_an_unknown_instruction_set_is_one_message(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGRAFT_ISA", "mmx")
    result = run("doctor")
    assert result.exit_code == 2 and result.stdout == ""
    assert "moegraft: error: unknown instruction set 'mmx' (from MOEGRAFT_ISA); this CPU has scalar" in result.stderr
    assert "set MOEGRAFT_ISA to one of these, or unset it" in result.stderr


MEASURED = Measurements(40.0, {"int8": Rate(30.0, 900.0)}, {"bfloat16": Rate(35.0, 500.0)}, 0.25, 1.05)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moegraft" / "measurements.json"


def test_rates_are_kept_and_shown(run: Run, run_json: RunJson, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "instruction_sets", list)  # their self-tests take seconds
    assert run_json("doctor")["measured"] is None
    assert "moegraft doctor --measure" in run("doctor").stdout
    assert store.save(MEASURED) == cache
    assert store.load() == MEASURED
    assert run_json("doctor")["measured"]["experts"] == {"int8": {"decode_gbps": 30.0, "prefill_gflops": 900.0}}
    shown = run("doctor").stdout
    assert "experts, int8" in shown and "outside kernels: 250 us in Python\n" in shown
    store.save(replace(MEASURED, step_overhead_ms=0.0123, attention_gflops=432.1))
    assert "attention in training 432" in " ".join(run("doctor").stdout.split())
    assert "250 us in Python, 12 us in a decode step that is one native program" in run("doctor").stdout


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"threads": ', '"threads": 9'),
        lambda text: text[:-9],
        lambda text: "[]",
        lambda text: text.replace("load", "l"),
    ],
    ids=["another machine", "cut off", "no object", "a key that is not"],
)
def test_rates_of_another_machine_are_not_taken(damage: Callable[[str], str], cache: Path) -> None:
    store.save(MEASURED)
    cache.write_text(damage(cache.read_text()))
    assert store.load() is None


def test_measuring_returns_rates(monkeypatch: pytest.MonkeyPatch, run_json: RunJson, cache: Path) -> None:
    """Small sizes: what the rates are is no test, that there is one for every weight type is."""
    from moegraft.injection.estimate import measure

    sizes = {"HIDDEN": 64, "INTERMEDIATE": 32, "READ_BYTES": 1 << 18, "PREFILL_TOKENS": 4, "OVERHEAD_LAYERS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(measure, name, value)
    found = run_json("doctor", "--measure")["measured"]
    assert set(found["experts"]) == {"float32", "bfloat16", "int8", "int4"} == set(found["linear"])
    rates = [rate for kind in ("experts", "linear") for rate in found[kind].values()]
    assert all(rate["decode_gbps"] > 0 and rate["prefill_gflops"] > 0 for rate in rates)
    assert found["read_gbps"] > 0 and found["layer_overhead_ms"] > 0 and found["step_overhead_ms"] > 0 and found["load"] >= 0
    assert found["attention_gflops"] > 0
    loaded = store.load()
    assert loaded is not None and loaded.read_gbps == found["read_gbps"]


def test_a_disk_is_measured_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, run: Run, run_json: RunJson, cache: Path, tmp_path: Path
) -> None:
    from moegraft.injection.estimate import measure

    sizes = {"HIDDEN": 64, "INTERMEDIATE": 32, "READ_BYTES": 1 << 18, "PREFILL_TOKENS": 4, "OVERHEAD_LAYERS": 1}
    for name, value in {**sizes, "DISK_BYTES": 1 << 28, "DISK_S": 0.05, "DISK_SMALL_READS": 3}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(cpu, "instruction_sets", list)
    found = run_json("doctor", "--measure", "--disk", tmp_path)["measured"]["disk"]
    assert set(found["gbps"]) == {"1", "2", "4", "8"} and min(found["gbps"].values()) > 0 and found["latency_us"] > 0
    assert not list(tmp_path.glob("moegraft-disk-*"))
    assert f"disk of {tmp_path}: GB/s by threads that read: " in run("doctor").stdout
    assert run_json("doctor", "--measure")["measured"]["disk"] == found, "kept by a measurement of everything else"
    refused = run("doctor", "--disk", tmp_path)
    assert refused.exit_code == 2 and "give both" in refused.stderr
    nowhere = run("doctor", "--measure", "--disk", tmp_path / "nothing")
    assert nowhere.exit_code == 2 and "/nothing: No such file or directory\n" in nowhere.stderr


def test_what_is_needed_is_no_extra_as_well(facts: Facts) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not {Requirement(line).name for line in project["dependencies"]} & set(doctor_module.OPTIONAL)
    names = [package.name for package in facts.packages]
    assert len(set(names)) == len(names)
