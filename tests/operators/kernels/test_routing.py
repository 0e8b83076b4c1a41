"""Pairs are put together by expert, in their order, whatever the routing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support.triton_cases import DEVICE

from moegraft.operators.kernels.routing import PairGroups, group_pairs, pairs_a_block

CASES = {
    "random": lambda: torch.randint(-1, 7, (50,), generator=torch.Generator().manual_seed(0)),
    "one id": lambda: torch.full((50,), 3),  # several blocks of one id
    "the last id": lambda: torch.full((16,), 6),  # exactly one block
    "none": lambda: torch.full((20,), -1),
    "one pair": lambda: torch.tensor([5]),
    "two chunks": lambda: torch.randint(-1, 7, (1500,), generator=torch.Generator().manual_seed(1)),  # a program looks at 1024 in one go
}


@pytest.mark.parametrize("block_pairs", [16, 64])
@pytest.mark.parametrize("name", CASES)
def test_groups(name: str, block_pairs: int) -> None:
    ids = CASES[name]().to(torch.int32)
    groups = PairGroups.allocate(len(ids), 7, block_pairs, torch.device(DEVICE))
    group_pairs(ids.to(DEVICE), 7, groups)
    used = int(groups.count)
    assert used <= groups.max_blocks
    pairs = groups.pairs.view(-1, block_pairs)[:used].cpu()
    expected, owners = [], []
    for own in range(7):
        members = torch.where(ids == own)[0]
        for first in range(0, len(members), block_pairs):
            block = members[first : first + block_pairs]
            expected.append(torch.cat([block, torch.full((block_pairs - len(block),), len(ids))]))
            owners.append(own)
    assert torch.equal(pairs.long(), torch.stack(expected) if expected else torch.empty(0, block_pairs, dtype=torch.long))
    assert groups.block_ids[:used].tolist() == owners


@pytest.mark.parametrize(("pairs", "ids", "expected"), [(8, 128, 16), (32 * 128, 128, 32), (33 * 128, 128, 64), (0, 0, 16)])
def test_block_size(pairs: int, ids: int, expected: int) -> None:
    assert pairs_a_block(pairs, ids, torch.bfloat16) == expected
    assert pairs_a_block(pairs, ids, torch.float32) == 16
