"""The compile checks of `compiled/`, in a process that does not interpret kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT
from support.triton_cases import INTERPRETED

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")


@pytest.mark.skipif(not INTERPRETED, reason="this process compiles kernels itself")
def test_kernels_compile_for_real_gpus(long: bool) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__).parent / "compiled")]
    command += ["--long"] if long else []
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
