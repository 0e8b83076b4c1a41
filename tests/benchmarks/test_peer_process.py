"""A peer that crashes has a row with its failure, and the other peers are measured."""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, fake_peers

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_a_peer_runs_in_a_separate_process_until_it_is_closed() -> None:
    from harness.peers import PeerProcess

    with PeerProcess("peer", fake_peers.working) as peer:
        ids = {peer.call(fake_peers.process_id) for _ in range(2)}
    assert len(ids) == 1 and os.getpid() not in ids
    with pytest.raises(ProcessLookupError):
        os.kill(ids.pop(), 0)


@pytest.mark.parametrize(
    ("work", "argument", "reason"),
    [
        (fake_peers.kill, signal.SIGILL, "SIGILL"),
        (fake_peers.kill, signal.SIGKILL, "SIGKILL"),  # like the system when memory is exhausted
        (fake_peers.leave, 3, "exit code 3"),
        (fake_peers.fail, "no such tensor", "ValueError: no such tensor"),
        (fake_peers.refuse, "relative error 0.5", "SystemExit: relative error 0.5"),
    ],
)
def test_a_failure_is_named(work: Callable[[Any, Any], None], argument: object, reason: str) -> None:
    from harness.peers import PeerFailed, PeerProcess

    with PeerProcess("peer", fake_peers.working) as peer:
        with pytest.raises(PeerFailed) as failed:
            peer.call(work, argument)
        assert failed.value.reason == reason and str(failed.value) == f"peer: {reason}"
        with pytest.raises(PeerFailed):
            peer.call(fake_peers.process_id)


@pytest.mark.parametrize(
    ("opened", "reason"), [(fake_peers.dying_when_opened, "SIGILL"), (fake_peers.unloadable, "RuntimeError: cannot load model.gguf")]
)
def test_a_peer_that_cannot_be_opened(opened: Callable[[], Any], reason: str) -> None:
    from harness.peers import PeerFailed, PeerProcess

    with pytest.raises(PeerFailed) as failed, PeerProcess("peer", opened):
        pass
    assert failed.value.reason == reason


def test_a_model_that_crashes_has_a_row_beside_its_earlier_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`cpu_model.py` from its command line: the first of two providers dies in its second phase."""
    import cpu_model
    from harness import record

    opened = {"dies": (fake_peers.dying_at, "decode after 512"), "works": (fake_peers.working,)}
    monkeypatch.setattr(cpu_model, "openers", lambda layers: opened)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["cpu_model.py", "--rounds", "2", "--new", "4"])
    cpu_model.main()
    with (tmp_path / "cpu_model.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    phases = ["decode", "decode-512", "prompt-512"]
    expected = [("dies", "decode", ""), ("dies", "decode-512", "SIGILL"), *(("works", phase, "") for phase in phases)]
    assert [(row["provider"], row["phase"], row["failure"]) for row in rows] == expected
    assert all(bool(row["p50_tokens_s"]) != bool(row["failure"]) and row["hardware"] for row in rows)


@pytest.mark.long
def test_pairs_name_the_crashed_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    import cpu_model_pairs

    opened = {"ours-int4": (fake_peers.working,), "llama.cpp-int4": (fake_peers.dying_at, "decode after 512")}
    rows = cpu_model_pairs.measure(opened, rounds=2, tokens=4, contexts=(8, 512, 2048), limit=lambda context: 1000)
    assert [(row["context"], row.get("failure")) for row in rows] == [(8, None), (512, "llama.cpp-int4: SIGILL")]


def test_a_layer_that_crashes_has_a_row_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    import cpu_experts

    monkeypatch.setattr(cpu_experts, "open_provider", fake_peers.layer_provider)
    monkeypatch.setattr(cpu_experts, "measured", fake_peers.measured_layer)
    runs = {("moegraft", 2): None, ("kt-kernel", 2): None, ("kt-kernel", 1): None}
    rows = list(cpu_experts.rows_of("int4", runs, rounds=3))
    failed = [row for row in rows if row.get("failure")]
    assert [(row["provider"], row["threads"], row["failure"]) for row in failed] == [("kt-kernel", 2, "SIGILL")]
    found = {(row["provider"], row["threads"]): row["p50_ms"] for row in rows if row.get("tokens") == 512}
    assert found == {("moegraft", 2): 2.5, ("kt-kernel", 1): 2.5, ("kt-kernel", 2): 1.5}  # of the rounds 1 to 3, and of the first


def test_tables_show_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    import readme_tables

    where = {"hardware": "a CPU", "commit": "c", "versions": "torch=1"}
    figures = {"p20_ms": "1", "p50_ms": "2", "p80_ms": "3", "failure": ""}
    rows = [
        {"provider": "moegraft", "weights": "int4", "threads": "2", "tokens": "1", **figures, **where},
        {"provider": "kt-kernel", "weights": "int4", "threads": "2", "tokens": "", "failure": "SIGILL", **where},
    ]
    monkeypatch.setattr(readme_tables, "read", lambda name: rows)
    assert "| int4 | 2.00 / SIGILL |" in readme_tables.kt_kernel()
    rows = [
        {"provider": "ours", "phase": "decode", "p20_tokens_s": "1", "p50_tokens_s": "2", "p80_tokens_s": "3", "failure": "", **where},
        {"provider": "theirs", "phase": "decode", "p20_tokens_s": "", "p50_tokens_s": "", "p80_tokens_s": "", "failure": "SIGILL", **where},
    ]
    table = readme_tables.cpu_model()
    assert "| ours | decode | 2 | 1 | 3 |" in table and "| theirs | decode | SIGILL | - | - |" in table
