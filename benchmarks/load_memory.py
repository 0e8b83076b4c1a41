"""How much memory does loading take? Peak anonymous memory of stock `from_pretrained` and of `optimize_and_load`, side by side.

Each provider loads the same checkpoint in a process of its own, whose RssAnon is sampled. Mapped file pages do not count, since the
operating system may drop them at any time. The required bound is 110% of the packed experts and the other weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from record import write_rows

MIB = 1 << 20
PROVIDERS = ("stock", "cpu-exact", "cpu")


def make_checkpoint(folder: Path, layers: int, dtype: torch.dtype) -> None:
    """Write a random Qwen3-MoE checkpoint that consists mostly of experts, about 72 MiB per layer in float32."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=2048,
        num_experts=48, num_experts_per_tok=4, moe_intermediate_size=256, intermediate_size=512, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder, max_shard_size="200MB")


def rss_anon_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class PeakSampler:
    """A thread that samples RssAnon every 2 ms."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.peak_bytes = max(self.peak_bytes, rss_anon_bytes())
            time.sleep(0.002)

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(provider: str, folder: Path) -> dict[str, float]:
    """Load once in a child process, and report the peak and the bytes held afterwards."""
    from transformers import AutoModelForCausalLM

    from moegraft.injection import optimize_and_load

    AutoModelForCausalLM.from_config  # noqa: B018 (the import's own memory belongs to the baseline)
    baseline = rss_anon_bytes()
    start = time.perf_counter()
    with PeakSampler() as sampler:
        if provider == "stock":
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        else:
            model = optimize_and_load(folder, provider, progress=False)
    seconds = time.perf_counter() - start
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(swap.footprint.total_bytes for swap in model.moegraft.plan.swaps) if provider != "stock" else 0
    return {"peak_bytes": sampler.peak_bytes - baseline, "held_bytes": held, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--provider", choices=PROVIDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.provider:
        print(json.dumps(measure(arguments.provider, arguments.folder)))
        return
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder), arguments.layers, dtype)
            checkpoint_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
            for provider in PROVIDERS:
                command = [sys.executable, __file__, "--provider", provider, "--folder", folder]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
                rows.append(
                    {
                        "provider": provider,
                        "checkpoint_dtype": str(dtype).removeprefix("torch."),
                        "checkpoint_mib": round(checkpoint_bytes / MIB),
                        "held_mib": round(found["held_bytes"] / MIB),
                        "peak_mib": round(found["peak_bytes"] / MIB),
                        "peak_over_held": round(found["peak_bytes"] / found["held_bytes"], 3),
                        "seconds": round(found["seconds"], 2),
                    }
                )
                print(rows[-1], flush=True)
    print(write_rows("load_memory", rows))


if __name__ == "__main__":
    main()
