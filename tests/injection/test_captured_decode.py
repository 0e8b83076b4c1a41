"""Decode steps captured whole: the same answers as layer by layer, where they can be captured, and a reason where they cannot."""

from __future__ import annotations

import gc
import inspect
import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support import combinations
from support.emulated import HostSlotLayers, device_kind
from support.emulated_graph import EmulatedGraph
from support.families import build_model, prompt, served_cases
from support.faulty_device import Countdown, Faults, FaultyDevice
from support.gpus import GPUS, emulated_only, limit, placed
from support.virtual_device import VirtualDevice
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, StaticCache
from transformers.masking_utils import create_chunked_causal_mask

from moegraft.injection import optimize_and_load
from moegraft.operators.decode import cuda_graph, replay
from moegraft.operators.decode.cache import cache_tensors
from moegraft.operators.decode.cuda_graph import TIMED_STEPS, to_dynamic, to_static
from moegraft.operators.errors import RuleFileError
from moegraft.operators.offload.devices.base import DeviceError
from moegraft.operators.offload.engine import Engine
from moegraft.operators.offload.scheduler import Scheduler

RULES = """
version: 1
rules:
- match: {{kind: experts}}
  replace: {{class: hybrid_experts, kwargs: {{gpu: "{gpu}", {more}}}}}
{rules}
"""
FUSED = """
- {match: {kind: attention}, replace: {class: fused_attention}}
- {match: {kind: norm}, replace: {class: fused_norm}}
- {match: {kind: router}, replace: {class: fused_router}}
"""
NEW = 20
GRAPH = "cache: {ratio: 0.5}, decode: graph"
EAGER = "cache: {ratio: 0.5}, decode: eager"
# Of full attention; each a router or a shared expert of its own.
WINDOWED = (
    *("gpt_oss", "mixtral", "gemma4_text", "phimoe", "afmoe", "exaone_moe", "cohere2_moe", "granitemoe_swa", "mimo_v2_flash"),
    "llama4_text",  # chunks, of which the cache is that of windows
)
WINDOW = 16  # tokens, of all of these
FAMILIES = ("qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "granitemoe")
# With recurrent or convolution states, beside layers of attention or within them.
STATEFUL = (
    "bailing_hybrid",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_next",
    "zaya",
)


def stock_model(model_type: str) -> PreTrainedModel:
    case = next((case for case in served_cases() if case.model_type == model_type), None)
    if case is None:
        pytest.skip(f"this transformers has no {model_type}")
    return build_model(case)


@pytest.fixture
def load(tmp_path: Path, gpu: str):  # type: ignore[no-untyped-def]
    def load(model_type: str, more: str = GRAPH, *, gpu: str = gpu, rules: str = "") -> PreTrainedModel:
        path = tmp_path / "rules.yaml"
        path.write_text(RULES.format(gpu=gpu, more=more, rules=rules))
        model: PreTrainedModel = optimize_and_load(placed(stock_model(model_type), gpu), path, progress=False, threads=1)
        return model

    return load


@pytest.fixture(scope="module")
def eager_models() -> dict[tuple[str, str], PreTrainedModel]:
    return {}


@pytest.fixture
def eager(load, gpu: str, eager_models: dict[tuple[str, str], PreTrainedModel]):  # type: ignore[no-untyped-def]
    """Return a model whose steps run layer by layer: one of each family for all tests, as none changes it."""

    def eager(model_type: str = "qwen3_moe") -> PreTrainedModel:
        if (model_type, gpu) not in eager_models:
            eager_models[model_type, gpu] = load(model_type, EAGER)
        return eager_models[model_type, gpu]

    return eager


@pytest.fixture
def tolerance(gpu: str) -> float:
    """Of logits that two runs compute: on an emulated device by the same kernels in the same order, whichever device has an expert.

    On a GPU the schedule of an eager step and the resident experts of a captured one divide the work differently, and both devices round
    differently; prompts and single tokens take different kernels there as well.
    """
    return limit(gpu)


def answer(model: PreTrainedModel, **arguments: Any) -> tuple[list[int], torch.Tensor]:
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    ids = arguments.pop("ids", prompt(5)).to(model.device)
    made = model.generate(ids, **{**settings, **arguments})
    return made.sequences[0].tolist(), torch.stack(made.logits)


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged about captured steps; a GPU's warm-up logs as well."""
    return [record.message for record in caplog.records if record.name == replay.logger.name]


def engine_of(model: PreTrainedModel) -> Engine:
    (engine,) = model.moegraft.context.gpu_engines
    return engine


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("model_type", (*FAMILIES, *STATEFUL))
def test_captured_steps_answer_as_those_layer_by_layer(  # type: ignore[no-untyped-def]
    model_type: str, load, eager, tolerance: float, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, logits = answer(eager(model_type))
    model = load(model_type)
    with caplog.at_level(logging.INFO, "moegraft"):
        found, found_logits = answer(model)
    if model_type == "jamba" and "_local_scalar_dense" in caplog.text:
        pytest.skip("Jamba of transformers 5.17 reads a number from the device in each step")
    assert not notices(caplog), caplog.text
    assert found == tokens and difference(found_logits, logits) < tolerance
    statistics = engine_of(model).statistics
    assert statistics.replayed >= NEW - 3  # of the last nothing is learnt yet, and one was compared
    assert 0 < statistics.on_cpu < statistics.used


@pytest.mark.parametrize("gpu", GPUS[1:])  # an emulated device captures no kernels of Triton
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_steps_with_fused_operators_are_captured(  # type: ignore[no-untyped-def]
    model_type: str, load, eager, tolerance: float, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, logits = answer(eager(model_type))
    model = load(model_type, rules=FUSED)
    fused = {f"{kind}: fused_{kind}, cuda:0" for kind in ("attention", "norm", "router")}
    assert fused <= {each.placement() for each in model.moegraft.operators.values()}
    with caplog.at_level(logging.INFO, "moegraft"):
        found, found_logits = answer(model)
    assert not notices(caplog), caplog.text
    assert found == tokens and difference(found_logits, logits) < tolerance
    assert engine_of(model).statistics.replayed >= NEW - 3


@pytest.mark.parametrize(("length", "model_type"), combinations([5, WINDOW - 1, WINDOW, WINDOW + 8], WINDOWED))
def test_steps_over_sliding_windows_are_captured_too(  # type: ignore[no-untyped-def]
    length: int, model_type: str, load, eager, tolerance: float, gpu: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Windows become full while answering, with the prompt or with the first token after it."""
    ids = prompt(length)
    tokens, logits = answer(eager(model_type), ids=ids)
    model = load(model_type)
    with caplog.at_level(logging.INFO, "moegraft"):
        found, found_logits = answer(model, ids=ids)
    assert found == tokens and difference(found_logits, logits) < tolerance
    if model_type == "llama4_text" and "block_sequence_ids" not in inspect.signature(create_chunked_causal_mask).parameters:
        assert "not of fixed size" in caplog.text, "transformers 5.17 cannot make the masks of chunks for it"
        return
    if model_type == "phimoe" and gpu.startswith("cuda"):
        # Its rotary embedding makes the frequencies on the CPU in every pass, and copies them; Phi-3.5's also reads a position in Python.
        assert ["the step cannot be captured: Cannot copy between" in notice for notice in notices(caplog)] == [True], caplog.text
        assert engine_of(model).statistics.replayed == 0
        return
    assert not notices(caplog), caplog.text
    assert engine_of(model).statistics.replayed >= NEW - 5  # windows that become full are captured and compared again


def test_a_step_that_counts_in_python_is_found(  # type: ignore[no-untyped-def]
    load, tolerance: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the step makes the masks of its windows itself, it does so from numbers."""
    monkeypatch.setattr(cuda_graph, "why_counted_in_python", lambda arguments, cache: None)
    model = load("gpt_oss")
    ids = prompt(10).to(model.device)
    expected = model(input_ids=ids).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    with caplog.at_level(logging.WARNING, "moegraft"), torch.no_grad():
        found = [model(input_ids=each, past_key_values=cache).logits for each in (ids[:, :4], *ids[:, 4:].split(1, dim=1))]
    (notice,) = notices(caplog)
    # transformers 5.17 makes a tensor of the number, which no capture allows; newer releases compute with it.
    refused = "torch.tensor copies a number from the host", "the step cannot be captured"  # the latter by a GPU
    assert "a captured step gave logits that are" in notice or any(reason in notice for reason in refused)
    assert difference(torch.cat(found, dim=1), expected) < tolerance
    assert model.moegraft.statistics()["decode_steps"]["replayed_steps"] == 0


def test_windows_without_their_masks_run_layer_by_layer(load, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    model = load("gpt_oss")
    cache = StaticCache(config=model.config, max_cache_len=32)
    with caplog.at_level(logging.WARNING, "moegraft"), torch.no_grad():
        for ids in (prompt(5), *(torch.tensor([[token]]) for token in (3, 4, 5))):
            model(input_ids=ids.to(model.device), past_key_values=cache)
    (notice,) = notices(caplog)
    assert "the step is not given the masks of its sliding windows and its positions" in notice


@pytest.mark.parametrize(
    ("length", "model_type"),
    combinations([1, WINDOW - 1, WINDOW, 3 * WINDOW], ["gpt_oss", "mixtral", "qwen3_moe", "qwen3_next", "lfm2_moe", "zaya", "llama4_text"]),
)
@torch.no_grad()
def test_a_fixed_cache_grows_again_unchanged(model_type: str, length: int) -> None:
    model: Any = stock_model(model_type)
    ids, config = prompt(length + 12), model.config
    expected = model(input_ids=ids, past_key_values=DynamicCache(config=config)).logits[:, length:]
    held = DynamicCache(config=config)
    model(input_ids=ids[:, :length], past_key_values=held)
    cache: Any = to_static(held, config, length + 12)
    found = [model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits for at in range(length, length + 6)]
    cache = to_dynamic(cache, config)
    assert cache.get_seq_length() == length + 6
    found.append(model(input_ids=ids[:, length + 6 :], past_key_values=cache).logits)
    assert difference(torch.cat(found, dim=1), expected) < 1e-5


@pytest.mark.parametrize("cache", ["{slots: 0}", "{slots: 1}", "{ratio: 1.0}", "{ratio: 0.4, policy: lru}"])
def test_any_number_of_slots_answers_the_same(cache: str, load, eager, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    tokens, logits = answer(eager())
    model = load("qwen3_moe", f"cache: {cache}, decode: graph")
    found, found_logits = answer(model)
    assert found == tokens and difference(found_logits, logits) < tolerance
    assert cache == "{slots: 0}" or engine_of(model).statistics.replayed > 0  # with no slot there is no engine


class CountedNodes(VirtualDevice):
    """Collects, of each step that is captured, how often it calls the host."""

    captured: ClassVar[list[int]] = []

    def capture(self, step: Callable[[], None]) -> EmulatedGraph:
        self._nodes = 0
        graph = super().capture(step)
        CountedNodes.captured.append(self._nodes)
        return graph

    def launch_host(self, *arguments: Any) -> None:
        self._nodes = getattr(self, "_nodes", 0) + 1
        super().launch_host(*arguments)


@emulated_only
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])  # the latter has shared experts, and a dense layer
def test_a_step_calls_the_host_where_not_all_experts_have_slots(model_type: str, load, eager, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    tokens, logits = answer(eager(model_type))
    with device_kind(CountedNodes) as counted:
        whole = load(model_type, "cache: {ratio: 1.0}, decode: graph", gpu=counted)
        slots = engine_of(whole).cache.slots
        short = load(model_type, f"cache: {{slots: {slots.num_experts - 1}}}, decode: graph", gpu=counted)
    for model, nodes in ((whole, 0), (short, slots.layers)):
        CountedNodes.captured = []
        found, found_logits = answer(model)
        assert found == tokens and difference(found_logits, logits) < tolerance
        assert CountedNodes.captured and set(CountedNodes.captured) == {nodes}
        statistics = engine_of(model).statistics
        assert statistics.replayed > 0
        assert nodes or (statistics.found == statistics.used and statistics.on_cpu == statistics.stolen)


@emulated_only
def test_a_step_whose_experts_have_left_their_slots_is_captured_again(load, eager, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    tokens, logits = answer(eager())
    with device_kind(CountedNodes) as counted:
        model = load("qwen3_moe", "cache: {ratio: 1.0}, decode: graph", gpu=counted)
    assert answer(model)[0] == tokens
    slots, captures = engine_of(model).cache.slots, len(CountedNodes.captured)

    def lose(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 12:
            with slots.lock:
                for expert in slots.residents(1):
                    slots._evict(1, expert)  # which nothing does
        return scores

    found, found_logits = answer(model, logits_processor=LogitsProcessorList([lose]))
    assert found == tokens and difference(found_logits, logits) < tolerance
    assert len(CountedNodes.captured) == captures + 1


def test_answers_follow_one_another_on_caches_of_their_own(load, eager) -> None:  # type: ignore[no-untyped-def]
    """A new cache has other addresses: the step is captured again."""
    model, stock = load("qwen3_moe"), eager()
    for length in (3, 9):
        assert answer(model, ids=prompt(length))[0] == answer(stock, ids=prompt(length))[0]
    held = StaticCache(config=model.config, max_cache_len=64)
    first = answer(model, past_key_values=held, disable_compile=True)[0]
    assert first == answer(stock)[0]
    longer = torch.tensor([[*first, 7]], device=model.device)
    assert answer(model, ids=longer, past_key_values=held, disable_compile=True)[0] == answer(stock, ids=longer)[0]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next"])
def test_several_sequences_are_captured_too(model_type: str, load, eager, tolerance: float) -> None:  # type: ignore[no-untyped-def]
    model, stock = load(model_type), eager(model_type)
    ids = prompt(5, batch=3)
    assert difference(answer(model, ids=ids)[1], answer(stock, ids=ids)[1]) < tolerance
    assert engine_of(model).statistics.replayed > 0


@pytest.mark.parametrize(
    ("model_type", "arguments", "reason"),
    [
        ("qwen3_moe", {"cache_implementation": "dynamic"}, "the key-value cache (DynamicCache of DynamicLayer) is not of fixed size"),
        ("qwen3_moe", {"use_cache": False}, None),  # no step has one token
        ("qwen3_moe", {"ids": prompt(5, batch=5)}, "a step of 5 sequences is scheduled layer by layer; up to 4 are captured"),
        ("inkling_text", {}, "SlidingWindowAttentionLayer) is not of fixed size: full"),  # whose windows have states in the same layer
        ("glm5_next", {}, "is not of fixed size: full attention, sliding windows and recurrent states"),
        ("minimax", {}, "the key-value cache (MiniMaxCache of DynamicLayer) is not of fixed size"),  # no other cache is accepted
    ],
)
def test_steps_that_cannot_be_captured_run_and_are_logged_once(  # type: ignore[no-untyped-def]
    model_type: str, arguments: dict[str, Any], reason: str | None, load, eager, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, _ = answer(eager(model_type), **arguments)
    model = load(model_type)
    with caplog.at_level(logging.WARNING, "moegraft"):
        assert answer(model, **arguments)[0] == tokens
        assert answer(model, **arguments)[0] == tokens
    assert [reason is not None and reason in notice for notice in notices(caplog)] == [True] * (reason is not None)
    assert engine_of(model).statistics.replayed == 0


LINEAR = "- match: {kind: linear, name: '(q|k|v|o)_proj$'}\n  replace: {class: quantized_linear, kwargs: {weights: int8}}"
DRAFT = "- match: {kind: model}\n  replace: {class: speculative_draft, kwargs: {draft_top_k: 1, max_draft: 2}}"


@emulated_only
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu": "emulated:0,emulated:1"}, "the layers are on several GPUs"),
        ({"rules": LINEAR}, "other operators compute on the CPU"),
        ({"rules": DRAFT}, "tokens are drafted"),
    ],
)
def test_obstacles_to_captured_steps_are_logged_once(  # type: ignore[no-untyped-def]
    options: dict[str, str], says: str, load, caplog: pytest.LogCaptureFixture
) -> None:
    model = load("qwen3_moe", **options)
    with caplog.at_level(logging.WARNING, "moegraft"):
        for _ in range(2):
            model.generate(prompt(5), max_new_tokens=NEW, do_sample=False)
    said = [record.message for record in caplog.records if record.message.startswith("decode steps run layer by layer: ")]
    assert len([each for each in said if says in each]) == 1, caplog.text
    assert all(engine.statistics.replayed == 0 for engine in model.moegraft.context.gpu_engines)


@emulated_only
def test_a_step_that_gives_other_logits_is_not_taken(  # type: ignore[no-untyped-def]
    load, eager, tolerance: float, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(HostSlotLayers):
        """Weights of the experts are other ones in captured steps, which alone write their routing."""

        def write_routing(self, tokens: Any, scores: Any, top_k_index: Any, top_k_weights: Any, slot_of: Any, row: Any) -> None:
            super().write_routing(tokens, scores, top_k_index, -2 * top_k_weights, slot_of, row)

    tokens, logits = answer(eager())
    with device_kind(layers=Wrong) as wrong, caplog.at_level(logging.WARNING, "moegraft"):
        found, found_logits = answer(load("qwen3_moe", gpu=wrong))
    assert found == tokens and difference(found_logits, logits) < tolerance
    (notice,) = notices(caplog)
    assert "a captured step gave logits that are" in notice


def test_a_model_that_is_changed_is_captured_again(load, tolerance: float, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    """A parameter that is replaced in the middle of a text, and a hook, which no graph would call."""
    seen: list[int] = []

    def steps(model: Any) -> torch.Tensor:
        ids, cache = prompt(20).to(model.device), StaticCache(config=model.config, max_cache_len=20)
        found = []
        with torch.no_grad():
            for at in range(20):
                if at == 8:
                    weight = model.model.norm.weight
                    model.model.norm.weight = torch.nn.Parameter(weight * torch.linspace(0.5, 1.5, weight.numel(), device=weight.device))
                if at == 14:
                    handle = model.model.norm.register_forward_hook(lambda *given: seen.append(1))
                found.append(model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits)
        handle.remove()
        return torch.cat(found, dim=1)

    expected, model = steps(load("qwen3_moe", EAGER)), load("qwen3_moe")
    with caplog.at_level(logging.WARNING, "moegraft"):
        assert difference(steps(model), expected) < tolerance
    assert len(seen) == 12 and ["its modules have hooks" in notice for notice in notices(caplog)] == [True]
    assert model.moegraft.statistics()["decode_steps"]["replayed_steps"] >= 6
    tokens = answer(model)[0]
    assert tokens == answer(model)[0] and engine_of(model).statistics.replayed > NEW


@emulated_only  # whose replays launch again
def test_a_device_that_fails_ends_captured_steps_but_not_the_model(  # type: ignore[no-untyped-def]
    load, caplog: pytest.LogCaptureFixture
) -> None:
    launches = Countdown()
    with device_kind(FaultyDevice, faults=Faults(launches=launches)) as faulty:
        model = load("qwen3_moe", gpu=faulty)
    expected = answer(model)
    launches.left = 40
    with pytest.raises(DeviceError, match="injected"):
        answer(model)
    with caplog.at_level(logging.WARNING, "moegraft"):
        assert answer(model)[0] == expected[0]
    assert re.search("the device failed in a captured step: .*injected", caplog.text)


@pytest.mark.parametrize("gpu", GPUS[1:])  # on an emulated device nothing can be measured
def test_auto_measures_both_ways(load, eager, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    tokens, _ = answer(eager(), max_new_tokens=4 * TIMED_STEPS)
    model = load("qwen3_moe", "cache: {ratio: 0.5}, decode: auto")
    with caplog.at_level(logging.DEBUG, "moegraft"):
        assert answer(model, max_new_tokens=4 * TIMED_STEPS)[0] == tokens
    assert "ms layer by layer and" in caplog.text


@emulated_only
def test_without_a_measurement_auto_is_eager(load, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    model = load("qwen3_moe", "cache: {ratio: 0.5}")
    with caplog.at_level(logging.INFO, "moegraft"):
        made = model.generate(prompt(5), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    assert type(made.past_key_values).__name__ == "DynamicCache"
    assert engine_of(model).statistics.replayed == 0 and not caplog.records


def test_a_schedule_that_divides_otherwise_is_refused(load) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RuleFileError, match=r"decode: graph computes resident experts on the GPU.*which schedule: all_cpu does not"):
        load("qwen3_moe", "schedule: all_cpu, decode: graph")
    assert load("qwen3_moe", "schedule: on_demand, cache: {ratio: 0.5}").moegraft.context.replay is None


def test_a_model_with_a_captured_step_goes_as_a_whole(load) -> None:  # type: ignore[no-untyped-def]
    model = load("qwen3_moe")
    answer(model)
    watched = [weakref.ref(model), weakref.ref(model.model.layers[1].mlp.experts), weakref.ref(model.moegraft.context.replay)]
    del model
    gc.collect()
    assert [each() for each in watched] == [None] * 3


@emulated_only  # whose kernel is replaced
def test_devices_that_round_differently_do_not_rule_out_captured_steps(  # type: ignore[no-untyped-def]
    load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU quantises activations and a GPU does not: a step is compared with one that has the same experts on each device."""
    plan = Scheduler.plan
    everything_on_the_cpu = Scheduler("all_cpu")

    class Scaled(HostSlotLayers):
        def compute(self, *given: Any, **more: Any) -> None:
            super().compute(*given, **more)
            given[-1].mul_(1.5)  # far more than rounding, so that the logits of two splits differ

    def planned(self: Scheduler, *given: Any) -> Any:
        return plan(self if self.name == "fixed" else everything_on_the_cpu, *given)

    monkeypatch.setattr(Scheduler, "plan", planned)
    with device_kind(layers=Scaled) as scaled:
        model = load("qwen3_moe", gpu=scaled)
    with caplog.at_level(logging.WARNING, "moegraft"):
        answer(model)
    assert not caplog.records, caplog.text
    assert engine_of(model).statistics.replayed > 0


@emulated_only
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next"])
def test_a_step_is_kept_for_the_texts_that_follow(model_type: str, load, eager) -> None:  # type: ignore[no-untyped-def]
    """Each answer has a cache of its own; the memory of the last one is taken, and a cache that is returned keeps its contents."""
    captures: list[EmulatedGraph] = []

    class Counting(VirtualDevice):
        def capture(self, step: Callable[[], None]) -> EmulatedGraph:
            captures.append(super().capture(step))
            return captures[-1]

    with device_kind(Counting) as counting:
        model = load(model_type, gpu=counting)
    stock = eager(model_type)
    made = 0
    for ids in (prompt(9), prompt(9)[:, 2:], prompt(5)):
        length = {"max_new_tokens": 9 + NEW - ids.shape[1]}
        assert answer(model, ids=ids, **length)[0] == answer(stock, ids=ids, **length)[0]
        made = made or len(captures)  # by the warm-up and by the first answer
    assert len(captures) == made > 0
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    held = model.generate(prompt(9), **settings)
    kept = [tensor.clone() for _, tensor in cache_tensors(held.past_key_values)]
    assert answer(model, ids=prompt(9))[0] == answer(stock, ids=prompt(9))[0] == held.sequences[0].tolist()
    assert len(captures) == made, "a cache that is returned has memory of its own"
    assert all(torch.equal(tensor, copy) for (_, tensor), copy in zip(cache_tensors(held.past_key_values), kept, strict=True))
