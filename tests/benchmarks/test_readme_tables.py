"""The tables of the documentation do not depend on the machine that the results are from."""

from __future__ import annotations

import pytest
from support import import_benchmark

WHERE = {"hardware": "a CPU", "commit": "c", "versions": "torch=1"}


def row(provider: str, weights: str, tokens: int, ms: float) -> dict[str, str]:
    figures = {"tokens": str(tokens), "p50_ms": f"{ms}", "read_share": "0.5", "read_probe_gb_s": "20.0"}
    return {"provider": provider, "weights": weights, "threads": "2", **figures, **WHERE}


@pytest.mark.parametrize("bfloat16_isa", ["avx512_bf16", "amx", "scalar"])
def test_a_layer_is_shown_with_the_default_instruction_set_of_each_weight_type(bfloat16_isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        row("ours-avx512_vnni", "int4", 1, 1.0),
        row("ours-avx2", "int4", 1, 9.0),
        row(f"ours-{bfloat16_isa}", "bfloat16", 1, 2.0),
        row("ours-avx2", "bfloat16", 1, 9.0),
        row("transformers-eager", "bfloat16", 1, 4.0),
        row("ours-avx512_vnni", "int4", 512, 10.0),
        row(f"ours-{bfloat16_isa}", "bfloat16", 512, 20.0),
        row("transformers-eager", "bfloat16", 512, 40.0),
    ]
    tables = import_benchmark("readme_tables")
    monkeypatch.setattr(tables, "read", lambda name: rows)
    shown = [line for line in tables.cpu_experts().splitlines() if line.startswith("| ")][2:]
    assert shown == [
        "| **moegraft** | int4 | 1.00 | 10.00 |",
        "| **moegraft** | bfloat16 | 2.00 | 20.00 |",
        "| transformers-eager | bfloat16 | 4.00 | 40.00 |",
    ]
