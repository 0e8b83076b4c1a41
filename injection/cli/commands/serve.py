"""`moegraft serve`: serve a model through OpenAI's HTTP interface, with a chat page."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from moegraft.injection.cli.options import PROGRAM, Limits, ModelOptions, OptionsError, setting, takes_options, talks_to_user
from moegraft.injection.cli.output import Terminal, importing, library_log, open_terminal, user_errors

if TYPE_CHECKING:
    from moegraft.injection.cli.serve.service import Service
    from moegraft.operators.expert_group import ExpertGroup

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LOOPBACK_NAMES = ("127.0.0.1", "[::1]", "localhost")  # in a Host header
SPARE_CONNECTIONS = 128  # beside those of requests that run or wait, for idle clients and the page
SHUTDOWN_S = 5  # how long streams may take to end once their answers have ended


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The server's address, key, names and adapters."""

    host: Annotated[str, setting("--host", "ADDRESS", "Address to listen on; 0.0.0.0: every network.")] = "127.0.0.1"
    port: Annotated[int, setting("--port", "N", "Port to listen on; 0: any free port.", min=0, max=65535)] = 8000
    api_key: Annotated[
        str | None, setting("--api-key", "KEY", "Key that clients must send; better set in the environment.", envvar="MOEGRAFT_API_KEY")
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        setting("--served-model-name", "NAME", "Name of the model in requests; may be repeated. '*': any name is answered as well."),
    ] = None
    adapter: Annotated[
        list[str] | None,
        setting("--adapter", "NAME=FOLDER", "LoRA adapter, which answers requests for the model NAME; may be repeated."),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        setting("--allow-origin", "ORIGIN", "Site whose pages may call the server, as https://example.org; may be repeated. '*': any."),
    ] = None
    grace: Annotated[int, setting("--grace", "SECONDS", "Time for running answers to end when the server is stopped.", min=0)] = 10

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("--api-key is empty; give a key, or leave it out")
        if self.api_key is not None and not all("!" <= sign <= "~" for sign in self.api_key):
            raise ValueError("--api-key has spaces or characters outside ASCII, which not every client can send; give another key")
        if not all(name.strip() for name in self.served_model_name or ()):
            raise ValueError("--served-model-name is empty; give a name, or leave it out")
        self.adapters()

    def adapters(self) -> dict[str, str]:
        """Return the folders of adapters by name.

        Raises:
            ValueError: one is not NAME=FOLDER, or two have one name.
        """
        pairs = [text.partition("=") for text in self.adapter or ()]
        wrong = next(("".join(pair) for pair in pairs if not (pair[0].strip() and pair[2])), None)
        if wrong is not None:
            raise ValueError(f"--adapter {wrong}: give NAME=FOLDER, as in --adapter poems=./adapters/poems")
        names = [name for name, _, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"--adapter {twice} is given twice; give each adapter a name of its own")
        return {name: folder for name, _, folder in pairs}


@user_errors(PROGRAM, together=True)
@takes_options
def serve(model: ModelOptions, limits: Limits, options: ServeOptions) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's interfaces, with a chat page at /.

    Requests are decoded as one batch where the model supports it, else one at a time; the log has the reason. Routes: /v1/chat/completions,
    /v1/completions, /v1/responses, /v1/messages, /v1/models, /v1/status, /tokenize, /detokenize, /health, /metrics, /docs. Needs the extra
    'serve' (pip install 'moegraft[serve]'). Ctrl-C and SIGTERM stop the server: it accepts no more requests and gives running answers
    --grace seconds; a second signal ends it at once.
    """
    _require_server()
    terminal = open_terminal()
    # Before weights are read, so that an address in use is reported at once.
    listening = _listen(options.host, options.port) if talks_to_user() else socket.socket()
    with listening, library_log(terminal):
        with importing(terminal):
            from moegraft.injection.cli.models import load_model
            from moegraft.injection.cli.serve.service import Service
            from moegraft.injection.injected import injection_of

        loaded = load_model(model, terminal, adapters=options.adapters())
        injection = injection_of(loaded.model)
        group = None if injection is None else injection.context.expert_group
        service = Service(loaded, limits, options.served_model_name or ())
        try:
            _run(service, listening, limits, options, terminal, group)
        finally:
            service.close()
        if group is not None:
            group.require_alive()


def _require_server() -> None:
    try:
        import fastapi  # noqa: F401
        import httptools  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise OptionsError(f"serve needs {error.name}, which is not installed: pip install 'moegraft[serve]'") from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OptionsError(f"cannot listen on {host} port {port}: {error.strerror or error}; give another --host or --port") from error


def _run(
    service: Service, listening: socket.socket, limits: Limits, options: ServeOptions, terminal: Terminal, group: ExpertGroup | None
) -> None:
    import uvicorn

    from moegraft.injection.cli.serve.app import make_app, server_config
    from moegraft.injection.cli.serve.service import MAX_BATCH
    from moegraft.operators.errors import human_bytes

    class Server(uvicorn.Server):
        """Ends on its first signal, when answers have ended, and exits at once on the second."""

        caught: int | None = None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                os._exit(128 + sig)
            self.should_exit, self.caught = True, sig

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            service.engine.drain(options.grace)
            await super().shutdown(sockets)

    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{host}:{listening.getsockname()[1]}"
    if options.host not in LOOPBACK and options.api_key is None:
        terminal.notice("anyone who can reach this address may use the model: --api-key sets a key", style="yellow")
    terminal.notice(f"answers may hold {human_bytes(service.engine.memory.limit)} of keys and values together (--kv-memory)")
    terminal.notice(f"{service.model_id} at {address}/v1 with a chat page at {address}/; Ctrl-C stops the server")
    # On another address, clients use names that are not known here.
    app = make_app(service, options.api_key, LOOPBACK_NAMES if options.host in LOOPBACK else None, options.allow_origin or ())
    most = limits.max_queue + (limits.max_batch or MAX_BATCH) + SPARE_CONNECTIONS
    config = server_config(app, most, log_level="warning", timeout_graceful_shutdown=options.grace + SHUTDOWN_S)
    server = Server(config)
    if group is not None:
        group.on_lost = partial(setattr, server, "should_exit", True)  # without its experts, nothing can be answered
        group.require_alive()
    server.run(sockets=[listening])
    if server.caught == signal.SIGINT:
        raise KeyboardInterrupt
