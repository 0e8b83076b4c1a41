"""The sources of an operator's weights: a mapped checkpoint, a live module, or a test's arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from moegraft.operators.errors import CheckpointError
from moegraft.operators.weight_formats import FORMATS, STORED_FORMATS

Part = Literal["gate", "up", "down", "gate_bias", "up_bias", "down_bias", "weight", "bias"]


class WeightSource(ABC):
    """The weights of one module, read one piece at a time, independent of their stored layout.

    A piece is one matrix of one expert in `nn.Linear` orientation, `(out_features, in_features)`: gate and up `(I, H)`, down
    `(H, I)`; biases are vectors. A module without experts has the parts `weight` and `bias` of expert 0.

    Attributes:
        fingerprint: an identifier of the stored weights that is the same in every process; None where there is none.
        packed_from: of packed bytes, the `weights_hash` of the weights that they were made from; empty where it is not needed.
    """

    packed_from = ""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the stored weights; where matrices differ, the narrowest that holds all of them without rounding."""

    @property
    def fingerprint(self) -> str | None:
        return None

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return the parts of each expert, in the best order to read them."""

    @abstractmethod
    def read(self, part: Part, expert: int = 0) -> torch.Tensor:
        """Return one piece on the CPU, contiguous or a strided view; valid until the next call of the same thread.

        Raises:
            CheckpointError: the piece is missing or cannot be read; the message names the file and the key.
        """

    def read_shaped(self, part: Part, expected: tuple[int, ...], expert: int = 0) -> torch.Tensor:
        """Return one piece as `read` does.

        Raises:
            CheckpointError: the piece has another shape than the model's, or as `read`.
        """
        piece = self.read(part, expert)
        if tuple(piece.shape) != expected:
            raise CheckpointError(f"{self.origin(part, expert)}: shape {tuple(piece.shape)} where the model has {expected}")
        return piece

    def read_codes(self, part: Part, expert: int, weight_type: str) -> Codes | StoredBlocks | None:
        """Return a matrix in the codes of a kernel's type; None if it is not stored in codes that this type holds without rounding."""
        return None

    def segments(self) -> Segments:
        """Return the tensors of a linear layer whose weight types are those of several: `WeightTypes.rows`."""
        raise NotImplementedError

    def packed(self, form: Mapping[str, str | int | bool], sizes: Mapping[str, int]) -> Mapping[str, NDArray[np.uint8]] | None:
        """Return `PackedWeights.tensors` where the source has these instead of weights: read-only, at multiples of 64; else None.

        Args:
            form: what the operator computes with.
            sizes: the bytes of each tensor.

        Raises:
            CheckpointError: the source has bytes of another form or size, or damaged ones.
        """
        return None

    def packed_file(self, name: str) -> tuple[Path, int] | None:
        """Return the file and the offset of a tensor of `packed`, a multiple of 64; None where there is none."""
        return None

    @abstractmethod
    def origin(self, part: Part, expert: int = 0) -> str:
        """Return the file and key of a piece, for messages."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The weights of a module as the kernels read them.

    Attributes:
        form: what the bytes depend on beside the weights, such as the weight type and sizes: text, whole numbers and booleans.
        tensors: (bytes,) uint8 by name.
    """

    form: Mapping[str, str | int | bool]
    tensors: Mapping[str, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix in groups of 32 inputs, value = scale * code: GGUF's Q8_0 (8 bits) and Q4_0 (4 bits).

    Attributes:
        codes: (rows, cols) int8; 4-bit codes are -8 to 7.
        scales: (rows, cols / 32) float16.
        columns: two sizes (m, n), where the columns are the module's inputs (m, n, rest) as (n, m, rest); None if they are in order.
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float16]
    bits: Literal[4, 8]
    columns: tuple[int, int] | None = None

    @property
    def elements(self) -> int:
        return self.codes.size


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix in the blocks of a stored format, with the bytes of the file.

    Attributes:
        blocks: (rows, bytes of a row) uint8, contiguous.
        weight_type: the name of the format, one of `STORED_FORMATS`.
        columns: as those of `Codes`; blocks of 256 columns cannot be brought into another order.
    """

    blocks: NDArray[np.uint8]
    weight_type: str
    columns: tuple[int, int] | None = None

    @property
    def elements(self) -> int:
        return self.blocks.size // FORMATS[self.weight_type].block_bytes * FORMATS[self.weight_type].block_weights


@dataclass(frozen=True, slots=True)
class Segments:
    """The weight of a linear layer that is stored in several tensors.

    Attributes:
        sources: one for each tensor, with the part `weight`.
        heads, kinds: the rows of all tensors are kind by kind, each as many as in `kinds`, and the layer's are head by head.
    """

    sources: Sequence[WeightSource]
    heads: int
    kinds: tuple[int, ...]

    def outputs(self, stored: torch.Tensor) -> torch.Tensor:
        """Return outputs (..., rows) in the order of the layer."""
        if self.heads == 1:
            return stored
        kinds = stored.split(self.kinds, dim=-1)
        return torch.cat([kind.unflatten(-1, (self.heads, -1)) for kind in kinds], dim=-1).flatten(-2)

    def stored(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return outputs (..., rows) of the layer in the order of the tensors."""
        if self.heads == 1:
            return outputs
        kinds = outputs.unflatten(-1, (self.heads, -1)).split([rows // self.heads for rows in self.kinds], dim=-1)
        return torch.cat([kind.flatten(-2) for kind in kinds], dim=-1)


def reordered(values: torch.Tensor, columns: tuple[int, int]) -> torch.Tensor:
    """Return values (..., m * n * rest) in the order (n, m, rest) of their last dimension, for columns (m, n)."""
    found: torch.Tensor = values.unflatten(-1, (*columns, -1)).transpose(-3, -2).flatten(-3)
    return found


def codes_for(source: WeightSource, part: Part, expert: int, weight_type: str) -> Codes | StoredBlocks | None:
    """Return the codes of a piece where `weight_type` holds them without rounding, else None; int8 also holds 4-bit codes."""
    if weight_type not in ("int8", "int4", *STORED_FORMATS):
        return None
    codes = source.read_codes(part, expert, weight_type)
    if isinstance(codes, StoredBlocks):
        return codes if codes.weight_type == weight_type else None
    return codes if codes is not None and (weight_type == "int8" or (weight_type == "int4" and codes.bits == 4)) else None


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the narrowest dtype that holds all of `dtypes`, of which there is at least one, without rounding."""
    return reduce(torch.promote_types, dtypes)


# Bytes of a block of 256 weights; weights that a file stores in fewer bytes are not converted.
BLOCK_BYTES = {name: found.nbytes(256) for name, found in FORMATS.items() if found.scaled}


@dataclass(frozen=True, slots=True)
class StoredTypes:
    """The weight types of a module whose weights a file stores in blocks.

    Attributes:
        whole: the narrowest type that the kernel quantises to and that holds all weights; stored formats count as int8.
        gate_up, down: the narrowest type of these parts, which may be a stored format; in a linear layer, both are its weight's type.
        rows: of a linear layer that is stored in two tensors of the types `gate_up` and `down`: how many each has.
    """

    whole: str
    gate_up: str
    down: str
    rows: tuple[int, int] | None = None


def narrowest(weight_types: Set[str]) -> str:
    """Return the one type, or int8 for codes, which it holds with little or no further rounding, or else float32."""
    if len(weight_types) == 1:
        return next(iter(weight_types))
    return "int8" if weight_types <= {"int4", "int8"} | STORED_FORMATS else "float32"


@dataclass(frozen=True, slots=True)
class WeightTypes:
    """The weight types of a layer's experts, or of a linear layer, which has one; two if it is stored in tensors of two types.

    Options, kernels and reports have them as text: `int8`, or `q4_k+q6_k` for gate and up, and for down, or `q5_k:8192+q4_k:4096` for
    the rows of two tensors.
    """

    gate_up: str
    down: str
    rows: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> WeightTypes:
        (gate_up, _, first), (down, _, second) = (part.partition(":") for part in (*text.split("+"), text)[:2])
        return cls(gate_up, down, (int(first), int(second)) if first and "+" in text else None)

    def __str__(self) -> str:
        if self.rows is not None:
            return f"{self.gate_up}:{self.rows[0]}+{self.down}:{self.rows[1]}"
        return self.gate_up if self.gate_up == self.down else f"{self.gate_up}+{self.down}"

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.gate_up, self.down))

    def map(self, change: Callable[[str], str]) -> WeightTypes:
        """Return the types after a change to each."""
        return WeightTypes(change(self.gate_up), change(self.down), self.rows)


def resolve_weight_types(
    requested: WeightTypes, stored: StoredTypes, known: Collection[str], supports: Callable[[str], bool]
) -> WeightTypes:
    """Return the weight types that a rule's `weights` means for weights that are stored in blocks.

    `stored` means the file's type. Stored formats are kept for `stored`, and those of integers for int8 and int4 where these take no fewer
    bytes.

    Args:
        requested: the value of `weights` in the rule.
        known: the types that the operator packs weights to.
        supports: whether the operator can compute with a stored format, such as `q4_k`, or `q4_k+q6_k` for gate and up, and down.
    """

    def kept(wanted: str, own: str) -> str:
        integers = own in STORED_FORMATS and not FORMATS[own].floats and BLOCK_BYTES[own] <= BLOCK_BYTES.get(wanted, 0)
        return own if wanted == "stored" or integers else wanted

    types = WeightTypes(kept(requested.gate_up, stored.gate_up), kept(requested.down, stored.down), stored.rows)
    as_stored = stored.rows is None or (types.gate_up, types.down) == (stored.gate_up, stored.down)
    if types.names & STORED_FORMATS and as_stored and supports(str(types)):
        return types
    return requested.map(lambda each: stored.whole if each == "stored" and stored.whole in known else each)


STRIPES, STRIPE_BYTES = 64, 256


def sampled(rows: NDArray[np.uint8] | torch.Tensor) -> bytes:
    """Return evenly spaced bytes of each row of (rows, bytes) uint8, to tell weights apart: 64 stripes of 256, or all if it has no more."""
    size = rows.shape[1]
    if size > STRIPES * STRIPE_BYTES:
        begins = np.arange(STRIPES) * (size - STRIPE_BYTES) // (STRIPES - 1)
        places = (begins[:, None] + np.arange(STRIPE_BYTES)).ravel()
        rows = rows[:, torch.from_numpy(places).to(rows.device)] if isinstance(rows, torch.Tensor) else rows[:, places]
    return (rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows).tobytes()
