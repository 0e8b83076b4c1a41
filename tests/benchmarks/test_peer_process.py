"""A peer that crashes has a row with its failure, and the other peers are measured."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
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


@pytest.mark.long
def test_pairs_keep_their_rows_and_name_the_crashed_provider() -> None:
    from cpu_model import measure
    from harness.whole_models import decode_rate, prompt_rate

    opened = {"ours-int4": (fake_peers.working,), "llama.cpp-int4": (fake_peers.dying_at, "decode after 512")}
    phases = {"prompt": (prompt_rate, 32), **{f"decode after {tokens}": (decode_rate, tokens, 4) for tokens in (8, 512, 2048)}}
    rows = measure(opened, 2, phases, SimpleNamespace(decode=lambda context: 1000, prompt=lambda tokens, experts: tokens * experts))
    failures = [("prompt", None), ("decode after 8", None), ("decode after 512", "llama.cpp-int4: SIGILL")]
    assert [(row["phase"], row.get("failure")) for row in rows] == failures
    prompt, decode, _ = rows
    assert prompt["of_limit"] and decode["of_limit"] == 0.38 and decode["ratio"] == 1.0


def test_a_layer_that_crashes_has_a_row_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    import cpu_experts

    monkeypatch.setattr(cpu_experts, "open_provider", fake_peers.layer_provider)
    monkeypatch.setattr(cpu_experts, "measured", fake_peers.measured_layer)
    runs = [("moegraft", 2), ("kt-kernel", 2), ("kt-kernel", 1)]
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
    about = {"model": "m", "layers": "6", "weights": "int4", "beside": "llama.cpp", "phase": "decode after 8", "busy_processes": ""}
    columns = ("ours_tokens_s", "peer_tokens_s", "ratio", "p20_ratio", "p80_ratio", "of_limit")
    rows = [
        {**about, **dict.fromkeys(columns, "2"), "failure": "", **where},
        {**about, **dict.fromkeys(columns, ""), "failure": "llama.cpp-int4: SIGILL", **where},
    ]
    table = readme_tables.generated("cpu_model")
    assert "| 6 of m | int4 | decode after 8 | llama.cpp | 2 | 2 | 2 |" in table and "| llama.cpp-int4: SIGILL | - | - |" in table
