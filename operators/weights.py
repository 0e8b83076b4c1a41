"""Where an operator takes its weights from: a mapped checkpoint, a live module, or a test's arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.weight_formats import FORMATS

Part = Literal["gate", "up", "down", "gate_bias", "up_bias", "down_bias", "weight", "bias"]
# What the kernel takes from a GGUF file as it is and does not quantise to, with the bytes of a block of 256 weights.
SUPER_BLOCK_BYTES = {name: found.block_bytes for name, found in FORMATS.items() if found.super_block}


class WeightSource(Protocol):
    """The weights of one module, one piece at a time, whatever layout holds them.

    A piece is one matrix of one expert in `nn.Linear` orientation, `(out_features, in_features)`: gate and up `(I, H)`, down
    `(H, I)`; biases are vectors. A module that is no experts module has the parts `weight` and `bias` of expert 0.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the weights are stored in; where matrices differ, one that holds them all without rounding."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """What identifies the stored weights from one start of a program to the next; None where nothing does."""
        ...

    def parts(self) -> Sequence[Part]:
        """The parts each expert has, in the order in which they are best read."""
        ...

    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        """One piece on the CPU, contiguous or a strided view; valid until the next call.

        Raises:
            CheckpointError: the piece is missing or cannot be read; names the file and the key.
        """
        ...

    def origin(self, part: Part, expert: int = 0) -> str:
        """The file and key of a piece, for messages."""
        ...


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix in groups of 32 inputs, value = scale * code: GGUF's Q8_0 (8 bits) and Q4_0 (4 bits).

    Attributes:
        codes: (rows, cols) int8; those of 4 bits are -8 to 7.
        scales: (rows, cols / 32) float16.
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float16]
    bits: Literal[4, 8]

    @property
    def elements(self) -> int:
        return self.codes.size


@dataclass(frozen=True, slots=True)
class SuperBlocks:
    """A matrix in blocks of 256 inputs, GGUF's Q4_K or Q6_K, byte by byte as the file has them.

    Attributes:
        blocks: (rows, bytes of a row) uint8, contiguous.
        weight_type: the kernel's name of them, one of `SUPER_BLOCK_BYTES`.
    """

    blocks: NDArray[np.uint8]
    weight_type: str

    @property
    def elements(self) -> int:
        return self.blocks.size * 256 // SUPER_BLOCK_BYTES[self.weight_type]


@runtime_checkable
class CodedSource(Protocol):
    """A `WeightSource` whose pieces may be stored in codes that the kernel takes as they are."""

    def read_codes(self, part: Part, expert: int = 0) -> Codes | SuperBlocks | None:
        """The codes of a matrix, or None where it is stored otherwise."""
        ...


def codes_for(source: WeightSource, part: Part, expert: int, weight_type: str) -> Codes | SuperBlocks | None:
    """The codes of a piece where `weight_type` holds them without rounding: those of 4 bits are codes of 8 bits, too."""
    if weight_type not in ("int8", "int4", *SUPER_BLOCK_BYTES) or not isinstance(source, CodedSource):
        return None
    codes = source.read_codes(part, expert)
    if isinstance(codes, SuperBlocks):
        return codes if codes.weight_type == weight_type else None
    return codes if codes is not None and (weight_type == "int8" or (weight_type == "int4" and codes.bits == 4)) else None


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds all of `dtypes`, at least one, without rounding."""
    return reduce(torch.promote_types, dtypes)


# Bytes of a block of 256 weights: weights that a file stores in fewer are kept as they are.
BLOCK_BYTES = {name: found.nbytes(256) for name, found in FORMATS.items() if found.scaled}


@dataclass(frozen=True, slots=True)
class StoredTypes:
    """The weight types of a module whose weights a file stores in blocks.

    Attributes:
        whole: the narrowest type that the kernel quantises to and that holds all of them; super-blocks count as int8.
        gate_up, down: the narrowest of each, `q4_k` and `q6_k` among them; both are that of the weight in a linear layer.
    """

    whole: str
    gate_up: str
    down: str


def resolve_weight_type(asked: str, stored: StoredTypes, known: Collection[str], supports: Callable[[str], bool]) -> str:
    """Return the weight type that a rule's `weights` means for weights that are stored in blocks.

    `stored` becomes the file's type. Super-blocks are kept under `stored`, and under int8 and int4 where those have no fewer bits.

    Args:
        asked: what the rule gives.
        known: the types that the operator packs weights to.
        supports: whether the operator can compute with super-blocks, such as `q4_k` or, of gate and up and of down, `q4_k+q6_k`.
    """
    kept = [
        own if asked == "stored" or (own in SUPER_BLOCK_BYTES and BLOCK_BYTES[own] <= BLOCK_BYTES.get(asked, 0)) else asked
        for own in (stored.gate_up, stored.down)
    ]
    if any(own in SUPER_BLOCK_BYTES for own in kept):
        weight_type = kept[0] if kept[0] == kept[1] else "+".join(kept)
        if supports(weight_type):
            return weight_type
    return stored.whole if asked == "stored" and stored.whole in known else asked
