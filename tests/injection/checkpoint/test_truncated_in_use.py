"""A checkpoint that is truncated or replaced while its model runs: nothing that the model computes with is a mapping of its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.families import prompt, tiny_model
from support.gguf_files import BlockType, write_gguf
from torch import nn
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load

KINDS = {torch.float32: BlockType.F32, torch.float16: BlockType.F16, torch.bfloat16: BlockType.BF16}


def save(folder: Path, dtype: torch.dtype) -> None:
    model = tiny_model("mixtral", intermediate_size=32)
    model.to(dtype).save_pretrained(folder)
    write_gguf(folder / "model.gguf", model.float(), {"": KINDS[dtype]})


def mapped(model: PreTrainedModel, folder: Path) -> Iterator[str]:
    """The tensors of a model in mappings of files in a folder."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, path = [*line.split(maxsplit=5), ""][:6]
        if path.startswith(str(folder)):
            spans.append([int(end, 16) for end in place.split("-")])
    for name, tensor in nn.Module.state_dict(model).items():
        if any(begin <= tensor.data_ptr() < end for begin, end in spans):
            yield name


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
@pytest.mark.parametrize(
    ("form", "dtype", "replaced"),
    [
        ("safetensors", torch.float32, "{kind: experts}"),
        ("safetensors", torch.bfloat16, "{name: '^lm_head$'}"),
        ("gguf", torch.float32, "{name: '^lm_head$'}"),
        ("gguf", torch.float16, "{kind: experts}"),
        ("gguf", torch.bfloat16, "{kind: experts}"),
    ],
    ids=str,
)
def test_nothing_in_use_is_a_mapping(form: str, dtype: torch.dtype, replaced: str, tmp_path: Path) -> None:
    save(tmp_path, dtype)
    operator = "quantized_linear" if "head" in replaced else "hybrid_experts"
    (tmp_path / "rules.yaml").write_text(f"- match: {replaced}\n  replace: {{class: {operator}}}\n")
    gguf = tmp_path / "model.gguf" if form == "gguf" else None
    model = optimize_and_load(tmp_path, tmp_path / "rules.yaml", dtype=dtype, gguf=gguf, progress=False)
    assert list(mapped(model, tmp_path)) == []
    with torch.no_grad():
        before = model(prompt(12)).logits
        os.truncate(tmp_path / f"model.{form}", 0)
        assert torch.equal(model(prompt(12)).logits, before)
