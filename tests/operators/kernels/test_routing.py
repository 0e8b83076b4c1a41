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


@pytest.mark.parametrize("by", ["pair", "expert"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", CASES)
def test_groups_of_experts_with_slots(name: str, dtype: torch.dtype, by: str) -> None:
    """Ids are experts of a layer, of which some have slots, far apart; others and padded ids are skipped."""
    ids = CASES[name]().to(dtype)
    ids[::7] = 7  # no id of this layer
    slot_of = torch.tensor([5000, -1, 3, 0, 17, 6143, 9], dtype=torch.int32)
    inside = (ids >= 0) & (ids < 7)
    slots = torch.where(inside, slot_of[ids.clamp(0, 6).long()], -1).to(torch.int32)
    listed = torch.full(ids.shape, -1, dtype=torch.int32, device=DEVICE)
    groups = PairGroups.allocate(len(ids), 7, 16, torch.device(DEVICE))
    given = {"slots": slots.to(DEVICE)} if by == "pair" else {"slot_of": slot_of.to(DEVICE)}
    group_pairs(ids.to(DEVICE), 7, groups, listed=listed, **given)
    used = int(groups.count)
    expected, owners = [], []
    for expert in range(7):
        members = torch.where((ids == expert) & (slots >= 0))[0]
        for first in range(0, len(members), 16):
            block = members[first : first + 16]
            expected.append(torch.cat([block, torch.full((16 - len(block),), len(ids))]))
            owners.append(int(slot_of[expert]))
    assert torch.equal(groups.pairs.view(-1, 16)[:used].cpu().long(), torch.stack(expected) if expected else torch.empty(0, 16).long())
    assert groups.block_ids[:used].tolist() == owners
    assert torch.equal(listed.cpu(), slots)
