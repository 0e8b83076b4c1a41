"""The path of a batch is the fastest timed one; timings are made once per machine, sparsity and versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moegraft.operators.sparse.choice import PathChoices, TimedCase, choices_path, default_path, fastest

CASE = TimedCase(2048, 512, 256, 8, "bfloat16", True, 0.95, "a GPU", 256)


class Clock:
    """Timings that depend on the bucket, with a count of their calls."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, bucket: int) -> dict[str, float]:
        self.asked.append(bucket)
        return {"pair": 0.1 * bucket, "dense": 1.0}


@pytest.fixture(autouse=True)
def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraft.operators.sparse.choice.version_of", lambda name: "1.0")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"pair": 1.0, "dense": 3.0}, "pair"),
        ({"pair": 0.99, "dense": 1.0}, "dense"),  # the gain is within the noise of timings
        ({"pair": 0.97, "dense": 1.0}, "pair"),
        ({"pair": 1.0}, "pair"),
    ],
)
def test_the_fastest_path_is_chosen_if_it_gains_enough(times: dict[str, float], expected: str) -> None:
    assert fastest(times) == expected


def test_a_batch_size_is_timed_once() -> None:
    clock, choices = Clock(), PathChoices(None)
    assert [choices.path(CASE, tokens, clock) for tokens in (1, 3, 4, 17, 32)] == ["pair", "pair", "pair", "dense", "dense"]
    assert clock.asked == [1, 4, 32]
    assert {(bucket, times["pair"]) for _, bucket, times in choices.times()} == {(1, 0.1), (4, 0.4), (32, 3.2)}


def test_a_bucket_that_cannot_be_timed_gets_a_default_and_is_timed_later() -> None:
    clock, choices = Clock(), PathChoices(None)
    assert choices.path(CASE, 64, None) == default_path(64) == "pair"
    assert choices.path(CASE, 64, clock) == "dense"
    assert choices.path(CASE, 64, None) == "dense"
    assert [default_path(tokens) for tokens in (1, 65)] == ["pair", "dense"]


def test_times_are_stored_on_disk_and_merged(tmp_path: Path) -> None:
    file = tmp_path / "new" / "paths.json"
    first, second = PathChoices(file), PathChoices(file)
    second.path(CASE, 1, Clock())
    first.path(CASE, 32, Clock())
    clock = Clock()
    later = PathChoices(file)
    assert [later.path(CASE, tokens, clock) for tokens in (1, 32)] == ["pair", "dense"]
    assert clock.asked == []
    assert [path.name for path in file.parent.iterdir()] == ["paths.json"]


def test_another_version_sparsity_or_gpu_is_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "paths.json"
    PathChoices(file).path(CASE, 1, Clock())
    for other in (TimedCase(**{**_fields(CASE), "sparsity": 0.9}), TimedCase(**{**_fields(CASE), "gpu": "another"})):
        clock = Clock()
        PathChoices(file).path(other, 1, clock)
        assert clock.asked == [1]
    monkeypatch.setattr("moegraft.operators.sparse.choice.version_of", lambda name: "2.0")
    clock = Clock()
    PathChoices(file).path(CASE, 1, clock)
    assert clock.asked == [1]


def _fields(case: TimedCase) -> dict[str, object]:
    return {name: getattr(case, name) for name in case.__slots__}


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {"b": {}}}', json.dumps({"a": {"1": {"pair": "x"}}})])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: str) -> None:
    file = tmp_path / "paths.json"
    file.write_text(content)
    assert PathChoices(file).path(CASE, 1, Clock()) == "pair"
    clock = Clock()
    PathChoices(file).path(CASE, 1, clock)
    assert clock.asked == []


def test_a_folder_that_cannot_be_written_raises_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert PathChoices(tmp_path / "file" / "paths.json").path(CASE, 1, Clock()) == "pair"


def test_the_file_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choices_path() == tmp_path / "moegraft" / "sparse_paths.json"
