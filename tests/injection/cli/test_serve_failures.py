"""What fails in one request ends that request: the others get what each gets alone, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from rich.console import Console
from support import combinations
from support.serving import Server, ask, one_by_one, openai, serving, until

from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.output import Terminal, library_log
from moegraft.injection.cli.serve import answer_form, scheduler
from moegraft.injection.cli.serve.app import Preparation
from moegraft.injection.cli.serve.openai import TextBody
from moegraft.injection.cli.serve.sampling import usable
from moegraft.injection.cli.serve.service import Limits

KNOWN = len("hello") + 3 + 12 - 1  # tokens of a first question with its answer, of which the last is not read
LONG = "a question that is a good deal longer than those of the others, " * 2
Hook = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


@pytest.fixture(params=["together", "one by one"])
def model(request: pytest.FixtureRequest, loaded: LoadedModel, stock: LoadedModel) -> LoadedModel:
    """The model served in either way."""
    return loaded if request.param == "together" else one_by_one(stock)


@pytest.fixture
def slowly(loaded: LoadedModel) -> Iterator[None]:
    """A forward pass takes at least 5 ms, so that answers overlap."""
    hook = loaded.model.register_forward_pre_hook(lambda *args: time.sleep(0.005))
    yield
    hook.remove()


@contextmanager
def after_each_forward(loaded: LoadedModel, hook: Hook) -> Iterator[None]:
    handle = loaded.model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def said(server: Server, question: str, **options: Any) -> str:
    return str(ask(server, question, **options).choices[0].message.content)


def cached(server: Server, *questions: str) -> int:
    return int(ask(server, *questions, max_tokens=2).usage.prompt_tokens_details.cached_tokens)


def neighbour(pool: ThreadPoolExecutor, server: Server) -> Future[str]:
    """An answer under way, its prompt read; with draws of its own, which must not shift."""
    before = server.service.engine.completion_tokens
    answer = pool.submit(said, server, "hello", max_tokens=60, temperature=1.5, seed=3)
    until(lambda: server.service.engine.completion_tokens > before + 2)
    return answer


SMALL: list[dict[str, Any]] = [
    {"temperature": 1e-40},  # a float32 denormal: quotients are infinite
    {"temperature": 5e-324},  # 0 in float32
    {"temperature": 1e-37},  # a normal float32, and quotients of logits above 34 are infinite
    {"temperature": 1.0, "top_p": 5e-324},  # 0 in float32: not even the likeliest token is below it
    {"temperature": 1.0, "top_p": 0},
]


@pytest.mark.usefixtures("slowly")
def test_values_too_small_to_divide_by_are_greedy(model: LoadedModel) -> None:
    with serving(model) as server, ThreadPoolExecutor(1) as pool:
        greedy = said(server, "how are you", temperature=0)
        expected = said(server, "hello", max_tokens=60, temperature=1.5, seed=3)
        for small in SMALL:
            other = neighbour(pool, server)
            assert said(server, "how are you", **small) == greedy, small
            assert other.result() == expected, small
        assert server.service.engine.endings["failed"] == 0


EXTREME: list[dict[str, Any]] = [
    {"seed": (1 << 63) - 1},
    {"seed": -(1 << 63)},
    {"extra_body": {"top_k": 10**30}},
    {"top_p": 1e-30},
    {"stop": ["\0", "x" * 256], "seed": 1},  # one text in 260 begins with this stop
    {"temperature": 2, "top_p": 1 - 1e-16},
    {"temperature": 1, "top_p": 1},  # whole numbers, as JSON clients may write them
]


def test_extreme_values_are_answered(model: LoadedModel) -> None:
    with serving(model) as server:
        for extreme in EXTREME:
            assert len(said(server, "hello", **{"temperature": 1.5, **extreme})) > 0, extreme


@pytest.mark.parametrize(
    ("logits", "good"),
    [
        ([1.0, float("-inf"), 2.0], True),  # a masked token
        ([1.0, float("nan"), 2.0], False),
        ([1.0, float("inf"), 2.0], False),
        ([float("-inf")] * 3, False),
    ],
)
def test_rows_no_token_can_be_chosen_from(logits: list[float], good: bool) -> None:
    beside = torch.tensor([[0.0, 1.0, 2.0], logits])
    assert usable(beside).tolist() == [True, good]


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize(("bad", "temperature", "place"), combinations([float("nan"), float("inf")], [0, 1.0], ["prompt", "answer"]))
def test_a_row_without_usable_logits_ends_alone(loaded: LoadedModel, bad: float, temperature: float, place: str) -> None:
    """The long prompt's row is spoiled, in the pass that reads it or once it is decoded beside the other."""

    def spoil(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        positions = kwargs["position_ids"]
        if (place == "prompt") == (positions.shape[1] > 1):
            output.logits[positions[:, -1] > len(LONG), -1:, 5] = bad  # the last row of a pass with others

    with serving(loaded) as server, ThreadPoolExecutor(1) as pool:
        expected = said(server, "hello", max_tokens=60, temperature=1.5, seed=3)
        first = said(server, "hello")
        other = neighbour(pool, server)
        with after_each_forward(loaded, spoil):
            with pytest.raises(openai.InternalServerError, match="NaN or infinite"):
                ask(server, "hello", first, LONG, max_tokens=100, temperature=temperature)
            assert other.result() == expected
        assert server.service.engine.endings["failed"] == 1
        assert cached(server, "hello", first, LONG) == KNOWN, "what the failed answer took over is used again, what it added is not"


def test_logits_that_are_bad_alone_end_an_answer_of_generate(stock: LoadedModel) -> None:
    model = one_by_one(stock)

    def spoil(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        output.logits[:] = float("nan")

    with serving(model) as server:
        first = said(server, "hello")
        with after_each_forward(model, spoil):
            for temperature in (0, 1.0):
                with pytest.raises(openai.InternalServerError, match="NaN or infinite"):
                    ask(server, "hello", first, "and then?", temperature=temperature)
        assert cached(server, "hello", first, "and then?") == KNOWN


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("stream", [False, True])
def test_text_that_cannot_be_decoded_ends_its_answer_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "moegraft.injection.cli.serve")
    with serving(model) as server, ThreadPoolExecutor(1) as pool:
        expected = said(server, "hello", max_tokens=60, temperature=1.5, seed=3)
        bad = said(server, "zebra", max_tokens=20)
        pair = next(bad[at : at + 2] for at in range(len(bad) - 1) if bad[at : at + 2] not in expected)
        other = neighbour(pool, server)
        decode = model.tokenizer.decode

        def fail(token_ids: Any, **options: Any) -> Any:
            text = decode(token_ids, **options)
            if pair in text:
                raise KeyError("inner secret")
            return text

        with monkeypatch.context() as patched:
            patched.setattr(model.tokenizer, "decode", fail)
            with pytest.raises(openai.APIError) as error:
                reply = ask(server, "zebra", max_tokens=20, stream=stream)
                list(reply)  # a stream's error comes as its last event
            assert "secret" not in str(error.value)
            assert other.result() == expected
        until(lambda: server.service.engine.endings["failed"] == 1)
        assert said(server, "zebra", max_tokens=20) == bad


def test_an_error_of_the_prompts_own_pass_ends_it_alone(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LEAST_CHUNK", 512)  # a busy machine would read the long prompt in passes that do not fail

    def fail(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] > 64:
            raise RuntimeError("inner secret")
        time.sleep(0.005)

    handle = loaded.model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        with serving(loaded) as server, ThreadPoolExecutor(1) as pool:
            expected = said(server, "hello", max_tokens=60, temperature=1.5, seed=3)
            first = said(server, "hello")
            other = neighbour(pool, server)
            with pytest.raises(openai.InternalServerError):
                ask(server, "hello", first, LONG)
            assert other.result() == expected
            assert cached(server, "hello", first, "and then?") == KNOWN
    finally:
        handle.remove()


@pytest.mark.usefixtures("slowly")
def test_a_failed_pass_ends_its_answers_and_the_engine_continues(loaded: LoadedModel) -> None:
    def fail(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["input_ids"].shape[0] == 2:
            raise RuntimeError("inner secret")

    with serving(loaded) as server, ThreadPoolExecutor(2) as pool:
        alone = said(server, "hello")
        with after_each_forward(loaded, fail):
            for answer in [pool.submit(said, server, question, max_tokens=200) for question in ("one", "two")]:
                with pytest.raises(openai.InternalServerError):
                    answer.result()
        assert server.service.engine.endings["failed"] == 2
        assert cached(server, "hello", alone, "and then?") == KNOWN
        assert said(server, "hello") == alone


def test_the_servers_log_has_the_reason(loaded: LoadedModel) -> None:
    """As answers to clients promise, whom it does not concern."""

    def fail(*args: Any) -> None:
        raise ValueError("the model is broken")

    log = io.StringIO()
    with (
        library_log(Terminal(io.StringIO(), Console(file=log, width=200))),
        serving(loaded) as server,
        after_each_forward(loaded, fail),
        pytest.raises(openai.InternalServerError, match="the server's log has the reason"),
    ):
        ask(server, "hello")
    assert "serve: a request failed" in log.getvalue()
    assert "ValueError: the model is broken" in log.getvalue() and 'test_serve_failures.py", line' in log.getvalue()


def test_a_listener_that_cannot_be_reached_is_answered_no_further(loaded: LoadedModel) -> None:
    def unreachable(number: int, piece: object) -> None:
        raise RuntimeError("the loop is closed")

    with serving(loaded) as server:
        [choice] = server.service.choices(TextBody(prompt="hello", max_tokens=2000).request(), unreachable)
        job = choice.job
        server.service.engine.submit([job])
        until(lambda: job.ending is not None)
        assert job.ending == "cancelled" and job.completion_tokens < 10
        assert said(server, "hello")


@pytest.mark.parametrize(
    "fatal",
    [
        torch.AcceleratorError("device-side assert triggered"),  # the device computes nothing after it
        SystemExit(1),  # what no handler of exceptions expects
    ],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_ends_all_requests_end_and_health_reports_it(loaded: LoadedModel, fatal: BaseException) -> None:
    started = threading.Event()

    def fail(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if started.wait(0.01):
            raise fatal

    with (
        serving(loaded, Limits(max_batch=2)) as server,
        after_each_forward(loaded, fail),
        ThreadPoolExecutor(6) as pool,
    ):
        answers = [pool.submit(said, server, f"question {number}", max_tokens=2000) for number in range(6)]
        until(lambda: server.service.engine.waiting + server.service.engine.running == 6)
        started.set()
        for answer in answers:
            with pytest.raises(openai.InternalServerError, match="restart the server"):
                answer.result()
        assert server.service.engine.endings["failed"] == 6
        with pytest.raises(HTTPError) as health:
            server.get("/health")
        assert health.value.code == 503
        with pytest.raises(openai.InternalServerError) as refused:
            said(server, "hello")
        assert refused.value.status_code == 503


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("bound", ["items", "time"])
def test_a_grammar_that_grows_too_large_ends_its_answer_alone(model: LoadedModel, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is not taken for a complete one."""
    import llguidance

    few = llguidance.LLParserLimits(max_items_in_row=60)  # in a grammar with many readings, every token adds some
    with serving(model) as server, ThreadPoolExecutor(3) as pool:
        alone = said(server, "hello", max_tokens=60)
        if bound == "items":
            monkeypatch.setattr(llguidance, "LLMatcher", partial(llguidance.LLMatcher, limits=few))
        else:
            monkeypatch.setattr(answer_form, "TOKEN_S", 0.0)
            monkeypatch.setattr(answer_form, "SPARE_S", 0.02)
        others = [pool.submit(said, server, "hello", max_tokens=60) for _ in range(2)]
        with pytest.raises(openai.InternalServerError, match="cannot follow its grammar any further"):
            ask(server, LONG, max_tokens=200, logit_bias={"0": -100}, extra_body={"grammar": 'start: s\ns: s s | "a" | "b" | "c"'})
        assert [other.result() for other in others] == [alone] * 2
        assert said(server, "hello", max_tokens=60) == alone


@pytest.mark.parametrize(
    ("costs_s", "ends"),
    [
        ([0.9, *[0.009] * 500], None),  # as where a large grammar's first token takes long
        ([0.0151] * 500, 196),
        ([0.001] * 1000 + [0.7, 0.7], 1001),
    ],
)
def test_an_answers_grammar_has_a_bounded_time_in_the_mean(
    costs_s: list[float], ends: int | None, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = answer_form.Grammars(loaded.tokenizer, len(loaded.tokenizer), [0])
    constraint = prepared.constraint(answer_form.grammars("start: /a*/"))
    clock = iter([now for cost in costs_s for now in (0.0, cost)])
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    answer = loaded.tokenizer("a" * len(costs_s))["input_ids"]
    for tokens in range(len(costs_s)):
        if tokens == ends:
            with pytest.raises(answer_form.GrammarError, match=r"ms of CPU time, .* an ambiguous rule"):
                constraint.restrict(torch.zeros(len(loaded.tokenizer)), answer[:tokens])
            return
        constraint.restrict(torch.zeros(len(loaded.tokenizer)), answer[:tokens])
    assert ends is None


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("logit_bias", {"logit_bias": {str(number): 1 for number in range(1025)}}),
        ("stop", {"stop": "a" * 257}),
        ("grammar", {"grammar": f'start: "{"a" * (1 << 16)}"'}),
    ],
)
def test_what_would_slow_every_step_for_all_is_refused(loaded: LoadedModel, field: str, options: dict[str, Any]) -> None:
    with serving(loaded) as server, pytest.raises(openai.BadRequestError, match=field):
        ask(server, "hello", extra_body=options)


def test_preparing_one_clients_requests_leaves_threads_for_others() -> None:
    """As for long prompts and large grammars: a request of another client does not wait for them."""
    prepare, go_on, begun = Preparation(), threading.Event(), []

    def slow(number: int) -> int:
        begun.append(number)
        assert go_on.wait(20)
        return number

    def request(host: str) -> Any:
        return SimpleNamespace(client=SimpleNamespace(host=host))

    async def visit() -> None:
        many = [asyncio.create_task(prepare(request("many"), slow, number)) for number in range(40)]
        try:
            assert await asyncio.wait_for(prepare(request("one"), len, "text"), 10) == 4
            assert len(begun) <= 2
        finally:
            go_on.set()
        assert await asyncio.gather(*many) == list(range(40))
        assert await asyncio.wait_for(asyncio.gather(*(prepare(request("many"), len, "text") for _ in range(3))), 10) == [4] * 3

    asyncio.run(visit())


def test_a_cancelled_preparation_counts_until_its_thread_ends() -> None:
    """As when a client leaves: the thread goes on, and the client may not have more of them."""
    prepare, go_on, begun = Preparation(), threading.Event(), []
    request: Any = SimpleNamespace(client=SimpleNamespace(host="one"))

    def slow(number: int) -> int:
        begun.append(number)
        assert go_on.wait(20)
        return number

    async def visit() -> None:
        try:
            for number in range(6):
                task = asyncio.create_task(prepare(request, slow, number))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert begun == [0, 1]
        finally:
            go_on.set()
        assert await asyncio.wait_for(asyncio.gather(*(prepare(request, len, "text") for _ in range(3))), 10) == [4] * 3

    asyncio.run(visit())


def test_tokens_are_decoded_beside_the_streams(loaded: LoadedModel) -> None:
    tokenizer, beside = copy.deepcopy(loaded.tokenizer), []

    def noted(*given: Any, **options: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # a thread without a loop
            beside.append(True)
        else:
            beside.append(False)
        return loaded.tokenizer.decode(*given, **options)

    tokenizer.decode = noted
    with serving(LoadedModel("noted", loaded.model, tokenizer, lambda: [])) as server:
        body = json.dumps({"tokens": [5]}).encode()
        with urlopen(Request(f"{server.address}/detokenize", body, {"Content-Type": "application/json"}), timeout=20):
            pass
    assert beside and all(beside)
