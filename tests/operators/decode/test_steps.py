"""Decode steps as native programs, beside the same steps computed layer by layer: whatever a program does not cover must be noticed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import combinations, with_long
from support.decoding import (
    CLOSE,
    Between,
    assert_equal_steps,
    assert_equal_text,
    assert_replays,
    at,
    differences,
    fed,
    generated,
    layer_by_layer,
    new_model,
    reasons,
    replayed,
    shared_model,
)
from support.families import build_model, case_of, needs_adapters_of_transformers, prompt
from torch import nn
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

from moegraft.injection import new_cache, optimize_and_load
from moegraft.operators.base import CACHE
from moegraft.operators.decode.native.program import StepProgram
from moegraft.operators.decode.replay import StepReplay
from moegraft.operators.decode.rollback import CacheMark
from moegraft.operators.draft import DraftSettings
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.sparsity import WINDOW_TOKENS

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_vl_moe", "llama4_text")


def rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def turned_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., :half], x[..., half:]), -1)


def in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = rotated(x) * sin
    return x.mul_(cos).add_(turned)


def read_twice(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = rotated(x) * sin
    return x * cos + turned + 0.5 * turned


ROTARY: dict[str, Callable[..., torch.Tensor]] = {
    "whole": lambda x, cos, sin: x * cos + rotated(x) * sin,
    "halves": lambda x, cos, sin: x * cos + turned_half(x) * sin,
    "another reader": read_twice,
    "type": lambda x, cos, sin: ((x * cos).double() + rotated(x) * sin).float(),
    "in place": in_place,
}


@pytest.mark.parametrize("way", ROTARY)
def test_only_whole_rotary_embeddings_become_one_operation(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each layer has one for its queries and one for its keys."""

    def applied(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return ROTARY[way](q, cos, sin), ROTARY[way](k, cos, sin)

    def operations() -> int:
        with caplog.at_level("DEBUG", logger="moegraft.operators.decode"):
            assert_equal_text(model, prompt(7), tokens=8)
        (message,) = (message for message in caplog.messages if message.startswith("decode steps are native programs: "))
        caplog.clear()
        return int(message.split(": ")[1].split()[0])

    model = new_model("qwen3_moe")
    fused, layers = operations(), model.config.num_hidden_layers
    monkeypatch.setattr("transformers.models.qwen3_moe.modeling_qwen3_moe.apply_rotary_pos_emb", applied)
    model = new_model("qwen3_moe")
    assert operations() == fused if way == "whole" else operations() >= fused + 8 * layers


@pytest.mark.parametrize(("rules", "family"), combinations(["cpu-exact", "cpu"], FAMILIES))
def test_greedy_text(rules: str, family: str) -> None:
    """Windows of 16 tokens fill on the way."""
    model = shared_model(family, rules)
    before = replayed(model)
    assert_equal_text(model, prompt(7))
    assert_equal_text(model, prompt(12, seed=3))
    assert replayed(model) > before + 40


@pytest.mark.parametrize(("rules", "family"), combinations(["cpu-exact", "cpu"], ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]))
def test_models_in_float64(rules: str, family: str) -> None:
    """Programs have no tensors of this type, so that their caches cannot be appended to."""
    assert_equal_text(new_model(family, rules, torch.float64), prompt(7))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next"])
def test_the_cache_grows_over_the_borders_of_blocks(family: str) -> None:
    model = shared_model(family)
    assert_equal_steps(model, prompt(540), [247, *[1] * 16, 242, *[1] * 14], least=20)


EXPERTS_ALONE = """version: 1
rules:
- {id: experts, match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {weights: stored}}}
"""


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_calls_of_pytorch_over_the_cache(tmp_path: Path, family: str) -> None:
    """Attention as PyTorch computes it, with windows that are full: the start of the cache in its buffer moves."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(EXPERTS_ALONE)
    assert_equal_steps(new_model(family, str(rules)), prompt(60), [7, *[1] * 50], least=35)


@pytest.mark.parametrize(("family", "tokens"), combinations(["mixtral", "gpt_oss", "qwen3_next"], [2, 3, 5, 8]))
def test_steps_of_several_tokens(family: str, tokens: int) -> None:
    """From starts that reach the window of 16 in every phase."""
    model = shared_model(family)
    for start in range(3, 3 + tokens):
        assert_equal_steps(model, prompt(start + 9 * tokens, seed=start), [start, *[tokens] * 9], least=0)
    assert family == "qwen3_next" or replayed(model)


@pytest.mark.parametrize(("family", "rows"), [*itertools.product(("mixtral", "qwen3_moe", "qwen3_next"), (2, 5, 8)), ("deepseek_v3", 2)])
def test_batches(family: str, rows: int) -> None:
    assert_equal_steps(shared_model(family), prompt(30, batch=rows), [7, *[1] * 23], least=10)


def test_steps_called_with_ids_by_position(qwen: PreTrainedModel) -> None:
    ids = prompt(30)

    @torch.no_grad()
    def steps() -> torch.Tensor:
        cache = new_cache(qwen)
        parts = [ids[:, :7], *ids[:, 7:].split(1, 1)]
        return torch.cat([qwen(part, past_key_values=cache).logits for part in parts], 1)

    assert_replays(qwen, steps, least=10)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next"])
def test_padded_batches(family: str) -> None:
    model, ids = shared_model(family), prompt(9, batch=3)
    for padded in ((0, 4, 2), (0, 0, 0)):
        mask = torch.arange(9)[None] >= torch.tensor(padded)[:, None]
        assert_equal_text(model, ids, attention_mask=mask.long())


def test_padded_batches_behind_a_window_of_the_mask_alone() -> None:
    """As MiniMax's, whose cache keeps all tokens."""
    model: Any = shared_model("minimax")
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])

    def steps() -> torch.Tensor:
        arguments = {"attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
        return torch.stack(model.generate(prompt(7, batch=2), do_sample=False, max_new_tokens=20, **arguments).logits, 1)

    assert_replays(model, steps)


def test_steps_of_mixed_sizes(qwen: PreTrainedModel) -> None:
    sizes = [5, *[1, 3, 1, 1, 2, 9, 1, 2, 3, 1] * 5]
    assert_equal_steps(qwen, prompt(sum(sizes)), sizes, least=15)


def test_caches_in_turn() -> None:
    for family in ("mixtral", "qwen3_next"):
        model = shared_model(family)
        rows = [prompt(40, seed=seed) for seed in range(3)]
        starts = (4, 9, 18)
        with layer_by_layer():
            expected = [fed(model, ids, [start, *[1] * 20]) for ids, start in zip(rows, starts, strict=True)]
        caches = [new_cache(model) for _ in rows]
        found = [[fed(model, ids, [start], cache=cache)] for ids, start, cache in zip(rows, starts, caches, strict=True)]
        for step in range(20):
            for part, ids, start, cache in zip(found, rows, starts, caches, strict=True):
                part.append(fed(model, ids[:, start + step :], [1], cache=cache))
        for part, wanted in zip(found, expected, strict=True):
            assert float(differences(torch.cat(part, 1), wanted).max()) <= CLOSE


def test_a_cache_that_goes_while_a_program_takes_another(qwen: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another thread: what is freed is the old cache's memory, and not what the program has just bound."""
    ids = prompt(14)
    expected = fed(qwen, ids, [6, *[1] * 8])
    old, new, states = [new_cache(qwen)], new_cache(qwen), StepProgram.states
    fed(qwen, ids, [6, *[1] * 6], cache=new)
    fed(qwen, ids, [6, *[1] * 6], cache=old[0])

    def gone(program: StepProgram, cache: Any) -> list[torch.Tensor]:
        found = states(program, cache)
        if any("_bind" in frame.name for frame in traceback.extract_stack(limit=3)):
            old.clear()
        return found

    monkeypatch.setattr(StepProgram, "states", gone)
    before = replayed(qwen)
    assert float(differences(fed(qwen, ids[:, 12:], [1, 1], cache=new), expected[:, 12:]).max()) <= CLOSE
    assert not old and replayed(qwen) == before + 2


def test_caches_that_come_and_go(qwen: PreTrainedModel) -> None:
    """A new one may have the address of one that is gone."""
    assert_replays(qwen, lambda: torch.cat([fed(qwen, prompt(14, seed=seed), [6, *[1] * 8]) for seed in range(12)], 1))


def saved(cache: DynamicCache, step: int) -> DynamicCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    found: DynamicCache = torch.load(file, weights_only=False)
    return found


def reversed_layout(cache: DynamicCache, step: int) -> None:
    for layer in cache.layers:
        layer.keys = layer.keys.transpose(1, 2).contiguous().transpose(1, 2)


CHANGES: dict[str, Between] = {
    "reorder": lambda cache, step: cache.reorder_cache(torch.tensor([1, 0, 1])),
    "select": lambda cache, step: cache.batch_select_indices(torch.tensor([2, 1, 0])),
    "copy": lambda cache, step: copy.deepcopy(cache),
    "save": saved,
}


@pytest.mark.parametrize(("family", "change"), combinations(["mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next"], list(CHANGES)))
def test_a_cache_that_is_changed_between_steps(family: str, change: str) -> None:
    if (family, change) == ("qwen3_next", "select"):
        pytest.skip("a recurrent cache of transformers selects no rows")
    between = at((4, 9, 10, 16), CHANGES[change])
    least = 0 if family == "deepseek_v3" else 10
    assert_equal_steps(shared_model(family), prompt(32, batch=3), [7, *[1] * 25], between=between, least=least)


def test_a_cache_with_fewer_rows(qwen: PreTrainedModel) -> None:
    ids = prompt(40, batch=3)

    def steps() -> torch.Tensor:
        cache = new_cache(qwen)
        first = fed(qwen, ids, [7, *[1] * 10], cache=cache)
        cache.batch_select_indices(torch.tensor([0, 2]))
        second = fed(qwen, ids[[0, 2], 17:], [1] * 10, cache=cache)
        cache.batch_repeat_interleave(2)
        third = fed(qwen, ids[[0, 0, 2, 2], 27:], [1] * 10, cache=cache)
        return torch.cat([part.flatten(0, 1)[None] for part in (first, second, third)], 1)

    assert_replays(qwen, steps)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_cropped_cache(family: str) -> None:
    assert_equal_steps(
        shared_model(family), prompt(30), [7, *[1] * 22], between=at((5, 6, 12), lambda cache, step: cache.crop(-3)), least=10
    )


def test_recordings_of_caches_in_other_memory() -> None:
    """Two recordings of one kind: of a cache that has just grown by PyTorch, and of views in buffers of other sizes."""
    model = new_model("qwen3_moe")
    rows = [prompt(330, seed=seed) for seed in range(3)]

    def steps() -> torch.Tensor:
        found = []
        for ids, start in zip(rows, (5, 40, 290), strict=True):
            cache = new_cache(model)
            found += [fed(model, ids, [start, *[1] * 8], cache=cache), fed(model, ids[:, start + 8 :], [3], cache=cache)]
            cache.crop(-2)
            found.append(fed(model, ids[:, start + 9 :], [2, 3, 3], cache=cache))
        return torch.cat(found, 1)

    assert_replays(model, steps, times=2)
    assert not reasons(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_rejected_tokens_leave_the_cache_in_place(family: str) -> None:
    """As speculation does it: drafts of one token, a crop, a verification of several, a crop; no tensor is copied for it."""
    model, ids, addresses = shared_model(family), prompt(40), set[int]()

    def rounds() -> torch.Tensor:
        addresses.clear()
        cache, start, found = new_cache(model), 6, [fed(model, ids, [6], cache=(cache := new_cache(model)))]
        for turn in range(9):
            mark = CacheMark(cache)
            found.append(fed(model, ids[:, start : start + 2], [1, 1], cache=cache))
            mark.rewind()
            found.append(fed(model, ids[:, start : start + 3], [3], cache=cache))
            mark.rewind(keep=1 + turn % 3)
            start += 1 + turn % 3
            if turn > 4:
                addresses.update(layer.keys.untyped_storage().data_ptr() for layer in cache.layers if type(layer) is DynamicLayer)
        return torch.cat(found, 1)

    rounds()
    assert_replays(model, rounds, least=20 if family == "qwen3_moe" else 4)
    if family == "qwen3_moe":
        assert len(addresses) == model.config.num_hidden_layers


def test_layers_of_a_cache_with_other_lengths(qwen: PreTrainedModel) -> None:
    """As an interruption within a step layer by layer leaves them."""

    def between(cache: DynamicCache, step: int) -> None:
        if step == 8:
            cache.layers[1].crop(-1)

    assert_equal_steps(qwen, prompt(30), [7, *[1] * 12])
    assert_equal_steps(qwen, prompt(30), [7, *[1] * 12], between=between, least=0)


def test_a_snapshot_that_is_put_back(qwen: PreTrainedModel) -> None:
    snapshot: list[tuple[torch.Tensor, torch.Tensor]] = []

    def between(cache: DynamicCache, step: int) -> None:
        if step == 8:
            snapshot[:] = [(layer.keys, layer.values) for layer in cache.layers]
        elif step in (11, 15):
            for layer, (keys, values) in zip(cache.layers, snapshot, strict=True):
                layer.keys, layer.values = keys, values

    assert_equal_steps(qwen, prompt(30), [7, *[1] * 20], between=between, least=10)


def test_two_caches_of_one_prefix(qwen: PreTrainedModel) -> None:
    """Tensors shared without a copy: what one cache adds is not in the other."""

    def steps() -> torch.Tensor:
        one = new_cache(qwen)
        first = fed(qwen, prompt(40), [7, *[1] * 8], cache=one)
        other = copy.copy(one)
        other.layers = [copy.copy(layer) for layer in one.layers]
        found = [first]
        for step in range(10):
            found.append(fed(qwen, prompt(40)[:, 15 + step :], [1], cache=one))
            found.append(fed(qwen, prompt(40, seed=1)[:, 15 + step :], [1], cache=other))
        return torch.cat(found, 1)

    assert_replays(qwen, steps)


def test_a_cache_of_another_type(qwen: PreTrainedModel) -> None:
    def between(cache: DynamicCache, step: int) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()

    assert_equal_steps(qwen, prompt(30), [7, *[1] * 20], between=at((8,), between), least=5)
    assert_equal_steps(qwen, prompt(30), [7, *[1] * 20], between=at((8,), reversed_layout), least=15)


def test_states_that_are_replaced() -> None:
    """In other memory, and in another layout, while keys and values stay."""
    model = shared_model("qwen3_next")
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])

    def between(cache: DynamicCache, step: int) -> None:
        for layer in cache.layers:
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                for key, state in states.items():
                    states[key] = 0.5 * state if step == 6 else state.mT.contiguous().mT

    assert_equal_steps(model, prompt(30), [7, *[1] * 20], between=at((6, 12), between), least=5)


def test_a_model_that_makes_its_cache_itself() -> None:
    """As MiniMax, which refuses any other; a text goes on with the cache that it returned."""
    model: Any = shared_model("minimax")
    with pytest.raises(UnsupportedModelError, match="MiniMaxForCausalLM makes a cache of its own"):
        new_cache(model)
    whole = model.generate(prompt(9), max_new_tokens=20, do_sample=False)
    begun = model.generate(prompt(9), max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    ids, cache = begun.sequences, begun.past_key_values
    rest = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    assert rest.tolist() == whole.tolist()


def test_states_that_the_model_replaces_in_each_step() -> None:
    """MiniMax's, in a cache that the model makes: a program overwrites them."""
    model: Any = shared_model("minimax")

    def steps() -> torch.Tensor:
        with torch.no_grad():
            outputs = model(input_ids=prompt(40)[:, :7], use_cache=True)
        cache, found = outputs.past_key_values, []
        for turn in range(7, 40):
            found.append(fed(model, prompt(40)[:, turn:], [1], cache=cache))
            if turn == 30:
                for number, each in enumerate(cache.linear_cache):
                    cache.linear_cache[number] = each * 0.5 if isinstance(each, torch.Tensor) else each
        return torch.cat(found, 1)

    assert_replays(model, steps, times=2, least=41)


def test_a_forward_pass_that_generates_text_itself() -> None:
    class Asking(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.asks = False

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            if self.asks and hidden_states.shape[1] == 1:
                self.asks = False
                answers.append(model.generate(prompt(5), max_new_tokens=8, do_sample=False))  # type: ignore[operator]
            found: torch.Tensor = self.inner(hidden_states)
            return found

    model = new_model("qwen3_moe")
    asking: Any = Asking(model.model.norm)
    model.model.norm = asking
    expected, wanted = generated(model, prompt(7)), generated(model, prompt(5), 8)
    answers: list[torch.Tensor] = []
    asking.asks = True
    assert torch.equal(generated(model, prompt(7)), expected)
    assert [answer.tolist() for answer in answers] == [wanted.tolist()]


DRAFTS = """- match: {kind: model}
  replace: {class: speculative_draft, kwargs: {draft_top_k: 1, schedule: fixed, max_draft: 4}}
"""


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_drafts_with_fewer_experts(tmp_path: Path, family: str) -> None:
    """Drafted tokens and their verification are programs, and the text is that of plain decoding."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{DRAFTS}")
    model = new_model(family, str(rules))
    with layer_by_layer():
        expected = generated(shared_model(family), prompt(7), 60)
    drafted = 0
    for _ in range(3):
        before = replayed(model)
        assert torch.equal(generated(model, prompt(7), 60), expected)
        drafted = replayed(model) - before
    rounds: Any = model.moegraft.model_operator
    assert rounds.statistics()["rounds"] > 20
    assert drafted >= 40
    assert not reasons(model)


def test_the_outputs_of_a_replayed_step(qwen: PreTrainedModel) -> None:
    cache, ids = new_cache(qwen), prompt(12)
    with torch.inference_mode():
        qwen(input_ids=ids[:, :6], past_key_values=cache)
        with layer_by_layer():
            expected = qwen(input_ids=ids[:, 6:7], past_key_values=cache)
        before = replayed(qwen)
        for place in range(7, 12):
            found = qwen(input_ids=ids[:, place : place + 1], past_key_values=cache)
    assert replayed(qwen) > before
    assert type(found) is type(expected)
    assert [(name, type(value)) for name, value in vars(found).items()] == [(name, type(value)) for name, value in vars(expected).items()]
    assert list(found) == list(expected) == ["logits", CACHE]
    assert found.logits is found["logits"] is found[0] and found[CACHE] is cache
    assert isinstance(pickle.loads(pickle.dumps(found)).logits, torch.Tensor)


SPARSE = """version: 1
extends: cpu-exact
rules:
- match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {weights: stored, sparsity: {target: 0, scope: routed}}}
"""


@pytest.fixture
def sparse(tmp_path: Path) -> tuple[PreTrainedModel, list[Any]]:
    """A model, and the sparsity of each of its layers."""
    rules = tmp_path / "sparse.yaml"
    rules.write_text(SPARSE)
    model = new_model("qwen3_moe", str(rules), threads=2)
    layers: list[Any] = [module.sparsity for module in model.modules() if isinstance(module, HybridExperts)]
    for number, layer in enumerate(layers):
        layer.set_threshold(0.02 * (1 + number), 0.5)
    return model, layers


def test_experts_without_some_neurons(sparse: tuple[PreTrainedModel, list[Any]]) -> None:
    """Text and counts are those without programs, also when the thresholds change in the middle of a text."""
    model, layers = sparse
    counted: list[list[int]] = []

    def steps() -> torch.Tensor:
        for layer in layers:
            layer.set_threshold(0.03, 0.5)

        def between(cache: DynamicCache, step: int) -> None:
            if step == 14:
                layers[1].set_threshold(0.2, 0.5, layers[1].counts.copy())

        found = fed(model, prompt(40), [7, *[1] * 25], between=between)
        counted.append([int(count) for layer in layers for count in layer.counts])
        return found

    assert_replays(model, steps, times=2, least=26)
    assert counted[0] == counted[1] == counted[2]
    assert 0 < counted[0][0] < counted[0][1]


def test_drift_of_sparsity_is_reported_while_steps_are_programs(
    sparse: tuple[PreTrainedModel, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    model, layers = sparse
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])
    for layer in layers:
        layer.set_threshold(layer.threshold, 0.999)
        layer.begin(WINDOW_TOKENS - 1)  # of earlier passes
    before = replayed(model)
    fed(model, prompt(40), [7, *[1] * 20])
    assert replayed(model) > before
    assert any("routed neurons are left out" in message for message in caplog.messages)


def test_observed_experts(sparse: tuple[PreTrainedModel, list[Any]]) -> None:
    model, (layer, *_) = sparse
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])
    seen: list[int] = []
    layer.observer = lambda ids, acted: seen.append(len(ids))
    fed(model, prompt(20), [7, *[1] * 10])
    assert seen == [7, *[1] * 10]
    layer.observer = None
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])


def test_sparser_drafts(sparse: tuple[PreTrainedModel, list[Any]]) -> None:
    """Drafted and other steps of one cache in turn: each has its own threshold and counts."""
    model, layers = sparse
    switch = model.moegraft.context.draft_switch
    counted: list[list[int]] = []
    for layer in layers:
        layer.set_draft_threshold(0.3)

    def steps() -> torch.Tensor:
        cache, found, ids = new_cache(model), [], prompt(40)
        before = [[*layer.counts, *layer._draft_counts] for layer in layers]
        fed(model, ids, [7], cache=cache)
        for turn in range(7, 40):
            with switch.drafting(DraftSettings(2, sparsity=0.9)) if turn % 3 else contextlib.nullcontext():
                found.append(fed(model, ids[:, turn:], [1], cache=cache))
        after = [[*layer.counts, *layer._draft_counts] for layer in layers]
        counted.append([int(b - a) for pair in zip(before, after, strict=True) for a, b in zip(*pair, strict=True)])
        return torch.cat(found, 1)

    assert_replays(model, steps, times=2, least=41)
    assert counted[0] == counted[1] == counted[2]
    assert min(counted[0]) > 0


def test_other_outputs(qwen: PreTrainedModel) -> None:
    """Attentions, hidden states, tuples, some of the logits; asked for in between, after programs are there."""
    cache, other = new_cache(qwen), new_cache(qwen)
    fed(qwen, prompt(40), [7, *[1] * 8], cache=cache)
    with layer_by_layer():
        fed(qwen, prompt(40), [7, *[1] * 8], cache=other)
    for step, arguments in enumerate(
        [
            {"output_attentions": True},
            {"output_hidden_states": True},
            {"return_dict": False},
            {"logits_to_keep": 1},
            {"output_router_logits": True},
        ]
        * 4
    ):
        given = {"input_ids": prompt(40)[:, 15 + step : 16 + step], **arguments}
        with torch.no_grad():
            found = qwen(past_key_values=cache, **given)
            with layer_by_layer():
                expected = qwen(past_key_values=other, **given)
        assert type(found) is type(expected)
        if isinstance(found, tuple):
            torch.testing.assert_close(found[0], expected[0])
            continue
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.logits, expected.logits)
    assert_equal_steps(qwen, prompt(20), [7, *[1] * 10], least=6)  # what transformers left behind is no obstacle


def test_settings_of_the_configuration(qwen: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fed(qwen, prompt(20), [7, *[1] * 8])
    for name in ("output_hidden_states", "output_router_logits"):
        cache = new_cache(qwen)
        fed(qwen, prompt(20), [7, *[1] * 4], cache=cache)
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(qwen.config, name, True)
            found = qwen(input_ids=prompt(20)[:, 11:12], past_key_values=cache)
        assert found[name.removeprefix("output_")] is not None


def quantized_cache(model: PreTrainedModel) -> QuantizedCache:
    return QuantizedCache("hqq", model.config, axis_key=1, axis_value=1, nbits=8, q_group_size=8, residual_length=4)


def fp8_cache(model: PreTrainedModel) -> QuantizedCache:
    return QuantizedCache("fp8", model.config)


@pytest.mark.parametrize(
    ("family", "new", "reason"),
    [
        ("qwen3_moe", lambda model: StaticCache(config=model.config, max_cache_len=32), "the cache is a StaticCache that"),
        ("mixtral", lambda model: StaticCache(config=model.config, max_cache_len=32), "the cache is a StaticCache that"),
        ("qwen3_moe", lambda model: DynamicCache(config=model.config), "the cache is a DynamicCache that moegraft has not made: pass none"),
        ("qwen3_moe", quantized_cache, "keys and values of a quantised cache are restored in each step"),
        ("qwen3_moe", fp8_cache, "keys and values of a quantised cache are restored in each step"),
        ("qwen3_moe", lambda model: DynamicCache(config=model.config, offloading=True), "the cache is an offloaded DynamicCache that"),
    ],
    ids=["static", "static window", "dynamic", "hqq", "fp8", "offloaded"],
)
def test_a_cache_that_no_program_appends_to(
    caplog: pytest.LogCaptureFixture,
    family: str,
    new: Callable[[PreTrainedModel], Any],
    reason: str,
) -> None:
    """Its steps run layer by layer, with the reason in the log once; those of other caches are programs."""
    model = new_model(family)

    def steps() -> torch.Tensor:
        return fed(model, prompt(20), [7, *[1] * 10], cache=new(model))

    try:
        with layer_by_layer():
            expected = steps()
    except (RuntimeError, ImportError, AssertionError, ValueError) as error:  # PyTorch without CUDA offloads nothing; 5.17 has no fp8
        pytest.skip(f"transformers refuses it on this machine: {error}")
    caplog.set_level("INFO", logger=StepReplay.__module__)
    for _ in range(2):
        assert float(differences(steps(), expected).max()) <= CLOSE
    assert replayed(model) == 0
    assert [message for message in caplog.messages if reason in message] == [f"decode steps run layer by layer: {reasons(model)[0]}"]
    assert_equal_steps(model, prompt(20), [7, *[1] * 8])


def test_hooks() -> None:
    """Added after programs were made, and removed."""
    model = shared_model("qwen3_moe")
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])
    seen: list[int] = []
    handles: list[Any] = []

    def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return 2 * output

    norm = next(module for name, module in model.named_modules() if name.endswith("post_attention_layernorm"))

    def between(cache: DynamicCache, step: int) -> None:
        if step == 3:
            handles.append(norm.register_forward_hook(doubled))
        elif step == 8:
            handles.pop().remove()

    assert_equal_steps(model, prompt(20), [7, *[1] * 13], between=between)
    assert len(seen) == 10
    with_all = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(2))
    try:
        fed(model, prompt(20), [7, *[1] * 2])
    finally:
        with_all.remove()
    assert seen.count(2) > 20
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])


def scaled(module: nn.Module, factor: float) -> Callable[[torch.Tensor], Any]:
    compute = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return factor * compute(*args, **kwargs)

    return forward


class Scaled(nn.Module):
    """A wrapper as adapters are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.active = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.inner(*args, **kwargs)
        return self.scale * found if self.active else found


class Halved(nn.Module):
    """A decoder layer of the caller's own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return 0.5 * (x + self.layer(x, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)


def test_a_parameter_that_changes_in_every_step() -> None:
    """No step is recorded for ever, and the next text begins again."""
    model: Any = new_model("qwen3_moe")

    def between(cache: DynamicCache, step: int) -> None:
        model.model.norm.weight = nn.Parameter(norm_weight(model).detach().clone())

    assert_equal_steps(model, prompt(40), [7, *[1] * 30], between=between, least=0)
    assert "the model changes from step to step" in reasons(model)
    assert_equal_steps(model, prompt(40), [7, *[1] * 20], least=10)


def test_a_lora_adapter() -> None:
    """peft's, on the layers that are left to PyTorch: merged weights, an adapter switched off and on, and taken away."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    needs_adapters_of_transformers()
    model: Any = new_model("qwen3_moe")

    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and "mlp" not in name]  # PEFT takes it for experts
    assert names

    def adapted() -> None:
        torch.manual_seed(1)
        model.add_adapter(peft.LoraConfig(target_modules=names, r=4, init_lora_weights=False))

    def steps() -> torch.Tensor:
        changes = {8: adapted, 14: model.disable_adapters, 20: model.enable_adapters, 26: lambda: model.delete_adapter("default")}
        return fed(model, prompt(50), [7, *[1] * 34], between=lambda cache, step: step in changes and changes[step]() and None)

    with layer_by_layer():
        expected = steps()
        assert float(differences(fed(model, prompt(50), [7, *[1] * 34]), expected).max()) > 1e-3, "the adapter changes nothing"
    before = replayed(model)
    assert float(differences(steps(), expected).max()) <= CLOSE
    assert replayed(model) - before >= 8, reasons(model)


def norm_weight(model: Any) -> nn.Parameter:
    found: nn.Parameter = model.model.norm.weight
    return found


def replaced_forward(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.forward = scaled(norm, 1.5)


def replaced_module(model: Any) -> None:
    model.model.layers[1].input_layernorm = Scaled(model.model.layers[1].input_layernorm)


def replaced_parameter(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(1.5 * norm_weight(model).detach())


def replaced_data(model: Any) -> None:
    norm_weight(model).data = norm_weight(model).data * torch.linspace(0.5, 1.5, norm_weight(model).numel())


def edited_in_place(model: Any) -> None:
    with torch.no_grad():
        norm_weight(model).mul_(torch.linspace(0.5, 1.5, norm_weight(model).numel()))
        model.model.embed_tokens.weight.mul_(-1)


def replaced_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = 0.5 * model.model.rotary_emb.inv_freq


def loaded_state(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.load_state_dict({"weight": torch.linspace(0.5, 1.5, norm_weight(model).numel())})


def replaced_in_a_module_list(model: Any) -> None:
    model.model.layers[1] = Halved(model.model.layers[1])


@pytest.mark.parametrize(
    "change",
    [
        replaced_forward,
        replaced_module,
        replaced_in_a_module_list,
        replaced_parameter,
        replaced_data,
        edited_in_place,
        replaced_buffer,
        loaded_state,
    ],
    ids=lambda change: change.__name__,
)
def test_a_model_that_is_changed_after_recording(change: Callable[[Any], None]) -> None:
    """In the middle of a text, and whole texts before and after."""
    ids, sizes = prompt(40), [7, *[1] * 30]
    expected = []
    stock = new_model("qwen3_moe")
    with layer_by_layer():
        expected.append(fed(stock, ids, sizes, between=at((14,), lambda cache, step: change(stock))))
        expected.append(fed(stock, ids, sizes))
    model = new_model("qwen3_moe")
    fed(model, ids, sizes)
    found = [fed(model, ids, sizes, between=at((14,), lambda cache, step: change(model))), fed(model, ids, sizes)]
    assert float(differences(expected[1], expected[0])[:7].max()) > 1e-3, "the change changes nothing"
    for one, other in zip(found, expected, strict=True):
        assert float(differences(one, other).max()) <= CLOSE
    assert replayed(model) > 60


def test_an_adapter_that_is_switched_off_after_recording() -> None:
    model: Any = new_model("qwen3_moe")
    replaced_module(model)

    def switched(cache: DynamicCache, step: int) -> None:
        model.model.layers[1].input_layernorm.active = step != 20

    assert_equal_steps(model, prompt(40), [7, *[1] * 30], between=switched, least=5)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_passes_its_limit(family: str) -> None:
    """Eight tokens are looked at, of which there are fewer in the first steps."""
    assert_equal_steps(shared_model(family), prompt(30), [3, *[1] * 25], least=0)


def test_sparse_attention_below_its_limit() -> None:
    """It looks at one token more in each step, and then at 24."""
    case = case_of("deepseek_v32")
    stock = build_model(dataclasses.replace(case, text={**case.text, "index_topk": 24}))
    model: Any = optimize_and_load(stock, "cpu-exact", progress=False, threads=1)
    assert_equal_steps(model, prompt(40), [5, *[1] * 35], least=12 + 9)
    assert not reasons(model)


@pytest.mark.parametrize("family", with_long(["qwen4_exp_text", "glm5_next"], "qwen4_exp_text"))
def test_pools_of_tokens(family: str) -> None:
    """Four make a group, of which a text has a program for each position in it; eight tokens or two groups are looked at."""
    model = shared_model(family)
    assert_equal_steps(model, prompt(58), [8, *[1] * 50], least=8)
    if family == "qwen4_exp_text":
        assert_equal_steps(model, prompt(52, batch=2), [33, *[1] * 19], least=1)
        assert_equal_steps(model, prompt(93), [33, *[3] * 20], least=1)  # drafts
    assert_equal_steps(model, prompt(20), [3, *[1] * 17], least=4)  # in the first steps fewer tokens than are looked at
    assert not reasons(model)


def test_a_pool_that_is_hidden_later() -> None:
    """Fewer are found than in the recording: the step is computed again, with its states as they were."""
    model = shared_model("glm5_next")

    def hide(cache: Any, step: int) -> None:
        for layer in cache.layers:
            if step == 30 and getattr(layer, "indexer_keys", None) is not None:
                layer.indexer_keys = layer.indexer_keys.clone()
                layer.indexer_keys[:, 8:12, -1] = 0  # what padding has there

    assert_equal_steps(model, prompt(44), [6, *[1] * 38], between=hide, least=4)
    assert any("expected" in reason for reason in reasons(model))


def test_compressed_caches() -> None:
    """Groups of 4 tokens and of 28, of which the latter are too long for a program for each position."""
    case = case_of("deepseek_v4")
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 28}
    stock = build_model(dataclasses.replace(case, text={**case.text, "compress_rates": rates, "sliding_window": 30}))
    model: Any = optimize_and_load(stock, "cpu-exact", progress=False, threads=1)
    assert_equal_steps(model, prompt(84), [33, *[1] * 51], least=8)


def test_positions_that_images_shift() -> None:
    """They are an attribute of the model that each prompt sets."""
    model: Any = new_model("qwen3_vl_moe")
    for shift in (None, 5, 9, 9):

        def between(cache: DynamicCache, step: int, shift: int | None = shift) -> None:
            model.model.rope_deltas = None if shift is None else torch.tensor([[shift]])

        assert_equal_steps(model, prompt(30), [7, *[1] * 15], between=at((0,), between))


def test_threads_record_one_model() -> None:
    """One records while the other computes: the recording is its own alone."""
    model = new_model("qwen3_moe")
    with layer_by_layer():
        expected = [generated(model, prompt(7, seed=seed), 30) for seed in range(3)]
    with ThreadPoolExecutor(3) as workers:
        found = workers.map(lambda seed: generated(model, prompt(7, seed=seed), 30), range(3))
    assert all(map(torch.equal, found, expected))
    assert replayed(model)
    assert not reasons(model)


def _in_child(model: PreTrainedModel, cache: DynamicCache, pipe: Any) -> None:
    try:
        fed(model, prompt(20)[:, 15:], [1], cache=cache)
        pipe.send("computed")
    except RuntimeError as error:
        pipe.send(str(error))
    except BaseException:  # noqa: BLE001 # reported to the parent
        pipe.send(traceback.format_exc())
    os._exit(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process(qwen: PreTrainedModel) -> None:
    """It is refused there, with the reason, as the kernels themselves are; the parent goes on."""
    cache = new_cache(qwen)
    fed(qwen, prompt(20), [7, *[1] * 8], cache=cache)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(qwen, cache, there))
    child.start()
    assert here.poll(60), "the child hangs"
    assert "fork" in here.recv()
    child.join(60)
    assert child.exitcode == 0
    assert_equal_steps(qwen, prompt(20), [7, *[1] * 8])


def test_an_interruption_while_a_cache_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its tensors are in new buffers by then, and programs must not write to the old."""
    model = shared_model("qwen3_moe")
    ids = prompt(30)
    with layer_by_layer():
        expected = fed(model, ids, [7, *[1] * 20])
    cache = new_cache(model)
    fed(model, ids, [7, *[1] * 8], cache=cache)
    for layer in cache.layers:
        layer.keys = layer.keys.clone()
    turns = 0
    stock = torch.Tensor.new_empty

    def interrupted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal turns
        turns += 1
        if turns == 2:
            raise KeyboardInterrupt
        return stock(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "new_empty", interrupted)
        fed(model, ids[:, 15:], [1], cache=cache)
    assert float(differences(fed(model, ids[:, 15:], [1] * 12, cache=cache), expected[:, 15:]).max()) <= CLOSE


def test_an_error_within_a_step() -> None:
    """A token that there is not, while steps are recorded and when they are replayed."""
    for recorded in (0, 1, 2, 8):
        model = new_model("qwen3_moe")
        cache = new_cache(model)
        fed(model, prompt(20), [7, *[1] * recorded], cache=cache)
        for wrong in (101, -1):
            with pytest.raises((IndexError, ValueError, RuntimeError), match="range"):
                fed(model, torch.tensor([[wrong]]), [1], cache=cache)
        assert_equal_steps(model, prompt(20), [7, *[1] * 12])


def test_modes_of_pytorch(qwen: PreTrainedModel) -> None:
    """Gradients, autocast and inference mode, turned on after programs were made."""
    ids, sizes = prompt(30), [7, *[1] * 10]
    with layer_by_layer():
        expected = fed(qwen, ids, sizes)
    fed(qwen, ids, sizes)
    cache = new_cache(qwen)
    fed(qwen, ids, sizes[:-3], cache=cache)
    with torch.enable_grad():
        assert qwen(input_ids=ids[:, 14:15], past_key_values=cache).logits.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fed(qwen, ids, sizes)
    assert 1e-4 < float(differences(found.float(), expected).max()) < 0.5
    with torch.inference_mode():
        cache = new_cache(qwen)
        found = fed(qwen, ids, sizes[:-3], cache=cache)
    rest = fed(qwen, ids[:, 14:], [1] * 3, cache=cache)
    assert float(differences(torch.cat([found, rest], 1), expected).max()) <= CLOSE


def test_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout it computes something else."""
    model: Any = new_model("qwen3_moe")
    fed(model, prompt(20), [7, *[1] * 8])
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
    model.train()
    before = replayed(model)
    torch.manual_seed(0)
    one = fed(model, prompt(20), [7, *[1] * 8])
    two = fed(model, prompt(20), [7, *[1] * 8])
    assert replayed(model) == before
    assert bool((differences(one, two)[7:] > 1e-4).all())


def test_inputs_in_another_layout() -> None:
    model = new_model("qwen3_moe")
    transposed = prompt(30, batch=2).T.contiguous().T
    before = replayed(model)
    assert_equal_steps(model, transposed, [6, *[3] * 8], least=2)
    assert_equal_steps(model, prompt(30, batch=2), [6, *[3] * 8], least=2)
    assert replayed(model) > before


def test_positions_of_the_caller(qwen: PreTrainedModel) -> None:
    """They need not be those of the cache."""
    cache, other = new_cache(qwen), new_cache(qwen)
    fed(qwen, prompt(40), [7], cache=cache)
    with layer_by_layer():
        fed(qwen, prompt(40), [7], cache=other)
    before = replayed(qwen)
    for step, place in enumerate([7, 9, 30, 12, 3, 100, 8, 8, 200]):
        given = {"input_ids": prompt(40)[:, 7 + step : 8 + step], "position_ids": torch.tensor([[place]])}
        with torch.no_grad():
            found = qwen(past_key_values=cache, **given).logits
            with layer_by_layer():
                expected = qwen(past_key_values=other, **given).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert replayed(qwen) > before


def test_statistics() -> None:
    model = new_model("qwen3_moe")

    def statistics() -> dict[str, Any]:
        found: dict[str, Any] = model.moegraft.statistics()["decode_steps"]
        return found

    none = {"replayed_steps": 0, "programs": 0, "step_us": 0.0, "outside_kernels_us": 0.0, "reasons": []}
    assert statistics() == none
    fed(model, prompt(20), [7, *[1] * 10])
    found = statistics()
    assert found | {"step_us": 0.0, "outside_kernels_us": 0.0} == none | {"replayed_steps": 6, "programs": 1}  # the first four are checks
    assert 0 < found["outside_kernels_us"] < found["step_us"]
    handle = model.register_forward_hook(lambda module, args, output: None)
    fed(model, prompt(20), [7, *[1] * 3])
    handle.remove()
    assert statistics()["reasons"] == ["its modules have hooks"]
