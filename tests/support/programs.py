"""Python programs that start at once: forked from a process that has imported what they all import.

An import of torch, transformers and moegraft takes several seconds, and most programs of the tests do little else. They are programs of
their own in everything else: arguments, environment, folder, outputs, signals, threads and the end of the interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parent.parent
PATIENCE_S = 400  # for a busy machine
LIBRARIES = (
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "support.families",
    "moegraft.injection.cli.moegraft",
    "moegraft.injection.cli.local_chat",
    "moegraft.injection.cli.chat.session",
    "moegraft.injection.cli.serve.app",
    "moegraft.operators.decode.native.steps",
    "uvicorn",
)


class Program:
    """`python ARGUMENTS`, as of subprocess.Popen with pipes for both outputs and nothing to read.

    `terminal` is the descriptor of a terminal that becomes the program's own, in place of the pipes; the program reads it too.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], terminal: int | None = None) -> None:
        request = json.dumps([list(arguments), dict(environment), str(Path.cwd()), terminal is not None]).encode()
        out, err = os.pipe(), os.pipe()
        self._control, theirs = socket.socketpair()
        given = [out[1], err[1]] if terminal is None else [terminal, terminal]
        try:
            origin, _ = _origin()
            socket.send_fds(origin, [len(request).to_bytes(4, "little")], [*given, theirs.fileno()])
            origin.sendall(request)
        finally:
            os.close(out[1])
            os.close(err[1])
            theirs.close()
        self.args = [sys.executable, *arguments]
        self.stdout = os.fdopen(out[0], encoding="utf-8")
        self.stderr = os.fdopen(err[0], encoding="utf-8")
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(OSError):  # has ended
                self._control.send(bytes([number]))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def running(self) -> bool:
        return self.returncode is None and not select.select([self._control], [], [], 0)[0]

    def wait(self) -> int:
        if self.returncode is None:
            said = self._control.recv(4)
            assert said, f"no program was started: {_origin()[1].communicate()[1].decode()}"
            self.returncode = int.from_bytes(said, "little", signed=True)
            self._control.close()
        return self.returncode

    def communicate(self, timeout: float = PATIENCE_S) -> tuple[str, str]:
        late = threading.Event()
        timer = threading.Timer(timeout, lambda: (late.set(), self.kill()))
        timer.daemon = True
        timer.start()
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        found = self.stdout.read()
        reader.join()
        self.wait()
        timer.cancel()
        if late.is_set():
            raise subprocess.TimeoutExpired(self.args, timeout, found, errors[0])
        self.stdout.close()
        self.stderr.close()
        return found, errors[0]


@cache
def _origin() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process that programs are forked from, and return what it takes requests from. It ends with this one."""
    ours, theirs = socket.socketpair()
    python_path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", f"from support.programs import fork_programs; fork_programs({theirs.fileno()})"],
        # A library that starts threads when it is imported would leave them out of what is forked.
        env={**os.environ, "PYTHONPATH": python_path, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # as of every program: Python asks whether it can seek only once
        stderr=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        process_group=0,  # Ctrl-C is for pytest
    )
    theirs.close()
    return ours, process


def fork_programs(descriptor: int) -> None:
    """Import the libraries, and fork a process for every program that is asked for. In that process, run it and return."""
    from moegraft.operators.registry import load_registry

    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # of an extra: the program says so
            __import__(name)
    load_registry()
    gc.collect()
    gc.freeze()  # what all share is not written to
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a keeper ended
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a forked process has one of them"
    requests = socket.socket(fileno=descriptor)
    while True:
        size, descriptors, _, _ = socket.recv_fds(requests, 4, 3)
        if not size:
            os._exit(0)
        text = b""
        while (left := int.from_bytes(size, "little") - len(text)) and (more := requests.recv(left)):
            text += more
        keeper = os.fork()
        if keeper == 0:
            requests.close()
            _keep(*json.loads(text), *descriptors)
            return
        for each in descriptors:
            os.close(each)


class _Unfreezing:
    """Lets what all programs share be taken apart at the end, or bindings report leaks: when modules are cleared.

    Earlier, one more collection would walk it, for half a second of each program.
    """

    def __del__(self, unfreeze: Callable[[], None] = gc.unfreeze) -> None:
        unfreeze()


def _keep(arguments: list[str], environment: dict[str, str], folder: str, terminal: bool, out: int, err: int, control: int) -> None:
    """Fork the program, report its end, and send it the signals that are asked for. In the program, run it and return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.close(out)
        os.close(err)
        with socket.socket(fileno=control) as waiting:
            ended = os.pidfd_open(pid)
            while ended not in (ready := select.select([ended, waiting], [], [])[0]):
                asked = ready[0].recv(1)
                os.kill(pid, asked[0] if asked else signal.SIGKILL)
                if not asked:
                    break
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):  # nobody waits
                waiting.send(code.to_bytes(4, "little", signed=True))
        os._exit(0)
    os.close(control)
    if terminal:
        os.close(err)
        os.login_tty(out)
        # As Python opens them where it starts at a terminal.
        sys.stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    else:
        for source, target in ((out, 1), (err, 2)):
            os.dup2(source, target)
            os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.end_of_program = _Unfreezing()  # type: ignore[attr-defined]
    kind, what, *rest = arguments
    if kind == "-m":
        sys.argv = [what, *rest]
        sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        assert kind == "-c", arguments
        sys.argv = ["-c", *rest]
        main = sys.modules["__main__"] = ModuleType("__main__")  # its names live until the interpreter ends
        exec(compile(what, "<string>", "exec"), vars(main))
