"""The sequences that a server computes, in pages of one pool, and the prefixes that ended requests leave there, within a limit of bytes."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from moegraft.injection.cli.images import ImageInputs
from moegraft.injection.cli.serve.prefix_files import PART_TOKENS, PrefixFiles, shared_tokens
from moegraft.injection.injected import injection_of
from moegraft.operators.base import CACHE
from moegraft.operators.decode.mtp import PagedStreams
from moegraft.operators.decode.mtp_layers import asked_states, read_states
from moegraft.operators.decode.pages import PAGE_TOKENS, NoPagesError, PagedCache, PagedSequence, pages_of

logger = logging.getLogger(__name__)
# Checkpoints of recurrent states:
CHECKPOINT_SPACING = 1024  # tokens of a prompt, after which there is one at the end of a chunk
LEAST_CHECKED_PROMPT = 256  # tokens, from which on a prompt has one near its end, for which it is computed in one part more
MOST_CHECKPOINTS = 8  # of a sequence
# Tokens of a prompt's part in a model with states: one alone is a step of decoding, which may round otherwise (cli/chat/prompt_cache.py).
LEAST_STATE_PART = 2
# Keys whose reading takes as long as what a token that pads a draft costs: 8 experts of Qwen3-30B-A3B in 4 bits have the bytes of 9,216
# keys with their values, and other tokens of the pass need about half of these experts anyway.
KEYS_OF_PADDING = 4096
IntArray = NDArray[np.int64]


class RaggedPassError(Exception):
    """A pass over different numbers of tokens failed; another can compute equally many of each sequence."""


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes of keys and values: the limit, what running requests may need until they end, all that is used, and that of prefixes.

    Attributes:
        states, checkpoints: bytes of recurrent states that are used: those of running requests, and those in prefixes.
    """

    limit: int
    promised: int
    used: int
    kept: int
    states: int = 0
    checkpoints: int = 0

    @property
    def free(self) -> int:
        return max(0, self.limit - self.promised)


@dataclass(eq=False, slots=True)
class _Prefix:
    """The tokens of a request that has ended, with which later ones of its scope may begin."""

    token_ids: IntArray
    sequence: PagedSequence
    scope: str

    def shared(self, token_ids: IntArray) -> int:
        """Return with how many tokens both begin."""
        return shared_tokens(self.token_ids, token_ids)


class SequencePool:
    """The sequences of a model's forward passes, whose keys and values are in pages (decode/pages.py), and the prefix cache.

    A sequence is promised the pages of its greatest length when it begins, so that none runs out of memory. Prefixes have the pages that
    are left, up to a limit of their own; the least recently used is evicted first.

    If the model has recurrent states, each sequence also has a place for them, and another can begin with a prefix only at its checkpoints
    (decode/state_pool.py): one near the end of a prompt, others in long prompts, and one at the end of the answer.

    Attributes:
        streams: the MTP layers, if they draft.
        files: the prefixes on disk, if any; they are read if they share more tokens with a prompt than the prefixes in memory.
        ragged: whether a pass can have any number of tokens of each sequence, by `forward_ragged`.

    Args:
        prefix_bytes: for the prefixes, checkpoints included.
    """

    def __init__(self, model: PreTrainedModel, cache: PagedCache, prefix_bytes: int, streams: PagedStreams | None = None) -> None:
        self._model: Any = model  # torch types every attribute of a module as a tensor
        self._cache = cache
        self.streams = streams
        self._pool = cache.pool
        self._promised: dict[PagedSequence, int] = {}  # pages
        self._prefixes: list[_Prefix] = []  # the most recently used one last
        self._states = cache.pool.states
        checkpoint_bytes = 0 if self._states is None else self._states.checkpoints * self._states.place_bytes
        self._most_prefix_pages = (prefix_bytes - checkpoint_bytes) // self._pool.page_bytes
        injection = injection_of(model)
        self._steps = None if injection is None else injection.context.replay
        self._stepped: list[PagedSequence] = []  # the rows of the last step
        self._passes: Any = None  # that may follow the last step, from `passes` of `_steps`
        self.files: PrefixFiles | None = None
        self.ragged = False

    @property
    def memory(self) -> CacheMemory:
        """The bytes now; any thread may ask."""
        size, promised = self._pool.page_bytes, sum(list(self._promised.values()))
        pages = size * self._pool.pages, size * promised, size * self._pool.used, size * self._prefix_pages()
        states = self._states
        return CacheMemory(*pages, *(() if states is None else (states.place_bytes * count for count in (states.running, states.kept))))

    @property
    def layout(self) -> str:
        """The layers' keys, values and states in pages: equal where they can be exchanged."""
        tensors = [*self._pool.data.items(), *(() if self._states is None else self._states.data.items())]
        return " ".join(f"{name}:{tensor.dtype}:{tuple(tensor.shape[1:])}" for name, tensor in tensors)

    @property
    def coded(self) -> bool:
        """Whether keys and values are stored as codes."""
        return self._pool.coded

    @property
    def most_drafted(self) -> int | None:
        """The most sequences of a pass over drafts; None: any number."""
        return None if self._states is None else self._states.past_rows

    @property
    def least_part(self) -> int:
        """The fewest tokens of a prompt to compute in one pass, if it has as many."""
        return 1 if self._states is None else LEAST_STATE_PART

    def needed_bytes(self, tokens: int) -> int:
        return pages_of(tokens) * self._pool.page_bytes

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of at most `tokens` tokens can begin now."""
        if self._states is not None and self._states.full:
            return False
        return sum(self._promised.values()) + pages_of(tokens) <= self._pool.pages

    def begin(
        self, token_ids: list[int], most_tokens: int, scope: str = "", *, multiple: int = 1, images: ImageInputs | None = None
    ) -> PagedSequence:
        """Begin a sequence, with what a prefix of its scope shares with its prompt, of which the last `least_part` tokens are never shared.

        Args:
            multiple: so many tokens are shared, or a multiple of them; 0: none.
            images: of the prompt.
        """
        shift = 0 if images is None else images.position_shift  # first, as the model's own code may fail
        own = np.array((token_ids if images is None else images.cache_ids)[: -self.least_part])

        def usable(tokens: int) -> int:
            return (tokens if images is None else images.usable(tokens)) // multiple * multiple

        sequence = (self._fork(own, scope, usable) if multiple else None) or PagedSequence()
        if images is not None and sequence.tokens >= images.end:
            sequence.position_shift = shift
        if self._states is not None and sequence.place is None:
            self._states.enter(sequence)
        self._promised[sequence] = pages_of(most_tokens)
        if self.streams is not None:
            self.streams.begin(sequence, token_ids)
        return sequence

    def _fork(self, token_ids: IntArray, scope: str, usable: Callable[[int], int]) -> PagedSequence | None:
        """Return a sequence with the most tokens that a prefix has; with how many of a text's first `n` one can begin, `usable` returns."""
        known = {prefix: self._shared(prefix, token_ids, usable) for prefix in self._prefixes if prefix.scope == scope}
        best = max(known, key=known.__getitem__, default=None)
        shared = 0 if best is None else known[best]
        if self.files is not None and (sequence := self._read(self.files, token_ids, scope, usable, (best, shared))):
            return sequence
        if best is None or not shared or best not in self._prefixes:  # evicted for what could not be read
            return None
        self._prefixes.remove(best)  # so that it is not evicted for the copy of its own page
        try:
            if shared % PAGE_TOKENS:
                self._make_room(1)
            sequence = self._pool.fork(best.sequence, shared)
        except NoPagesError:
            if self._states is not None:
                return None
            whole_pages = range(shared // PAGE_TOKENS * PAGE_TOKENS, -1, -PAGE_TOKENS)
            sequence = self._pool.fork(best.sequence, next(tokens for tokens in whole_pages if usable(tokens) == tokens))
        finally:
            self._prefixes.append(best)
        if self._states is not None:
            self._states.enter(sequence, best.sequence.checkpoints[shared])
        return sequence

    def _read(
        self, files: PrefixFiles, token_ids: IntArray, scope: str, usable: Callable[[int], int], known: tuple[_Prefix | None, int]
    ) -> PagedSequence | None:
        """Return a sequence with a prefix on disk; None if there is none with more tokens than one in memory.

        Args:
            known: that prefix, and with how many of its tokens a sequence can begin.
        """
        prefix, shared = known
        parts, tokens = files.find(token_ids, scope, usable, states=self._states is not None)
        if tokens <= shared:
            return None
        whole = shared // PART_TOKENS * PART_TOKENS
        sequence = self._pool.fork(prefix.sequence, whole) if prefix is not None and whole else PagedSequence()
        try:
            self._make_room(pages_of(parts[-1].end) - len(sequence.pages))
            self._pool.grow(sequence, parts[-1].end)
            for part in parts[whole // PART_TOKENS :]:
                pages = sequence.pages[part.start // PAGE_TOKENS : pages_of(part.end)]
                place = 0 if part.is_tail else None  # any
                forms = {name: (data.dtype, (len(rows), *data.shape[1:])) for name, data, rows in self._stored(pages, place)}
                tensors = files.read(part, forms)
                if tensors is None:
                    break
                sequence.tokens = part.end
                if part.is_tail and self._states is not None:
                    self._states.enter(sequence)
                    place = sequence.place
                for name, data, rows in self._stored(pages, place):
                    data[rows] = tensors[name].to(data.device)
        except NoPagesError:
            sequence.tokens = 0
        if sequence.tokens <= shared or (self._states is not None and sequence.place is None):
            self._pool.release(sequence)  # a file was damaged, or there is no room
            return None
        self._pool.crop(sequence, usable(min(sequence.tokens, tokens)))
        if self._states is not None:
            self._save(sequence)
        files.read_tokens += sequence.tokens - whole
        return sequence

    def _write(self, files: PrefixFiles, prefix: _Prefix) -> None:
        """Let what a prefix has be written, in copies, as its pages may be given to another sequence at any time."""
        checkpoints, length = prefix.sequence.checkpoints, len(prefix.token_ids)
        end = [length] if length > PART_TOKENS and length % PART_TOKENS else []
        for part in files.missing(prefix.token_ids, prefix.scope, end if self._states is None else checkpoints):
            pages = prefix.sequence.pages[part.start // PAGE_TOKENS : pages_of(part.end)]
            place = checkpoints.get(part.end) if part.is_tail else None
            if not files.write(part, prefix.token_ids, {name: data[rows].cpu() for name, data, rows in self._stored(pages, place)}):
                return

    def _stored(self, pages: list[int], place: int | None) -> Iterator[tuple[str, torch.Tensor, list[int]]]:
        """Yield what a file has of pages and, if a place is given, of its states: the names, and the tensors here with their rows."""
        for number, data in self._pool.data.items():
            yield str(number), data, pages
        if place is not None and self._states is not None:
            for name, data in self._states.data.items():
                yield ".".join(map(str, name)), data, [place]

    def _shared(self, prefix: _Prefix, token_ids: IntArray, usable: Callable[[int], int]) -> int:
        """Return with how many tokens of a prefix a sequence can begin."""
        shared = usable(prefix.shared(token_ids))
        if self._states is None:
            return shared
        return max((at for at in prefix.sequence.checkpoints if at <= shared and usable(at) == at), default=0)

    def until_checkpoint(self, sequence: PagedSequence, prompt_tokens: int, multiple: int) -> int:
        """Return how many tokens of a prompt may be computed in one part: up to its last checkpoint, or all that are left.

        Args:
            multiple: checkpoints are after so many tokens, or a multiple of them.
        """
        if self._states is not None and self._states.checkpoints and multiple and prompt_tokens >= LEAST_CHECKED_PROMPT:
            last = _last_place(prompt_tokens, multiple)
            if sequence.tokens + LEAST_STATE_PART <= last:
                return last - sequence.tokens
        return prompt_tokens - sequence.tokens

    def checkpoint(self, sequence: PagedSequence, prompt_tokens: int, multiple: int) -> None:
        """Save the states of a sequence that has a part of its prompt, if that is a place for a checkpoint."""
        at = sequence.tokens
        if self._states is None or not multiple or at % multiple or at >= prompt_tokens:
            return
        if at == _last_place(prompt_tokens, multiple) or at - max(sequence.checkpoints, default=0) >= CHECKPOINT_SPACING:
            self._save(sequence)

    def _save(self, sequence: PagedSequence) -> None:
        """Add a checkpoint to a sequence, for which others may be dropped."""
        states = self._states
        assert states is not None, "the model has states"
        self._thin(sequence, MOST_CHECKPOINTS - 1)
        while not states.save(sequence):
            prefix = next((each for each in self._prefixes if each.sequence.checkpoints), None)
            if prefix is not None:
                self._evict(prefix)
            elif sequence.checkpoints:
                states.drop(sequence, min(sequence.checkpoints))
            else:
                return

    def forward(
        self, sequences: Sequence[PagedSequence], token_ids: list[list[int]], *, keep: bool = True, drafted: bool = False, **extra: Any
    ) -> torch.Tensor:
        """Compute the next tokens of some sequences, equally many of each; return the logits, (B, T, V).

        A sequence is unchanged if that fails. Recurrent states are lost: those of a single sequence, and those of all without `keep`.

        Args:
            drafted: whether `crop` follows for each sequence, which may drop all but the first of these tokens.
            extra: of the model, such as images with positions of their own.
        """
        self._stepped, self._passes = [], None  # another pass may come between two steps
        self._begin(sequences, len(token_ids[0]), copies=keep and not drafted and len(sequences) > 1, keeps_past=drafted)
        return self._compute(sequences, token_ids, torch.tensor(token_ids), extra)

    def verify(
        self, sequences: Sequence[PagedSequence], token_ids: Sequence[list[int]], wanted: Sequence[int]
    ) -> tuple[torch.Tensor, Sequence[int]]:
        """Compute next tokens of sequences, any number of each; `crop` may follow for each, and drop all but the first of them.

        Args:
            wanted: of the last tokens of each, the number after which logits are needed; fewer than all only if `ragged`.

        Returns:
            Logits (N, V), and the row of the first ones of each sequence.

        Raises:
            RaggedPassError: a ragged pass failed; `ragged` is false from then on, and the sequences are unchanged.
        """
        lengths = list(map(len, token_ids))
        most = max(lengths)
        padding = most * len(lengths) - sum(lengths)
        # Each token of a ragged pass reads the keys of its sequence by itself, the first one's once more for each other token.
        keys_again = sum((length - 1) * sequence.tokens for sequence, length in zip(sequences, lengths, strict=True))
        if self.ragged and (list(wanted) != lengths or keys_again < KEYS_OF_PADDING * padding):
            try:
                return self.forward_ragged(sequences, token_ids, wanted), [0, *itertools.accumulate(wanted[:-1])]
            except torch.AcceleratorError:
                raise
            except Exception as error:
                self.ragged = False
                raise RaggedPassError from error
        # A shorter draft is followed by any token, which is dropped with the rejected ones.
        logits = self.forward(sequences, [ids + ids[-1:] * (most - len(ids)) for ids in token_ids], drafted=True)
        return logits.flatten(0, 1), range(0, most * len(lengths), most)

    def forward_ragged(self, sequences: Sequence[PagedSequence], token_ids: Sequence[list[int]], wanted: Sequence[int]) -> torch.Tensor:
        """Compute next tokens of sequences, any number of each; return the logits after the last `wanted` ones of each, (N, V) float32.

        A sequence is unchanged if that fails.
        """
        self._stepped, self._passes = [], None
        grown = list(zip(sequences, token_ids, strict=True))
        rows = [sequence for sequence, ids in grown for _ in ids]
        held = [sequence.tokens + at for sequence, ids in grown for at in range(len(ids))]
        self._make_room_for((each, each.tokens + len(ids)) for each, ids in grown)
        self._cache.begin(rows, 1, held=held, ragged=True)
        ends = itertools.accumulate(map(len, token_ids))
        kept = torch.tensor([at for end, count in zip(ends, wanted, strict=True) for at in range(end - count, end)])
        row = torch.tensor([[token for ids in token_ids for token in ids]])
        return self._compute(sequences, token_ids, row, {"logits_to_keep": kept})[0].float()

    def _compute(
        self, sequences: Sequence[PagedSequence], token_ids: Sequence[list[int]], ids: torch.Tensor, extra: dict[str, Any]
    ) -> torch.Tensor:
        """Compute the prepared pass over `ids`, which are the tokens of the sequences; return its logits."""
        inputs = {"input_ids": ids, **self._cache.arguments()}
        given: dict[str, Any] = {name: value.to(self._model.device) for name, value in inputs.items()} | extra
        if self.streams is not None:
            given["output_hidden_states"] = asked_states(self._model)
        output = self._model(**given, use_cache=True, **{CACHE: self._cache})
        if self.streams is not None:
            states = read_states(self._model, output).flatten(0, 1).split(list(map(len, token_ids)))
            if len(ids) != len(sequences):  # an answer's, which may wait for many passes, would keep those of prompts as well
                states = [each.clone() for each in states]
            self.streams.note(sequences, token_ids, states)
        self._cache.finish()
        logits: torch.Tensor = output.logits
        return logits

    def _begin(self, sequences: Sequence[PagedSequence], tokens: int, *, copies: bool = False, keeps_past: bool = False) -> None:
        self._make_room_for((each, each.tokens + tokens) for each in sequences)
        self._cache.begin(sequences, tokens, copies=copies, keeps_past=keeps_past)

    def step(self, sequences: Sequence[PagedSequence], tokens: list[int]) -> torch.Tensor:
        """Compute one token of each sequence; return the logits of the next ones, (B, V) float32."""
        passes, self._passes = self._passes, None
        if self._steps is not None and passes is not None and self._stepped == list(sequences):
            self._begin(sequences, 1)
            continued: torch.Tensor | None = passes.follow(tokens)
            if continued is not None:
                if self.streams is not None:
                    self.streams.note(sequences, [[token] for token in tokens], passes.hidden_states)
                self._cache.finish()
                self._passes = passes
                self._steps.continued(len(tokens))
                return continued.clone()
            self._cache.abandon()
        logits = self.forward(sequences, [[token] for token in tokens], keep=False)[:, -1].float()
        if self._steps is not None:
            self._stepped = list(sequences)
            passes = self._steps.passes(self._cache)
            self._passes = passes if passes.note() else None
        return logits

    def mark(self, sequences: Sequence[PagedSequence]) -> None:
        """Let `crop` return to the tokens that sequences have now, after `draft`."""
        if self._states is not None and self.streams is None:
            self._states.mark(sequences)

    def draft(self, sequences: Sequence[PagedSequence], texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return a drafter's logits after texts, (B, V) float32; of each text, the sequence has all tokens but the last and its draft.

        Drafts of the model itself are tokens of the sequences, from which the caller removes them.
        """
        if self.streams is None:
            return self.step(sequences, [text[-1] for text in texts])
        most = [sequence.tokens + 1 + self.streams.longest for sequence in sequences]
        self._make_room_for(zip(sequences, most, strict=True))
        for sequence, tokens in zip(sequences, most, strict=True):
            self._pool.grow(sequence, tokens)
        return self.streams.logits(sequences, texts)

    def crop(self, sequence: PagedSequence, tokens: int) -> None:
        """Drop all but the first `tokens` tokens of a sequence.

        One with recurrent states can go on if it was in `mark` with these tokens, or its latest pass was over a draft that begins there.
        """
        self._stepped, self._passes = [], None
        self._pool.crop(sequence, tokens)
        if self._states is not None:
            self._states.return_to(sequence, tokens)
        if self.streams is not None:
            self.streams.crop(sequence, tokens)

    def end(self, sequence: PagedSequence, token_ids: Sequence[int] = (), scope: str = "") -> None:
        """End a sequence, and keep those of its tokens that are given as a prefix, up to the last checkpoint if there are states."""
        del self._promised[sequence]
        if self.streams is not None:
            self.streams.end(sequence)
        if self._states is not None:  # those of tokens that are not kept are lost
            for at in [at for at in sequence.checkpoints if at > len(token_ids)]:
                self._states.drop(sequence, at)
            if self._most_prefix_pages > 0 and sequence.states_at == sequence.tokens <= len(token_ids):
                self._save(sequence)
            self._states.leave(sequence)
        self._pool.crop(sequence, len(token_ids))
        new = _Prefix(np.array(token_ids[: sequence.tokens], dtype=np.int64), sequence, scope)
        if not sequence.tokens or self._most_prefix_pages < 1:
            self._release(new)
            return
        for old in [old for old in self._prefixes if old.scope == scope and old.shared(new.token_ids) == len(old.token_ids)]:
            for at in old.sequence.checkpoints.keys() - sequence.checkpoints.keys():
                sequence.checkpoints[at] = old.sequence.checkpoints.pop(at)
            self._evict(old)  # the new one begins with all of it
        if self._states is not None:
            self._pool.crop(sequence, max(sequence.checkpoints, default=0))
            new.token_ids = new.token_ids[: sequence.tokens]
            self._thin(sequence, MOST_CHECKPOINTS)
            if not sequence.tokens:
                return
        self._prefixes.append(new)
        if self.files is not None:
            self._write(self.files, new)
        while self._prefix_pages() > self._most_prefix_pages:
            self._evict(self._prefixes[0])

    def _thin(self, sequence: PagedSequence, most: int) -> None:
        """Drop checkpoints of a sequence until it has at most `most`: those nearest to the ones before them, but not the last two."""
        while self._states is not None and len(sequence.checkpoints) > most:
            places = sorted(sequence.checkpoints)
            gaps = {at: at - before for before, at in zip([0, *places], places[:-2], strict=False)}
            self._states.drop(sequence, min(gaps, key=gaps.__getitem__))

    def drop_prefixes(self) -> None:
        for prefix in self._prefixes[:]:
            self._evict(prefix)

    def _evict(self, prefix: _Prefix) -> None:
        self._prefixes.remove(prefix)
        self._release(prefix)

    def _release(self, prefix: _Prefix) -> None:
        for at in list(prefix.sequence.checkpoints):
            assert self._states is not None, "the model has states"
            self._states.drop(prefix.sequence, at)
        self._pool.release(prefix.sequence)

    def _prefix_pages(self) -> int:
        return len({page for prefix in list(self._prefixes) for page in prefix.sequence.pages})

    def _make_room_for(self, lengths: Iterable[tuple[PagedSequence, int]]) -> None:
        """Let sequences grow to so many tokens, of which some have more pages already."""
        self._make_room(sum(max(0, pages_of(tokens) - len(sequence.pages)) for sequence, tokens in lengths))

    def _make_room(self, pages: int) -> None:
        while self._prefixes and self._pool.free < pages:
            self._evict(self._prefixes[0])


def _last_place(prompt_tokens: int, multiple: int) -> int:
    """Return where the last checkpoint of a prompt may be, behind which a part of it is left."""
    return (prompt_tokens - LEAST_STATE_PART) // multiple * multiple
