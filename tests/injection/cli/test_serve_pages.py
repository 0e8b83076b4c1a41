"""Keys and values of a server's sequences: in pages that attention reads or that are gathered, within a limit, and shared as prefixes.

Pages of codes give what `generate` gives over the same codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import combinations
from support.families import build_model, case_of, prompt
from transformers import DynamicCache, PreTrainedModel

from moegraft.injection import new_cache, optimize_and_load
from moegraft.injection.cli.serve.open_pool import UnbatchableError, default_limit, open_pool
from moegraft.injection.cli.serve.pages import SequencePool
from moegraft.operators.cache_form import kv_cache
from moegraft.operators.decode.coded_cache import CodedCache
from moegraft.operators.decode.pages import PAGE_TOKENS, PagedSequence
from moegraft.operators.draft import DraftSettings
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.machine import Machine
from moegraft.operators.sparsity import WINDOW_TOKENS

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe")  # of which two have sliding windows, and one a latent cache
# Delta rules, Mamba 2, Mamba 1, a convolution alone, and states beside keys and values in one layer.
RECURRENT = ("qwen3_next", "kimi_linear", "granitemoehybrid", "nemotron_h", "jamba", "lfm2_moe", "zaya")
LENGTHS = [3, 40, 17, 9, 64, 25, 1, 33]
CLOSE = 1e-4  # relative to the largest logit, in float32
CODED_CLOSE = 2e-3  # where a last bit of a key may round it to another code
MIXED = """
version: 1
extends: cpu-exact
rules:
- id: stock attention
  match: {kind: attention, layers: "1"}
  replace: {class: default}
"""
CODED = """
version: 1
extends: cpu-exact
rules:
- match: {kind: model}
  replace: {class: quantized_kv_cache, kwargs: {backend: native}}
"""
SPARSE = """
version: 1
extends: cpu-exact
rules:
- match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {weights: stored, sparsity: {target: 0, scope: routed}}}
"""
Models = Callable[[str, str], PreTrainedModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Models by family and by how they read pages: all layers natively, also as codes, some of them, or none."""
    made: dict[tuple[str, str], PreTrainedModel] = {}
    folder = tmp_path_factory.mktemp("rules")
    for name, text in (("mixed", MIXED), ("coded", CODED)):
        (folder / name).with_suffix(".yaml").write_text(text)

    def model(name: str, kind: str) -> PreTrainedModel:
        if (name, kind) not in made:
            model = build_model(case_of(name))
            rules = "cpu-exact" if kind == "native" else folder / f"{kind}.yaml"
            made[name, kind] = model if kind == "gathered" else optimize_and_load(model, rules, progress=False, threads=1)
        return made[name, kind]

    return model


@pytest.fixture(params=["native", "gathered"])
def qwen(models: Models, request: pytest.FixtureRequest) -> PreTrainedModel:
    return models("qwen3_moe", request.param)


def opened(model: PreTrainedModel, *, limit: int | None = 1 << 22, prefixes: int | None = None, most: int = 32) -> SequencePool:
    coded = isinstance(new_cache(model), CodedCache)
    return open_pool(model, limit=limit, prefix_bytes=prefixes, most=most, context=2048, coded=coded)


def begun(pool: SequencePool, ids: list[int], most_tokens: int | None = None, scope: str = "") -> PagedSequence:
    """A sequence with all of `ids` computed but the last."""
    sequence = pool.begin(ids, len(ids) + 40 if most_tokens is None else most_tokens, scope)
    with torch.inference_mode():
        if sequence.tokens < len(ids) - 1:
            pool.forward([sequence], [ids[sequence.tokens : -1]], logits_to_keep=1)  # as the server asks for a prompt's
    return sequence


def expected(model: PreTrainedModel, ids: list[int], first: int) -> torch.Tensor:
    """The model's own logits of the tokens of `ids` from `first` on, one after the other."""
    cache, call, found = new_cache(model), model, []
    with torch.inference_mode():
        if first:
            call(input_ids=torch.tensor([ids[:first]]), past_key_values=cache, use_cache=True)
        for token in ids[first:]:
            found.append(call(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1].float())
    return torch.stack(found)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, *, tolerance: float = CLOSE) -> None:
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


WITHOUT = ("mixed", "nemotron_h"), ("gathered", "jamba")  # one layer of attention; a scan of its own that does not go on from a state
# With a window and sinks, with a latent, and with states beside.
CODES = [("coded", family) for family in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2_moe")]
OTHERS = [case for case in combinations(["mixed", "gathered"], FAMILIES + RECURRENT) if case.values not in WITHOUT]


@pytest.mark.parametrize(("kind", "family"), [*(("native", family) for family in FAMILIES + RECURRENT), *CODES, *OTHERS])
def test_sequences_have_the_models_own_logits(models: Models, kind: str, family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also past windows of 16 tokens, while sequences join and leave, and with native steps."""
    caplog.set_level("INFO")
    model = models(family, kind)
    pool = opened(model)
    assert ("gathered from their pages" in caplog.text) == (kind in ("mixed", "gathered"))
    rows: list[tuple[PagedSequence, list[int], list[torch.Tensor]]] = []
    done = []
    replayed = 0 if kind == "gathered" else model.moegraft.context.replay.replayed
    for turn in range(34):
        if turn in (0, 2, 3, 20):
            ids = prompt(LENGTHS[turn % 8], seed=turn)[0].tolist()
            rows.append((begun(pool, ids), ids, []))
        if turn in (12, 28):
            sequence, ids, logits = rows.pop(turn % len(rows))
            pool.end(sequence)
            done.append((ids, logits))
        with torch.inference_mode():
            found = pool.step([sequence for sequence, _, _ in rows], [ids[-1] for _, ids, _ in rows])
        for row, (_, ids, logits) in enumerate(rows):
            logits.append(found[row])
            ids.append(int(found[row].argmax()))
    for ids, logits in [*done, *((ids, logits) for _, ids, logits in rows)]:
        tolerance = CODED_CLOSE if kind == "coded" else CLOSE
        assert_close(torch.stack(logits), expected(model, ids[:-1], len(ids) - 1 - len(logits)), tolerance=tolerance)
    if kind in ("native", "coded"):
        assert model.moegraft.context.replay.replayed - replayed > 20


@pytest.mark.parametrize("kind", ["native", "coded", "gathered"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_prompts_of_several_lengths_are_computed_together(models: Models, family: str, kind: str) -> None:
    model = models(family, kind)
    pool = opened(model)
    prompts = [prompt(length, seed=length)[0].tolist() for length in (60, 31, 90)]
    some = [pool.begin(ids, 100) for ids in prompts]
    with torch.inference_mode():
        pool.forward(some[:1], [prompts[0][:20]])
        pool.forward(some, [ids[each.tokens : each.tokens + 30] for each, ids in zip(some, prompts, strict=True)])
        found = pool.step(some, [ids[each.tokens] for each, ids in zip(some, prompts, strict=True)])
    for row, (ids, read) in enumerate(zip(prompts, (50, 30, 30), strict=True)):
        tolerance = CODED_CLOSE if kind == "coded" else CLOSE
        assert_close(found[row : row + 1], expected(model, ids[: read + 1], read), tolerance=tolerance)


@pytest.mark.parametrize(("kind", "family"), [*(("native", family) for family in FAMILIES), *CODES[:4]])
def test_a_pass_takes_any_number_of_tokens_of_each_sequence(models: Models, kind: str, family: str) -> None:
    """Past windows of 16 tokens, over the ends of pages, and with native steps after it."""
    model = models(family, kind)
    pool = opened(model)
    texts = [prompt(length, seed=length)[0].tolist() for length in (70, 33, 12, 41, 2)]
    some = [pool.begin(ids, 120) for ids in texts]
    tolerance = CODED_CLOSE if kind == "coded" else CLOSE
    with torch.inference_mode():
        for sequence, ids, start in zip(some, texts, (69, 20, 0, 40, 1), strict=True):
            if start:
                pool.forward([sequence], [ids[:start]])
        found = pool.forward_ragged(some, [ids[each.tokens :] for each, ids in zip(some, texts, strict=True)], [1] * len(some))
        assert [each.tokens for each in some] == [len(ids) for ids in texts]
        steps = [found]
        for _ in range(6):
            for ids, row in zip(texts, steps[-1], strict=True):
                ids.append(int(row.argmax()))
            steps.append(pool.step(some, [ids[-1] for ids in texts]))
    for row, ids in enumerate(texts):
        assert_close(torch.stack([step[row] for step in steps]), expected(model, ids, len(ids) - 7), tolerance=tolerance)


@pytest.mark.parametrize(("kind", "family"), [*(("native", family) for family in FAMILIES), CODES[0], ("gathered", "olmoe")])
@pytest.mark.parametrize(("length", "sizes"), [(33, (5, 1, 7, 3)), (1500, (7, 7, 7, 6))])
def test_drafts_of_different_lengths_are_verified_in_one_pass(
    models: Models, kind: str, family: str, length: int, sizes: tuple[int, ...]
) -> None:
    """Without padding, unless more time would be spent on keys that are read for each token of a draft."""
    model = models(family, kind)
    pool = opened(model)
    texts = [prompt(size, seed=size)[0].tolist() for size in (length, 12, 70, 2)]
    some = [begun(pool, ids, len(ids) + 40) for ids in texts]
    drafts = [prompt(size, seed=99 + size)[0].tolist() for size in sizes]
    shapes = []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    try:
        with torch.inference_mode():
            tokens = [[ids[-1], *draft] for ids, draft in zip(texts, drafts, strict=True)]
            logits, rows = pool.verify(some, tokens, [*map(len, tokens)])
    finally:
        hook.remove()
    assert shapes == [(1, 4 + sum(sizes)) if kind != "gathered" and length < 1500 else (4, 8)]
    tolerance = CODED_CLOSE if kind == "coded" else CLOSE
    for row, sequence, ids, draft in zip(rows, some, texts, drafts, strict=True):
        found, accepted = logits[row : row + 1 + len(draft)].float(), len(draft) // 2
        assert_close(found, expected(model, [*ids, *draft], len(ids) - 1), tolerance=tolerance)
        pool.crop(sequence, len(ids) + accepted)
        ids += [*draft[:accepted], 7]
    with torch.inference_mode():
        found = pool.step(some, [7] * len(some))
    for answer, ids in zip(found, texts, strict=True):
        assert_close(answer[None], expected(model, ids, len(ids) - 1), tolerance=tolerance)


@pytest.mark.parametrize(("kind", "family"), [("gathered", "olmoe"), ("mixed", "mixtral"), ("native", "qwen3_next"), ("native", "zaya")])
def test_rows_of_one_length_are_needed_by_gathered_keys_and_states(models: Models, kind: str, family: str) -> None:
    assert not opened(models(family, kind)).ragged
    assert opened(models("qwen3_moe", "native")).ragged


def test_a_sequence_without_numbers_leaves_the_others(qwen: PreTrainedModel) -> None:
    """Also the shorter ones, which are padded to its length, and the next one in its pages."""
    pool = opened(qwen, prefixes=0)
    ids = [prompt(length)[0].tolist() for length in (70, 9)]
    damaged, short = (begun(pool, each) for each in ids)

    def damage(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(0, torch.tensor([0]), torch.nan)

    hook = qwen.get_input_embeddings().register_forward_hook(damage)
    with torch.inference_mode():
        found = pool.step([damaged, short], [each[-1] for each in ids])
    hook.remove()
    assert found[0].isnan().all()
    assert_close(found[1:], expected(qwen, ids[1], len(ids[1]) - 1))
    ids[1].append(int(found[1].argmax()))
    with torch.inference_mode():
        found = pool.step([damaged, short], [1, ids[1][-1]])
    assert found[0].isnan().all()
    assert_close(found[1:], expected(qwen, ids[1], len(ids[1]) - 1))
    pool.end(damaged)
    after = begun(pool, ids[0])
    with torch.inference_mode():
        assert_close(pool.step([after], ids[0][-1:]), expected(qwen, ids[0], len(ids[0]) - 1))


def test_32_mixed_sequences_take_the_memory_of_their_own_tokens(qwen: PreTrainedModel) -> None:
    """One long sequence beside 31 short ones, which have no memory of its length."""
    lengths = [1500, *(60 + 7 * number for number in range(31))]
    own = DynamicCache(config=qwen.config)
    with torch.inference_mode():
        qwen(input_ids=prompt(1), past_key_values=own, use_cache=True)
    token_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in own.layers)  # type: ignore[union-attr]
    needed = sum(lengths) * token_bytes
    pool = opened(qwen, limit=int(1.1 * needed), prefixes=0)
    some = []
    for length in lengths:
        assert pool.fits(length)
        some.append(begun(pool, [*prompt(length - 1, seed=length)[0].tolist(), 1], length))
    with torch.inference_mode():
        pool.step(some, [1] * 32)
    assert needed <= pool.memory.used <= pool.memory.limit <= 1.1 * needed
    assert not pool.fits(lengths[0])
    pool.end(some[0])
    assert pool.fits(lengths[0])


def test_codes_take_a_byte_for_a_value_and_four_for_a_row(models: Models) -> None:
    """Also in the form that planning counts."""
    model = models("qwen3_moe", "coded")
    sizes = kv_cache(build_model(case_of("qwen3_moe")).to("meta"))
    form = model.moegraft.plan.cache_form(model.config)
    assert form is not None
    rows = 3 * 2 * 2  # layers, keys and values, heads
    pool = opened(model, prefixes=0)
    assert pool.needed_bytes(PAGE_TOKENS) == PAGE_TOKENS * rows * (16 + 4) == dataclasses.replace(sizes, form=form).nbytes(PAGE_TOKENS)
    begun(pool, prompt(40)[0].tolist(), 60)
    assert pool.memory.used == 2 * PAGE_TOKENS * rows * (16 + 4)


def test_a_prefix_of_codes_is_shared_with_its_scales(models: Models) -> None:
    model = models("qwen3_moe", "coded")
    pool = opened(model)
    ids = prompt(90)[0].tolist()
    first = begun(pool, ids)
    pool.end(first, ids[:-1])
    again = pool.begin(ids, 120)
    assert again.tokens == len(ids) - 1  # of which the last page is a copy
    with torch.inference_mode():
        assert_close(pool.step([again], ids[-1:]), expected(model, ids, len(ids) - 1), tolerance=CODED_CLOSE)


def test_native_steps_over_codes_are_those_of_the_model(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = models("qwen3_moe", "coded"), []
    steps = model.moegraft.context.replay
    for replay in (steps, None):
        monkeypatch.setattr(model.moegraft.context, "replay", replay)
        pool = opened(model)
        some = [begun(pool, prompt(length)[0].tolist()) for length in (40, 3)]
        before = steps.replayed
        with torch.inference_mode():
            found.append(torch.stack([pool.step(some, [turn, 7]) for turn in range(40)]))  # also into further pages
        assert (steps.replayed - before > 20) == (replay is not None)
    assert_close(*found)


def test_codes_that_attention_would_not_read_are_refused(models: Models) -> None:
    with pytest.raises(UnbatchableError, match="left the keys and values of 3 of 3 layers unread"):
        open_pool(models("qwen3_moe", "gathered"), limit=1 << 22, prefix_bytes=None, most=4, context=2048, coded=True)


def test_a_sequence_that_ends_returns_all_of_its_pages(qwen: PreTrainedModel) -> None:
    pool = opened(qwen, prefixes=0)
    for _ in range(3):
        some = [begun(pool, prompt(length)[0].tolist()) for length in LENGTHS]
        assert pool.memory.used > 0
        for sequence in some:
            pool.end(sequence, [1] * 10)
        assert (pool.memory.used, pool.memory.promised, pool.memory.kept) == (0, 0, 0)


@pytest.mark.parametrize("shared", [5, 16, 40])
def test_a_request_begins_with_a_prefix(qwen: PreTrainedModel, shared: int) -> None:
    """Within a page, with whole pages, and both; and the prefix is unchanged."""
    pool = opened(qwen)
    first = prompt(50)[0].tolist()
    pool.end(begun(pool, first), first)
    ids = [*first[:shared], *prompt(20, seed=shared)[0].tolist()]
    second, again = begun(pool, ids), pool.begin([*first[:-1], 1], 60)
    assert again.tokens == 49
    with torch.inference_mode():
        found = pool.step([second, again], [ids[-1], first[-1]])
    assert_close(found[:1], expected(qwen, ids, len(ids) - 1))
    assert_close(found[1:], expected(qwen, first, len(first) - 1))


def test_a_prefix_is_for_its_scope_only(qwen: PreTrainedModel) -> None:
    pool = opened(qwen)
    ids = prompt(50)[0].tolist()
    pool.end(begun(pool, ids, scope="one"), ids, "one")
    assert pool.begin(ids, 60, "two").tokens == 0
    assert pool.begin(ids, 60, "one").tokens == 49


def test_the_least_recently_used_prefix_is_evicted(qwen: PreTrainedModel) -> None:
    token_bytes = opened(qwen).needed_bytes(PAGE_TOKENS) // PAGE_TOKENS
    pool = opened(qwen, limit=2000 * token_bytes, prefixes=2 * 64 * token_bytes)
    conversations = [prompt(65, seed=seed)[0].tolist() for seed in range(3)]
    for number in (0, 1, 0, 2):  # the second is the oldest when the third comes
        pool.end(begun(pool, conversations[number]), conversations[number])
    assert pool.memory.kept <= 2 * 64 * token_bytes
    shared = []
    for ids in conversations:
        sequence = pool.begin(ids, 66)
        shared.append(sequence.tokens)
        pool.end(sequence, ids[: sequence.tokens])
    assert shared == [64, 0, 64]


def test_prefixes_are_evicted_for_running_requests(qwen: PreTrainedModel) -> None:
    pool = opened(qwen, limit=opened(qwen).needed_bytes(40 * PAGE_TOKENS))
    prefix = prompt(300)[0].tolist()
    pool.end(begun(pool, prefix), prefix)
    assert pool.memory.kept > 0
    ids = prompt(39 * PAGE_TOKENS, seed=1)[0].tolist()
    long = begun(pool, ids, 40 * PAGE_TOKENS)
    with torch.inference_mode():
        found = pool.step([long], [ids[-1]])
    assert_close(found, expected(qwen, ids, len(ids) - 1))
    assert pool.memory.kept == 0


def test_a_failed_pass_leaves_sequences_as_they_were(qwen: PreTrainedModel) -> None:
    pool = opened(qwen)
    ids = prompt(30)[0].tolist()
    sequence = begun(pool, ids)

    def fail(*args: Any) -> None:
        raise RuntimeError("inner")

    hook = qwen.model.layers[1].register_forward_pre_hook(fail)
    try:
        with torch.inference_mode(), pytest.raises(RuntimeError, match="inner"):
            pool.step([sequence], [ids[-1]])
        other = pool.begin(ids, 60)
        with torch.inference_mode(), pytest.raises(RuntimeError, match="inner"):
            pool.forward_ragged([sequence, other], [ids[-1:], ids], [1, 1])
        assert (sequence.tokens, other.tokens) == (29, 0)
    finally:
        hook.remove()
    with torch.inference_mode():
        assert_close(pool.step([sequence], [ids[-1]]), expected(qwen, ids, len(ids) - 1))


@pytest.mark.parametrize("failing_call", [1, 3])  # of the model's own cache, and of pages
def test_a_model_that_cannot_compute_a_few_tokens_is_not_batched(models: Models, failing_call: int) -> None:
    model = build_model(case_of("qwen3_moe"))

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if (failing_call == 1) != ("position_ids" in kwargs):
            raise RuntimeError("inner")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(UnbatchableError, match=r"cannot compute .* \(inner\)"):
        opened(model)


@pytest.mark.parametrize("rules", [None, "cpu-exact"])
def test_a_model_whose_queries_depend_on_the_tokens_in_the_cache_is_not_batched(rules: str | None) -> None:
    """A few tokens do not show it: the scale of Llama 4's queries is 1 below 8192 tokens."""
    case = case_of("llama4_text")
    model = build_model(dataclasses.replace(case, text={**case.text, "floor_scale": 8192}))
    if rules is not None:
        model = optimize_and_load(model, rules, progress=False, threads=1)
    with pytest.raises(UnbatchableError, match="Llama4TextAttention scales queries by the number of tokens in the cache"):
        opened(model)


def test_a_closed_pool_leaves_no_program_behind(models: Models) -> None:
    """The memory of a server's pool is freed with it, although steps over it were recorded."""
    model = models("qwen3_moe", "native")

    def programs() -> int:
        return int(model.moegraft.statistics()["decode_steps"]["programs"])

    before = programs()
    pool = opened(model)
    sequence = begun(pool, prompt(10)[0].tolist())
    for _ in range(6):
        with torch.inference_mode():
            pool.step([sequence], [1])
    assert programs() > before
    del pool, sequence
    assert programs() == before


def test_cropped_sequences_grow_into_other_pages(qwen: PreTrainedModel) -> None:
    """As with rejected drafts: the lowest free page is that of another sequence."""
    pool = opened(qwen)
    ids = [prompt(PAGE_TOKENS + 2, seed=seed)[0].tolist() for seed in (1, 2)]
    second, first = (begun(pool, one[: PAGE_TOKENS + 1], 60) for one in reversed(ids))
    with torch.inference_mode():
        pool.step([second], [7])  # into a second page, before the first sequence
        pool.step([first], [7])
        pool.step([first, second], [8, 8])
        for sequence in (first, second):
            pool.crop(sequence, PAGE_TOKENS)
        pool.step([first, second], [one[PAGE_TOKENS] for one in ids])
        found = [pool.step([sequence], one[-1:]) for sequence, one in zip((first, second), ids, strict=True)]
    for one, logits in zip(ids, found, strict=True):
        assert_close(logits, expected(qwen, one, PAGE_TOKENS + 1))


def test_a_draft_after_native_steps_has_its_own_experts(models: Models) -> None:
    """The steps before it are those of the full model, which the draft does not go on with."""
    model = models("qwen3_moe", "native")
    pool = opened(model)
    sequence = begun(pool, prompt(10)[0].tolist())
    drafting = model.moegraft.context.draft_switch.drafting
    with torch.inference_mode():
        for token in range(12):
            pool.step([sequence], [token])
        with drafting(DraftSettings(1)):
            found = pool.step([sequence], [50])
        pool.crop(sequence, sequence.tokens - 1)
        with drafting(DraftSettings(1)):
            wanted = pool.forward([sequence], [[50]])[:, -1]
        pool.crop(sequence, sequence.tokens - 1)
        full = pool.forward([sequence], [[50]])[:, -1]
    assert_close(found, wanted)
    assert float((full - wanted).abs().max()) > 100 * CLOSE * float(wanted.abs().max())


def test_drift_of_sparsity_is_reported_in_steps_of_several_sequences(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = tmp_path / "sparse.yaml"
    rules.write_text(SPARSE)
    stock = build_model(case_of("qwen3_moe"))
    model = optimize_and_load(stock, rules, progress=False, threads=1)
    pool = opened(model)
    sequences = [begun(pool, prompt(10, seed=seed)[0].tolist(), 90) for seed in range(2)]
    with torch.inference_mode():
        for _ in range(12):  # makes the program, whose steps then follow each other
            pool.step(sequences, [1, 2])
    assert not caplog.messages
    for layer in (module.sparsity for module in model.modules() if isinstance(module, HybridExperts)):
        layer.set_threshold(layer.threshold, 0.999)
        layer.begin(WINDOW_TOKENS - 20)  # of earlier passes
    with torch.inference_mode():
        for _ in range(12):
            pool.step(sequences, [1, 2])
    assert any("routed neurons are left out" in message for message in caplog.messages)


def test_memory_for_experts_in_files_is_not_free_for_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts frames as free until experts are read into them."""
    model = build_model(case_of("qwen3_moe"))
    model.save_pretrained(tmp_path / "model")
    options = {"weights": "int8", "cache_dir": str(tmp_path / "cache"), "memory": "1MiB"}
    rules = {"version": 1, "rules": [{"match": {"kind": "experts"}, "replace": {"class": "hybrid_experts", "kwargs": options}}]}
    framed = optimize_and_load(tmp_path / "model", rules, progress=False, threads=1)
    files = framed.moegraft.statistics()["files"]
    monkeypatch.setattr("moegraft.injection.cli.serve.open_pool.probe_machine", lambda: Machine(1, 1 << 20))
    assert default_limit(model) == 1 << 19
    assert default_limit(framed) == ((1 << 20) - files["frames"] * files["frame_bytes"]) // 2 > 0
    with torch.no_grad():
        framed(input_ids=prompt(70))
    assert framed.moegraft.statistics()["files"]["reads"] == files["frames"]
    assert default_limit(framed) == 1 << 19, "all are filled"
