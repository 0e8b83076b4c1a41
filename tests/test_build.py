"""Building compiles what has changed and nothing else; without a compiler or the headers of Python it ends in one clear sentence."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

pytest.importorskip("pybind11")
pytest.importorskip("setuptools")


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


def fake_compiler(path: Path, message: str) -> str:
    path.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_no_compiler(tmp_path: Path) -> None:
    done = build(tmp_path, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("moegraft:")] == [
        "moegraft: no C++ compiler (/nonexistent/c++ was not found); install one, e.g. 'apt install g++', and try again"
    ]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("message", "says"),
    [("fatal error: Python.h: No such file or directory", "python3-dev"), ("error: unrecognized option -std=c++17", "C++17")],
    ids=["headers", "old-compiler"],
)
def test_a_compiler_that_cannot(tmp_path: Path, message: str, says: str) -> None:
    compiler = fake_compiler(tmp_path / "cc", message)
    done = build(tmp_path, CC=compiler, CXX=compiler)
    sentences = [line for line in done.stderr.splitlines() if line.startswith("moegraft:")]
    assert done.returncode == 1 and len(sentences) == 1
    assert says in sentences[0] and "Traceback" not in done.stderr


# Stands for the compiler: it logs the sources of a unit, reports what they include, and writes an object.
RECORDING_COMPILER = f"""#!{sys.executable}
import pathlib, sys
args = sys.argv[1:]
if "-M" in args: sys.exit()
if "--version" in args: sys.exit(print("version 1"))
out = pathlib.Path(args[args.index("-o") + 1])
out.write_text("")
if "-c" in args:
    sources = [line.split('"')[1] for line in pathlib.Path(args[args.index("-c") + 1]).read_text().splitlines()]
    paths = [pathlib.Path("cpu_backend/csrc") / source for source in sources]
    if any("#error" in path.read_text() for path in paths): sys.exit("an error")
    found = list(paths)
    for path in found:
        names = [line.split('"')[1] for line in path.read_text().splitlines() if line.startswith('#include "')]
        found += [other for name in names if (other := pathlib.Path("cpu_backend/csrc") / name) not in found]
    names = map(str, found)
    pathlib.Path(args[args.index("-MF") + 1]).write_text(" ".join(["unit.o:", args[args.index("-c") + 1], *names]))
    with open("compiled.log", "a") as log: log.write(" ".join(sources) + chr(10))
"""


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    """Copy what is built into a folder of its own, with a compiler that records what it compiles."""
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "cpu_backend" / "csrc", tmp_path / "cpu_backend" / "csrc")
    compiler = tmp_path / "c++"
    compiler.write_text(RECORDING_COMPILER)
    compiler.chmod(0o755)
    return tmp_path / "cpu_backend" / "csrc"


def build_recorded(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = os.environ | {"CC": str(folder / "c++"), "CXX": str(folder / "c++")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def compiled(folder: Path) -> set[str]:
    """Build, and return the sources that were compiled."""
    log = folder / "compiled.log"
    log.unlink(missing_ok=True)
    done = build_recorded(folder)
    assert done.returncode == 0, done.stderr
    return set(log.read_text().split()) if log.exists() else set()


def test_what_has_not_changed_is_not_compiled_again(tmp_path: Path, csrc: Path) -> None:
    everything = compiled(tmp_path)
    others = {name for name in everything if name.startswith("simd/")}
    own = {path.relative_to(csrc).as_posix() for path in csrc.rglob("*.cpp") if not path.is_relative_to(csrc / "simd")}
    assert everything == own | others and "simd/scalar.cpp" in others
    assert compiled(tmp_path) == set()
    (csrc / "ops" / "norm.h").touch()  # the same content
    assert compiled(tmp_path) == set()
    with (csrc / "scheduler" / "scheduler.h").open("a") as header:
        header.write("// changed")
    changed = compiled(tmp_path)
    kernels = others - {"simd/isa.cpp", "simd/matrix_check.cpp"}
    assert {"scheduler/greedy.cpp", "bindings/scheduler.cpp"} <= changed and not changed & kernels
    (csrc / "ops" / "another.cpp").write_text("")
    assert {"ops/another.cpp", "ops/norm.cpp"} <= compiled(tmp_path)
    (csrc / "ops" / "another.cpp").write_text("#error")
    done = build_recorded(tmp_path)
    assert done.returncode == 1 and "ops/another.cpp" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    (csrc / "ops" / "another.cpp").unlink()
    assert compiled(tmp_path) == set()


def test_a_formats_traits_compile_the_kernels_alone(tmp_path: Path, csrc: Path) -> None:
    folders = ("formats/", "simd/", "attention/", "recurrent/avx")
    beside = {"experts/block_layout.cpp", "experts/gradient.cpp", "experts/routing.cpp"}  # they need -O3 as well
    kernels = {name for name in compiled(tmp_path) if name in beside or name.startswith(folders)}
    for name in ("integer_formats.h", "float_formats.h", "grid_formats.h"):
        with (csrc / "formats" / name).open("a") as header:
            header.write("// changed")
        changed = compiled(tmp_path)
        assert {"formats/coded_formats.cpp", "simd/scalar.cpp"} <= changed <= kernels, name
