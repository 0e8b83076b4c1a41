"""The quality benchmark: all neurons give the stock model, criteria keep the right neurons, cutoffs are interpolated."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ROOT
from support.sparse_models import OSS, SHARED, save_model, stock

BENCHMARKS = ROOT / "benchmarks"
IDS = torch.arange(3, 200)[None] % 257


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module, imported like the scripts of its folder import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sparse_quality

    return sparse_quality


@pytest.fixture(scope="module", params=[SHARED, OSS], ids=["shared", "biases"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), request.param)


def test_all_neurons_give_the_stock_model(bench: Any, folder: Path) -> None:
    model = stock(folder)
    sites = bench.find_sites(model)
    with torch.no_grad():
        expected = model(IDS).logits
        with bench.masked(model, sites, lambda path, expert, acted: torch.ones_like(acted, dtype=torch.bool)):
            torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)
        with bench.masked(model, sites, lambda path, expert, acted: torch.zeros_like(acted, dtype=torch.bool)):
            assert not torch.allclose(model(IDS).logits, expected, rtol=1e-2)
        torch.testing.assert_close(model(IDS).logits, expected)  # the model is unchanged


def loaded(bench: Any, folder: Path, tmp_path: Path) -> Any:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 40)
    return bench.load(str(folder), text, 400, 100)


def test_criteria_leave_out_the_given_share(bench: Any, folder: Path, tmp_path: Path) -> None:
    made = loaded(bench, folder, tmp_path)
    assert sum(map(len, made.making)) == sum(map(len, made.judging)) == 400
    scopes: dict[str, list[float]] = {}
    for criterion, scope, sparsity, keep, paths in bench.criteria(made):
        if sparsity not in (0.5, 0.7):
            continue
        counting = bench.Counting(keep, paths)
        bench.judge(made, counting, None)
        row = counting.row()
        scopes.setdefault(scope, []).append(row["total_sparsity"])
        assert row["routed_sparsity"] == pytest.approx(sparsity, abs=0.06), criterion
        # Shared experts are half as wide as a token's routed ones; if they are always computed, a third of all neurons is.
        share = 1 if scope == "routed+shared" or not made.sites.shared else 2 / 3
        assert row["total_sparsity"] == pytest.approx(row["routed_sparsity"] * share, abs=0.06), criterion
    assert set(scopes) == ({"routed", "routed+shared"} if made.sites.shared else {"routed"})


def test_top_k_keeps_the_largest(bench: Any) -> None:
    acted = torch.tensor([[0.1, -3.0, 2.0, 0.5, -0.2, 1.0, 0.0, 0.3]])
    assert bench.topk_keep(0.75)("", 0, acted).nonzero()[:, 1].tolist() == [1, 2]
    assert bench.topk_keep(0.99)("", 0, acted).sum() == 1


def test_groups_are_kept_as_a_whole(bench: Any) -> None:
    active = torch.tensor([[3, 5, 2, 1, 0, 9]])  # expert 0: neurons 5 and 1 are the hottest
    made: Any = SimpleNamespace(histograms={"layer": SimpleNamespace(active=active)})
    values = torch.tensor([[0.0, 3.0, 0.0, 0.0, 1.0, 2.0]])
    assert bench.Grouping(made, 4, False).largest("layer", 0, values).tolist() == [[3.0, 3.0, 3.0, 3.0, 2.0, 2.0]]  # 6 is no multiple of 4
    assert bench.Grouping(made, 2, True).largest("layer", 0, values).tolist() == [[0.0, 3.0, 0.0, 1.0, 1.0, 3.0]]


@pytest.mark.parametrize(("scores", "expected"), [([0.40, 0.39, 0.37], 0.75), ([0.40, 0.2], 0.54), ([0.41, 0.39], 0.9), ([], 0.0)])
def test_the_cutoff_is_interpolated_between_two_points(bench: Any, scores: list[float], expected: float) -> None:
    """95 % of 0.40 are 0.38."""
    rows: list[dict[str, object]] = [{"criterion": "none", "scope": "", "right_next_token": 0.4}]
    sparsities = (0.5, 0.7, 0.8) if len(scores) == 3 else (0.5, 0.9)
    for sparsity, score in zip(sparsities, scores, strict=False):
        rows.append({"criterion": "topk", "scope": "routed", "routed_sparsity": sparsity, "right_next_token": score})
    assert bench.cutoff(rows, "topk", "routed") == pytest.approx(expected)


def test_the_page_of_results_has_the_figures_of_the_results(bench: Any) -> None:
    rows = committed("sparse_quality")
    page = " ".join((BENCHMARKS / "README.md").read_text(encoding="utf-8").split())
    threshold, topk = (100 * bench.cutoff(rows, criterion, "routed") for criterion in ("threshold", "topk"))
    assert f"up to {threshold:.1f} % of the routed neurons left out" in page and f"keeps it up to {topk:.1f} %" in page
    computed = {
        (row["group"], row["hot_first"]): 100 * float(row["computed_share"])
        for row in committed("sparse_groups")
        if row["target"] == "0.95"
    }
    shown = f"groups of 8 would compute {computed['8', 'False']:.1f} % of the neurons instead of {computed['1', 'False']:.1f} %"
    assert f"{shown} ({computed['8', 'True']:.1f} % with the hottest neurons grouped together)" in page


def committed(name: str) -> list[dict[str, str]]:
    with (BENCHMARKS / "results" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
