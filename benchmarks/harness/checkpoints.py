"""Checkpoints of random weights on disk, as they are published: in the config's dtype, in MXFP4 or in FP8; and GGUF files of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from moegraft.injection.cli.moegraft import app
from moegraft.injection.demo import demo_path

POOL = 1 << 25  # random weights from which every matrix is cut
SETTINGS = {
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}


def write_checkpoint(folder: Path, config: PreTrainedConfig, stored: Literal["mxfp4", "fp8"] | None = None) -> None:
    """Write a config and weights, the experts of each layer in a file of their own; one file is in memory at a time.

    Args:
        config: of a family whose checkpoints have each expert's `gate_proj`, `up_proj` and `down_proj`, or with `mxfp4` of gpt-oss.
        stored: the format of the experts (`mxfp4`) or of all projections (`fp8`); by default the config's dtype.
    """
    dtype, random = config.dtype, torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    pool, begin = (torch.randn(POOL, generator=random) * 0.02).to(dtype), 0

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal begin
        size = torch.Size(shape).numel()
        begin = (begin + 7919 * 64) % (POOL - size)
        return pool[begin : begin + size].view(shape).clone()

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 120, shape, dtype=torch.uint8, generator=random)

    def tensors(key: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Return what a checkpoint has for a parameter."""
        module, _, last = key.rpartition(".")
        stacked = last in ("gate_up_proj", "down_proj")
        if stacked and stored == "mxfp4":
            experts, inputs, rows = shape
            return {f"{key}_blocks": codes(experts, rows, inputs // 32, 16), f"{key}_scales": codes(experts, rows, inputs // 32)}
        if stacked:
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            each = shape[1] // len(parts), shape[2]
            names = (f"{module}.{expert}.{part}.weight" for expert in range(shape[0]) for part in parts)
            return {name: tensor for of_expert in names for name, tensor in tensors(of_expert, each).items()}
        if stored == "fp8" and key.endswith("_proj.weight"):
            scales = torch.full([-(-size // 128) for size in shape], 0.01)
            return {key: codes(*shape).view(torch.float8_e4m3fn), f"{key}_scale_inv": scales}
        return {key: drawn(shape) if len(shape) > 1 else torch.ones(shape, dtype=dtype)}

    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, parameter in model.state_dict().items():
        name = f"experts-{int(key.split('.')[2]):02}" if ".experts." in key else "rest"
        files.setdefault(f"{name}.safetensors", {})[key] = tuple(parameter.shape)
    index = {}
    for file, shapes in files.items():
        held = {name: tensor for key, shape in shapes.items() for name, tensor in tensors(key, shape).items()}
        save_file(held, folder / file, {"format": "pt"})
        index |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    body = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(body | ({"quantization_config": SETTINGS[stored]} if stored else {})))


def write_gguf(folder: Path, types: str) -> Path:
    """Write `model.gguf` of a folder's checkpoint by `moegraft quantize`, with the bundled model's tokenizer, and return its path."""
    for file in demo_path().glob("tokenizer*"):
        shutil.copy(file, folder)
    path = folder / "model.gguf"
    app(["quantize", "--model", str(folder), "--weights", types, "--imatrix", "none", "--out", str(path)], standalone_mode=False)
    return path
