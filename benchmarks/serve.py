"""How does `moegraft serve` compare with other servers under load? Six layers of Qwen3-30B-A3B's shapes, by default from a file in Q8_0.

Both servers have equal threads, 32 places and equal contexts, and answer the same streamed requests of one asynchronous client process,
which runs on the same cores. A client sends its next request when it has an answer. Rounds alternate between the servers, each of a fixed
time of which the first part is not counted; requests that are unfinished at its end are cancelled. Prompts are random tokens, all
different, and neither server keeps what it has read, so that no prefix cache decides. Answers are sampled at temperature 1 and have equal
lengths. Where other processes disturb the rounds, compare `tokens_per_cpu_s` with `--threads 1`.

    python benchmarks/serve.py --llama-server PATH --clients 8 --prompts 32     # one case; its rows replace earlier ones of the same case
    python benchmarks/serve.py --transformers --clients 8 32 --prompts 32       # beside `transformers serve --continuous-batching`
    python benchmarks/serve.py --batch-invariant --prompts 32                   # what answers that depend on no others cost
    python benchmarks/serve.py --restart                                        # the first token of a prompt that a server before had read

With `--restart`, the time to the first token of a prompt of 4096 tokens is that of a server that has never read it, of one started again
with the same `--prefix-cache-dir`, and of the same server once more; `ratio` is the median over rounds of each over the first.

`--llama-server` is the program of that name, built from llama.cpp's sources, which the source distribution of llama-cpp-python includes:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build --target llama-server

Without it, moegraft's server is measured alone. With `--transformers`, both read one checkpoint in bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from harness.llama_cpp import cache_bytes, write_model
from harness.models import VOCABULARY, config_of, cpu_rules, random_model, rule_file
from harness.record import Recorder, parser
from harness.rounds import machine_s, median_ratio

MODEL = "qwen3-30b-a3b"
PLACES, CONTEXT = 32, 2560  # tokens of each
LAYERS = 6
SHORT, LONG, KEPT = 32, 2048, 4096  # tokens of prompts
PROMPTS = {"32": (SHORT,), "2048": (LONG,), "mixed": (SHORT, LONG)}
TOKEN_TEXT = 4  # characters of every token, by which tokens of a piece of text are counted
CODE = "from moegraft.injection.cli.moegraft import main; main()"
LIMITS_S = 180  # for a server to start, and for a request to be answered


def token_text(token: int) -> str:
    """Return the text of a token: four letters."""
    return "".join(chr(ord("a") + token // 26**place % 26) for place in range(TOKEN_TEXT))


def write_tokenizer(folder: Path) -> list[str]:
    """Write a tokenizer, and return the texts of its tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [token_text(token) for token in range(VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({text: token for token, text in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"[a-z]{{{TOKEN_TEXT}}}"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return vocabulary


def make_model(folder: Path, layers: int = LAYERS, *, checkpoint: bool = False) -> None:
    """Write a config, a tokenizer and a GGUF file, or a checkpoint in bfloat16, unless the folder has them."""
    if (folder / ("model.safetensors.index.json" if checkpoint else "model.gguf")).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary, config = write_tokenizer(folder), config_of(MODEL, layers)
    if checkpoint:
        model = random_model(config)
        assert model.generation_config is not None
        model.generation_config.update(eos_token_id=None, do_sample=True, top_k=0)
        model.save_pretrained(folder, max_shard_size="2GB")
        return
    config.save_pretrained(folder)
    unfinished = folder / "unfinished"
    write_model(unfinished, config, "int8", vocabulary)
    unfinished.rename(folder / "model.gguf")


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs."""

    name: str
    pid: int
    port: int
    model: str = ""  # of requests, whose prompts then are text


@contextmanager
def running(name: str, command: Sequence[str], folder: Path) -> Iterator[Served]:
    """Run a server during the body, which starts when the server answers."""
    port = free_port()
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            until = time.perf_counter() + LIMITS_S
            while b" 200 " not in asyncio.run(get(port, "/health")).partition(b"\r\n")[0]:
                if process.poll() is not None or time.perf_counter() > until:
                    raise SystemExit(f"{name} did not start; its output:\n{Path(log.name).read_text(encoding='utf-8')[-2000:]}")
                time.sleep(0.2)
            yield Served(name, process.pid, port, str(folder) if name == "transformers" else "")
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def serve_command(folder: Path, rules: str, threads: int, *, checkpoint: bool = False) -> list[str]:
    command = [sys.executable, "-c", CODE, "serve", "--model", str(folder), "--rules", rules, "--threads", str(threads)]
    return command if checkpoint else [*command, "--gguf", str(folder / "model.gguf")]


def commands(folder: Path, ours: Sequence[str], given: argparse.Namespace) -> dict[str, Sequence[str]]:
    """Return the commands of the servers that are compared, moegraft's first, with equal numbers of equal contexts."""
    ours = [*ours, "--max-batch", str(PLACES), "--prefix-cache", "0", "--max-client", "64"]
    ours += ["--kv-memory", str(PLACES * cache_bytes(config_of(MODEL, LAYERS), CONTEXT))]
    found: dict[str, Sequence[str]] = {"moegraft": ours}
    threads = str(given.threads)
    if given.batch_invariant:
        found["batch-invariant"] = [*ours, "--batch-invariant"]
    elif given.transformers:
        program = str(Path(sys.executable).with_name("transformers"))
        theirs = ["env", f"OMP_NUM_THREADS={threads}", program, "serve", str(folder), "--continuous-batching"]
        found["transformers"] = [*theirs, "--device", "cpu", "--dtype", "bfloat16"]
    elif given.llama_server:
        theirs = [given.llama_server, "-m", str(folder / "model.gguf"), "-t", threads, "-tb", threads, "-np", str(PLACES)]
        theirs += ["-c", str(CONTEXT * PLACES), "--no-kv-unified", "--cont-batching", "--no-cache-prompt", "--cache-ram", "0", "--no-ui"]
        # Its weights in memory of its own, as pages of a file may be dropped while the other server runs; and no token ends an answer.
        found["llama.cpp"] = [*theirs, "--load-mode", "none", "--ignore-eos"]
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


async def get(port: int, path: str) -> bytes:
    """Return what the server answers, with its head; nothing where it does not."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
    except OSError:
        return b""
    return answer


@dataclass(slots=True)
class Reply:
    """What one request has got so far: the times at which tokens arrived, each with their number."""

    prompt: int
    asked_s: float
    arrived: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        """From the request to the first token."""
        return self.arrived[0][0] - self.asked_s

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrived)

    def gaps_s(self) -> list[float]:
        """Return the times between tokens; those that arrive together have none between them."""
        found: list[float] = []
        for (before, _), (now, tokens) in itertools.pairwise(self.arrived):
            found += [now - before, *[0.0] * (tokens - 1)]
        return found


async def ask(port: int, prompt: int, tokens: int, seed: int, replies: list[Reply] | None = None, model: str = "") -> Reply:
    """Send one streamed request with a random prompt, and add its reply to `replies` at once.

    Raises:
        RuntimeError: it was refused, or ended early.
    """
    drawn = random.Random(seed)
    body = {"prompt": [drawn.randrange(VOCABULARY) for _ in range(prompt)], "max_tokens": tokens, "stream": True, "seed": seed}
    body |= {"temperature": 1.0, "top_p": 1.0}
    body |= {"model": model, "prompt": "".join(map(token_text, body["prompt"]))} if model else {"top_k": 0, "min_p": 0.0}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reply = Reply(prompt, time.perf_counter())
    if replies is not None:
        replies.append(reply)
    try:
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server answered {(status + await reader.read(2000)).decode(errors='replace')}")
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the answer failed: {event['error']}")
            text = event["choices"][0]["text"] if event["choices"] else ""
            if text:
                reply.arrived.append((time.perf_counter(), len(text) // TOKEN_TEXT))
    finally:
        writer.close()
    if reply.tokens != tokens:
        raise RuntimeError(f"expected {tokens} tokens, and the answer had {reply.tokens}")
    return reply


@dataclass(frozen=True, slots=True)
class Round:
    """The replies of one round, and the part of it that counts."""

    replies: list[Reply]
    began_s: float
    ended_s: float
    cpu_s: float = 0.0  # of the server, from the first request on

    def tokens_per_cpu_s(self) -> float:
        """Return the tokens, with prompts that were read, per second of the server's CPU time, which other processes affect little."""
        return sum(reply.tokens + reply.prompt for reply in self.replies if reply.arrived) / self.cpu_s if self.cpu_s else 0.0

    def counts(self, when: float) -> bool:
        return self.began_s <= when <= self.ended_s

    def rates(self) -> tuple[float, float]:
        """Return the tokens per second of answers, and those with the prompts that were read."""
        seconds = self.ended_s - self.began_s
        made = sum(tokens for reply in self.replies for when, tokens in reply.arrived if self.counts(when))
        read = sum(reply.prompt for reply in self.replies if reply.arrived and self.counts(reply.arrived[0][0]))
        return made / seconds, (made + read) / seconds

    def firsts_s(self) -> list[float]:
        return [reply.first_s for reply in self.replies if reply.arrived and self.counts(reply.arrived[0][0])]

    def gaps_s(self) -> list[float]:
        return [gap for reply in self.replies if reply.arrived and self.counts(reply.arrived[-1][0]) for gap in reply.gaps_s()]


async def load(server: Served, clients: int, prompts: Sequence[int], tokens: int, seconds: float, seed: int) -> Round:
    """Let clients ask one question after another for a time, of which the first fifth does not count."""
    replies: list[Reply] = []
    port, numbers = server.port, itertools.count(1000 * seed)

    async def one(client: int) -> None:
        for turn in itertools.count(client):
            await ask(port, prompts[turn % len(prompts)], tokens, next(numbers), replies, server.model)

    began, cpu_s = time.perf_counter(), _process_s(server.pid)
    asking = [asyncio.create_task(one(client)) for client in range(clients)]
    done, waiting = await asyncio.wait(asking, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    ended, cpu_s = time.perf_counter(), _process_s(server.pid) - cpu_s
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for task in done:
        task.result()  # raises what has failed
    await ask(port, 1, 1, next(numbers), model=server.model)  # answered when the server has noticed that its clients have left
    return Round(replies, began + seconds / 5, ended, cpu_s)


def figures(rounds: Sequence[Round]) -> dict[str, object]:
    """Return the medians of the rounds' rates, and the percentiles of all times."""
    made, total = zip(*(each.rates() for each in rounds), strict=True)
    found: dict[str, object] = {
        "rounds": len(rounds),
        "answer_tokens_s": round(statistics.median(made), 1),
        "tokens_s": round(statistics.median(total), 1),
        "low_tokens_s": round(min(total), 1),
        "high_tokens_s": round(max(total), 1),
        "tokens_per_cpu_s": round(statistics.median(each.tokens_per_cpu_s() for each in rounds), 1),
    }
    for name, times in (
        ("first", [value for each in rounds for value in each.firsts_s()]),
        ("between", [value for each in rounds for value in each.gaps_s()]),
    ):
        found[f"{name}_count"] = len(times)
        for share in (50, 99):
            found[f"p{share}_{name}_ms"] = round(1e3 * float(np.percentile(times, share)), 1) if times else ""
    return found


class CoreTime:
    """The share of all cores' time that other processes have used since the object was created."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._began_s, self._all_s, self._own_s = time.perf_counter(), machine_s(), sum(map(_process_s, pids))

    def others_share(self) -> float:
        others_s = machine_s() - self._all_s - (sum(map(_process_s, self._pids)) - self._own_s)
        cores_s = (time.perf_counter() - self._began_s) * (os.cpu_count() or 1)
        return round(max(0.0, others_s / cores_s), 3)


def _process_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure_load(found: Sequence[Served], clients: int, prompt: str, tokens: int, seconds: float, rounds: int) -> list[dict[str, object]]:
    """Return a row per server; the servers alternate in each round."""
    taken: dict[str, list[tuple[float, Round]]] = {server.name: [] for server in found}
    for number, server in itertools.product(range(rounds), found):
        cores = CoreTime([os.getpid(), *(each.pid for each in found)])
        done = asyncio.run(load(server, clients, PROMPTS[prompt], tokens, seconds, number))
        others = cores.others_share()
        taken[server.name].append((others, done))
        print(f"{clients} clients, {prompt}, {server.name}: {done.rates()[1]:.1f} tokens/s, others {others:.0%}", flush=True)
    shared = {"clients": clients, "prompt": prompt, "new_tokens": tokens, "round_s": seconds}
    rows = []
    for name, each in taken.items():
        row = {"case": "load", "server": name, **shared, "others_share": max(share for share, _ in each)}
        rows.append({**row, **figures([done for _, done in each])})
    return rows


def measure_restart(command: Sequence[str], folder: Path, rounds: int) -> list[dict[str, object]]:
    """Return a row for a prompt that is computed, read from disk after a restart, and known in memory; each round has its own prompt."""
    times: dict[str, list[float]] = {"computed": [], "disk": [], "memory": []}
    stored = folder / "prefixes"
    command = [*command, "--max-batch", "4", "--prefix-cache-dir", str(stored)]
    for seed in range(rounds):
        for ways in (("computed",), ("disk", "memory")):
            with running("moegraft", command, folder) as server:
                asyncio.run(ask(server.port, SHORT, 4, 10**6 + seed))
                for way in ways:
                    times[way].append(asyncio.run(ask(server.port, KEPT, 4, seed)).first_s)
                    print(f"{way}: {times[way][-1]:.3f} s", flush=True)
    size = sum(path.stat().st_size for path in stored.iterdir()) / rounds
    return [
        {
            "case": "restart",
            "server": "moegraft",
            "clients": 1,
            "prompt": f"{KEPT} {way}",
            "rounds": rounds,
            "p50_first_ms": round(1e3 * statistics.median(found), 1),
            "ratio": round(median_ratio(found, times["computed"]), 4),
            "stored_mib": round(size / 2**20, 1),
        }
        for way, found in times.items()
    ]


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--llama-server", metavar="PATH", help="llama.cpp's program llama-server")
    options.add_argument("--folder", type=Path, help="where the model is, or is written to be used again; default: a temporary folder")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--prompts", nargs="+", default=list(PROMPTS), choices=list(PROMPTS))
    options.add_argument("--tokens", type=int, default=64, help="of each answer")
    options.add_argument("--threads", type=int, default=2, help="of each server")
    options.add_argument("--seconds", type=float, default=30, help="of a round")
    options.add_argument("--transformers", action="store_true", help="compare with `transformers serve` instead")
    options.add_argument("--batch-invariant", action="store_true", help="compare with moegraft's own server with this option instead")
    options.add_argument("--restart", action="store_true", help="measure the first token of a prompt after a restart instead")
    given = options.parse_args()
    if given.transformers + given.batch_invariant + given.restart > 1:
        options.error("--transformers, --batch-invariant and --restart are cases of their own")
    key, packages = ("case", "server", "clients", "prompt"), ("torch", "transformers", "fastapi", "uvicorn")
    rows, about = Recorder("serve", packages, replaces=key, write=given.write), {"threads": given.threads}
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(folder, checkpoint=given.transformers)
        rules = stack.enter_context(rule_file(cpu_rules("bfloat16" if given.transformers else "int8")))
        ours = serve_command(folder, rules, given.threads, checkpoint=given.transformers)
        if given.restart:
            for row in measure_restart(ours, folder, given.rounds):
                rows.add({**row, **about})
            return
        found = [stack.enter_context(running(name, command, folder)) for name, command in commands(folder, ours, given).items()]
        case = {"case": "invariant"} if given.batch_invariant else {"case": "transformers"} if given.transformers else {}
        for clients, prompt in itertools.product(given.clients, given.prompts):
            for row in measure_load(found, clients, prompt, given.tokens, given.seconds, given.rounds):
                rows.add({**row, **case, **about})


if __name__ == "__main__":
    main()
