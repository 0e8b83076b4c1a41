"""The GPU's description of the packed layout is the CPU kernel's."""

from __future__ import annotations

import sys

import pytest
from support.kernel_cases import WEIGHT_TYPES

from moegraft.cpu_backend import ExpertsShape, PackedExperts, PackedLinear
from moegraft.operators.kernels.launch import why_unavailable
from moegraft.operators.kernels.packed_layout import block_bytes, expert_matrices
from moegraft.operators.weight_formats import STORED_FORMATS


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("sizes", [(64, 64), (33, 1), (2880, 2880)], ids=str)
def test_sizes(sizes: tuple[int, int], gated: bool, bias: bool, weight_type: str) -> None:
    shape = ExpertsShape(2, *sizes, gated=gated, bias=bias)
    assert expert_matrices(shape, weight_type).expert_bytes == PackedExperts.expert_bytes_for(shape, weight_type)
    assert block_bytes(weight_type, sizes[0]) == PackedLinear.nbytes_for(32, sizes[0], weight_type)


@pytest.mark.parametrize("weight_type", [*sorted(STORED_FORMATS), "q4_k+q6_k", "mxfp4+float16"])
def test_sizes_of_formats_of_files(weight_type: str) -> None:
    for shape in (ExpertsShape(2, 256, 512, bias=True), ExpertsShape(2, 768, 256)):
        assert expert_matrices(shape, weight_type).expert_bytes == PackedExperts.expert_bytes_for(shape, weight_type)


def test_an_unknown_weight_type_is_named() -> None:
    with pytest.raises(ValueError, match="'int3'"):
        expert_matrices(ExpertsShape(1, 32, 32), "int3")


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        assert "pip install" in (why_unavailable() or "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no CUDA GPU" in (why_unavailable() or "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert why_unavailable() is None
