"""Keys and values of served texts: each text has its own, within a limit, and conversations that ended give theirs to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.families import build_model, prompt, served_cases
from transformers import DynamicCache, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.serve.batch import Batch, PaddedTexts, PagedTexts, Text, UnbatchableError, open_texts
from moegraft.operators.paged_cache import PAGE_TOKENS

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe")  # of which two have sliding windows, and one a latent cache
LENGTHS = [3, 40, 17, 9, 64, 25, 1, 33]
CLOSE = 1e-4  # relative to the largest logit, in float32
Texts = PagedTexts | PaddedTexts


@pytest.fixture(scope="module")
def models() -> Callable[[str], PreTrainedModel]:
    made: dict[str, PreTrainedModel] = {}

    def model(name: str) -> PreTrainedModel:
        if name not in made:
            case = next(case for case in served_cases() if case.model_type == name)
            made[name] = optimize_and_load(build_model(case), "cpu-exact", progress=False, threads=1)
        return made[name]

    return model


@pytest.fixture
def qwen(models: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return models("qwen3_moe")


def stock(name: str) -> PreTrainedModel:
    return build_model(next(case for case in served_cases() if case.model_type == name))


def opened(model: PreTrainedModel, *, limit: int | None = 1 << 22, kept: int | None = None, most: int = 32) -> Texts:
    return open_texts(model, limit=limit, kept_bytes=kept, most=most, context=2048)


def begun(texts: Texts, ids: list[int], total: int | None = None, scope: str = "") -> Text:
    """A text with all of `ids` read but the last."""
    text = texts.begin(ids, len(ids) + 40 if total is None else total, scope)
    with torch.inference_mode():
        if text.tokens < len(ids) - 1:
            texts.read([text], [ids[text.tokens : -1]])
    texts.join(text)
    return text


def expected(model: PreTrainedModel, ids: list[int], first: int) -> torch.Tensor:
    """The model's own logits of the tokens of `ids` from `first` on, one after the other."""
    cache, call, found = DynamicCache(config=model.config.get_text_config()), model, []
    with torch.inference_mode():
        if first:
            call(input_ids=torch.tensor([ids[:first]]), past_key_values=cache, use_cache=True)
        for token in ids[first:]:
            found.append(call(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1].float())
    return torch.stack(found)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max()) <= CLOSE * float(wanted.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_in_pages_have_the_models_own_logits(models: Callable[[str], PreTrainedModel], family: str) -> None:
    """Also past windows of 16 tokens, while texts join and leave, and with native steps."""
    model = models(family)
    texts = opened(model)
    assert isinstance(texts, PagedTexts)
    rows: list[tuple[Text, list[int], list[torch.Tensor]]] = []
    done = []
    before = model.moegraft.context.replay.replayed
    for turn in range(44):
        if turn in (0, 2, 3, 20):
            ids = prompt(LENGTHS[turn % 8], seed=turn)[0].tolist()
            rows.append((begun(texts, ids), ids, []))
        if turn in (12, 28):
            text, ids, logits = rows.pop(turn % len(rows))
            texts.end(text)
            done.append((ids, logits))
        with torch.inference_mode():
            found = texts.step([text for text, _, _ in rows], [ids[-1] for _, ids, _ in rows])
        for row, (_, ids, logits) in enumerate(rows):
            logits.append(found[row])
            ids.append(int(found[row].argmax()))
    for ids, logits in [*done, *((ids, logits) for _, ids, logits in rows)]:
        assert_close(torch.stack(logits), expected(model, ids[:-1], len(ids) - 1 - len(logits)))
    assert model.moegraft.context.replay.replayed - before > 20


def test_prompts_are_read_together(qwen: PreTrainedModel) -> None:
    texts = opened(qwen)
    prompts = [prompt(length, seed=length)[0].tolist() for length in (60, 31, 90)]
    some = [texts.begin(ids, 100, "") for ids in prompts]
    with torch.inference_mode():
        texts.read(some[:1], [prompts[0][:20]])
        texts.read(some, [ids[text.tokens : text.tokens + 30] for text, ids in zip(some, prompts, strict=True)])
        found = texts.step(some, [ids[text.tokens] for text, ids in zip(some, prompts, strict=True)])
    for row, (ids, read) in enumerate(zip(prompts, (50, 30, 30), strict=True)):
        assert_close(found[row : row + 1], expected(qwen, ids[: read + 1], read))


def test_32_mixed_texts_take_the_memory_of_their_own_tokens(qwen: PreTrainedModel) -> None:
    """One long text beside 31 short ones: a padded batch would take 32 long ones."""
    lengths = [1500, *(60 + 7 * number for number in range(31))]
    own = DynamicCache(config=qwen.config)
    with torch.inference_mode():
        qwen(input_ids=prompt(1), past_key_values=own, use_cache=True)
    token_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in own.layers)  # type: ignore[union-attr]
    needed = sum(lengths) * token_bytes
    texts = opened(qwen, limit=int(1.1 * needed), kept=0)
    some = []
    for length in lengths:
        assert texts.fits(length)
        some.append(begun(texts, [*prompt(length - 1, seed=length)[0].tolist(), 1], total=length))
    with torch.inference_mode():
        texts.step(some, [1] * 32)
    assert isinstance(texts, PagedTexts)
    assert needed <= texts.memory.used <= sum(layer.nbytes for layer in texts._pool.data) <= 1.1 * needed
    assert not texts.fits(lengths[0])
    texts.end(some[0])
    assert texts.fits(lengths[0])
    padded = opened(stock("qwen3_moe"), limit=int(1.1 * needed), kept=0)
    assert isinstance(padded, PaddedTexts)
    rows = 0
    while padded.fits(1500 if rows == 0 else 60):
        padded.begin([1, 2, 3], 1500 if rows == 0 else 60, "")
        rows += 1
    assert rows * 1500 <= 1.1 * sum(lengths) < (rows + 1) * 1500, "each row of a padded batch is as long as the longest"


def test_a_text_that_ends_returns_all_of_its_pages(qwen: PreTrainedModel) -> None:
    texts = opened(qwen, kept=0)
    assert isinstance(texts, PagedTexts)
    for _ in range(3):
        some = [begun(texts, prompt(length)[0].tolist()) for length in LENGTHS]
        assert texts.memory.used > 0
        for text in some:
            texts.end(text, [1] * 10)
        assert (texts.memory.used, texts.memory.promised, texts.memory.kept) == (0, 0, 0)


@pytest.mark.parametrize("shared", [5, 16, 40])
def test_a_conversation_goes_on_from_what_is_kept(qwen: PreTrainedModel, shared: int) -> None:
    """Within a page, with whole pages, and both; and the kept one is unchanged."""
    texts = opened(qwen)
    first = prompt(50)[0].tolist()
    texts.end(begun(texts, first), first)
    ids = [*first[:shared], *prompt(20, seed=shared)[0].tolist()]
    second, again = begun(texts, ids), texts.begin([*first[:-1], 1], 60, "")
    assert again.tokens == 49
    with torch.inference_mode():
        found = texts.step([second, again], [ids[-1], first[-1]])
    assert_close(found[:1], expected(qwen, ids, len(ids) - 1))
    assert_close(found[1:], expected(qwen, first, len(first) - 1))


@pytest.mark.parametrize("kind", ["pages", "padded"])
def test_a_conversation_is_kept_for_its_scope_only(qwen: PreTrainedModel, kind: str) -> None:
    texts = opened(qwen if kind == "pages" else stock("qwen3_moe"))
    assert isinstance(texts, PagedTexts) == (kind == "pages")
    ids = prompt(50)[0].tolist()
    texts.end(begun(texts, ids, scope="one"), ids)
    other = texts.begin(ids, 60, "two")
    assert other.tokens == 0
    assert texts.begin(ids, 60, "one").tokens == 49


@pytest.mark.parametrize("kind", ["pages", "padded"])
def test_the_least_recently_used_conversation_gives_way(qwen: PreTrainedModel, kind: str) -> None:
    model = qwen if kind == "pages" else stock("qwen3_moe")
    token_bytes = opened(model).needed_bytes(PAGE_TOKENS) // PAGE_TOKENS
    texts = opened(model, limit=2000 * token_bytes, kept=2 * 64 * token_bytes)
    conversations = [prompt(65, seed=seed)[0].tolist() for seed in range(3)]

    def ask(number: int) -> int:
        text = begun(texts, conversations[number])
        known = text.tokens
        texts.end(text, conversations[number])
        return known

    for number in (0, 1, 0, 2):  # the second is the oldest when the third comes
        ask(number)
    assert texts.memory.kept <= 2 * 64 * token_bytes
    held = []
    for ids in conversations:
        text = texts.begin(ids, 66, "")
        held.append(text.tokens)
        texts.end(text, ids[: text.tokens])
    assert held == [64, 0, 64]


def test_kept_conversations_give_way_to_running_texts(qwen: PreTrainedModel) -> None:
    texts = opened(qwen, limit=opened(qwen).needed_bytes(40 * PAGE_TOKENS))
    kept = prompt(300)[0].tolist()
    texts.end(begun(texts, kept), kept)
    assert texts.memory.kept > 0
    ids = prompt(39 * PAGE_TOKENS, seed=1)[0].tolist()
    long = begun(texts, ids, total=40 * PAGE_TOKENS)
    with torch.inference_mode():
        found = texts.step([long], [ids[-1]])
    assert_close(found, expected(qwen, ids, len(ids) - 1))
    assert texts.memory.kept == 0


def test_a_failed_pass_leaves_texts_as_they_were(qwen: PreTrainedModel) -> None:
    texts = opened(qwen)
    ids = prompt(30)[0].tolist()
    text = begun(texts, ids)

    def fail(*args: Any) -> None:
        raise RuntimeError("inner")

    hook = qwen.model.layers[1].register_forward_pre_hook(fail)
    try:
        with torch.inference_mode(), pytest.raises(RuntimeError, match="inner"):
            texts.step([text], [ids[-1]])
    finally:
        hook.remove()
    with torch.inference_mode():
        assert_close(texts.step([text], [ids[-1]]), expected(qwen, ids, len(ids) - 1))


def test_attention_of_pytorch_is_padded_and_with_windows_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert isinstance(opened(stock("qwen3_moe")), PaddedTexts)
    assert "shorter texts are padded" in caplog.text
    with pytest.raises(UnbatchableError, match="sliding windows"):
        opened(stock("gpt_oss"))


def test_a_model_that_cannot_compute_a_few_tokens_is_not_batched() -> None:
    model = stock("qwen3_moe")

    def fail(*args: Any) -> None:
        raise RuntimeError("inner")

    model.register_forward_pre_hook(fail)
    with pytest.raises(UnbatchableError, match="cannot compute a few tokens"):
        opened(model)


def test_a_closed_pool_leaves_no_program_behind(qwen: PreTrainedModel) -> None:
    """The memory of a server's pool is freed with it, although steps over it were recorded."""
    steps = qwen.moegraft.context.replay
    before = len(steps._kinds)
    texts = opened(qwen)
    text = begun(texts, prompt(10)[0].tolist())
    for _ in range(6):
        with torch.inference_mode():
            texts.step([text], [1])
    assert len(steps._kinds) > before
    del texts, text
    assert len(steps._kinds) == before


def test_another_thread_may_ask_for_the_memory_while_a_text_joins_or_the_last_one_leaves(
    qwen: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request asks; the engine's thread changes a cache to None between any two steps of that."""
    cache = DynamicCache(config=qwen.config)
    text, batch = Text(5, ""), Batch(qwen)
    for owner, name, given in ((Text, "cache", text), (Batch, "_cache", batch)):
        seen = iter([cache, None, None])
        monkeypatch.setattr(owner, name, property(lambda self, seen=seen: next(seen)), raising=False)
        assert (given.tokens if isinstance(given, Text) else given.padded_tokens) == 0


def test_cropped_texts_grow_into_other_pages(qwen: PreTrainedModel) -> None:
    """As with rejected drafts: the lowest free page is that of another text."""
    texts = opened(qwen)
    assert isinstance(texts, PagedTexts)
    ids = [prompt(PAGE_TOKENS + 2, seed=seed)[0].tolist() for seed in (1, 2)]
    second, first = (begun(texts, one[: PAGE_TOKENS + 1], 60) for one in reversed(ids))
    with torch.inference_mode():
        texts.step([second], [7])  # into a second page, before the first text
        texts.step([first], [7])
        texts.step([first, second], [8, 8])
        for text in (first, second):
            texts.crop(text, PAGE_TOKENS)
        texts.step([first, second], [one[PAGE_TOKENS] for one in ids])
        found = [texts.step([text], one[-1:]) for text, one in zip((first, second), ids, strict=True)]
    for one, logits in zip(ids, found, strict=True):
        assert_close(logits, expected(qwen, one, PAGE_TOKENS + 1))
