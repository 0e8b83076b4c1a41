"""The thresholds file: it is written and read unchanged, damaged or other files are refused, and hashes distinguish weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moegraft.operators.errors import ThresholdsError
from moegraft.operators.sparsity import (
    GRID,
    HeldOut,
    LayerThresholds,
    Thresholds,
    read_thresholds,
    weights_hash,
    write_thresholds,
)
from moegraft.operators.weights import Part, WeightSource

PATH = "model.layers.1.mlp.experts"


def made() -> Thresholds:
    quantiles = tuple(float(2.0 ** (-10 + 8 * share)) for share in GRID)
    layer = LayerThresholds(4, 64, 32, 16, "abc", quantiles)
    held_out = HeldOut(0.85, "total", "layer", 0.849, 10.0, 10.5, 0.9)
    return Thresholds("tiny", "qwen3_moe", "f" * 64, 1000, 250, 2, {PATH: layer}, tuple(2 * value for value in quantiles), (held_out,))


def test_a_written_file_is_read_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    write_thresholds(made(), path)
    found = read_thresholds(path)
    assert replace(found, layers={}, all_layers=()) == replace(made(), layers={}, all_layers=())
    np.testing.assert_allclose(found.layers[PATH].quantiles, made().layers[PATH].quantiles, rtol=1e-5)
    np.testing.assert_allclose(found.all_layers, made().all_layers, rtol=1e-5)
    assert list(tmp_path.iterdir()) == [path]
    assert max(len(line.split()) for line in path.read_text().splitlines()) > 100  # a list of quantiles is one line


def test_an_older_file_with_the_key_counts_is_read(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    write_thresholds(made(), path)
    body = json.loads(path.read_text())
    for row in body["held_out"]:
        row["counts"] = row.pop("scope")
    path.write_text(json.dumps(body))
    assert read_thresholds(path).held_out == made().held_out


def test_a_threshold_between_two_shares_is_interpolated() -> None:
    found = made()
    assert found.threshold(PATH, 0.0, "layer") == 0.0
    assert found.threshold(PATH, 0.5, "layer") == pytest.approx(2.0**-6)
    assert found.threshold(PATH, 0.955, "layer") == pytest.approx(2.0 ** (-10 + 8 * 0.955))  # by logarithms
    assert found.threshold(PATH, 0.5, "global") == pytest.approx(2 * 2.0**-6)
    with pytest.raises(ValueError, match=r"above the file's last, 0.999"):
        found.threshold(PATH, 0.9995, "layer")


def changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(changes)


def of_layer(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["layers"][PATH].update(changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(format="moegraft-thresholds/2"), "not a thresholds file of format moegraft-thresholds/1"),
        (changed(criterion="topk"), "its thresholds are for 'topk', but operators compare abs_act_gate"),
        (changed(top_k=0), "damaged .top_k is 0."),
        (changed(extra=1), "damaged .*extra"),
        (lambda body: body.pop("layers"), "damaged .'layers'."),
        (of_layer(hidden=None), f"damaged .hidden of {PATH} is None."),
        (of_layer(hiden=3), "damaged .*hiden"),
        (of_layer(quantiles=[0.1, 0.2]), f"damaged .quantiles of {PATH} has 2 numbers where the grid has 102."),
        (of_layer(quantiles=[0.0] * 102), "a value that is not a number above 0"),
        (of_layer(quantiles=[float("nan")] * 102), "a value that is not a number above 0"),
        (of_layer(quantiles=[1.0] * 101 + [0.5]), f"quantiles of {PATH} is not in ascending order"),
        (of_layer(quantiles=["a"] * 102), "a value that is not a number"),
        (changed(grid=[]), "grid has 0 numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "damage",
)
def test_a_damaged_file_is_refused(damage: Callable[[dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    write_thresholds(made(), path)
    body = json.loads(path.read_text())
    damage(body)
    path.write_text(json.dumps(body))
    with pytest.raises(ThresholdsError, match=message) as raised:
        read_thresholds(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", "[" * 100_000], ids=lambda text: text[:3])
def test_a_file_of_another_kind_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    path.write_text(text)
    with pytest.raises(ThresholdsError, match="moegraft calibrate"):
        read_thresholds(path)


def test_the_error_of_a_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(ThresholdsError, match=r"mine.json: no such file; write it with: moegraft calibrate --out mine.json"):
        read_thresholds(tmp_path / "mine.json")


class Rows(WeightSource):
    """Experts in memory as a weight source."""

    dtype = torch.float32

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def parts(self) -> Sequence[Part]:
        return ("gate", "up", "down")

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        assert part == "gate"
        return self.weights[expert]

    def origin(self, part: Part, expert: int = 0) -> str:
        return ""


def test_hashes_depend_on_values_but_not_on_dtypes_or_strides() -> None:
    weights = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    first = weights_hash(Rows(weights), 5)
    assert first == weights_hash(Rows(weights.float()), 5)  # the same values
    assert first == weights_hash(Rows(weights.transpose(1, 2).contiguous().transpose(1, 2)), 5)  # independent of the memory layout
    for expert in (0, 2, 4):
        other = weights.clone()
        other[expert, 4, 5] += 1
        assert weights_hash(Rows(other), 5) != first
    assert weights_hash(Rows(weights[:1]), 1) != first
