"""The project's tests on a device: each outcome is a row of `gpu_day` as soon as it is known.

This module is also the plugin that pytest loads for it (`-p gpu_phases.tests`), in every worker. A test that hangs ends its worker, with
the stacks in the log, and so does one after which the device is unusable; pytest-xdist starts another worker, and the other tests run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from gpu_day import JUNIT, LOG, ROOT, STICKY, Case, Row, Rows, Session, SkippedError

ENVIRONMENT = "GPU_DAY_TESTS"  # for the plugin: its folder, what its rows begin with, the list of tests to leave out
TEST_S = 90.0  # of one test: the slowest ones compile kernels
WORKERS = 10  # each has a CUDA context, and the CPU kernels' threads
QUICK = ["tests/operators/offload/devices/test_graphs.py"]  # where the device is emulated


def tests(session: Session) -> list[Case]:
    """Those that run on the device; emulated, a few that show how it goes."""
    workers = 1 if session.emulated else max(1, min(WORKERS, (os.cpu_count() or 1) - 2))
    run = partial(run_tests, session, QUICK if session.emulated else ["tests", "-m", "gpu"], workers=workers, junit=True)
    return [Case(session.device, run, limit_s=session.left_s)]


def run_tests(session: Session, arguments: Sequence[str], *, workers: int, junit: bool = False) -> Iterator[Row]:
    """Run tests that did not pass in an earlier call, then yield their counts.

    Raises:
        SkippedError: there is no pytest.
        RuntimeError: a test failed, or pytest did.
    """
    if find_spec("pytest") is None:
        raise SkippedError("pytest is not installed")
    own = [row for row in session.rows.read() if row["phase"] == session.phase and "test" in row]
    passed = sorted(
        {row["test"] for row in own if row["outcome"] in ("passed", "skipped")}
        - {row["test"] for row in own if row["call"] == session.call}
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as left_out:
        json.dump(passed, left_out)
        left_out.flush()
        case = next(row["case"] for row in reversed(session.rows.read()) if row["phase"] == session.phase and row.get("state") == "begun")
        about = {"phase": session.phase, "case": case, "call": session.call}
        settings = json.dumps({"out": str(session.out), "about": about, "left_out": left_out.name})
        paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_phases.tests", "-p", "no:cacheprovider", "--tb=short", *arguments]
        command += [
            "--continue-on-collection-errors",
            *(["--junitxml", str(session.out / JUNIT), "-o", "junit_logging=no"] if junit else []),
        ]
        if find_spec("xdist") is not None:
            command += ["-n", str(workers), "--max-worker-restart", "200"]
        environment = {**os.environ, ENVIRONMENT: settings, "PYTHONPATH": os.pathsep.join(paths)}
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    found = [row for row in session.rows.read() if row["phase"] == session.phase and row["call"] == session.call and "test" in row]
    counts = Counter(str(row["outcome"]) for row in {row["test"]: row for row in found}.values())
    yield {"exit_code": code, "passed before": len(passed), **counts}
    bad = [row["test"] for row in found if row["outcome"] in ("failed", "crashed", "not collected")]
    if code not in (0, 5) or bad:
        raise RuntimeError(f"pytest ended with exit code {code}; {len(bad)} tests failed: {', '.join(bad[:10])}")


class Outcomes:
    """Writes a row for each test of the process that runs it, and ends a process that a test has spoilt."""

    def __init__(self, settings: dict[str, Any], *, runs_tests: bool, in_worker: bool) -> None:
        self._rows = Rows(Path(settings["out"]))
        self._about = settings["about"]
        self._left_out = set(json.loads(Path(settings["left_out"]).read_text(encoding="utf-8")))
        self._runs_tests = runs_tests
        self._in_worker = in_worker
        self._log: IO[str] = (Path(settings["out"]) / LOG).open("a", encoding="utf-8")

    def _append(self, test: str, outcome: str, seconds: float, reason: str = "") -> None:
        row = {**self._about, "test": test, "outcome": outcome, "seconds": round(seconds, 2)}
        self._rows.append({**row, **({"reason": reason[-1500:]} if reason else {})})

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        done = [item for item in items if item.nodeid in self._left_out]
        if done:
            items[:] = [item for item in items if item.nodeid not in self._left_out]
            config.hook.pytest_deselected(items=done)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self._in_worker:
            self._append(report.nodeid or "collection", "not collected", 0.0, str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._runs_tests:
            faulthandler.dump_traceback_later(TEST_S, exit=True, file=self._log)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._runs_tests:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: Any) -> None:
        reason = "" if report.passed else str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not self._runs_tests:
            if report.when == "???":  # xdist's report of a worker that ended
                self._append(report.nodeid, "crashed", 0.0, reason)
            return
        if report.when == "call" or not report.passed:
            self._append(report.nodeid, report.outcome, report.duration, reason)
        if report.failed and STICKY.search(reason):
            os._exit(3)


def pytest_configure(config: Any) -> None:
    settings = os.environ.get(ENVIRONMENT)
    if settings is None:
        return
    in_worker = hasattr(config, "workerinput")
    alone = config.getoption("numprocesses", None) in (None, 0)
    config.pluginmanager.register(Outcomes(json.loads(settings), runs_tests=in_worker or alone, in_worker=in_worker), "gpu day outcomes")
