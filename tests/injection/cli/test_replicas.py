"""The guide's recipe for replicas with Ray Serve, run as it is printed, with two replicas of the bundled model on one machine."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support import ROOT

PATIENCE_S = 120
MODEL = "the-bundled-model"
PAGE = ROOT / "rules" / "guide" / "replicas.md"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("ray", reason="the recipe needs Ray Serve: pip install 'ray[serve]'")
    folder = tmp_path_factory.mktemp("recipe")
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "replicas.py").write_text(code[0])
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return importlib.import_module("replicas")


@pytest.fixture(scope="module")
def address(recipe: Any, long: bool) -> Iterator[str]:
    if not long:
        pytest.skip("starts a Ray cluster and two servers, for a minute; --long runs it")
    import ray
    from ray import serve

    before = set(servers().values())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, logging_level="warning")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0.5, "metrics_interval_s": 0.5}
        small = recipe.Replica.options(ray_actor_options={"num_cpus": 1}, health_check_period_s=1, autoscaling_config=scaling)
        serve.run(recipe.Front.bind(small.bind("--threads", "1", "--grace", "1")))
        yield f"http://127.0.0.1:{port}"
    finally:
        started = set(servers().values()) - before
        serve.shutdown()
        ray.shutdown()
    assert started and not started & set(servers().values()), "servers end with their replicas"


def servers() -> dict[int, int]:
    """Return the process of each server by its port."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "moegraft.injection.cli.moegraft" in words and "--port" in words:
            found[int(words[words.index("--port") + 1])] = int(process.name)
    return found


def sent(address: str, **asked: object) -> Any:
    """Send a request of a chat, and return the answer, open."""
    content = json.dumps({"model": MODEL, "max_tokens": 6, "temperature": 0, **asked}).encode()
    headers = {"content-type": "application/json"}
    return urlopen(Request(f"{address}/v1/chat/completions", content, headers), timeout=PATIENCE_S)


def ask(address: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    """Return the replica that answered, and the answer."""
    with sent(address, messages=messages) as answer:
        return answer.headers["x-replica"], json.load(answer)


def test_requests_of_a_conversation_have_one_key(recipe: Any) -> None:
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    more = [system, first, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Go on"}]

    def key(**asked: object) -> str:
        return str(recipe.conversation(json.dumps(asked).encode()))

    assert key(messages=[system, first]) == key(messages=more) != key(messages=[system, {**first, "content": "Bye"}])
    assert key(input=[first]) == key(input=more[1:]) and key(input="Hello") == "Hello"
    assert key(prompt="word " * 100) == key(prompt="word " * 200) != key(prompt="words")
    for other in (b"", b"[]", b"{", b'{"prompt": 3}', b'{"messages": [3]}', b'{"messages": [{"role": "system"}]}'):
        assert recipe.conversation(other) != recipe.conversation(other), "any replica answers"


def test_load_starts_a_second_replica(address: str) -> None:
    assert len(servers()) == 1
    until = time.monotonic() + PATIENCE_S

    def load(number: int) -> None:
        while len(servers()) < 2 and time.monotonic() < until:
            with sent(address, messages=[{"role": "user", "content": f"Question {number}"}], max_tokens=200) as answer:
                answer.read()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, range(4)))
    assert len(servers()) == 2
    while len(homes(address)) < 2:
        assert time.monotonic() < until, "the second replica answers"


def homes(address: str) -> set[str]:
    """Return the replicas that answer some conversations."""
    return {ask(address, [{"role": "user", "content": f"Question {number}"}])[0] for number in range(8)}


def test_conversations_stay_and_spread_over_replicas(address: str) -> None:
    for number in range(3):
        messages = [{"role": "user", "content": f"Question {number}: " + "what came of it? " * 20}]
        used = set()
        for _ in range(3):
            replica, answer = ask(address, messages)
            used.add(replica)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        assert len(used) == 1, "each turn goes to the replica that has the conversation"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert len(homes(address)) == 2, "conversations use both replicas"


def test_streams_and_refusals_pass_through(address: str) -> None:
    with sent(address, messages=[{"role": "user", "content": "Hello"}], stream=True) as answer:
        lines = [line for line in answer if line.strip()]
    assert answer.headers["content-type"].startswith("text/event-stream") and len(lines) > 4 and lines[-1] == b"data: [DONE]\n"
    with pytest.raises(HTTPError) as refused:
        sent(address, messages=[])
    assert refused.value.code == 400 and b"messages" in refused.value.read()
    with urlopen(f"{address}/v1/models", timeout=PATIENCE_S) as models:
        assert json.load(models)["data"][0]["id"] == MODEL


def test_a_server_that_is_killed_is_replaced(address: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    before = servers()
    replica, _ = ask(address, messages)
    os.kill(before[int(replica)], signal.SIGKILL)
    until = time.monotonic() + PATIENCE_S
    while len(servers()) < len(before):
        assert time.monotonic() < until, "Ray starts another replica"
        time.sleep(0.5)
    while True:
        try:
            found, _ = ask(address, messages)
            break
        except HTTPError:
            assert time.monotonic() < until, "another replica answers"
            time.sleep(0.5)
    assert found != replica
