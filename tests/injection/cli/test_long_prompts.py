"""Prompts in chunks, conversations whose cache is kept, and chats that are taken up again."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
import string
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.programs import Program
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.cache_utils import LinearAttentionLayer

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.chat.answer import Answerer
from moegraft.injection.cli.chat.conversation import Conversation, SavedChatError
from moegraft.injection.cli.chat.prompt_cache import PromptCache
from moegraft.injection.cli.chat.session import Chat, run_command
from moegraft.injection.cli.models import LoadedModel, load_model
from moegraft.injection.cli.options import ModelOptions, SamplingOptions
from moegraft.injection.cli.output import Terminal
from moegraft.operators.errors import human_bytes

QUIET = Terminal(io.StringIO(), Console(file=io.StringIO()), quiet=True)
GREEDY = SamplingOptions(do_sample=False, max_new_tokens=10)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 0,
}


# Loads the bundled model as programs do, reads prompts of many lengths and prints the MiB in use by malloc that they left.
LENGTHS = textwrap.dedent(
    """
    import ctypes, io
    import torch
    from rich.console import Console
    from moegraft.injection.cli.models import load_model
    from moegraft.injection.cli.options import ModelOptions
    from moegraft.injection.cli.output import Terminal

    class Usage(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "arena o s h mapped u f used free keep".split()]

    torch.set_num_threads(1)
    usage = ctypes.CDLL(None).mallinfo2
    usage.restype = Usage
    model = load_model(ModelOptions(), Terminal(io.StringIO(), Console(file=io.StringIO()), quiet=True)).model

    def used_after(lengths):
        with torch.inference_mode():
            for length in lengths:
                model(input_ids=torch.ones(1, length, dtype=torch.int64), logits_to_keep=1)
        found = usage()
        return (found.used + found.mapped) / 2**20

    before = used_after(range(180, 110, -1))
    print(used_after(range(2, 100)) - before)
    """
)


def open_chat(loaded: LoadedModel, prefill_chunk: int = 0) -> Chat:
    terminal = Terminal(io.StringIO(), Console(file=io.StringIO(), width=200, color_system=None))
    answerer = Answerer(loaded, GREEDY, prefill_chunk=prefill_chunk)
    return Chat(loaded, answerer, Conversation(loaded.tokenizer, loaded.context_tokens), terminal)


def shown(chat: Chat) -> str:
    assert isinstance(chat.terminal.notices.file, io.StringIO)
    return chat.terminal.notices.file.getvalue()


def of(loaded: LoadedModel, model: Any) -> LoadedModel:
    """A random model that speaks in lowercase letters, whose text becomes the same tokens again."""
    scale = torch.zeros(len(loaded.tokenizer), 1)
    scale[loaded.tokenizer.convert_tokens_to_ids(list(string.ascii_lowercase))] = 50.0
    model.lm_head.weight.data *= scale
    return LoadedModel("other", model.eval(), loaded.tokenizer, lambda: [])


@pytest.fixture(scope="module")
def sliding(loaded: LoadedModel) -> LoadedModel:
    """Every layer sees the last 15 tokens and its own."""
    torch.manual_seed(1)
    config = MixtralConfig(vocab_size=len(loaded.tokenizer), num_local_experts=4, sliding_window=16, **SIZES)
    return of(loaded, MixtralForCausalLM(config))


@pytest.fixture(scope="module")
def recurrent(loaded: LoadedModel) -> LoadedModel:
    torch.manual_seed(1)
    small = {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    layers = {"layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 16, "num_experts": 4}
    shared = {"shared_expert_intermediate_size": 16, "num_experts_per_tok": 2}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=len(loaded.tokenizer), **SIZES, **small, **layers, **shared))
    stock = of(loaded, model)
    return replace(stock, model=optimize_and_load(stock.model, "cpu-exact", progress=False))


def fed(model: Any, run: Callable[[], object]) -> list[int]:
    """How many tokens each forward pass got while `run` ran."""
    sizes: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    try:
        run()
    finally:
        hook.remove()
    return sizes


@pytest.mark.parametrize("kind", ["loaded", "sliding"])
@pytest.mark.parametrize(
    ("chunk", "passes"),
    [
        (0, [64]),  # off
        (64, [64]),  # exactly one chunk is no chunking
        (63, [63, 1]),  # one token is left over
        (32, [32, 32]),  # no token is left over
        (20, [20, 20, 20, 4]),  # chunks longer than the window of 16
        (7, [7] * 9 + [1]),  # shorter
        (1, [1] * 64),
    ],
)
def test_chunks_change_no_answer(kind: str, chunk: int, passes: list[int], request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(kind)
    whole, chunked = open_chat(loaded), open_chat(loaded, chunk)
    question = "x" * 20 + "y" * 41  # with its three special tokens 64
    wanted = whole.turn(question)
    sizes = fed(loaded.model, lambda: chunked.turn(question))
    assert sizes[: len(passes)] == passes
    assert set(sizes[len(passes) :]) == {1}
    assert chunked.conversation.messages[-1].content == wanted.text
    assert chunked.turn("and on").text == whole.turn("and on").text


def test_a_sliding_window_is_kept_until_the_history_changes(sliding: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    kept, fresh = open_chat(sliding), open_chat(sliding)
    for question in ["hello, a long question", "and then?"]:
        fresh.answerer.cache.drop()
        assert kept.turn(question).text == fresh.turn(question).text
    assert kept.last is not None and kept.last.cached_tokens > 30
    for chat in (kept, fresh):
        chat.conversation.reset()
    fresh.answerer.cache.drop()
    assert kept.turn("hello, a long story").text == fresh.turn("hello, a long story").text
    assert kept.last.cached_tokens == 0
    assert sum("cannot be cropped" in record.message for record in caplog.records) == 1


def ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 20, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def answered(model: PreTrainedModel, answerer: Answerer, token_ids: list[int]) -> tuple[list[int], list[int]]:
    """Return the prompt with its answer's tokens, and how many tokens each forward pass over the prompt got."""
    sizes = fed(model, lambda: answerer.answer(token_ids, lambda text: None))
    found, _ = answerer.cache.contents
    assert found[: len(token_ids)] == token_ids
    steps = len(found) - len(token_ids)
    return found, sizes[:-steps]


@pytest.mark.parametrize("kind", ["recurrent", "sliding"])
@pytest.mark.parametrize("chunk", [0, 300])
def test_a_second_turn_computes_what_is_new(kind: str, chunk: int, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(kind)
    first, length = ids_of(4000), 4000
    answerer = Answerer(loaded, GREEDY, prefill_chunk=chunk)
    found, sizes = answered(loaded.model, answerer, first)
    assert sum(sizes) == length and max(sizes) == (chunk or length - 8)
    for change, most in [
        (found, 1),  # the next prompt goes on from the answer: its last token alone is not in the cache
        (first, 8),  # the answer was changed, or left out its reasoning
        (first[:-4], 4),  # so was what the template writes before an answer
    ]:
        answerer = Answerer(loaded, GREEDY, prefill_chunk=chunk)
        answered(loaded.model, answerer, first)
        second = [*change, *ids_of(40, 1)]
        again, sizes = answered(loaded.model, answerer, second)
        assert sum(sizes) <= 40 + most, "at most a hundredth of the prompt"
        whole = Answerer(loaded, GREEDY, prefill_chunk=chunk)
        assert answered(loaded.model, whole, second)[0] == again


def test_a_changed_prompt_goes_on_from_the_latest_checkpoint_before_the_change(recurrent: LoadedModel) -> None:
    first = ids_of(3500)
    answerer = Answerer(recurrent, GREEDY, prefill_chunk=500)
    answered(recurrent.model, answerer, first)
    places = [checkpoint.tokens for checkpoint in answerer.cache.checkpoints]
    assert places == [2500, 3492]  # chunks of 500 have no end nearer to 2048
    changed = [*first[:3000], *ids_of(500, 1)]
    found, sizes = answered(recurrent.model, answerer, changed)
    assert sum(sizes) == 1000
    assert answered(recurrent.model, Answerer(recurrent, GREEDY), changed)[0] == found


def test_checkpoints_have_a_limit_and_those_that_save_least_are_dropped(recurrent: LoadedModel) -> None:
    answerer = Answerer(recurrent, GREEDY, prefill_chunk=500)
    answered(recurrent.model, answerer, ids_of(3500))
    size = answerer.cache.checkpoints[0].nbytes
    assert size > 0
    answerer.cache = PromptCache(recurrent.model, checkpoint_bytes=3 * size)
    prompt = ids_of(3500)
    for turn in range(5):
        prompt = [*answered(recurrent.model, answerer, prompt)[0], *ids_of(100, turn)]
        found = answerer.cache.checkpoints
        assert len(found) <= 3 and found[-1].tokens == len(prompt) - 100 - 9 - 8
    assert [checkpoint.tokens for checkpoint in found][:2] == [2500, 3492]
    answerer.cache = PromptCache(recurrent.model, checkpoint_bytes=size - 1)
    answered(recurrent.model, answerer, prompt)
    assert answerer.cache.checkpoints == []


def test_stats_show_states_and_checkpoints(recurrent: LoadedModel, loaded: LoadedModel) -> None:
    chat, plain = open_chat(recurrent), open_chat(loaded)
    for each in (chat, plain):
        each.turn(string.ascii_lowercase * 4)
        run_command(each, "/stats")
    tokens, cache = chat.answerer.cache.contents
    assert cache is not None
    (layer, _) = cache.layers
    assert isinstance(layer, LinearAttentionLayer) and layer.conv_states[0] is not None and layer.recurrent_states[0] is not None
    held = layer.conv_states[0].nbytes + layer.recurrent_states[0].nbytes
    assert f"states: {human_bytes(held)} after {len(tokens)} tokens" in shown(chat)
    assert f"checkpoints: {human_bytes(held)}, after {chat.answerer.cache.checkpoints[0].tokens} tokens" in shown(chat)
    assert "states:" not in shown(plain) and "checkpoints:" not in shown(plain)


@pytest.mark.parametrize("kind", ["loaded", "sliding", "recurrent"])
def test_a_saved_chat_is_resumed(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    loaded = request.getfixturevalue(kind)
    chat, later = open_chat(loaded), open_chat(loaded)
    chat.turn("hello there, you")
    run_command(chat, f"/save {tmp_path / 'talk.safetensors'}")
    assert "saved 2 messages" in shown(chat)
    later.resume(tmp_path / "talk.safetensors")
    assert "(resumed: 2 messages, " in shown(later)
    wanted, found = chat.turn("go on"), later.turn("go on")
    assert found.text == wanted.text
    assert wanted.stats and found.stats
    assert found.stats.cached_tokens == wanted.stats.cached_tokens > 0
    before = (tmp_path / "talk.safetensors").read_bytes()
    run_command(chat, f"/save {tmp_path / 'talk.safetensors'}")
    assert "exists and was not changed" in shown(chat)
    assert (tmp_path / "talk.safetensors").read_bytes() == before


def test_a_saved_chat_of_another_model_or_a_damaged_one_is_refused(loaded: LoadedModel, sliding: LoadedModel, tmp_path: Path) -> None:
    chat, path = open_chat(loaded), tmp_path / "talk.safetensors"
    chat.turn("hello")
    chat.save(path)
    with pytest.raises(SavedChatError, match="another model"):
        open_chat(sliding).resume(path)
    weights = loaded.model.model.layers[0].self_attn.o_proj.weight
    with torch.no_grad():
        weights.mul_(2)
    try:
        with pytest.raises(SavedChatError, match="another model"):
            open_chat(loaded).resume(path)
    finally:
        with torch.no_grad():
            weights.div_(2)
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SavedChatError, match="damaged"):
        open_chat(loaded).resume(tmp_path / "cut.safetensors")
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "hello"}]')  # as /save chat.json writes it
    with pytest.raises(SavedChatError, match="give a file that /save NAME"):
        open_chat(loaded).resume(tmp_path / "chat.json")
    save_file(load_file(path), tmp_path / "other.safetensors")
    with pytest.raises(SavedChatError, match="not a chat"):
        open_chat(loaded).resume(tmp_path / "other.safetensors")
    with pytest.raises(FileNotFoundError):
        open_chat(loaded).resume(tmp_path / "none.safetensors")


@pytest.fixture(scope="module")
def tuned(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns a checkpoint in which only the tensor of a name is trained further; all have biases."""
    original = tmp_path_factory.mktemp("original")
    shutil.copytree(chat_folder, original, dirs_exist_ok=True)
    config = Qwen3MoeConfig.from_pretrained(chat_folder, attention_bias=True)
    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(original)

    def changed(name: str) -> Path:
        if not name:
            return original
        folder = tmp_path_factory.mktemp("tuned")
        shutil.copytree(original, folder, dirs_exist_ok=True)
        tensors = load_file(original / "model.safetensors")
        tensors[name] = tensors[name] * 1.01
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return changed


def test_a_saved_chat_of_a_fine_tune_is_refused(tuned: Callable[[str], Path], tmp_path: Path) -> None:
    chat = open_chat(load_model(ModelOptions(model=str(tuned("")), rules="cpu"), QUIET))
    chat.turn("hello")
    chat.save(tmp_path / "talk.safetensors")
    for name in [
        "model.layers.1.mlp.experts.1.down_proj.weight",  # packed: no parameter of the injected model
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
    ]:
        with pytest.raises(SavedChatError, match="another model"):
            open_chat(load_model(ModelOptions(model=str(tuned(name)), rules="cpu"), QUIET)).resume(tmp_path / "talk.safetensors")
    copied = tmp_path / "copied"  # the same weights in other files
    shutil.copytree(tuned(""), copied)
    open_chat(load_model(ModelOptions(model=str(copied), rules="cpu"), QUIET)).resume(tmp_path / "talk.safetensors")


@pytest.mark.parametrize("kind", ["loaded", "sliding"])
@pytest.mark.parametrize(
    "change",
    [
        lambda states: states.repeat(1, 2, 1, 1),  # heads
        lambda states: states[..., :-2].contiguous(),  # their size
        lambda states: states.half(),
        lambda states: states.flatten(1, 2),
        lambda states: states[:, :, :-1].contiguous(),  # tokens
    ],
    ids=["heads", "head size", "dtype", "dimensions", "tokens"],
)
@pytest.mark.parametrize("name", ["0.keys", "1.values"])
def test_keys_and_values_of_another_form_are_refused(
    kind: str, change: Callable[[torch.Tensor], torch.Tensor], name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    chat, path = open_chat(request.getfixturevalue(kind)), tmp_path / "talk.safetensors"
    chat.turn("hello")
    chat.save(path)
    with safe_open(path, framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "changed.safetensors", about)
    with pytest.raises(SavedChatError, match=f"{name.split('.')[1]} of layer {name[0]} are .* and the model's are"):
        open_chat(request.getfixturevalue(kind)).resume(tmp_path / "changed.safetensors")


def test_a_resumed_chat_goes_on_from_its_checkpoints(recurrent: LoadedModel, tmp_path: Path) -> None:
    chat, later = open_chat(recurrent, 30), open_chat(recurrent, 30)
    question = string.ascii_lowercase * 4
    chat.turn(question)
    chat.save(tmp_path / "talk.safetensors")
    later.resume(tmp_path / "talk.safetensors")
    for each in (chat, later):
        each.conversation.reset()
    other = question[:-2] + "a" * 30  # an earlier token changed: states cannot be cropped to it
    assert later.turn(other).text == chat.turn(other).text
    assert later.last and chat.last and later.last.cached_tokens == chat.last.cached_tokens > 90


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda about, tensors: tensors.update({"0.recurrent_states.0": tensors["0.recurrent_states.0"][:, :1]}),
            "recurrent states of layer 0 are",
        ),
        (
            lambda about, parts: parts.update({"0.conv_states.0": parts["0.conv_states.0"].half()}),
            "conv states of layer 0 are .*float16",
        ),
        (lambda about, tensors: tensors.pop("0.conv_states.0"), "damaged .*0.conv_states.0"),
        (lambda about, tensors: tensors.pop(next(name for name in tensors if ":0.recurrent" in name)), "damaged .*:0.recurrent_states.0"),
        (
            lambda about, tensors: tensors.update({name: part[..., :1] for name, part in tensors.items() if ":0.recurrent" in name}),
            "recurrent states of layer 0 at the checkpoint after .* are",
        ),
        (lambda about, tensors: about.update(checkpoints="[100, 1000000]"), "checkpoints after .* tokens"),
        (lambda about, tensors: about.update(checkpoints="[-1]"), "checkpoints after .* tokens"),
        (lambda about, tensors: about.update(checkpoints="[[1]]"), "damaged"),
        (lambda about, tensors: about.update(format="moegraft chat 3"), "not a chat of this version"),
    ],
    ids=["shape", "dtype", "no state", "no checkpoint", "checkpoint's shape", "too late", "negative", "no number", "older format"],
)
def test_damaged_states_are_refused(
    change: Callable[[dict[str, str], dict[str, torch.Tensor]], object], message: str, recurrent: LoadedModel, tmp_path: Path
) -> None:
    chat, path = open_chat(recurrent), tmp_path / "talk.safetensors"
    chat.turn(string.ascii_lowercase * 4)
    chat.save(path)
    with safe_open(path, framework="pt") as file:
        about, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    change(about, tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "changed.safetensors", about)
    with pytest.raises(SavedChatError, match=f"changed.safetensors: .*{message}"):
        open_chat(recurrent).resume(tmp_path / "changed.safetensors")


@pytest.mark.parametrize("suffix", ["safetensors", "json", "txt"])
def test_a_chat_is_saved_once_the_disk_has_room_again(
    suffix: str, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, path = open_chat(loaded), tmp_path / f"talk.{suffix}"
    chat.turn("hello")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        run_command(chat, f"/save {path}")
    assert f"not saved: {path}: No space left on device" in shown(chat)
    assert list(tmp_path.iterdir()) == []
    run_command(chat, f"/save {path}")
    assert f"saved 2 messages to {path}" in shown(chat)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_drafting_continues_from_chunks_and_kept_caches(chat_folder: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    draft = "{match: {kind: model}, replace: {class: speculative_draft, kwargs: {draft_top_k: 1, max_draft: 3, schedule: fixed}}}"
    rules.write_text(f"version: 1\nextends: cpu-exact\nrules:\n- {draft}\n")
    injected = load_model(ModelOptions(model=str(chat_folder), rules=str(rules)), QUIET)
    plain = open_chat(load_model(ModelOptions(model=str(chat_folder), rules="cpu-exact"), QUIET))
    chat = open_chat(injected, 20)
    for question in ["x" * 61, "go on"]:
        assert chat.turn(question).text == plain.turn(question).text
    assert chat.last is not None and plain.last is not None
    assert chat.last.cached_tokens == plain.last.cached_tokens > 60
    statistics = injected.model.moegraft.statistics()["modules"]["(the model)"]  # type: ignore[union-attr, operator]
    assert statistics["rounds"] > 0, "it drafted"


def test_another_process_resumes(chat_folder: Path, program: list[str], tmp_path: Path) -> None:
    injected = load_model(ModelOptions(model=str(chat_folder), rules="cpu-exact"), QUIET)
    chat = open_chat(injected)
    chat.turn("hello there")
    chat.save(tmp_path / "talk.safetensors")
    wanted = chat.turn("go on")
    assert wanted.stats
    options = ["--model", str(chat_folder), "--rules", "cpu-exact", "--no-do-sample", "--max-new-tokens", "10"]
    asked = [*program, *options, "--resume", str(tmp_path / "talk.safetensors"), "--prompt", "go on"]
    resumed = Program(asked[1:], os.environ)
    text, said = resumed.communicate()
    assert resumed.returncode == 0, said
    assert text == wanted.text + "\n"
    new = wanted.stats.prompt_tokens - wanted.stats.cached_tokens
    assert f"prompt: {wanted.stats.prompt_tokens} tokens ({new} new)" in said
    refused = Program([*asked[1:-6], "--rules", "cpu", *asked[-6:]], os.environ)
    text, said = refused.communicate()
    assert (refused.returncode, text) == (2, "")
    assert "saved with another model, other rules" in said and "Traceback" not in said


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the memory in use is known with glibc 2.33 and later alone")
def test_prompts_of_many_lengths_leave_no_memory() -> None:
    measured = Program(["-c", LENGTHS], os.environ)
    shown, errors = measured.communicate()
    assert measured.returncode == 0, errors
    assert float(shown) < 10, "about 50 with PyTorch's own bounds where oneDNN multiplies bfloat16"
