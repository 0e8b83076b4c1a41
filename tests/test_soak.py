"""Long use: loading, generating and interrupting again and again changes neither answers nor what the process holds.

    pytest tests/test_soak.py               # seconds
    pytest --long -n 2 tests/test_soak.py   # 2,000 loads, 10,000 texts, 1,000 interrupts

Resident memory is a slope over rounds with its 95 % confidence: it may not be surely above a limit that a leaked tensor would pass.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT
from support.families import build_model, case_of, prompt, save_checkpoint
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load

TOKENS = 12
LOADS, TEXTS, INTERRUPTS = (3, 2000), (24, 10_000), (6, 1000)  # in the short form and in the long one
# safetensors (0.8.0) keeps an integer, 32 bytes, of every tensor or part of one that it reads, 136 in each of these loads.
KEPT_BYTES = 136 * 32
LOAD_BYTES, TEXT_BYTES = 4096 + KEPT_BYTES, 512  # growth a round; a layer of these models has 50,000 bytes, its keys of one token 128
# A short form measures few rounds: only what grows by pages each time can be told from noise.
SHORT_LOAD_BYTES, SHORT_TEXT_BYTES = 1 << 20, 1 << 20
# PyTorch keeps what it has prepared for convolutions by their shape (oneDNN, up to 1,024): qwen3_next's texts fill that in the first third.
MODELS = (("qwen3_moe", "cpu-exact"), ("gpt_oss", "cpu"), ("qwen3_next", "cpu-exact"))


def injected(model: PreTrainedModel | Path, rules: str) -> PreTrainedModel:
    found: PreTrainedModel = optimize_and_load(model, rules, progress=False, threads=2)
    return found


def generated(model: PreTrainedModel, ids: torch.Tensor, tokens: int = TOKENS, **options: Any) -> list[list[int]]:
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    return generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options).tolist()


def replayed(model: PreTrainedModel) -> int:
    found: int = model.moegraft.context.replay.replayed
    return found


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds."""

    rss: int
    descriptors: int
    threads: int
    pinned: int  # bytes that are locked in memory

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        kilobytes = {name: int(status[name].split()[0]) for name in ("VmRSS", "VmLck", "VmPin")}
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 # of a folder that changes while it is read
        return cls(kilobytes["VmRSS"] << 10, descriptors, int(status["Threads"]), (kilobytes["VmLck"] + kilobytes["VmPin"]) << 10)


def slope(values: Sequence[int]) -> tuple[float, float]:
    """Return the slope of equally spaced values, and half of its 95 % confidence interval."""
    x = np.arange(len(values)) - (len(values) - 1) / 2
    y = np.asarray(values, dtype=float)
    found = float(x @ (y - y.mean()) / (x @ x))
    residual = y - y.mean() - found * x
    # Neighbouring values are alike: the number of independent ones follows from the correlation of neighbours.
    correlation = float(residual[1:] @ residual[:-1] / max(residual @ residual, 1e-9))
    independent = max(3.0, len(values) * (1 - correlation) / (1 + max(correlation, -0.5)))
    error = np.sqrt(residual @ residual / max(independent - 2, 1) / (x @ x))
    return found, 2.0 * float(error)


def assert_flat(samples: Sequence[Held], rounds_each: int, limit: float) -> None:
    """The samples, each after `rounds_each` rounds, do not grow: the first third is warm-up."""
    kept = samples[len(samples) // 3 :]
    found, half = (value / rounds_each for value in slope([sample.rss for sample in kept]))
    text = f"resident memory grows by {found:.0f} +- {half:.0f} bytes a round"
    print(text)
    assert found - half <= limit, text
    first, last = kept[0], kept[-1]
    assert (last.descriptors, last.threads, last.pinned) == (first.descriptors, first.threads, first.pinned)


def test_loading_again_and_again(long: bool, tmp_path: Path) -> None:
    save_checkpoint(case_of("qwen3_moe"), tmp_path, shards=2)
    ids = prompt(5)
    expected = generated(injected(tmp_path, "cpu"), ids)
    rounds = LOADS[long]
    every, samples = max(1, rounds // 100), [Held.now()]
    for number in range(rounds):
        model = injected(tmp_path, "cpu")
        assert generated(model, ids) == expected
        del model
        if (number + 1) % every == 0:
            samples.append(Held.now())
    assert_flat(samples, every, LOAD_BYTES if long else SHORT_LOAD_BYTES)


@pytest.mark.parametrize(("name", "rules"), MODELS)
def test_generating_again_and_again(name: str, rules: str, long: bool) -> None:
    """Prompts, batches and numbers of tokens change; programs of decode steps come and go."""
    if not long and name != MODELS[0][0]:
        pytest.skip("pytest --long")
    model = injected(build_model(case_of(name)), rules)
    chance = random.Random(0)
    ids = prompt(7)
    expected = generated(model, ids)
    rounds = TEXTS[long] // len(MODELS)
    every, samples = max(1, rounds // 100), [Held.now()]
    for number in range(rounds):
        batch, length, tokens = chance.randint(1, 3), chance.randint(1, 40), chance.randint(1, 2 * TOKENS)
        assert len(generated(model, prompt(length, batch=batch, seed=number), tokens)) == batch
        if (number + 1) % every == 0:
            samples.append(Held.now())
    before = replayed(model)
    assert generated(model, ids) == expected and generated(model, ids) == expected
    assert replayed(model) > before
    assert_flat(samples, every, TEXT_BYTES if long else SHORT_TEXT_BYTES)


OURS = tuple(f"{ROOT}/{folder}/" for folder in ("injection", "operators", "cpu_backend"))
MODES = "torch/utils/_python_dispatch.py"


class Points:
    """Counts the points of the project's code, and of PyTorch's dispatch modes, where Python handles signals; can press Ctrl-C.

    They are the beginnings of functions and the ends of calls of functions in C.
    """

    def __init__(self, at: int | None = None, file: str = "", function: str | None = None) -> None:
        self.count = 0
        self._at = at
        self._file = file
        self._function = function

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        name = frame.f_code.co_filename
        ours = "moegraft" in name or name.startswith(OURS) or name.endswith(MODES)
        if event in ("call", "c_return") and ours and name.endswith(self._file):
            if self._function not in (None, frame.f_code.co_name):
                return
            self.count += 1
            if self.count == self._at:
                sys.setprofile(None)
                raise KeyboardInterrupt


def stopped(act: Callable[[], object], points: Points) -> bool:
    """Whether `act` was interrupted."""
    sys.setprofile(points)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def timed(act: Callable[[], object], seconds: float) -> bool:
    """Whether `act` was interrupted after `seconds`."""
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    # Again, as Python drops an interrupt that arrives in a callback of its garbage collector.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    return False


@pytest.mark.parametrize(("name", "rules"), MODELS)
@pytest.mark.parametrize("how", ["at points", "at times"])
def test_interrupted_texts(how: str, name: str, rules: str, long: bool) -> None:
    """After Ctrl-C anywhere in a text the model answers as before, and its steps are replayed as before."""
    model = injected(build_model(case_of(name)), rules)
    chance, ids = random.Random(how), prompt(7)
    expected = generated(model, ids)

    def text() -> None:
        generated(model, prompt(chance.randint(1, 9), batch=chance.randint(1, 2), seed=3))

    points = Points()
    began = time.perf_counter()
    text()
    seconds = time.perf_counter() - began
    stopped(text, points)
    interrupts = INTERRUPTS[long] // (2 * len(MODELS))
    caught, threads = 0, threading.active_count()
    for _ in range(interrupts):
        if how == "at points":
            caught += stopped(text, Points(chance.randint(1, points.count)))
        else:
            caught += timed(text, chance.uniform(1e-4, seconds))
        assert generated(model, ids) == expected
    assert caught > interrupts // 3
    assert generated(model, ids) == expected
    before = replayed(model)
    assert generated(model, ids) == expected
    assert replayed(model) > before, model.moegraft.context.replay.statistics()
    assert threading.active_count() == threads


@pytest.mark.parametrize("function", ["__enter__", "__exit__", "_pop_mode"])
def test_interrupted_recordings_leave_no_mode(function: str) -> None:
    """Ctrl-C while PyTorch enters or leaves the mode of a recording keeps no other model from being replayed."""
    name, rules = MODELS[0]
    ids = prompt(7)
    model = injected(build_model(case_of(name)), rules)
    before = is_in_torch_dispatch_mode()  # a captured step that failed in an earlier test may have left it
    assert stopped(lambda: generated(model, ids), Points(1, MODES, function))
    assert torch._C._len_torch_dispatch_stack() == 0 and is_in_torch_dispatch_mode() == before
    other = injected(build_model(case_of(name)), rules)
    generated(other, ids)
    assert replayed(other) > 0


def test_interrupted_steps(long: bool) -> None:
    """Ctrl-C at each point of what replays steps, from the recording of the first to their replay, has no lasting effect."""
    name, rules = MODELS[0]
    ids = prompt(7)
    place = ("/decode/replay.py", None if long else "forward")  # where a step begins and ends
    every = Points(None, *place)
    model = injected(build_model(case_of(name)), rules)
    expected = generated(model, ids)
    stopped(lambda: generated(model, ids), every)
    for at in range(1, (every.count if long else 8) + 1):
        points = Points(at, *place)
        assert stopped(lambda points=points: generated(model, ids), points), at  # type: ignore[misc]
        before = replayed(model)
        assert generated(model, ids) == expected and replayed(model) > before, at


def test_interrupted_loads(long: bool, tmp_path: Path) -> None:
    """After Ctrl-C anywhere in loading nothing is left, and the next load is right."""
    save_checkpoint(case_of("qwen3_moe"), tmp_path / "model", shards=2)
    rules = tmp_path / "rules.yaml"
    options = f"weights: int8, cache_dir: '{tmp_path / 'cache'}'"
    rules.write_text(f"version: 1\nrules:\n- {{match: {{kind: experts}}, replace: {{class: hybrid_experts, kwargs: {{{options}}}}}}}\n")
    chance, ids = random.Random(0), prompt(5)

    def load() -> None:
        for file in (tmp_path / "cache").glob("*") if chance.random() < 0.5 else ():
            file.unlink()
        injected(tmp_path / "model", str(rules))

    expected = generated(injected(tmp_path / "model", str(rules)), ids)
    points = Points()
    stopped(load, points)
    held = Held.now()
    for number in range(INTERRUPTS[long] // 6):
        stopped(load, Points(chance.randint(1, points.count)))
        assert not list((tmp_path / "cache").glob("*.part"))
        if number % 10 == 0:
            assert generated(injected(tmp_path / "model", str(rules)), ids) == expected
    now = Held.now()
    assert (now.descriptors, now.threads) == (held.descriptors, held.threads)
