"""Packed experts on disk: the second load packs nothing, and a stale or damaged file is never used."""

import logging
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from moegraft.cpu_backend import PackedExperts
from moegraft.injection import optimize_and_load
from moegraft.operators.errors import CheckpointError
from moegraft.operators.experts import packed_cache

IDS = torch.tensor([[5, 17, 33, 60, 3, 8, 61]])
LAYERS = 2


def save_model(folder: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Setup:
    """A checkpoint, a cache folder and rules that use it, with a count of the packed matrices."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkpoint, self.cache, self._rules = folder / "model", folder / "cache", folder / "rules.yaml"
        save_model(self.checkpoint)
        self.weights = "int8"
        self.packs = 0
        pack = PackedExperts.pack

        def counting(packed: PackedExperts, *arguments: object) -> None:
            self.packs += 1
            pack(packed, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(packed_cache, "CHECK_THREADS", 2)
        monkeypatch.setattr(PackedExperts, "pack", counting)

    def load(self, *, cached: bool = True) -> PreTrainedModel:
        cache = f", cache_dir: '{self.cache}'" if cached else ""
        self._rules.write_text(
            "version: 1\nrules:\n- match: {kind: experts}\n"
            f"  replace: {{class: hybrid_experts, kwargs: {{weights: {self.weights}{cache}}}}}\n"
        )
        self.packs = 0
        return optimize_and_load(self.checkpoint, self._rules, progress=False)

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            return self.load()(IDS).logits

    def files(self) -> list[Path]:
        return sorted(self.cache.iterdir())


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(tmp_path, monkeypatch)


@pytest.mark.parametrize("weights", ["int8", "int4", "stored", "bfloat16"])
def test_second_load_maps_what_the_first_packed(setup: Setup, weights: str) -> None:
    setup.weights = weights
    first = setup.logits()
    assert setup.packs == LAYERS * 5 * 3
    assert len(setup.files()) == LAYERS
    second = setup.logits()
    assert setup.packs == 0
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
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(setup.logits(), expected)
    assert setup.packs == 5 * 3
    assert str(file) in caplog.text and "damaged" in caplog.text
    setup.load()
    assert setup.packs == 0


@pytest.mark.parametrize("size", [0, 100, packed_cache.HEADER_BYTES, packed_cache.HEADER_BYTES + 64])
def test_a_truncated_file_is_rebuilt(setup: Setup, size: int) -> None:
    expected = setup.logits()
    os.truncate(setup.files()[1], size)
    assert torch.equal(setup.logits(), expected)
    assert setup.packs == 5 * 3


def test_changed_weights_are_never_served_from_the_cache(setup: Setup) -> None:
    before = setup.logits()
    save_model(setup.checkpoint, seed=1)
    after = setup.logits()
    assert setup.packs == LAYERS * 5 * 3
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
    first.write_bytes(second.read_bytes())
    assert torch.equal(setup.logits(), expected)
    assert setup.packs == 5 * 3


def test_an_interrupted_build_leaves_nothing(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PackedExperts, "pack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup.load()
    assert setup.files() == []


def test_a_folder_that_cannot_be_written_is_named(setup: Setup) -> None:
    setup.cache.write_text("a file, not a folder")
    with pytest.raises(CheckpointError, match=r"cache.*cannot write the packed experts"):
        setup.load()


def test_a_model_in_memory_logs_that_the_cache_is_not_used(setup: Setup) -> None:
    setup.load()
    model = AutoModelForCausalLM.from_pretrained(setup.checkpoint)
    with pytest.warns(UserWarning, match="cache_dir is ignored"):
        optimize_and_load(model, setup._rules, progress=False)


def test_two_concurrent_builds_of_one_layer_do_not_interfere(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, or the first processes of two containers, may start with one empty cache."""
    expected, pack, inner = setup.load(cached=False), PackedExperts.pack, []

    def interrupted(packed: PackedExperts, *arguments: object) -> None:
        if not inner:
            inner.append(None)
            inner.append(setup.load())
        pack(packed, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedExperts, "pack", interrupted)
    outer = setup.load()
    with torch.no_grad():
        for model in (outer, inner[1], setup.load()):
            assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert len(setup.files()) == LAYERS
