"""How long does a start take, from the start of the process to the first token? A checkpoint with random weights, beside llama.cpp.

The checkpoint has layers of Qwen3-30B-A3B's shapes in bfloat16, 16 GB by default; `moegraft quantize` makes the GGUF file of it. Providers
alternate, each start is a process of its own that answers a prompt of 32 tokens, and the page cache is emptied before a cold start (as
root), or what will be read is read before a warm one. `safetensors` packs the experts at each start; `packing` packs them into a cache
folder and `packed` maps this at the next start. Just before each start the same files are read and nothing else is done, in the same state
of the page cache: `read_s`. `others_share` is what other processes used of the cores during the start of the median.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from harness.llama_cpp import LlamaCpp, is_installed
from harness.record import parser, write_rows
from harness.rounds import machine_s, percentiles

GGUF_TYPES = {"int8": "Q8_0", "int4": "Q4_0"}
GGUF, CACHE, RULES = "model.gguf", "packed", "rules-{}.yaml"
PROMPT_TOKENS = 32
LEAST_SIMILARITY = 0.98  # cosine of two providers' logits; they round activations differently
CHUNK = 1 << 23


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to start.

    Attributes:
        reads: patterns of the files that it reads.
        caches: whether the rules name a cache folder; `fills` whether the folder is empty before the start.
    """

    name: str
    reads: tuple[str, ...]
    caches: bool = False
    fills: bool = False


PROVIDERS = (
    Provider("safetensors", ("*.safetensors",)),
    Provider("packing", ("*.safetensors",), caches=True, fills=True),
    Provider("packed", ("rest.safetensors", f"{CACHE}/*.experts"), caches=True),
    Provider("gguf", (GGUF,)),
    Provider("llama.cpp", (GGUF,)),
)


def make_files(folder: Path, layers: int, weights: str) -> None:
    """Write the checkpoint, the rule files and the GGUF file."""
    from harness.checkpoints import write_checkpoint, write_gguf
    from harness.models import config_of

    write_checkpoint(folder, config_of("qwen3-30b-a3b", layers))
    for caches in (False, True):
        cache = f", cache_dir: '{folder / CACHE}'" if caches else ""
        rules = f"extends: cpu\nvars: {{weights: {weights}, linear: {weights}{cache}}}\n"
        (folder / RULES.format(caches)).write_text(rules)
    write_gguf(folder, GGUF_TYPES[weights])


def start(provider: str, folder: Path, threads: int) -> dict[str, Any]:
    """Answer the prompt; return the times of `time.monotonic` when modules were imported, when the model was loaded, and of the token."""
    prompt = [7 + 13 * place for place in range(PROMPT_TOKENS)]
    times: dict[str, Any] = {}
    if provider == "llama.cpp":
        import llama_cpp  # noqa: F401 (a part of the time to import)

        times["imported"] = time.monotonic()
        with LlamaCpp(folder / GGUF, threads) as peer:
            times["loaded"] = time.monotonic()
            peer.prefill(prompt)
            logits = peer.logits().copy()
            times["token"] = time.monotonic()
    else:
        import torch

        from moegraft.injection import optimize_and_load

        caches = next(each.caches for each in PROVIDERS if each.name == provider)
        times["imported"] = time.monotonic()
        gguf = folder / GGUF if provider == "gguf" else None
        model = optimize_and_load(folder, folder / RULES.format(caches), gguf=gguf, threads=threads, progress=False)
        times["loaded"] = time.monotonic()
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0
        )
        logits = made.logits[0][0].float().numpy()
        times["token"] = time.monotonic()
    np.save(folder / f"logits-{provider}.npy", logits)
    return times


def files(folder: Path, provider: Provider) -> list[Path]:
    return [path for pattern in provider.reads for path in sorted(folder.glob(pattern))]


def read_all(paths: Iterable[Path]) -> float:
    """Read files in order, without keeping anything, and return the seconds."""
    begin, chunk = time.perf_counter(), bytearray(CHUNK)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.readinto(chunk):
                pass
    return time.perf_counter() - begin


def empty_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def run_start(provider: Provider, folder: Path, threads: int) -> dict[str, float]:
    """Start a process, and return what `start` returns.

    Raises:
        SystemExit: the process failed.
    """
    command = [sys.executable, __file__, "--start", provider.name, "--in", str(folder), "--threads", str(threads)]
    # As after an installation, modules have been compiled, by the first start.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{provider.name}: {done.stderr[-3000:]}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def timed_start(provider: Provider, folder: Path, threads: int, *, cold: bool) -> dict[str, float]:
    """Bring the page cache into its state, and return the seconds of one start and of reading its files."""
    if provider.fills:
        shutil.rmtree(folder / CACHE, ignore_errors=True)
    paths = files(folder, provider)
    settle: Callable[[], object] = empty_page_cache if cold else lambda: read_all(paths)
    settle()
    read_s = read_all(paths)
    settle()
    before, children, begin = machine_s(), os.times(), time.monotonic()
    times = run_start(provider, folder, threads)
    wall, after = time.monotonic() - begin, os.times()
    own = after.children_user + after.children_system - children.children_user - children.children_system
    others = max(0.0, machine_s() - before - own) / (wall * (os.cpu_count() or 1))
    return {
        "first_token_s": times["token"] - begin,
        "import_s": times["imported"] - begin,
        "load_s": times["loaded"] - times["imported"],
        "prompt_s": times["token"] - times["loaded"],
        "cpu_s": own,
        "read_s": read_s,
        "others_share": others,
    }


def row_of(provider: Provider, state: str, starts: Sequence[dict[str, float]], nbytes: int) -> dict[str, object]:
    tokens = [each["first_token_s"] for each in starts]
    middle = sorted(starts, key=lambda each: each["first_token_s"])[len(starts) // 2]
    row: dict[str, object] = {"provider": provider.name, "page_cache": state, "read_gb": round(nbytes / 1e9, 2), "starts": len(starts)}
    row |= percentiles(tokens, "first_token_s", 2)
    columns = ("import_s", "load_s", "prompt_s", "cpu_s", "read_s")
    row |= {name: round(statistics.median(each[name] for each in starts), 2) for name in columns}
    return row | {"others_share": round(middle["others_share"], 3)}


def check_logits(folder: Path) -> None:
    """Refuse providers that do not compute the same."""
    found = {path.stem: np.load(path) for path in folder.glob("logits-*.npy")}
    first, *others = found
    for name in others:
        a, b = found[first].astype(np.float64), found[name].astype(np.float64)
        similarity = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        print(f"{first} and {name}: cosine of the logits {similarity:.4f}", flush=True)
        if similarity < LEAST_SIMILARITY:
            raise SystemExit(f"{first} and {name} do not compute the same")


def main() -> None:
    options = parser(__doc__, layers=13, rounds=3)
    options.add_argument("--weights", choices=GGUF_TYPES, default="int8")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--states", nargs="+", choices=("cold", "warm"), default=["cold", "warm"] if os.geteuid() == 0 else ["warm"])
    options.add_argument("--providers", nargs="+", choices=[each.name for each in PROVIDERS])
    options.add_argument("--in", dest="folder", type=Path, help="an existing folder for the files; by default a temporary one")
    options.add_argument("--start", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.start:
        print(json.dumps(start(given.start, given.folder, given.threads)))
        return
    names = given.providers or [each.name for each in PROVIDERS if each.name != "llama.cpp" or is_installed()]
    providers = [each for each in PROVIDERS if each.name in names]
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary)
        make_files(folder, given.layers, given.weights)
        for provider in providers:
            run_start(provider, folder, given.threads)
        check_logits(folder)
        rows: dict[tuple[str, str], dict[str, object]] = {}
        taken: dict[tuple[str, str], list[dict[str, float]]] = {}
        for turn, state, provider in product(range(given.rounds), given.states, providers):
            found = timed_start(provider, folder, given.threads, cold=state == "cold")
            print(turn, state, provider.name, {name: round(value, 2) for name, value in found.items()}, flush=True)
            case = provider.name, state
            taken.setdefault(case, []).append(found)
            nbytes = sum(path.stat().st_size for path in files(folder, provider))
            rows[case] = {"weights": given.weights, "threads": given.threads, **row_of(provider, state, taken[case], nbytes)}
            if given.write:
                write_rows("loading", list(rows.values()), ("torch", "transformers", "llama_cpp_python"))


if __name__ == "__main__":
    main()
