"""The HTTP application: routes, API keys, limits, streams and the chat page. The command imports this, and fastapi, when it runs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from moegraft.injection.cli.serve.engine import QueueFullError, StoppedError
from moegraft.injection.cli.serve.job import Job, Piece
from moegraft.injection.cli.serve.metrics import metrics
from moegraft.injection.cli.serve.protocol import Kind, Reply, RequestError, error_body, read_request
from moegraft.injection.cli.serve.service import Service

SCRIPTS = ("page_text.js", "page.js")


def chat_page() -> tuple[str, dict[str, str]]:
    """Return the chat page as one HTML document, with its headers.

    The content security policy allows only the page's scripts and style, by their hashes, so that text of a model cannot run.
    """
    folder = files("moegraft.injection.cli.serve")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    scripts = [folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    html = folder.joinpath("page.html").read_text(encoding="utf-8")
    html = html.replace("<!-- style -->", f"<style>{style}</style>")
    html = html.replace("<!-- scripts -->", "\n".join(f"<script>{script}</script>" for script in scripts))
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": _hash(style),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html, {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


logger = logging.getLogger(__name__)
OPEN = ("/", "/favicon.ico", "/health")  # routes without a key


class KeyCheck:
    """Refuses requests without the key. Plain ASGI, as a route behind starlette's own middleware cannot detect a disconnect."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._wanted):
                refusal = _error(401, "send this server's key as 'Authorization: Bearer KEY'", "invalid_api_key")
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Mailbox:
    """Passes pieces of answers from the engine's thread to the event loop, which is woken once for all that are posted meanwhile."""

    def __init__(self) -> None:
        self._posted = deque[tuple[asyncio.Queue[Piece], Piece]]()
        self._woken = False

    def post(self, loop: asyncio.AbstractEventLoop, pieces: asyncio.Queue[Piece], piece: Piece) -> None:
        """Put `piece` into the queue `pieces` of `loop`; called by the engine's thread."""
        self._posted.append((pieces, piece))
        if not self._woken and not loop.is_closed():
            self._woken = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what is posted from here on wakes the loop again
        while self._posted:
            pieces, piece = self._posted.popleft()
            pieces.put_nowait(piece)


def make_app(service: Service, api_key: str | None = None) -> FastAPI:
    """Create the application; the caller closes the service."""
    app, mailbox = FastAPI(title="moegraft", openapi_url=None), Mailbox()
    _add_errors(app)
    if api_key:
        app.add_middleware(KeyCheck, api_key=api_key)
    html, headers = chat_page()

    @app.get("/")
    async def root() -> Response:
        return HTMLResponse(html, headers=headers)

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204)  # browsers request an icon, and there is none

    @app.get("/health")
    async def health() -> Response:
        alive = service.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return PlainTextResponse(metrics(service), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        if model_id != service.model_id:
            raise RequestError(404, f"unknown model {model_id[:80]!r}; this server has {service.model_id!r}", code="model_not_found")
        return JSONResponse(_model(service))

    @app.get("/v1/status")
    async def status() -> Response:
        return JSONResponse(_status(service))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _complete(service, mailbox, "chat", request)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _complete(service, mailbox, "text", request)

    return app


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.model_id, "object": "model", "created": 0, "owned_by": "moegraft"}


def _status(service: Service) -> dict[str, Any]:
    engine = service.engine
    return {
        "model": service.model_id,
        "placement": service.loaded.placement(),
        "tokens_per_second": engine.tokens_per_s,
        "running": engine.running,
        "waiting": engine.waiting,
        "one_at_a_time_because": service.alone_because,
        "work": engine.work,
    }


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return _error(error.status, str(error), error.code, error.param)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return _error(500, "the server failed on this request; its log has the reason")


def _error(status: int, message: str, code: str | None = None, param: str | None = None) -> Response:
    headers = {"Retry-After": "1"} if status == 429 else {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error_body(status, message, code, param), status, headers=headers)


async def _body(request: Request, most: int) -> bytes:
    """
    Raises:
        RequestError: the body is not JSON, which forms of other sites cannot send, or longer than `most` bytes.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(415, "send JSON, as 'Content-Type: application/json'")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise RequestError(413, f"the body is longer than this server's limit of {most} bytes")
    return bytes(body)


async def _complete(service: Service, mailbox: Mailbox, kind: Kind, request: Request) -> Response:
    asked = read_request(kind, await _body(request, service.limits.max_body))
    pieces = asyncio.Queue[Piece]()
    # In a thread, as encoding a long prompt would stop the streams of other requests.
    job = await asyncio.to_thread(service.job, asked, partial(mailbox.post, asyncio.get_running_loop(), pieces))
    try:
        service.engine.submit(job)
    except QueueFullError:
        raise RequestError(429, "too many requests are waiting; try again in a moment", code="queue_full") from None
    except StoppedError:
        raise RequestError(503, "the server is shutting down, or has to be restarted") from None
    reply, answer = Reply(kind, service.model_id), _pieces(request, job, pieces)
    if asked.stream:
        lines = _stream(reply, job, answer, include_usage=asked.include_usage)
        return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    text = "".join([piece.text async for piece in answer])
    if job.ending == "failed":
        return _error(500, job.error)
    if job.ending == "cancelled":  # read by a client only if the server is shutting down
        return _error(503, "the request was cancelled")
    return JSONResponse(reply.whole(text, job))


async def _pieces(request: Request, job: Job, pieces: asyncio.Queue[Piece]) -> AsyncIterator[Piece]:
    """Yield the pieces of an answer, those that are waiting as one; cancel the job when the client disconnects."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watching = asyncio.create_task(watch())
    try:
        ending = None
        while ending is None:
            waiting = [await pieces.get()]
            while not pieces.empty():
                waiting.append(pieces.get_nowait())
            ending = waiting[-1].ending
            yield Piece("".join(piece.text for piece in waiting), ending)
    finally:
        watching.cancel()
        job.cancel()  # no effect on an answer that has ended


async def _stream(reply: Reply, job: Job, answer: AsyncIterator[Piece], *, include_usage: bool) -> AsyncIterator[str]:
    """Yield the answer as server-sent events."""
    if reply.kind == "chat":
        yield _event(reply.chunk(None))
    async for piece in answer:
        if piece.text:
            yield _event(reply.chunk(piece.text))
        if piece.ending in ("failed", "cancelled"):
            yield _event(error_body(500, job.error if piece.ending == "failed" else "the request was cancelled"))
            return
        if piece.ending is not None:
            yield _event(reply.chunk("", piece.ending))
    if include_usage:
        yield _event(reply.usage_chunk(job))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
