"""These tests run kernels: in the interpreter (see ../test_interpreted.py), or on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.triton_cases import numeric_tests_run, poisoned

if not numeric_tests_run():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned():
        yield
