"""Pictures of what `moegraft drafts --json` and `moegraft verify --json` print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import import_benchmark

from moegraft.operators.decode.draft_costs import DraftCosts

ACCEPTANCES = (0.5, 0.8)


@pytest.fixture
def plots() -> Any:
    pytest.importorskip("matplotlib")
    return import_benchmark("command_plots")


def test_drafts_are_drawn_by_length_and_by_acceptance(plots: Any) -> None:
    drafters = [DraftCosts("n-grams", 10.0, (0.1, 0.2), (11.0, 30.0)), DraftCosts("fewer experts", 10.0, (12.0,), (11.0,))]
    printed = []
    for costs in drafters:
        lengths = range(1, len(costs.draft_ms) + 1)
        gains = {str(share): [costs.gain(length, share) for length in lengths] for share in ACCEPTANCES}
        printed.append({"drafter": costs.drafter, "needed": [costs.needed(length) for length in lengths], "gain": gains})
    needed, gain = plots.draw_costs(printed).axes
    pays, never = needed.lines
    assert list(pays.get_xdata()) == [1] and pays.get_ydata()[0] == pytest.approx(0.11, abs=0.01), "a draft of two never pays"
    assert not len(never.get_xdata())
    assert [line.get_label() for line in gain.lines] == ["n-grams", "fewer experts"]
    assert list(gain.lines[0].get_xdata()) == [0.5, 0.8]
    assert list(gain.lines[0].get_ydata()) == pytest.approx([1.5 * 10 / 11.1, 1.8 * 10 / 11.1])
    assert list(gain.lines[1].get_ydata()) == [1.0, 1.0], "without a draft that pays, plain steps"


def test_errors_are_drawn_by_layer_with_their_limits(plots: Any, tmp_path: Path) -> None:
    def layer(module: str, weights: str | None, error: float, limit: float | None) -> dict[str, Any]:
        expected = None if limit is None else {"limit": limit, "reason": "rounding"}
        return {"module": module, "operator": "hybrid_experts", "weight_type": weights, "relative_error": error, "expected": expected}

    layers = [
        layer("model.layers.0.mlp.experts", "int8", 0.01, 0.02),
        layer("model.layers.2.mlp.experts", "int8", 0.03, 0.02),
        layer("lm_head", None, 0.001, None),
    ]
    printed = {"tokens": 7, "layers": layers}
    (axes,) = plots.draw_errors(printed).axes
    int8, limit, unknown = axes.lines
    assert list(int8.get_xdata()) == [0, 2] and list(int8.get_ydata()) == [0.01, 0.03]
    assert list(limit.get_ydata()) == [0.02, 0.02]
    assert unknown.get_label() == "hybrid_experts, unknown weights" and list(unknown.get_xdata()) == [0]
    source, picture = tmp_path / "printed.json", tmp_path / "picture.png"
    source.write_text(json.dumps(printed))
    subprocess.run([sys.executable, plots.__file__, str(source), str(picture)], check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
