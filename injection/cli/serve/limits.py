"""The limits of a server, as options of `moegraft serve`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from moegraft.injection.cli.options import option, parse_size

setting = partial(option, rich_help_panel="Server")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server; sizes are in bytes."""

    max_queue: Annotated[int, setting("--max-queue", "N", "Requests that may wait; others are refused with 429.", min=1)] = 64
    max_batch: Annotated[
        int | None,
        setting(
            "--max-batch",
            "N",
            "Requests answered at once; each holds its own context. Default: 32, or 1 if decode steps are captured for a GPU, where one "
            "answer is several times faster.",
            min=1,
        ),
    ] = None
    max_tokens: Annotated[int, setting("--max-tokens", "N", "Maximum length of an answer, in tokens.", min=1)] = 4096
    max_body: Annotated[
        int | None,
        setting(
            "--max-body",
            "BYTES",
            "Maximum request size; larger ones are refused with 413. Default: 1 MiB, or 16 MiB if the model reads images.",
            min=1,
        ),
    ] = None
    image_folder: Annotated[
        Path | None,
        setting("--image-folder", "FOLDER", "Requests may name images in this folder, as file:///PATH; by default none."),
    ] = None
    prefill_chunk: Annotated[
        int, setting("--prefill-chunk", "N", "Prompt tokens computed between two decode steps of other answers; 0: all.", min=0)
    ] = 512
    max_client: Annotated[
        int | None, setting("--max-client", "N", "Requests of one address that may wait; default: 7/8 of --max-queue.", min=1)
    ] = None
    kv_memory: Annotated[
        int | None,
        setting("--kv-memory", "SIZE", "Memory for keys and values, such as 8GiB; requests wait for it. Default: half of what is free."),
        parse_size,
    ] = None
    prefix_cache: Annotated[
        int | None,
        setting("--prefix-cache", "SIZE", "Of --kv-memory, for conversations that may go on, such as 2GiB; 0: none. Default: half."),
        parse_size,
    ] = None
    prefix_cache_dir: Annotated[
        Path | None,
        setting("--prefix-cache-dir", "FOLDER", "Also keep conversations in this folder, for the server to continue after a restart."),
    ] = None
    prefix_cache_disk: Annotated[
        int | None,
        setting(
            "--prefix-cache-disk",
            "SIZE",
            "Limit of the files in --prefix-cache-dir, such as 50GiB. Default: a quarter of the free disk space.",
        ),
        parse_size,
    ] = None
    batch_invariant: Annotated[
        bool,
        setting(
            "--batch-invariant",
            None,
            "Exactly the same answer whatever else is answered. Otherwise greedy texts may differ alone and beside others, as "
            "rounding depends on the batch. Each token of each answer has a pass of its own: about a third of the tokens per second with "
            "8 clients.",
        ),
    ] = False
    strict: Annotated[bool, setting("--strict", None, "Refuse parameters that would be ignored, as they have no effect here.")] = False

    def __post_init__(self) -> None:
        if self.image_folder is not None and not self.image_folder.is_dir():
            raise ValueError(f"--image-folder {self.image_folder}: there is no such folder")
        if self.prefix_cache_dir is not None and self.prefix_cache_dir.exists() and not self.prefix_cache_dir.is_dir():
            raise ValueError(f"--prefix-cache-dir {self.prefix_cache_dir}: this is a file; give a folder")
        if self.prefix_cache_disk is not None and self.prefix_cache_dir is None:
            raise ValueError("--prefix-cache-disk limits --prefix-cache-dir, which is missing; give both")
        if self.prefix_cache_dir is not None and self.prefix_cache == 0:
            raise ValueError("--prefix-cache-dir needs some --prefix-cache in memory, from which it is written; leave --prefix-cache 0 out")
