"""Experts in frames: computed with from files, to the bit as from memory, whatever is in memory and however it is read."""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.kernel_cases import Layer, make_batch, make_layer

from moegraft.cpu_backend import CachePolicy, ExpertFrames, PackedExperts, Runtime, crc32

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 12, 2, 96, 64
LEAST = EXPERTS + 6  # frames: a layer, four readers and two copies
Floats = NDArray[np.float32]


@dataclass
class Stored:
    """Layers in one file, once in memory and once in frames."""

    path: Path
    layers: list[Layer]
    packed: list[PackedExperts]
    offsets: list[int]
    frames: ExpertFrames

    def forward(self, runtime: Runtime, layer: int, tokens: int, seed: int = 0, threshold: float = 0.0) -> Floats:
        """Compute a layer from frames, and check that the result is that from memory."""
        x, index, weights = (each.numpy() for each in make_batch(tokens, TOP_K, self.layers[layer], seed=seed))
        out, expected = np.empty_like(x), np.empty_like(x)
        runtime.forward(self.layers[layer].packed, x, index, weights, expected, threshold=threshold)
        runtime.forward(self.packed[layer], x, index, weights, out, threshold=threshold)
        assert np.array_equal(out, expected)
        return out


def store(
    folder: Path,
    layers: int,
    frames: int,
    *,
    weight_type: str = "int8",
    sparse: bool = False,
    offset: int = 64,
    checked: bool = True,
    policy: CachePolicy | None = None,
) -> Stored:
    """Write layers of random experts, `offset` bytes in front of each, and open frames for them."""
    made = [make_layer(weight_type, EXPERTS, HIDDEN, INTERMEDIATE, sparse=sparse, seed=number) for number in range(layers)]
    path, offsets = folder / "experts.bin", []
    with path.open("wb") as file:
        for layer in made:
            file.write(bytes(offset))
            offsets.append(file.tell())
            file.write(layer.packed.buffer.tobytes())
    first = made[0].packed
    held = ExpertFrames()
    packed = []
    for layer, begin in zip(made, offsets, strict=True):
        mapped = np.asarray(np.memmap(path, np.uint8, "r", begin, first.nbytes))
        experts = PackedExperts(first.shape, layer.packed.gate_spec, weight_type, mapped, sparse=sparse)
        checksums = [zlib.crc32(expert) for expert in layer.packed.buffer.reshape(EXPERTS, -1)] if checked else []
        held.add(experts, str(path), begin, checksums)
        packed.append(experts)
    held.open(frames * held.frame_bytes, policy)
    assert held.least_frames == LEAST
    return Stored(path, made, packed, offsets, held)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("weight_type", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("offset", [64, 4096, 8192 + 128])
def test_results_are_those_from_memory(tmp_path: Path, runtimes: dict[str, Runtime], weight_type: str, sparse: bool, offset: int) -> None:
    stored = store(tmp_path, 4, LEAST, weight_type=weight_type, sparse=sparse, offset=offset)
    runtime = next(iter(runtimes.values()))
    for step, tokens in enumerate([1, 2, 40, 1, 1, 300, 3]):
        for layer in range(4):
            stored.forward(runtime, layer, tokens, seed=step)
    counts = stored.frames.counts()
    assert counts["reads"] > stored.frames.frames, "experts had to be read again"
    assert counts["resident"] + counts["arriving"] <= counts["demanded"]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_number_of_threads(tmp_path: Path, threads: int) -> None:
    stored = store(tmp_path, 3, LEAST)
    runtime = Runtime(threads=threads)
    for step in range(6):
        for layer in range(3):
            stored.forward(runtime, layer, [1, 5, 64][step % 3], seed=step)


def test_what_is_in_memory_is_not_read_again(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 2, 2 * EXPERTS + 6)
    runtime = next(iter(runtimes.values()))
    for step in range(4):
        for layer in range(2):
            stored.forward(runtime, layer, 64, seed=step)
    counts = stored.frames.counts()
    assert counts["reads"] == 2 * EXPERTS == len(stored.frames.residents(0)) + len(stored.frames.residents(1))
    assert counts["read_bytes"] >= 2 * EXPERTS * stored.packed[0].expert_bytes


def test_frequent_experts_stay(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 4, LEAST)
    runtime, rng = next(iter(runtimes.values())), np.random.default_rng(0)
    x, out = np.ones((1, HIDDEN), np.float32), np.empty((1, HIDDEN), np.float32)
    weights = np.array([[0.7, 0.3]], np.float32)
    for _ in range(200):
        for layer in range(4):
            other = int(rng.integers(3, EXPERTS))
            chosen = np.array([[layer if rng.random() < 0.8 else 3 + layer, other]], np.int64)
            runtime.forward(stored.packed[layer], x, chosen, weights, out)
    for layer in range(4):
        assert layer in stored.frames.residents(layer)


@pytest.mark.parametrize("name", ["mrs", "lru", "lfu", "score_frequency", "static"])
def test_experts_stay_by_the_rank_of_the_policy(name: str, tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    """Compared with a loop that evicts one expert at a time, of all layers the lowest."""
    rng = np.random.default_rng(3)
    profile = rng.permutation(4 * EXPERTS).reshape(4, EXPERTS) if name == "static" else None
    policy, expected = (CachePolicy(name, 4, EXPERTS, alpha=0.2, frequency_alpha=0.05, profile=profile) for _ in range(2))
    stored = store(tmp_path, 4, LEAST, policy=policy)
    runtime = next(iter(runtimes.values()))
    x, out = np.ones((1, HIDDEN), np.float32), np.empty((1, HIDDEN), np.float32)
    resident: set[tuple[int, int]] = set()
    hits = 0
    for step in range(400):
        layer, chosen = step % 4, int(EXPERTS * rng.random() ** 2)
        weight = np.float32(rng.uniform(0.1, 1))
        runtime.forward(stored.packed[layer], x, np.array([[chosen]]), np.array([[weight]]), out)
        scores = np.zeros((1, 1, EXPERTS), np.float32)
        scores[0, 0, chosen] = weight
        expected.update([layer], scores, np.array([[[chosen]]]))
        hits += (layer, chosen) in resident
        if (layer, chosen) not in resident and len(resident) == LEAST:
            ranks = expected.priorities()
            resident.remove(min(resident, key=lambda place: ranks[place]))
        resident.add((layer, chosen))
    assert {(layer, expert) for layer in range(4) for expert in stored.frames.residents(layer)} == resident
    assert stored.frames.counts()["resident"] == hits


@pytest.mark.parametrize("biased", [False, True])
def test_a_router_predicts_the_next_layer(biased: bool, tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 2, LEAST)
    runtime = next(iter(runtimes.values()))
    rows = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(5))
    bias = 9 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(7)) if biased else torch.zeros(EXPERTS)
    stored.frames.set_router(1, rows, bias if biased else None)
    generator = torch.Generator().manual_seed(6)
    out = np.empty((1, HIDDEN), np.float32)
    for _ in range(60):
        x = torch.randn(1, HIDDEN, generator=generator)
        weights, chosen = (x @ rows.T + bias).softmax(-1).topk(TOP_K)
        anywhere = torch.randint(0, EXPERTS // 2, (1, TOP_K), generator=generator) * 2 + torch.tensor([[0, 1]])
        runtime.forward(stored.packed[0], x.numpy(), anywhere.numpy(), weights.numpy(), out)
        time.sleep(0.002)  # for the prediction, in most steps
        runtime.forward(stored.packed[1], x.numpy(), chosen.numpy(), weights.numpy(), out)
    counts = stored.frames.counts()
    assert counts["predicted"] > 0
    assert counts["precision"] > 0.7, "every prediction that was compared was right"
    assert counts["unused"] == 0


def test_wrong_predictions_are_given_up(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 2, LEAST)
    runtime = next(iter(runtimes.values()))
    rows = torch.zeros(EXPERTS, HIDDEN)
    rows[:TOP_K] = 1  # always the first two
    stored.frames.set_router(1, rows)
    x, out, weights = np.ones((1, HIDDEN), np.float32), np.empty((1, HIDDEN), np.float32), np.array([[0.5, 0.5]], np.float32)
    for step in range(4000):
        runtime.forward(stored.packed[0], x, np.array([[step % EXPERTS, (step + 1) % EXPERTS]]), weights, out)
        runtime.forward(stored.packed[1], x, np.array([[4 + step % 8, 4 + (step + 1) % 8]]), weights, out)
        if stored.frames.counts()["precision"] < 0.25:
            break
    before = stored.frames.counts()["predicted"]
    for step in range(50):
        runtime.forward(stored.packed[0], x, np.array([[step % EXPERTS, (step + 1) % EXPERTS]]), weights, out)
        runtime.forward(stored.packed[1], x, np.array([[4 + step % 8, 4 + (step + 1) % 8]]), weights, out)
    assert stored.frames.counts()["predicted"] == before


def test_an_expert_is_verified_when_it_is_first_read(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 2, LEAST)
    runtime = next(iter(runtimes.values()))
    with stored.path.open("r+b") as file:
        file.seek(stored.offsets[1] + 5 * stored.packed[1].expert_bytes + 100)
        file.write(b"\xaa\x55\xaa")
    x, out = np.ones((1, HIDDEN), np.float32), np.empty((1, HIDDEN), np.float32)
    weights = np.array([[0.5, 0.5]], np.float32)
    runtime.forward(stored.packed[1], x, np.array([[4, 6]]), weights, out)
    for _ in range(2):  # it is not used at a second attempt either
        with pytest.raises(RuntimeError, match=r"experts\.bin: expert 5 at byte \d+ is damaged .*: remove the file"):
            runtime.forward(stored.packed[1], x, np.array([[5, 6]]), weights, out)
    runtime.forward(stored.packed[1], x, np.array([[4, 6]]), weights, out)
    assert np.isfinite(out).all()


def test_a_file_that_is_cut_off_later(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 2, LEAST)
    runtime = next(iter(runtimes.values()))
    whole = stored.path.read_bytes()
    stored.forward(runtime, 0, 1)
    os.truncate(stored.path, stored.offsets[1] + 3 * stored.packed[1].expert_bytes)
    with pytest.raises(RuntimeError, match=r"is not there: the file was cut off"):
        runtime.forward(
            stored.packed[1],
            np.ones((1, HIDDEN), np.float32),
            np.array([[2, 9]]),
            np.array([[0.5, 0.5]], np.float32),
            np.empty((1, HIDDEN), np.float32),
        )
    stored.path.write_bytes(whole)
    stored.forward(runtime, 1, 40)  # nothing of the failure is left


def test_copies(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 3, LEAST)
    runtime = next(iter(runtimes.values()))
    for layer in range(3):
        stored.forward(runtime, layer, 40)
        for expert in range(EXPERTS):
            size = stored.packed[layer].expert_bytes
            out = np.empty(size - 70, np.uint8)
            stored.frames.copy(layer, expert, 70, out)
            assert np.array_equal(out, stored.packed[layer].buffer.reshape(EXPERTS, size)[expert, 70:])
    with pytest.raises(ValueError, match="no such bytes"):
        stored.frames.copy(0, 0, 1, np.empty(stored.packed[0].expert_bytes, np.uint8))


def test_experts_that_are_asked_for_arrive(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 2, LEAST)
    assert not stored.frames.in_memory(1, 3)
    stored.frames.ask(1, [3, 5, 3])
    end = time.monotonic() + 20
    while not (stored.frames.in_memory(1, 3) and stored.frames.in_memory(1, 5)):
        assert time.monotonic() < end
        time.sleep(0.001)
    stored.frames.ask(1, [3])
    assert stored.frames.counts()["reads"] == 2
    for wrong in (EXPERTS, -1):
        with pytest.raises(ValueError, match=f"layer 1 has no expert {wrong}"):
            stored.frames.ask(1, [wrong])
        with pytest.raises(ValueError, match=f"layer 1 has no expert {wrong}"):
            stored.frames.in_memory(1, wrong)
    stored.forward(next(iter(runtimes.values())), 1, 40)


def test_a_pinned_expert_stays(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 3, LEAST)
    stored.frames.pin(0, 1)
    for step in range(6):
        for layer in (1, 2):
            stored.forward(next(iter(runtimes.values())), layer, 40, seed=step)
        assert stored.frames.in_memory(0, 1)
    stored.frames.unpin(0, 1)
    for layer in (1, 2, 1, 2):
        stored.forward(next(iter(runtimes.values())), layer, 40)
    assert not stored.frames.in_memory(0, 1)


def test_a_copy_that_fails_leaves_nothing_behind(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 2, LEAST)
    runtime, size = next(iter(runtimes.values())), stored.packed[0].expert_bytes
    with stored.path.open("r+b") as file:
        file.seek(stored.offsets[0] + 5 * size)
        right = file.read(4)
        file.seek(-4, os.SEEK_CUR)
        file.write(b"\xaa\x55\xaa\x55")
    out = np.empty(size, np.uint8)
    with pytest.raises(RuntimeError, match=r"expert 5 at byte \d+ is damaged"):
        stored.frames.copy(0, 5, 0, out)
    stored.forward(runtime, 1, 1)  # other experts, whose job has no error
    with stored.path.open("r+b") as file:
        file.seek(stored.offsets[0] + 5 * size)
        file.write(right)
    stored.frames.copy(0, 5, 0, out)
    assert np.array_equal(out, stored.packed[0].buffer.reshape(EXPERTS, size)[5])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_no_frames(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 2, LEAST)
    runtime, out = next(iter(runtimes.values())), np.empty(8, np.uint8)
    stored.forward(runtime, 0, 40)
    child = os.fork()
    if child == 0:
        try:
            stored.frames.copy(1, 0, 0, out)
        except RuntimeError as error:
            os._exit(0 if "load the model in the child process" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stored.forward(runtime, 1, 40)  # the parent goes on


def test_gradients_from_frames(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    stored = store(tmp_path, 3, LEAST, weight_type="float32")
    runtime = next(iter(runtimes.values()))
    for layer in range(3):
        x, index, weights = make_batch(9, TOP_K, stored.layers[layer])
        found = []
        for packed in (stored.packed[layer], stored.layers[layer].packed):
            gradients = torch.empty_like(x), torch.empty_like(weights)
            runtime.experts_gradient(packed, x, index, weights, torch.ones_like(x), *gradients)
            found.append(gradients)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_refusals(tmp_path: Path, runtimes: dict[str, Runtime]) -> None:
    layer = make_layer("int8", EXPERTS, HIDDEN, INTERMEDIATE)
    path = tmp_path / "experts.bin"
    path.write_bytes(bytes(64) + layer.packed.buffer.tobytes()[:-1])
    frames = ExpertFrames()
    with pytest.raises(RuntimeError, match=r"experts\.bin: expected at least \d+ bytes, found \d+"):
        frames.add(layer.packed, str(path), 64)
    with pytest.raises(RuntimeError, match=r"nothing: No such file"):
        frames.add(layer.packed, str(tmp_path / "nothing"), 64)
    path.write_bytes(bytes(64) + layer.packed.buffer.tobytes())
    with pytest.raises(ValueError, match="multiple of 64"):
        frames.add(layer.packed, str(path), 32)
    with pytest.raises(ValueError, match="checksum for each of 12 experts, found 2"):
        frames.add(layer.packed, str(path), 64, [1, 2])
    with pytest.raises(ValueError, match="no layer"):
        frames.open(1 << 20)
    frames.add(layer.packed, str(path), 64)
    x, out = np.ones((1, HIDDEN), np.float32), np.empty((1, HIDDEN), np.float32)
    with pytest.raises(ValueError, match="before these were opened"):
        next(iter(runtimes.values())).forward(layer.packed, x, np.array([[1]]), np.ones((1, 1), np.float32), out)
    small = ExpertFrames()
    small.add(layer.packed, str(path), 64)
    with pytest.raises(ValueError, match=r"holds \d+ experts; a layer and what is read ahead need 18, that is \d+ bytes"):
        small.open(ExpertFrames.least_bytes_for(EXPERTS, layer.packed.expert_bytes) - 1)
    for layers, experts in ((2, EXPERTS), (1, EXPERTS - 1)):
        with pytest.raises(ValueError, match=f"the cache policy is for {layers} layers of {experts} experts, and there are 1 of 12"):
            small.open(LEAST * small.frame_bytes, CachePolicy("lru", layers, experts))
    with pytest.raises(ValueError, match="readers is 0"):
        ExpertFrames(0)


def test_checksums_are_those_of_zlib() -> None:
    """Every length around the blocks that are computed at once, and every alignment."""
    data = np.random.default_rng(0).integers(0, 256, 1 << 17, np.uint8)
    for length in [*range(300), 4095, 4096 + 17, len(data) - 64]:
        for start in (0, 1, 7, 63):
            part = data[start : start + length]
            assert crc32(part) == zlib.crc32(part), (start, length)
    with pytest.raises(TypeError, match="uint8"):
        crc32(np.zeros(3, np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data"):
        crc32(data[::2])
