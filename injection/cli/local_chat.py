"""`local_chat`: chat with a mixture-of-experts model on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraft.injection.cli.options import ModelOptions, SamplingOptions, VersionOption, option, option_name, takes_options, talks_to_user
from moegraft.injection.cli.output import INTERRUPTED, Terminal, importing, library_log, open_terminal, user_errors
from moegraft.operators.errors import MoegraftError

if TYPE_CHECKING:
    from moegraft.injection.cli.chat.session import Chat
    from moegraft.injection.cli.models import LoadedModel
    from moegraft.operators.timeline import Timeline

PROGRAM = "local_chat"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The prompt, and the output beside the answer."""

    prompt: Annotated[str | None, option("--prompt -p", "TEXT", "Answer this prompt and exit; also read from a pipe.")] = None
    prompt_file: Annotated[Path | None, option("--prompt-file", "FILE", "As --prompt, from a file.")] = None
    image: Annotated[list[Path] | None, option("--image", "FILE", "Show the model this image with the first prompt; may be repeated.")] = (
        None
    )
    system: Annotated[str | None, option("--system", "TEXT", "A system message before the conversation.")] = None
    seed: Annotated[
        int | None, option("--seed", "N", "Random seed, for repeatable answers; default: a random one.", min=0, max=2**64 - 1)
    ] = None
    resume: Annotated[Path | None, option("--resume", "FILE", "Continue a chat that /save FILE.safetensors wrote.")] = None
    adapter: Annotated[str | None, option("--adapter", "FOLDER", "Answer with this LoRA adapter, as PEFT's save_pretrained wrote it.")] = (
        None
    )
    prefill_chunk: Annotated[
        int, option("--prefill-chunk", "N", "Compute long prompts in chunks of this many tokens; 0: whole.", min=0)
    ] = 2048
    stats: Annotated[bool, option("--stats/--no-stats", None, "Show tokens and speeds after each answer.")] = True
    trace: Annotated[Path | None, option("--trace", "FILE", "Write a timeline of GPU, CPU and transfers for Perfetto.")] = None
    quiet: Annotated[bool, option("--quiet -q", None, "Print answers and errors only.")] = False
    verbose: Annotated[bool, option("--verbose -v", None, "Show after each answer what runs where, and what operators report.")] = False
    dry_run: Annotated[bool, option("--dry-run", None, "Print the plan and exit; no weights are read.")] = False
    version: VersionOption = False

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("--prompt and --prompt-file exclude each other; give only one of them")
        if self.resume is not None and self.system is not None:
            raise ValueError("--resume restores the chat's own system message; remove --system")
        if self.quiet and self.verbose:
            raise ValueError("--quiet and --verbose exclude each other; give only one of them")


class PromptError(MoegraftError):
    """The prompt is empty or not text."""


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": option_name, "help_option_names": ["--help", "-h"]},
)


@app.command(epilog="Options may be written with _ for -; --model_path, --gguf_path, --optimize_config_path and --cpu_infer work as well.")
@user_errors(PROGRAM, together=True)
@takes_options
def chat(model: ModelOptions, sampling: SamplingOptions, options: ChatOptions) -> None:
    """Chat with a mixture-of-experts model on this machine; by default with the small bundled one."""
    terminal = open_terminal(quiet=options.quiet)
    if options.dry_run:
        with importing(terminal):
            from moegraft.injection.cli.models import check_adapters, plan_only

        if options.adapter is not None:
            check_adapters(model, {"": options.adapter})
        terminal.write(plan_only(model, terminal).describe() + "\n")
        return
    prompt = _prompt(options) if talks_to_user() else None
    system = None if options.system is None else _argument(options.system, "--system")
    with library_log(terminal, verbose=options.verbose):
        session = _open_chat(model, sampling, options, system, terminal)
        with _traced(session.loaded, options.trace, terminal):
            if prompt is None:
                session.run()
            elif session.turn(prompt).ending == "interrupted":
                raise typer.Exit(INTERRUPTED)


def _prompt(options: ChatOptions) -> str | None:
    """Return the prompt to answer; None for a chat."""
    if options.prompt is not None:
        text = _argument(options.prompt, "--prompt")
    elif options.prompt_file is not None:
        text = _decoded(options.prompt_file.read_bytes(), str(options.prompt_file))
    elif sys.stdin is None or not sys.stdin.isatty():
        text = _decoded(sys.stdin.buffer.read() if sys.stdin else b"", "standard input")
    else:
        return None
    if not text.strip():
        raise PromptError("the prompt is empty; give --prompt TEXT, text on standard input, or a terminal to chat in")
    return text.rstrip("\n")


def _argument(text: str, option: str) -> str:
    """Return an argument, of which Python stands in for bytes that are not text of the locale."""
    return _decoded(text.encode("utf-8", "surrogateescape"), option)


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"{where}: not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start})") from error


def _open_chat(model: ModelOptions, sampling: SamplingOptions, options: ChatOptions, system: str | None, terminal: Terminal) -> Chat:
    with importing(terminal):
        from moegraft.injection.cli.chat.answer import Answerer
        from moegraft.injection.cli.chat.conversation import Conversation
        from moegraft.injection.cli.chat.session import Chat
        from moegraft.injection.cli.models import load_model

    loaded = load_model(model, terminal, adapters=None if options.adapter is None else {options.adapter: options.adapter})
    if loaded.adapters is not None:
        loaded.adapters.use(options.adapter)
        terminal.notice(f"with the adapter {options.adapter}")
    conversation = Conversation(loaded.tokenizer, loaded.context_tokens, system, loaded.images)
    if not conversation.has_template:
        terminal.notice("this model has no chat template: it continues the text that you type")
    answerer = Answerer(loaded, sampling, options.seed, prefill_chunk=options.prefill_chunk)
    session = Chat(loaded, answerer, conversation, terminal, show_stats=options.stats, verbose=options.verbose)
    if options.resume is not None:
        session.resume(options.resume)
    if options.image:
        session.show(options.image)
    return session


@contextmanager
def _traced(loaded: LoadedModel, path: Path | None, terminal: Terminal) -> Iterator[None]:
    """Write a trace of the work on GPUs and of drafts during the body to `path`, also after an exception.

    Raises:
        OSError: the file cannot be written; raised before the body runs.
    """
    from moegraft.injection.injected import injection_of
    from moegraft.operators.timeline import write_trace

    injection = injection_of(loaded.model)
    if path is None or injection is None:
        yield
        return
    recorded: Sequence[Timeline] = ()
    try:
        with injection.timelines() as timelines:
            if timelines:
                write_trace(path, [])
                recorded = timelines
            else:
                terminal.notice("--trace: no operator computes, so there is no timeline")
            yield
    finally:
        if recorded:
            write_trace(path, recorded)
            spans = sum(len(timeline.spans) for timeline in recorded)
            terminal.notice(f"{path}: {spans} spans; open it in https://ui.perfetto.dev")


def main() -> None:
    """The console script."""
    app(prog_name=PROGRAM)
