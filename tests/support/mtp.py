"""Tiny checkpoints with multi-token prediction (MTP) layers, named as in the families' released checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from moegraft.operators.decode import mtp
from moegraft.operators.decode.mtp_layers import add_mtp_layers, with_declared_mtp
from moegraft.operators.schedule import DraftSchedule
from support.families import build_model, case_of, greedy, prompt
from support.gguf_files import ARCHITECTURES, write_gguf

EXTRAS = ("enorm", "hnorm", "eh_proj")  # beside the modules of a decoder layer
NUMBERED = {"deepseek_v3": "shared_head.norm", "glm4_moe": "shared_head.norm"}  # after the body's layers, with this last norm
QWEN = ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")  # declared by no class of transformers, and named as Mellum's
MELLUM = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
INKLING = {
    "enorm": "embed_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "input_proj",
    "post_norm": "post_norm",
    "mtp_block": "transformer_block",
}
SHARE_OF_LAYERS = 0.15  # of hidden states: text that depends mostly on its last token, which MTP layers predict well


def write_checkpoint(folder: Path, model_type: str, *, layers: int = 1, share: float = SHARE_OF_LAYERS, **config: Any) -> PreTrainedModel:
    """Write a model with MTP layers to `folder`, also as `model.gguf` where its family has such files; return the stock model without them.

    Args:
        share: of each block's output that counts; MTP layers pass the latest token on, and predict what the body does after it.
    """
    case = case_of(model_type)
    stated = {} if model_type in QWEN else {"num_mtp_layers": layers}
    case = dataclasses.replace(case, text={**case.text, **stated, **config})
    model = build_model(case)
    mtp = _new_layers(model, layers)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in mtp.layers.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif model_type in QWEN:
                parameter.add_(torch.rand_like(parameter) * 0.2)  # to some norms' own value, 0 or 1
            elif name.endswith("norm.weight") or "layernorm" in name:
                parameter.fill_(1.0)
        for layer in mtp.layers:
            hidden = layer.eh_proj.weight.shape[0]
            embedded = slice(hidden, None) if getattr(mtp.config, "mtp_hidden_states_first", False) else slice(hidden)
            layer.eh_proj.weight.mul_(0.04)[:, embedded] += torch.eye(hidden)
        for name, parameter in [*model.named_parameters(), *mtp.layers.named_parameters()]:
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                parameter.mul_(share)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored |= stored_names(mtp, model_type, model.config.get_text_config().num_hidden_layers)
    if model_type in ARCHITECTURES:
        model.add_module("mtp", mtp)
        write_gguf(folder / "model.gguf", model)
        del model._modules["mtp"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def _new_layers(model: PreTrainedModel, layers: int) -> Any:
    from transformers.modeling_layers import MtpModel

    if model.config.model_type not in QWEN:
        return MtpModel(model, layers)
    config, model.config = model.config, with_declared_mtp(model.config, ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"])
    add_mtp_layers(model)
    model.config = config
    return model._modules.pop("mtp")


def stored_names(mtp: Any, model_type: str, body_layers: int) -> Mapping[str, torch.Tensor]:
    """Return the tensors of MTP layers as released checkpoints name them, most with a tensor for each expert's projections."""
    found: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(mtp.layers):
        prefix = f"model.layers.{body_layers + number}."
        for name, value in layer.state_dict().items():
            part, _, rest = name.partition(".")
            if model_type == "mellum" or model_type in QWEN:
                found[f"mtp.{MELLUM[part]}.{rest}" if part in MELLUM else f"mtp.layers.{number}.{rest}"] = value
            elif model_type == "inkling_text":
                found[f"model.mtp.layers.{number}.{INKLING[part]}.{rest}"] = value
            elif part == "post_norm":
                found[f"{prefix}{NUMBERED[model_type]}.{rest}"] = value
            else:
                found[f"{prefix}{name}" if part in EXTRAS else f"{prefix}{rest}"] = value
    if model_type.startswith("qwen3_5"):
        return found
    return {name: tensor.clone() for key, value in found.items() for name, tensor in by_expert(key, value)}


def by_expert(key: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if key.endswith("experts.gate_up_proj"):
        named = zip(("gate_proj", "up_proj"), value.chunk(2, dim=1), strict=True)
    elif key.endswith("experts.down_proj"):
        named = iter([("down_proj", value)])
    else:
        return [(key, value)]
    base = key.rpartition(".")[0]
    return [(f"{base}.{expert}.{name}.weight", matrix) for name, part in named for expert, matrix in enumerate(part)]


class Alternating(DraftSchedule):
    """Plain steps between drafts, so that layers have more than one state to catch up with."""

    def __init__(self, plain: int, drafted: int) -> None:
        self._plans = [0] * plain + [drafted]
        self._rounds = 0

    def plan(self, limit: int) -> int:
        self._rounds += 1
        return min(limit, self._plans[self._rounds % len(self._plans)])

    def state(self) -> str:
        return "alternating"


def proposals(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Collect the tokens that moegraft drafts, by the length of the text before them."""
    found: dict[int, list[int]] = {}
    draft = mtp.MtpDrafter.draft

    def recorded(self: Any, sequence: Any, *args: Any) -> Any:
        drafts = draft(self, sequence, *args)
        found[sequence.length] = [each.token for each in drafts]
        return drafts

    monkeypatch.setattr(mtp.MtpDrafter, "draft", recorded)
    return found


def assert_plain_steps_change_no_draft(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that drafts are the same with six plain steps between them, whose states come from native programs, as without."""
    found, operator = proposals(monkeypatch), model.moegraft.model_operator
    texts, drafted = [], []
    for plain in (0, 6):
        operator._schedule = Alternating(plain, 3)
        texts.append(greedy(model, prompt(29), max_new_tokens=120))
        drafted.append(dict(found))
        found.clear()
    assert torch.equal(*texts)
    one, other = drafted
    both = [length for length in other if length in one and length < 29 + 120 - 4]
    assert len(both) > 3
    assert {length: one[length] for length in both} == {length: other[length] for length in both}
