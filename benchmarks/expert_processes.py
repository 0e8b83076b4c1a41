"""What does it cost to spread a model's experts over processes? Two layers of Qwen3-30B-A3B's shapes in int4 on one machine: decode after 8
tokens and a prompt of 512, by number of processes, with one thread each and, for one process, with as many threads as there are processes.

Processes of one machine share its memory, so that the figures show the cost of the messages (`wait_us`: what rank 0 waits for an answer
after its own experts, for each layer and step), not the gain of another machine. Layouts are measured in turns, each in new processes.

With --shared: what does it save that rank 0 computes shared experts before it waits? Two layers of Qwen1.5-MoE-A2.7B's shapes with 16 of
its 60 experts, whose shared experts are as large as the four that a token chooses; a prompt of 512 on two processes with one thread each,
by shares, with and without that order in turns in the same processes.
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
from cpu_model import make_model, rule_file, timed
from record import write_rows
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2MoeConfig

from moegraft.injection import optimize_and_load
from moegraft.operators.experts.hybrid import HybridExperts

LAYERS = 2
CONTEXT, TOKENS, PROMPT = 8, 64, 512
LAYOUTS = ((1, 1), (1, 2), (2, 1), (3, 1))  # processes, threads of each
SHARES = ("[1, 1]", "[1, 3]")
ROUNDS = 21  # of prompts with and without the order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="of the model, which is made there if it is empty; by default a temporary one")
    parser.add_argument("--shared", action="store_true", help="measure shared experts beside the other processes' work instead")
    parser.add_argument("--shares", help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        if arguments.shares:
            measure_shared(arguments.rank_of, arguments.shares)
        else:
            measure(arguments.rank_of, arguments.threads)
        return
    if arguments.shared:
        with tempfile.TemporaryDirectory() as temporary:
            folder = arguments.folder or temporary
            if not any(Path(folder).iterdir()):
                make_shared_model().save_pretrained(folder)
            rows = []
            for shares in SHARES:
                for name, figures in run(folder, 2, 1, "--shares", shares).items():
                    rows.append({"shares": shares, "shared_experts": name, **figures})
                    print(rows[-1], flush=True)
            write_rows("expert_processes_shared", rows)
        return
    found: dict[tuple[int, int], list[dict[str, float]]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or temporary
        if not any(Path(folder).iterdir()):
            make_model(LAYERS).save_pretrained(folder)
        for number in range(arguments.rounds):
            for layout in LAYOUTS:
                found[layout].append(run(folder, *layout))
                print(number, layout, found[layout][-1], flush=True)
    rows = []
    for (processes, threads), runs in found.items():
        medians = {name: round(statistics.median(each[name] for each in runs), 3) for name in runs[0]}
        rows.append({"processes": processes, "threads_each": threads, **medians})
    write_rows("expert_processes", rows)


def make_shared_model() -> PreTrainedModel:
    """Return a bfloat16 model with shared experts and random weights."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        hidden_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=8192,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        dtype=torch.bfloat16,
    )
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def run(folder: str, processes: int, threads: int, *options: str) -> dict[str, Any]:
    """Start the processes and return the figures of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank-of", folder, "--threads", str(threads), *options],
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


def measure(folder: str, threads: int) -> None:
    """Load the model in this process and, on rank 0, print the figures as JSON."""
    torch.set_num_threads(threads)
    with rule_file("int4") as rules:
        model = optimize_and_load(folder, rules, progress=False, threads=threads)
    if model.moegraft.follows:
        model.moegraft.follow()
        return
    with torch.inference_mode():
        ids = torch.randint(8192, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        prompt_s = statistics.median(timed(lambda: model(input_ids=ids, logits_to_keep=1), 3))
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
    model.moegraft.close()
    print(json.dumps({"decode_ms": 1e3 * statistics.median(times), "prompt_ms": 1e3 * prompt_s, "wait_us": max(waits, default=0.0)}))


def measure_shared(folder: str, shares: str) -> None:
    """Load the model in this process and, on rank 0, print the time of a prompt with and without the order as JSON."""
    torch.set_num_threads(1)
    with rule_file("int4") as rules:
        divided = Path(rules).read_text() + f"parallel: {{shares: {shares}}}\n"
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(divided)
            file.flush()
            model = optimize_and_load(folder, file.name, progress=False, threads=1)
    if model.moegraft.follows:
        model.moegraft.follow()
        return
    times: dict[str, list[tuple[float, float]]] = {"before the wait": [], "in the block's order": []}
    with torch.inference_mode():
        ids = torch.randint(8192, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            expected = model(input_ids=ids, logits_to_keep=1).logits
        overlaps = [module.overlap for module in model.modules() if isinstance(module, HybridExperts)]
        orders = [overlap.order for overlap in overlaps]
        if not {*orders} <= {"before", "after"}:
            raise SystemExit(f"shared experts do not run beside the others' work: {orders}")
        for _ in range(ROUNDS):
            for name, taken in times.items():
                for overlap, order in zip(overlaps, orders, strict=True):
                    overlap.order = order if name == "before the wait" else "other"
                waited, start = waited_us(model)[0][0], time.perf_counter()
                found = model(input_ids=ids, logits_to_keep=1).logits
                taken.append((1e3 * (time.perf_counter() - start), (waited_us(model)[0][0] - waited) / 1e3))
                if not torch.equal(found, expected):
                    raise SystemExit(f"{name}: other logits")
    model.moegraft.close()
    figures = {}
    for name, taken in times.items():
        prompt_ms, wait_ms = (sorted(each) for each in zip(*taken, strict=True))
        figures[name] = {f"p{part}_ms": round(prompt_ms[part * len(prompt_ms) // 100], 1) for part in (20, 50, 80)}
        figures[name]["wait_ms"] = round(statistics.median(wait_ms), 1)  # of all layers
    print(json.dumps(figures))


def waited_us(model: PreTrainedModel) -> list[tuple[float, int]]:
    """Return the whole time that rank 0 has waited for each other rank, and how often it asked."""
    ranks = model.moegraft.statistics()["ranks"][1:]
    return [(rank["waited_us"] * rank["calls"], rank["calls"]) for rank in ranks]


if __name__ == "__main__":
    main()
