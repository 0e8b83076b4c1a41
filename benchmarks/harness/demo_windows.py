"""Training windows of the bundled demo model: plays, dialogues with tools, and repeats of random tokens, which keep the model copying.

Shapes: B windows, S tokens per window.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from harness.tool_dialogues import CALL, TOOLS, Tool, Writer, head_text, turn_text

PROMPT, ANSWER, CALLED = 0.15, 1.0, 2.0  # weights of a dialogue's tokens in the loss: of a call, other text of the assistant, and the rest
DECISION, NAME, BEGIN = 6.0, 5.0, 6.0  # whether to call, a function's name, and the first token of each parameter's name and value
FIRST_TOKEN = 2  # the lowest number of a random token
SEGMENT = (3, 24)  # tokens of a text that is repeated
FILLED = 600  # tokens of a window from which on a dialogue begins with a long system prompt
ROOM = 450  # tokens that the prompt leaves to the dialogue
Piece = tuple[list[int], list[float]]  # tokens, and the weight of each in the loss


def cut_scenes(speeches: list[list[int]], end: int, seed: int) -> Tensor:
    """Return one pass over the plays as tokens `(N,)`, with END before every scene of two to four speeches; the cuts depend on the seed."""
    draw = random.Random(seed)
    stream: list[int] = []
    left = 0
    for speech in speeches:
        if left == 0:
            stream.append(end)
            left = draw.randint(2, 4)
        stream.extend(speech)
        left -= 1
    return torch.tensor(stream)


class Mixture:
    """Draws windows; a pass over the plays has new cuts after every `pass_steps` batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, seed: int, pass_steps: int) -> None:
        self._tokenizer = tokenizer
        self._speeches = [self._tokens(speech + "\n\n") for speech in text.rstrip("\n").split("\n\n")]
        self._draw, self._writer = random.Random(seed), Writer(seed)
        self._seed, self._pass_steps, self._batches = seed, pass_steps, 0
        self._stream: list[int] = []

    def draw(self, size: int, kinds: str) -> tuple[Tensor, Tensor]:
        """Return tokens `(B, S + 1)`, and the weights `(B, S)` of all but the first in the loss, of windows of `size` tokens.

        Args:
            kinds: a letter for each window: `p` plays, `d` a dialogue, `r` repeats.
        """
        if self._batches % self._pass_steps == 0:
            self._stream = cut_scenes(self._speeches, self._tokenizer.eos_token_id, self._seed + self._batches // self._pass_steps).tolist()
        self._batches += 1
        makers = {"p": self._plays, "d": self._dialogue, "r": self._repeats}
        pieces = [makers[kind](size + 1) for kind in kinds]
        return torch.tensor([ids[: size + 1] for ids, _ in pieces]), torch.tensor([weights[1 : size + 1] for _, weights in pieces])

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, verbose=False)
        return ids

    def _plays(self, size: int) -> Piece:
        start = self._draw.randrange(len(self._stream) - size)
        return self._stream[start : start + size], [1.0] * size

    def _dialogue(self, size: int) -> Piece:
        tools = self._writer.tools(self._draw.choice((1, 2, 2, 3)))
        system = self._writer.system()
        filler = self._plays(self._draw.randint(size // 4, size - ROOM))[0] if size > FILLED else []
        ids, weights, _ = encode_dialogue(self._tokenizer, self._writer, tools, system, size, filler)
        return ids, weights

    def _repeats(self, size: int) -> Piece:
        """Draw from a few random texts again and again, or repeat each at once; only what has been before counts in the loss."""
        draw = self._draw
        at_once = draw.random() < 0.5
        texts = [
            [draw.randrange(FIRST_TOKEN, len(self._tokenizer)) for _ in range(draw.randint(*SEGMENT))] for _ in range(max(2, size // 40))
        ]
        ids: list[int] = []
        weights: list[float] = []
        seen: set[int] = set()
        while len(ids) < size:
            number = len(seen) % len(texts) if at_once else draw.randrange(len(texts))
            for _ in range(draw.randint(2, 3) if at_once else 1):
                ids += texts[number]
                weights += [0.0] + [float(number in seen)] * (len(texts[number]) - 1)
                seen.add(number)
        return ids, weights


def encode_dialogue(
    tokenizer: PreTrainedTokenizerBase, writer: Writer, tools: Sequence[Tool], system: str, size: int, filler: Sequence[int] = ()
) -> tuple[list[int], list[float], list[tuple[int, int, str]]]:
    """Return the tokens of a dialogue of at least `size`, their weights, and where each text of a role begins and ends.

    Args:
        filler: tokens of a text that follows the system's; they count like those of plays.
    """

    def tokens(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, verbose=False)
        return found

    def text_weights(role: str, ids: list[int], decides: bool) -> list[float]:
        if role != "assistant":
            return [PROMPT] * len(ids)
        texts = [str(tokenizer.decode(token)) for token in ids]
        found = [ANSWER] * len(ids)
        if texts[0] == CALL:
            cut = texts.index("arguments")
            found = [CALLED] * 4 + [NAME] * (cut - 5) + [CALLED] * (len(ids) - cut + 1)
            for place in range(cut, len(ids)):
                if texts[place - 1].endswith('"') or texts[place - 1] == " ":
                    found[place] = BEGIN
        return [DECISION if decides else found[0], *found[1:]]

    head = head_text(system, tools)
    before, mark, after = head.partition(TOOLS)
    if filler:
        opening = tokens(before)
        ids = [*opening, *filler, *tokens(f"\n\n{mark}{after}")]
        weights = [PROMPT] * len(opening) + [1.0] * len(filler) + [PROMPT] * (len(ids) - len(opening) - len(filler))
    else:
        ids = tokens(head)
        weights = [PROMPT] * len(ids)
    spans = []
    while len(ids) < size:
        for number, (role, text) in enumerate(writer.turns(tools)):
            begin, rest = (tokens(part) for part in turn_text(role, text))
            spans.append((len(ids) + len(begin), len(ids) + len(begin) + len(rest), "call" if text.startswith(CALL) else role))
            ids += begin + rest
            weights += [PROMPT] * len(begin) + text_weights(role, rest, number == 1)
    return ids, weights, spans
