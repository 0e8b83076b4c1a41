"""`python benchmarks/gpu_day.py`: a short day on the emulated device, and days whose phases fail, crash, hang or write too much."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, import_benchmark

SCRIPT = ROOT / "benchmarks" / "gpu_day.py"
# The script with phases that end in their own ways; `again` in the environment makes what failed succeed.
DAY = f"""\
import sys

sys.path[:0] = [{str(SCRIPT.parent)!r}, {{folder!r}}]
import gpu_day

gpu_day.SCRIPT = gpu_day.Path(__file__)
gpu_day.PHASES = {{{{
    name: gpu_day.Phase(name, f"endings:{{{{name}}}}", share=1, again=name == "fresh")
    for name in ("plain", "crash", "hang", "poison", "missing", "large", "fresh")
}}}}
if __name__ == "__main__":
    sys.exit(gpu_day.main())
"""
ENDINGS = """\
import ctypes
import os
import time

from gpu_day import SkippedError

AGAIN = "DAY_AGAIN" in os.environ


def plain(session):
    session.case("two rows", lambda: [{"value": 1}, {"value": 2}])
    session.case("fails", lambda: [{"value": 3}] if AGAIN else fails())
    session.case("lacks", lacks)


def fails():
    yield {"value": 0}
    raise ValueError("no such number")


def lacks():
    raise SkippedError("the machine has no ruler")


def crash(session):
    session.case("before", lambda: [{"value": 4}])
    session.case("dies", dies)
    session.case("after", lambda: [{"value": 5}])


def dies():
    yield {"value": 6}
    os.kill(os.getpid(), 11)


def hang(session):
    session.case("before", lambda: [{"value": 7}])
    session.case("hangs", hangs, limit_s=1.0)
    session.case("after", lambda: [{"value": 8}])
    session.case("hangs on", hangs, limit_s=600)
    session.case("never", lambda: [{"value": 9}])


def hangs():
    yield {"value": 10}
    time.sleep(1000)


def poison(session):
    session.case("spoils", spoils)
    session.case("after", lambda: [{"value": 11, "process": os.getpid()}])


def spoils():
    yield {"process": os.getpid()}
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def missing(session):
    import no_such_module


def fresh(session):
    session.case("installs", lambda: [{"value": 12}])
    session.case("dies", dies)


def large(session):
    for number in range(9):
        (session.out / f"file {number}").write_text("x")
    with (session.out / "trace.json.gz").open("wb") as file:
        file.truncate((16 << 20) + 1)
    session.case("many rows", lambda: ({"text": "x" * 100_000} for _ in range(20)))
"""


@pytest.fixture
def day(tmp_path: Path) -> Any:
    (tmp_path / "endings.py").write_text(ENDINGS)
    script = tmp_path / "day.py"
    script.write_text(DAY.format(folder=str(tmp_path)))

    def run(out: str, *arguments: str, again: bool = False) -> tuple[int, list[dict[str, Any]], str]:
        """Exit code, rows and summary; folders are beside the script."""
        command = [sys.executable, str(script), "--out", str(tmp_path / out), "--device", "emulated", *arguments]
        environment = {**os.environ, **({"DAY_AGAIN": "1"} if again else {})}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False, timeout=120)
        folder = tmp_path / out
        summary = (folder / "summary.md").read_text() if (folder / "summary.md").exists() else done.stderr
        return done.returncode, rows_of(folder), summary

    return run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = import_benchmark("gpu_day").Rows(folder).read()
    return found


def values(rows: list[dict[str, Any]], phase: str) -> list[int]:
    return [row["value"] for row in rows if row["phase"] == phase and "value" in row]


def states(rows: list[dict[str, Any]], phase: str) -> dict[str, str]:
    """By case; under "" the phase's own."""
    found = [row for row in rows if row["phase"] == phase and "state" in row and row["state"] != "begun"]
    return {row.get("case", ""): row["state"] for row in found}


def test_a_day_on_the_emulated_device(long: bool, tmp_path: Path) -> None:
    """Every phase runs, or gives the reason why it does not."""
    if not long:
        pytest.skip("takes two minutes: pytest --long")
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), "--device", "emulated", "--minutes", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    rows, gpu_day = rows_of(tmp_path / "out"), import_benchmark("gpu_day")
    for phase in gpu_day.PHASES:
        own = states(rows, phase)
        assert own.pop("") == "finished" and own, phase
        assert set(own.values()) <= {"done", "skipped"}, (phase, own)
    assert all(row["reason"] for row in rows if row.get("state") == "skipped")
    assert {row["phase"] for row in rows if "state" not in row} >= {"build", "probes", "tests", "models", "kernels", "hybrid"}
    (captured,) = [row for row in rows if row["phase"] == "models" and row.get("case") == "demo" and row.get("mode") == "graph"]
    assert captured["replayed"] > 0 and captured["same_tokens"] == captured["of"]
    if find_spec("triton") is not None:
        assert {row["path"] for row in rows if row.get("layout") == "sparse"} == {"pair", "ordered", "union", "dense"}
    files = list((tmp_path / "out").iterdir())
    assert len(files) <= 8 and max(path.stat().st_size for path in files) <= 16 << 20
    assert {path.name for path in files} <= set(gpu_day.FILES)


def test_a_case_that_fails_costs_itself_alone(day: Any) -> None:
    code, rows, summary = day("out", "--phases", "plain")
    assert code == 1
    assert values(rows, "plain") == [1, 2, 0]
    assert states(rows, "plain") == {"two rows": "done", "fails": "failed", "lacks": "skipped", "": "finished"}
    assert "- plain, fails: failed: ValueError: no such number" in summary
    assert "- plain, lacks: skipped: the machine has no ruler" in summary


def test_a_phase_that_crashes_loses_nothing_and_goes_on(day: Any) -> None:
    code, rows, summary = day("out", "--phases", "crash", "plain")
    assert code == 1
    assert values(rows, "crash") == [4, 6, 5] and values(rows, "plain") == [1, 2, 0]
    assert states(rows, "crash") == {"before": "done", "dies": "died", "after": "done", "": "finished"}
    assert "- crash, dies: died: the process ended by SIGSEGV" in summary


def test_what_hangs_is_ended_at_its_limit_and_leaves_its_stacks(day: Any, tmp_path: Path) -> None:
    start = time.monotonic()
    code, rows, _ = day("out", "--phases", "hang", "--minutes", "0.25")
    assert time.monotonic() - start < 60
    assert code == 1 and values(rows, "hang") == [7, 10, 8, 10]
    assert states(rows, "hang") == {"before": "done", "hangs": "timed out", "after": "done", "hangs on": "timed out", "": "timed out"}
    assert "in hangs" in (tmp_path / "out" / "log.txt").read_text()


def test_after_a_device_error_that_stays_the_other_cases_have_a_new_process(day: Any) -> None:
    _, rows, _ = day("out", "--phases", "poison")
    assert states(rows, "poison") == {"spoils": "failed", "after": "done", "": "finished"}
    assert len({row["process"] for row in rows if "process" in row}) == 2


def test_a_phase_that_cannot_begin_is_reported(day: Any) -> None:
    code, rows, summary = day("out", "--phases", "missing", "plain")
    assert code == 1 and values(rows, "plain") == [1, 2, 0]
    assert states(rows, "missing") == {"": "died"} and "- missing: died: the process ended with exit code 1" in summary


def test_a_resumed_day_does_what_is_left(day: Any, tmp_path: Path) -> None:
    day("first", "--phases", "plain", "crash")
    earlier = rows_of(tmp_path / "first")
    with (tmp_path / "first" / "rows.jsonl").open("a") as file:
        file.write('{"phase": "plain", "case": "torn')  # as if it had been killed while it wrote
    code, _, summary = day("next", "--phases", "plain", "crash", "--resume", str(tmp_path / "first"), again=True)
    rows = rows_of(tmp_path / "next")
    assert rows[: len(earlier)] == earlier
    new = rows[len(earlier) :]
    assert values(new, "plain") == [3] and states(new, "plain") == {"fails": "done", "lacks": "skipped", "": "finished"}
    assert values(new, "crash") == [6] and states(new, "crash") == {"dies": "died", "": "finished"}
    assert code == 1 and "plain, fails" not in summary and "plain, lacks" in summary
    code, again, _ = day("next", "--phases", "plain", "--resume", str(tmp_path / "next"))
    assert code == 0 and states(again[len(rows) :], "plain") == {"lacks": "skipped", "": "finished"}, "only what was skipped is tried"


def test_what_a_fresh_machine_lacks_is_done_again(day: Any) -> None:
    _, rows, _ = day("out", "--phases", "fresh")
    assert values(rows, "fresh") == [12, 6] and states(rows, "fresh") == {"installs": "done", "dies": "died", "": "finished"}
    _, rows, _ = day("out", "--phases", "fresh", "--resume", "out")
    assert values(rows, "fresh") == [12, 6, 12, 6]


def test_the_output_keeps_its_limits(day: Any, tmp_path: Path) -> None:
    _, rows, summary = day("out", "--phases", "large")
    files = list((tmp_path / "out").iterdir())
    assert len(files) <= 8 and max(path.stat().st_size for path in files) <= 16 << 20
    assert {"rows.jsonl", "log.txt", "summary.md"} <= {path.name for path in files}
    assert not (tmp_path / "out" / "trace.json.gz").exists()
    assert "output, trace.json.gz: failed: left out: 16777217 bytes" in summary
    assert states(rows, "large") == {"many rows": "done", "": "finished"}


def test_rows_beyond_the_limit_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_day = import_benchmark("gpu_day")
    monkeypatch.setattr(gpu_day, "MOST_BYTES", 500)
    rows = gpu_day.Rows(tmp_path)
    for number in range(100):
        rows.append({"phase": "plain", "number": number})
    found = rows.read()
    assert [row["number"] for row in found] == list(range(len(found))) and 5 < len(found) < 100
    assert rows.path.stat().st_size <= 500


def test_a_long_output_keeps_its_beginning_and_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_day = import_benchmark("gpu_day")
    monkeypatch.setattr(gpu_day, "KEPT_LOG", 2000)
    program = "for number in range(10000): print('line', number)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        gpu_day.Log(tmp_path / "log.txt", process).close()
    text = (tmp_path / "log.txt").read_text()
    assert text.startswith("line 0\nline 1\n") and text.endswith("line 9998\nline 9999\n") and "bytes are left out" in text
    assert len(text) < 3000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--phases", "plains"], "invalid choice: 'plains'"),
        (["--resume", "nowhere"], "nowhere has no rows.jsonl: it is not the output of an earlier call"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, day: Any) -> None:
    code, rows, printed = day("out", *arguments)
    assert code == 2 and not rows and message in printed


def test_an_output_of_another_call_is_not_overwritten(day: Any) -> None:
    _, before, _ = day("out", "--phases", "missing")
    code, after, _ = day("out", "--phases", "plain")
    assert code == 2 and after == before
