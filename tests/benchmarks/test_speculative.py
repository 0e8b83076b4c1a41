"""Rounds of the MTP layer keep greedy text, and its foresight is recorded by layer."""

from __future__ import annotations

import pytest
import transformers
from support import import_benchmark

benchmark = import_benchmark("speculative")
pytestmark = pytest.mark.skipif(
    not hasattr(getattr(transformers.modeling_layers, "MtpModel", None), "forward_layer"),
    reason="this transformers cannot compute MTP layers one by one",
)


def test_rounds_of_the_mtp_layer_do_not_change_greedy_text() -> None:
    rows = benchmark.Recorder("none", write=False)
    benchmark.mtp(benchmark.pieces(benchmark.held_out(), 2, 16), 16, rows)
    greedy, sampled = rows.rows
    assert greedy["same_text"] == greedy["prompts"] == 2
    assert all(0 < row["position_1"] <= 1 and 1 < row["tokens_per_round"] <= benchmark.MTP_DRAFT + 1 for row in (greedy, sampled))


def test_foresight_asks_each_router_on_earlier_states_and_on_those_of_the_mtp_layer() -> None:
    rows = benchmark.Recorder("none", write=False)
    benchmark.foresight(benchmark.pieces(benchmark.held_out(), 1, 24)[0].flatten(), rows)
    sources = {(row["layer"], row["asked on"]) for row in rows.rows}
    assert {(0, "MTP layer"), (1, "1 before"), (1, "MTP layer")} <= sources and (0, "1 before") not in sources
    assert all(row["tokens"] == 23 and 0 < row["recall"] <= 1 for row in rows.rows)
