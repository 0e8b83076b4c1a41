"""`moegraft drafts`: a table, a picture and JSON of what drafts cost a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from moegraft.operators.decode import draft_costs


def test_the_bundled_model_is_measured(run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def measured(*args: Any, **options: Any) -> list[draft_costs.DraftCosts]:
        asked.update(options)
        return real(*args, **options, rounds=2)

    real = draft_costs.measure_draft_costs
    monkeypatch.setattr(draft_costs, "measure_draft_costs", measured)
    text = tmp_path / "text.txt"
    text.write_text("Where are the keys? The keys are in the drawer of the table.")
    result = run("drafts", "--rules", "speculative", "--var", "draft_top_k=2", "--longest", 2, "--text", text)
    assert result.exit_code == 0, result.output
    assert (asked["longest"], asked["settings"].top_k) == (2, 2)
    assert "experts (2 per token): a plain step takes" in result.stdout and "ngram: a plain step takes" in result.stdout
    assert result.stdout.count("at 0.9") == 2


def test_json_has_the_curves(run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = [draft_costs.DraftCosts("ngram", plain_ms=10.0, draft_ms=(0.0, 0.0), verify_ms=(15.0, 31.0))]
    monkeypatch.setattr(draft_costs, "measure_draft_costs", lambda *args, **options: found)
    (costs,) = run_json("drafts", "--rules", "cpu")["drafters"]
    assert costs["needed"] == [pytest.approx(0.5, abs=1e-3), None]
    assert costs["gain"]["0.8"] == [pytest.approx(1.2), pytest.approx(24.4 / 31)]
    assert costs["verify_ms"] == [15.0, 31.0]


def test_an_empty_text_is_refused(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("")
    result = run("drafts", "--rules", "cpu", "--text", tmp_path / "text.txt")
    assert result.exit_code == 2 and "at least 2 are needed" in result.stderr
