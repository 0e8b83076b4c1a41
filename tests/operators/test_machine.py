"""What a process may use: the limits of its control group and of those around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraft.operators import machine

MIB = 1 << 20


def group(folder: Path, limit: str, use: int, files: int, *, version_1: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version_1 else ("memory.max", "memory.current")
    for name, text in zip(names, (limit, str(use)), strict=True):
        (folder / name).write_text(f"{text}\n")
    prefix = "total_" if version_1 else ""
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {files // 2}\n{prefix}active_file {files - files // 2}\n")


@pytest.mark.parametrize("version_1", [True, False], ids=["version 1", "version 2"])
def test_the_smallest_limit_around_a_process_counts(version_1: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "memory" if version_1 else tmp_path
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 40})())
    (tmp_path / "own").write_text("3:cpu,cpuacct:/other\n4:memory:/a/b\n" if version_1 else "0::/a/b\n")
    none = "9223372036854771712" if version_1 else "max"
    group(root, none, 0, 0, version_1=version_1)
    group(root / "a", str(100 * MIB), 30 * MIB, 10 * MIB, version_1=version_1)
    assert machine.probe_machine().available_bytes == 80 * MIB, "pages of files can be dropped"
    group(root / "a" / "b", str(50 * MIB), 20 * MIB, 0, version_1=version_1)
    assert machine.probe_machine().available_bytes == 30 * MIB
    (tmp_path / "own").write_text("4:memory:/elsewhere\n" if version_1 else "0::/elsewhere\n")  # of a container that sees its own root
    group(root, str(10 * MIB), MIB, 0, version_1=version_1)
    assert machine.probe_machine().available_bytes == 9 * MIB
    (tmp_path / "own").unlink()
    assert machine.probe_machine().available_bytes == 9 * MIB
