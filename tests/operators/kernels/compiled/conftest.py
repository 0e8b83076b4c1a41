"""Compile checks need Triton uninterpreted: where the suite interprets kernels, `../test_compiled.py` runs them in their own process."""

from __future__ import annotations

from support.triton_cases import INTERPRETED

if INTERPRETED:
    collect_ignore_glob = ["test_*.py"]
