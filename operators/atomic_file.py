"""Files that appear under their names complete or not at all, however the process ends, with one writer at a time.

A file is written beside its place under a hidden name, and renamed when its bytes are on the disk. Its writer holds a lock on it, which the
system releases when the process ends: a hidden file without a lock was left by a process that died, and the next writer in the folder
removes it. On a file system without locks such a file is reported instead.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)
SUFFIX = ".moegraft-part"


class NotNeededError(Exception):
    """Raised in the body of `new_file`: the file is not wanted after all, and everything stays as it was."""


def write_file(path: str | os.PathLike[str], content: str | bytes, *, replace: bool = True) -> None:
    """Write a whole file, text as UTF-8; see `new_file`."""
    with new_file(path, replace=replace) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_file(path: str | os.PathLike[str], *, replace: bool = True) -> Iterator[BinaryIO]:
    """Yield an empty file, open for reading and writing, that becomes `path` when the body ends without an exception.

    Waits while another process writes the same path, which the log reports. A link stays, and the file that it leads to is replaced. A pipe
    or a device is written directly.

    Args:
        replace: whether an existing file is replaced.

    Raises:
        FileExistsError: the file exists and is not to be replaced.
        OSError: the file cannot be written; what was at `path` is unchanged.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        with place.open("wb") as direct:
            yield direct
        return
    scratch = place.with_name(f".{place.name}{SUFFIX}")
    try:
        _check_free(place, replace=replace)
        sweep(place.parent)
        with _claimed(scratch, place) as file:
            try:
                yield file
                file.flush()
                with suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
                os.fsync(file.fileno())
                _check_free(place, replace=replace)
                scratch.replace(place)
            except BaseException:
                if _is_at(file, scratch):  # and not another writer's, after the file was renamed
                    scratch.unlink()
                raise
    except NotNeededError:
        return
    except OSError as error:
        if error.filename in (None, os.fspath(scratch)):  # a full disk has no name, and the hidden one means nothing to users
            error.filename, error.filename2 = os.fspath(path), None
        raise


def sweep(folder: Path) -> None:
    """Remove what writers in this folder left when they died; files that cannot be removed stay."""
    with suppress(OSError):
        for scratch in folder.glob(f".*{SUFFIX}"):
            with suppress(OSError), _opened(scratch) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, scratch):
                    scratch.unlink()


def user_cache(name: str) -> Path:
    """Return `$XDG_CACHE_HOME/moegraft/NAME`, by default in `~/.cache`.

    Raises:
        FileNotFoundError: the user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "moegraft" / name
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder; set XDG_CACHE_HOME", "~/.cache") from None


def _check_free(place: Path, *, replace: bool) -> None:
    if not replace and place.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(place))


@contextmanager
def _claimed(scratch: Path, place: Path) -> Iterator[BinaryIO]:
    """Create and lock the hidden file. One that is there belongs to another writer, which is waited for, or to one that died."""
    while True:
        try:
            descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            with suppress(FileNotFoundError), _opened(scratch) as other:
                _wait(other, scratch, place)
                if _is_at(other, scratch):
                    scratch.unlink()
            continue
        with os.fdopen(descriptor, "r+b") as file:
            with suppress(OSError):  # where the file system has no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, scratch):  # and was not removed before it was locked
                try:
                    yield file
                finally:
                    with suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_UN)  # a mapping, or a forked process, keeps the file open
                return


def _opened(scratch: Path) -> BinaryIO:
    return os.fdopen(os.open(scratch, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _wait(file: BinaryIO, scratch: Path, place: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.warning("%s: another process writes this file; waiting for it", place)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        reason = f"{scratch.name} beside it belongs to another process or to one that died; remove it if none is running"
        raise OSError(errno.EBUSY, reason, os.fspath(scratch)) from error


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether `path` is still the name of an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False
