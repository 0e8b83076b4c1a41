"""Constants of launches by GPU: the table's values where it has the GPU, the defaults elsewhere, and the same results with any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")

from support.kernel_cases import make_batch, make_layer, relative_error
from support.triton_cases import DEVICE

from moegraft.operators.kernels import launch
from moegraft.operators.kernels.launch import constant, read_table, trial
from moegraft.operators.kernels.slots import SlotExperts

CUDA = torch.device("cuda", 0)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"NVIDIA One": {"int4": {"down_warps": 8}}}))
    monkeypatch.setattr(launch, "TABLE", path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA One")
    launch._timed.cache_clear()
    yield
    launch._timed.cache_clear()


@pytest.mark.usefixtures("table")
def test_a_constant_is_that_of_the_gpu_and_the_weight_type() -> None:
    assert constant("down_warps", 4, "int4", CUDA) == 8
    assert constant("down_units", 64, "int4", CUDA) == 64
    assert constant("down_warps", 4, "int8", CUDA) == 4
    assert constant("down_warps", 4, "int4", torch.device("cpu")) == 4


@pytest.mark.usefixtures("table")
def test_a_trial_is_timed_against_defaults_and_not_against_the_table() -> None:
    with trial({"down_units": 32}):
        assert constant("down_units", 64, "int4", CUDA) == 32
        assert constant("down_warps", 4, "int4", CUDA) == 4
    assert constant("down_warps", 4, "int4", CUDA) == 8


@pytest.mark.parametrize(
    ("path", "constants"),
    [
        ("decode", {"gate_warps": 2, "gate_units": 32, "down_warps": 8, "down_units": 128, "down_rows": 32}),
        ("grouped", {"grouped_rows:16": 64, "grouped_warps:16": 8, "grouped_stages:16": 2}),
    ],
)
@pytest.mark.parametrize("weights", ["int4", "bfloat16"])
def test_other_constants_compute_the_same(path: str, constants: dict[str, int], weights: str) -> None:
    layer = make_layer(weights, hidden=96, intermediate=64)  # three blocks of rows, and of columns
    x, index, shares = (tensor.to(DEVICE) for tensor in make_batch(5, 2, layer, torch.bfloat16))
    arena = torch.from_numpy(layer.packed.buffer.reshape(layer.shape.num_experts, -1)).to(DEVICE)
    out = torch.empty(5, 96, device=DEVICE)
    with trial(constants):
        SlotExperts(layer.shape, layer.spec, weights).forward(x, arena, index.int(), shares, out, path)  # type: ignore[arg-type]
    assert relative_error(out.cpu(), layer.reference(x.cpu(), index.cpu(), shares.cpu())) < 2e-2


def test_the_batch_up_to_which_pairs_read_their_own_weights_is_a_constant() -> None:
    """The two paths round differently: which one ran shows in the bits."""
    layer = make_layer("bfloat16", hidden=64, intermediate=64)
    x, index, shares = (tensor.to(DEVICE) for tensor in make_batch(6, 2, layer, torch.bfloat16))
    arena = torch.from_numpy(layer.packed.buffer.reshape(layer.shape.num_experts, -1)).to(DEVICE)

    def forward(path: str | None) -> torch.Tensor:
        out = torch.empty(6, 64, device=DEVICE)
        SlotExperts(layer.shape, layer.spec, "bfloat16").forward(x, arena, index.int(), shares, out, path)  # type: ignore[arg-type]
        return out

    def in_parts() -> bool:
        """Whether experts are computed as they arrive, as the engine asks: only on the grouped path."""
        return SlotExperts(layer.shape, layer.spec, "bfloat16").begin(x, arena, index, shares) is not None

    decode, grouped = forward("decode"), forward("grouped")
    assert not torch.equal(decode, grouped) and torch.equal(forward(None), grouped) and in_parts()
    with trial({"decode_tokens": 6}):
        assert torch.equal(forward(None), decode) and not in_parts()
    with trial({"decode_tokens": 5}):
        assert torch.equal(forward(None), grouped) and in_parts()


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"NVIDIA One": {"int4": {"down_warps": "eight"}}}))
    with pytest.raises(ValueError, match="NVIDIA One, int4 must be positive integers"):
        read_table(path)


def test_the_shipped_table_can_be_read() -> None:
    read_table(launch.TABLE)
