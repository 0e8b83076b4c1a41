"""Where an operator takes its weights from: a mapped checkpoint, a live module, or a test's arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Literal, Protocol

import torch

Part = Literal["gate", "up", "down", "gate_bias", "up_bias", "down_bias", "weight", "bias"]


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


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds all of `dtypes`, at least one, without rounding."""
    return reduce(torch.promote_types, dtypes)
