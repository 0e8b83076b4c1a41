"""Memory, turns and the end of a server are shared fairly: by clients of one model, and with answers that run when it is stopped."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support.gpus import placed
from support.programs import Program
from support.serving import PATIENCE_S, ask, messages, one_by_one, openai, serving, until

from moegraft.cpu_backend import Runtime
from moegraft.injection import optimize_and_load
from moegraft.injection.cli.models import LoadedModel, load_model
from moegraft.injection.cli.options import ModelOptions, OptionsError
from moegraft.injection.cli.output import Terminal
from moegraft.injection.cli.serve import scheduler
from moegraft.injection.cli.serve.job import Ask, Job
from moegraft.injection.cli.serve.open_pool import open_pool
from moegraft.injection.cli.serve.pages import SequencePool
from moegraft.injection.cli.serve.protocol import RequestError
from moegraft.injection.cli.serve.scheduler import Scheduler
from moegraft.injection.cli.serve.service import Limits, Service

SHORT = 16  # tokens of a prompt beside which a chunk is long
TOKEN_BYTES = 2 * 2 * 16 * 4  # of the tiny model: keys and values of 2 layers, one head of 16 columns in float32


@pytest.fixture
def slowly(loaded: LoadedModel) -> Iterator[None]:
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.01))
    yield
    hook.remove()


@contextmanager
def running(loaded: LoadedModel, limits: Limits) -> Iterator[Service]:
    service = Service(loaded, limits)
    try:
        yield service
    finally:
        service.close()


def job(loaded: LoadedModel, tokens: int = 4, *, prompt: int = 5, client: str = "", **options: Any) -> Job:
    ids = torch.randint(10, 90, (prompt,), generator=torch.Generator().manual_seed(prompt)).tolist()
    return Job(Ask(ids, max_tokens=tokens, end_tokens=[0], **options), loaded.tokenizer, client=client)


def wait(*jobs: Job) -> None:
    until(lambda: all(each.ending is not None for each in jobs))


@contextmanager
def scheduled(loaded: LoadedModel, **options: Any) -> Iterator[tuple[Scheduler, SequencePool, list[tuple[int, int]]]]:
    """A scheduler, its pool, and the shapes of the tokens in each pass of the model."""
    shapes: list[tuple[int, int]] = []
    pool = open_pool(loaded.model, limit=1 << 22, prefix_bytes=0, most=8, context=1024)
    hook = loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        with torch.inference_mode():
            yield Scheduler(loaded.model, pool, most=8, **{"prefill_chunk": 128, **options}), pool, shapes
    finally:
        hook.remove()


def assert_answers_are_the_models_own(loaded: LoadedModel, jobs: list[Job]) -> None:
    for each in jobs:
        ids, count = torch.tensor([each.ask.token_ids]), each.ask.max_tokens
        own = loaded.model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        assert each.ending == "length" and each.token_ids == own[0, : len(each.token_ids)].tolist()


@pytest.mark.parametrize("fails", [False, True])
def test_short_prompts_are_computed_in_passes_of_decoding(
    loaded: LoadedModel, fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with scheduled(loaded) as (scheduler, pool, shapes):
        first, short, other, middle, long = (job(loaded, 30, prompt=tokens, temperature=0) for tokens in (40, 11, 25, 40, 300))
        scheduler.admit(first)
        scheduler.step()
        if fails:
            monkeypatch.setattr(pool, "forward_ragged", lambda *args: 1 / 0)
        for each in (short, long, other, middle):  # the last with 65 tokens beside the two
            scheduler.admit(each)
        shapes.clear()
        scheduler.step()
        assert shapes == ([(1, 1), (4, 11)] if fails else [(1, 1 + 11 + 25), (2, 40)])
        assert [each.completion_tokens for each in (first, short, other, middle, long)] == ([2, 1, 0, 0, 0] if fails else [2, 1, 1, 1, 0])
        while scheduler.jobs:
            scheduler.step()
        assert caplog.text.count("passes have equally many tokens of each from now on") == fails
    assert_answers_are_the_models_own(loaded, [first, short, other, middle, long])


@pytest.mark.parametrize("how", ["own passes", "scores", "long texts", "chunks"])
def test_prompts_have_passes_of_their_own_where_they_need_them(loaded: LoadedModel, how: str) -> None:
    options: dict[str, Any] = {
        "own passes": {"own_passes": True},
        "long texts": {"shared_tokens": 45},
        "chunks": {"prefill_chunk": 8},
    }.get(how, {})
    with scheduled(loaded, **options) as (scheduler, _, shapes):
        first = job(loaded, 12, prompt=40, temperature=0)
        second = job(loaded, 12, prompt=11, temperature=0, **{"echo": True, "logprobs": 1} if how == "scores" else {})
        scheduler.admit(first)
        for _ in range(8):
            scheduler.step()
        scheduler.admit(second)
        shapes.clear()
        scheduler.step()
        assert shapes == [(1, 1), (1, 8 if how == "chunks" else 11)]
        while scheduler.jobs:
            scheduler.step()
    assert_answers_are_the_models_own(loaded, [first, second])


@pytest.mark.usefixtures("slowly")
def test_a_request_waits_for_memory(loaded: LoadedModel) -> None:
    with running(loaded, Limits(kv_memory=192 * TOKEN_BYTES, prefix_cache=0)) as service:
        engine = service.engine
        first, second, third = job(loaded, 60), job(loaded, 5, prompt=70), job(loaded, 5)
        engine.submit([first])
        until(lambda: engine.running == 1)
        engine.submit([second])  # three pages each, which are all
        engine.submit([third])
        until(lambda: engine.running == 2)
        assert engine.memory.promised <= engine.memory.limit == 192 * TOKEN_BYTES
        assert engine.waiting == 1
        wait(first, second, third)
        assert [each.ending for each in (first, second, third)] == ["length"] * 3
        until(lambda: engine.running == 0)
        assert engine.memory.promised == 0


@pytest.fixture
def coded(chat_folder: Path, loaded: LoadedModel, tmp_path: Path) -> LoadedModel:
    rules = tmp_path / "rules.yaml"
    rule = "- {match: {kind: model}, replace: {class: quantized_kv_cache, kwargs: {backend: native}}}"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n{rule}\n")
    return replace(loaded, model=optimize_and_load(chat_folder, rules, dtype=torch.float32, progress=False, threads=1))


def test_a_server_answers_over_codes(coded: LoadedModel) -> None:
    with running(coded, Limits(kv_memory=192 * TOKEN_BYTES, prefix_cache=0)) as service:
        assert service.alone_because is None
        assert 192 * TOKEN_BYTES / 1.3 < service.engine.memory.limit <= 192 * TOKEN_BYTES  # in whole pages
        jobs = [job(coded, 40, prompt=length, temperature=0) for length in (5, 40, 70)]  # of which one would wait in the model's dtype
        service.engine.submit(jobs)
        wait(*jobs)
        for each in jobs:
            ids = torch.tensor([each.ask.token_ids])
            own = coded.model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0)
            assert len(each.token_ids) > ids.shape[1] and each.token_ids == own[0, : len(each.token_ids)].tolist()
    assert coded.model.moegraft.context.replay.replayed > 20


def test_a_server_refuses_codes_that_its_model_does_not_read(coded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded.model.generation_config, "repetition_penalty", 1.2)
    with pytest.raises(OptionsError, match=r"are stored as codes in pages, which this model cannot use: .*repetition_penalty"):
        Service(coded, Limits())


def test_a_limit_without_room_for_any_request_is_refused_at_the_start(loaded: LoadedModel) -> None:
    """As --kv-memory 8 instead of 8GiB: every request would be refused."""
    with pytest.raises(OptionsError, match=r"--kv-memory 8 B: .* needs .* B; give a size such as 8GiB"):
        Service(loaded, Limits(kv_memory=8))


def test_what_never_fits_is_refused_with_the_numbers(loaded: LoadedModel) -> None:
    with serving(loaded, Limits(kv_memory=1024 * TOKEN_BYTES)) as server:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(server, "hello", max_tokens=4000)
        assert "4008 tokens need 1008.0 KiB of keys and values; the limit is 256.0 KiB, of which 256.0 KiB are free" in str(refused.value)
        status = json.loads(server.get("/v1/status"))["memory"]
        assert status["limit"] == 1024 * TOKEN_BYTES and status["promised"] == 0
        assert ask(server, "hello").usage.completion_tokens == 12


@pytest.mark.usefixtures("slowly")
def test_a_full_queue_reports_the_numbers(loaded: LoadedModel) -> None:
    with running(loaded, Limits(max_queue=2, max_batch=1, kv_memory=1000 * TOKEN_BYTES)) as service:
        engine = service.engine
        jobs = [job(loaded, 50, client=name) for name in "abc"]
        engine.submit(jobs[:1])
        until(lambda: engine.running == 1)
        engine.submit(jobs[1:2])
        engine.submit(jobs[2:])
        with pytest.raises(RequestError, match=r"2 requests are waiting, of at most 2; this one needs .* KiB .* limit is .* free"):
            engine.submit([job(loaded, client="d")])


@pytest.mark.usefixtures("slowly")
def test_one_client_does_not_fill_the_queue_and_clients_take_turns(loaded: LoadedModel) -> None:
    with running(loaded, Limits(max_queue=8, max_client=4, max_batch=1)) as service:
        engine, order = service.engine, []
        engine.submit([job(loaded, 30)])
        until(lambda: engine.running == 1)
        many = [job(loaded, 2, client="many") for _ in range(4)]
        for each in many:
            engine.submit([each])
        with pytest.raises(RequestError, match="4 requests of this client are waiting, of at most 4 for each"):
            engine.submit([job(loaded, client="many")])
        one = job(loaded, 2, client="one")
        engine.submit([one])
        for name, each in [("one", one), *(("many", each) for each in many)]:
            each.listener = lambda piece, name=name: order.append(name) if piece.ending else None  # type: ignore[misc]
        wait(one, *many)
        assert order.index("one") <= 1


def test_waiting_prompts_share_a_pass() -> None:
    loaded = bundled("cpu-exact", "float32")
    with running(loaded, Limits(prefill_chunk=64)) as service, passes(loaded) as seen:
        first = job(loaded, 2, prompt=300)
        service.engine.submit([first])
        others = [job(loaded, 2, prompt=16, seed=number) for number in range(4)]
        service.engine.submit(others)
        wait(first, *others)
    assert any(rows > 1 and tokens == 16 for rows, tokens in seen)
    assert max(rows * tokens for rows, tokens in seen) <= 64


@contextmanager
def passes(loaded: LoadedModel) -> Iterator[list[tuple[int, int]]]:
    """The sequences and tokens of each forward pass."""
    seen: list[tuple[int, int]] = []
    hook = loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    try:
        yield seen
    finally:
        hook.remove()


@pytest.fixture(params=["together", "one by one"])
def model(request: pytest.FixtureRequest, loaded: LoadedModel, stock: LoadedModel) -> LoadedModel:
    return loaded if request.param == "together" else one_by_one(stock)


def test_a_request_that_fails_while_prompts_are_read_ends_alone(model: LoadedModel) -> None:
    alone, failing, beside = (job(model, 6, prompt=length) for length in (70, 90, 70))
    mark = str(failing.ask.token_ids[45:55])[1:-1]

    def fail(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(mark in str(row) for row in kwargs["input_ids"].tolist()):
            raise RuntimeError("inner secret")

    with running(model, Limits(prefill_chunk=20, prefix_cache=0)) as service:
        service.engine.submit([alone])
        wait(alone)
        hook = model.model.register_forward_pre_hook(fail, with_kwargs=True)
        try:
            service.engine.submit([failing, beside])
            wait(failing, beside)
        finally:
            hook.remove()
        assert (failing.ending, beside.ending, beside.token_ids) == ("failed", "length", alone.token_ids)
        assert service.engine.endings["failed"] == 1


def test_a_short_prompt_does_not_wait_for_a_long_one(model: LoadedModel) -> None:
    with running(model, Limits(prefill_chunk=50)) as service, passes(model) as seen:
        hook = model.model.register_forward_pre_hook(lambda *args: time.sleep(0.01))
        long, short = job(model, 3, prompt=2000), job(model, 3, prompt=20)
        service.engine.submit([long])
        until(lambda: len(seen) > 2)
        service.engine.submit([short])
        wait(short)
        assert long.ending is None and long.completion_tokens == 0
        wait(long)
        hook.remove()
        assert max(tokens for _, tokens in seen) <= 50


@pytest.mark.parametrize("chunks", [2, 3])
def test_a_short_prompt_is_read_next_after_any_chunk_of_a_lone_one(chunks: int, loaded: LoadedModel) -> None:
    pool = open_pool(loaded.model, limit=4000 * TOKEN_BYTES, prefix_bytes=0, most=4, context=None)
    decoder = scheduler.Scheduler(loaded.model, pool, most=4, prefill_chunk=50)
    long, short = job(loaded, 3, prompt=1000), job(loaded, 3, prompt=20)
    with torch.inference_mode():
        decoder.admit(long)
        for _ in range(chunks):
            decoder.step()
        decoder.admit(short)
        decoder.step()
        assert short.completion_tokens == 1
        decoder.step()  # and then the long one goes on
    assert pool.memory.used >= (chunks + 1) * 50 * TOKEN_BYTES and long.completion_tokens == 0


@pytest.mark.parametrize(
    ("cost", "chunk"), [(lambda tokens: tokens, 32), (lambda tokens: 1000 + tokens, 128), (lambda tokens: 100 + tokens, 96)]
)
def test_a_short_prompt_does_not_wait_for_many_times_its_own_time(
    cost: Callable[[int], float], chunk: int, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which passes take as long as their tokens, as the weights, or as both."""
    now = 0.0

    def forward(module: object, args: object, kwargs: dict[str, Any]) -> None:
        nonlocal now
        now += cost(kwargs["input_ids"].numel())

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    decoder = scheduler.Scheduler(
        loaded.model, open_pool(loaded.model, limit=1 << 25, prefix_bytes=0, most=4, context=None), most=4, prefill_chunk=128
    )
    clock = loaded.model.register_forward_pre_hook(forward, with_kwargs=True)
    with passes(loaded) as seen, torch.inference_mode():
        decoder.admit(job(loaded, 1, prompt=8000))
        for step in range(60):
            if step in (2, 6, 10):
                decoder.admit(job(loaded, 1, prompt=SHORT))
            decoder.step()
    clock.remove()
    long = [tokens for _, tokens in seen if tokens != SHORT]
    assert long[:2] == [128, 128], "nothing waits for the first prompt"
    assert long[7:30] == [chunk] * 23
    assert cost(chunk) <= scheduler.LONGEST_WAIT * cost(SHORT) or chunk == 128
    assert long[-2:] == [128, 128], "no other prompt has come for a while"


def test_chunks_stay_small_while_short_prompts_come_beside_a_long_one() -> None:
    """Also the first, whose time is not known yet but bounded by a short prompt's; and short prompts that share their pass count."""
    size = scheduler.ChunkSize(512)
    size.took(0.096, 32, prompts=1, whole=True)
    assert size.tokens == scheduler.LONGEST_WAIT * 32
    for _ in range(3 * scheduler.REMEMBERED):
        size.took(0.002 * size.tokens, size.tokens, prompts=1, whole=False)
        size.took(0.13, 32, prompts=2, whole=True)
    assert size.tokens == 128


def test_who_leaves_while_its_prompt_is_read_frees_its_place_within_a_chunk(model: LoadedModel) -> None:
    with running(model, Limits(prefill_chunk=20)) as service, passes(model) as seen:
        hook = model.model.register_forward_pre_hook(lambda *args: time.sleep(0.02))
        long = job(model, 3, prompt=2000)
        service.engine.submit([long])
        until(lambda: len(seen) > 2)
        long.cancel()
        before = len(seen)
        wait(long)
        hook.remove()
        assert long.ending == "cancelled" and len(seen) <= before + 2


def test_what_one_key_has_asked_is_not_kept_for_another(loaded: LoadedModel) -> None:
    with serving(loaded) as server:

        def cached(key: str) -> int:
            reply = server.client(key).chat.completions.create(model=server.service.model_id, messages=messages("a question"), max_tokens=2)
            return int(reply.usage.prompt_tokens_details.cached_tokens)

        assert [cached(key) for key in ("one", "two")] == [0, 0]
        assert min(cached("one"), cached("two")) > 5


def start(*arguments: str) -> tuple[Program, str]:
    """A server process and its address."""
    process = Program(["-m", "moegraft.injection.cli.moegraft", "serve", "--port", "0", *arguments], os.environ)
    return process, next(match.group(1) for said in process.stderr if (match := re.search(r" at (http://\S+)/v1 ", said)))


def streamed(address: str, tokens: int) -> Any:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    model = next(iter(client.models.list())).id
    return client.chat.completions.create(
        model=model, messages=messages("Speak"), max_tokens=tokens, temperature=1.0, stream=True, logit_bias={"0": -100}
    )


def test_sigterm_gives_running_answers_the_grace_and_ends_the_others() -> None:
    """There is no time in which all of these end, and plenty for the short ones."""
    process, address = start("--grace", "3")
    try:
        long = [streamed(address, 4000) for _ in range(24)]
        short = streamed(address, 8)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in short][-1] == "length"
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            streamed(address, 1)
        with pytest.raises(openai.APIError, match="cancelled"):
            for each in long:
                list(each)
        output, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert (process.returncode, output) == (0, "")
    assert "Traceback" not in errors


def test_a_second_sigterm_ends_at_once() -> None:
    process, address = start("--grace", "1000")
    try:
        stream = streamed(address, 4000)
        next(stream)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.running()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM


def bundled(rules: str, dtype: str) -> LoadedModel:
    quiet = Terminal(io.StringIO(), Console(file=io.StringIO()), quiet=True)
    return load_model(ModelOptions(rules=rules, dtype=dtype, threads=1), quiet)


def questions(loaded: LoadedModel) -> list[list[int]]:
    """32 prompts of 10 to 60 tokens."""
    texts = [f"What of the king number {number}{' and his men' * (number % 7)}?" for number in range(32)]
    return [list(loaded.tokenizer(text)["input_ids"]) for text in texts]


def test_an_answer_does_not_depend_on_31_others() -> None:
    """Greedy and drawn, with exact weights in float32; prompts are read in pieces that depend on the others."""
    loaded = bundled("cpu-exact", "float32")
    asked = [
        Ask(ids, max_tokens=16, seed=number, temperature=0.0 if number % 2 else 1.2, top_p=0.95, top_k=0 if number % 3 else 40)
        for number, ids in enumerate(questions(loaded))
    ]
    with running(loaded, Limits(prefill_chunk=40, prefix_cache=0)) as service:

        def answers(some: list[Ask]) -> list[list[int]]:
            jobs = [Job(replace(each, end_tokens=service.ends), loaded.tokenizer) for each in some]
            service.engine.submit(jobs)
            wait(*jobs)
            return [each.token_ids for each in jobs]

        together = answers(asked)
        assert [answers([each])[0] for each in asked[::3]] == together[::3]


Scored = tuple[list[int], list[Any]]


def scored(service: Service, asked: list[Ask]) -> tuple[list[Scored], list[int]]:
    """The tokens and scores of answers that are computed at the same time, and how many tokens of each prompt were known."""
    jobs, scores = [], [list[Any]() for _ in asked]
    for own, each in zip(scores, asked, strict=True):
        ask = replace(each, end_tokens=service.ends)
        jobs.append(Job(ask, service.loaded.tokenizer, lambda piece, own=own: own.extend(piece.scores)))  # type: ignore[misc]
    service.engine.submit(jobs)
    wait(*jobs)
    until(lambda: service.engine.running == 0)
    return [(job.token_ids, own) for job, own in zip(jobs, scores, strict=True)], [job.cached_tokens for job in jobs]


@pytest.mark.parametrize(("rules", "dtype"), [("cpu", "bfloat16"), ("cpu-exact", "bfloat16")])  # int8 weights, and bfloat16 ones
def test_a_batch_invariant_answer_is_exactly_the_same_beside_others(rules: str, dtype: str) -> None:
    """Tokens and every bit of their scores, greedy and drawn; at first, again, and in a conversation that goes on."""
    loaded = bundled(rules, dtype)
    prompts = [ids * (1 + 3 * (number % 3)) for number, ids in enumerate(questions(loaded)[:9])]
    asked = [
        Ask(ids, max_tokens=10, seed=number, temperature=1.2 * (number % 2), top_k=0 if number % 3 else 40, logprobs=3)
        for number, ids in enumerate(prompts)
    ]
    with running(loaded, Limits(prefill_chunk=32, batch_invariant=True)) as service:
        first = scored(service, asked[4:5])[0]
        together, _ = scored(service, asked)
        assert together[4:5] == first
        for number in (0, 5, 8):
            [alone], [known] = scored(service, [asked[number]])
            assert alone == together[number] and (known > 0) == (len(prompts[number]) > 32)
        further = [replace(one, token_ids=[*ids, *prompts[0]]) for one, (ids, _) in zip(asked, together, strict=True)]
        goes_on, known_tokens = scored(service, further)
        assert max(known_tokens) > 32 and all(known % 32 == 0 for known in known_tokens)
    with running(loaded, Limits(prefill_chunk=32, batch_invariant=True, prefix_cache=0)) as service:
        for number in (5, 8):
            assert scored(service, [further[number]]) == ([goes_on[number]], [0])


def test_a_model_replays_its_steps_again_after_a_batch_invariant_server() -> None:
    loaded = bundled("cpu", "bfloat16")
    with running(loaded, Limits(batch_invariant=True)) as service:
        scored(service, [Ask([5, 6, 7, 8, 9], max_tokens=6)])
    model: Any = loaded.model
    model.generate(torch.tensor([[5, 6, 7, 8, 9]]), max_new_tokens=24, do_sample=False)
    assert model.moegraft.statistics()["decode_steps"]["replayed_steps"]


@pytest.mark.parametrize("way", [lambda stock: stock, one_by_one], ids=["together", "one by one"])
def test_batch_invariant_passes_have_one_text_and_the_same_tokens(stock: LoadedModel, way: Callable[[LoadedModel], LoadedModel]) -> None:
    model = way(stock)
    with running(model, Limits(prefill_chunk=20, batch_invariant=True)) as service, passes(model) as seen:
        jobs = [job(model, 6, prompt=length, seed=1) for length in (70, 9, 33, 70)]
        service.engine.submit(jobs)
        wait(*jobs)
        again = job(model, 6, prompt=70)
        service.engine.submit([again])
        wait(again)
        assert jobs[0].token_ids == jobs[3].token_ids == again.token_ids
    assert {rows for rows, _ in seen} == {1} and {tokens for _, tokens in seen} == {1, 9, 10, 13, 20}


def test_rotary_embeddings_that_depend_on_the_longest_text_do_not_change_those_of_shorter_ones(stock: LoadedModel) -> None:
    """As in Phi-3.5-MoE, whose factors are others once a text of the pass is longer than those of its first training."""
    config = copy.deepcopy(stock.model.config)
    factors = {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8, "original_max_position_embeddings": 64}
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    model = type(stock.model)(config).eval()
    model.load_state_dict(stock.model.state_dict())
    model = optimize_and_load(model, "cpu-exact", progress=False, threads=1)
    prompts = [torch.randint(10, 90, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (12, 100)]
    asked = [Ask(ids, max_tokens=24, logprobs=0) for ids in prompts]
    long = LoadedModel("long", model, stock.tokenizer, lambda: [])
    with running(long, Limits(prefix_cache=0)) as service:
        [[alone_ids, alone]], _ = scored(service, asked[:1])
        [[ids, beside], _], _ = scored(service, asked)
        with passes(long) as seen:
            scored(service, asked[:1] * 2)
    assert (2, 1) in seen, "short ones share passes"
    torch.testing.assert_close([each.logprob for each in beside], [each.logprob for each in alone], atol=1e-4, rtol=0)
    assert ids == alone_ids


def test_what_depends_on_time_is_refused_as_batch_invariant(stock: LoadedModel, tmp_path: Path, gpu: str) -> None:
    rules = tmp_path / "rules.yaml"
    lines = (
        ("match: {kind: model}, replace: {class: speculative_draft, kwargs: {mode: adaptive, tolerance: 0.3}}", "speculative_draft drafts"),
        (
            f'id: experts, match: {{kind: experts}}, replace: {{class: hybrid_experts, kwargs: {{gpu: "{gpu}", cache: {{ratio: 0.5}}}}}}',
            "which device computes an expert",
        ),
    )
    for line, reason in lines:
        rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n- {{{line}}}\n")
        model: Any = optimize_and_load(placed(copy.deepcopy(stock.model), gpu), rules, progress=False, threads=1)
        replay = model.moegraft.context.replay
        with pytest.raises(OptionsError, match=f"--batch-invariant: {reason}"):
            Service(LoadedModel("tiny", model, stock.tokenizer, lambda: []), Limits(batch_invariant=True))
        assert model.moegraft.context.replay is replay


@pytest.mark.parametrize(
    ("rules", "dtype", "most", "mean"),
    [
        ("cpu-exact", "float32", 1e-5, 1e-6),
        ("cpu-exact", "bfloat16", 0.05, 0.01),
        ("cpu", "float32", 0.06, 0.005),
        ("cpu", "bfloat16", 0.3, 0.009),
    ],
)
def test_logits_beside_31_others_differ_within_a_bound(rules: str, dtype: str, most: float, mean: float) -> None:
    """Relative to each token's logits. More sequences take other kernels, which round elsewhere: rarely, an expert changes with that."""
    if rules == "cpu" and Runtime().isa == "amx":  # int8: AMX rounds many rows to bfloat16, few to 8 bits, which are 0.02 off float32 each
        most, mean = 0.5, 0.03
    loaded = bundled(rules, dtype)
    pool = open_pool(loaded.model, limit=None, prefix_bytes=0, most=32, context=512)
    prompts, given = questions(loaded), torch.randint(5, 200, (32, 8), generator=torch.Generator().manual_seed(0)).tolist()

    def logits(rows: list[int]) -> torch.Tensor:
        sequences = [pool.begin(prompts[row], 100) for row in rows]
        with torch.inference_mode():
            for sequence, row in zip(sequences, rows, strict=True):
                pool.forward([sequence], [prompts[row]])
            found = torch.stack([pool.step(sequences, [given[row][step] for row in rows]) for step in range(8)], 1)
        for sequence in sequences:
            pool.end(sequence)
        return found

    together, alone = logits(list(range(32))), torch.cat([logits([row]) for row in range(32)])
    off = (together - alone).norm(dim=-1) / alone.norm(dim=-1)
    assert float(off.max()) <= most and float(off.mean()) <= mean
