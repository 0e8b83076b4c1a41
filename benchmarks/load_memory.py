"""How much memory does loading take? Peak anonymous memory of stock `from_pretrained` and of `optimize_and_load`, side by side.

Each provider loads the same checkpoint in a process of its own, whose RssAnon is sampled. Mapped file pages do not count, since the
operating system may drop them at any time. The required bound is 110% of the packed experts and the other weights, and 105% for
checkpoints whose weights stay in the format of the file: MXFP4 in the shapes of gpt-oss-20b, FP8 in those of DeepSeek-V2-Lite, of four
layers each and with a small vocabulary (`--stored-scale` makes them smaller).
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from harness.checkpoints import write_checkpoint
from harness.models import config_of
from harness.peers import PeerProcess
from harness.record import Recorder, parser

MIB = 1 << 20
PROVIDERS = ("stock", "cpu-exact", "cpu")
FORMATS = {"mxfp4": "gpt-oss-20b", "fp8": "deepseek-v2-lite"}  # and whose shapes
STORED_RULES = """
rules:
- match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {weights: stored}}
- match: {kind: linear, name: '\\.([qkvo]|q_[ab]|kv_a|gate|up|down)_proj(_with_mqa)?$'}
  replace: {class: quantized_linear, kwargs: {weights: stored}}
"""


def make_checkpoint(folder: Path, name: str, scale: int = 1, layers: int = 4) -> None:
    """Write a checkpoint of a dtype, of which most are experts, or one of `FORMATS` with rules that keep it; `scale` divides widths."""
    if name in FORMATS:
        write_checkpoint(folder, config_of(FORMATS[name], layers, scale), name)  # type: ignore[arg-type]
        (folder / "rules.yaml").write_text(STORED_RULES)
        return
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 48, "num_experts_per_tok": 4, "vocab_size": 2048}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    write_checkpoint(folder, config_of("qwen3-30b-a3b", layers, **sizes, **heads, dtype=getattr(torch, name)))


def rss_anon_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """Sample RssAnon every 2 ms; the first number of the list is the peak."""
    peak, stop = [0], threading.Event()

    def run() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], rss_anon_bytes())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield peak
    stop.set()
    thread.join()


def measure(provider: str, folder: Path) -> dict[str, float]:
    """Load once, in a process of its own, and report the peak and the bytes held afterwards."""
    from transformers import AutoModelForCausalLM

    from moegraft.injection import optimize_and_load

    AutoModelForCausalLM.from_config  # noqa: B018 (the import's own memory belongs to the baseline)
    if provider == "stored":  # which imports much more, on first use
        with tempfile.TemporaryDirectory() as small:
            settings = json.loads((folder / "config.json").read_text())["quantization_config"]
            make_checkpoint(Path(small), settings["quant_method"], 64, layers=2)
            optimize_and_load(small, Path(small) / "rules.yaml", progress=False)
    baseline = rss_anon_bytes()
    start = time.perf_counter()
    with sampled_peak() as peak:
        if provider == "stock":
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        else:
            rules = folder / "rules.yaml" if provider == "stored" else provider
            model = optimize_and_load(folder, rules, progress=False)
    seconds = time.perf_counter() - start
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(swap.footprint.total_bytes for swap in model.moegraft.plan.swaps) if provider != "stock" else 0
    return {"peak_bytes": peak[0] - baseline, "held_bytes": held, "seconds": seconds}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--stored-scale", type=int, default=1)
    given = options.parse_args()
    rows = Recorder("load_memory", write=given.write)
    for name in ("float32", "bfloat16", *FORMATS):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            make_checkpoint(folder, name, given.stored_scale, 4 if name in FORMATS else given.layers)
            checkpoint_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            for provider in ("stored",) if name in FORMATS else PROVIDERS:
                with PeerProcess(provider, nullcontext, provider) as peer:
                    found = peer.call(measure, folder)
                held, peak = found["held_bytes"], found["peak_bytes"]
                row = {"provider": provider, "checkpoint_dtype": name, "checkpoint_mib": round(checkpoint_bytes / MIB)}
                row |= {"held_mib": round(held / MIB), "peak_mib": round(peak / MIB), "peak_over_held": round(peak / held, 3)}
                rows.add({**row, "seconds": round(found["seconds"], 2)})


if __name__ == "__main__":
    main()
