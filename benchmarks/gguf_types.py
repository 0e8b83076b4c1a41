"""How fast are a GGUF file's own types on the CPU beside int4 and int8? One layer of Qwen3-30B-A3B's shapes, and a whole model from a file.

The layer is measured as by `cpu_experts.py`, with all types interleaved in one run. The model is one file with gate and up in Q4_K and down
in Q6_K, which moegraft reads with the rules 'cpu', and llama.cpp where `llama-cpp-python` is installed (`llama_cpp_peer.py` explains how to
build it). The two alternate, each in a process of its own; the row of one that crashes has its `failure`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from _probe import ReadProbe
from cpu_experts import ROUNDS, check, draw_weights, measure, ours, show
from cpu_model import Phases, config, llama_cpp_phases, phases_of, provider_rows
from llama_cpp_peer import MIXED, LlamaCpp, Sizes, write_model
from record import write_rows

from moegraft.cpu_backend import Runtime
from moegraft.injection import optimize_and_load
from moegraft.operators.weights import STORED_FORMATS

WEIGHT_TYPES = ("int4", "int8", "q4_k+q6_k", *sorted(STORED_FORMATS))


def layer_rows(threads: int, rounds: float) -> list[dict[str, object]]:
    weights = draw_weights()
    providers = list(ours(weights, threads, WEIGHT_TYPES))
    errors = {provider: check(provider, weights) for provider in providers}
    read = ReadProbe(threads)
    rows: list[dict[str, object]] = []
    for tokens in ROUNDS:
        found = measure(providers, errors, tokens, max(3, int(ROUNDS[tokens] * rounds)), read)
        for row in found:
            show(row)
        rows += found
    return rows


@contextmanager
def moegraft(folder: Path, threads: int) -> Iterator[Phases]:
    torch.set_num_threads(threads)
    model = optimize_and_load(folder, "cpu", gguf=folder / "model.gguf", progress=False)
    with torch.inference_mode():
        yield phases_of(model)


@contextmanager
def llama_cpp(folder: Path, threads: int) -> Iterator[Phases]:
    with LlamaCpp(folder / "model.gguf", threads) as peer:
        yield llama_cpp_phases(peer)


def model_rows(layers: int, turns: int, threads: int) -> list[dict[str, object]]:
    providers = {"moegraft": moegraft} | ({"llama.cpp": llama_cpp} if find_spec("llama_cpp") else {})
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config(layers).save_pretrained(folder)
        write_model(folder / "model.gguf", Sizes(layers=layers), MIXED)
        for turn in range(turns):
            for provider, open_provider in providers.items():
                found = provider_rows(provider, (open_provider, folder, threads), 5, 48)
                rows += [{"turn": turn, "weights": MIXED, **row} for row in found]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=Runtime().threads)
    parser.add_argument("--rounds", type=float, default=1.0, help="factor on the default number of rounds")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", choices=["layer", "model"])
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    packages = ("torch", "transformers", "numpy", "gguf", "llama-cpp-python")
    if arguments.only != "model":
        rows = layer_rows(arguments.threads, arguments.rounds)
        if not arguments.no_write:
            print(write_rows("gguf_types", rows, packages))
    if arguments.only != "layer":
        rows = model_rows(arguments.layers, arguments.turns, arguments.threads)
        if not arguments.no_write:
            print(write_rows("gguf_model", rows, packages))


if __name__ == "__main__":
    main()
