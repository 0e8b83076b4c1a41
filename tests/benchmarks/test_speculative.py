"""Rounds of drafts are recorded with the routing of both passes."""

from __future__ import annotations

import pytest
import transformers
from support import import_benchmark

pytest.importorskip("matplotlib", reason="the benchmark draws its figures: pip install 'moegraft[bench]'")
benchmark = import_benchmark("speculative")


def test_rounds_have_the_routers_share_and_recall() -> None:
    found = benchmark.draft_rounds(benchmark.Way(2), benchmark.pieces(benchmark.held_out(), 1, 16), 8)
    row = found.row()
    assert 0 < row["kept_share"] < 1 and 0 < row["recall"] <= 1
    assert row["rounds"] == len(found.rounds) and 1 <= row["tokens_per_round"] <= benchmark.MAX_DRAFT + 1
    assert len(found.judged()) == sum(done.compared for done in found.rounds)


@pytest.mark.skipif(
    not hasattr(getattr(transformers.modeling_layers, "MtpModel", None), "forward_layer"),
    reason="this transformers cannot compute MTP layers one by one",
)
def test_rounds_of_the_mtp_layer_do_not_change_greedy_text() -> None:
    rows = benchmark.Recorder("none", write=False)
    benchmark.mtp(benchmark.pieces(benchmark.held_out(), 2, 16), 16, rows)
    greedy, sampled = rows.rows
    assert greedy["same_text"] == greedy["prompts"] == 2
    assert all(0 < row["position_1"] <= 1 and 1 < row["tokens_per_round"] <= benchmark.MTP_DRAFT + 1 for row in (greedy, sampled))


@pytest.mark.skipif(
    not hasattr(getattr(transformers.modeling_layers, "MtpModel", None), "forward_layer"),
    reason="this transformers cannot compute MTP layers one by one",
)
def test_foresight_asks_each_router_on_earlier_states_and_on_those_of_the_mtp_layer() -> None:
    rows = benchmark.Recorder("none", write=False)
    benchmark.foresight(benchmark.pieces(benchmark.held_out(), 1, 24)[0].flatten(), rows)
    sources = {(row["layer"], row["asked on"]) for row in rows.rows}
    assert {(0, "MTP layer"), (1, "1 before"), (1, "MTP layer")} <= sources and (0, "1 before") not in sources
    assert all(row["tokens"] == 23 and 0 < row["recall"] <= 1 for row in rows.rows)
