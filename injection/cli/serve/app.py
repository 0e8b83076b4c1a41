"""The HTTP application: routes, API keys, limits, streams and the chat page. The command imports this, and fastapi, when it runs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from moegraft.injection.cli.serve.engine import QueueFullError, StoppedError, TooLongError
from moegraft.injection.cli.serve.job import Job, Piece
from moegraft.injection.cli.serve.metrics import metrics
from moegraft.injection.cli.serve.protocol import Choice, Kind, Reply, RequestError, error_body, read_object, read_request
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
BODY_S = 60.0  # for the body of a request to arrive
OPEN = ("/", "/favicon.ico", "/health")  # routes without a key


class Gate:
    """Refuses requests without the key, and those whose Host header is none of `hosts`.

    A page of another site whose name is made to resolve to this address (DNS rebinding) sends that name as Host. Plain ASGI, as a route
    behind starlette's own middleware cannot detect a disconnect.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: Collection[str] | None) -> None:
        self._app = app
        self._wanted = f"Bearer {api_key}".encode() if api_key else None
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        given = dict(scope["headers"])
        host = re.sub(r":\d+$", "", given.get(b"host", b"").decode("latin-1").lower())
        if self._hosts is not None and host not in self._hosts:
            return _error(403, f"this server is not {host[:80]!r}; use its address, {' or '.join(sorted(self._hosts))}", "wrong_host")
        if (
            self._wanted is not None
            and scope["path"] not in OPEN
            and not hmac.compare_digest(given.get(b"authorization", b""), self._wanted)
        ):
            return _error(401, "send this server's key as 'Authorization: Bearer KEY'", "invalid_api_key")
        return None


Pieces = asyncio.Queue[tuple[int, Piece]]  # the number of an answer, and its next piece


class Mailbox:
    """Passes pieces of answers from the engine's thread to the event loop, which is woken once for all that are posted meanwhile."""

    def __init__(self) -> None:
        self._posted = deque[tuple[Pieces, tuple[int, Piece]]]()
        self._woken = False

    def post(self, loop: asyncio.AbstractEventLoop, pieces: Pieces, number: int, piece: Piece) -> None:
        """Put the next piece of an answer into the queue `pieces` of `loop`; called by the engine's thread."""
        self._posted.append((pieces, (number, piece)))
        if not self._woken and not loop.is_closed():
            self._woken = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what is posted from here on wakes the loop again
        while self._posted:
            pieces, piece = self._posted.popleft()
            pieces.put_nowait(piece)


def make_app(service: Service, api_key: str | None = None, hosts: Collection[str] | None = None) -> FastAPI:
    """Create the application; the caller closes the service.

    Args:
        api_key: required of every request; None requires none.
        hosts: the names by which clients may call this server; None allows all.
    """
    app, mailbox = FastAPI(title="moegraft", openapi_url=None), Mailbox()
    _add_errors(app)
    app.add_middleware(Gate, api_key=api_key, hosts=hosts)
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

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = read_object(await _body(request, service.limits.max_body))
        return JSONResponse(await asyncio.to_thread(service.tokenize, asked))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return JSONResponse(service.detokenize(read_object(await _body(request, service.limits.max_body))))

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
        "memory": asdict(engine.memory),
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
    headers = {"Retry-After": "1"} if status in (429, 503) else {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(error_body(status, message, code, param), status, headers=headers)


async def _body(request: Request, most: int) -> bytes:
    """
    Raises:
        RequestError: the body is not JSON, which forms of other sites cannot send, or longer than `most` bytes.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(415, "send JSON, as 'Content-Type: application/json'")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise RequestError(413, f"the body is longer than this server's limit of {most} bytes")
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {BODY_S:.0f} s") from None
    return bytes(body)


async def _complete(service: Service, mailbox: Mailbox, kind: Kind, request: Request) -> Response:
    if service.engine.full:
        raise _queue_full()  # before the body is read and encoded
    asked = read_request(kind, await _body(request, service.limits.max_body))
    pieces = Pieces()
    # In a thread, as encoding a long prompt would stop the streams of other requests.
    post = partial(mailbox.post, asyncio.get_running_loop(), pieces)
    client = request.client.host if request.client is not None else ""
    scope = request.headers.get("authorization", "")
    choices = await asyncio.to_thread(service.choices, asked, post, client=client, scope=scope)
    jobs = [choice.job for choice in choices]
    try:
        service.engine.submit(jobs)
    except QueueFullError as error:
        raise RequestError(429, f"{error}; try again in a moment", code="queue_full") from None
    except TooLongError as error:
        raise RequestError(400, str(error), code="context_length_exceeded") from None
    except StoppedError:
        raise RequestError(503, "the server is shutting down, or has to be restarted") from None
    reply, parts = Reply(kind, service.model_id), _parts(request, choices, pieces)
    if asked.stream:
        lines = _stream(reply, jobs, parts, include_usage=asked.include_usage)
        return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    async for _ in parts:
        pass
    failed = next((job for job in jobs if job.ending == "failed"), None)
    if failed is not None:
        return _error(500, failed.error)
    if any(job.ending == "cancelled" for job in jobs):  # read by a client only if the server is shutting down
        return _error(503, "the request was cancelled")
    return JSONResponse(reply.whole(choices))


def _queue_full() -> RequestError:
    return RequestError(429, "too many requests are waiting; try again in a moment", code="queue_full")


async def _parts(request: Request, choices: Sequence[Choice], pieces: Pieces) -> AsyncIterator[tuple[Choice, list[dict[str, Any]]]]:
    """Yield the parts of the answers, pieces that are waiting as one; cancel the jobs when the client disconnects."""

    def cancel() -> None:
        for choice in choices:
            choice.job.cancel()  # no effect on an answer that has ended

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel()

    watching = asyncio.create_task(watch())
    try:
        left = len(choices)
        while left:
            waiting: dict[int, list[Piece]] = {}
            number, piece = await pieces.get()
            waiting.setdefault(number, []).append(piece)
            while not pieces.empty():
                number, piece = pieces.get_nowait()
                waiting.setdefault(number, []).append(piece)
            for number, several in waiting.items():
                ending = several[-1].ending
                left -= ending is not None
                scores = [score for piece in several for score in piece.scores]
                yield choices[number], choices[number].add(Piece("".join(piece.text for piece in several), ending, scores))
    finally:
        watching.cancel()
        cancel()


async def _stream(
    reply: Reply, jobs: Sequence[Job], answers: AsyncIterator[tuple[Choice, list[dict[str, Any]]]], *, include_usage: bool
) -> AsyncIterator[str]:
    """Yield the answers as server-sent events."""
    async for choice, parts in answers:
        broken = choice.job.ending in ("failed", "cancelled")
        for part in parts[:-1] if broken else parts:
            yield _event(reply.chunk(part))
        if broken:
            yield _event(error_body(500, choice.job.error if choice.job.ending == "failed" else "the request was cancelled"))
            return
    if include_usage:
        yield _event(reply.usage_chunk(jobs))
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
