"""The HTTP application: routes, API keys, limits, streams and the chat page; and the connections to it.

The command imports this, and fastapi, when it runs. Connections that send or read nothing are closed, so that others find room.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import resource
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import uvicorn
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moegraft.injection.cli.serve.answers import Choice, Reply, ResponseReply
from moegraft.injection.cli.serve.job import Job, Piece
from moegraft.injection.cli.serve.messages import MessageBody, MessageReply, message_error
from moegraft.injection.cli.serve.openai import ChatBody, DetokenizeBody, ResponseBody, TextBody, TokenizeBody
from moegraft.injection.cli.serve.protocol import Request, RequestError, error_body, refusal
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
        "img-src": "data:",
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


BODY_S = 60.0  # for the body of a request to arrive
OPEN = ("/", "/favicon.ico", "/health", "/docs", "/openapi.json")  # routes without a key
PREPARED = 2  # requests of one client that are prepared at a time
T = TypeVar("T")
ANSWERS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
POSTS = (*ANSWERS, "/v1/responses/input_tokens", "/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize")
# As clients call them that add no /v1.
UNVERSIONED = re.compile(r"/(chat/completions|completions|responses|messages|models|embeddings)(/|$)")
IGNORED = "X-Moegraft-Ignored"  # of an answer: parameters without effect


class Gate:
    """Refuses requests before they cost anything: those without the key, of another site, for a full queue, and bodies without an end.

    A page of another site whose name is made to resolve to this address (DNS rebinding) sends that name as Host, which is none of
    `hosts`. Plain ASGI, as a route behind starlette's own middleware cannot detect a disconnect.
    """

    def __init__(self, app: ASGIApp, service: Service, api_key: str | None, hosts: Collection[str] | None) -> None:
        self._app = app
        self._service = service
        self._wanted = api_key
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if UNVERSIONED.match(scope["path"]):
                scope = {**scope, "path": f"/v1{scope['path']}"}
            try:
                self._check(scope)
                if scope["method"] == "POST":
                    receive = _received(await self._body(scope, receive), receive)
            except RequestError as error:
                await _refused(error, scope["path"])(scope, receive, send)
                return
            except ClientDisconnect:
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        given = dict(scope["headers"])
        host = re.sub(r":\d+$", "", given.get(b"host", b"").decode("latin-1").lower())
        if self._hosts is not None and host not in self._hosts:
            known = " or ".join(sorted(self._hosts))
            raise RequestError(403, f"this server is not {host[:80]!r}; use its address, {known}", code="wrong_host")
        if (
            self._wanted is not None
            and scope["path"] not in OPEN
            and not hmac.compare_digest(_key(Headers(scope=scope)).encode(), self._wanted.encode())
        ):
            raise RequestError(401, "send this server's key as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'", code="invalid_api_key")
        # JSON, as forms of other sites cannot send it.
        posts = scope["method"] == "POST" and scope["path"] in POSTS
        if posts and given.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            raise RequestError(415, "send JSON, as 'Content-Type: application/json'")
        if posts and scope["path"] in ANSWERS:
            self._service.engine.require_room()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        body, most = bytearray(), self._service.max_body
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in HttpRequest(scope, receive).stream():
                    body += chunk
                    if len(body) > most:
                        raise RequestError(413, f"the body is longer than this server's limit of {most} bytes")
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {BODY_S:.0f} s") from None
        return bytes(body)


def _received(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body which has been read, and then what `receive` gives."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


Parts = tuple[Choice, list[dict[str, Any]]]  # of an answer, as a stream sends them
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


def _key(headers: Headers) -> str:
    """Return the key that a client sends, in OpenAI's header or in Anthropic's."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _client(request: HttpRequest) -> str:
    return request.client.host if request.client is not None else ""


class Preparation:
    """Prepares requests in threads, as encoding a long prompt would stop the streams of others.

    There are few threads, of which one client has at most `PREPARED`: others do not wait for its long prompts and large grammars. A thread
    cannot be cancelled, so that a request which is cancelled counts until its thread has ended.
    """

    def __init__(self) -> None:
        self._clients: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # of those who hold it or wait for it

    async def __call__(self, request: HttpRequest, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        free = self._clients.setdefault(_client(request), asyncio.Semaphore(PREPARED))
        await free.acquire()
        thread = asyncio.create_task(asyncio.to_thread(work, *args, **kwargs))
        thread.add_done_callback(lambda _: free.release())
        return await asyncio.shield(thread)


def make_app(service: Service, api_key: str | None = None, hosts: Collection[str] | None = None, origins: Sequence[str] = ()) -> FastAPI:
    """Create the application; the caller closes the service.

    Args:
        api_key: required of every request; None requires none.
        hosts: the names by which clients may call this server; None allows all.
        origins: the sites whose pages may call it from a browser; `*` allows all.
    """
    refusals, of_messages = (
        {status: {"model": form, "description": about} for status, about in REFUSALS.items()} for form in (Refusal, MessageRefusal)
    )
    about = "A model behind OpenAI's interface and Anthropic's. What is not supported is refused by name."
    app = FastAPI(title="moegraft", description=about, docs_url=None, redoc_url=None, responses=refusals)
    mailbox, prepare = Mailbox(), Preparation()
    _add_errors(app)
    app.add_middleware(Gate, service=service, api_key=api_key, hosts=hosts)
    if origins:  # outside the gate, as browsers ask for leave without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=[IGNORED]
        )
    html, headers = chat_page()

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return HTMLResponse(html, headers=headers)

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204)  # browsers request an icon, and there is none

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return docs_page(app.openapi())

    @app.head("/health", include_in_schema=False)  # as load balancers, curl -I and wget --spider ask
    @app.get("/health")
    async def health() -> Response:
        """200 while the model can be used."""
        alive = service.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Prometheus metrics of the server and of the operators."""
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        """The model, under each of its names, and its adapters."""
        names = service.names + service.adapter_names
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in names], **pages})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """The model, or an adapter, by its id."""
        service.adapter_of(model_id)
        return JSONResponse(_model(service, model_id))

    @app.get("/v1/status")
    async def status() -> Response:
        """Where the operators run, tokens per second, requests that run and wait."""
        return JSONResponse(_status(service))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: HttpRequest) -> Response:
        """The tokens of a text or of a chat."""
        return JSONResponse(await prepare(request, service.tokenize, body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: HttpRequest) -> Response:
        """The text of tokens."""
        return JSONResponse(await prepare(request, service.detokenize, body))

    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat(body: ChatBody, request: HttpRequest) -> Response:
        """Answers to a chat, by the model's chat template."""
        return await _answer(service, mailbox, prepare, body.request(), request)

    @app.post("/v1/completions", responses=STREAMED)
    async def complete(body: TextBody, request: HttpRequest) -> Response:
        """Continuations of a text."""
        return await _answer(service, mailbox, prepare, body.request(), request)

    @app.post("/v1/responses", responses=STREAMED)
    async def respond(body: ResponseBody, request: HttpRequest) -> Response:
        """The answer to a conversation in the form of OpenAI's Responses. Nothing is stored."""
        return await _answer(service, mailbox, prepare, body.request(), request)

    @app.post("/v1/responses/input_tokens")
    async def count(body: ResponseBody, request: HttpRequest) -> Response:
        """How many tokens a request to `/v1/responses` has."""
        tokens = await prepare(request, service.prompt_tokens, body.request())
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    @app.post("/v1/messages", responses={**of_messages, **STREAMED})
    async def message(body: MessageBody, request: HttpRequest) -> Response:
        """The answer to a conversation in the form of Anthropic's Messages."""
        return await _answer(service, mailbox, prepare, body.request(), request)

    @app.post("/v1/messages/count_tokens", responses=of_messages)
    async def count_message(body: MessageBody, request: HttpRequest) -> Response:
        """How many tokens a request to `/v1/messages` has."""
        return JSONResponse({"input_tokens": await prepare(request, service.prompt_tokens, body.request())})

    @app.post("/v1/embeddings", include_in_schema=False)
    async def embed() -> Response:
        raise RequestError(404, f"{service.model_id!r} generates text; this server has no model for embeddings", code="model_not_found")

    return app


class Fault(BaseModel):
    """What was wrong with a request."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    error: Fault


class MessageFault(BaseModel):
    type: str
    message: str


class MessageRefusal(BaseModel):
    """A refusal in Anthropic's form."""

    type: Literal["error"]
    error: MessageFault


REFUSALS: dict[int | str, str] = {
    400: "The request is malformed, too long, or asks for what is not supported; the message names the field.",
    401: "The key is missing or wrong.",
    403: "The Host header is not this server's.",
    404: "There is no such model or route.",
    408: "The body did not arrive.",
    413: "The body is too long.",
    415: "The body is not declared as JSON.",
    429: "Too many requests are waiting.",
    500: "The server failed on the request.",
    503: "The server is shutting down, or has to be restarted.",
    "default": "Any other refusal.",  # without it, FastAPI adds a 422 of its own
}


STREAMED: dict[int | str, dict[str, Any]] = {200: {"description": "The answer, or its events.", "content": {"text/event-stream": {}}}}


def _model(service: Service, name: str) -> dict[str, Any]:
    """Return a model as OpenAI and Anthropic describe one, with vLLM's names for its context and for the model of an adapter."""
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "moegraft",
        "max_model_len": service.loaded.context_tokens,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        **({"parent": service.model_id} if name in service.adapter_names else {}),
    }


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
        "reads_images": not isinstance(service.images, str),
        "work": engine.work,
    }


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: HttpRequest, error: RequestError) -> Response:
        return _refused(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: HttpRequest, error: RequestValidationError) -> Response:
        return _refused(refusal(error.errors()), request.url.path)

    @app.exception_handler(HTTPException)
    async def not_found(request: HttpRequest, error: HTTPException) -> Response:
        # FastAPI's own 400 is for a body that json cannot read, such as one nested too deeply.
        message = "the body is not JSON" if error.status_code == 400 else str(error.detail)
        response = _refused(RequestError(error.status_code, message), request.url.path)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def failed(request: HttpRequest, error: Exception) -> Response:
        return _refused(RequestError(500, "the server failed on this request; its log has the reason"), request.url.path)


def _refused(error: RequestError, path: str) -> Response:
    """Return a refusal in the form of the route's interface."""
    again = {"Retry-After": "1"}
    headers = {429: again, 503: again, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    if path.startswith("/v1/messages"):
        body = message_error(error.status, str(error))
    else:
        body = error_body(error.status, str(error), error.code, error.param)
    # Names of fields may have lone surrogates, which JSON can hold and UTF-8 cannot.
    return Response(json.dumps(body), error.status, headers, "application/json")


def docs_page(document: Mapping[str, Any]) -> Response:
    """Return the routes and their parameters as a page without scripts, from OpenAPI's `document`."""
    schemas = document["components"]["schemas"]
    parts = [f"<h1>{escape(document['info']['title'])}</h1><p>{escape(document['info']['description'])}</p>"]
    parts.append("<p><a href='openapi.json'>openapi.json</a> is the same for programs.</p>")
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(route.get('description', ''))}</p>")
            for content in route.get("requestBody", {}).get("content", {}).values():
                parts.append(_parameters(_resolved(content["schema"], schemas), schemas))
    style = "body{font-family:sans-serif;max-width:60rem;margin:1rem auto;padding:0 1rem}td{padding:.1rem .8rem .1rem 0;vertical-align:top}"
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>moegraft</title><style>{style}</style>{''.join(parts)}</html>"
    return HTMLResponse(page, headers={"Content-Security-Policy": f"default-src 'none'; style-src {_hash(style)}"})


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _parameters(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = (
        f"<tr><td><code>{escape(name)}</code>{' (required)' if name in needed else ''}<td>{escape(_described(about, schemas))}"
        f"<td>{escape(about.get('description', ''))}"
        for name, about in schema.get("properties", {}).items()
    )
    return f"<table>{''.join(rows)}</table>"


def _described(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int = 0) -> str:
    """Return the type that a schema describes, in words."""
    schema = _resolved(schema, schemas)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(_described(option, schemas, depth) for option in options))
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_described(schema['items'], schemas, depth)}"
    if "properties" in schema and depth < 3:
        inner = (f"{name}: {_described(about, schemas, depth + 1)}" for name, about in schema["properties"].items())
        return f"{{{', '.join(inner)}}}"
    signs = {"minimum": "≥", "maximum": "≤", "exclusiveMinimum": ">", "exclusiveMaximum": "<"}
    bounds = "".join(f" {sign} {schema[name]:g}" for name, sign in signs.items() if name in schema)
    return f"{schema.get('type', 'anything')}{bounds}"


async def _answer(service: Service, mailbox: Mailbox, prepare: Preparation, asked: Request, request: HttpRequest) -> Response:
    pieces = Pieces()
    post = partial(mailbox.post, asyncio.get_running_loop(), pieces)
    scope = request.headers.get("authorization") or request.headers.get("x-api-key", "")
    choices = await prepare(request, service.choices, asked, post, client=_client(request), scope=scope)
    jobs = [choice.job for choice in choices]
    service.engine.submit(jobs, asked.asked_by)
    # Not by the stream itself, which never starts if the client leaves before it.
    parts = _parts(choices, pieces, asyncio.create_task(_cancel_when_gone(request, jobs)))
    name, headers = jobs[0].adapter or service.model_id, {IGNORED: ", ".join(ignored)} if (ignored := asked.options.ignored) else {}
    reply: Reply | ResponseReply | MessageReply
    if asked.kind == "response":
        reply = ResponseReply(asked, name, choices[0])
    elif asked.kind == "message":
        reply = MessageReply(asked, name, choices[0])
    else:
        reply = Reply(asked, name, service.fingerprint, choices)
    if asked.options.stream:
        headers["Cache-Control"] = "no-cache"
        return StreamingResponse(_stream(reply, parts), media_type="text/event-stream", headers=headers)
    async for _ in parts:
        pass
    failed = next((job for job in jobs if job.ending == "failed"), None)
    if failed is not None:
        raise RequestError(500, failed.error)
    if any(job.ending == "cancelled" for job in jobs):  # read by a client only if the server is shutting down
        raise RequestError(503, "the request was cancelled")
    return JSONResponse(reply.whole(), headers=headers)


async def _cancel_when_gone(request: HttpRequest, jobs: Sequence[Job]) -> None:
    """Cancel the jobs when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    for job in jobs:
        job.cancel()


async def _parts(choices: Sequence[Choice], pieces: Pieces, watching: asyncio.Task[None]) -> AsyncIterator[Parts]:
    """Yield the parts of the answers, pieces that are waiting as one; at the end, cancel what is left and `watching`."""
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
                left -= several[-1].ending is not None
                yield choices[number], choices[number].add(several)
    finally:
        watching.cancel()
        for choice in choices:
            choice.job.cancel()  # no effect on an answer that has ended


async def _stream(reply: Reply | ResponseReply | MessageReply, answers: AsyncIterator[Parts]) -> AsyncIterator[str]:
    """Yield the answers as server-sent events, those that are ready as one piece."""
    yield "".join(reply.start())
    async for choice, parts in answers:
        job = choice.job
        broken = job.ending in ("failed", "cancelled")
        yield "".join(event for part in (parts[:-1] if broken else parts) for event in reply.part(part))
        if broken:
            yield "".join(reply.fail(job.error if job.ending == "failed" else "the request was cancelled"))
            return
    yield "".join(reply.end())


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
