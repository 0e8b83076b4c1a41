"""The bundled demo model's tokenizer, with the chat template that is bundled.

Without tools, the template lets a user's line open a scene, like every scene of the plays; the answer is the speech of Second Citizen and
what follows up to the next END. A message that starts with a heading of its own ("JULIET:" on a line) keeps it. With tools it is a dialogue
of the form that Qwen's models have. Of a tool it shows what a small model can use: its description first, by which it is chosen, its name,
and its parameters with their types or the lists of their values.
"""

from __future__ import annotations

import json
import re
from collections import Counter

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from harness.tool_dialogues import CALL, CALL_END, END, START, TOOLS, TOOLS_END, Writer
from moegraft.injection.demo import demo_path

PAD = "<|pad|>"
MARKS = (END, PAD, START, TOOLS, TOOLS_END, CALL, CALL_END)  # in the order of their numbers
FREQUENT = 100  # words that have a token together with the space before them
DIALOGUES = 700
TEMPLATE = demo_path() / "chat_template.jinja"


def train_tokenizer(text: str, seed: int, context: int, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on plays and on dialogues with tools.

    A run of line breaks is a separate word: text may be cut after one without changing its tokens. So is the space before a word, unless
    the word is one of the most frequent: a value has the same tokens in a sentence and in the JSON of a call, which can then be copied.
    Digits and the marks of dialogues are one token each.
    """
    frequent = Counter(re.findall(r"(?<= )[a-z]+\b", text)).most_common(FREQUENT)
    spaced = "|".join(sorted(["I", *(word for word, _ in frequent)], key=lambda word: (-len(word), word)))
    parts = (
        r"\n+",
        r"'(?:s|t|re|ve|m|ll|d)\b",
        rf" (?:{spaced})\b",
        r"\p{L}+",
        r"\p{N}",
        r'["}\]]*[:,] ["{\[]+',
        r'["{}\[\]]+[:,]?',
        r'[^\s\p{L}\p{N}"{}\[\]]+',
        r"[^\S\n]+",
    )
    trained = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex("|".join(parts)), behavior="isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trained.decoder = decoders.ByteLevel()
    writer = Writer(seed)
    dialogues = [writer.dialogue(3) for _ in range(DIALOGUES)]
    unmarked = [re.sub("|".join(map(re.escape, MARKS)), "\n", dialogue) for dialogue in dialogues]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(MARKS), initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([text, *unmarked], trainer)
    content = json.loads(trained.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in (END, PAD, START)  # the marks of calls are text, which a decoder must keep
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=context,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )
