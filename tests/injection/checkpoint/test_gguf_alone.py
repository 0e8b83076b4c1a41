"""A GGUF file as the model: its config and tokenizer are read from it, and what it does not state is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_tokenizer import byte_tokenizer
from support.families import build_config, case_of, prompt
from support.gguf_files import gguf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moegraft.injection import optimize_and_load
from moegraft.injection.checkpoint.gguf.description import config_of, folder_of, keys_of
from moegraft.injection.checkpoint.gguf.export import plan_export, read_types, write_export
from moegraft.injection.checkpoint.gguf.families import FAMILIES
from moegraft.injection.checkpoint.gguf.files import open_file
from moegraft.injection.checkpoint.gguf.vocabulary import add_vocabulary, read_vocabulary
from moegraft.injection.meta_model import build_meta_model, find_model
from moegraft.operators.errors import CheckpointError, UnsupportedModelError

TEXT = (
    "Stra\u00dfe na\u00efve \u6f22\u5b57\u304b\u306a\u4ea4\u3058\u308a \ud55c\uad6d\uc5b4 123456 1,234.5 'll DON'T we've  \n\n  x=1;"
    "\tif(a){}\r\n \u00a0 e\u0301 \u00bd \u0939\u093f\u0928\u094d\u0926\u0940 Hello,world!!! it's IT'S 2024\u5e74 foo_bar/baz\n\n\n"
    "\tend a<|im_end|>b the theme"
)
CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# As these models' own tokenizers split text.
SPLITS = {
    "qwen2": (rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}",),
    "qwen35": (
        rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "llama-bpe": (rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}",),
    "glm4": (rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}",),
    "gpt-2": (GPT2,),
    "olmo": (GPT2,),
    "refact": (r"\p{N}", GPT2),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tiny(folder: Path, **changes: Any) -> Qwen3MoeForCausalLM:
    """Write a model with a tokenizer and generation config to a folder."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=260,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 3e6},
        initializer_range=0.2,
        **changes,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, eos_token_id=[0, 9]
    )
    model.save_pretrained(folder)
    return model


def written(folder: Path, name: str = "model.gguf") -> Path:
    meta = build_meta_model(folder, weights=True)
    assert meta.weights is not None
    write_export(plan_export(meta.weights, meta.skeleton, read_types("F32")), folder / name, folder, "tiny", {}, lambda _: None)
    return folder / name


def fields_of(path: Path) -> dict[str, Any]:
    file = open_file(path)
    return {**file.fields, **{key: file.array(key) for key in file.arrays}}


@pytest.mark.parametrize("place", ["file", "no suffix", "folder", "split"])
def test_a_file_is_enough(place: str, tmp_path: Path) -> None:
    model = tiny(tmp_path / "stock")
    (tmp_path / "alone").mkdir()
    path = shutil.move(written(tmp_path / "stock"), tmp_path / "alone" / "model.gguf")
    if place == "no suffix":
        path = path.rename(path.with_name("sha256-0123"))
    if place == "split":
        path = path.rename(path.with_name("model-00001-of-00001.gguf"))
    loaded = optimize_and_load(path.parent if place == "folder" else path, "cpu-exact", dtype="float32", progress=False)
    ids = prompt(20)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    source = find_model(path)
    assert AutoTokenizer.from_pretrained(source.folder).apply_chat_template([{"content": "a b"}], tokenize=False) == "a b"
    stated = loaded.generation_config
    assert (stated.do_sample, stated.temperature, stated.top_k, stated.top_p, stated.eos_token_id) == (True, 0.7, 20, 0.8, [0, 9])
    assert stated.repetition_penalty == 1.05


@pytest.mark.parametrize(("temperature", "sampled"), [(0.0, False), (-1.0, False), (0.5, True)])
def test_values_that_switch_a_sampler_off_are_those_of_llama_cpp(temperature: float, sampled: bool, tmp_path: Path) -> None:
    model = tiny(tmp_path)
    stated = {
        "general.sampling.temp": temperature,
        "general.sampling.top_k": -1,
        "general.sampling.top_p": 1.0,
        "general.sampling.min_p": -0.1,
        "general.sampling.penalty_last_n": 0,
    }
    settings = read_vocabulary({**fields_of(written(tmp_path)), **stated})["generation_config.json"]
    model.generation_config = GenerationConfig(**settings)
    assert (model.generation_config.do_sample, settings.get("repetition_penalty")) == (sampled, None)
    ids = prompt(5)
    texts = [model.generate(ids, max_new_tokens=20, eos_token_id=None) for _ in range(3)]
    if not sampled:
        assert all(torch.equal(text, model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None)) for text in texts)


@pytest.mark.parametrize(("ends", "keys", "left_out"), [([0, 9, 8], (9, 8), ""), ([9, 0, 8, 7], (9, 8), "left out: ")])
def test_tokens_that_end_an_answer_have_keys(ends: list[int], keys: tuple[int, ...], left_out: str, tmp_path: Path) -> None:
    model = tiny(tmp_path)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "qwen3moe")
    notices = add_vocabulary(writer, tmp_path, 260, {})
    stated = [writer.kv_data[0][f"tokenizer.ggml.{name}_token_id"].value for name in ("eos", "eot", "eom")]
    assert stated == [0, *keys]
    assert any(left_out in notice for notice in notices) == bool(left_out)


def test_marks_of_turns_have_keys_as_llama_cpp_does_not_know_them(tmp_path: Path) -> None:
    """GLM's answers end where the user's turn or a result begins."""
    model = tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<|user|>", "<|endoftext|>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    user, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|endoftext|>"])
    model.generation_config.eos_token_id = [0, end, user]
    model.save_pretrained(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "qwen3moe")
    add_vocabulary(writer, tmp_path, 260, {})
    assert writer.kv_data[0]["tokenizer.ggml.eot_token_id"].value == user
    assert "tokenizer.ggml.eom_token_id" not in writer.kv_data[0]


def test_a_penalty_of_greedy_texts_is_kept(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    model.generation_config = GenerationConfig(repetition_penalty=1.05, eos_token_id=0)
    model.save_pretrained(tmp_path)
    settings = read_vocabulary(fields_of(written(tmp_path)))["generation_config.json"]
    assert settings["repetition_penalty"] == 1.05 and not settings.get("do_sample")


def test_all_chat_templates_are_read(tmp_path: Path) -> None:
    """As one for chats with tools beside the default."""
    tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }} tools"}
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder_of(written(tmp_path)))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "a"
    assert tokenizer.apply_chat_template([{"content": "a"}], tools=tools, tokenize=False) == "1 tools"


def test_the_folder_is_written_once(tmp_path: Path) -> None:
    tiny(tmp_path / "stock")
    path = written(tmp_path / "stock")
    folder = folder_of(path)
    times = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    shutil.copy(path, tmp_path / "model.gguf")
    assert folder_of(tmp_path / "model.gguf") == folder and {file: file.stat().st_mtime_ns for file in folder.iterdir()} == times
    tiny(tmp_path / "other", rms_norm_eps=1e-5)
    assert folder_of(written(tmp_path / "other")) != folder


@pytest.mark.parametrize("name", SPLITS)
def test_tokens_of_bytes_are_those_of_the_tokenizer(name: str, tmp_path: Path) -> None:
    """Of a file of llama.cpp's converter, which has no copy of tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[name]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if name in ("qwen2", "qwen35", "olmo"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT] * 20, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet))

    def change(writer: Any) -> None:
        writer.kv_data[0]["tokenizer.ggml.pre"].value = name

    assert_same(read(tokenizer, change, tmp_path), tokenizer)


@pytest.mark.parametrize("prepends", [True, False])
def test_tokens_of_characters_are_those_of_the_tokenizer(prepends: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces] if prepends else [spaces])
    after = [decoders.Strip(" ", 1, 0)] if prepends else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
    words = [word for line in [TEXT] * 20 for word in line.split(" ")]
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=500, special_tokens=special, limit_alphabet=60))
    assert_same(read(tokenizer, lambda writer: None, tmp_path), tokenizer)


def read(tokenizer: Tokenizer, change: Callable[[Any], None], folder: Path) -> Tokenizer:
    """Return the tokenizer that is read from a file without a copy of tokenizer.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    writer = gguf.GGUFWriter(folder / "vocabulary.gguf", "qwen3moe")
    add_vocabulary(writer, folder, tokenizer.get_vocab_size(), {})
    change(writer)
    del writer.kv_data[0]["tokenizer.huggingface.json"]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return Tokenizer.from_str(json.dumps(read_vocabulary(fields_of(folder / "vocabulary.gguf"))["tokenizer.json"]))


def assert_same(found: Tokenizer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).ids
    assert found.encode(TEXT).ids == ids
    assert found.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
    assert found.decode(ids) == tokenizer.decode(ids), "special tokens are not text"


@pytest.mark.parametrize("adds", [True, False, None])
def test_the_first_token_is_added_where_the_file_states_it(adds: bool | None) -> None:
    keys = {"model": "gpt2", "pre": "llama-bpe", "tokens": ["<s>", "a"], "token_type": [3, 1], "merges": [], "bos_token_id": 0}
    fields = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if adds is not None:
        fields["tokenizer.ggml.add_bos_token"] = adds
    tokenizer = Tokenizer.from_str(json.dumps(read_vocabulary(fields)["tokenizer.json"]))
    assert tokenizer.encode("a").ids == ([1] if adds is False else [0, 1]), "llama.cpp adds one to texts that are split so"


@pytest.mark.parametrize(
    ("split", "ids"), [("llama-bpe", [2]), ("lfm2", [2]), ("glm4", [2]), ("chatglm-bpe", [0, 1]), ("qwen2", [0, 1]), ("gpt-4o", [0, 1])]
)
def test_a_token_that_is_a_word_is_not_merged_where_llama_cpp_does_not(split: str, ids: list[int]) -> None:
    keys = {"model": "gpt2", "pre": split, "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": [], "bos_token_id": 0}
    fields = {f"tokenizer.ggml.{key}": value for key, value in {**keys, "add_bos_token": False}.items()}
    assert Tokenizer.from_str(json.dumps(read_vocabulary(fields)["tokenizer.json"])).encode("ab").ids == ids


@pytest.mark.parametrize(
    ("texts", "kinds", "stated", "ends"),
    [
        (
            ["a", "<eos>", "<eot>", "<|im_end|>", "<|return|>"],
            [1, 3, 3, 3, 1],
            {"eos": 1, "eot": 2},
            [1, 2, 3],
        ),  # the last is ordinary text
        (["a", "<eos>"], [1, 1], {"eos": 1}, [1]),
        (["a", "<|endoftext|>", "<|im_end|>"], [1, 3, 3], {"eos": 2}, [2, 1]),  # of Qwen, whose texts without a chat end with the first
        (["a", "<|endoftext|>", "<|end|>", "<|flush|>", "<|calls|>"], [1, 3, 3, 3, 3], {"eos": 1, "eot": 1}, [1, 3, 4]),  # of Solar Open
        (["a"], [1], {}, None),
    ],
)
def test_all_tokens_that_end_an_answer(texts: list[str], kinds: list[int], stated: dict[str, int], ends: list[int] | None) -> None:
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": texts, "token_type": kinds, "merges": []}
    fields = {
        f"tokenizer.ggml.{key}": value for key, value in {**keys, **{f"{name}_token_id": each for name, each in stated.items()}}.items()
    }
    assert read_vocabulary(fields)["generation_config.json"]["eos_token_id"] == ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qwen3moe.attention.clamp_kqv": 8.0}, "qwen3_moe has nothing for attention.clamp_kqv"),
        ({"qwen3moe.rope.scaling.type": "longrope"}, "rotary embeddings of the type longrope"),
        ({"qwen3moe.attention.value_length": 8}, "attention.value_length is 8, and transformers computes 16"),
        ({"qwen3moe.embedding_length": None}, "it has no key 'embedding_length'"),
        ({"qwen3moe.attention.layer_norm_rms_epsilon": None}, "it has no key 'attention.layer_norm_rms_epsilon'"),
        ({"qwen3moe.expert_used_count": None}, "it has no key 'expert_used_count'"),
        ({"qwen3moe.context_length": None}, "it has no key 'context_length'"),
        ({"qwen3moe.block_count": 1 << 40}, "1099511627776 layers, and 2"),
        ({"qwen3moe.block_count": "two"}, "unsupported operand type"),
        ({"qwen3moe.rope.freq_base": "high"}, "could not convert string to float"),
        ({"general.architecture": "gemma4"}, "its keys for sliding windows in some layers are not known here"),
        ({"general.architecture": "gpt9"}, "the architecture 'gpt9' is not supported"),
        ({"general.architecture": "granitemoe"}, "it has no key 'block_count'"),
    ],
)
def test_what_is_not_in_the_config_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    path = written(tmp_path)
    fields = {key: value for key, value in {**fields_of(path), **changes}.items() if value is not None}
    shapes = {name: tensor.shape for name, tensor in open_file(path).tensors.items()}
    with pytest.raises(UnsupportedModelError, match="the file alone does not describe its model") as raised:
        config_of(fields, shapes)
    assert message in str(raised.value)


def described(model_type: str, further: Mapping[str, tuple[int, ...]] | None = None, **changes: object) -> PretrainedConfig:
    """Return the config that is read from the keys of a tiny model, with `changes`: those that are None are left out."""
    config = build_config(case_of(model_type))
    architecture = FAMILIES[model_type].architecture
    keys = {**keys_of(config), **{key.replace("__", "."): value for key, value in changes.items()}}
    fields = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    names = ("token_embd", "output", *(f"blk.{layer}.ffn_gate_inp" for layer in range(config.num_hidden_layers)))
    return config_of(fields, {**{f"{name}.weight": (config.vocab_size, config.hidden_size) for name in names}, **(further or {})})


@pytest.mark.parametrize("model_type", ["deepseek_v3", "dots1", "glm4_moe"])
def test_weights_of_experts_are_normalised_where_the_file_states_it(model_type: str) -> None:
    """llama.cpp's converter leaves the key out where they are not, or states it as false."""
    stated = {value: described(model_type, expert_weights_norm=value).norm_topk_prob for value in (True, False, None)}
    assert stated == {True: True, False: False, None: False}


def test_weights_of_experts_that_transformers_does_not_normalise_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="expert_weights_norm is True, and transformers computes False"):
        described("deepseek_v2", expert_weights_norm=True)


def test_positions_are_scaled_linearly_where_the_file_states_a_factor_alone() -> None:
    """llama.cpp's default of the type."""
    keys: dict[str, Any] = {"rope__scaling__type": None, "rope__scaling__factor": 4.0}
    assert described("mixtral", **keys).rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    assert described("mixtral", **{**keys, "rope__scaling__type": "none"}).rope_parameters["rope_type"] == "default"


def test_rotary_frequencies_in_a_tensor_are_refused() -> None:
    """Such as those of Llama 3.1, of which there are mixtures of experts in Mixtral's layout."""
    with pytest.raises(UnsupportedModelError, match=r"rotary frequencies are in rope_freqs\.weight"):
        described("mixtral", {"rope_freqs.weight": (8,)})


@pytest.mark.parametrize("count", [0, None])
def test_a_file_without_experts_is_refused(count: int | None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"\(it has no experts\)"):
        described("mixtral", expert_count=count)


def test_a_file_without_a_vocabulary_is_refused_with_what_to_give(tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    path = written(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"give the folder or hub id that it was made from as the model, .*--gguf"):
        optimize_and_load(path, "cpu-exact", progress=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("token_type", [1]), ("token_type", [99] * 257), ("tokens", 3)],
        *[("eos_token_id", 10**6), ("eos_token_id", True), ("huggingface.json", "{"), ("huggingface.json", "[" * 10**5)],
        *[("general.sampling.temp", float("nan")), ("general.sampling.top_p", float("inf"))],
    ],
)
def test_a_damaged_vocabulary_is_refused(key: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path)
    path = written(tmp_path)
    whole = gguf.GGUFWriter.write_kv_data_to_file

    def damaged(writer: Any) -> None:
        name = key if key.startswith("general.") else f"tokenizer.{'' if key.startswith('h') else 'ggml.'}{key}"
        writer.kv_data[0].pop(name, None)
        types = gguf.GGUFValueType
        kinds = {int: types.UINT32, bool: types.BOOL, str: types.STRING, list: types.ARRAY, float: types.FLOAT32}
        writer.add_key_value(name, value, kinds[type(value)])
        whole(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_kv_data_to_file", damaged)
    with pytest.raises(CheckpointError, match="the vocabulary is damaged"):
        folder_of(written(tmp_path, "damaged.gguf"))
    assert folder_of(path).is_dir()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path)
    path = written(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    with pytest.raises(CheckpointError, match=r"model\.gguf cannot be written \(Not a directory\); set XDG_CACHE_HOME"):
        folder_of(path)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no GGUF")
    with pytest.raises(CheckpointError, match="this is a file; name a GGUF file, or the folder"):
        optimize_and_load(tmp_path / "model.safetensors", "cpu-exact", progress=False)
    (tmp_path / "model.gguf").write_bytes(b"no GGUF")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        optimize_and_load(tmp_path / "model.gguf", "cpu-exact", progress=False)
    with pytest.raises(CheckpointError, match=r"other\.gguf: no such file or folder"):
        optimize_and_load("other.gguf", "cpu-exact", progress=False)
