"""What a GPU that is lent for minutes can prove, in four calls of nine minutes: every row is kept as it is measured.

    python benchmarks/gpu_day.py A --out day1                   # build; what the device and its link do; whole models
    python benchmarks/gpu_day.py B --out day2 --resume day1     # kernels, and the launch constants that win
    python benchmarks/gpu_day.py C --out day3 --resume day2     # 48 layers of Qwen3-30B-A3B's shapes, beside stock transformers
    python benchmarks/gpu_day.py D --out day4 --resume day3     # other shapes by prompt length, drafts, sparsity, tests
    python benchmarks/gpu_day.py kernels tests --out day        # phases by name, which share the time
    python benchmarks/gpu_day.py A --out try --device emulated  # anywhere, at small sizes: that the script itself works

Each call may have another, bare machine: the output of the call before has all that it needs, rows, launch constants and a wheel. A phase
is a process with a budget of seconds, and what it leaves goes to the later ones; its cases are listed before the first begins, so that
those without time are reported. A case that fails is reported, and one that kills or hangs its process costs itself alone, as the phase is
started again after it. Nothing is imported here, or used by a phase without asking, that a bare machine may lack: what is missing is
skipped, with the reason. Exit code 0: every case is done or skipped; 1: something failed or is left; 2: the arguments are wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__).resolve()  # phases are processes of it
ROOT = SCRIPT.parent.parent
ROWS, LOG, SUMMARY, JUNIT, TRACE, TUNED, SANITIZER = (
    "rows.jsonl", "log.txt", "summary.md", "junit.xml", "trace.json.gz", "tuned.json", "sanitizer.txt",
)  # fmt: skip
FILES = (ROWS, LOG, SUMMARY, JUNIT, TRACE, TUNED, SANITIZER, "moegraft-*.whl")
TABLE = ROOT / "operators/kernels" / TUNED  # from which the kernels take launch constants
IMPORTS = ROOT / "build/src"  # where a wheel is unpacked, beside links to the checkout's packages
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


class Case(NamedTuple):
    """A part of a phase: `run` yields its rows.

    Attributes:
        limit_s: past it the process ends, with every thread's stack in the log.
        needs_s: of the phase's time; with less it is not begun.
    """

    name: str
    run: Callable[[], Iterable[Row] | None]
    limit_s: float = 60.0
    needs_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a call.

    Attributes:
        run: `module:function`, called with a `Session` in a process of its own; returns the phase's cases.
        budget_s: of the time; where a call has more or less than its phases' budgets, each has its share.
        again: it also runs where an earlier call has done it: a fresh machine is bare.
    """

    about: str
    run: str
    budget_s: float
    again: bool = False


PHASES = {
    "build": Phase("a wheel, without internet; tools, versions, processor, GPU", "gpu_day:build", 180, again=True),
    "probes": Phase("page-locking, link, latencies, streams, captures, allocator", "gpu_phases.probes:probes", 60),
    "models": Phase("whole models: eager, captured and stock; a minute of 48 layers, captured", "gpu_phases.models:models", 300),
    "kernels": Phase("one layer by batch and weight type; tuned constants", "gpu_phases.kernels:kernels", 360),
    "qwen3": Phase("systems on 48 layers of Qwen3-30B-A3B's shapes, stock, a profile", "gpu_phases.models:compared", 360),
    "shapes": Phase("systems on DeepSeek-V2-Lite's and Mixtral's shapes, by prompt", "gpu_phases.models:compared", 180),
    "whole": Phase("drafts and sparsity on whole models", "gpu_phases.models:whole", 120),
    "tests": Phase("all tests that can run on the device", "gpu_phases.tests:tests", 60),
    "amx": Phase("tests and benchmarks of the CPU kernels, where the host has AMX", "gpu_day:amx", 60),
    "sanitizer": Phase("memcheck and racecheck over slots and transfers", "gpu_day:sanitizer", 120),
}
# `amx` and `sanitizer` run where they are named.
CALLS = {
    "A": ("build", "probes", "models"),
    "B": ("build", "kernels"),
    "C": ("build", "qwen3"),
    "D": ("build", "shapes", "whole", "tests"),
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
        only: a regular expression that names of cases match.
    """

    def __init__(self, phase: str, out: Path, device: str, until: float, call: str, only: str = "") -> None:
        self.phase = phase
        self.out = out
        self.device = device
        self.until = until
        self.call = call
        self.only = only
        self.rows = Rows(out)

    @property
    def emulated(self) -> bool:
        return self.device == "emulated"

    @property
    def left_s(self) -> float:
        return self.until - time.time()

    @property
    def gpu(self) -> str:
        """The device as rule files name it.

        Raises:
            SkippedError: there is none.
        """
        from moegraft.operators.offload.devices.cuda import why_no_cuda

        if not self.emulated and why_no_cuda() is not None:
            raise SkippedError(str(why_no_cuda()))
        if self.emulated:
            import support.emulated  # noqa: F401  which rules name
        return "emulated" if self.emulated else "cuda:0"

    def run(self, cases: Iterable[Case]) -> bool:
        """Run cases that are not done, and return whether there was time for all."""
        closed = closed_cases(self.rows.read(), self.phase, self.call)
        cases = [case for case in cases if case.name not in closed and re.search(self.only, case.name)]
        self.rows.append({"phase": self.phase, "call": self.call, "state": "planned", "cases": [case.name for case in cases]})
        begun = [self.left_s >= case.needs_s and self._run(case) for case in cases]
        return all(begun)

    def _run(self, case: Case) -> bool:
        about = {"phase": self.phase, "case": case.name, "call": self.call}
        limit_s = min(case.limit_s, self.left_s + 1)
        self.rows.append({**about, "state": "begun", "until": time.time() + limit_s})
        print(f"--- {self.phase}: {case.name}", flush=True)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        start, state, reason = time.perf_counter(), "done", ""
        try:
            for row in case.run() or ():
                self.rows.append({**row, **about})
        except SkippedError as error:
            state, reason = "skipped", str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a case raises, the others run
            traceback.print_exc()
            state, reason = "failed", f"{type(error).__name__}: {error}"
        finally:
            faulthandler.cancel_dump_traceback_later()
        took = {"seconds": round(time.perf_counter() - start, 2), **({"reason": reason} if reason else {})}
        self.rows.append({**about, "state": state, **took})
        if state == "failed" and STICKY.search(reason):
            os._exit(POISONED)
        gc.collect()
        if "torch" in sys.modules and not self.emulated:
            sys.modules["torch"].cuda.empty_cache()
        return True


def ended(row: Row) -> bool:
    """Whether a row is the end of a case or of a phase."""
    return row.get("state", "begun") not in ("begun", "planned")


def closed_cases(rows: Iterable[Row], phase: str, call: str) -> set[str]:
    """Return the cases not to be run (again): those that ended in this call, and for most phases those done in another."""
    own = [row for row in rows if row["phase"] == phase and row.get("case") and ended(row)]
    kept = not PHASES[phase].again  # what was skipped is tried again: this machine may have what that one lacked
    return {str(row["case"]) for row in own if row.get("call") == call or (kept and row["state"] == "done")}


def run_phase(session: Session) -> int:
    """Run a phase in this process and return its exit code."""
    module, _, function = PHASES[session.phase].run.partition(":")
    return 0 if session.run(getattr(importlib.import_module(module), function)(session)) else LEFT


def shorten(log: Path, start: int) -> None:
    """Keep the beginning and the end of what is in a log from `start` on."""
    with log.open("r+b") as file:
        left_out = file.seek(0, os.SEEK_END) - start - KEPT_LOG - KEPT_LOG // 4
        if left_out > 0:
            file.seek(-KEPT_LOG // 4, os.SEEK_END)
            end = file.read()
            file.seek(start + KEPT_LOG)
            file.write(b"\n... %d bytes are left out ...\n" % left_out + end)
            file.truncate()


def supervise(session: Session, limit_s: float, environment: Mapping[str, str]) -> None:
    """Run a phase to its end: in one process, or in several where cases kill it or poison the device."""
    name, out, call, rows, until = session.phase, session.out, session.call, session.rows, session.until
    for _ in range(RESTARTS):
        command = [sys.executable, str(SCRIPT), name, "--out", str(out), f"--only={session.only}"]
        command += ["--device", session.device, "--until", str(until), "--call", call]
        with (out / LOG).open("ab") as log:
            begin, pipes = log.tell(), dict[str, Any](stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
        try:
            code = process.wait(max(1.0, until + 2 - time.time()))
            state = {0: "finished", LEFT: "left"}.get(code, "died")
        except subprocess.TimeoutExpired:
            code, state = -signal.SIGKILL, "timed out"
        finally:  # also what it started, and also when this process is told to end
            end_group(process)
            shorten(out / LOG, begin)
        opened = open_case(rows.read(), name, call)
        if opened is not None and state != "finished":
            late = state == "timed out" or time.time() > float(opened["until"]) - 0.5
            reason = f"its time was over; its stacks are in {LOG}" if late else how_it_ended(code)
            about = {"state": "timed out" if late else "died", "reason": reason}
            rows.append({"phase": name, "case": opened["case"], "call": call, **about})
        if time.time() > until - 1:
            state = "timed out" if state == "died" else state
            break
        if state != "died" or (opened is None and code != POISONED):
            break
    found = rows.read()
    planned = [row["cases"] for row in found if row["phase"] == name and row.get("call") == call and row.get("state") == "planned"]
    closed = closed_cases(found, name, call)
    for case in (case for case in (planned or [[]])[0] if case not in closed):
        reason = "no time was left for it" if time.time() > until - 2 or state == "left" else "the phase ended before it"
        rows.append({"phase": name, "case": case, "call": call, "state": "left", "reason": reason})
    took = {"seconds": round(time.time() - until + limit_s, 1), "limit_s": round(limit_s)}
    rows.append({"phase": name, "call": call, "state": state, **took, **({"reason": how_it_ended(code)} if state == "died" else {})})


def end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def open_case(rows: Iterable[dict[str, Any]], phase: str, call: str) -> dict[str, Any] | None:
    """Return the row of the case that was begun and has not ended."""
    own = [row for row in rows if row["phase"] == phase and row.get("call") == call and row.get("case") and "state" in row]
    return own[-1] if own and own[-1]["state"] == "begun" else None


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


def build(session: Session) -> list[Case]:
    """What the machine has, and moegraft on it."""
    return [
        *(Case(run.__name__, run) for run in (tools, requirements, processor)),
        *(Case(run.__name__, partial(run, session), limit_s=400) for run in (gpu, constants, install, importable)),
    ]


def tools() -> Iterator[Row]:
    yield {"python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine(), "user": os.getuid()}
    for tool in ("g++", "nvcc", "ninja", "compute-sanitizer", "ncu", "cuobjdump", "git"):
        try:
            found = output_of([tool, "--version"])
            version = next((line for line in found.splitlines() if re.search(r"\d", line)), "")
            yield {"tool": tool, "path": shutil.which(tool), "version": version}
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
    memory = re.search(r"MemTotal:\s*(.*)", Path("/proc/meminfo").read_text())
    about = {"memory": memory[1] if memory else "", "amx": "amx_tile" in flags, "flags": " ".join(wide)}
    yield {**{name.strip(): value.strip() for name, value in fields.items()}, **about}


def gpu(session: Session) -> Iterator[Row]:
    if session.emulated:
        raise SkippedError("the device is emulated")
    names = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,temperature.gpu"
    names += ",pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    for line in output_of(["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]).splitlines():
        yield dict(zip(names.split(","), (cell.strip() for cell in line.split(",")), strict=False))


def constants(session: Session) -> Iterator[Row]:
    """Launch constants that an earlier call timed reach the kernels of this machine."""
    if not (session.out / TUNED).exists():
        raise SkippedError("no earlier call timed any")
    found = json.loads((session.out / TUNED).read_text(encoding="utf-8"))
    add_constants(TABLE, {name: types for name, types in found.items() if name != "emulated"})
    yield {name: sorted(types) for name, types in found.items()}


def add_constants(table: Path, found: Mapping[str, Mapping[str, object]]) -> None:
    """Add constants by GPU and weight type to a table, which replace those that it has."""
    held = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
    merged = {name: {**held.get(name, {}), **found.get(name, {})} for name in {**held, **found}}
    if merged != held:
        table.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def install(session: Session) -> Iterator[Row]:
    """The extension and metadata of a wheel: an earlier call's, one in dist/, or one built here. Python runs from the checkout."""
    command = [sys.executable, "-c", "import moegraft.cpu_backend as found; print(found.__file__)"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if found.returncode == 0:
        raise SkippedError(f"moegraft is installed: {found.stdout.strip()}")
    start, wheel = time.perf_counter(), find_wheel(session.out)
    about = {"carried": wheel is not None}
    if wheel is None:
        for old in session.out.glob("moegraft-*.whl"):  # of another Python, or of other sources
            old.unlink()
        command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--build-number", build_number(), "--dist-dir", str(session.out)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        yield {"exit_code": run.returncode, "output": (run.stdout + run.stderr)[-TEXT:]}
        wheel = find_wheel(session.out)
        if run.returncode or wheel is None:
            raise RuntimeError(f"no wheel could be built: {run.stderr.strip()[-400:]}")
    unpack(wheel)
    yield {"wheel": wheel.name, **about, "seconds": round(time.perf_counter() - start, 1)}


def build_number() -> str:
    """Return the number of a wheel: a digest of the sources, so that one of other sources is not taken."""
    digest = hashlib.sha256()
    for path in sorted([ROOT / "setup.py", *(ROOT / "cpu_backend/csrc").rglob("*.*")]):
        digest.update(path.read_bytes())
    return f"0{digest.hexdigest()[:8]}"


def find_wheel(out: Path) -> Path | None:
    """Return the wheel for this Python and machine that an earlier call built of these sources, else one in dist/."""
    fits = f"cp{sys.version_info[0]}{sys.version_info[1]}-*{platform.machine()}.whl"
    found = [*out.glob(f"moegraft-*-{build_number()}-{fits}"), *sorted((ROOT / "dist").glob(f"moegraft-*-{fits}"))]
    return found[0] if found else None


def unpack(wheel: Path) -> None:
    """Put a wheel's extension into the checkout, and its metadata beside links to the checkout's packages."""
    linked = IMPORTS / "moegraft"
    linked.mkdir(parents=True, exist_ok=True)
    for folder in ("injection", "operators", "cpu_backend", "rules"):
        if not (linked / folder).exists():
            (linked / folder).symlink_to(ROOT / folder)
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if ".dist-info/" in name or re.fullmatch(r"moegraft/cpu_backend/_kernel\..*\.so", name):
                packed.extract(name, IMPORTS)


def importable(session: Session) -> Iterator[Row]:
    importlib.invalidate_caches()
    import torch

    from moegraft.cpu_backend import Runtime

    yield {"isa": Runtime(1).isa, "isas": list(Runtime.available_isas()), "threads": Runtime().threads}
    seen: dict[str, object] = {"torch": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
    if torch.cuda.is_available():
        own = torch.cuda.get_device_properties(0)
        names = ("name", "major", "minor", "total_memory", "multi_processor_count", "L2_cache_size", "regs_per_multiprocessor")
        seen |= {name: getattr(own, name, None) for name in names}
    yield seen
    if not session.emulated and not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU: the phases that follow skip what needs one; --device emulated runs without")


def amx(session: Session) -> list[Case]:
    """The CPU kernels' tests on this host, and one layer's times."""
    from gpu_phases.tests import run_tests

    def needs_amx(run: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        if "amx_tile" not in Path("/proc/cpuinfo").read_text():
            raise SkippedError("this host has no AMX")
        return run()

    def layer() -> Iterator[Row]:
        options = ["--no-write", "--rounds", "0.2", "--tokens", "1", "16", "64", "512"]
        command = [sys.executable, str(ROOT / "benchmarks/cpu_experts.py"), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None, "its output is piped"
            for line in process.stdout:
                yield {"line": line.strip()}
        if process.returncode:
            raise RuntimeError(f"cpu_experts.py ended with exit code {process.returncode}")

    tests = partial(run_tests, session, ["tests/cpu_backend"], workers=min(8, os.cpu_count() or 1))
    return [
        Case("layer", partial(needs_amx, layer), limit_s=session.left_s / 2),
        Case("tests", partial(needs_amx, tests), limit_s=session.left_s),
    ]


def sanitizer(session: Session) -> list[Case]:
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

    return [
        Case("memcheck", partial(check, "memcheck"), limit_s=session.left_s / 2),
        Case("racecheck", partial(check, "racecheck"), limit_s=session.left_s),
    ]


def day(out: Path, device: str, minutes: float, names: Sequence[str], call: str, only: str) -> None:
    """Run phases one after another, each for its share of what is left, with a summary after each."""
    end = time.time() + 60 * minutes - RESERVE_S
    rows = Rows(out)
    for number, name in enumerate(names):
        left_s = end - time.time()
        limit_s = left_s * PHASES[name].budget_s / sum(PHASES[each].budget_s for each in names[number:])
        if limit_s < 2:
            rows.append({"phase": name, "call": call, "state": "left", "reason": "no time was left for it"})
        else:
            print(f"{name}: {PHASES[name].about}; at most {limit_s:.0f} s", flush=True)
            session = Session(name, out, device, time.time() + limit_s, call, only)
            supervise(session, limit_s, environment_of(device))
        report(out, names)


def environment_of(device: str) -> dict[str, str]:
    """Return the environment of a phase."""
    own = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    own["TOKENIZERS_PARALLELISM"] = "false"
    own["PYTHONPATH"] = os.pathsep.join([str(IMPORTS), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    if device == "emulated":
        own["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined
        own["OMP_NUM_THREADS"] = "1"  # PyTorch's, at small sizes
    else:
        own.pop("TRITON_INTERPRET", None)
    return own


def states(rows: Iterable[Row], name: str) -> dict[str, Row]:
    """Return the last state of each case of a phase, and under "" that of the phase."""
    return {str(row.get("case", "")): row for row in rows if row["phase"] == name and ended(row)}


def complete(rows: Iterable[Row], name: str) -> bool:
    """Whether a phase ran to its end and every case of it is done or skipped."""
    last = states(rows, name)
    return last.pop("", {}).get("state") == "finished" and all(row["state"] in ("done", "skipped") for row in last.values())


def kept(out: Path) -> list[Path]:
    """Return the files that are an output's."""
    return [path for pattern in FILES for path in sorted(out.glob(pattern)) if path.is_file()]


def keep_limits(out: Path) -> None:
    """Remove what would make the output more, or larger, than may be brought back; a row names it."""
    own = kept(out)
    found = [*own, *sorted(path for path in out.iterdir() if path not in own)]
    for number, path in enumerate(found):
        size = path.stat().st_size
        reason = "files" if number >= MOST_FILES or not path.is_file() else "bytes" if size > MOST_BYTES else None
        if reason is not None:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            limit = f"more than {MOST_FILES} files" if reason == "files" else f"{size} bytes, more than {MOST_BYTES}"
            Rows(out).append({"phase": "output", "case": path.name, "state": "failed", "reason": f"left out: {limit}"})


def report(out: Path, names: Sequence[str]) -> str:
    """Keep the limits of the output, and write its summary and return it."""
    keep_limits(out)
    text = summary(Rows(out).read(), names)
    (out / SUMMARY).write_text(text, encoding="utf-8")
    return text


def summary(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return the state of each phase, what failed and what was skipped with the reasons, and every measured row, for people."""
    lines = ["# A day with a GPU", "", "| phase | state | s | done | skipped | failed | left |", f"|{' --- |' * 7}"]
    shown = [name for name in (*PHASES, "output") if name in names or any(row["phase"] == name for row in rows)]
    for name in shown:
        last = states(rows, name)
        own = last.pop("", {})
        columns: tuple[tuple[str, ...], ...] = (("done",), ("skipped",), ("failed", "died", "timed out"), ("left",))
        counts = [sum(row["state"] in each for row in last.values()) for each in columns]
        lines.append(f"| {name} | {own.get('state', '')} | {own.get('seconds', '')} | {' | '.join(map(str, counts))} |")
    for title, kinds in (("Failed", ("failed", "died", "timed out")), ("Left for lack of time", ("left",)), ("Skipped", ("skipped",))):
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
    known = [*CALLS, *PHASES]
    parser.add_argument("parts", nargs="+", choices=known, metavar="PART", help=f"calls or phases: {', '.join(known)}")
    parser.add_argument("--out", type=Path, required=True, help="an empty folder, or that of --resume")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it; phases share them")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose names match, such as 'captured'")
    parser.add_argument("--resume", type=Path, help="the output of an earlier call: its rows are kept, and what they have is not run again")
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # of the process of a phase
    parser.add_argument("--call", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    out: Path = given.out.resolve()
    try:
        re.compile(given.only)
    except re.error as error:
        parser.error(f"--only {given.only}: not a regular expression: {error}")
    if given.until is not None:
        import gpu_day  # as the phases' modules import it: the same exceptions

        return gpu_day.run_phase(gpu_day.Session(given.parts[0], out, given.device, given.until, given.call, given.only))
    out.mkdir(parents=True, exist_ok=True)
    resumed = given.resume.resolve() if given.resume else None
    if resumed != out and any(out.iterdir()):
        parser.error(f"{out} is not empty; --resume {given.out} continues what it has")
    if resumed is not None and not (resumed / ROWS).is_file():
        parser.error(f"{resumed} has no {ROWS}: it is not the output of an earlier call")
    if resumed is not None and resumed != out:
        for path in kept(resumed):
            (out / path.name).write_bytes(path.read_bytes())
    wanted = {name for part in given.parts for name in CALLS.get(part, (part,))}
    names = [name for name in PHASES if name in wanted]
    call = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f" {os.getpid()}"
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        day(out, given.device, given.minutes, names, call, given.only)
    finally:
        print(report(out, names)[:6000])
    found = Rows(out).read()
    return 0 if all(complete(found, name) for name in names) else 1


if __name__ == "__main__":
    sys.exit(main())
