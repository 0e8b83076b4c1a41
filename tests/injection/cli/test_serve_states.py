"""Recurrent states of a server's sequences: computed together, lost alone, and saved at checkpoints where others begin."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import with_long
from support.batch_drafts import ChangedDrafts
from support.families import build_model, case_of, prompt
from transformers import DynamicCache, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve.job import Ask, Job
from moegraft.injection.cli.serve.open_pool import open_pool
from moegraft.injection.cli.serve.pages import MOST_CHECKPOINTS, SequencePool
from moegraft.injection.cli.serve.scheduler import Scheduler, batching_obstacle
from moegraft.operators.decode.pages import PagedSequence
from moegraft.operators.decode.state_pool import LostStatesError

FAMILIES = ("qwen3_next", "granitemoehybrid", "kimi_linear", "lfm2_moe")
LIMIT = 1 << 24  # bytes
CHUNK = 64  # tokens
DRAFTING = """
version: 1
extends: cpu-exact
rules:
- match: {{kind: model}}
  replace: {{class: speculative_draft, kwargs: {}}}
"""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return built(request.param)


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return built("qwen3_next")


def built(family: str, rules: str | Path = "cpu-exact") -> PreTrainedModel:
    stock = build_model(case_of(family))
    return optimize_and_load(stock, rules, progress=False, threads=1)


def opened(model: PreTrainedModel, **options: Any) -> SequencePool:
    return open_pool(model, **{"limit": LIMIT, "prefix_bytes": None, "most": 8, "context": 2048, **options})


def ids_of(length: int, seed: int = 0) -> list[int]:
    found: list[int] = prompt(length, seed=seed)[0].tolist()
    return found


class Server:
    """A scheduler that a test steps by itself."""

    def __init__(self, loaded: LoadedModel, model: PreTrainedModel, pool: Any = None, **options: Any) -> None:
        self._tokenizer = loaded.tokenizer
        self.pool = opened(model, drafts=options.get("drafts"), **(pool or {}))
        self.scheduler = Scheduler(model, self.pool, **{"most": 8, "prefill_chunk": CHUNK, **options})

    def begin(self, ids: list[int], tokens: int = 12) -> Job:
        job = Job(Ask(ids, max_tokens=tokens), self._tokenizer)
        assert self.scheduler.fits(job)
        self.scheduler.admit(job)
        return job

    def step(self) -> None:
        with torch.inference_mode():
            self.scheduler.step()

    def answer(self, ids: list[int], tokens: int = 12) -> Job:
        job = self.begin(ids, tokens)
        while job.ending is None:
            self.step()
        return job


def greedy(model: PreTrainedModel, ids: list[int], tokens: int) -> list[int]:
    """The stock cache's answer: the prompt in one pass, then token by token."""
    cache, found, call = DynamicCache(config=model.config.get_text_config()), list(ids), model
    new = ids
    with torch.inference_mode():
        for _ in range(tokens):
            logits = call(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True).logits[0, -1]
            new = [int(logits.argmax())]
            found += new
    return found


def test_answers_beside_others_are_those_alone(model: PreTrainedModel, loaded: LoadedModel) -> None:
    """Of several lengths, which join and leave, in chunks of their prompts, with steps as native programs."""
    assert batching_obstacle(model) is None
    server, steps = Server(loaded, model), model.moegraft.context.replay
    before = steps.replayed
    asked = [(ids_of(length, seed=length), tokens) for length, tokens in ((70, 40), (9, 12), (200, 60), (33, 5), (64, 30), (1, 50))]
    jobs = []
    for ids, tokens in asked:
        jobs.append(server.begin(ids, tokens))
        for _ in range(3):
            server.step()
    while any(job.ending is None for job in jobs):
        server.step()
    for job, (ids, tokens) in zip(jobs, asked, strict=True):
        assert job.ending == "length"
        assert job.token_ids == greedy(model, ids, tokens)
    assert steps.replayed - before > 20
    memory = server.pool.memory
    assert (memory.promised, memory.states) == (0, 0)
    assert memory.checkpoints > 0


@pytest.mark.parametrize(
    ("family", "draft"),
    with_long(
        [
            *((family, "ngram") for family in (*FAMILIES, "nemotron_h", "jamba", "zaya")),
            ("qwen3_next", "experts"),
            ("kimi_linear", "experts"),
        ],
        *((family, "ngram") for family in ("qwen3_next", "granitemoehybrid", "jamba", "zaya")),
        ("kimi_linear", "experts"),
    ),
)
def test_drafts_of_a_batch_change_no_answer(family: str, draft: str, loaded: LoadedModel, tmp_path: Path) -> None:
    """Each sequence goes on from the states after the last token that it accepts: all of its draft, some, or none."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(DRAFTING.format(f"{{draft: {draft}, max_draft: 3, schedule: fixed}}"))
    model = built(family, rules)
    drafts = model.moegraft.model_operator.batch_drafts()
    asked = [(ids_of(length, seed=length), tokens) for length, tokens in ((70, 40), (9, 12), (100, 50), (33, 2), (64, 50))]
    answers = [greedy(model, ids, tokens) for ids, tokens in asked]

    class Guessed(ChangedDrafts):
        def lookup(self, text: object, token_ids: Sequence[int], length: int) -> list[int] | None:
            """What follows in an answer, with a mistake at some place of most drafts; of several lengths."""
            known = next((text for text in answers if text[: len(token_ids)] == token_ids), None)
            if known is None:
                return super().lookup(text, token_ids, length)
            right, wrong = known[len(token_ids) :], len(token_ids) % 5
            return [token + (place == wrong) for place, token in enumerate(right)][: min(length, 1 + len(token_ids) % 3)]

    drafts = Guessed(drafts) if draft == "ngram" else drafts
    server, steps = Server(loaded, model, drafts=drafts), model.moegraft.context.replay
    jobs = []
    for ids, tokens in asked:
        jobs.append(server.begin(ids, tokens))
        server.step()
    while any(job.ending is None for job in jobs):
        server.step()
    assert [job.ending for job in jobs] == ["length"] * len(jobs)
    assert [job.token_ids for job in jobs] == answers
    found = model.moegraft.model_operator.statistics()
    assert 20 < found["accepted_tokens"] < found["drafted_tokens"]
    assert steps.replayed > 0
    again = [*answers[0], *ids_of(20, seed=1)]
    job = server.answer(again)
    assert job.cached_tokens == len(answers[0]) - 1  # the states at the end of an answer are right as well
    assert job.token_ids == greedy(model, again, 12)


def test_drafts_have_a_part_of_the_memory(loaded: LoadedModel, tmp_path: Path) -> None:
    """With less memory than the states after each token of a draft need for all, only fewer answers draft."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(DRAFTING.format("{draft: ngram, max_draft: 3, schedule: fixed}"))
    model = built("qwen3_next", rules)
    drafts = model.moegraft.model_operator.batch_drafts()
    place = opened(model)._states.place_bytes  # type: ignore[union-attr]
    server = Server(loaded, model, pool={"limit": 8 * 4 * 2 * place}, drafts=drafts)
    assert server.pool.most_drafted == 2
    asked = [(ids_of(length, seed=length), tokens) for length, tokens in ((20, 60), (9, 60), (12, 20))]
    jobs = [server.begin(ids, tokens) for ids, tokens in asked]
    while any(job.ending is None for job in jobs):
        server.step()
    for job, (ids, tokens) in zip(jobs, asked, strict=True):
        assert job.token_ids == greedy(model, ids, tokens)
    assert model.moegraft.model_operator.statistics()["rounds"] > 0


def test_a_conversation_goes_on_from_the_end_of_its_answer(model: PreTrainedModel, loaded: LoadedModel) -> None:
    server = Server(loaded, model)
    first = server.answer(ids_of(50))
    ids = [*first.token_ids, *ids_of(20, seed=1)]
    second = server.answer(ids)
    assert second.cached_tokens == len(first.token_ids) - 1  # the last token was not computed
    assert second.token_ids == greedy(model, ids, 12)


def test_a_prompt_begins_at_the_last_checkpoint_that_it_shares(model: PreTrainedModel, loaded: LoadedModel) -> None:
    """As where a template writes an earlier answer otherwise, or a question is changed; and the checkpoint stays as it is."""
    server = Server(loaded, model)
    ids = ids_of(300)
    server.answer(ids)
    for seed in (1, 2):
        changed = [*ids[:295], *ids_of(30, seed=seed)]
        job = server.answer(changed)
        assert job.cached_tokens == 288
        assert job.token_ids == greedy(model, changed, 12)
    other = [*ids[:200], *ids_of(30, seed=3)]
    assert server.answer(other).cached_tokens == 0
    same = server.answer(ids)
    assert same.cached_tokens == 288
    assert same.token_ids == greedy(model, ids, 12)


def test_no_part_of_a_prompt_is_one_token(loaded: LoadedModel) -> None:
    """As a token alone is a step of decoding: Nemotron-H limits its time steps in prompts only."""
    model = built("nemotron_h")
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    for chunk in (1, CHUNK):
        server = Server(loaded, model, prefill_chunk=chunk)
        for lengths in ((65,), (129,), (257,), (289,), (257,), (291,), (40, 41), (160, 97)):
            asked = [ids_of(length) for length in lengths]
            sizes.clear()
            jobs = [server.begin(ids, 1) for ids in asked]
            while any(job.ending is None for job in jobs):
                server.step()
            assert min(sizes) > 1, (chunk, lengths, sizes)
            parts = list(sizes)
            for job, ids in zip(jobs, asked, strict=True):
                assert job.token_ids == greedy(model, ids, 1), (chunk, lengths, parts)
        invariant = Server(loaded, model, prefill_chunk=chunk, own_passes=True)
        for length in (65, 129, 193, 193):
            sizes.clear()
            invariant.answer(ids_of(length), 1)
            assert min(sizes) > 1, (chunk, length, sizes)
    hook.remove()


def test_long_prompts_have_checkpoints_within_a_bound(qwen: PreTrainedModel, loaded: LoadedModel) -> None:
    server = Server(loaded, qwen)
    ids = ids_of(1500)
    server.answer(ids, 2)
    job = server.answer([*ids[:1200], *ids_of(10, seed=1)], 2)
    assert 1024 <= job.cached_tokens <= 1200
    for seed in range(3 * MOST_CHECKPOINTS):  # turns of one conversation
        job = server.answer([*job.token_ids, *ids_of(5, seed=seed)], 2)
        assert job.cached_tokens >= len(job.ask.token_ids) - 6
    assert len(server.pool._prefixes[-1].sequence.checkpoints) <= MOST_CHECKPOINTS
    server.pool.drop_prefixes()
    assert server.pool.memory.checkpoints == server.pool.memory.used == 0


def test_checkpoints_are_evicted_with_the_oldest_prefixes(qwen: PreTrainedModel) -> None:
    """Within the bytes of the prefixes, of which they are counted."""
    pool = opened(qwen, prefix_bytes=1 << 18)
    places = pool._states.checkpoints  # type: ignore[union-attr]
    conversations = [ids_of(40, seed=seed) for seed in range(places + 2)]
    for ids in conversations:
        sequence = pool.begin(ids, 60)
        with torch.inference_mode():
            pool.forward([sequence], [ids])
        pool.end(sequence, ids)
        assert pool.memory.kept + pool.memory.checkpoints <= 1 << 18
    begun = []
    for ids in conversations:
        sequence = pool.begin([*ids, 1, 2], 60)
        begun.append(sequence.tokens)
        pool.end(sequence)
    assert begun[0] == 0
    assert begun[-1] == 40


def test_a_family_whose_own_scan_does_not_go_on_from_states_does_so_here(loaded: LoadedModel) -> None:
    """Jamba's scan of several tokens begins again in transformers."""
    model = built("jamba")
    server, seen = Server(loaded, model), []
    hook = model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    asked = [(ids_of(length, seed=length), 20) for length in (150, 20)]
    jobs = [server.begin(ids, tokens) for ids, tokens in asked]
    while any(job.ending is None for job in jobs):
        server.step()
    hook.remove()
    assert 64 in seen and max(seen) == 64
    for job, (ids, tokens) in zip(jobs, asked, strict=True):
        assert job.token_ids == greedy(model, ids, tokens)
    assert server.answer([*jobs[0].token_ids, 5, 6]).cached_tokens > 0


@pytest.fixture
def failing(qwen: PreTrainedModel) -> Iterator[list[bool]]:
    """Whether the next passes fail, after their first layer's states were written."""
    fails = [False]

    def fail(*args: Any) -> None:
        if fails[0]:
            raise RuntimeError("inner")

    hook = qwen.model.layers[1].register_forward_pre_hook(fail)
    yield fails
    hook.remove()


def test_a_failed_step_ends_its_sequences_alone(qwen: PreTrainedModel, failing: list[bool]) -> None:
    pool = opened(qwen)
    texts = [ids_of(length, seed=length) for length in (30, 40, 50)]
    lost, also_lost, other = (begun(pool, ids) for ids in texts)
    failing[0] = True
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inner"):
        pool.step([lost, also_lost], [1, 2])
    failing[0] = False
    with torch.inference_mode():
        with pytest.raises(LostStatesError):
            pool.step([lost, other], [1, 2])
        found = pool.step([other], [texts[2][-1]])
    assert int(found[0].argmax()) == greedy(qwen, texts[2], 1)[-1]
    for sequence, ids in ((lost, texts[0]), (also_lost, texts[1])):
        pool.end(sequence, ids)
    assert pool.memory.kept == pool.memory.checkpoints == 0
    again = begun(pool, texts[0])  # in the place that was left
    with torch.inference_mode():
        found = pool.step([again], [texts[0][-1]])
    assert int(found[0].argmax()) == greedy(qwen, texts[0], 1)[-1]


def test_prompts_whose_common_pass_fails_are_computed_alone(qwen: PreTrainedModel, failing: list[bool]) -> None:
    """Their states are those before it."""
    pool = opened(qwen)
    texts = [ids_of(length, seed=length) for length in (30, 40)]
    sequences = [begun(pool, ids[:-5]) for ids in texts]
    failing[0] = True
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inner"):
        pool.forward(sequences, [ids[sequence.tokens :][:6] for sequence, ids in zip(sequences, texts, strict=True)])
    failing[0] = False
    with torch.inference_mode():
        for sequence, ids in zip(sequences, texts, strict=True):
            logits = pool.forward([sequence], [ids[sequence.tokens :]])
            assert int(logits[0, -1].argmax()) == greedy(qwen, ids, 1)[-1]


def test_sequences_move_with_their_states(qwen: PreTrainedModel) -> None:
    """In any order of rows, whoever else has come and left."""
    pool, draw = opened(qwen), random.Random(3)
    rows: list[tuple[PagedSequence, list[int], int]] = []
    for turn in range(40):
        if len(rows) < 6 and turn % 3 == 0:
            ids = ids_of(5 + turn, seed=turn)
            rows.append((begun(pool, ids), ids, len(ids)))
        if len(rows) > 3 and turn % 7 == 6:
            pool.end(rows.pop(draw.randrange(len(rows)))[0])
        some = draw.sample(rows, draw.randint(1, len(rows)))
        with torch.inference_mode():
            found = pool.step([sequence for sequence, _, _ in some], [ids[-1] for _, ids, _ in some])
        for (_, ids, _), logits in zip(some, found, strict=True):
            ids.append(int(logits.argmax()))
    for _, ids, asked in rows:
        assert ids == greedy(qwen, ids[:asked], len(ids) - asked)


def begun(pool: SequencePool, ids: list[int]) -> PagedSequence:
    """A sequence with all of `ids` computed but the last."""
    sequence = pool.begin(ids, len(ids) + 60)
    with torch.inference_mode():
        pool.forward([sequence], [ids[:-1]])
    return sequence
