"""The vocabulary of a GGUF file, from a Hugging Face tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType

from moegraft.operators.errors import CheckpointError

# The regular expressions by which tokenizers split text, and llama.cpp's names for them.
_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "gpt-4o",
    # Of DeepSeek-V3, which splits three times.
    "\\p{N}{1,3}\n[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+\n"
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": "deepseek-v3",
}
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def add_vocabulary(writer: GGUFWriter, folder: Path, size: int, splits: Mapping[str, str]) -> list[str]:
    """Add the tokens, merges, special tokens and chat template of a folder's tokenizer, and return notices.

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
    special.add_to_gguf(writer, quiet=True)
    if falls_back or split is not None:
        return []
    return [f"{path}: how this tokenizer splits text has no name in llama.cpp, which will split text as GPT-2 does"]


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
    written = (str(pattern).replace("\r", r"\r").replace("\n", r"\n") for pattern in patterns)  # line ends may be characters
    return _SPLITS.get("\n".join(written))
