"""Prefixes on disk: what a server computed is read after a restart, and nothing else is; no file can break an answer."""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from support import combinations
from support.families import build_model, case_of, prompt
from support.serving import ask, serving
from transformers import PreTrainedModel
from typer.testing import CliRunner

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.models import LoadedModel
from moegraft.injection.cli.moegraft import app
from moegraft.injection.cli.options import OptionsError
from moegraft.injection.cli.serve import prefix_files
from moegraft.injection.cli.serve.open_pool import open_pool
from moegraft.injection.cli.serve.pages import SequencePool
from moegraft.injection.cli.serve.prefix_files import PART_TOKENS, PrefixFiles
from moegraft.injection.cli.serve.service import Limits, Service
from moegraft.operators.decode.pages import PAGE_TOKENS

ATTENTION = ("qwen3_moe", "gpt_oss", "deepseek_v3")  # of which one has sliding windows, and one a latent cache
RECURRENT = ("qwen3_next", "jamba", "zaya")  # a delta rule, Mamba, and states beside keys and values in one layer
LENGTH = 2 * PART_TOKENS + 50
Pools = Callable[..., SequencePool]


@pytest.fixture(scope="module")
def models() -> Callable[[str], PreTrainedModel]:
    made: dict[str, PreTrainedModel] = {}

    def model(family: str) -> PreTrainedModel:
        if family not in made:
            made[family] = optimize_and_load(build_model(case_of(family)), "cpu-exact", progress=False, threads=1)
        return made[family]

    return model


@pytest.fixture
def started(models: Callable[[str], PreTrainedModel], tmp_path: Path) -> Any:
    """Starts servers one after the other, each with an empty memory and the files of the folder."""
    opened: list[PrefixFiles] = []

    def start(family: str = "qwen3_moe", key: str = "model", limit: int = 1 << 30) -> SequencePool:
        for files in opened:
            files.close()
        pool = open_pool(models(family), limit=1 << 24, prefix_bytes=None, most=4, context=1024)
        pool.files = PrefixFiles(tmp_path, key, limit)
        opened[:] = [pool.files]
        return pool

    yield start
    for files in opened:
        files.close()


def ids_of(length: int, seed: int = 0) -> list[int]:
    found: list[int] = prompt(length, seed=seed)[0].tolist()
    return found


@torch.inference_mode()
def read(pool: SequencePool, ids: list[int], scope: str = "", multiple: int = 1) -> tuple[int, torch.Tensor]:
    """With how many tokens a prompt began, and the logits behind it; a server's prompt has a checkpoint near its end, and is kept."""
    sequence = pool.begin(ids, len(ids) + 8, scope, multiple=multiple)
    began = sequence.tokens
    while sequence.tokens < len(ids):
        until = pool.until_checkpoint(sequence, len(ids), multiple)
        logits = pool.forward([sequence], [ids[sequence.tokens :][: min(until, PART_TOKENS)]])[0, -1]
        pool.checkpoint(sequence, len(ids), multiple)
    pool.end(sequence, ids, scope)
    assert pool.files is not None
    pool.files.flush()
    return began, logits


@pytest.mark.parametrize("family", [*ATTENTION, *RECURRENT])
def test_a_prompt_is_read_after_a_restart(started: Pools, family: str) -> None:
    ids = ids_of(LENGTH)
    began, expected = read(started(family), ids)
    assert began == 0
    pool = started(family)
    again, logits = read(pool, ids)
    assert again == LENGTH - (2 if family in RECURRENT else 1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert pool.files is not None and pool.files.read_tokens == again
    longer, _ = read(started(family), [*ids, *ids_of(20, seed=1)])
    assert longer == LENGTH


def test_a_checkpoint_may_be_at_the_end_of_a_part(started: Pools) -> None:
    ids = ids_of(2 * PART_TOKENS + 2)
    _, expected = read(started("qwen3_next"), ids)
    again, logits = read(started("qwen3_next"), ids)
    assert again == 2 * PART_TOKENS
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_what_is_read_is_exactly_what_was_computed(started: Pools) -> None:
    ids = ids_of(LENGTH)
    found = []
    for _ in range(2):
        pool = started()
        read(pool, ids)
        pages = pool._prefixes[-1].sequence.pages[: 2 * PART_TOKENS // PAGE_TOKENS]
        found.append([data[pages] for data in pool._pool.data.values()])
    for computed, stored in zip(*found, strict=True):
        assert torch.equal(computed, stored)


def test_texts_share_the_files_of_their_beginning(started: Pools, tmp_path: Path) -> None:
    begin, pool = ids_of(PART_TOKENS), started()
    for seed in range(3):
        read(pool, [*begin, *ids_of(PART_TOKENS + 1, seed=seed + 1)])
    assert len(list(tmp_path.iterdir())) == 1 + 3 * 2
    other = [*begin, *ids_of(40, seed=2), *ids_of(40, seed=9)]  # as the second one up to its 40th token, or one more by chance
    assert PART_TOKENS + 40 <= read(started(), other)[0] < PART_TOKENS + 43


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_memory_goes_first_and_files_have_the_rest(started: Pools, family: str) -> None:
    """A prefix in memory is shared, not read again; files are read where they have more."""
    ids = ids_of(3 * PART_TOKENS + 9)
    read(started(family), ids)
    pool = started(family)
    assert pool.files is not None
    read(pool, [*ids[: PART_TOKENS + 9], *ids_of(5, seed=3)])
    before = pool.files.read_tokens
    began, _ = read(pool, ids)
    if family == "qwen3_moe":
        assert (began, pool.files.read_tokens - before) == (len(ids) - 1, len(ids) - 1 - PART_TOKENS)
    else:
        assert began == len(ids) - 2
    before = pool.files.read_tokens
    assert read(pool, ids)[0] >= began and pool.files.read_tokens == before


def test_nothing_is_read_for_other_models_scopes_or_tokens(started: Pools) -> None:
    ids = ids_of(LENGTH)
    read(started(), ids, "alice")
    assert read(started(key="other"), ids, "alice")[0] == 0
    assert read(started(), ids, "bob")[0] == 0
    assert read(started(), [ids[0] + 1, *ids[1:]], "alice")[0] == 0
    assert read(started(), ids, "alice")[0] == LENGTH - 1


def test_tokens_come_in_multiples_that_are_asked_for(started: Pools) -> None:
    ids = ids_of(3 * PART_TOKENS + 9)
    read(started(), ids)
    assert read(started(), ids, multiple=3 * 64)[0] == 3 * PART_TOKENS
    assert read(started(), ids, multiple=2 * PART_TOKENS)[0] == 2 * PART_TOKENS
    assert read(started(), ids, multiple=5 * PART_TOKENS)[0] == 0


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def shifted(path: Path) -> None:
    """A byte is missing."""
    content = path.read_bytes()
    path.write_bytes(content[:40] + content[41:])


def cut(path: Path) -> None:
    os.truncate(path, 100)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def replaced(path: Path) -> None:
    """Whole, but with tensors that this model has no place for."""
    content = save({"0": torch.zeros(3)})
    path.write_bytes(f"{zlib.crc32(content):08x}".encode() + content)


DAMAGES = [flipped, shifted, cut, emptied, replaced, lambda path: path.write_bytes(b"x" * 64)]


@pytest.mark.parametrize(("family", "damage"), combinations(["qwen3_moe", "qwen3_next"], DAMAGES))
def test_a_damaged_file_is_removed_and_computed_again(
    started: Pools, tmp_path: Path, damage: Callable[[Path], None], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = ids_of(LENGTH)
    _, expected = read(started(family), ids)
    second = next(path for path in tmp_path.iterdir() if f"-{PART_TOKENS}-{2 * PART_TOKENS}" in path.name)
    damage(second)
    pool = started(family)
    with caplog.at_level(logging.WARNING):
        began, logits = read(pool, ids)
    assert began == (PART_TOKENS if family == "qwen3_moe" else 0)
    assert "damaged and is removed" in caplog.text and second.name in caplog.text
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert read(started(family), ids)[0] > PART_TOKENS, "it was written again"
    assert pool.memory.promised == 0


def test_a_file_that_another_server_removes_is_computed_again(started: Pools, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = ids_of(LENGTH)
    read(started(), ids)
    pool = started()
    for path in tmp_path.iterdir():
        path.unlink()
    assert read(pool, ids)[0] == 0
    assert "damaged" not in caplog.text
    read(started(), ids)
    assert len(list(tmp_path.iterdir())) == 3


def test_files_that_another_server_removes_while_this_one_starts(
    started: Pools, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(started(), ids_of(LENGTH))
    scandir = os.scandir

    def scanned(folder: Path) -> list[Any]:
        entries = list(scandir(folder))
        for entry in entries:
            Path(entry.path).unlink()
        return entries

    free = shutil.disk_usage(tmp_path).free
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scanned)
        service = Service(loaded, Limits(prefix_cache_dir=tmp_path))
    service.close()
    assert service.prefix_files is not None
    assert service.prefix_files.size == 0 and service.prefix_files.limit == pytest.approx(free / 4, rel=0.2)


def test_the_least_recently_used_go_first_and_none_before_what_follows_it(started: Pools, tmp_path: Path) -> None:
    texts = [ids_of(LENGTH, seed=seed) for seed in range(4)]
    pool = started()
    read(pool, texts[0])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert pool.files is not None and pool.files.size == size
    for text in texts[1:3]:
        read(pool, text)
    limited = started(limit=3 * size)
    assert read(limited, texts[0])[0] == LENGTH - 1  # used
    read(limited, texts[3])
    assert limited.files is not None
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == limited.files.size <= 3 * size
    assert [read(started(), text)[0] for text in (texts[0], texts[2], texts[3])] == [LENGTH - 1] * 3
    started(limit=size // 2)
    assert [f"-0-{PART_TOKENS}" in path.name for path in tmp_path.iterdir()] == [True], "a first part without its second one"


def test_foreign_files_are_left_alone(started: Pools, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "models").mkdir()
    pool = started(limit=1)
    read(pool, ids_of(LENGTH))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "notes.txt"]
    assert "2 files are not of a prefix cache" in caplog.text


def test_files_are_the_owner_s_alone_and_unfinished_ones_go(started: Pools, tmp_path: Path) -> None:
    old, new = tmp_path / ".1-x.prefix", tmp_path / ".2-x.prefix"
    old.write_bytes(b"x"), new.write_bytes(b"x")
    os.utime(old, (1, 1))
    read(started(), ids_of(LENGTH))
    assert not old.exists() and new.exists()
    assert {path.stat().st_mode & 0o77 for path in tmp_path.iterdir() if path != new} == {0}


def test_a_disk_that_fails_stops_the_writing_alone(started: Pools, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = started()
    shutil.rmtree(tmp_path)
    for seed in range(2):
        assert read(pool, ids_of(LENGTH, seed=seed))[0] == 0
    assert caplog.text.count("prefixes are not written any more") == 1
    assert read(pool, ids_of(LENGTH))[0] == LENGTH - 1, "those in memory are used on"


def test_servers_with_one_process_id_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As those in containers have: each writes files of its own, though they have the same names in the end."""
    one, other = (PrefixFiles(tmp_path, "model", 1 << 20) for _ in range(2))
    ids, tensors, checksum = np.arange(PART_TOKENS), {"0": torch.zeros(4)}, prefix_files._checksum
    [part] = one.missing(ids, "", [])

    def meanwhile(*content: bytes) -> bytes:
        monkeypatch.setattr(prefix_files, "_checksum", checksum)
        assert other.write(part, ids, tensors)
        other.flush()
        return checksum(*content)

    monkeypatch.setattr(prefix_files, "_checksum", meanwhile)
    assert one.write(part, ids, tensors)
    for files in (one, other):
        files.close()
        assert files.read(part, {"0": (torch.float32, (4,))}) is not None
    assert not caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [part.name]


@pytest.mark.parametrize("invariant", [False, True])
def test_a_server_goes_on_after_a_restart(loaded: LoadedModel, tmp_path: Path, invariant: bool) -> None:
    """A conversation's next turn begins with what the server before had; with `--batch-invariant` every bit is the same."""
    limits = Limits(prefix_cache_dir=tmp_path / "new" / "folder", prefill_chunk=PART_TOKENS, batch_invariant=invariant)
    question = "what " * 60
    with serving(loaded, limits) as server:
        first = ask(server, question, logprobs=True)
        server.service.prefix_files.flush()  # type: ignore[union-attr]
    with serving(loaded, limits) as server:
        again = ask(server, question, logprobs=True)
        assert again.usage.prompt_tokens_details.cached_tokens >= 2 * PART_TOKENS
        assert again.choices[0].message.content == first.choices[0].message.content
        if invariant:
            assert again.choices[0].logprobs == first.choices[0].logprobs
        figures = server.get("/metrics")
        known = again.usage.prompt_tokens_details.cached_tokens
        assert f"moegraft:prefix_files_tokens_total {known}.0\n" in figures and "moegraft:prefix_files_bytes " in figures


def test_other_weights_are_another_model(chat_folder: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    limits = Limits(prefix_cache_dir=tmp_path, prefill_chunk=PART_TOKENS)
    question = "what " * 60
    with serving(loaded, limits) as server:
        ask(server, question)
    other = optimize_and_load(chat_folder, "cpu-exact", dtype=torch.float32, progress=False, threads=1)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(1.5)  # type: ignore[operator, union-attr]
    for model, known in ((other, False), (loaded.model, True)):
        with serving(LoadedModel("tiny", model, loaded.tokenizer, lambda: []), limits) as server:
            assert bool(ask(server, question).usage.prompt_tokens_details.cached_tokens) == known


def test_a_folder_that_cannot_be_written_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OptionsError, match=r"--prefix-cache-dir .*file.*give a folder that can be written"),
        serving(loaded, Limits(prefix_cache_dir=tmp_path / "file" / "folder")),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--prefix-cache-disk", "1GiB"], "--prefix-cache-disk limits --prefix-cache-dir, which is missing"),
        (["--prefix-cache-dir", "FOLDER", "--prefix-cache-disk", "much"], "--prefix-cache-disk"),
        (["--prefix-cache-dir", "FOLDER", "--prefix-cache", "0"], "needs some --prefix-cache in memory"),
        (["--prefix-cache-dir", "FOLDER/file"], "this is a file; give a folder"),
    ],
)
def test_options_that_cannot_be_followed_are_refused_before_weights_are_read(given: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["serve", *(word.replace("FOLDER", str(tmp_path)) for word in given)])
    assert done.exit_code == 2 and message in " ".join(done.stderr.split())
