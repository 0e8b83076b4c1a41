"""How many tokens per second does `moegraft serve` generate for 1, 8 and 32 clients? The bundled model, decoded together and one by one.

Server and clients are processes of one machine and share its cores. In so small a model, Python takes as much time as the experts, so the
server itself is measured. Each request is streamed. The first round of each setting warms up. A round in which this process was paused for
half a second or more is repeated, and the rows count these rounds. `others_share` is the share of all cores' time that other processes
used.
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
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil
from record import percentiles, write_rows

SETTINGS = {"together": 32, "one by one": 1}  # requests served concurrently
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


def one_round(port: int, clients: int, first: int, tokens: int) -> tuple[float, list[Answered]]:
    """Run one round; return its seconds and its answers."""
    with ThreadPoolExecutor(clients) as pool:
        start = time.perf_counter()
        done = list(pool.map(lambda number: ask(port, first + number, tokens), range(clients)))
        return time.perf_counter() - start, done


def measure(servers: dict[str, Served], clients: int, tokens: int, rounds: int, pulse: Pulse) -> list[dict[str, object]]:
    """Return a row per server; rounds of the servers alternate, so that other load affects all alike."""
    taken: dict[str, list[tuple[float, list[Answered]]]] = {name: [] for name in servers}
    cores = CoreTime([os.getpid(), *(one.pid for one in servers.values())])
    turn = disturbed = 0
    while any(len(done) < rounds for done in taken.values()):
        for name, one in servers.items():
            pulse.longest_s = 0.0
            found = one_round(one.port, clients, turn * clients, tokens)
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
    parser.add_argument("--rules", default="cpu")
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of a server; use 1 on a shared machine, where threads wait for each other"
    )
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    pulse = Pulse()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(server(arguments.rules, most, arguments.threads)) for name, most in SETTINGS.items()}
        for clients in arguments.clients:
            for row in measure(servers, clients, arguments.tokens, arguments.rounds, pulse):
                rows.append({**row, "rules": arguments.rules, "threads": arguments.threads})
                print(rows[-1], flush=True)
    print(write_rows("serve", rows, ("torch", "transformers", "fastapi", "uvicorn")))


if __name__ == "__main__":
    main()
