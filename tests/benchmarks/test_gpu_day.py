"""`python benchmarks/gpu_day.py`: its calls on the emulated device, and days whose phases fail, crash, hang or write too much."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import zipfile
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, import_benchmark
from transformers import Qwen3MoeConfig

from moegraft.cpu_backend import ExpertsShape, GateSpec

SCRIPT = ROOT / "benchmarks" / "gpu_day.py"
# The script with phases that end in their own ways; `again` in the environment makes what failed succeed.
DAY = f"""\
import sys

sys.path[:0] = [{str(SCRIPT.parent)!r}, {{folder!r}}]
import gpu_day

gpu_day.SCRIPT = gpu_day.Path(__file__)
gpu_day.TABLE = gpu_day.SCRIPT.with_name("table.json")
gpu_day.KEPT_LOG = 2000
names = ("plain", "crash", "hang", "poison", "missing", "large", "fresh", "short", "loud")
gpu_day.PHASES = {{{{name: gpu_day.Phase(name, f"endings:{{{{name}}}}", 1, again=name == "fresh") for name in names}}}} | {{{{
    "build": gpu_day.PHASES["build"]
}}}}
gpu_day.CALLS = {{{{"first": ("fresh", "plain"), "second": ("fresh", "crash")}}}}
if __name__ == "__main__":
    sys.exit(gpu_day.main())
"""
ENDINGS = """\
import ctypes
import os
import time

from gpu_day import Case, SkippedError

AGAIN = "DAY_AGAIN" in os.environ


def plain(session):
    yield Case("two rows", lambda: [{"value": 1}, {"value": 2}])
    yield Case("fails", lambda: [{"value": 3}] if AGAIN else fails())
    yield Case("lacks", lacks)


def fails():
    yield {"value": 0}
    raise ValueError("no such number")


def lacks():
    raise SkippedError("the machine has no ruler")


def crash(session):
    yield Case("before", lambda: [{"value": 4}])
    yield Case("dies", dies)
    yield Case("after", lambda: [{"value": 5}])


def dies():
    yield {"value": 6}
    os.kill(os.getpid(), 11)


def hang(session):
    yield Case("before", lambda: [{"value": 7}])
    yield Case("hangs", hangs, limit_s=1.0)
    yield Case("after", lambda: [{"value": 8}])
    yield Case("hangs on", hangs, limit_s=600)
    yield Case("never", lambda: [{"value": 9}])


def hangs():
    yield {"value": 10}
    time.sleep(1000)


def short(session):
    yield Case("takes long", lambda: [{"value": 13}], needs_s=0 if AGAIN else 1000)
    yield Case("is quick", lambda: [{"value": 14}])


def poison(session):
    yield Case("spoils", spoils)
    yield Case("after", lambda: [{"value": 11, "process": os.getpid()}])


def spoils():
    yield {"process": os.getpid()}
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def missing(session):
    import no_such_module


def fresh(session):
    yield Case("installs", lambda: [{"value": 12}])
    yield Case("dies", dies)


def loud(session):
    yield Case("prints", lambda: [print("line", number) for number in range(10000)] and [])


def large(session):
    yield Case("files", lambda: files(session.out))
    yield Case("many rows", lambda: ({"text": "x" * 100_000} for _ in range(20)))


def files(out):
    for number in range(9):
        (out / f"file {number}").write_text("x")
    with (out / "trace.json.gz").open("wb") as file:
        file.truncate((16 << 20) + 1)
    return []
"""


@pytest.fixture
def day(tmp_path: Path) -> Any:
    (tmp_path / "endings.py").write_text(ENDINGS)
    script = tmp_path / "day.py"
    script.write_text(DAY.format(folder=str(tmp_path)))

    def run(out: str, *arguments: str, again: bool = False) -> tuple[int, list[dict[str, Any]], str]:
        """Exit code, rows and summary; folders are beside the script."""
        command = [sys.executable, str(script), *arguments, "--out", str(tmp_path / out), "--device", "emulated"]
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


@pytest.mark.long
def test_the_calls_on_the_emulated_device(tmp_path: Path) -> None:
    """One after another, each with the output of the one before: every case runs, or gives the reason why it does not."""
    gpu_day, before = import_benchmark("gpu_day"), None
    for call in gpu_day.CALLS:
        out = tmp_path / call
        command = [sys.executable, str(SCRIPT), call, "--out", str(out), "--device", "emulated", "--minutes", "8"]
        command += ["--resume", str(before)] if before else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        files, before = list(out.iterdir()), out
        assert len(files) <= 8 and max(path.stat().st_size for path in files) <= 16 << 20
        assert {path.name for path in files} <= set(gpu_day.FILES)
    rows = rows_of(out)
    for phase in dict.fromkeys(name for names in gpu_day.CALLS.values() for name in names):
        own = states(rows, phase)
        assert own.pop("") == "finished", phase
        assert own, phase
        assert set(own.values()) <= {"done", "skipped"}, (phase, own)
    assert all(row["reason"] for row in rows if row.get("state") == "skipped")
    captured = [row for row in rows if row["phase"] == "models" and row.get("mode") == "graph"]
    assert captured and all(row["replayed"] > 0 and row["same_tokens"] == row["of"] for row in captured)
    for phase in ("models", "qwen3"):  # nothing but captured steps is replayed, and stock transformers has none
        replayed = {row["system"]: row["steps_replayed"] for row in rows if row["phase"] == phase and "steps_replayed" in row}
        assert replayed["all, captured"] > 0 and replayed.get("stock", 0) == 0
    assert {row["side"] for row in rows if row["phase"] == "qwen3" and "us_a_token" in row} >= {"host"}
    assert any("acceptance_by_position" in row for row in rows if row["phase"] == "whole")
    if find_spec("triton") is not None:
        assert states(rows, "build")["constants"] == "done", "the fourth call has what the second one timed"
        assert set(json.loads((out / "tuned.json").read_text())) == {"emulated"}
        assert {row["path"] for row in rows if row.get("layout") == "sparse"} == {"pair", "dense"}


def test_large_models_have_random_experts_without_packing_all() -> None:
    """A few are packed and the others repeat their bytes, in memory that can be page-locked as that of other models."""
    made, shape = import_benchmark("harness.models"), ExpertsShape(8, 64, 32)
    few, packed = made.distinct_experts(shape, GateSpec(), "int4"), made.RandomExperts(shape, GateSpec(), "int4")
    assert packed.weights_ready and packed.buffer.flags.writeable
    for expert in range(8):
        assert (packed.unpack(expert, "down") == few.unpack(expert % 4, "down")).all()
    assert not (packed.unpack(0, "down") == packed.unpack(1, "down")).all()
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 8, "num_attention_heads": 2, "head_dim": 16}
    model = made.random_model(Qwen3MoeConfig(**sizes, num_hidden_layers=2, vocab_size=64), experts=False)
    shapes = {parameter.shape: parameter.untyped_storage().nbytes() for parameter in model.parameters() if parameter.dim() == 3}
    assert set(shapes) == {(8, 64, 32), (8, 32, 32)} and set(shapes.values()) == {4}


def test_a_case_that_fails_costs_itself_alone(day: Any) -> None:
    code, rows, summary = day("out", "plain")
    assert code == 1
    assert values(rows, "plain") == [1, 2, 0]
    assert states(rows, "plain") == {"two rows": "done", "fails": "failed", "lacks": "skipped", "": "finished"}
    assert "- plain, fails: failed: ValueError: no such number" in summary
    assert "- plain, lacks: skipped: the machine has no ruler" in summary


def test_a_phase_that_crashes_loses_nothing_and_goes_on(day: Any) -> None:
    code, rows, summary = day("out", "crash", "plain")
    assert code == 1
    assert values(rows, "crash") == [4, 6, 5] and values(rows, "plain") == [1, 2, 0]
    assert states(rows, "crash") == {"before": "done", "dies": "died", "after": "done", "": "finished"}
    assert "- crash, dies: died: the process ended by SIGSEGV" in summary


@pytest.mark.long
def test_what_hangs_is_ended_at_its_limit_and_leaves_its_stacks(day: Any, tmp_path: Path) -> None:
    start = time.monotonic()
    code, rows, summary = day("out", "hang", "--minutes", "0.25")
    assert time.monotonic() - start < 60
    assert code == 1 and values(rows, "hang") == [7, 10, 8, 10]
    ends = {"before": "done", "hangs": "timed out", "after": "done", "hangs on": "timed out", "never": "left", "": "timed out"}
    assert states(rows, "hang") == ends
    assert "in hangs" in (tmp_path / "out" / "log.txt").read_text()
    assert "- hang, never: left: no time was left for it" in summary


def test_a_case_that_needs_more_time_than_is_left_is_left(day: Any) -> None:
    code, rows, summary = day("out", "short")
    assert code == 1 and values(rows, "short") == [14] and states(rows, "short")["takes long"] == "left"
    assert "- short, takes long: left: no time was left for it" in summary
    code, rows, summary = day("out", "short", "--resume", "out", again=True)
    assert code == 0 and values(rows, "short") == [14, 13] and "## Left" not in summary


def test_a_call_consists_of_phases_and_a_pattern_chooses_cases(day: Any) -> None:
    _, rows, _ = day("out", "first", "--only", "^inst|two")
    assert values(rows, "fresh") == [12] and values(rows, "plain") == [1, 2] and not states(rows, "crash")
    _, rows, _ = day("next", "second", "--resume", "out", "--only", "before")
    assert values(rows, "plain") == [1, 2] and values(rows, "crash") == [4]


def test_after_a_device_error_that_stays_the_other_cases_have_a_new_process(day: Any) -> None:
    _, rows, _ = day("out", "poison")
    assert states(rows, "poison") == {"spoils": "failed", "after": "done", "": "finished"}
    assert len({row["process"] for row in rows if "process" in row}) == 2


def test_a_phase_that_cannot_begin_is_reported(day: Any) -> None:
    code, rows, summary = day("out", "missing", "plain")
    assert code == 1 and values(rows, "plain") == [1, 2, 0]
    assert states(rows, "missing") == {"": "died"} and "- missing: died: the process ended with exit code 1" in summary


def test_a_resumed_day_does_what_is_left(day: Any, tmp_path: Path) -> None:
    day("first", "plain", "crash")
    earlier = rows_of(tmp_path / "first")
    with (tmp_path / "first" / "rows.jsonl").open("a") as file:
        file.write('{"phase": "plain", "case": "torn')  # as if it had been killed while it wrote
    code, _, summary = day("next", "plain", "crash", "--resume", str(tmp_path / "first"), again=True)
    rows = rows_of(tmp_path / "next")
    assert rows[: len(earlier)] == earlier
    new = rows[len(earlier) :]
    assert values(new, "plain") == [3] and states(new, "plain") == {"fails": "done", "lacks": "skipped", "": "finished"}
    assert values(new, "crash") == [6] and states(new, "crash") == {"dies": "died", "": "finished"}
    assert code == 1 and "plain, fails" not in summary and "plain, lacks" in summary
    code, again, _ = day("next", "plain", "--resume", str(tmp_path / "next"))
    assert code == 0 and states(again[len(rows) :], "plain") == {"lacks": "skipped", "": "finished"}, "only what was skipped is tried"


def test_what_a_fresh_machine_lacks_is_done_again(day: Any) -> None:
    _, rows, _ = day("out", "fresh")
    assert values(rows, "fresh") == [12, 6] and states(rows, "fresh") == {"installs": "done", "dies": "died", "": "finished"}
    _, rows, _ = day("out", "fresh", "--resume", "out")
    assert values(rows, "fresh") == [12, 6, 12, 6]


def test_the_output_keeps_its_limits(day: Any, tmp_path: Path) -> None:
    _, rows, summary = day("out", "large")
    files = list((tmp_path / "out").iterdir())
    assert len(files) <= 8 and max(path.stat().st_size for path in files) <= 16 << 20
    assert {"rows.jsonl", "log.txt", "summary.md"} <= {path.name for path in files}
    assert not (tmp_path / "out" / "trace.json.gz").exists()
    assert "output, trace.json.gz: failed: left out: 16777217 bytes" in summary
    assert states(rows, "large") == {"files": "done", "many rows": "done", "": "finished"}


def test_rows_beyond_the_limit_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_day = import_benchmark("gpu_day")
    monkeypatch.setattr(gpu_day, "MOST_BYTES", 500)
    rows = gpu_day.Rows(tmp_path)
    for number in range(100):
        rows.append({"phase": "plain", "number": number})
    found = rows.read()
    assert [row["number"] for row in found] == list(range(len(found))) and 5 < len(found) < 100
    assert rows.path.stat().st_size <= 500


def test_a_long_output_keeps_its_beginning_and_its_end(day: Any, tmp_path: Path) -> None:
    day("out", "loud", "plain")
    text = (tmp_path / "out" / "log.txt").read_text()
    assert "--- plain: lacks\n--- loud: prints\nline 0\nline 1\n" in text and "bytes are left out" in text
    assert text.endswith("line 9998\nline 9999\n") and len(text) < 6000


def test_constants_of_an_earlier_call_reach_the_kernels(day: Any, tmp_path: Path) -> None:
    """With those that the checkout has, of other GPUs and of other weight types; what is timed again replaces the old."""
    day("first", "plain")
    (tmp_path / "first" / "tuned.json").write_text(json.dumps({"H200": {"int4": {"gate_warps": 8}}, "emulated": {"int4": {}}}))
    held = {"A100": {"int8": {"gate_warps": 2}}, "H200": {"int8": {"gate_units": 32}, "int4": {"gate_warps": 2, "gate_units": 32}}}
    (tmp_path / "table.json").write_text(json.dumps(held))
    day("next", "build", "--only", "constants", "--resume", str(tmp_path / "first"))
    found = json.loads((tmp_path / "table.json").read_text())
    assert found == {"A100": held["A100"], "H200": {"int8": {"gate_units": 32}, "int4": {"gate_warps": 8}}}
    read = import_module("moegraft.operators.kernels.launch").read_table
    assert read(tmp_path / "table.json") == found and read(tmp_path / "next" / "tuned.json")["H200"] == {"int4": {"gate_warps": 8}}


def test_a_wheel_of_the_same_sources_is_taken_from_an_earlier_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_day, out = import_benchmark("gpu_day"), tmp_path / "out"
    for folder in ("out", "dist", "cpu_backend/csrc"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "cpu_backend" / "csrc" / "job.cpp").write_text("int one;")
    monkeypatch.setattr(gpu_day, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_day, "IMPORTS", tmp_path / "build" / "src")
    fits = f"cp3{sys.version_info[1]}-cp3{sys.version_info[1]}-linux_{platform.machine()}.whl"
    wheel = out / f"moegraft-9.9-{gpu_day.build_number()}-{fits}"
    other = out / f"moegraft-9.9-{gpu_day.build_number()}-cp310-cp310-linux_{platform.machine()}.whl"
    other.touch()
    assert gpu_day.find_wheel(out) is None
    extension = f"_kernel.cpython-3{sys.version_info[1]}-{platform.machine()}-linux-gnu.so"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"moegraft/cpu_backend/{extension}", "compiled")
        file.writestr("moegraft/cpu_backend/__init__.py", "older than the checkout's")
        file.writestr("moegraft-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: moegraft\nVersion: 9.9\n")
    assert gpu_day.find_wheel(out) == wheel
    gpu_day.unpack(wheel)
    assert (tmp_path / "cpu_backend" / extension).read_text() == "compiled" and not (tmp_path / "cpu_backend" / "__init__.py").exists()
    (found,) = distributions(name="moegraft", path=[str(gpu_day.IMPORTS)])
    assert found.version == "9.9"
    (tmp_path / "cpu_backend" / "csrc" / "job.cpp").write_text("int two;")
    assert gpu_day.find_wheel(out) is None
    carried = tmp_path / "dist" / f"moegraft-9.9-{fits}"
    carried.touch()
    assert gpu_day.find_wheel(out) == carried


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plains"], "invalid choice: 'plains'"),
        (["plain", "--only", "("], "not a regular expression"),
        (["plain", "--resume", "nowhere"], "nowhere has no rows.jsonl: it is not the output of an earlier call"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, day: Any) -> None:
    code, rows, printed = day("out", *arguments)
    assert code == 2 and not rows and message in printed


def test_an_output_of_another_call_is_not_overwritten(day: Any) -> None:
    _, before, _ = day("out", "missing")
    code, after, _ = day("out", "plain")
    assert code == 2 and after == before


def test_results_are_the_rows_of_the_last_runs_that_are_done() -> None:
    build = [
        {"phase": "build", "python": "3.12.3"},
        {"phase": "build", "requirement": "triton>=3.6", "found": "3.6.0"},
        {"phase": "build", "requirement": "transformers>=5.17,<6", "found": "5.17.0"},
        {"phase": "build", "Model name": "Xeon", "CPU family": "6", "Model": "207", "CPU(s)": "16"},
        {"phase": "build", "torch": "2.11.0", "name": "H100", "multi_processor_count": 132},
    ]
    rows = [*build]
    for call, ms, state in (("first 1", 9.0, "done"), ("second 2", 7.0, "done"), ("third 3", 1.0, "failed")):
        about = {"phase": "qwen3", "case": "all", "call": call}
        rows += [{**about, "system": "all, captured", "p50_ms": ms}, {**about, "state": state}]
        rows.append({**about, "system": "all, captured", "name": "cudaLaunchKernel", "us_a_token": 30.0, "count": 4})
    found = [*import_benchmark("gpu_results").results(rows, ("qwen3",), "p50_ms", "1a2b3c4")]
    assert [(row["call"], row["p50_ms"], row["launch_us"], row["commit"]) for row in found] == [("second", 7.0, 7.5, "1a2b3c4")]
    assert found[0]["hardware"] == "Xeon, family 6 model 207, 16 cores + H100"
    assert found[0]["versions"] == "python=3.12.3 torch=2.11.0 triton=3.6.0 transformers=5.17.0"
