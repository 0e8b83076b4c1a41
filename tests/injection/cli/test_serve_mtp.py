"""`draft: mtp` and EAGLE-3 heads in the server: they draft for the sequences of a batch, in the same pages, and change no answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_layers
from support import with_long
from support.batch_drafts import ChangedDrafts
from support.eagle3 import LAYERS, train_head
from support.families import build_model, greedy, prompt, served_cases
from support.mtp import proposals, write_checkpoint
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.serve import pages
from moegraft.injection.cli.serve import scheduler as scheduling
from moegraft.injection.cli.serve.job import Ask, Job
from moegraft.injection.cli.serve.open_pool import open_pool
from moegraft.injection.cli.serve.scheduler import Scheduler, batching_obstacle
from moegraft.operators.decode.mtp import MOST_WAITING
from moegraft.operators.decode.mtp_layers import mtp_layers
from moegraft.operators.draft import BatchDrafts

if not hasattr(getattr(transformers.modeling_layers, "MtpModel", None), "forward_layer"):
    pytest.skip("this transformers cannot compute MTP layers one by one", allow_module_level=True)

WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 16}
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},  # latent attention
    "three layers": {"layers": 3},
    "glm4_moe": {"share": 0.02},
    "mellum": WINDOWS,
    "qwen3_next": {},  # recurrent states in the body
    "eagle-3": {},  # a head that knows one of the texts
}
STOCK_ATTENTION = "- {id: attention, match: {kind: attention, name: nothing}, replace: {class: cpu_attention}, expect: any}\n"
Folders = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """`checkpoints(case)`: the folder of a tiny checkpoint with MTP layers, and its stock model."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(name: str) -> tuple[Path, PreTrainedModel]:
        if name not in made:
            folder = tmp_path_factory.mktemp("mtp")
            if name == "eagle-3":
                case = next(case for case in served_cases() if case.model_type == "qwen3_moe")
                stock = build_model(dataclasses.replace(case, text={**case.text, "num_hidden_layers": LAYERS}))
                stock.save_pretrained(folder)
                ids, tokens = ASKED[1]
                train_head(folder / "head", stock, greedy(stock, torch.tensor([ids]), max_new_tokens=tokens + 3), len(ids), 3)
                made[name] = folder, stock
                return made[name]
            made[name] = folder, write_checkpoint(folder, "deepseek_v3" if name == "three layers" else name, **CASES[name])
        return made[name]

    return make


def load(folder: Path, extra: str = "", **options: Any) -> PreTrainedModel:
    kwargs = ", ".join(f"{name}: {value}" for name, value in ({"schedule": "fixed", "max_draft": 3} | options).items())
    path = folder / "rules.yaml"
    draft = "{model: head, weights: stored}" if (folder / "head").is_dir() else "mtp"
    drafts = f"- match: {{kind: model}}\n  replace: {{class: speculative_draft, kwargs: {{draft: {draft}, {kwargs}}}}}\n"
    path.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{drafts}{extra}")
    return optimize_and_load(folder, path, progress=False, threads=1)


class SomeRounds(ChangedDrafts):
    """Drafts in the rounds for which `wanted` returns true."""

    def __init__(self, drafts: BatchDrafts, wanted: Callable[[], object]) -> None:
        super().__init__(drafts)
        self._wanted = wanted

    def plan(self, texts: int, limit: int) -> int:
        return super().plan(texts, limit) if self._wanted() else 0


class Server:
    """A scheduler that a test steps by itself."""

    def __init__(
        self,
        loaded: LoadedModel,
        model: PreTrainedModel,
        *,
        drafts: bool = True,
        wanted: Callable[[], object] = lambda: True,
        **limits: Any,
    ) -> None:
        assert batching_obstacle(model) is None
        self._tokenizer = loaded.tokenizer
        self.operator = model.moegraft.model_operator
        batches = SomeRounds(self.operator.batch_drafts(), wanted) if drafts else None
        longest = 0 if batches is None else batches.longest
        self.pool = open_pool(
            model, **{"limit": 1 << 23, "prefix_bytes": None, "most": 8, "context": 2048 + longest, "drafts": batches, **limits}
        )
        self.scheduler = Scheduler(model, self.pool, most=8, prefill_chunk=64, drafts=batches)

    def begin(self, ids: Sequence[int], tokens: int, **options: Any) -> Job:
        job = Job(Ask(list(ids), tokens, **options), self._tokenizer)
        assert self.scheduler.fits(job)
        self.scheduler.admit(job)
        return job

    def step(self, count: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(count):
                self.scheduler.step()

    def run(self, jobs: Sequence[Job]) -> list[list[int]]:
        while any(job.ending is None for job in jobs):
            self.step()
        assert {job.ending for job in jobs} == {"length"}
        return [job.token_ids for job in jobs]

    def assert_free(self) -> None:
        memory = self.pool.memory
        assert (memory.promised, memory.used) == (0, memory.kept)
        assert self.pool.streams is not None and not self.pool.streams._streams


def ids_of(length: int, seed: int = 0) -> list[int]:
    found: list[int] = prompt(length, seed=seed)[0].tolist()
    return found


ASKED = [(ids_of(length, seed=length), tokens) for length, tokens in ((70, 40), (9, 12), (200, 60), (33, 1), (64, 30), (1, 50))]


@pytest.fixture(scope="module")
def stock_answers(checkpoints: Folders) -> Callable[[str], list[list[int]]]:
    """The greedy answers of a checkpoint's stock model to `ASKED`, computed once."""

    @cache
    def answers(name: str) -> list[list[int]]:
        stock = checkpoints(name)[1]
        return [greedy(stock, torch.tensor([ids]), max_new_tokens=tokens)[0].tolist() for ids, tokens in ASKED]

    return answers


@pytest.mark.parametrize(
    ("name", "depth", "extra"),
    with_long(
        [
            ("deepseek_v3", 1, ""),
            ("deepseek_v3", 4, ""),  # three times its own state fed back
            ("deepseek_v3", 3, STOCK_ATTENTION),
            ("three layers", 2, ""),  # the third layer falls behind
            ("three layers", 4, ""),
            ("three layers", 4, STOCK_ATTENTION),
            ("glm4_moe", 3, ""),
            ("mellum", 2, ""),
            ("mellum", 3, STOCK_ATTENTION),
            ("qwen3_next", 3, ""),
            ("eagle-3", 3, ""),
            ("eagle-3", 2, STOCK_ATTENTION),
        ],
        ("deepseek_v3", 3, STOCK_ATTENTION),
        ("three layers", 2, ""),
        ("three layers", 4, ""),
        ("mellum", 3, STOCK_ATTENTION),
        ("qwen3_next", 3, ""),
        ("eagle-3", 3, ""),
    ),
)
def test_answers_beside_others_are_those_without_drafts(
    name: str, depth: int, extra: str, checkpoints: Folders, stock_answers: Callable[[str], list[list[int]]], loaded: LoadedModel
) -> None:
    """Of several lengths, which join and leave."""
    server = Server(loaded, load(checkpoints(name)[0], extra, max_draft=depth))
    jobs = []
    for ids, tokens in ASKED:
        jobs.append(server.begin(ids, tokens))
        server.step(2)
    assert server.run(jobs) == stock_answers(name)
    statistics = server.operator.statistics()
    acceptance = statistics["acceptance_by_position"]
    assert len(acceptance) == depth
    if name == "eagle-3":
        assert statistics["accepted_tokens"] >= 5, "the head knows one of the texts"
    else:
        assert 0.4 < acceptance[0] < 1, "the layers are made to be right often"
    server.assert_free()


def drafts_alone(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], list[int]]:
    """What `generate` drafts for each of the texts alone, by the text and its length."""
    found: dict[tuple[int, int], list[int]] = {}
    with monkeypatch.context() as patch:
        drafted = proposals(patch)
        for number, (ids, tokens) in enumerate(ASKED):
            greedy(model, torch.tensor([ids]), max_new_tokens=tokens)
            found |= {(number, length): drafts for length, drafts in drafted.items()}
            drafted.clear()
    return found


@pytest.mark.parametrize(
    ("name", "extra"),
    with_long(
        [("three layers", ""), ("deepseek_v3", ""), ("mellum", STOCK_ATTENTION), ("eagle-3", "")], ("three layers", ""), ("eagle-3", "")
    ),
)
def test_drafts_are_those_of_a_text_alone(
    name: str, extra: str, checkpoints: Folders, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after plain steps, whose states are fed together."""
    model = load(checkpoints(name)[0], extra)
    expected = drafts_alone(model, monkeypatch)
    rounds = iter(range(10**6))
    server, found = Server(loaded, model, wanted=lambda: next(rounds) % 4), {}
    assert server.pool.ragged == (not extra)
    jobs: list[Job] = []
    accept = scheduling._accept

    def recorded(given: Sequence[Job], drafts: Any, *logits: Any) -> list[int]:
        for job, draft in zip(given, drafts, strict=False):
            found[jobs.index(job), len(job.token_ids)] = list(draft.tokens)
        return accept(given, drafts, *logits)

    monkeypatch.setattr(scheduling, "_accept", recorded)
    for ids, tokens in ASKED:
        jobs.append(server.begin(ids, tokens))
        server.step()
    server.run(jobs)
    both = [place for place in found if place in expected and len(found[place]) == len(expected[place])]
    assert len({number for number, _ in both}) == len(ASKED) - 1  # one answer has no room for a draft
    assert len(both) > 15
    assert {place: found[place] for place in both} == {place: expected[place] for place in both}


def test_a_prompt_of_one_token_may_be_padded_beside_drafts(
    checkpoints: Folders, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that was asked before has one token left, and beside long texts, as here beside any, drafts are padded."""
    monkeypatch.setattr(pages, "KEYS_OF_PADDING", 0)
    folder, stock = checkpoints("deepseek_v3")
    server = Server(loaded, load(folder))
    jobs = [server.begin(ids_of(30), 20)]
    server.run(jobs)
    jobs += [server.begin(ids_of(40, seed=1), 30)]
    server.step(3)
    jobs += [server.begin(ids_of(30), 20), server.begin(ids_of(1), 20)]
    assert jobs[2].cached_tokens == 29
    assert server.run(jobs) == [
        greedy(stock, torch.tensor([job.ask.token_ids]), max_new_tokens=job.ask.max_tokens)[0].tolist() for job in jobs
    ]
    server.assert_free()


@pytest.mark.parametrize("name", ["three layers", "deepseek_v3", "eagle-3"])
@pytest.mark.parametrize("where", ["body", "layers that draft"])
def test_a_failed_pass_of_answers_and_prompts_changes_nothing(
    name: str, where: str, checkpoints: Folders, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of each are computed in another pass."""
    folder, stock = checkpoints(name)
    model = load(folder)
    drafting = [True]
    server = Server(loaded, model, wanted=lambda: drafting[0])
    jobs = [server.begin(ids_of(30), 30)]
    server.step(3)
    jobs += [server.begin(ids_of(size, seed=size), 20) for size in (20, 22, 2)]
    place, method = (model.model.layers[1], "forward") if where == "body" else (mtp_layers(model), "forward_layer")
    compute, failed = getattr(place, method), []

    def fail(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("inner")
        return compute(*args, **kwargs)

    drafting[0] = False
    with monkeypatch.context() as patched:
        patched.setattr(place, method, fail)
        server.step()
    drafting[0] = True
    assert failed and not server.pool.ragged
    expected = [greedy(stock, torch.tensor([job.ask.token_ids]), max_new_tokens=job.ask.max_tokens)[0].tolist() for job in jobs]
    assert server.run(jobs) == expected
    server.assert_free()


def test_waiting_states_keep_no_others_of_their_pass(checkpoints: Folders, loaded: LoadedModel) -> None:
    server = Server(loaded, load(checkpoints("deepseek_v3")[0]), wanted=lambda: False)
    server.begin(ids_of(30), 30)
    server.step(2)
    server.begin(ids_of(40, seed=1), 20)
    server.step()
    assert server.pool.streams is not None
    (first, _) = server.pool.streams._streams.values()
    (*_, latest) = first.waiting[0]
    assert latest.untyped_storage().nbytes() == latest.nbytes


def test_pages_that_wait_for_a_draft_hide_no_need_of_others(checkpoints: Folders, loaded: LoadedModel) -> None:
    """A draft has pages for its longest form, and may end before it needs them; the next pass evicts a prefix for another answer."""
    drafting = [False]
    model = load(checkpoints("deepseek_v3")[0], confidence=0.999)
    page = Server(loaded, model).pool._pool.page_bytes
    server = Server(loaded, model, limit=5 * page, most=2, wanted=lambda: drafting[0])
    server.run([server.begin(ids_of(40, seed=1), 1)])  # leaves a prefix of two pages
    jobs = [server.begin(ids_of(28, seed=2), 8)]
    server.step()
    jobs += [server.begin(ids_of(31, seed=3), 3)]
    server.step(2)
    drafting[0] = True
    server.run(jobs)


def test_sampled_answers_are_those_without_drafts(checkpoints: Folders, loaded: LoadedModel) -> None:
    """Each token is drawn from the full model's distribution with the same random number."""
    model = load(checkpoints("glm4_moe")[0])
    texts = []
    for drafts in (True, False):
        server = Server(loaded, model, drafts=drafts)
        jobs = [
            server.begin(ids, tokens, temperature=temperature, seed=seed, top_p=0.9)
            for seed, ((ids, tokens), temperature) in enumerate(zip(ASKED, (0.2, 0.5, 0.3, 0.7, 1.0, 0.1), strict=True))
        ]
        texts.append(server.run(jobs))
    assert texts[0] == texts[1]
    assert server.operator.statistics()["accepted_tokens"] > 20, "drafts were of use"


def test_another_turn_begins_with_the_entries_of_the_first(checkpoints: Folders, loaded: LoadedModel) -> None:
    folder, stock = checkpoints("deepseek_v3")
    server = Server(loaded, load(folder))
    (first,) = server.run([server.begin(ids_of(50), 30)])
    asked = [[*first, *ids_of(20, seed=seed)] for seed in (1, 2)]
    jobs = [server.begin(ids, 30) for ids in asked]
    assert [job.cached_tokens for job in jobs] == [79, 79]
    for ids, found in zip(asked, server.run(jobs), strict=True):
        assert found == greedy(stock, torch.tensor([ids]), max_new_tokens=30)[0].tolist()
    server.assert_free()


def test_answers_that_end_early_leave_nothing(checkpoints: Folders, loaded: LoadedModel) -> None:
    """A client that leaves, in its prompt and in its answer, and a forward pass that fails; beside and before others."""
    folder, stock = checkpoints("three layers")
    model = load(folder)
    server = Server(loaded, model)
    jobs = [server.begin(ids_of(length, seed=length), 40) for length in (20, 200, 30)]
    server.step(3)
    for job in jobs[:2]:
        job.cancel()
    (found,) = server.run(jobs[2:])
    assert found == greedy(stock, prompt(30, seed=30), max_new_tokens=40)[0].tolist()
    server.assert_free()

    def fail(*given: Any) -> None:
        raise RuntimeError("inner")

    for module in (model.model.layers[1], model.mtp.layers[2]):
        job = server.begin(ids_of(20), 40)
        server.step(2)
        hook = module.register_forward_pre_hook(fail)
        server.step()
        hook.remove()
        assert job.ending == "failed"
        server.assert_free()
    assert server.run([server.begin(ids_of(20), 40)])[0] == greedy(stock, prompt(20), max_new_tokens=40)[0].tolist()


def test_states_do_not_pile_up_while_drafts_are_off(checkpoints: Folders, loaded: LoadedModel) -> None:
    model, wanted = load(checkpoints("glm4_moe")[0]), list[bool]()
    server = Server(loaded, model, wanted=lambda: wanted)
    jobs = [server.begin(ids_of(length), 400) for length in (5, 90)]
    server.step(300)
    assert server.pool.streams is not None
    waiting = [sum(map(len, stream.waiting[0])) for stream in server.pool.streams._streams.values()]
    assert 0 < max(waiting) <= MOST_WAITING
    wanted.append(True)
    server.run(jobs)
    acceptance = server.operator.statistics()["acceptance_by_position"]
    assert 0.4 < acceptance[0] <= 1


def test_what_keeps_states_of_its_own_is_served_alone(loaded: LoadedModel, tmp_path: Path) -> None:
    """Inkling's MTP layers have short convolutions."""
    from moegraft.injection.cli.serve.service import Limits, Service

    stock = write_checkpoint(tmp_path, "inkling_text", share=0.02)
    model = load(tmp_path)
    service = Service(LoadedModel("inkling", model, loaded.tokenizer, lambda: []), Limits())
    try:
        assert "MTP layers keep recurrent or convolution states" in str(service.alone_because)
        job = Job(Ask(ids_of(20), 20), loaded.tokenizer)
        service.engine.submit([job])
        while job.ending is None:
            pass
        assert job.token_ids == greedy(stock, prompt(20), max_new_tokens=20)[0].tolist()
    finally:
        service.close()
