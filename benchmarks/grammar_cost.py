"""What does a grammar cost per token in the server, with a vocabulary of 151,936 tokens (Qwen3's number)?

Each text is followed token by token as the server does: the constraint restricts a row of float32 logits, then the text's next token is
taken. `restrict` is the whole call, of which `mask` is llguidance's part; the rest turns its bits into -inf. `begin` is the preparation of
a request's grammar. The first request of a server also prepares the tokenizer, once (`first`).

The tokenizer is trained by `--train FILE` on the texts of the Python packages that are installed (byte-level BPE, Qwen2's pattern), as no
published one is at hand; its tokens are long words and code, as in published vocabularies. Then `--tokenizer FILE` measures.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.record import Recorder, parser
from harness.rounds import percentiles
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from moegraft.injection.cli.serve.answer_parser import AnswerGrammar
from moegraft.injection.cli.serve.constraints import Grammars, grammars

VOCABULARY = 151_936
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
END, THINK, THOUGHT = "<|im_end|>", "<think>", "</think>"
TRAINING_BYTES = 120_000_000
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "email": {"type": "string", "pattern": "^[a-z.]+@[a-z]+\\.com$"},
        "role": {"enum": ["reader", "editor", "owner"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "zip": {"type": "number"}},
            "required": ["street", "city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "role", "tags", "address"],
    "additionalProperties": False,
}
LARK = r"""
start: statement+
statement: NAME " = " sum ";\n"
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | NAME | "(" sum ")"
NAME: /[a-z][a-z_]{0,20}/
NUMBER: /[0-9]{1,6}(\.[0-9]{1,3})?/
"""


def sources() -> Iterator[str]:
    read = 0
    for path in sorted(Path(np.__file__).parent.parent.rglob("*")):
        if path.suffix in (".py", ".md", ".txt", ".json") and path.is_file() and read < TRAINING_BYTES:
            text = path.read_text(encoding="utf-8", errors="ignore")[:400_000]
            read += len(text)
            yield text


def train(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, THINK, THOUGHT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(sources(), trainer)
    tokenizer.save(str(path))
    print(f"{tokenizer.get_vocab_size()} tokens")


def texts(words: list[str], count: int) -> dict[str, tuple[Mapping[str, Any] | str, list[str]]]:
    """The grammars, each with texts that follow it."""
    chance = random.Random(0)

    def some(low: int, high: int) -> str:
        return " ".join(chance.choices(words, k=chance.randint(low, high)))

    def record() -> str:
        address = {"street": some(1, 3), "city": some(1, 1), "zip": chance.randint(1000, 99999)}
        tags = [some(1, 1) for _ in range(chance.randint(0, 4))]
        found = {"name": some(2, 2), "age": chance.randint(1, 99), "email": f"{some(1, 1).lower()}@mail.com", "role": "editor"}
        return json.dumps({**found, "tags": tags, "address": address}, indent=chance.choice([None, 2]))

    def formula(depth: int) -> str:
        if depth == 0:
            return chance.choice([chance.choice(words).lower()[:20], f"{chance.uniform(0, 999):.2f}"])
        return f"({formula(depth - 1)}{chance.choice('+-*/')}{formula(depth - 1)})"

    def program() -> str:
        return "".join(f"{chance.choice(words).lower()[:20]} = {formula(chance.randint(0, 3))};\n" for _ in range(6))

    return {"json_schema": (SCHEMA, [record() for _ in range(count)]), "lark": (LARK, [program() for _ in range(count)])}


def measure(tokenizer: PreTrainedTokenizerFast, count: int) -> Iterator[dict[str, object]]:
    words = [word for word in tokenizer.decode(list(range(3000, 40000))).split() if word.isascii() and word.isalpha()]
    thought = f"{THINK}\n{' '.join(random.Random(1).choices(words, k=80))}\n{THOUGHT}\n\n"
    marks = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in (END, THINK, THOUGHT)}
    fields = {"reasoning_content": {"open": THINK, "close": THOUGHT, "content": "text"}, "content": {"content": "text"}}
    prepared = Grammars(tokenizer, VOCABULARY, [marks[END]])
    start = time.perf_counter()
    prepared.constraint(grammars('start: "a"'))
    first_ms = 1e3 * (time.perf_counter() - start)
    logits = torch.zeros(VOCABULARY)
    for name, (form, found) in texts(words, count).items():
        for case, grammar, before in (
            (name, grammars(form), ""),
            (f"{name} after reasoning", AnswerGrammar({"fields": fields}, marks).form(form, reasoning="possible"), thought),
        ):
            begin_ms: list[float] = []
            restrict_us: list[float] = []
            mask_us: list[float] = []
            for text in found:
                ids = [*tokenizer(before + text)["input_ids"], marks[END]]
                start = time.perf_counter()
                constraint = prepared.constraint(grammar)
                begin_ms.append(1e3 * (time.perf_counter() - start))
                inner, spent = constraint._matcher, [0.0]

                def timed(run: Any, spent: list[float] = spent) -> Any:
                    def call(*given: Any) -> Any:
                        begun = time.perf_counter()
                        result = run(*given)
                        spent[0] += time.perf_counter() - begun
                        return result

                    return call

                class Timed:
                    compute_bitmask = staticmethod(timed(inner.compute_bitmask))
                    try_consume_tokens = staticmethod(timed(inner.try_consume_tokens))
                    rollback = staticmethod(inner.rollback)
                    is_error = staticmethod(inner.is_error)

                constraint._matcher = Timed()
                for end, token in enumerate(ids):
                    spent[0], start = 0.0, time.perf_counter()
                    allowed = constraint.restrict(logits, ids[:end])
                    restrict_us.append(1e6 * (time.perf_counter() - start))
                    mask_us.append(1e6 * spent[0])
                    if allowed[token] != 0:
                        raise SystemExit(f"{case}: {tokenizer.decode(ids[: end + 1])!r} cannot go on so; not measured")
            row: dict[str, object] = {"case": case, "vocabulary": VOCABULARY, "tokens": len(restrict_us)}
            for kind, taken in (("restrict", restrict_us), ("mask", mask_us)):
                row |= {f"{kind}_{key}": value for key, value in percentiles(taken, "us", 0).items()}
                row[f"{kind}_p99_us"] = round(float(np.percentile(taken, 99)))
                if kind == "restrict":
                    row["restrict_most_us"] = round(max(taken))
            yield {**row, "begin_p50_ms": round(float(np.median(begin_ms)), 2), "first_ms": round(first_ms)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--train", type=Path, help="train a tokenizer, save it here, and end")
    options.add_argument("--tokenizer", type=Path, help="a tokenizer that was trained so")
    options.add_argument("--texts", type=int, default=30, help="of each grammar")
    given = options.parse_args()
    if given.train is not None:
        train(given.train)
        return
    if given.tokenizer is None:
        options.error("give --train FILE, then --tokenizer FILE")
    torch.set_num_threads(1)
    rows = Recorder("grammar_cost", ("llguidance", "torch", "transformers"), write=given.write)
    for row in measure(PreTrainedTokenizerFast(tokenizer_file=str(given.tokenizer), eos_token=END), given.texts):
        rows.add(row)


if __name__ == "__main__":
    main()
