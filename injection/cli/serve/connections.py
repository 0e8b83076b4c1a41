"""Connections to the server, of which those that send or read nothing are closed, so that others find room."""

from __future__ import annotations

import asyncio
import resource
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 20.0  # for the head of a request to arrive
READ_S = 60.0  # for a client to read what was written
BACKLOG = 128  # connections that the event loop may accept at once
OWN_FILES = 64  # of the process, beside connections: the model's, libraries


class Connection(HttpToolsProtocol):
    """A connection, which is aborted if a request's head does not arrive, or if the client does not read its answer.

    If there are as many connections as the server takes, a new one, or a request of another, takes the place of that which has been
    sending its request for longest; only if all others are being answered, a request is refused with 503.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = time.monotonic()  # of the request that is awaited
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._start("head", HEAD_S)
        # uvicorn's own check counts tasks as well, which end after their answers, and makes no room.
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._finds_room()

    def _finds_room(self) -> bool:
        """Return whether there is room for this connection, for which others that await a request are aborted."""
        while self._most is not None and len(self.connections) >= self._most:
            waiting = [other for other in self.connections if other is not self and isinstance(other, Connection) and other.awaits_request]
            if not waiting:
                return False
            longest = min(waiting, key=lambda other: other.since)
            self.connections.discard(longest)
            longest.transport.abort()
        return True

    @property
    def awaits_request(self) -> bool:
        """Whether the client has no complete request that is not yet answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.since = time.monotonic()
        self._start("head", HEAD_S)

    def on_headers_complete(self) -> None:
        self._stop("head")
        app = self.app
        if not self._finds_room():
            self.logger.warning("Exceeded concurrency limit.")
            self.app = service_unavailable
        super().on_headers_complete()
        self.app = app

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("read", READ_S)

    def resume_writing(self) -> None:
        self._stop("read")
        super().resume_writing()

    def _start(self, name: str, seconds: float) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def server_config(app: ASGIApp, most: int, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for at most `most` connections, or as many as the process may have files for."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY:
        most = max(min(most, allowed - BACKLOG - OWN_FILES), 8)
    return uvicorn.Config(app, http=Connection, access_log=False, backlog=BACKLOG, limit_concurrency=most, **options)
