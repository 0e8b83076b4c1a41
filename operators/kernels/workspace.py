"""Scratch memory of the sparse paths: fixed buffers by batch size, so that a captured graph finds them where they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moegraft.operators.kernels.routing import PairGroups


def bucket_of(tokens: int) -> int:
    """The power of two that `tokens` are rounded up to."""
    return 1 << max(0, tokens - 1).bit_length()


@dataclass(eq=False, slots=True)
class Workspace:
    """Buffers that the layers of a model share, one layer after the other on one stream; those of a batch size are made once and kept.

    Ask for a batch size once before a CUDA graph of it is captured.
    """

    device: torch.device
    _held: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)

    def buffer(self, name: str, bucket: int, shape: Sequence[int], dtype: torch.dtype, *, zeros: bool = False) -> torch.Tensor:
        """The buffer of that name, batch size, shape and type; what is in it is left over from its last use."""
        key = (name, bucket, tuple(shape), dtype)
        held = self._held.get(key)
        if held is None:
            make = torch.zeros if zeros else torch.empty
            held = self._held[key] = make(*shape, dtype=dtype, device=self.device)
        return held

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._held.values())


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of one call: `tokens` of them, sized for their bucket."""

    workspace: Workspace
    tokens: int
    top_k: int
    num_experts: int
    neurons: int
    hidden: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    def of_pairs(self, name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """(pairs, width)."""
        bucket = bucket_of(self.tokens)
        return self.workspace.buffer(name, bucket, (bucket * self.top_k, width), dtype)[: self.pairs]

    def lengths(self, name: str, count: int) -> torch.Tensor:
        """(count,) int32."""
        return self.workspace.buffer(name, bucket_of(self.tokens), (count,), torch.int32)

    def done(self) -> torch.Tensor:
        """(pairs,) int32 of zeros, which whoever counts in it leaves as zeros."""
        bucket = bucket_of(self.tokens)
        return self.workspace.buffer("done", bucket, (bucket * self.top_k,), torch.int32, zeros=True)

    def groups(self, dtype: torch.dtype, block_pairs: int | None = None) -> PairGroups:
        """Pairs by expert, not filled yet; `block_pairs` by default what suits products of that dtype."""
        # Triton need not be installed where no GPU is
        from moegraft.operators.kernels.routing import PairGroups, pairs_a_block

        block_pairs = block_pairs or pairs_a_block(self.pairs, self.num_experts, dtype)
        most = min(self.pairs, self.num_experts) + self.pairs // block_pairs
        return PairGroups(
            pairs=self.lengths(f"pairs {block_pairs}", most * block_pairs),
            block_ids=self.lengths(f"block ids {block_pairs}", most),
            count=self.lengths(f"blocks {block_pairs}", 1),
            block_pairs=block_pairs,
            max_blocks=most,
            pair_count=self.pairs,
        )
