"""Models whose experts stay in files: the answers are those from memory, on the CPU and with slots on a GPU, and mistakes are named."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from support.families import build_model, case_of, prompt
from support.routing_traces import random_trace
from transformers import PreTrainedModel

from moegraft.cpu_backend import ExpertFrames
from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators import machine
from moegraft.operators.errors import MoegraftError, NotEnoughMemoryError, RuleFileError, UnsupportedModelError
from moegraft.operators.router_maps import fit_maps, save_maps
from moegraft.operators.routing import Router, routers_of
from moegraft.operators.routing_trace import TraceError, record_trace

RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}, {more}}}}}
- match: {{kind: router}}
  replace: {{class: {router}}}
  expect: any
"""
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "nemotron_h")


def load(folder: Path, more: str, *, weights: str = "int8", router: str = "cpu_router", model: object = None) -> PreTrainedModel:
    rules = folder / "rules.yaml"
    rules.write_text(RULES.format(weights=weights, more=more, router=router))
    loaded: PreTrainedModel = optimize_and_load(model or folder / "model", rules, progress=False, threads=2)
    return loaded


def least(model: PreTrainedModel) -> str:
    """Return the least memory for the experts of a loaded model, as rules give it."""
    packed = [operator.on_cpu.packed for operator in model.moegraft.operators.values() if hasattr(operator, "on_cpu")]
    shape, size = packed[0].shape, max(each.expert_bytes for each in packed)
    return f"{-(-ExpertFrames.least_bytes_for(shape.num_experts, size) // 1024)}KiB"


@torch.no_grad()
def outputs(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = model(input_ids=prompt(9, batch=2)).logits
    return logits, model.generate(prompt(5), max_new_tokens=24, do_sample=False), model(input_ids=prompt(70)).logits


def files_of(model: PreTrainedModel) -> dict[str, float]:
    found: dict[str, float] = model.moegraft.statistics()["files"]
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_answers_are_those_from_memory(model_type: str, tmp_path: Path) -> None:
    build_model(case_of(model_type)).save_pretrained(tmp_path / "model")
    mapped = load(tmp_path, f"cache_dir: '{tmp_path}/cache'")
    expected = outputs(mapped)
    framed = load(tmp_path, f"cache_dir: '{tmp_path}/cache', memory: {least(mapped)}")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs(framed), expected, strict=True))
    files = files_of(framed)
    assert 0 < files["reads"] <= files["demanded"] + files["predicted"]
    assert files_of(mapped) == {}


def test_recorded_steps_wait_for_experts(tmp_path: Path) -> None:
    """Of the bundled model, whose 80 experts have 22 frames."""
    mapped = load(tmp_path, f"cache_dir: '{tmp_path}/cache'", model=demo_path())
    model = load(tmp_path, f"cache_dir: '{tmp_path}/cache', memory: {least(mapped)}", model=demo_path())
    texts = [each.generate(prompt(5), max_new_tokens=40, do_sample=False) for each in (mapped, model)]
    assert torch.equal(*texts)
    assert model.moegraft.statistics()["decode_steps"]["replayed_steps"] > 10
    assert files_of(model)["reads"] > 2 * files_of(model)["frames"], "experts were evicted, and read again within steps"


def test_a_packed_folder_is_read_in_place(tmp_path: Path) -> None:
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    load(tmp_path, "memory: null").save_pretrained(tmp_path / "packed", packed=True)
    mapped = optimize_and_load(tmp_path / "packed", progress=False)
    framed = load(tmp_path, f"memory: {least(mapped)}", model=tmp_path / "packed")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs(framed), outputs(mapped), strict=True))
    assert files_of(framed)["reads"] > 0


@pytest.mark.parametrize("schedule", ["two_threshold", "on_demand", "fixed"])
def test_slots_of_a_gpu_are_filled_from_frames(tmp_path: Path, schedule: str) -> None:
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    more = f"gpu: emulated, cache: {{ratio: 0.5}}, schedule: {schedule}, cache_dir: '{tmp_path}/cache'"
    mapped = load(tmp_path, f"cache_dir: '{tmp_path}/cache'", weights="float32")
    framed = load(tmp_path, f"{more}, memory: {least(mapped)}", weights="float32", router="default")
    for engine in framed.moegraft.context.gpu_engines:
        slots = engine.cache.slots
        assert all(len(slots.residents(layer)) == slots.capacity_of(layer) for layer in range(slots.layers)), "slots are full after loading"
    for ours, theirs in zip(outputs(framed), outputs(mapped), strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-4)
    assert files_of(framed)["reads"] > 0


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    mapped = load(tmp_path, f"cache_dir: '{tmp_path}/cache'")
    memory = least(mapped)
    for path in (tmp_path / "cache").glob("*.experts"):
        path.chmod(0o644)
        content = bytearray(path.read_bytes())
        content[-1] ^= 255
        path.write_bytes(content)
    framed = load(tmp_path, f"cache_dir: '{tmp_path}/cache', memory: {memory}")
    with pytest.raises(OSError, match=r"\.experts: expert \d+ at byte \d+ is damaged .*remove the file"), torch.no_grad():
        framed(input_ids=prompt(70))


def test_what_memory_holds_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = load(tmp_path, f"cache_dir: '{tmp_path}/cache', memory: auto", model=demo_path())
        assert any("memory has room for all" in line and "experts" in line for line in caplog.messages)
        caplog.clear()
        load(tmp_path, f"cache_dir: '{tmp_path}/cache', memory: {least(model)}", model=demo_path())
    assert any("memory holds" in line and "the others are read from" in line for line in caplog.messages)


def test_a_profile_that_is_not_there_is_found_before_loading(tmp_path: Path) -> None:
    stock = build_model(case_of("qwen3_moe"))
    stock.save_pretrained(tmp_path / "model")
    options = f"cache_dir: '{tmp_path}/cache', memory: auto, cache: {{policy: static, profile: trace.npz}}"
    with pytest.raises(RuleFileError, match=r"rules\.yaml:5:.*trace\.npz: No such file or directory; moegraft calibrate --routing"):
        load(tmp_path, options)
    (tmp_path / "trace.npz").write_bytes(b"no trace")
    with pytest.raises(RuleFileError, match=r"trace\.npz: not a routing trace: not a complete \.npz file; moegraft calibrate"):
        load(tmp_path, options)
    random_trace(4, 3, 5, 2).save(tmp_path / "trace.npz")
    with pytest.raises(RuleFileError, match=r"a profile of layers with 5 experts, where this one has \d+"):
        load(tmp_path, options)
    dataclasses.replace(random_trace(4, 3, 6, 2), layers=("a", "b", "c")).save(tmp_path / "trace.npz")
    with pytest.raises(TraceError, match=r"trace\.npz: the profile of another model, which has no model\.layers\.\d+\.mlp\.experts"):
        load(tmp_path, options)
    assert not (tmp_path / "cache").exists(), "nothing was packed"


def test_maps_predict_experts_on_the_disk(tmp_path: Path) -> None:
    """Maps that only name the experts that are never chosen leave predictions without a hit, and the answers as they are."""
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    mapped = load(tmp_path, f"cache_dir: '{tmp_path}/cache'")
    save_maps(fit_maps(mapped, [prompt(60)[0]]), tmp_path / "maps")
    first, second = routers_of(mapped)
    weight = torch.zeros(6, 64)
    wrong = {f"{first}>{second}.weight": weight, f"{first}>{second}.bias": torch.tensor([9.0, 9, 0, 0, 0, 0])}
    save_maps(wrong, tmp_path / "wrong")
    precisions = []
    for maps in ("maps", "wrong"):
        framed = f"cache_dir: '{tmp_path}/cache', memory: {least(mapped)}, prefetch: {{maps: {maps}}}"
        model = load(tmp_path, framed)
        for expected, found in zip(outputs(mapped), outputs(model), strict=True):
            assert torch.equal(expected, found)
        precisions.append(files_of(model)["precision"])
    assert precisions[0] > precisions[1]


def test_a_profile_serves_a_part_of_the_layers(tmp_path: Path) -> None:
    """A profile has all layers of a model, and one of them may be in memory without frames."""
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    mapped = load(tmp_path, f"cache_dir: '{tmp_path}/cache'")
    record_trace(mapped, [prompt(30)[0]], "prompt").save(tmp_path / "trace.npz")
    framed = f"memory: {least(mapped)}, cache: {{policy: static, profile: '{tmp_path}/trace.npz'}}"
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "version: 1\nrules:\n"
        + "".join(
            f"- match: {{kind: experts, layers: '{layer}'}}\n  replace: {{class: hybrid_experts, kwargs: "
            f"{{weights: int8, cache_dir: '{tmp_path}/cache'{each}}}}}\n"
            for layer, each in enumerate(("", f", {framed}"), 1)
        )
    )
    model = optimize_and_load(tmp_path / "model", rules, progress=False, threads=2)
    for expected, found in zip(outputs(mapped), outputs(model), strict=True):
        assert torch.equal(expected, found)
    assert files_of(model)["reads"] > 0


def test_a_router_of_more_experts_predicts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several processes, each holds some of the experts that a router chooses from."""
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    mapped = load(tmp_path, f"cache_dir: '{tmp_path}/cache'", router="default")

    def wider(model: PreTrainedModel, path: str) -> Router:
        rows = torch.nn.Linear(64, 7, bias=False)
        return Router(path, rows, model.get_submodule(path.rpartition(".")[0]), 7)

    monkeypatch.setattr("moegraft.operators.experts.hybrid.router_of", wider)
    model = load(tmp_path, f"cache_dir: '{tmp_path}/cache', memory: {least(mapped)}", router="default")
    assert torch.equal(outputs(mapped)[1], outputs(model)[1])


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = build_model(case_of("qwen3_moe"))
    stock.save_pretrained(tmp_path / "model")
    cache = f"cache_dir: '{tmp_path}/cache'"
    with pytest.raises(RuleFileError, match="'24' is no amount of memory"):
        load(tmp_path, f"{cache}, memory: '24'")
    with pytest.raises(UnsupportedModelError, match="give cache_dir, a folder on a fast disk"):
        load(tmp_path, "memory: 1GiB")
    with pytest.raises(NotEnoughMemoryError, match=r"memory: 1KiB is too small: the \d+ experts of a layer"):
        load(tmp_path, f"{cache}, memory: 1KiB")
    with pytest.raises(UnsupportedModelError, match="in memory already; remove memory"):
        load(tmp_path, f"{cache}, memory: 1GiB", model=stock)
    monkeypatch.setattr("moegraft.operators.offload.frames.probe_machine", lambda: machine.Machine(2, 1000))
    with pytest.raises(NotEnoughMemoryError, match=r"memory: auto: 800 B of 1000 B that are free, and the experts of a layer"):
        load(tmp_path, f"{cache}, memory: auto")


@pytest.mark.parametrize("policy", ["policy: lru", "policy: mrs, alpha: 0.5", "policy: static, profile: '{profile}'"])
def test_the_policy_of_the_cache_ranks_experts_in_memory(policy: str, tmp_path: Path) -> None:
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    mapped = load(tmp_path, f"cache_dir: '{tmp_path}/cache'")
    record_trace(mapped, [prompt(30)[0]], "prompt").save(tmp_path / "trace.npz")
    policy = policy.format(profile=tmp_path / "trace.npz")
    model = load(tmp_path, f"cache_dir: '{tmp_path}/cache', memory: {least(mapped)}, cache: {{{policy}}}")
    for expected, found in zip(outputs(mapped), outputs(model), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("memory: 1GiB", "memory: 2GiB"), "one budget for the experts of all layers, and the rules give 1GiB and 2GiB"),
        (("memory: 1GiB, cache: {policy: lru}", "memory: 1GiB"), "one cache policy ranks the experts of all layers in memory"),
    ],
)
def test_one_budget_for_a_model(options: tuple[str, str], message: str, tmp_path: Path) -> None:
    build_model(case_of("qwen3_moe")).save_pretrained(tmp_path / "model")
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "version: 1\nrules:\n"
        + "".join(
            f"- match: {{kind: experts, layers: '{layer}'}}\n  replace: {{class: hybrid_experts, kwargs: "
            f"{{weights: int8, cache_dir: '{tmp_path}/cache', {each}}}}}\n"
            for layer, each in enumerate(options, 1)
        )
    )
    with pytest.raises(MoegraftError, match=message):
        optimize_and_load(tmp_path / "model", rules, progress=False)
