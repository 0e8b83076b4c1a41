"""Peak anonymous memory of loading a checkpoint whose weights stay in the format of the file, in a process of its own."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Literal

from harness.checkpoints import write_checkpoint
from harness.memory import rss_anon_bytes, sampled_peak
from harness.models import config_of

from moegraft.injection import optimize_and_load

Format = Literal["mxfp4", "fp8"]
SHAPES: dict[Format, str] = {"mxfp4": "gpt-oss-20b", "fp8": "deepseek-v2-lite"}
RULES = """
rules:
- match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {weights: stored}}
- match: {kind: linear, name: '\\.([qkvo]|q_[ab]|kv_a|gate|up|down)_proj(_with_mqa)?$'}
  replace: {class: quantized_linear, kwargs: {weights: stored}}
"""


def make_checkpoint(folder: Path, name: Format, scale: int, layers: int = 4) -> None:
    """Write a checkpoint with rules that keep its format; `scale` divides widths."""
    write_checkpoint(folder, config_of(SHAPES[name], layers, scale), name)
    (folder / "rules.yaml").write_text(RULES)


def measure(_peer: object, folder: Path) -> dict[str, int]:
    """Return the peak of loading and the bytes held afterwards."""
    with tempfile.TemporaryDirectory() as small:  # loading imports much on first use
        settings = json.loads((folder / "config.json").read_text())["quantization_config"]
        make_checkpoint(Path(small), settings["quant_method"], 64, layers=2)
        optimize_and_load(small, Path(small) / "rules.yaml", progress=False)
    baseline = rss_anon_bytes()
    with sampled_peak() as peak:
        model = optimize_and_load(folder, folder / "rules.yaml", progress=False)
    held = sum(parameter.nbytes for parameter in model.parameters())
    held += sum(swap.footprint.total_bytes for swap in model.moegraft.plan.swaps)
    return {"peak_bytes": peak[0] - baseline, "held_bytes": held}
