"""Tiny models of every family of the installed transformers whose experts follow the shared experts interface.

A family is a package of `transformers.models`. `unlisted_families` returns families that have the interface and no row in `ROWS`;
`family_cases` leaves out rows whose family the installed version lacks.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import check_peft_version

from moegraft.operators.decode.states import has_states
from moegraft.operators.layout import read_layout, why_unsupported
from support.family_rows import ROWS, SMALL_TEXT, SMALL_TOWER, VOCAB_SIZE, FamilyCase

DECORATOR = "use_experts_implementation"
FUSED = "self.gate_up_proj = nn.Parameter("
ROUTER_GAIN = 2.0  # standard deviation of router logits: some experts are chosen often, others rarely


def _models_folder() -> Path:
    assert transformers.__file__ is not None, "transformers is a namespace package"
    return Path(transformers.__file__).parent / "models"


@cache
def library_families() -> Mapping[str, tuple[str, ...]]:
    """Return every family of the installed transformers that has the interface, declared or by its parameters, with its experts classes."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(_models_folder().glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if f"@{DECORATOR}" not in text and FUSED not in text:
            continue
        names, declared = list[str](), False
        for block in re.split(r"^(?=@|class |def )", text, flags=re.MULTILINE):  # parsing them all would take a second
            if block.startswith("class ") and (declared or FUSED in block):
                names.append(re.split(r"\W", block, maxsplit=2)[1])
            declared = block.startswith("@") and (declared or DECORATOR in block)
        found[path.parent.name] = (*found.get(path.parent.name, ()), *names)
    return found


def unlisted_families() -> list[str]:
    """Return the families of the installed transformers that have the interface and no row."""
    return sorted(set(library_families()) - {case.family for case in ROWS})


def family_cases() -> list[FamilyCase]:
    """Return every row whose family the installed transformers has; a family without the interface becomes a refused case."""
    cases = [case for case in ROWS if (_models_folder() / case.family).is_dir() and transformers.__version__ not in case.broken_in]
    without = {case.family for case in cases} - set(library_families())
    return [
        dataclasses.replace(case, reason=case.reason or f"matches no module of {case.model_class}") if case.family in without else case
        for case in cases
    ]


def served_cases() -> list[FamilyCase]:
    """Return the cases in which an injected model must match the stock one."""
    return [case for case in family_cases() if case.reason is None]


def cache_layers(case: FamilyCase) -> list[Any]:
    """Return the layers of the cache of transformers for a case; none where the model makes a cache of its own kind."""
    try:
        return list(DynamicCache(config=build_config(case).get_text_config(decoder=True)).layers)
    except (AttributeError, ValueError):
        return []


@cache
def stateful_cases() -> tuple[FamilyCase, ...]:
    """Return the served cases of which a cache of transformers holds recurrent states or those of convolutions."""
    return tuple(case for case in served_cases() if any(map(has_states, cache_layers(case))))


def case_of(model_type: str) -> FamilyCase:
    return next(case for case in family_cases() if case.model_type == model_type)


def model_class(case: FamilyCase) -> type[PreTrainedModel]:
    module = importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
    found = getattr(module, case.model_class)
    assert isinstance(found, type) and issubclass(found, PreTrainedModel), f"{case.model_class} is no model class"
    return found


def _chosen(config_class: type[PreTrainedConfig], small: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `own`, and `small` for the other fields of `config_class`: copies, as some configurations change their lists in place."""
    names = {f.name for f in dataclasses.fields(config_class)}
    return copy.deepcopy({name: value for name, value in small.items() if name in names} | dict(own))


def _tower(default: PreTrainedConfig, own: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the smallest configuration of the type of `default`, including its towers."""
    inner = {name: _tower(getattr(default, name), own.get(name, {})) for name in default.sub_configs}
    return type(default)(**_chosen(type(default), SMALL_TOWER, {**own, **inner}))


def build_config(case: FamilyCase) -> PreTrainedConfig:
    """Return the tiny configuration of `case`: three layers, at least one of them with routed experts."""
    config_class = model_class(case).config_class
    assert config_class is not None, f"{case.model_class} names no configuration class"
    assert config_class.model_type == case.model_type, f"{case.model_class} is of type {config_class.model_type}"
    if "text_config" not in config_class.sub_configs:
        return config_class(**_chosen(config_class, SMALL_TEXT, case.text))
    default = config_class()
    parts: dict[str, Any] = {}
    for name in config_class.sub_configs:
        part = getattr(default, name)
        if name == "text_config":
            parts[name] = type(part)(**_chosen(type(part), SMALL_TEXT, case.text))
        elif part is not None:
            parts[name] = _tower(part, case.towers.get(name, {}))
    return config_class(**parts, **case.whole)


def _fan_in(module: nn.Module, weight: torch.Tensor) -> int:
    if isinstance(module, nn.Embedding):
        return 1
    if weight.dim() == 3 and hasattr(module, "num_experts"):
        return weight.shape[1] if why_unsupported(module) is None and read_layout(module).transposed else weight.shape[2]
    return math.prod(weight.shape[1:])


@torch.no_grad()
def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Set weights that keep activations near 1 in every layer, with biases and norms off their neutral values and uneven routing."""
    generator = torch.Generator().manual_seed(seed)
    num_experts = {count for module in model.modules() if isinstance(count := getattr(module, "num_experts", None), int)}
    router_rows = num_experts | {count + 1 for count in num_experts}  # zaya's router may also choose no expert
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() < 2 or weight.shape[0] == 1:
                weight.add_(0.1 * noise)
                continue
            gain = ROUTER_GAIN if weight.dim() == 2 and weight.shape[0] in router_rows else 1.0
            weight.copy_(noise * gain / math.sqrt(_fan_in(module, weight)))
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                continue
            if buffer.is_floating_point() and buffer.dim() == 1 and buffer.shape[0] in router_rows:
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))  # a correction bias of a router
            elif name == "tid2eid":  # deepseek_v4: the experts of each token id
                scores = torch.rand(buffer.shape[0], max(num_experts), generator=generator)
                buffer.copy_(scores.topk(buffer.shape[1]).indices)


def build_model(case: FamilyCase, seed: int = 0) -> PreTrainedModel:
    """Return a stock model of `case` in float32 and evaluation mode, whose logits and routing depend on every weight."""
    assert case.buildable, f"{case.model_type}: {case.reason}"
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(case)(build_config(case)).train(False)
    _randomise(model, seed)
    if case.generates:
        settings = model.generation_config
        assert settings is not None, f"{case.model_class} cannot generate"
        settings.eos_token_id = None  # so that generation does not end early
        settings.pad_token_id = 0
    return model


TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101}
TINY |= {"num_experts_per_tok": 2, "initializer_range": 0.3}
TINY_EXPERTS = {
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 40, "intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 24},
}


def tiny_model(model_type: str = "qwen3_moe", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a stock model in float32 and evaluation mode of two layers with experts; `changes` are those of its configuration.

    Its weights are those of transformers' initialisation, with biases of a transposed form (gpt_oss) off their zeros.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **TINY | TINY_EXPERTS[model_type] | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).train(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model


def save_checkpoint(case: FamilyCase, folder: Path, dtype: torch.dtype = torch.float32, shards: int = 1, seed: int = 0) -> None:
    """Write `build_model(case, seed)` in `dtype` by `save_pretrained`, in at least `shards` files."""
    model = build_model(case, seed)
    for weight in (*model.parameters(), *model.buffers()):
        weight.data = weight.data.to(dtype) if weight.is_floating_point() else weight.data
    bytes_in_all = sum(weight.numel() * weight.element_size() for weight in model.state_dict().values())
    model.save_pretrained(folder, max_shard_size=bytes_in_all // shards if shards > 1 else "5GB")


def stock_model(case: FamilyCase, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the checkpoint with transformers."""
    model: PreTrainedModel = model_class(case).from_pretrained(folder, dtype=dtype).train(False)
    return model


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Return token ids (batch, length) int64 without special tokens."""
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def greedy(model: PreTrainedModel, ids: torch.Tensor, *, max_new_tokens: int = 40, **arguments: Any) -> torch.Tensor:
    """Return `ids` (B, T) and what `generate` appends: by default more tokens than the tiny models' window of 16 has."""
    found = model.generate(ids, do_sample=False, max_new_tokens=max_new_tokens, **arguments)
    assert isinstance(found, torch.Tensor)
    return found


def save_unloadable(folder: Path) -> None:
    """Write a checkpoint that memory cannot hold in any weight type: sparse files, one for each expert, which take no space on the disk."""
    shard_bytes = psutil.virtual_memory().total * 3 // 4  # Linux maps no larger file
    experts = TINY_EXPERTS["qwen3_moe"] | {"moe_intermediate_size": shard_bytes // (3 * 4 * TINY["hidden_size"])}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **TINY | experts))
    shards: dict[str, dict[str, object]] = {}
    places, ends = {}, Counter[str]()
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        shard = places[name] = f"part-{name.rpartition('.experts.')[2].partition('.')[0]}-{name.partition('.layers.')[2][:1]}.safetensors"
        begin = ends[shard]
        ends[shard] += 4 * tensor.numel()
        shards.setdefault(shard, {})[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, ends[shard]]}
    model.config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for shard, tensors in shards.items():
        header = json.dumps(tensors).encode()
        with (folder / shard).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + ends[shard])


@torch.no_grad()
def weight_of(linear: nn.Module) -> torch.Tensor:
    """Return the matrix (O, I) that an operator in the place of a linear layer multiplies by; 8 bits hold the activations exactly."""
    return torch.cat([linear(row[None]) for row in torch.eye(int(linear.in_features))]).T  # type: ignore[arg-type] # singly: no rounded tiles


def written(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what changes of the files of a folder when they are written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def needs_adapters_of_transformers() -> None:
    """Skip the calling test where transformers' own `add_adapter` refuses the installed PEFT."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
