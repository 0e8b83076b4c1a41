"""Packed experts on disk: the second load packs nothing, and a stale or damaged file is never used."""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.families import save_unloadable, tiny_model, written
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.cpu_backend import PackedExperts
from moegraft.injection import optimize_and_load
from moegraft.injection.checkpoint.files import STRIPE_BYTES, STRIPES
from moegraft.operators.errors import NotEnoughMemoryError
from moegraft.operators.experts import packed_cache
from moegraft.operators.experts.packed_cache import PackedCache, key_for
from moegraft.operators.layout import read_layout

IDS = torch.tensor([[5, 17, 33, 60, 3, 8, 61]])
LAYERS = 2


class Setup:
    """A checkpoint, a cache folder and rules that use it, with the number of layers that the latest load has packed there."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint, self.cache, self.rules = folder / "model", folder / "cache", folder / "rules.yaml"
        tiny_model().save_pretrained(self.checkpoint)
        self.weights = "int8"
        self.packed = 0

    def load(self, *, cached: bool = True) -> PreTrainedModel:
        cache = f", cache_dir: '{self.cache}'" if cached else ""
        self.rules.write_text(
            "version: 1\nrules:\n- match: {kind: experts}\n"
            f"  replace: {{class: hybrid_experts, kwargs: {{weights: {self.weights}{cache}}}}}\n"
        )
        before = self._written()
        model = optimize_and_load(self.checkpoint, self.rules, progress=False)
        self.packed = len(self._written().items() - before.items())
        return model

    def _written(self) -> dict[str, tuple[int, int]]:
        return written(self.cache) if self.cache.is_dir() else {}

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            return self.load()(IDS).logits

    def files(self) -> list[Path]:
        return sorted(self.cache.iterdir())


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


@pytest.mark.parametrize("weights", ["int8", "int4", "stored", "bfloat16"])
def test_second_load_maps_what_the_first_packed(setup: Setup, weights: str) -> None:
    setup.weights = weights
    first = setup.logits()
    assert setup.packed == LAYERS
    assert len(setup.files()) == LAYERS
    second = setup.logits()
    assert setup.packed == 0
    assert torch.equal(first, second)
    with torch.no_grad():
        in_memory = setup.load(cached=False)(IDS).logits
    assert torch.equal(first, in_memory)


def test_packed_bytes_are_planned_as_mapped(setup: Setup) -> None:
    plan = setup.load().moegraft.plan
    assert plan.bytes_by_device["disk"] == sum(file.stat().st_size - packed_cache.HEADER_BYTES for file in setup.files())


@pytest.mark.parametrize("where", ["header", "first expert", "last byte"])
def test_a_damaged_file_is_found_and_rebuilt(setup: Setup, where: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = setup.logits()
    file = setup.files()[0]
    content = bytearray(file.read_bytes())
    position = {"header": 60, "first expert": packed_cache.HEADER_BYTES + 7, "last byte": len(content) - 1}[where]
    content[position] ^= 0x40
    file.chmod(0o644)
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(setup.logits(), expected)
    assert setup.packed == 1
    assert str(file) in caplog.text and "damaged" in caplog.text
    setup.load()
    assert setup.packed == 0


@pytest.mark.parametrize("size", [0, 100, packed_cache.HEADER_BYTES, packed_cache.HEADER_BYTES + 64])
def test_a_truncated_file_is_rebuilt(setup: Setup, size: int) -> None:
    expected = setup.logits()
    setup.files()[1].chmod(0o644)
    os.truncate(setup.files()[1], size)
    assert torch.equal(setup.logits(), expected)
    assert setup.packed == 1


def test_changed_weights_are_never_served_from_the_cache(setup: Setup) -> None:
    before = setup.logits()
    tiny_model(seed=1).save_pretrained(setup.checkpoint)
    after = setup.logits()
    assert setup.packed == LAYERS
    with torch.no_grad():
        fresh = setup.load(cached=False)(IDS).logits
    assert torch.equal(after, fresh) and not torch.equal(after, before)


def test_another_weight_type_has_files_of_its_own(setup: Setup) -> None:
    setup.load()
    setup.weights = "int4"
    setup.load()
    assert len(setup.files()) == 2 * LAYERS


def test_a_file_under_another_layers_name_is_not_used(setup: Setup) -> None:
    expected = setup.logits()
    first, second = setup.files()
    first.chmod(0o644)
    first.write_bytes(second.read_bytes())
    assert torch.equal(setup.logits(), expected)
    assert setup.packed == 1


@pytest.mark.parametrize("reason", ["no folder", "full disk", "failing disk"])
def test_experts_that_cannot_be_written_are_packed_in_memory(
    setup: Setup, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad():
        expected = setup.load(cached=False)(IDS).logits
    name, number = {
        "no folder": ("mkdir", errno.EROFS),
        "full disk": ("posix_fallocate", errno.ENOSPC),
        "failing disk": ("fsync", errno.EIO),
    }[reason]

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        assert torch.equal(setup.logits(), expected)
    assert not setup.cache.exists() or setup.files() == []
    found = [record.getMessage() for record in caplog.records if "cannot write packed experts" in record.message]
    assert len(found) == 1, "for the whole model"
    assert str(setup.cache) in found[0] and os.strerror(number) in found[0] and "packed in memory" in found[0]
    assert torch.equal(setup.logits(), expected)
    assert len(setup.files()) == LAYERS


def test_experts_that_fit_neither_on_disk_nor_in_memory(setup: Setup) -> None:
    shutil.rmtree(setup.checkpoint)
    save_unloadable(setup.checkpoint)
    setup.cache.write_text("a file, not a folder")
    with pytest.raises(NotEnoughMemoryError, match=r"cannot write packed experts to cache_dir .*cache .*memory has .*B free"):
        setup.load()


def test_a_model_in_memory_logs_that_the_cache_is_not_used(setup: Setup) -> None:
    setup.load()
    model = AutoModelForCausalLM.from_pretrained(setup.checkpoint)
    with pytest.warns(UserWarning, match="cache_dir is ignored"):
        optimize_and_load(model, setup.rules, progress=False)


def test_one_of_several_packs_and_the_others_map(tmp_path: Path) -> None:
    """As processes do that start together: each waits for the one that packs."""
    with torch.device("meta"):
        layout = read_layout(Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=40, num_experts=5)))
    key = key_for("some checkpoint", layout, "float32")
    fills, found = [], []

    def fill(packed: PackedExperts) -> None:
        fills.append(packed)
        for expert in range(5):
            for part, shape in (("gate", (40, 64)), ("up", (40, 64)), ("down", (64, 40))):
                packed.pack(expert, part, np.full(shape, expert, np.float32))

    threads = [threading.Thread(target=lambda: found.append(PackedCache(tmp_path).build(key, layout, fill))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fills) == 1
    assert len(found) == 4
    assert all(np.array_equal(packed.buffer, fills[0].buffer) for packed in found)
    assert len(list(tmp_path.iterdir())) == 1


def test_files_stay_for_processes_that_map_them(setup: Setup) -> None:
    """A file is replaced or removed, never changed: what is mapped stays as it was."""
    model = setup.load()
    with torch.no_grad():
        expected = model(IDS).logits
    for file in setup.files():
        assert file.stat().st_mode & 0o222 == 0, "no program changes it by accident"
        file.unlink()
    setup.weights = "int4"
    setup.load()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)


def in_place(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change a file's bytes and restore its time."""
    before, content = path.stat(), bytearray(path.read_bytes())
    change(content)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns


def test_weights_changed_in_place_are_never_served_from_the_cache(setup: Setup) -> None:
    """Not even where size and time stay, and no byte that is sampled changes."""
    tiny_model(vocab_size=20_000).save_pretrained(setup.checkpoint)  # in a file that is larger than what is read of one
    assert (setup.checkpoint / "model.safetensors").stat().st_size > 4 * STRIPES * STRIPE_BYTES
    before = setup.logits()
    tensors = load_file(setup.checkpoint / "model.safetensors")
    name = next(name for name in tensors if name.endswith("mlp.experts.2.up_proj.weight"))
    value = tensors[name][20, 30].numpy().tobytes()

    def negate(content: bytearray) -> None:
        assert content.count(value) == 1
        content[content.index(value) + 3] ^= 0x80

    in_place(setup.checkpoint / "model.safetensors", negate)
    after = setup.logits()
    assert setup.packed == LAYERS
    with torch.no_grad():
        fresh = setup.load(cached=False)(IDS).logits
    assert torch.equal(after, fresh) and not torch.equal(after, before)


def test_another_version_packs_its_own_files(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are converted by this package and by transformers, whose next version may do it differently."""
    setup.load()
    monkeypatch.setattr(packed_cache, "_converters", lambda: "moegraft 9.0")
    setup.load()
    assert setup.packed == LAYERS
    assert len(setup.files()) == 2 * LAYERS
