"""How fast does the CPU compute with each stored format? One layer of Qwen3-30B-A3B's shapes, and a whole model from a GGUF file.

Formats are measured one after the other, each interleaved with int8 and the probe of reading. Where `--ggml` names llama.cpp's
libggml-cpu.so, a linear of one token is measured as well, beside ggml's dot products of the same type over as many rows and with as many
threads. The package `llama-cpp-python` has the library in `llama_cpp/lib`; `llama_cpp_peer.py` explains how to build it.

The model is one file with gate and up in Q4_K and down in Q6_K, which moegraft reads with the rules 'cpu', and llama.cpp where
`llama-cpp-python` is installed. The two alternate, each in a process of its own; the row of one that crashes has its `failure`.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from _probe import ReadProbe
from cpu_experts import HIDDEN, INTERMEDIATE, NUM_EXPERTS, SETTLE_S, TOP_K, pack, routings
from cpu_model import Phases, config, llama_cpp_phases, phases_of, provider_rows
from llama_cpp_peer import MIXED, LlamaCpp, Sizes, write_model
from record import commit, hardware, percentiles, seconds, versions, write_rows

from moegraft.cpu_backend import GateSpec, PackedExperts, PackedLinear, Runtime
from moegraft.injection import optimize_and_load
from moegraft.operators.reference import reference_experts
from moegraft.operators.weight_formats import FORMATS, STORED_FORMATS

CONTROL = "int8"
WEIGHT_TYPES = ("int4", "q4_k+q6_k", *sorted(STORED_FORMATS))
ROUNDS = {1: 40, 512: 8}
CALLS = {1: 8, 512: 1}
CHECKED = 2  # experts of the check
ERROR_LIMIT = 2e-2  # weights are not rounded
ROWS = 4 * TOP_K * 3 * INTERMEDIATE  # of HIDDEN columns, of the linear: more than the last-level cache holds


class GgmlDots:
    """ggml's dot products of a type with ROWS rows of HIDDEN columns, beside a linear of as many."""

    def __init__(self, library: Path, threads: int) -> None:
        self.threads = threads
        self._folder = tempfile.TemporaryDirectory()
        built = Path(self._folder.name) / "dots.so"
        source = Path(__file__).with_name("_ggml_dots.cpp")
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-pthread", "-std=c++17", str(source), "-o", str(built), "-ldl"], check=True)
        self._library = ctypes.CDLL(str(built))
        self._library.ggml_open.restype = ctypes.c_void_p
        self._library.ggml_dots.restype = ctypes.c_double
        size, integer, address = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self._library.ggml_dots.argtypes = (address, integer, address, size, integer, integer, address, address, integer)
        self._traits = self._library.ggml_open(str(library).encode())
        if not self._traits:
            raise SystemExit(f"{library}: no library with ggml's CPU kernels; give the path of libggml-cpu.so")
        self._x = np.random.default_rng(0).standard_normal(HIDDEN, np.float32)
        self._out = np.empty(ROWS, np.float32)

    def open(self, weight_type: str, runtime: Runtime) -> dict[str, Callable[[], float]]:
        """Return what computes with random rows and returns its seconds: `linear`, and `ggml` where it has a kernel."""
        from gguf import GGMLQuantizationType, quantize

        found, random = FORMATS[weight_type], np.random.default_rng(0)
        name, row_bytes = found.gguf, found.nbytes(HIDDEN)
        if name is None:
            return {}
        kind = GGMLQuantizationType[name]
        values = random.standard_normal((64, HIDDEN), np.float32)
        some = found.random_blocks(values.shape, random) if found.stored else quantize(values, kind)
        rows = np.tile(some.reshape(64, row_bytes), (ROWS // 64, 1))

        def dots() -> float:
            arguments = (int(kind), rows.ctypes.data, row_bytes, ROWS, HIDDEN, self._x.ctypes.data, self._out.ctypes.data, self.threads)
            return float(self._library.ggml_dots(self._traits, *arguments))

        if dots() < 0.0:
            return {}
        linear = PackedLinear(ROWS, HIDDEN, weight_type)
        linear.pack_blocks(rows) if found.stored else linear.pack(np.tile(values, (ROWS // 64, 1)))
        x, out = self._x[None], np.empty((1, ROWS), np.float32)
        runtime.linear(linear, x, out)
        error = float(np.linalg.norm(out[0] - self._out) / np.linalg.norm(self._out))
        if not error <= 5e-2:
            raise SystemExit(f"{weight_type}: the linear differs from ggml's by {error:.2e}; not measured")
        return {"linear": lambda: seconds(lambda: runtime.linear(linear, x, out)), "ggml": dots}


def layer(packed: PackedExperts, runtime: Runtime, tokens: int, seed: int) -> Callable[[], float]:
    """Return a function that runs the layer with the next routing, and returns its seconds."""
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = torch.empty_like(x)
    ways = routings(tokens, 1 << 20, seed)

    def run() -> float:
        ids, share = next(ways)
        arrays = (x.view(torch.uint16).numpy(), ids.numpy(), share.numpy(), out.view(torch.uint16).numpy())
        return seconds(lambda: runtime.forward(packed, *arrays))

    return run


def check(packed: PackedExperts, runtime: Runtime) -> float:
    """Return the relative error against float64 on the same weights; end the program if it is too large."""
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids, share = torch.tensor([[0, 1], [1, 0], [1, 0]]), torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.4, 0.6]])
    out = torch.empty_like(x)
    runtime.forward(packed, x.view(torch.uint16).numpy(), ids.numpy(), share.numpy(), out.view(torch.uint16).numpy())
    parts = (torch.stack([torch.from_numpy(packed.unpack(expert, part)) for expert in range(CHECKED)]) for part in ("gate", "up", "down"))
    expected = reference_experts(x, ids, share, *parts, GateSpec("silu"))
    error = float((out.double() - expected).norm() / expected.norm())
    if not error <= ERROR_LIMIT:
        raise SystemExit(f"{packed.weight_type}: relative error {error:.2e} against the reference; not measured")
    return error


def layer_rows(weight_types: tuple[str, ...], isa: str, threads: int, rounds: float, ggml: GgmlDots | None) -> Iterator[dict[str, object]]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    weights = {part: (torch.randn(8, *size, generator=generator) * 0.02).bfloat16() for part, size in sizes.items()}
    read, runtime, control = ReadProbe(threads), Runtime(threads, isa), pack(weights, CONTROL)
    for number, weight_type in enumerate(weight_types):
        packed = pack(weights, weight_type)
        error = check(packed, runtime)
        for tokens, most in ROUNDS.items():
            runs = {"ours": layer(packed, runtime, tokens, number), CONTROL: layer(control, runtime, tokens, 1000 + number)}
            if ggml is not None and tokens == 1 and "+" not in weight_type:
                runs |= ggml.open(weight_type, runtime)
            times: dict[str, list[float]] = {name: [] for name in runs}
            rates: list[float] = []
            for turn in range(max(3, int(most * rounds)) + 1):
                for name, run in runs.items():
                    time.sleep(SETTLE_S)
                    for call in range((CALLS[tokens] if name in ("ours", CONTROL) else 2) + 1):
                        if call > 0 or turn == 0:
                            taken = run()
                            if turn > 0:
                                times[name].append(taken)
                if tokens == 1:
                    rates.extend(read.run() for _ in range(3))
            bytes_read = packed.expert_bytes * min(TOP_K * tokens, NUM_EXPERTS)
            p50 = {name: statistics.median(found) for name, found in times.items()}
            rate = statistics.median(rates) if rates else float("nan")
            row: dict[str, object] = {
                "provider": f"ours-{runtime.isa}",
                "weights": weight_type,
                "threads": threads,
                "tokens": tokens,
                **percentiles(1e3 * np.asarray(times["ours"]), "ms", 3),
                "gb_s": round(bytes_read / p50["ours"] / 1e9, 1),
                "read_probe_gb_s": round(rate / 1e9, 1) if rates else "",
                "read_share": round(bytes_read / p50["ours"] / rate, 3) if rates else "",
                "int8_p50_ms": round(1e3 * p50[CONTROL], 3),
                "over_int8_time": round(p50["ours"] / p50[CONTROL], 3),
                "linear_p50_ms": round(1e3 * p50["linear"], 3) if "ggml" in p50 else "",
                "ggml_p50_ms": round(1e3 * p50["ggml"], 3) if "ggml" in p50 else "",
                "over_ggml": round(p50["ggml"] / p50["linear"], 2) if "ggml" in p50 else "",
                "relative_error": f"{error:.1e}",
            }
            print(
                f"{weight_type:10s} T={tokens:<4d} {row['p50_ms']:9.3f} ms  {row['gb_s']:6} GB/s ({row['read_share'] or '-'} of read)"
                f"  {row['over_int8_time']} of int8's time  {row['over_ggml'] or '-'} times ggml's speed",
                flush=True,
            )
            yield row


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
    parser.add_argument("--weights", nargs="+", default=WEIGHT_TYPES, help="formats of the layer")
    parser.add_argument("--isa", default="", choices=["", *Runtime.available_isas()], help="another instruction set than the best")
    parser.add_argument("--ggml", type=Path, help="llama.cpp's libggml-cpu.so, whose dot products are measured beside the layer")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--turns", type=int, default=2, help="of the model")
    parser.add_argument("--only", choices=["layer", "model"])
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    packages = ("torch", "transformers", "numpy", "gguf", "llama-cpp-python")
    if arguments.only != "model":
        ggml = GgmlDots(arguments.ggml, arguments.threads) if arguments.ggml else None
        rows: list[dict[str, object]] = []
        provenance = {"hardware": hardware(), "commit": commit(), "versions": versions(*packages)}  # before results change the tree
        for row in layer_rows(tuple(arguments.weights), arguments.isa, arguments.threads, arguments.rounds, ggml):
            rows.append({**row, **provenance})
            if not arguments.no_write:
                write_rows("gguf_types", rows, packages)
    if arguments.only != "layer":
        rows = model_rows(arguments.layers, arguments.turns, arguments.threads)
        if not arguments.no_write:
            print(write_rows("gguf_model", rows, packages))


if __name__ == "__main__":
    main()
