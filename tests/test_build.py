"""Building without a compiler or the headers of Python ends in one clear sentence, not in a page of g++."""

import os
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
        "moegraft: no C++ compiler (/nonexistent/cc was not found); install one, e.g. 'apt install g++', and try again"
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
