"""The benchmark of a sparse layer: its floors are right, and it runs as far as a machine without a GPU lets it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def floor_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_sparse_floor", BENCHMARKS / "_sparse_floor.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_sparse_floor"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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
    assert floor.sparse_work(ids, active, shape, gate_bytes=0.5).read_bytes == 3 * 8 * row_bytes / 4 + 3 * 2 * row_bytes
    assert work.floor_ms(floor.Device(bytes_per_ms=1e3, flops_per_ms=1e9)) == work.read_bytes / 1e3
    assert work.floor_ms(floor.Device(bytes_per_ms=1e9, flops_per_ms=1e3)) == work.flops / 1e3


def test_total_shares_count_the_shared_expert() -> None:
    shape = floor_module().SHAPES["qwen3.5-35b-a3b"]
    assert shape.routed(0.85) == pytest.approx(0.85 * 9 / 8)


def run(*arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "sparse_layer.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_what_it_would_do() -> None:
    said = run("--shape", "qwen3.5-35b-a3b")
    assert said.startswith("Nothing was measured: ")
    assert "1.5 GiB a layer" in said
    assert "85% (95.6% of the routed)" in said


def test_it_runs_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
    said = run("--tiny", "--tokens", "1")
    assert {line.split("path=")[1].split()[0] for line in said.splitlines() if "path=" in line} == {
        "pair",
        "ordered",
        "union",
        "dense",
        "grouped_mm",
        "sketch",
    }
    assert "the times say nothing" in said
