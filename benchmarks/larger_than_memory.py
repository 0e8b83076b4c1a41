"""How fast is a model that is larger than memory, and how near to what the disk allows?

    python benchmarks/larger_than_memory.py                      # as root: the processes' memory is limited by control groups
    python benchmarks/larger_than_memory.py --limits 4 --rounds 1

48 layers of Qwen3-30B-A3B's shapes in Q4_0, 17 GB: moegraft with experts in frames (`memory: auto`), moegraft with the mapped file, whose
pages the system reads, and llama.cpp with the mapped GGUF file of the same bits, without repacking, for which the limit is too small. The
limit counts pages of files as well. Weights are random; routers choose by token, as trained ones nearly do, and some experts more often
(`write_model`, `skew`), so that what matters for a cache is stated by its hits: `resident` is the share of demanded experts that were in
memory. Tokens are sampled at a high temperature, as a random model repeats itself.

In each round each system is opened once, with none of the files in the page cache, reads a prompt to fill its memory, then one that is
measured, and decodes. `bound_tokens_s` is what the bytes that were read allow at the bandwidth of direct reads measured just before;
`wait_gbps` is the rate at which experts arrived while some thread waited for one.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from harness.llama_cpp import LlamaCpp, is_installed, write_model
from harness.models import config_of, injected
from harness.peers import PeerFailed, PeerProcess
from harness.record import Recorder, hardware, parser
from harness.rounds import seconds
from harness.whole_models import Phases, phases_of, phases_of_engine

from moegraft.injection.estimate.measure import measure_disk
from moegraft.injection.injected import injection_of

LAYERS, SKEW, GIB = 48, 0.3, 1 << 30
SYSTEMS = ("frames", "mapped", "llama.cpp")
SAMPLED = {"temperature": 10.0, "top_k": 0, "top_p": 1.0}
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one phase: tokens per second, and what was read of the experts in frames."""

    tokens_s: float
    tokens: int
    read_bytes: float = 0.0
    resident: float = 0.0
    wait_gbps: float = 0.0


def limit_memory(limit_bytes: int) -> None:
    """Move this process into a control group of its own with a limit of memory."""
    version_1 = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if version_1 else GROUPS) / f"moegraft-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def drop_pages(folder: Path) -> None:
    """Remove files from the page cache: pages that another process has read count to its limit, and would be free to those measured."""
    os.sync()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def limited(system: str, folder: Path, limit_bytes: int) -> Iterator[tuple[Phases, Callable[[], dict[str, float]]]]:
    """Open a system with a limit of memory; yield its phases, and what returns its counts of what was read."""
    limit_memory(limit_bytes)
    with torch.inference_mode():
        if system == "llama.cpp":
            engine = LlamaCpp(folder / "model.gguf", torch.get_num_threads(), repack=False)
            with phases_of_engine(engine, SAMPLED) as phases:
                yield phases, dict
            return
        model = injected(folder, rules(folder, "auto" if system == "frames" else "null"), gguf=folder / "model.gguf")
        injection = injection_of(model)
        assert injection is not None, "the model is injected"
        yield phases_of(model, SAMPLED), lambda: dict(injection.statistics()["files"])  # type: ignore[arg-type] # a mapping of numbers


def rules(folder: Path, memory: str) -> str:
    kept = f"cache_dir: {folder / 'packed'}, memory: {memory}"
    return f"extends: cpu\nvars: {{weights: int4, linear: int4, {kept}}}\n"


def figures(peer: tuple[Phases, Callable[[], dict[str, float]]], phase: str, tokens: int) -> Figures:
    phases, counts = peer
    before = counts()
    taken_s = phases.decode(tokens + 1, 8, True) if phase == "decode" else seconds(lambda: phases.prefill(tokens))
    read = {name: value - before.get(name, 0) for name, value in counts().items()}
    if not read:
        return Figures(tokens / taken_s, tokens)
    waiting_s = read["waited_ms"] / 1e3
    wait_gbps = read["waited_bytes"] / waiting_s / 1e9 if waiting_s else 0.0
    return Figures(tokens / taken_s, tokens, read["read_bytes"], read["resident"] / max(read["demanded"], 1), wait_gbps)


def row(found: list[Figures], disk_gbps: float) -> dict[str, object]:
    def median(name: str) -> float:
        return statistics.median(getattr(each, name) for each in found)

    result: dict[str, object] = {"tokens_s": round(median("tokens_s"), 2)}
    if median("read_bytes"):
        bound = found[0].tokens / (median("read_bytes") / (disk_gbps * 1e9))
        result |= {"bound_tokens_s": round(bound, 2), "read_gb_per_token": round(median("read_bytes") / found[0].tokens / 1e9, 3)}
        result |= {"resident": round(median("resident"), 3), "wait_gbps": round(median("wait_gbps"), 2)}
    return result


def main() -> None:
    options = parser(__doc__, rounds=2, new=16)
    options.add_argument("--prompt", type=int, default=512, help="its tokens")
    options.add_argument("--limits", type=int, nargs="+", default=(4, 8), metavar="GIB", help="of each process's memory")
    options.add_argument("--folder", type=Path, help="where the model is written, or found; by default a temporary folder, 34 GB")
    options.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS, help="the first one is compared with the others")
    given = options.parse_args()
    systems = [name for name in given.systems if name != "llama.cpp" or is_installed()]
    keys = ("limit_gib", "phase", "system", "hardware")
    rows = Recorder("larger_than_memory", ("torch", "transformers", "llama-cpp-python"), replaces=keys, write=given.write)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        config = config_of("qwen3-30b-a3b", LAYERS)
        if not (folder / "model.gguf").exists():
            folder.mkdir(exist_ok=True)
            config.save_pretrained(folder)
            write_model(folder / "model.gguf", config, "int4", skew=SKEW)
        if not (folder / "packed").exists():
            injected(folder, rules(folder, "null"), gguf=folder / "model.gguf")
        for limit in given.limits:
            found: dict[tuple[str, str], list[Figures]] = {}
            failures: dict[str, str] = {}
            disk = []
            for _ in range(given.rounds):
                disk.append(measure_disk(folder).best_gbps)
                for system in systems:
                    drop_pages(folder)
                    try:
                        with PeerProcess(system, limited, system, folder, limit * GIB) as peer:
                            peer.call(figures, "prefill", given.prompt)
                            for phase, tokens in (("prefill", given.prompt), ("decode", given.new // 2), ("decode", given.new)):
                                result = peer.call(figures, phase, tokens)
                                if tokens != given.new // 2:  # the first steps are recorded
                                    found.setdefault((phase, system), []).append(result)
                    except PeerFailed as failed:
                        failures[system] = str(failed)
            about = {"limit_gib": limit, "layers": LAYERS, "rounds": given.rounds, "hardware": hardware()}
            for phase, tokens in (("prefill", given.prompt), ("decode", given.new)):
                mine = statistics.median(each.tokens_s for each in found[phase, systems[0]])
                for system in systems:
                    each = {"phase": f"prompt of {tokens}" if phase == "prefill" else "decode", "system": system}
                    measured = found.get((phase, system))
                    if measured is None:
                        rows.add({**about, **each, "failure": failures.get(system, "")})
                        continue
                    gbps = statistics.median(disk)
                    figure = row(measured, gbps)
                    ratio = mine / statistics.median(one.tokens_s for one in measured)
                    rows.add({**about, **each, **figure, "frames_times": round(ratio, 2), "disk_gbps": round(gbps, 2)})


if __name__ == "__main__":
    main()
