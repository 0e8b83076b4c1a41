"""The tokenizer beside a checkpoint."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moegraft.operators.errors import CheckpointError, error_sentence


def read_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """
    Raises:
        CheckpointError: no tokenizer is there.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        # What transformers and tokenizers raise for a missing or damaged file varies by file.
        raise _no_tokenizer(folder, error_sentence(error).rstrip(" :")) from error
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        # For some model types transformers makes up a tokenizer without a single word when the files are missing.
        raise _no_tokenizer(folder, "it has no words")
    return tokenizer


def _no_tokenizer(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{folder}: no tokenizer can be read from tokenizer.json or what else this model type has ({reason})")
