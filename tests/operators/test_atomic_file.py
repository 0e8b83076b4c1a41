"""Files appear complete or not at all, one writer at a time, and what a dead writer left is removed."""

import errno
import fcntl
import logging
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moegraft.operators import atomic_file
from moegraft.operators.atomic_file import NotNeededError, new_file, sweep, write_file

DYING = """
import os, signal, sys
from moegraft.operators.atomic_file import new_file
with new_file(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), int(sys.argv[2]))
"""


def die_writing(path: Path, number: int) -> None:
    done = subprocess.run([sys.executable, "-c", DYING, str(path), str(number)], check=False)
    assert done.returncode == -number


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    with new_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    write_file(path, "zwö")
    assert path.read_text(encoding="utf-8") == "zwö"
    assert names(tmp_path) == ["rules.yaml"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError, NotNeededError])
def test_an_exception_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("before")

    def interrupted() -> None:
        with new_file(path) as file:
            file.write(b"half")
            raise error

    if error is NotNeededError:
        interrupted()
    else:
        with pytest.raises(error):
            interrupted()
    assert path.read_text() == "before"
    assert names(tmp_path) == ["rules.yaml"]


def test_an_existing_file_is_kept_on_request(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    write_file(path, "first", replace=False)
    with pytest.raises(FileExistsError):
        write_file(path, "second", replace=False)
    with pytest.raises(FileExistsError), new_file(tmp_path / "other", replace=False) as file:
        file.write(b"mine")
        (tmp_path / "other").write_text("another program's")
    assert path.read_text() == "first"
    assert (tmp_path / "other").read_text() == "another program's"
    assert names(tmp_path) == ["other", "talk.json"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_dead_writer_left_is_removed(tmp_path: Path, number: int) -> None:
    die_writing(tmp_path / "one", number)
    assert len(names(tmp_path)) == 1 and not (tmp_path / "one").exists()
    write_file(tmp_path / "two", "whole")  # a file of another name
    assert names(tmp_path) == ["two"]
    die_writing(tmp_path / "one", number)
    write_file(tmp_path / "one", "whole")
    assert (tmp_path / "one").read_text() == "whole"
    assert names(tmp_path) == ["one", "two"]


def test_what_a_living_writer_has_is_not_removed(tmp_path: Path) -> None:
    with new_file(tmp_path / "slow") as file:
        file.write(b"whole")
        sweep(tmp_path)
        write_file(tmp_path / "quick", "other")
    assert (tmp_path / "slow").read_text() == "whole"
    assert names(tmp_path) == ["quick", "slow"]


def test_another_writer_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rules.yaml"
    inside, waiting, events = threading.Event(), threading.Event(), []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waiting.set()

    def second() -> None:
        assert inside.wait(30)
        with new_file(path) as file:
            events.append("second begins")
            assert path.read_bytes() == b"first"
            file.write(b"second")

    handler = Handler()
    logging.getLogger(atomic_file.__name__).addHandler(handler)
    thread = threading.Thread(target=second)
    thread.start()
    try:
        with new_file(path) as file:
            file.write(b"first")
            inside.set()
            assert waiting.wait(30), "the second reports that it waits"
            events.append("first ends")
    finally:
        thread.join(30)
        logging.getLogger(atomic_file.__name__).removeHandler(handler)
    assert events == ["first ends", "second begins"]
    assert path.read_bytes() == b"second"
    assert "another process writes this file" in caplog.text
    assert names(tmp_path) == ["rules.yaml"]


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    """Each removes what dead ones left, sees whole files only, and none is lost."""
    path = tmp_path / "count"
    write_file(path, "0")

    def add() -> None:
        for _ in range(25):
            with new_file(path) as file:
                file.write(str(int(path.read_text()) + 1).encode())

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() == "100"
    assert names(tmp_path) == ["count"]


def test_a_mapping_of_a_written_file_locks_nothing(tmp_path: Path) -> None:
    with new_file(tmp_path / "one") as file:
        file.write(b"whole")
        file.flush()
        mapped = mmap.mmap(file.fileno(), 5)  # keeps the file open
    with (tmp_path / "one").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert mapped[:] == b"whole"


def test_links_modes_and_pipes_stay(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to("target")
    write_file(link, "after")
    assert link.is_symlink() and target.read_text() == "after"
    assert target.stat().st_mode & 0o777 == 0o640
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    assert names(tmp_path) == ["link", "pipe", "target"]


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        write_file(tmp_path / "no" / "rules.yaml", "")
    assert missing.value.filename == str(tmp_path / "no" / "rules.yaml")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as disk:
        write_file(tmp_path / "rules.yaml", "text")
    assert disk.value.filename == str(tmp_path / "rules.yaml")
    assert names(tmp_path) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, and what may be another process's is neither used nor removed."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    write_file(tmp_path / "one", "whole")
    assert names(tmp_path) == ["one"]
    die_writing(tmp_path / "one", signal.SIGKILL)
    left = [name for name in names(tmp_path) if name != "one"]
    with pytest.raises(OSError, match=f"{left[0]} beside it belongs to another process or to one that died; remove it"):
        write_file(tmp_path / "one", "again")
    assert (tmp_path / "one").read_text() == "whole"
    (tmp_path / left[0]).unlink()
    write_file(tmp_path / "one", "again")
    assert (tmp_path / "one").read_text() == "again"
