"""Decode steps as native programs, beside the same steps computed layer by layer: whatever a program does not cover must be noticed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import combinations
from support.families import build_model, prompt, served_cases
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import TextIteratorStreamer

from moegraft.injection import new_cache, optimize_and_load
from moegraft.operators.decode.native.program import StepProgram
from moegraft.operators.decode.replay import StepReplay
from moegraft.operators.decode.rollback import CacheMark
from moegraft.operators.decode.schedule import FixedSchedule
from moegraft.operators.draft import DraftSettings
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.experts.hybrid import HybridExperts

CLOSE = 1e-4  # relative, of logits in float32; states of recurrent layers carry roundings on
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_vl_moe")
Between = Callable[[Any, int], Any]


def new_model(name: str, rules: str = "cpu-exact", threads: int = 1) -> PreTrainedModel:
    case = next(case for case in served_cases() if case.model_type == name)
    model: PreTrainedModel = optimize_and_load(build_model(case), rules, progress=False, threads=threads)
    return model


@pytest.fixture(scope="module")
def models() -> Callable[[str, str], PreTrainedModel]:
    """Models that several tests share; each test leaves them as they were."""
    made: dict[tuple[str, str], PreTrainedModel] = {}

    def model(name: str, rules: str = "cpu-exact") -> PreTrainedModel:
        if (name, rules) not in made:
            made[name, rules] = new_model(name, rules)
        return made[name, rules]

    return model


@contextlib.contextmanager
def layer_by_layer() -> Iterator[None]:
    """No step is a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepReplay, "forward", lambda self, model, plain, args, arguments: plain(*args, **arguments))
        yield


def replayed(model: PreTrainedModel) -> int:
    found: int = model.moegraft.context.replay.replayed
    return found


def reasons(model: PreTrainedModel) -> list[str]:
    found: list[str] = model.moegraft.context.replay.statistics()["reasons"]
    return found


def fed(
    model: PreTrainedModel,
    ids: torch.Tensor,
    sizes: Sequence[int],
    *,
    cache: DynamicCache | None = None,
    between: Between | None = None,
    **arguments: Any,
) -> torch.Tensor:
    """The logits of all tokens of `ids`, given in parts of `sizes`; `between` may return another cache to go on with."""
    cache = new_cache(model) if cache is None else cache
    found, start = [], 0
    with torch.no_grad():
        for step, size in enumerate(sizes):
            ids_of_step = ids[:, start : start + size]
            found.append(model(input_ids=ids_of_step, past_key_values=cache, use_cache=True, **arguments).logits)
            start += size
            if between is not None:
                cache = between(cache, step) or cache
    return torch.cat(found, 1)


def differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each token, relative to the largest logit."""
    return (found - expected).abs().amax((0, 2)) / expected.abs().amax()


def assert_equal_steps(model: PreTrainedModel, ids: torch.Tensor, sizes: Sequence[int], *, least: int = 1, **options: Any) -> None:
    """The steps equal those without programs, and at least `least` were replayed."""
    with layer_by_layer():
        expected = fed(model, ids, sizes, **options)
    before = replayed(model)
    found = fed(model, ids, sizes, **options)
    assert float(differences(found, expected).max()) <= CLOSE
    assert replayed(model) - before >= least, reasons(model)


def generated(model: PreTrainedModel, ids: torch.Tensor, tokens: int = 24, **options: Any) -> torch.Tensor:
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    return generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **{"do_sample": False, **options})


def assert_equal_text(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> None:
    with layer_by_layer():
        expected = generated(model, ids, **options)
    for _ in range(2):
        assert torch.equal(generated(model, ids, **options), expected)


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


@pytest.fixture
def qwen(models: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return models("qwen3_moe")


@pytest.mark.parametrize(("rules", "family"), combinations(["cpu-exact", "cpu"], FAMILIES))
def test_greedy_text(models: Callable[[str, str], PreTrainedModel], rules: str, family: str) -> None:
    """Windows of 16 tokens fill on the way."""
    model = models(family, rules)
    before = replayed(model)
    assert_equal_text(model, prompt(7))
    assert_equal_text(model, prompt(12, seed=3))
    assert replayed(model) > before + 40


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next"])
def test_the_cache_grows_over_the_borders_of_blocks(models: Callable[[str], PreTrainedModel], family: str) -> None:
    model = models(family)
    assert_equal_steps(model, prompt(540), [247, *[1] * 16, 242, *[1] * 14], least=20)
    assert_equal_steps(model, prompt(300, seed=1), [3, *[1] * 260], least=250)


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
def test_steps_of_several_tokens(models: Callable[[str], PreTrainedModel], family: str, tokens: int) -> None:
    """From starts that reach the window of 16 in every phase."""
    model = models(family)
    for start in range(3, 3 + tokens):
        assert_equal_steps(model, prompt(start + 9 * tokens, seed=start), [start, *[tokens] * 9], least=0)
    assert family == "qwen3_next" or replayed(model)


@pytest.mark.parametrize(("family", "rows"), [*itertools.product(("mixtral", "qwen3_moe", "qwen3_next"), (2, 5, 8)), ("deepseek_v3", 2)])
def test_batches(models: Callable[[str], PreTrainedModel], family: str, rows: int) -> None:
    assert_equal_steps(models(family), prompt(30, batch=rows), [7, *[1] * 23], least=10)


def test_steps_called_with_ids_by_position(qwen: PreTrainedModel) -> None:
    ids, cache, before = prompt(30), new_cache(qwen), replayed(qwen)
    with torch.no_grad():
        found = [qwen(ids[:, :7], past_key_values=cache).logits]
        found += [qwen(ids[:, token : token + 1], past_key_values=cache).logits for token in range(7, 30)]
    with layer_by_layer():
        expected = fed(qwen, ids, [7, *[1] * 23])
    assert differences(torch.cat(found, 1), expected).max() < 1e-4
    assert replayed(qwen) - before >= 10


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next"])
def test_padded_batches(models: Callable[[str], PreTrainedModel], family: str) -> None:
    model, ids = models(family), prompt(9, batch=3)
    for padded in ((0, 4, 2), (1, 0, 0), (0, 0, 0)):
        mask = torch.arange(9)[None] >= torch.tensor(padded)[:, None]
        assert_equal_text(model, ids, attention_mask=mask.long())


def test_steps_of_mixed_sizes(qwen: PreTrainedModel) -> None:
    sizes = [5, *[1, 3, 1, 1, 2, 9, 1, 2, 3, 1] * 5]
    assert_equal_steps(qwen, prompt(sum(sizes)), sizes, least=15)


def test_caches_in_turn(models: Callable[[str], PreTrainedModel]) -> None:
    for family in ("mixtral", "qwen3_next"):
        model = models(family)
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
    with layer_by_layer():
        expected = [fed(qwen, prompt(14, seed=seed), [6, *[1] * 8]) for seed in range(12)]
    for seed, wanted in enumerate(expected):
        assert float(differences(fed(qwen, prompt(14, seed=seed), [6, *[1] * 8]), wanted).max()) <= CLOSE


def saved(cache: DynamicCache, step: int) -> DynamicCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    found: DynamicCache = torch.load(file, weights_only=False)
    return found


def at(turns: Sequence[int], change: Between) -> Between:
    return lambda cache, step: change(cache, step) if step in turns else None


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
def test_a_cache_that_is_changed_between_steps(models: Callable[[str], PreTrainedModel], family: str, change: str) -> None:
    if (family, change) == ("qwen3_next", "select"):
        pytest.skip("a recurrent cache of transformers selects no rows")
    between = at((4, 9, 10, 16), CHANGES[change])
    least = 0 if family == "deepseek_v3" else 10
    assert_equal_steps(models(family), prompt(32, batch=3), [7, *[1] * 25], between=between, least=least)


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

    with layer_by_layer():
        expected = steps()
    assert float(differences(steps(), expected).max()) <= CLOSE


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_cropped_cache(models: Callable[[str], PreTrainedModel], family: str) -> None:
    assert_equal_steps(models(family), prompt(30), [7, *[1] * 22], between=at((5, 6, 12), lambda cache, step: cache.crop(-3)), least=10)


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

    with layer_by_layer():
        expected = steps()
    for _ in range(2):
        assert float(differences(steps(), expected).max()) <= CLOSE
    assert not reasons(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_rejected_tokens_leave_the_cache_in_place(models: Callable[[str], PreTrainedModel], family: str) -> None:
    """As speculation does it: drafts of one token, a crop, a verification of several, a crop; no tensor is copied for it."""
    model, ids = models(family), prompt(40)

    def rounds(addresses: set[int]) -> torch.Tensor:
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

    with layer_by_layer():
        expected = rounds(set())
    rounds(set())
    before, addresses = replayed(model), set[int]()
    assert float(differences(rounds(addresses), expected).max()) <= CLOSE
    assert replayed(model) - before >= (20 if family == "qwen3_moe" else 4), reasons(model)
    if family == "qwen3_moe":
        assert len(addresses) == model.config.num_hidden_layers


def test_layers_of_a_cache_with_other_lengths(qwen: PreTrainedModel) -> None:
    """As an interruption within a step layer by layer leaves them."""

    def between(cache: DynamicCache, step: int) -> None:
        if step == 8:
            cache.layers[1].crop(-1)

    with layer_by_layer():
        expected = fed(qwen, prompt(30), [7, *[1] * 12], between=between)
    assert_equal_steps(qwen, prompt(30), [7, *[1] * 12])
    assert float(differences(fed(qwen, prompt(30), [7, *[1] * 12], between=between), expected).max()) <= CLOSE


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

    with layer_by_layer():
        expected = steps()
    assert float(differences(steps(), expected).max()) <= CLOSE


def test_a_cache_of_another_type(qwen: PreTrainedModel) -> None:
    def between(cache: DynamicCache, step: int) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.bfloat16(), layer.values.bfloat16()

    assert_equal_steps(qwen, prompt(30), [7, *[1] * 20], between=at((8,), between), least=5)
    assert_equal_steps(qwen, prompt(30), [7, *[1] * 20], between=at((8,), reversed_layout), least=15)


def test_states_that_are_replaced(models: Callable[[str], PreTrainedModel]) -> None:
    """In other memory, and in another layout, while keys and values stay."""
    model = models("qwen3_next")
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])

    def between(cache: DynamicCache, step: int) -> None:
        for layer in cache.layers:
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                for key, state in states.items():
                    states[key] = 0.5 * state if step == 6 else state.mT.contiguous().mT

    assert_equal_steps(model, prompt(30), [7, *[1] * 20], between=at((6, 12), between), least=5)


def test_a_model_that_makes_its_cache_itself(models: Callable[[str], PreTrainedModel]) -> None:
    """As MiniMax, which refuses any other; a text goes on with the cache that it returned."""
    model: Any = models("minimax")
    with pytest.raises(UnsupportedModelError, match="MiniMaxForCausalLM makes a cache of its own"):
        new_cache(model)
    whole = model.generate(prompt(9), max_new_tokens=20, do_sample=False)
    begun = model.generate(prompt(9), max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    ids, cache = begun.sequences, begun.past_key_values
    rest = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    assert rest.tolist() == whole.tolist()


def test_states_that_the_model_replaces_in_each_step(models: Callable[[str], PreTrainedModel]) -> None:
    """MiniMax's, in a cache that the model makes: a program overwrites them."""
    model: Any = models("minimax")

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

    with layer_by_layer():
        expected = steps()
    before = replayed(model)
    for _ in range(2):
        assert float(differences(steps(), expected).max()) <= CLOSE
    assert replayed(model) - before > 40, reasons(model)


def test_generate_again_with_one_cache(models: Callable[[str], PreTrainedModel]) -> None:
    for family in ("qwen3_moe", "mixtral"):
        model = models(family)

        def text(model: PreTrainedModel = model) -> torch.Tensor:
            cache = new_cache(model)
            first = generated(model, prompt(7), 12, past_key_values=cache)
            second = generated(model, torch.cat([first, prompt(5, seed=2)], 1), 12, past_key_values=cache)
            return generated(model, torch.cat([second, prompt(2, seed=4)], 1), 12, past_key_values=cache)

        with layer_by_layer():
            expected = text()
        assert torch.equal(text(), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_ways_to_generate(models: Callable[[str], PreTrainedModel], family: str, options: dict[str, Any]) -> None:
    assert_equal_text(models(family), prompt(7), **options)


def stock_generate(model: PreTrainedModel) -> Callable[..., Any]:
    """`generate` with the decoding loop of transformers."""
    return partial(GenerationMixin.generate, model)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [20, 60])
def test_the_callers_own_length(qwen: PreTrainedModel, length: int) -> None:
    """It takes the place of the one that `generate` makes of its arguments."""
    options: dict[str, Any] = {"max_new_tokens": 33, "do_sample": False, "stopping_criteria": [MaxLengthCriteria(length)]}
    expected = stock_generate(qwen)(prompt(7), **options)
    assert expected.shape == (1, length)
    assert torch.equal(qwen.generate(prompt(7), **options), expected)  # type: ignore[operator]


def test_a_cache_is_complete_when_its_stream_ends(qwen: PreTrainedModel) -> None:
    """Another thread may then read from the streamer, and go on with the cache."""
    generated(qwen, prompt(7))
    cache, found = new_cache(qwen), []
    streamer = TextIteratorStreamer(SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens))))  # type: ignore[arg-type]
    end = streamer.end
    streamer.end = lambda: (found.append(cache.get_seq_length()), end())[1]  # type: ignore[method-assign, func-returns-value]
    qwen.generate(prompt(7), max_new_tokens=20, do_sample=False, past_key_values=cache, streamer=streamer)  # type: ignore[operator]
    assert found == [7 + 20 - 1]


def test_a_model_that_replaces_its_cache() -> None:
    """Phi-MoE computes its text once again, with another cache, at the length where its rotary embedding changes."""
    model = new_model("phimoe")
    model.config.original_max_position_embeddings = 16
    fed_tokens: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: fed_tokens.append(given[0].shape[1]))
    for generate in (stock_generate(model), model.generate):
        made = generate(prompt(7), max_new_tokens=20, do_sample=False, return_dict_in_generate=True)  # type: ignore[operator]
        assert made.past_key_values.get_seq_length() == 7 + 20 - 1
    assert fed_tokens[20:] == fed_tokens[:20]


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


def test_prompts_of_int32_and_positional_arguments(qwen: PreTrainedModel) -> None:
    generated(qwen, prompt(7))
    for arguments in ((prompt(7).int(),), (prompt(7), *[None] * 10)):
        expected, found = (each(*arguments, max_new_tokens=20, do_sample=False) for each in (stock_generate(qwen), qwen.generate))  # type: ignore[operator]
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype


def test_sampling_with_a_seed(qwen: PreTrainedModel) -> None:
    def text() -> torch.Tensor:
        torch.manual_seed(5)
        return generated(qwen, prompt(7), do_sample=True, temperature=1.5)

    with layer_by_layer():
        expected = text()
    assert torch.equal(text(), expected)


def test_an_assistant(qwen: PreTrainedModel) -> None:
    assert_equal_text(qwen, prompt(7), assistant_model=new_model("qwen3_moe"))


def counted(model: PreTrainedModel) -> list[int]:
    return [int(count) for module in model.modules() if isinstance(module, HybridExperts) for count in module.sparsity.counts]


DRAFTS = """- match: {kind: model}
  replace: {class: speculative_draft, kwargs: {draft_top_k: 1, schedule: fixed, max_draft: 4}}
"""


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_drafts_with_fewer_experts(tmp_path: Path, family: str) -> None:
    """Drafted tokens and their verification are programs, and the text is that of plain decoding."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{DRAFTS}")
    model = new_model(family, str(rules))
    plain = new_model(family)
    with layer_by_layer():
        expected = generated(plain, prompt(7), 60)
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
    assert list(found) == list(expected) == ["logits", "past_key_values"]
    assert found.logits is found["logits"] is found[0] and found.past_key_values is cache
    assert isinstance(pickle.loads(pickle.dumps(found)).logits, torch.Tensor)


def test_steps_of_a_text_without_drafts(tmp_path: Path) -> None:
    """Where the schedule drafts nothing, each step of the loop around drafts is replayed, and none is recorded."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{DRAFTS}")
    model = new_model("qwen3_moe", str(rules))
    model.moegraft.model_operator._schedule = FixedSchedule(0)  # type: ignore[union-attr] # of SpeculativeDraft
    expected = generated(model, prompt(7), 40)
    switch = model.moegraft.context.draft_switch
    before = replayed(model), switch.preparations
    assert before[1] > 0
    assert torch.equal(generated(model, prompt(7), 40), expected)
    assert (replayed(model), switch.preparations) == (before[0] + 39, before[1])


SPARSE = """version: 1
extends: cpu-exact
rules:
- match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {weights: stored, sparsity: {target: 0, scope: routed}}}
"""


def sparse_model(folder: Path) -> PreTrainedModel:
    rules = folder / "sparse.yaml"
    rules.write_text(SPARSE)
    case = next(case for case in served_cases() if case.model_type == "qwen3_moe")
    model: PreTrainedModel = optimize_and_load(build_model(case), rules, progress=False, threads=2)
    for number, layer in enumerate(module for module in model.modules() if isinstance(module, HybridExperts)):
        layer.sparsity.set_threshold(0.02 * (1 + number), 0.5)
    return model


def test_experts_without_some_neurons(tmp_path: Path) -> None:
    """Text and counts are those without programs, also when the thresholds change in the middle of a text."""
    model = sparse_model(tmp_path)
    layers: list[Any] = [module.sparsity for module in model.modules() if isinstance(module, HybridExperts)]

    def steps() -> tuple[torch.Tensor, list[int]]:
        for layer in layers:
            layer.set_threshold(0.03, 0.5)

        def between(cache: DynamicCache, step: int) -> None:
            if step == 14:
                layers[1].set_threshold(0.2, 0.5, layers[1].counts.copy())

        found = fed(model, prompt(40), [7, *[1] * 25], between=between)
        return found, counted(model)

    with layer_by_layer():
        expected, wanted = steps()
    before = replayed(model)
    for _ in range(2):
        found, counts = steps()
        assert float(differences(found, expected).max()) <= CLOSE
        assert counts == wanted
        assert 0 < counts[0] < counts[1]
    assert replayed(model) - before > 25, reasons(model)


def test_drift_of_sparsity_is_reported_while_steps_are_programs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = sparse_model(tmp_path)
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])
    for layer in (module.sparsity for module in model.modules() if isinstance(module, HybridExperts)):
        layer.set_threshold(layer.threshold, 0.999)
        layer._window_tokens = 1023
    before = replayed(model)
    fed(model, prompt(40), [7, *[1] * 20])
    assert replayed(model) > before
    assert any("routed neurons are left out" in message for message in caplog.messages)


def test_observed_experts(tmp_path: Path) -> None:
    model = sparse_model(tmp_path)
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])
    seen: list[int] = []
    layer = next(module.sparsity for module in model.modules() if isinstance(module, HybridExperts))
    layer.observer = lambda ids, acted: seen.append(len(ids))
    fed(model, prompt(20), [7, *[1] * 10])
    assert seen == [7, *[1] * 10]
    layer.observer = None
    assert_equal_steps(model, prompt(20), [7, *[1] * 10])


def test_sparser_drafts(tmp_path: Path) -> None:
    """Drafted and other steps of one cache in turn: each has its own threshold and counts."""
    model = sparse_model(tmp_path)
    switch = model.moegraft.context.draft_switch
    layers: list[Any] = [module.sparsity for module in model.modules() if isinstance(module, HybridExperts)]
    for layer in layers:
        layer.set_draft_threshold(0.3, 0.9)

    def steps() -> tuple[torch.Tensor, list[list[int]]]:
        cache, found, ids = new_cache(model), [], prompt(40)
        before = [[*layer.counts, *layer._draft_counts] for layer in layers]
        fed(model, ids, [7], cache=cache)
        for turn in range(7, 40):
            with switch.drafting(DraftSettings(2, sparsity=0.9)) if turn % 3 else contextlib.nullcontext():
                found.append(fed(model, ids[:, turn:], [1], cache=cache))
        after = [[*layer.counts, *layer._draft_counts] for layer in layers]
        return torch.cat(found, 1), [[int(b - a) for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]

    with layer_by_layer():
        expected, wanted = steps()
    before = replayed(model)
    for _ in range(2):
        found, counts = steps()
        assert float(differences(found, expected).max()) <= CLOSE
        assert counts == wanted
        assert all(min(numbers) > 0 for numbers in counts)
    assert replayed(model) - before > 40, reasons(model)


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
        ("qwen3_moe", quantized_cache, "the cache is a QuantizedCache that"),
        ("qwen3_moe", fp8_cache, "the cache is a QuantizedCache that"),
        ("qwen3_moe", lambda model: DynamicCache(config=model.config, offloading=True), "the cache is an offloaded DynamicCache that"),
    ],
    ids=["static", "static window", "dynamic", "hqq", "fp8", "offloaded"],
)
def test_a_cache_that_no_program_appends_to(
    models: Callable[[str], PreTrainedModel],
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
    except (RuntimeError, ImportError, AssertionError) as error:  # the last: PyTorch without CUDA offloads nothing
        pytest.skip(f"transformers refuses it on this machine: {error}")
    caplog.set_level("INFO", logger=StepReplay.__module__)
    for _ in range(2):
        assert float(differences(steps(), expected).max()) <= CLOSE
    assert replayed(model) == 0
    assert [message for message in caplog.messages if reason in message] == [f"decode steps run layer by layer: {reasons(model)[0]}"]
    assert_equal_steps(model, prompt(20), [7, *[1] * 8])


def test_hooks(models: Callable[[str], PreTrainedModel]) -> None:
    """Added after programs were made, and removed."""
    model = models("qwen3_moe")
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
    model: Any = new_model("qwen3_moe")

    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
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
def test_sparse_attention_passes_its_limit(models: Callable[[str], PreTrainedModel], family: str) -> None:
    """Eight tokens are looked at, of which there are fewer in the first steps."""
    assert_equal_steps(models(family), prompt(30), [3, *[1] * 25], least=0)


def test_sparse_attention_below_its_limit() -> None:
    """It looks at one token more in each step, and then at 24."""
    case = next(case for case in served_cases() if case.model_type == "deepseek_v32")
    stock = build_model(dataclasses.replace(case, text={**case.text, "index_topk": 24}))
    model: Any = optimize_and_load(stock, "cpu-exact", progress=False, threads=1)
    assert_equal_steps(model, prompt(40), [5, *[1] * 35], least=12 + 9)
    assert not reasons(model)


@pytest.mark.parametrize("family", ["qwen4_exp_text", "glm5_next"])
def test_pools_of_tokens(models: Callable[[str], PreTrainedModel], family: str) -> None:
    """Four make a group, of which a text has a program for each position in it; eight tokens or two groups are looked at."""
    model = models(family)
    assert_equal_steps(model, prompt(58), [8, *[1] * 50], least=8)
    if family == "qwen4_exp_text":
        assert_equal_steps(model, prompt(52, batch=2), [33, *[1] * 19], least=1)
        assert_equal_steps(model, prompt(93), [33, *[3] * 20], least=1)  # drafts
    assert_equal_steps(model, prompt(20), [3, *[1] * 17], least=4)  # in the first steps fewer tokens than are looked at
    assert not reasons(model)


def test_a_pool_that_is_hidden_later(models: Callable[[str], PreTrainedModel]) -> None:
    """Fewer are found than in the recording: the step is computed again, with its states as they were."""
    model = models("glm5_next")

    def hide(cache: Any, step: int) -> None:
        for layer in cache.layers:
            if step == 30 and getattr(layer, "indexer_keys", None) is not None:
                layer.indexer_keys = layer.indexer_keys.clone()
                layer.indexer_keys[:, 8:12, -1] = 0  # what padding has there

    assert_equal_steps(model, prompt(44), [6, *[1] * 38], between=hide, least=4)
    assert any("expected" in reason for reason in reasons(model))


def test_compressed_caches() -> None:
    """Groups of 4 tokens and of 28, of which the latter are too long for a program for each position."""
    case = next(case for case in served_cases() if case.model_type == "deepseek_v4")
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


def test_two_models_in_turn_and_in_threads() -> None:
    pair = [new_model("qwen3_moe", threads=2), new_model("mixtral", threads=2)]
    with layer_by_layer():
        expected = [generated(model, prompt(7), 40) for model in pair]
    for _ in range(2):
        for model, wanted in zip(pair, expected, strict=True):
            assert torch.equal(generated(model, prompt(7), 40), wanted)
    with ThreadPoolExecutor(4) as workers:  # two with each model
        found = list(workers.map(lambda index: generated(pair[index % 2], prompt(7), 40), range(4)))
    for index, text in enumerate(found):
        assert torch.equal(text, expected[index % 2])


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


def test_an_interrupted_text(qwen: PreTrainedModel) -> None:
    with layer_by_layer():
        expected = generated(qwen, prompt(7), 30)
    for delay in (0.02, 0.05, 0.11):
        ended = threading.Event()

        def interrupt(wait: float = delay, ended: threading.Event = ended) -> None:
            while not ended.wait(wait):  # again: Python drops an interrupt that arrives in a callback of its garbage collector
                signal.raise_signal(signal.SIGINT)
                wait = 2.0

        sender = threading.Thread(target=interrupt)
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            generated(qwen, prompt(7), 100_000)
        ended.set()
        sender.join()
        assert torch.equal(generated(qwen, prompt(7), 30), expected)


def test_an_interruption_while_a_cache_moves(models: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its tensors are in new buffers by then, and programs must not write to the old."""
    model = models("qwen3_moe")
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


def test_an_error_within_a_step(models: Callable[[str], PreTrainedModel]) -> None:
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


def test_inputs_in_another_layout(models: Callable[[str], PreTrainedModel]) -> None:
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


def test_caches_are_freed(qwen: PreTrainedModel) -> None:
    """Neither recordings nor programs keep the memory of a cache that is gone."""
    cache = new_cache(qwen)
    fed(qwen, prompt(30), [7, *[1] * 12], cache=cache)
    gone = [weakref.ref(layer.keys) for layer in cache.layers] + [weakref.ref(cache)]
    del cache
    gc.collect()
    assert not any(reference() is not None for reference in gone)


def test_statistics() -> None:
    model = new_model("qwen3_moe")
    steps = model.moegraft.context.replay
    none = {"replayed_steps": 0, "programs": 0, "step_us": 0.0, "outside_kernels_us": 0.0, "reasons": []}
    assert steps.statistics() == none
    fed(model, prompt(20), [7, *[1] * 10])
    found = steps.statistics()
    assert found | {"step_us": 0.0, "outside_kernels_us": 0.0} == none | {"replayed_steps": 6, "programs": 1}  # the first four are checks
    assert 0 < found["outside_kernels_us"] < found["step_us"]
    handle = model.register_forward_hook(lambda module, args, output: None)
    fed(model, prompt(20), [7, *[1] * 3])
    handle.remove()
    assert steps.statistics()["reasons"] == ["its modules have hooks"]
