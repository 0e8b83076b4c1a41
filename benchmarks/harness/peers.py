"""A process for each provider of a benchmark, so that a provider that crashes loses only its own figures."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class PeerFailed(RuntimeError):
    """A peer's process ended before it answered, or its work raised; `reason` is the signal's name or the error."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.reason = reason


class PeerProcess:
    """A process that runs `with open_peer(*args) as peer` and then calls functions with the peer.

    Functions, arguments and results are pickled, so a function must be importable by name. The process is a new interpreter, which inherits
    no threads.

    Raises:
        PeerFailed: from `with`, if the peer cannot be opened.
    """

    def __init__(self, name: str, open_peer: Callable[P, AbstractContextManager[Any]], *args: P.args, **kwargs: P.kwargs) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, open_peer, args, kwargs), daemon=True)
        self._theirs = theirs

    def __enter__(self) -> PeerProcess:
        self._process.start()
        self._theirs.close()  # so that the pipe ends when the process does
        try:
            self._answer()
        except PeerFailed:
            self._process.join()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()
        self._process.join()

    def call(self, function: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return `function(peer, *args, **kwargs)`, computed in the peer's process.

        Raises:
            PeerFailed: the function raised, or its process ended. The peer cannot be called again.
        """
        try:
            self._connection.send((function, args, kwargs))
        except (BrokenPipeError, ConnectionResetError):
            raise PeerFailed(self.name, self._end()) from None
        answer: R = self._answer()
        return answer

    def _answer(self) -> Any:
        try:
            error, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise PeerFailed(self.name, self._end()) from None
        if error is not None:
            raise PeerFailed(self.name, error)
        return value

    def _end(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _serve(
    connection: Connection, open_peer: Callable[..., AbstractContextManager[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        with open_peer(*args, **kwargs) as peer:
            connection.send((None, None))
            while True:
                try:
                    function, its_args, its_kwargs = connection.recv()
                except EOFError:  # the benchmark has what it wanted
                    return
                connection.send((None, function(peer, *its_args, **its_kwargs)))
    except BaseException as error:
        connection.send((f"{type(error).__name__}: {error}", None))
        raise
