"""What a GPU that is lent for minutes can prove: one command, every row kept as it is measured.

    python benchmarks/gpu_day.py --out DIR                          # all phases, in nine minutes
    python benchmarks/gpu_day.py --out NEXT --resume DIR            # only what an earlier call left
    python benchmarks/gpu_day.py --out DIR --phases probes kernels  # some of them
    python benchmarks/gpu_day.py --out DIR --device emulated        # anywhere, at small sizes: that the script itself works

A phase is a process with a time limit, and a row is appended and flushed when it is measured, so that no phase loses another's rows. A
phase consists of cases: one that fails is reported, and one that kills or hangs its process costs itself alone, as the phase is started
again after it. Nothing is imported here, or used by a phase without asking, that a bare machine may lack: what is missing is skipped, with
the reason. Exit code 0: every case is done or skipped; 1: something failed or is left; 2: the arguments are wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()  # phases are processes of it
ROOT = SCRIPT.parent.parent
ROWS, LOG, SUMMARY, JUNIT, TRACE, TUNED, SANITIZER = (
    "rows.jsonl", "log.txt", "summary.md", "junit.xml", "trace.json.gz", "tuned.json", "sanitizer.txt",
)  # fmt: skip
FILES = (ROWS, LOG, SUMMARY, JUNIT, TRACE, TUNED, SANITIZER)
MOST_FILES, MOST_BYTES = 8, 16 << 20
KEPT_LOG = 1 << 20  # bytes of a phase's first output; of what follows, the last quarter of that
TEXT = 4000  # characters of a value
RESERVE_S = 4.0  # for the summary
LEFT, POISONED = 75, 76  # exit codes of a phase: out of time; the device is unusable for the rest of this process
RESTARTS = 25
# After one of these every further call on the device fails, whatever it is.
STICKY = re.compile(
    r"illegal memory access|device-side assert|misaligned address|unspecified launch failure|illegal instruction|CUDA_ERROR"
)
Row = Mapping[str, object]


class SkippedError(Exception):
    """This machine lacks what a case needs; the message has the reason."""


class OutOfTimeError(Exception):
    """The phase's time is over before its next case."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the day.

    Attributes:
        run: `module:function`, called with a `Session` in a process of its own.
        share: of the time, against the other phases'; time that a phase leaves goes to those after it.
        least_s: granted even where the share is less.
        again: it also runs where an earlier call has done it: a fresh machine is bare.
    """

    about: str
    run: str
    share: float
    least_s: float = 0.0
    again: bool = False


PHASES = {
    "build": Phase("install without internet; tools, versions, processor, GPU", "gpu_day:build", 75, least_s=180, again=True),
    "probes": Phase("page-locking, link, latencies, streams, captures, allocator", "_gpu_probes:probes", 35),
    "tests": Phase("all tests that can run on the device", "_gpu_tests:tests", 140),
    "models": Phase("whole models: eager, captured and stock", "_gpu_models:models", 60),
    "kernels": Phase("one layer by batch and weight type; tuned constants", "_gpu_kernels:kernels", 100),
    "hybrid": Phase("the hybrid engine's systems, a profile, drafts", "_gpu_models:systems", 100),
    "amx": Phase("tests and benchmarks of the CPU kernels, where the host has AMX", "gpu_day:amx", 30),
    "sanitizer": Phase("memcheck and racecheck over slots and transfers", "gpu_day:sanitizer", 40),
}


class Rows:
    """The rows of a folder: one JSON object a line, whole or not at all, whoever writes and whoever is killed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ROWS

    def append(self, row: Row) -> None:
        clipped = {name: value[:TEXT] if isinstance(value, str) else value for name, value in row.items()}
        line = (json.dumps(clipped, default=str) + "\n").encode()
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line  # what a killed process left half written stays on its own line
            if size + len(line) <= MOST_BYTES:
                os.write(file, line)
        finally:
            os.close(file)

    def read(self) -> list[dict[str, Any]]:
        """Return every whole row."""
        found = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "phase" in row:
                found.append(row)
        return found


class Session:
    """A phase within its process: where it runs, how long it may, and the cases that are done.

    Args:
        until: `time.time()` at which its time is over.
        call: identifies this call of the script; what an earlier one has done stays done, and the rest is tried again.
    """

    def __init__(self, phase: str, out: Path, device: str, until: float, call: str) -> None:
        self.phase = phase
        self.out = out
        self.device = device
        self.until = until
        self.call = call
        self.rows = Rows(out)
        self.closed = closed_cases(self.rows.read(), phase, call)

    @property
    def emulated(self) -> bool:
        return self.device == "emulated"

    @property
    def left_s(self) -> float:
        return self.until - time.time()

    def case(self, name: str, run: Callable[[], Iterable[Row] | None], limit_s: float = 60.0) -> None:
        """Run a case unless it is done; its rows are kept one by one as `run` yields them.

        Past the limit the process ends, with every thread's stack in the log.

        Raises:
            OutOfTimeError: the phase's time is over.
        """
        if name in self.closed:
            return
        if self.left_s < 1:
            raise OutOfTimeError
        about = {"phase": self.phase, "case": name, "call": self.call}
        limit_s = min(limit_s, self.left_s + 1)
        self.rows.append({**about, "state": "begun", "until": time.time() + limit_s})
        print(f"--- {self.phase}: {name}", flush=True)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        start, state, reason = time.perf_counter(), "done", ""
        try:
            for row in run() or ():
                self.rows.append({**row, **about})
        except SkippedError as error:
            state, reason = "skipped", str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a case raises, the others run
            traceback.print_exc()
            state, reason = "failed", f"{type(error).__name__}: {error}"
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.closed.add(name)
        self.rows.append(
            {**about, "state": state, "seconds": round(time.perf_counter() - start, 2), **({"reason": reason} if reason else {})}
        )
        if state == "failed":
            if STICKY.search(reason):
                os._exit(POISONED)
            gc.collect()
            if "torch" in sys.modules and not self.emulated:
                sys.modules["torch"].cuda.empty_cache()


def closed_cases(rows: Iterable[Row], phase: str, call: str) -> set[str]:
    """Return the cases not to be run (again): those that ended in this call, and for most phases those done in another."""
    own = [row for row in rows if row["phase"] == phase and row.get("case") and row.get("state", "begun") != "begun"]
    kept = not PHASES[phase].again  # what was skipped is tried again: this machine may have what that one lacked
    return {str(row["case"]) for row in own if row.get("call") == call or (kept and row["state"] == "done")}


def run_phase(name: str, out: Path, device: str, until: float, call: str) -> int:
    """Run a phase in this process and return its exit code."""
    module, _, function = PHASES[name].run.partition(":")
    try:
        getattr(importlib.import_module(module), function)(Session(name, out, device, until, call))
    except OutOfTimeError:
        return LEFT
    return 0


class Log:
    """The output of a process: its beginning is written at once, of a long rest the end follows."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self._thread = threading.Thread(target=self._copy, args=(path, process), daemon=True)
        self._thread.start()

    def _copy(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "its output is piped"
        kept, last, last_bytes, left_out = 0, deque[bytes](), 0, 0
        with path.open("ab", buffering=0) as file:
            for line in process.stdout:
                if kept + len(line) <= KEPT_LOG:
                    kept += file.write(line) or 0
                    continue
                last.append(line[-KEPT_LOG // 8 :])
                last_bytes += len(last[-1])
                while last_bytes > KEPT_LOG // 4:
                    left_out += len(last[0])
                    last_bytes -= len(last.popleft())
            if left_out:
                file.write(b"... %d bytes are left out ...\n" % left_out)
            for line in last:
                file.write(line)

    def close(self) -> None:
        self._thread.join(5)


def supervise(name: str, out: Path, device: str, limit_s: float, call: str, environment: Mapping[str, str]) -> None:
    """Run a phase to its end: in one process, or in several where cases kill it or poison the device."""
    rows, start = Rows(out), time.time()
    until = start + limit_s
    for _ in range(RESTARTS):
        command = [sys.executable, str(SCRIPT), "--run", name, "--out", str(out)]
        command += ["--device", device, "--until", str(until), "--call", call]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
        log = Log(out / LOG, process)
        try:
            code = process.wait(max(1.0, until + 2 - time.time()))
            state = {0: "finished", LEFT: "left"}.get(code, "died")
        except subprocess.TimeoutExpired:
            code, state = -signal.SIGKILL, "timed out"
        finally:  # also what it started, and also when this process is told to end
            end_group(process)
            log.close()
        opened = open_case(rows.read(), name, call)
        if opened is not None and state != "finished":
            late = state == "timed out" or time.time() > float(opened["until"]) - 0.5
            ended = (
                {"state": "timed out", "reason": f"its time was over; its stacks are in {LOG}"}
                if late
                else {"state": "died", "reason": how_it_ended(code)}
            )
            rows.append({"phase": name, "case": opened["case"], "call": call, **ended})
        if time.time() > until - 1:
            state = "timed out" if state == "died" else state
            break
        if state != "died" or (opened is None and code != POISONED):
            break
    reason = {"reason": how_it_ended(code)} if state == "died" else {}
    rows.append(
        {"phase": name, "call": call, "state": state, "seconds": round(time.time() - start, 1), "limit_s": round(limit_s), **reason}
    )


def end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def open_case(rows: Iterable[dict[str, Any]], phase: str, call: str) -> dict[str, Any] | None:
    """Return the row of the case that was begun and has not ended."""
    found = None
    for row in rows:
        if row["phase"] == phase and row.get("call") == call and row.get("case") and "state" in row:
            found = row if row["state"] == "begun" else None
    return found


def how_it_ended(code: int) -> str:
    if code == POISONED:
        return "the device reported an error after which nothing works in that process"
    return f"the process ended by {signal.Signals(-code).name}" if code < 0 else f"the process ended with exit code {code}"


def output_of(command: Sequence[str], timeout_s: float = 20.0) -> str:
    """Return what a tool prints.

    Raises:
        SkippedError: it is not installed, or failed.
    """
    if shutil.which(command[0]) is None:
        raise SkippedError(f"{command[0]} is not installed")
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if run.returncode:
        raise SkippedError(f"{command[0]} failed with exit code {run.returncode}: {(run.stderr or run.stdout).strip()[:300]}")
    return run.stdout.strip()


def build(session: Session) -> None:
    """What the machine has, and moegraft on it."""
    session.case("tools", tools)
    session.case("requirements", requirements)
    session.case("processor", processor)
    session.case("gpu", partial(gpu, session))
    session.case("install", partial(install, session), limit_s=400)
    session.case("import", partial(importable, session), limit_s=90)


def tools() -> Iterator[Row]:
    yield {"python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine(), "user": os.getuid()}
    for tool in ("g++", "nvcc", "ninja", "compute-sanitizer", "ncu", "cuobjdump", "git"):
        try:
            found = output_of([tool, "--version"])
            yield {
                "tool": tool,
                "path": shutil.which(tool),
                "version": next((line for line in found.splitlines() if re.search(r"\d", line)), ""),
            }
        except SkippedError as missing:
            yield {"tool": tool, "missing": str(missing)}
    header = Path(sys.base_prefix) / f"include/python{sys.version_info[0]}.{sys.version_info[1]}/Python.h"
    yield {"tool": "Python.h", "path": str(header), **({} if header.exists() else {"missing": "no such file: extensions cannot be built"})}


def requirements() -> Iterator[Row]:
    """Each requirement of pyproject.toml, and what is installed of it."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = {"build": about["build-system"]["requires"], "run": about["project"]["dependencies"]}
    wanted["test"] = about["project"]["optional-dependencies"]["test"]
    for kind, names in wanted.items():
        for requirement in names:
            name = re.split(r"[\s;<>=!\[]", requirement, maxsplit=1)[0]
            try:
                found = {"found": importlib.metadata.version(name)}
            except importlib.metadata.PackageNotFoundError:
                found = {"missing": "not installed"}
            yield {"for": kind, "requirement": requirement, **found}


def processor() -> Iterator[Row]:
    text = output_of(["lscpu"])
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    flags = fields.pop("Flags", "").split()
    wide = [flag for flag in flags if flag.startswith(("amx", "avx512", "avx_vnni", "avx2"))]
    memory = next(
        (line.split(":")[1].strip() for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")), ""
    )
    yield {
        **{name.strip(): value.strip() for name, value in fields.items()},
        "memory": memory,
        "amx": "amx_tile" in flags,
        "flags": " ".join(wide),
    }


def gpu(session: Session) -> Iterator[Row]:
    if session.emulated:
        raise SkippedError("the device is emulated")
    names = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,temperature.gpu"
    names += ",pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    for line in output_of(["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]).splitlines():
        yield dict(zip(names.split(","), (cell.strip() for cell in line.split(",")), strict=False))


def install(session: Session) -> Iterator[Row]:
    """By pip, and where that fails the extension alone and links to the packages."""
    found = subprocess.run(
        [sys.executable, "-c", "import moegraft.cpu_backend as b; print(b.__file__)"], capture_output=True, text=True, cwd="/"
    )
    if found.returncode == 0:
        raise SkippedError(f"moegraft is installed: {found.stdout.strip()}")
    pip = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "-q", "-e", str(ROOT)]
    start = time.perf_counter()
    run = subprocess.run(pip, capture_output=True, text=True, check=False)
    yield {
        "way": "pip",
        "exit_code": run.returncode,
        "seconds": round(time.perf_counter() - start, 1),
        "output": (run.stdout + run.stderr)[-TEXT:],
    }
    if run.returncode == 0:
        return
    start, linked = time.perf_counter(), ROOT / "build/src/moegraft"
    for step in ("build_ext --inplace", "egg_info"):  # PyTorch's versions of packages are looked up in their metadata
        run = subprocess.run([sys.executable, "setup.py", "-q", *step.split()], cwd=ROOT, capture_output=True, text=True, check=False)
        yield {"way": f"setup.py {step}", "exit_code": run.returncode, "output": (run.stdout + run.stderr)[-TEXT:]}
        if run.returncode:
            raise RuntimeError(f"setup.py {step} failed: {run.stderr.strip()[-400:]}")
    linked.mkdir(parents=True, exist_ok=True)
    for folder in ("injection", "operators", "cpu_backend", "rules"):
        if not (linked / folder).exists():
            (linked / folder).symlink_to(ROOT / folder)
    yield {"way": "links", "seconds": round(time.perf_counter() - start, 1), "path": f"{linked.parent}{os.pathsep}{ROOT}"}


def importable(session: Session) -> Iterator[Row]:
    paths = [str(row["path"]) for row in session.rows.read() if row.get("way") == "links" and row["call"] == session.call]
    sys.path[:0] = [path for each in paths for path in each.split(os.pathsep)]
    import torch

    from moegraft.cpu_backend import Runtime

    yield {"isa": Runtime(1).isa, "isas": list(Runtime.available_isas()), "threads": Runtime().threads}
    seen: dict[str, object] = {"torch": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
    for package in ("transformers", "triton", "numpy", "pytest", "pytest-xdist", "hypothesis"):
        try:
            seen[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            seen[package] = "missing"
    if torch.cuda.is_available():
        own = torch.cuda.get_device_properties(0)
        seen |= {"gpu": own.name, "memory": own.total_memory, "multiprocessors": own.multi_processor_count, "l2": own.L2_cache_size}
        seen |= {"capability": f"{own.major}.{own.minor}", "registers": own.regs_per_multiprocessor}
    yield seen
    if not session.emulated and not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU: the phases that follow skip what needs one; --device emulated runs without")


def has_amx() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and "amx_tile" in info.read_text()


def amx(session: Session) -> None:
    """The CPU kernels' tests on this host, and one layer's times."""
    from _gpu_tests import run_tests

    def layer() -> Iterator[Row]:
        command = [
            sys.executable,
            str(ROOT / "benchmarks/cpu_experts.py"),
            "--no-write",
            "--rounds",
            "0.2",
            "--tokens",
            "1",
            "16",
            "64",
            "512",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None, "its output is piped"
            for line in process.stdout:
                yield {"line": line.strip()}
        if process.returncode:
            raise RuntimeError(f"cpu_experts.py ended with exit code {process.returncode}")

    def needs_amx() -> None:
        if not has_amx():
            raise SkippedError("this host has no AMX")

    def tests() -> Iterator[Row]:
        needs_amx()
        yield from run_tests(session, ["tests/cpu_backend"], workers=min(8, os.cpu_count() or 1))

    def benchmark() -> Iterator[Row]:
        needs_amx()
        yield from layer()

    session.case("layer", benchmark, limit_s=session.left_s / 2)
    session.case("tests", tests, limit_s=session.left_s)


def sanitizer(session: Session) -> None:
    """compute-sanitizer over the tests that exercise slots and transfers, one tool at a time."""
    tests = ["tests/operators/kernels/test_slots.py", "tests/operators/offload/test_queue.py", "tests/operators/offload/test_step_graph.py"]

    def check(tool: str) -> Iterator[Row]:
        if session.emulated:
            raise SkippedError("the device is emulated")
        if shutil.which("compute-sanitizer") is None:
            raise SkippedError("compute-sanitizer is not installed")
        head = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--print-limit", "20", "--error-exitcode", "99"]
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", *tests]
        with (session.out / SANITIZER).open("a+b") as log:
            first = log.seek(0, os.SEEK_END)
            code = subprocess.run([*head, *pytest], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
            log.seek(first)
            printed = log.read().decode(errors="replace")
        found = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", printed)
        yield {"tool": tool, "exit_code": code, "errors": sum(int(one or other) for one, other in found), "end": printed[-600:]}
        if code:
            raise RuntimeError(f"{tool} ended with exit code {code}; see {SANITIZER}")

    for tool in ("memcheck", "racecheck"):
        session.case(tool, partial(check, tool), limit_s=session.left_s / (2 if tool == "memcheck" else 1))


def day(out: Path, device: str, minutes: float, names: Sequence[str], call: str) -> None:
    """Run phases one after another, each for its share of what is left, with a summary after each."""
    end = time.time() + 60 * minutes - RESERVE_S
    rows = Rows(out)
    for number, name in enumerate(names):
        left_s = end - time.time()
        share = PHASES[name].share / sum(PHASES[each].share for each in names[number:])
        limit_s = min(left_s, max(share * left_s, PHASES[name].least_s))
        if complete(rows.read(), name, ("done",)) and not PHASES[name].again:
            print(f"{name}: done in an earlier call", flush=True)
            continue
        if limit_s < 2:
            rows.append({"phase": name, "call": call, "state": "left", "reason": "no time was left for it"})
        else:
            print(f"{name}: {PHASES[name].about}; at most {limit_s:.0f} s", flush=True)
            supervise(name, out, device, limit_s, call, environment_of(rows.read(), device, call))
        keep_limits(out)
        (out / SUMMARY).write_text(summary(rows.read(), names), encoding="utf-8")


def environment_of(rows: Iterable[Row], device: str, call: str) -> dict[str, str]:
    """Return the environment of a phase: with the way to moegraft where it could not be installed."""
    linked = [str(row["path"]) for row in rows if row.get("way") == "links" and row.get("call") == call]
    paths = [*linked, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if paths:
        own["PYTHONPATH"] = os.pathsep.join(paths)
    if device == "emulated":
        own["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined
        own["OMP_NUM_THREADS"] = "1"  # PyTorch's, at small sizes
    else:
        own.pop("TRITON_INTERPRET", None)
    return own


def states(rows: Iterable[Row], name: str) -> dict[str, Row]:
    """Return the last state of each case of a phase, and under "" that of the phase."""
    return {str(row.get("case", "")): row for row in rows if row["phase"] == name and row.get("state", "begun") != "begun"}


def complete(rows: Iterable[Row], name: str, enough: Sequence[str] = ("done", "skipped")) -> bool:
    """Whether a phase ran to its end and every case of it is in one of the states `enough`."""
    last = states(rows, name)
    return last.pop("", {}).get("state") == "finished" and all(row["state"] in enough for row in last.values())


def keep_limits(out: Path) -> None:
    """Remove what would make the output more, or larger, than may be brought back; a row names it."""
    found = sorted((path for path in out.iterdir()), key=lambda path: (path.name not in FILES, path.name))
    for number, path in enumerate(found):
        size = path.stat().st_size
        reason = "files" if number >= MOST_FILES or not path.is_file() else "bytes" if size > MOST_BYTES else None
        if reason is not None:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            limit = f"more than {MOST_FILES} files" if reason == "files" else f"{size} bytes, more than {MOST_BYTES}"
            Rows(out).append({"phase": "output", "case": path.name, "state": "failed", "reason": f"left out: {limit}"})


def summary(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return the state of each phase, what failed and what was skipped with the reasons, and every measured row, for people."""
    lines = ["# A day with a GPU", "", "| phase | state | s | done | skipped | failed |", "| --- | --- | --- | --- | --- | --- |"]
    shown = [name for name in (*PHASES, "output") if name in names or any(row["phase"] == name for row in rows)]
    for name in shown:
        last = states(rows, name)
        own = last.pop("", {})
        counts = [
            sum(row["state"] in kinds for row in last.values()) for kinds in (("done",), ("skipped",), ("failed", "died", "timed out"))
        ]
        lines.append(f"| {name} | {own.get('state', '')} | {own.get('seconds', '')} | {' | '.join(map(str, counts))} |")
    for title, kinds in (("Failed", ("failed", "died", "timed out", "left")), ("Skipped", ("skipped",))):
        found = [(name, case, row) for name in shown for case, row in states(rows, name).items() if row["state"] in kinds]
        lines += ["", f"## {title}", ""] if found else []
        for name, case, row in found:
            reason = " ".join(str(row.get("reason", "")).split())[:400]
            lines.append(f"- {name}{', ' if case else ''}{case}: {row['state']}{': ' if reason else ''}{reason}")
    for name in shown:
        measured = [row for row in rows if row["phase"] == name and "state" not in row and row.get("outcome") not in ("passed", "skipped")]
        lines += ["", f"## {name}", ""] if measured else []
        for row in measured:
            values = ", ".join(f"{key} {str(value)[:200]}" for key, value in row.items() if key not in ("phase", "case", "call"))
            lines.append(f"- {row.get('case', '')}: {' '.join(values.split())}")
    text = "\n".join(lines) + "\n"
    return text if len(text.encode()) < MOST_BYTES else text.encode()[: MOST_BYTES // 2].decode(errors="ignore")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="an empty folder, or that of --resume")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it; phases share them")
    parser.add_argument("--phases", nargs="+", choices=list(PHASES), default=list(PHASES), metavar="PHASE", help=f"of {', '.join(PHASES)}")
    parser.add_argument("--resume", type=Path, help="the output of an earlier call: its rows are kept, and what they have is not run again")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--run", choices=list(PHASES), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--call", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    out: Path = given.out.resolve()
    if given.run is not None:
        import gpu_day  # as the phases' modules import it: the same exceptions

        return gpu_day.run_phase(given.run, out, given.device, given.until, given.call)
    out.mkdir(parents=True, exist_ok=True)
    resumed = given.resume.resolve() if given.resume else None
    if resumed != out and any(out.iterdir()):
        parser.error(f"{out} is not empty; --resume {given.out} continues what it has")
    if resumed is not None and not (resumed / ROWS).is_file():
        parser.error(f"{resumed} has no {ROWS}: it is not the output of an earlier call")
    if resumed is not None and resumed != out:
        for name in (name for name in FILES if (resumed / name).is_file()):
            (out / name).write_bytes((resumed / name).read_bytes())
    names = [name for name in PHASES if name in given.phases]
    call = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f" {os.getpid()}"
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        day(out, given.device, given.minutes, names, call)
    finally:
        found = Rows(out).read()
        keep_limits(out)
        text = summary(found, names)
        (out / SUMMARY).write_text(text, encoding="utf-8")
        print(text[:6000])
    return 0 if all(complete(found, name) for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
