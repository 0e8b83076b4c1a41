"""How many tokens per second does `moegraft serve` generate for 1, 8 and 32 clients? The bundled model, decoded together and one by one.

The batch is also decoded layer by layer instead of by native programs. One client is compared with `generate` in a process without a
server. Server and clients are processes of one machine and share its cores. In so small a model, Python takes as much time as the
experts, so the server itself is measured. Each request is streamed. The first round of each setting warms up. A round in which this
process was paused for half a second or more is repeated, and the rows count these rounds. `others_share` is the share of all cores' time
that other processes used.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
import yaml
from cpu_model import Clock
from record import percentiles, write_rows
from transformers import AutoTokenizer

import moegraft.injection.demo
import moegraft.rules
from moegraft.injection import optimize_and_load

SETTINGS = {"together": (32, "auto"), "together, layer by layer": (32, "eager"), "one by one": (1, "auto")}  # concurrent requests, `decode`
QUESTIONS = ("What news from Rome?", "Speak of the king.", "Who goes there, and why?", "Tell me of love.")
HELD_UP_S = 0.5
CODE = "from moegraft.injection.cli.moegraft import main; main()"


@dataclass(frozen=True, slots=True)
class Answered:
    tokens: int
    first_ms: float  # from the request to the first piece of text
    whole_ms: float


@dataclass(frozen=True, slots=True)
class Served:
    pid: int
    port: int


Provider = Callable[[int, int], Answered]  # asks the question of a number for at most so many tokens


class CoreTime:
    """CPU time since the object was created.

    Args:
        pids: the benchmark's processes, with all their threads.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began_s, self._all_s, self._own_s = time.perf_counter(), _machine_s(), sum(map(_process_s, pids))

    def others_share(self) -> float:
        """Return the share of all cores' time that other processes used, from 0 to 1."""
        others_s = _machine_s() - self._all_s - (sum(map(_process_s, self._pids)) - self._own_s)
        cores_s = (time.perf_counter() - self._began_s) * (os.cpu_count() or 1)
        return max(0.0, others_s / cores_s)


def _machine_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _process_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextmanager
def rules_with(decode: str) -> Iterator[str]:
    """Yield the path of the rules `cpu` with an option `decode` of their experts."""
    rules = yaml.safe_load((Path(moegraft.rules.__file__).parent / "cpu.yaml").read_text(encoding="utf-8"))
    next(rule for rule in rules["rules"] if rule["id"] == "experts")["replace"]["kwargs"]["decode"] = decode
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(rules, file)
        file.flush()
        yield file.name


class Generator:
    """`generate` of the bundled model in this process, asked as a server is."""

    def __init__(self, rules: str, threads: int) -> None:
        folder = Path(moegraft.injection.demo.__file__).parent
        torch.set_num_threads(threads or torch.get_num_threads())
        self._model = optimize_and_load(folder, rules, progress=False)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def ask(self, number: int, tokens: int) -> Answered:
        torch.manual_seed(number)
        messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
        began = time.perf_counter()
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        clock = Clock()
        made = self._model.generate(**prompt, max_new_tokens=tokens, do_sample=True, temperature=1.0, streamer=clock)
        self._tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        first, whole = (1e3 * (at - began) for at in (clock.times[1], time.perf_counter()))
        return Answered(made.shape[1] - prompt["input_ids"].shape[1], first, whole)


@contextmanager
def server(rules: str, max_batch: int, threads: int) -> Iterator[Served]:
    """Run a server during the body."""
    arguments = ["serve", "--rules", rules, "--port", "0", "--max-batch", str(max_batch), "--threads", str(threads)]
    running = subprocess.Popen([sys.executable, "-c", CODE, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None, "stderr is a pipe"
        output = []
        for line in running.stderr:
            output.append(line)
            if found := re.search(r" at http://[^/]*:(\d+)/v1 ", line):
                yield Served(running.pid, int(found.group(1)))
                break
        else:
            raise SystemExit(f"the server did not start; its output:\n{''.join(output)}")
    finally:
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)


def ask(port: int, number: int, tokens: int) -> Answered:
    """Send one streamed request with a seed of its own: answers of one run differ, and runs are equal."""
    messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
    body = {"messages": messages, "max_tokens": tokens, "temperature": 1, "seed": number, "stream": True}
    body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    began, first, made = time.perf_counter(), 0.0, 0
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, f"the server answered {reply.status}"
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        data = json.loads(line[6:])
        if data["choices"] and data["choices"][0]["delta"].get("content") and not first:
            first = time.perf_counter()
        made = data.get("usage", {}).get("completion_tokens", made)
    connection.close()
    now = time.perf_counter()
    return Answered(made, ((first or now) - began) * 1e3, (now - began) * 1e3)


class Pulse:
    """A thread that records the longest time for which this process was paused."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        last = time.perf_counter()
        while True:
            time.sleep(0.05)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last - 0.05)
            last = now


def one_round(provider: Provider, clients: int, first: int, tokens: int) -> tuple[float, list[Answered]]:
    """Run one round; return its seconds and its answers."""
    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        done = list(pool.map(lambda number: provider(first + number, tokens), range(clients)))
        return time.perf_counter() - start, done


def measure(
    providers: dict[str, Provider], pids: Sequence[int], clients: int, tokens: int, rounds: int, pulse: Pulse
) -> list[dict[str, object]]:
    """Return a row per provider; their rounds alternate, so that other load affects all alike."""
    taken: dict[str, list[tuple[float, list[Answered]]]] = {name: [] for name in providers}
    cores = CoreTime([os.getpid(), *pids])
    turn = disturbed = 0
    while any(len(done) < rounds for done in taken.values()):
        for name, provider in providers.items():
            pulse.longest_s = 0.0
            found = one_round(provider, clients, turn * clients, tokens)
            time.sleep(0.1)  # lets the pulse notice
            if pulse.longest_s >= HELD_UP_S:
                disturbed += 1
            elif turn:
                taken[name].append(found)
        turn += 1
    shared = {"clients": clients, "others_share": round(cores.others_share(), 3), "rounds_disturbed": disturbed}
    return [{"provider": name, **shared, **figures(done)} for name, done in taken.items()]


def figures(done: list[tuple[float, list[Answered]]]) -> dict[str, object]:
    rates = [sum(answer.tokens for answer in answers) / taken_s for taken_s, answers in done]
    answers = [answer for _, answers in done for answer in answers]
    firsts = sorted(answer.first_ms for answer in answers)
    return {
        "rounds": len(done),
        "requests": len(answers),
        "tokens": sum(answer.tokens for answer in answers),
        **percentiles(rates, "tokens_per_s", 1),
        "p50_first_ms": round(firsts[len(firsts) // 2]),
        "p80_first_ms": round(firsts[len(firsts) * 4 // 5]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="maximum number of tokens per answer")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of a server; use 1 on a shared machine, where threads wait for each other"
    )
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    pulse = Pulse()
    with ExitStack() as stack:
        providers, pids = {}, []
        for name, (most, decode) in SETTINGS.items():
            one = stack.enter_context(server(stack.enter_context(rules_with(decode)), most, arguments.threads))
            providers[name] = partial(ask, one.port)
            pids.append(one.pid)
        alone = {"generate": Generator("cpu", arguments.threads).ask}
        for clients in arguments.clients:
            measured = {**providers, **(alone if clients == 1 else {})}
            for row in measure(measured, pids, clients, arguments.tokens, arguments.rounds, pulse):
                rows.append({**row, "threads": arguments.threads})
                print(rows[-1], flush=True)
    print(write_rows("serve", rows, ("torch", "transformers", "fastapi", "uvicorn")))


if __name__ == "__main__":
    main()
