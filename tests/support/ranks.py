"""Several processes that hold the experts of one model, as torchrun starts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from support.programs import PATIENCE_S, Program


def start_ranks(arguments: Sequence[str], count: int, **variables: str) -> list[Program]:
    """Start `python ARGUMENTS` as each of `count` ranks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TRANSFORMERS_VERBOSITY": "error",
        **variables,
    }
    return [Program(arguments, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)]


def end(ranks: Sequence[Program], timeout_s: float = PATIENCE_S) -> list[tuple[int, str, str]]:
    """Wait for all ranks; return their exit codes, outputs and errors."""
    try:
        found = []
        for each in ranks:
            out, err = each.communicate(timeout=timeout_s)
            found.append((each.returncode, out, err))
        return found
    finally:
        for each in ranks:
            each.kill()
