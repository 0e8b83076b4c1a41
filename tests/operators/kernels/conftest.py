"""Tests of Triton kernels: on CUDA where there is a GPU, otherwise in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.triton_cases import poisoned


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned():
        yield
