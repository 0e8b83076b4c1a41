"""Routing traces survive saving and loading, report damage precisely and count correctly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.routing_traces import random_trace, recall_share

from moegraft.operators.routing_trace import Trace, TraceError, joined


@pytest.mark.parametrize(("tokens", "layers", "depths"), [(1, 1, 0), (1, 3, 3), (9, 2, 3)])
def test_a_saved_trace_is_loaded_unchanged(tokens: int, layers: int, depths: int, tmp_path: Path) -> None:
    trace = random_trace(tokens, layers, depths=depths, padded=0.2)
    trace.save(tmp_path / "any.name")
    found = Trace.load(tmp_path / "any.name")
    for name in ("chosen", "predicted", "starts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(trace, name))
        assert getattr(found, name).dtype == getattr(trace, name).dtype
    for name in ("scores", "weights"):  # kept in 16 bits
        np.testing.assert_allclose(getattr(found, name), getattr(trace, name), rtol=1e-3, atol=1e-7)
        assert getattr(found, name).dtype == np.float32
    assert (found.layers, found.source) == (trace.layers, trace.source)


def arrays_of(path: Path) -> dict[str, Any]:
    random_trace(4).save(path)
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


DAMAGE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda arrays: arrays.pop("scores"), "no array named scores; moegraft calibrate --routing FILE records traces"),
    (lambda arrays: arrays.update(format=np.int64(99)), "written in format 99; this version reads format 1"),
    (lambda arrays: arrays.update(chosen=arrays["chosen"].astype(np.float32)), "chosen is of type float32"),
    (lambda arrays: arrays.update(chosen=arrays["chosen"] + 5), "chosen has ids from 5 to 10; there are 6 experts"),
    (lambda arrays: arrays.update(chosen=arrays["chosen"] * 0 - 2), "chosen has ids from -2"),
    (lambda arrays: arrays.update(chosen=arrays["chosen"] * 0), "chosen has a token that chooses one expert twice"),
    (lambda arrays: arrays.update(predicted=arrays["predicted"] * 0 + 6), "predicted has ids from 6 to 6; there are 6 experts"),
    (lambda arrays: arrays.update(predicted=arrays["predicted"][:, :3]), r"predicted is \(3, 3, 2, 2\); scores of shape \(4, 2, 6\) need"),
    (lambda arrays: arrays.update(weights=arrays["weights"][:, :1]), r"weights is \(4, 1, 2\); scores of shape \(4, 2, 6\) need"),
    (lambda arrays: arrays.update(starts=arrays["starts"][:2]), r"starts is \(2,\)"),
    (lambda arrays: arrays.update(layers=arrays["layers"][:1]), "layers has 1 names for 2 layers"),
    (lambda arrays: arrays.update(scores=arrays["scores"] * np.float16(np.nan)), "scores has values that are not finite"),
    (lambda arrays: arrays.update(scores=arrays["scores"][0]), r"scores must be \(tokens, layers, experts\)"),
    (lambda arrays: arrays.update(scores=arrays["scores"][:0]), r"scores must be .* none of them 0, not \(0, 2, 6\)"),
    (lambda arrays: arrays.update(scores=arrays["scores"][..., :1]), "chosen has 2 experts per token; there are 1"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_the_error_names_a_damaged_file_and_its_defect(damage: Callable[[dict[str, Any]], object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    arrays = arrays_of(path)
    damage(arrays)
    np.savez(path, **arrays)
    with pytest.raises(TraceError, match=rf"trace\.npz: {message}"):
        Trace.load(path)


@pytest.mark.parametrize("content", [b"", b"not a trace", b"PK\x03\x04 cut short"])
def test_a_file_that_is_not_a_trace_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.npz: not a routing trace"):
        Trace.load(path)


def test_a_file_with_changed_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    random_trace(50).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:400] + bytes(64) + whole[464:])
    with pytest.raises(TraceError, match=r"trace\.npz: not a routing trace"):
        Trace.load(path)


def test_a_file_of_one_array_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "one.npy").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(TraceError, match=r"one\.npy: not a routing trace"):
        Trace.load(tmp_path / "one.npy")


def test_a_file_with_pickled_objects_is_refused_without_running_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    np.savez(path, **(arrays_of(path) | {"source": np.array([{}], dtype=object)}))
    with pytest.raises(TraceError, match="not a routing trace: Object arrays cannot be loaded"):
        Trace.load(path)


def small() -> Trace:
    """Two texts of two tokens; one layer's experts of four."""
    return Trace(
        scores=np.full((4, 2, 4), 0.25, np.float32),
        chosen=np.array([[[0, 1], [0, 1]], [[1, 2], [-1, 1]], [[1, 2], [2, 3]], [[1, 2], [3, 2]]]),
        weights=np.full((4, 2, 2), 0.5, np.float32),
        predicted=np.array([[[[-1, -1], [0, 2]], [[-1, -1], [1, 2]], [[-1, -1], [0, 1]], [[-1, -1], [2, 3]]]]),
        starts=np.array([True, False, True, False]),
        layers=("one", "two"),
        source="by hand",
    )


def test_uses_and_loads_are_counted() -> None:
    trace = small()
    assert (trace.num_tokens, trace.num_layers, trace.num_experts, trace.top_k, trace.depths) == (4, 2, 4, 2, 1)
    np.testing.assert_array_equal(trace.loads(), [[1, 4, 3, 0], [1, 2, 2, 2]])
    np.testing.assert_array_equal(trace.used()[1], [[False, True, True, False], [False, True, False, False]])


def test_recall_matches_a_hand_computed_share() -> None:
    # Layer two has a prediction: of 2, 1, 2 and 2 used experts, 1, 1, 0 and 2 were predicted.
    assert recall_share(small(), 1) == pytest.approx(4 / 7)


def test_joined_parts_equal_the_whole() -> None:
    trace = random_trace(10)
    whole = joined([trace.part(0, 3), trace.part(3, 10)])
    for name in ("scores", "chosen", "weights", "predicted", "starts"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(trace, name))


def test_traces_of_two_models_are_not_joined() -> None:
    trace = random_trace(3)
    for other in (random_trace(3, layers=3), random_trace(3, num_experts=7), replace(trace, layers=("a", "b"))):
        with pytest.raises(TraceError, match="traces of two models cannot be joined"):
            joined([trace, other])
    with pytest.raises(ValueError, match="no traces to join"):
        joined([])
