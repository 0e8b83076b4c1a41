"""Processes that die and disks that fail: files are whole or absent, the next start works, and nothing remains of the last one.

    pytest tests/test_crashes.py           # a process ends at, or meets an error in, every operation on files of six scenes
    pytest --long tests/test_crashes.py    # all scenes, and 200 kills at random moments

A scene is played in a process of its own (support/crash_scenes.py), over a layer in which an operation on files fails, is cut short or
ends the process (support/faulty_files.c).
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from moegraft.operators.atomic_file import SUFFIX

REFUSED = 3  # support.crash_scenes
ERROR, SHORT, KILL, KILL_SHORT = 1, 2, 3, 4  # support/faulty_files.c
NEVER = 1 << 40
SHORT_SCENES = ("save", "thresholds", "routing", "measurements", "timeline", "pack")
LONG_SCENES = (*SHORT_SCENES, "init", "calibrate")
KILLS = 200
FAULTS = {
    "killed": (KILL, signal.SIGKILL, False),
    "killed within a write": (KILL_SHORT, signal.SIGKILL, False),
    "terminated": (KILL, signal.SIGTERM, False),
    "a full disk": (ERROR, errno.ENOSPC, True),
    "a failing disk": (ERROR, errno.EIO, False),
    "a read-only folder": (ERROR, errno.EROFS, True),
    "a short write": (SHORT, 0, False),
}
MOST = 3  # operations of each fault in the short form, about
SHORT_FAULTS = ("killed", "killed within a write", "a full disk", "a failing disk", "a short write")


Fault = tuple[int, int, int, bool]  # kind, errno or signal, number of the operation, whether later ones meet it as well


@dataclass(frozen=True, slots=True)
class End:
    """The end of a process: its exit code, or the negative number of a signal; its output; the operations on files of `out`."""

    status: int
    output: str
    operations: int


class Server:
    """Plays scenes in processes of their own."""

    def __init__(self, layer: Path) -> None:
        path = os.pathsep.join([str(ROOT / "tests"), *(entry for entry in sys.path if entry)])
        environment = {**os.environ, "LD_PRELOAD": str(layer), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "support.crash_scenes"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None and self._process.stdin is not None
        self._answers, self._requests = self._process.stdout, self._process.stdin
        assert self._answers.readline() == "ready\n"

    def play(self, scene: str, folder: Path, act: str, fault: Fault | None = None, copies: int = 1) -> End:
        """Play a scene to its end, in several processes at once if `copies` asks for them."""
        self.start(scene, folder, act, fault, copies)
        return self.end()

    def start(self, scene: str, folder: Path, act: str, fault: Fault | None = None, copies: int = 1) -> int:
        """Return the process id."""
        request = {"scene": scene, "folder": str(folder), "act": act, "fault": fault, "copies": copies}
        print(json.dumps(request), file=self._requests, flush=True)
        return int(self._answer()["pid"])

    def end(self) -> End:
        return End(**self._answer())

    def _answer(self) -> Any:
        return json.loads(self._answers.readline())

    def close(self) -> None:
        self._requests.close()
        self._process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    layer = tmp_path_factory.mktemp("layer") / "faulty_files.so"
    source = ROOT / "tests" / "support" / "faulty_files.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(layer), str(source), "-ldl"], check=True)
    server = Server(layer)
    yield server
    server.close()


@pytest.fixture(scope="module")
def prepared() -> dict[str, Path]:
    """The folder of each scene before it is played; filled on first use."""
    return {}


@pytest.fixture
def scene_folder(server: Server, prepared: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns a scene's folder, as if the scene had never been played."""

    def fresh(scene: str) -> Path:
        if scene not in prepared:
            prepared[scene] = tmp_path_factory.mktemp(scene) / "scene"
            assert server.play(scene, prepared[scene], "prepare").status == 0
        folder = prepared[scene]
        before = folder.with_name("before")
        if not before.exists():
            shutil.copytree(folder / "out", before)
        shutil.rmtree(folder / "out")
        shutil.copytree(before, folder / "out")
        return folder

    return fresh


def left(folder: Path) -> list[Path]:
    return [path for path in (folder / "out").rglob("*") if path.name.endswith(SUFFIX)]


@pytest.mark.parametrize("scene", LONG_SCENES)
def test_a_fault_in_every_operation_on_files(server: Server, scene_folder: Any, scene: str, long: bool) -> None:
    if scene not in SHORT_SCENES and not long:
        pytest.skip("in the long form (--long)")
    whole = server.play(scene, scene_folder(scene), "play", (ERROR, 0, NEVER, False))
    assert whole.status == 0, whole.output
    assert whole.operations > 3, "it writes files, and the layer sees that"
    for name in FAULTS if long else SHORT_FAULTS if scene != "pack" else ("killed", "a full disk"):
        kind, error, stays = FAULTS[name]
        operations = server.play(scene, scene_folder(scene), "play", (kind, error, NEVER, stays)).operations
        for at in range(operations - 1, -1, -1 if long else -max(1, operations // MOST)):
            folder, where = scene_folder(scene), f"{name}, operation {at} of {operations}"
            end = server.play(scene, folder, "play", (kind, error, at, stays))
            if kind in (KILL, KILL_SHORT):
                assert end.status == -error, (where, end)
            else:
                assert end.status == 0 or (end.status == REFUSED and kind == ERROR and "Error" in end.output), (where, end)
                assert not left(folder), (where, end)
            again = server.play(scene, folder, "recover")
            assert again.status == 0, (where, end, again)


def test_processes_that_pack_one_checkpoint(server: Server, scene_folder: Any) -> None:
    """Four start together; each layer is packed once."""
    folder = scene_folder("pack")
    ends = server.play("pack", folder, "play", copies=4)
    assert ends.status == 0, ends
    assert sum(int(number) for number in re.findall(r"packed (\d+) matrices", ends.output)) == 2 * 5 * 3, ends
    assert server.play("pack", folder, "recover").status == 0


def test_kills_at_random_moments(server: Server, scene_folder: Any, long: bool) -> None:
    if not long:
        pytest.skip("200 kills are in the long form (--long)")
    scenes = ("pack", "save", "calibrate", "init")
    numbers = random.Random(17)
    killed = dict.fromkeys(scenes, 0)
    scratch = 0
    seconds: dict[str, float] = {}
    for scene in scenes:
        start = time.monotonic()
        assert server.play(scene, scene_folder(scene), "play").status == 0
        seconds[scene] = time.monotonic() - start
    attempts = 0
    while sum(killed.values()) < KILLS:
        scene = scenes[attempts % len(scenes)]
        number = (signal.SIGKILL, signal.SIGTERM)[attempts // len(scenes) % 2]
        attempts += 1
        assert attempts < 10 * KILLS, "most processes end before they are killed"
        folder = scene_folder(scene)
        process = server.start(scene, folder, "play")
        time.sleep(numbers.random() * seconds[scene])
        with suppress(ProcessLookupError):
            os.kill(process, number)
        end = server.end()
        if end.status == -number:
            killed[scene] += 1
        else:
            assert end.status == 0, (scene, end)
        scratch += len(left(folder))
        again = server.play(scene, folder, "recover")
        assert again.status == 0, (scene, number, end, again)
    print(f"{attempts} processes, killed: {killed}; {scratch} scratch files were left and removed by the next start; seconds: {seconds}")
