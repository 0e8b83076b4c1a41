"""What does it cost to spread a model's experts over processes? Two layers of Qwen3-30B-A3B's shapes in int4 on one machine: decode after 8
tokens and a prompt of 512, by number of processes, with one thread each and, for one process, with as many threads as there are processes.

Processes of one machine share its memory, so that the figures show the cost of the messages (`wait_us`: what rank 0 waits for an answer
after its own experts, for each layer and step), not the gain of another machine. Layouts are measured in turns, each in new processes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness.models import VOCABULARY, config_of, cpu_rules, injected, random_model
from harness.record import Recorder, parser
from harness.rounds import alternate, seconds
from transformers import PreTrainedModel

LAYERS = 2
CONTEXT, TOKENS, PROMPT = 8, 64, 512
LAYOUTS = ((1, 1), (1, 2), (2, 1), (3, 1))  # processes, threads of each


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--folder", help="of the model, which is made there if it is empty; by default a temporary one")
    options.add_argument("--rank-of", metavar="MODEL", help=argparse.SUPPRESS)
    options.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank_of is not None:
        follow_or_measure(given.rank_of, given.threads)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or temporary
        if not any(Path(folder).iterdir()):
            random_model(config_of("qwen3-30b-a3b", LAYERS)).save_pretrained(folder)
        rows = Recorder("expert_processes", write=given.write)
        runs = {layout: lambda layout=layout: run(folder, *layout) for layout in LAYOUTS}  # type: ignore[misc]
        for (processes, threads), found in alternate(runs, given.rounds).items():
            medians = {name: round(statistics.median(each[name] for each in found), 3) for name in found[0]}
            rows.add({"processes": processes, "threads_each": threads, **medians})


def run(folder: str, processes: int, threads: int) -> dict[str, Any]:
    """Start the processes and return the figures of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank-of", folder, "--threads", str(threads)],
            env={**os.environ, **address, "RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    outputs = [each.communicate()[0] for each in started]
    if any(each.returncode for each in started):
        raise SystemExit("a process failed; its message is above")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def follow_or_measure(folder: str, threads: int) -> None:
    """Load the model in this process and, on rank 0, print the figures as JSON."""
    torch.set_num_threads(threads)
    model = injected(folder, cpu_rules("int4"), threads=threads)
    if model.moegraft.follows:
        model.moegraft.follow()
        return
    with torch.inference_mode():
        ids = torch.randint(VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        figures = measure(model, ids)
    model.moegraft.close()
    print(json.dumps(figures))


def measure(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, float]:
    prompts_s = alternate({"prompt": lambda: seconds(lambda: model(input_ids=ids, logits_to_keep=1))}, 3)["prompt"]
    before = waited_us(model)
    times: list[float] = []
    output = model(input_ids=ids[:, :CONTEXT], logits_to_keep=1)
    token = output.logits.argmax(-1)
    for _ in range(TOKENS):
        start = time.perf_counter()
        output = model(input_ids=token, past_key_values=output.past_key_values, logits_to_keep=1)
        times.append(time.perf_counter() - start)
        token = output.logits.argmax(-1)
    waits = [(after[0] - early[0]) / max(after[1] - early[1], 1) for early, after in zip(before, waited_us(model), strict=True)]
    medians = {"decode_ms": 1e3 * statistics.median(times), "prompt_ms": 1e3 * statistics.median(prompts_s)}
    return {**medians, "wait_us": max(waits, default=0.0)}


def waited_us(model: PreTrainedModel) -> list[tuple[float, int]]:
    """Return the whole time that rank 0 has waited for each other rank, and how often it asked."""
    ranks = model.moegraft.statistics()["ranks"][1:]
    return [(rank["waited_us"] * rank["calls"], rank["calls"]) for rank in ranks]


if __name__ == "__main__":
    main()
