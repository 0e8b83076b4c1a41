"""The benchmarks of sparse layers and models: floors are correct, and the scripts run without a GPU in the interpreter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import ROOT

BENCHMARKS = ROOT / "benchmarks"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made  # dataclasses look up their module
    spec.loader.exec_module(made)
    return made


def floor_module() -> ModuleType:
    return module("_sparse_floor")


def test_floors_count_each_weight_once() -> None:
    floor = floor_module()
    shape = floor.Shape(hidden=64, intermediate=8, num_experts=4, top_k=2, shared_intermediate=8)
    ids = torch.tensor([[0, 1], [1, 2], [0, 2]])
    row_bytes = 64 * 2
    assert floor.dense_work(ids, shape).read_bytes == 3 * 3 * 8 * row_bytes
    assert floor.dense_work(ids, shape).flops == 2 * 3 * 6 * 8 * 64
    active = torch.zeros(3, 2, 8, dtype=torch.bool)
    active[0, 1, 5] = active[1, 0, 5] = True  # two tokens share a neuron of expert 1
    active[2, 1, 0] = True
    work = floor.sparse_work(ids, active, shape)
    assert work.read_bytes == 3 * 8 * row_bytes + 2 * 2 * row_bytes
    assert work.flops == 2 * 6 * 8 * 64 + 4 * 3 * 64
    assert work.floor_ms(floor.Device(bytes_per_ms=1e3, flops_per_ms=1e9)) == work.read_bytes / 1e3
    assert work.floor_ms(floor.Device(bytes_per_ms=1e9, flops_per_ms=1e3)) == work.flops / 1e3


def test_total_shares_count_the_shared_expert() -> None:
    shape = floor_module().SHAPES["qwen3.5-35b-a3b"]
    assert shape.routed(0.85) == pytest.approx(0.85 * 9 / 8)


def run(*arguments: str, script: str = "sparse_layer.py") -> str:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_the_layer_benchmark_prints_its_settings() -> None:
    output = run("--shape", "qwen3.5-35b-a3b")
    assert output.startswith("Nothing was measured: ")
    assert "1.5 GiB per layer" in output
    assert "85% (95.6% of the routed)" in output


def test_the_layer_benchmark_runs_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
    output = run("--tiny", "--tokens", "1")
    assert {line.split("path=")[1].split()[0] for line in output.splitlines() if "path=" in line} == {
        "pair",
        "dense",
        "grouped_mm",
    }
    assert "the times have no meaning" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_the_model_benchmark_prints_its_settings() -> None:
    output = run("--requests", "1", "64", script="sparse_model.py")
    assert output.startswith("Nothing was measured: ")
    assert "1, 64 requests of 128 + 128, 1024 + 128, 128 + 1024, 1024 + 1024 tokens" in output
    assert "70%, 80%, 85% of all neurons left out" in output


@pytest.mark.long
def test_the_model_benchmark_runs_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
    output = run("--tiny", script="sparse_model.py")
    rows = [dict(part.split("=") for part in line.split()) for line in output.splitlines() if line.startswith("shape=")]
    assert [float(row["total_sparsity"]) for row in rows] == [0.0, 0.7, 0.8, 0.85]
    left_out = [float(row["routed_left_out"]) for row in rows]
    assert (
        left_out[0] == 0.0
        and left_out == sorted(left_out)
        and left_out[1] == pytest.approx(floor_module().SHAPES["tiny"].routed(0.7), abs=0.15)
    )


def test_plots_show_the_fastest_path_of_each_kind(tmp_path: Path) -> None:
    plots = module("plot_sparse")
    rows = [
        {"shape": "s", "tokens": tokens, "total_sparsity": total, "path": path, "p50_ms": ms, "floor_ms": ms / 2}
        for tokens in (64, 512)
        for total, path, ms in ((0.0, "dense", 4.0), (0.0, "grouped_mm", 3.0), (0.8, "pair", 2.0), (0.8, "dense", 1.0))
    ]
    assert {place: row["path"] for place, row in plots.best(rows, "s", sparse=True).items()} == {(0.8, 64): "pair", (0.8, 512): "pair"}
    assert {row["path"] for row in plots.best(rows, "s", sparse=False).values()} == {"grouped_mm"}
    kernels = [{"shape": "s", "path": "pair", "total_sparsity": 0.8, "kernel": name, "us": 3.0} for name in ("_up_kernel", "_down_kernel")]
    for draw, given in ((plots.speedup_by_batch, rows), (plots.time_by_sparsity, rows), (plots.time_by_kernel, kernels)):
        draw(given, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
