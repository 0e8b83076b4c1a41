"""Router maps and profiles in models with MTP layers, in several processes, and where a GPU has a part of the layers in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.families import build_model, case_of, prompt
from support.mtp import write_checkpoint
from support.ranks import end, start_ranks
from transformers import PreTrainedModel

from moegraft.cpu_backend import ExpertFrames
from moegraft.injection import optimize_and_load
from moegraft.operators.errors import MoegraftError
from moegraft.operators.router_maps import fit_maps, save_maps
from moegraft.operators.routing_trace import record_trace

RULE = "- match: {{kind: experts, layers: '{}'}}\n  replace: {{class: hybrid_experts, kwargs: {{weights: float32, {}}}}}\n"
ANY = "- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{weights: float32, {}}}}}\n"
MTP = "- match: {kind: model}\n  replace: {class: speculative_draft, kwargs: {draft: mtp}}\n"


def load(folder: Path, *rules: str) -> PreTrainedModel:
    path = folder / "rules.yaml"
    path.write_text("version: 1\nrules:\n" + "".join(rules))
    loaded: PreTrainedModel = optimize_and_load(folder / "model", path, progress=False, threads=2)
    return loaded


def least(model: PreTrainedModel) -> str:
    packed = next(operator.on_cpu.packed for operator in model.moegraft.operators.values() if hasattr(operator, "on_cpu"))
    return f"{-(-ExpertFrames.least_bytes_for(packed.shape.num_experts, packed.expert_bytes) // 1024)}KiB"


def test_slots_are_filled_from_frames_where_another_layer_has_no_gpu(tmp_path: Path, gpu: str) -> None:
    """The engine opens with its last layer, which is not the last one in memory."""
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    framed = f"cache: {{ratio: 0.5}}, cache_dir: '{tmp_path}/cache', memory: {least(load(tmp_path, ANY.format('gpu: none')))}"
    model = load(tmp_path, *(RULE.format(layer, f"gpu: '{each}', {framed}") for layer, each in ((1, gpu), (2, "none"))))
    stores = [engine.cache.queue.store for engine in model.moegraft.context.gpu_engines]
    assert stores and all(store.in_frames(layer) for store in stores for layer in range(store.layers))


@pytest.mark.parametrize("more", ["cache: {slots: 2, policy: static, profile: trace.npz}", "cache: {slots: 2}, prefetch: {maps: maps}"])
def test_layers_for_mtp_are_beside_those_of_a_profile(tmp_path: Path, more: str, gpu: str) -> None:
    (tmp_path / "model").mkdir()
    stock = write_checkpoint(tmp_path / "model", "qwen3_moe", mlp_only_layers=[])
    plain = load(tmp_path, ANY.format("gpu: none"))
    record_trace(plain, [prompt(30)[0]], "prompt").save(tmp_path / "trace.npz")
    save_maps(fit_maps(plain, [prompt(60)[0]]), tmp_path / "maps")
    model = load(tmp_path, ANY.format(f"gpu: '{gpu}', {more}"), MTP)
    expected, found = (each.generate(prompt(12), max_new_tokens=8, do_sample=False) for each in (stock, model))
    assert torch.equal(expected, found)


def test_maps_of_a_model_of_another_width_are_refused(tmp_path: Path, gpu: str) -> None:
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    maps = fit_maps(load(tmp_path, ANY.format("gpu: none")), [prompt(60)[0]])
    save_maps({name: each[:, :32].contiguous() if each.dim() == 2 else each for name, each in maps.items()}, tmp_path / "maps")
    with pytest.raises(MoegraftError, match="maps"):
        load(tmp_path, ANY.format(f"gpu: '{gpu}', cache: {{slots: 2}}, prefetch: {{maps: maps}}"))


RANK = """
import sys
from moegraft.injection import optimize_and_load
model = optimize_and_load(sys.argv[1], sys.argv[2], progress=False)
if model.moegraft.follows:
    model.moegraft.follow()
else:
    model.moegraft.close()
"""


def test_a_profile_is_refused_where_processes_hold_a_part_of_the_experts(tmp_path: Path) -> None:
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    plain = load(tmp_path, ANY.format("gpu: none"))
    record_trace(plain, [prompt(30)[0]], "prompt").save(tmp_path / "trace.npz")
    more = f"cache_dir: '{tmp_path}/cache', memory: {least(plain)}, cache: {{policy: static, profile: trace.npz}}"
    (tmp_path / "rules.yaml").write_text("version: 1\nrules:\n" + ANY.format(more))
    ended = end(start_ranks(["-c", RANK, str(tmp_path / "model"), str(tmp_path / "rules.yaml")], 2, MOEGRAFT_RANK_TIMEOUT="20"))
    assert all(code == 1 and "rules.yaml:4:20: error: rule 'rule-1': cache: {policy: static}" in errors for code, _, errors in ended)
    assert not (tmp_path / "cache").exists(), "nothing was packed"
