"""Weights that are divided over memory nodes: results to the bit those of one node, and the placement that the system is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moegraft.cpu_backend import ExpertsShape, GateSpec, PackedExperts, PackedLinear, Runtime

CSRC = Path(__file__).parents[2] / "cpu_backend" / "csrc"
# 17 blocks of rows of the down projection and 7 of neurons: neither is a multiple of 2 or 3 nodes.
SHAPE = ExpertsShape(num_experts=9, hidden=544, intermediate=200)
TOP_K = 3


def outputs(runtime: Runtime, weight_type: str, tokens: int, *, sparse: bool = False) -> list[NDArray[np.float32]]:
    """Return what experts and a linear layer give for the same weights and tokens on any runtime."""
    random = np.random.default_rng(0)
    experts = PackedExperts(SHAPE, GateSpec("silu"), weight_type, sparse=sparse)
    linear = PackedLinear(1000, SHAPE.hidden, weight_type)
    for weights in (experts, linear):
        runtime.divide(weights)
    wide = (SHAPE.intermediate, SHAPE.hidden)
    for expert in range(SHAPE.num_experts):
        for part, shape in (("gate", wide), ("up", wide), ("down", wide[::-1])):
            experts.pack(expert, part, random.standard_normal(shape, np.float32) * 0.05)
    linear.pack(random.standard_normal((1000, SHAPE.hidden), np.float32))
    x = random.standard_normal((tokens, SHAPE.hidden), np.float32)
    ids = np.stack([random.permutation(SHAPE.num_experts)[:TOP_K] for _ in range(tokens)]).astype(np.int64)
    found: list[NDArray[np.float32]] = [np.empty_like(x), np.empty((tokens, 1000), np.float32)]
    runtime.forward(experts, x, ids, random.random((tokens, TOP_K), np.float32), found[0])
    runtime.linear(linear, x, found[1])
    return found


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("weight_type", ["int4", "int8", "float32"])
@pytest.mark.parametrize("tokens", [1, 5, 130])  # a step, a few, and enough for the matrix kernel
def test_results_do_not_depend_on_the_nodes(weight_type: str, tokens: int, sparse: bool) -> None:
    expected = outputs(Runtime(2, node_groups=1), weight_type, tokens, sparse=sparse)
    for threads, groups in ((2, 2), (3, 2), (5, 3), (8, 8)):
        runtime = Runtime(threads, node_groups=groups)
        assert runtime.memory_nodes == groups
        assert not runtime.shares_threads  # which are not kept on a node
        for one, other in zip(outputs(runtime, weight_type, tokens, sparse=sparse), expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_there_are_no_more_nodes_than_threads() -> None:
    assert Runtime(1, node_groups=2).memory_nodes == 1


def test_a_variable_overrides_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGRAFT_NODES", "2")
    assert Runtime(2).memory_nodes == 2
    assert Runtime(2, node_groups=1).memory_nodes == 1
    for wrong in ("0", "two", "1.5"):
        monkeypatch.setenv("MOEGRAFT_NODES", wrong)
        with pytest.raises(ValueError, match=f"MOEGRAFT_NODES is '{wrong}'; it must be a number"):
            Runtime(2)


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="expected PackedExperts or a PackedLinear"):
        Runtime(1).divide(3)  # type: ignore[arg-type]


def test_a_caller_keeps_its_cores() -> None:
    before = os.sched_getaffinity(0)
    outputs(Runtime(2, node_groups=2), "int8", 4)
    assert os.sched_getaffinity(0) == before


def test_training_and_steps_agree_with_one_node() -> None:
    """Gradients and submitted work pass through the same phases."""
    results: list[list[Any]] = []
    for groups in (1, 2):
        runtime = Runtime(4, node_groups=groups)
        experts = PackedExperts(SHAPE, GateSpec("silu"), "int8")
        runtime.divide(experts)
        random = np.random.default_rng(1)
        wide = (SHAPE.intermediate, SHAPE.hidden)
        for expert in range(SHAPE.num_experts):
            for part, shape in (("gate", wide), ("up", wide), ("down", wide[::-1])):
                experts.pack(expert, part, random.standard_normal(shape, np.float32) * 0.05)
        x, gradient = (random.standard_normal((6, SHAPE.hidden), np.float32) for _ in range(2))
        ids = np.stack([random.permutation(SHAPE.num_experts)[:TOP_K] for _ in range(6)]).astype(np.int64)
        weights, out = random.random((6, TOP_K), np.float32), np.empty_like(x)
        runtime.wait(runtime.submit(experts, x, ids, weights, out))
        of_hidden, of_weights = np.empty_like(x), np.empty_like(weights)
        tensors = (torch.from_numpy(array) for array in (x, ids, weights, gradient, of_hidden, of_weights))
        runtime.experts_gradient(experts, *tensors)
        results.append([out, of_hidden, of_weights])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_pages_and_units_of_nodes_that_this_machine_lacks(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    nodes = tmp_path / "nodes"
    # Node 1 is memory alone, as of CXL. Of node 2, this process may not use the last core.
    lists = {0: str(cores[0]), 1: "", 2: f"{cores[-1]},4095"}
    for number, text in lists.items():
        (nodes / f"node{number}").mkdir(parents=True)
        (nodes / f"node{number}" / "cpulist").write_text(f"{text}\n")
    (nodes / "online").write_text("0-2\n")
    program = tmp_path / "memory_nodes"
    core = [CSRC / "core" / f"{name}.cpp" for name in ("machine", "memory", "thread_pool", "openmp", "types")]
    experts = [CSRC / "experts" / f"{name}.cpp" for name in ("packed_weights", "block_layout", "frames", "routing")]
    sources = [Path(__file__).with_name("memory_nodes.cpp"), *core, *experts, *sorted((CSRC / "formats").glob("*.cpp"))]
    flags = ["-std=c++17", "-O0", "-ffunction-sections", "-pthread", f"-I{CSRC}", "-Wl,--wrap=sched_setaffinity,--gc-sections"]
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(program), "-ldl"], check=True)
    done = subprocess.run([str(program), str(nodes)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
