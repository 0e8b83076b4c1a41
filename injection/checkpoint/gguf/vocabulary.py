"""The vocabulary of a GGUF file, from a Hugging Face tokenizer, and the tokenizer of a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, Keys, SpecialVocab, TokenType

from moegraft.operators.errors import CheckpointError, UnsupportedModelError

# Regular expressions by which tokenizers split text.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class _Split:
    """
    Attributes:
        begins: texts begin with a token where the file does not state it.
        whole: a token that is in the vocabulary as a whole is not merged from parts.
        composes: characters are composed (NFC).
    """

    patterns: tuple[str, ...]
    begins: bool = False
    whole: bool = False
    composes: bool = False


# By llama.cpp's names (llama-vocab.cpp). The first of those with equal patterns is written.
_SPLITS = {
    "gpt-2": _Split((_GPT2,)),
    "olmo": _Split((_GPT2,), composes=True),
    "refact": _Split((r"\p{N}", _GPT2)),
    "qwen2": _Split((_QWEN,), composes=True),
    "qwen35": _Split((_QWEN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),), composes=True),
    **dict.fromkeys(("deepseek-r1-qwen", "hunyuan", "solar-open", "megrez"), _Split((_QWEN,))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2"), _Split((_LLAMA3,), begins=True, whole=True)),
    "glm4": _Split((_LLAMA3,), whole=True),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "smaug-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Split((_GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _Split(_DEEPSEEK3)),
}
# Tokens that end an answer, beside those that keys name. llama.cpp finds all but the last ones by their text as well.
_KNOWN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|return|>", "<|call|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<|flush|>", "<|calls|>"),  # the last two of Solar Open
)
_ENDS = (*_KNOWN_ENDS, "</s>", "<|user|>", "<|observation|>")
_IDS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def add_vocabulary(writer: GGUFWriter, folder: Path, size: int, splits: Mapping[str, str]) -> list[str]:
    """Add the tokens, merges, special tokens and chat template of a folder's tokenizer and how to sample, and return notices.

    Without a tokenizer.json the file has no vocabulary: it loads here, where the tokenizer comes from the model's folder, and in
    llama.cpp for programs that give it token ids.

    Args:
        splits: other names of ways to split text than those of most families.

    Raises:
        CheckpointError: a file of the tokenizer is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        writer.add_tokenizer_model("none")
        return [f"{folder}: no tokenizer.json in this folder: the file has no vocabulary, and llama.cpp cannot read text with it"]
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        model, added = body["model"], {token["id"]: token for token in body.get("added_tokens") or ()}
        tokens: dict[int, str] = {number: text for text, number in model["vocab"].items()} if model.get("type") == "BPE" else {}
        special = SpecialVocab(folder, load_merges=True, n_vocab=size)
        file = folder / "generation_config.json"
        sampling = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for name, theirs in SAMPLING.items():
            if (sampling.get("do_sample") or theirs == "repetition_penalty") and sampling.get(theirs) is not None:
                getattr(writer, f"add_sampling_{name}")(sampling[theirs])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}: no tokenizer can be read ({error}); download its files again") from error
    if not tokens:
        writer.add_tokenizer_model("none")
        return [f"{path}: a tokenizer of the type {model.get('type')}, not BPE: the file has no vocabulary"]
    falls_back, split = bool(model.get("byte_fallback")), _split_of(body.get("pre_tokenizer"))  # to bytes, as of Llama 2 and Mixtral
    texts, kinds = [], []
    for number in range(size):
        token = added.get(number)
        texts.append(token["content"] if token is not None else tokens.get(number, f"[PAD{number}]"))
        known = TokenType.NORMAL if number in tokens else TokenType.UNUSED
        if falls_back and _BYTE.fullmatch(texts[-1]):
            known = TokenType.BYTE
        kinds.append(known if token is None else TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED)
    writer.add_tokenizer_model("llama" if falls_back else "gpt2")
    writer.add_tokenizer_pre("default" if falls_back else "gpt-2" if split is None else splits.get(split, split))
    writer.add_string(Keys.Tokenizer.HF_JSON, path.read_text(encoding="utf-8"))  # the rest does not say all that it does
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if falls_back:
        # llama.cpp merges the pair whose token has the highest score.
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(special.merges):
            ranks.setdefault(merge.replace(" ", ""), rank)
        writer.add_token_scores([-float(ranks.get(text, len(ranks))) for text in texts])
        writer.add_add_space_prefix(_prepends_space(body))
        special.merges, special.load_merges = [], False
    else:
        special.add_special_token.setdefault("bos", False)  # by default llama.cpp adds one where text is split as by Llama 3
    stated: Any = sampling.get("eos_token_id")
    ends = [each for each in (stated if isinstance(stated, list) else [stated]) if each in range(size)]
    marks = {number for number in ends if texts[number] in _KNOWN_ENDS and kinds[number] in (TokenType.CONTROL, TokenType.USER_DEFINED)}
    ends = [each for each in ends if each != special.special_token_ids.get("eos") and each not in marks]
    special.special_token_ids |= dict(zip(("eot", "eom"), ends, strict=False))
    special.add_to_gguf(writer, quiet=True)
    notices = []
    if len(ends) > len(("eot", "eom")):
        left_out = ", ".join(texts[each] for each in ends[2:])
        notices.append(f"{file}: the file has keys for three tokens that end an answer; left out: {left_out}")
    if not falls_back and split is None:
        notices.append(f"{path}: how this tokenizer splits text has no name in llama.cpp, which will split text as GPT-2 does")
    return notices


def _prepends_space(body: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer puts a space before a text."""
    parts = [part for name in ("normalizer", "pre_tokenizer") if (part := body.get(name)) is not None]
    steps = [step for part in parts for step in part.get("normalizers", part.get("pretokenizers", [part]))]
    schemes = [step.get("prepend_scheme", step.get("add_prefix_space", True)) for step in steps if step.get("type") == "Metaspace"]
    return any(step.get("type") == "Prepend" for step in steps) or any(scheme not in (False, "never") for scheme in schemes)


def _split_of(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """Return llama.cpp's name of the way in which a tokenizer splits text; None if it has none."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    if not patterns and len(steps) == 1 and steps[0].get("type") == "ByteLevel" and steps[0].get("use_regex", True):
        return "gpt-2"
    written = tuple(str(pattern).replace("\r", r"\r").replace("\n", r"\n") for pattern in patterns)  # line ends may be characters
    return next((name for name, known in _SPLITS.items() if known.patterns == written), None)


def read_vocabulary(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a tokenizer's files by name: tokenizer.json, tokenizer_config.json and generation_config.json.

    Of files that this package writes the first is a copy, and of others it is made from tokens, merges and the way to split text.

    Args:
        fields: the keys of a GGUF file, with arrays as lists.

    Raises:
        UnsupportedModelError: the file has no vocabulary, or one that is not known here.
    """
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items() if key.startswith("tokenizer.")}
    kind, name = keys.get("model"), keys.get("pre", "default")
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and name not in _SPLITS and Keys.Tokenizer.HF_JSON not in keys):
        raise UnsupportedModelError(f"a tokenizer that is not known here (tokenizer.ggml.model: {kind!r}, pre: {name!r})")
    split = _SPLITS.get(name, _Split(()))
    texts, kinds = keys["tokens"], keys.get("token_type") or [TokenType.NORMAL] * len(keys["tokens"])
    vocabulary: dict[str, int] = {}
    for number, text in enumerate(texts):
        vocabulary.setdefault(text, number)
    named = {ours: keys[f"{name}_token_id"] for name, ours in _IDS.items() if keys.get(f"{name}_token_id") is not None}
    model = {"type": "BPE", "vocab": vocabulary, "byte_fallback": kind == "llama", "fuse_unk": kind == "llama"}
    if kind == "llama":
        normal = {text: number for text, number in vocabulary.items() if kinds[number] == TokenType.NORMAL}
        model |= {"unk_token": texts[named.get("unk", 0)], "merges": _merges_by_score(normal, keys["scores"])}
        steps = _with_spaces(prepends=bool(keys.get("add_space_prefix", True)))
    else:
        model |= {"merges": [merge.split(" ", 1) for merge in keys.get("merges", ())], "ignore_merges": split.whole}
        steps = _with_bytes(split.patterns, composes=split.composes)
    marks = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": text, "special": marks[TokenType(kinds[number])], **flags}
        for text, number in vocabulary.items()
        if kinds[number] in marks
    ]
    begins = keys.get("add_bos_token", kind == "llama" or split.begins) and "bos" in named
    processor = None
    if begins:
        bos = texts[named["bos"]]
        first, text, second = {"SpecialToken": {"id": bos, "type_id": 0}}, *({"Sequence": {"id": each, "type_id": 0}} for each in "AB")
        ids = {bos: {"id": bos, "ids": [named["bos"]], "tokens": [bos]}}
        processor = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text, second], "special_tokens": ids}
    settings = {f"{name}_token": texts[number] for name, number in named.items()}
    if "tokenizer.chat_template" in keys:
        settings["chat_template"] = keys["tokenizer.chat_template"]
    if "chat_template" in settings and (others := keys.get("tokenizer.chat_templates")):  # as one for chats with tools
        places = {"default": "tokenizer.chat_template", **{name: f"tokenizer.chat_template.{name}" for name in others}}
        settings["chat_template"] = [{"name": name, "template": keys[place]} for name, place in places.items() if place in keys]
    stated = [keys[f"{name}_token_id"] for name in ("eos", "eot", "eom") if keys.get(f"{name}_token_id") is not None]
    known = [vocabulary[text] for text in _ENDS if text in vocabulary]
    ends = {number: texts[number] for number in (*stated, *(each for each in known if kinds[each] in marks))}
    generation: dict[str, Any] = {
        "eos_token_id": [*ends] or None,
        **{f"{name}_token_id": named[name] for name in ("bos", "pad") if name in named},
    }
    for name, ours in SAMPLING.items():
        if (value := fields.get(key := f"general.sampling.{name}")) is not None:
            if not math.isfinite(value):
                raise ValueError(f"{key} is {value}")
            if ours != "repetition_penalty":
                generation |= {"do_sample": True, ours: round(value, 6)}
            elif fields.get("general.sampling.penalty_last_n") != 0:
                generation[ours] = round(value, 6)
    # Numbers that switch a sampler off in llama.cpp, which transformers refuses.
    if generation.get("temperature", 1) <= 0:
        generation = {name: value for name, value in generation.items() if name not in ("temperature", "top_k", "top_p", "min_p")}
        generation["do_sample"] = False
    generation |= {name: max(generation[name], 0) for name in ("top_k", "min_p") if name in generation}
    made = {"version": "1.0", "added_tokens": added, "post_processor": processor, "model": model, **steps}
    return {
        "tokenizer.json": json.loads(keys[Keys.Tokenizer.HF_JSON]) if Keys.Tokenizer.HF_JSON in keys else made,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings},
        "generation_config.json": generation,
    }


def _with_bytes(patterns: Sequence[str], *, composes: bool) -> dict[str, Any]:
    """Return the steps of a tokenizer whose tokens are of bytes, as that of GPT-2."""
    splits = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in patterns]
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, of_bytes]},
        "decoder": of_bytes,
    }


def _with_spaces(*, prepends: bool) -> dict[str, Any]:
    """Return the steps of a tokenizer whose tokens are of characters, with a mark for spaces, as that of Llama 2."""
    mark = "\u2581"
    before = [{"type": "Prepend", "prepend": mark}] * prepends
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prepends
    marked = {"type": "Replace", "pattern": {"String": " "}, "content": mark}
    unmarked = {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, marked]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [unmarked, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]},
    }


def _merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those with the highest score first, as SentencePiece merges them."""
    pairs = [
        (text[:cut], text[cut:])
        for text in sorted(vocabulary, key=lambda text: -scores[vocabulary[text]])
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    return pairs
