"""The kernels' results, in Triton's interpreter."""

from pathlib import Path

import pytest
from support.triton_cases import run_interpreted

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")


def test_kernels_agree_with_the_reference() -> None:
    run_interpreted(Path(__file__).parent / "numeric")
