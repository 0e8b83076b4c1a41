"""Router maps where texts, numbers, routers and files are unusual."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.families import build_model, case_of, prompt

from moegraft.operators.errors import MoegraftError
from moegraft.operators.router_maps import RouterMaps, fit_maps, save_maps, why_unfit
from moegraft.operators.routing import RouterRows, routers_of
from moegraft.operators.routing_trace import watch_routing

CORRECTED = ("minimax_m2", "ernie4_5_moe", "ernie4_5_vl_moe", "hy_v3", "lfm2_moe", "afmoe", "kolibri1", "deepseek_v4", "gemma4_text")


@pytest.mark.parametrize("model_type", CORRECTED)
@torch.no_grad()
def test_routers_that_choose_by_rows_do(model_type: str) -> None:
    """Corrections are in a router's block, or added to other scores than a sigmoid's; some routers norm their input."""
    model = build_model(case_of(model_type))
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if "correction" in name or "expert_bias" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 2)
    calls = []
    with watch_routing(model, calls.append):
        model(input_ids=prompt(40), use_cache=False)
    for call in calls:
        rows = call.router.rows()
        if rows is not None and call.router.chooses_by_rows() and "hash" not in type(call.router.module).__name__.lower():
            found = rows.choose(call.router_input, call.top_k_index.shape[1])
            assert float((found[:, :, None] == call.top_k_index[:, None]).any(-1).float().mean()) > 0.98


@pytest.mark.parametrize("ids", [torch.tensor([3]), torch.full((40,), 3)])
def test_a_text_without_variety_is_refused_by_name(ids: torch.Tensor) -> None:
    with pytest.raises(MoegraftError, match="text"):
        fit_maps(build_model(case_of("qwen3_moe")), [ids])


def test_inputs_that_are_not_finite_are_refused_by_name() -> None:
    model = build_model(case_of("qwen3_moe"))
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float("nan")
    with pytest.raises(MoegraftError, match="finite"):
        fit_maps(model, [torch.arange(3, 40)])


def test_large_tokens_and_logits_are_ranked() -> None:
    """Larger than float16 has them."""
    rows, x = RouterRows(torch.eye(6).half(), torch.zeros(6), None), torch.zeros(1, 6, dtype=torch.bfloat16)
    x[0, [4, 2, 1]] = torch.tensor([90000.0, 70000, -80000]).to(x.dtype)
    assert rows.choose(x, 2).tolist() == [[4, 2]]
    weight = torch.zeros(6, 64)
    weight[4], weight[2] = 60, 50
    assert RouterRows(weight.half(), torch.zeros(6), None).choose(torch.full((1, 64), 60.0), 2).tolist() == [[4, 2]]


def test_maps_are_where_their_router_is(tmp_path: Path) -> None:
    model = build_model(case_of("deepseek_v3"))
    save_maps(fit_maps(model, [prompt(60)[0]]), tmp_path / "maps")
    first, second = list(routers_of(model.to("meta")).values())[:2]
    rows = RouterMaps(tmp_path / "maps").rows(first.path, second)
    assert rows is not None and rows.choice_bias is not None
    assert rows.weight.device == rows.choice_bias.device


def test_layers_may_have_different_numbers_of_experts(tmp_path: Path) -> None:
    save_maps({"a>b.weight": torch.zeros(8, 4), "a>b.bias": torch.zeros(8)}, tmp_path / "maps")
    assert why_unfit(tmp_path / "maps", (6, 4), "a") is None
    assert why_unfit(tmp_path / "maps", (8, 4), "b") is None


LOADED = """
import sys
from pathlib import Path
import torch
from moegraft.operators.router_maps import RouterMaps
from moegraft.operators.routing import Router
from torch import nn

path = Path(sys.argv[1])
rows = RouterMaps(path).rows("a", Router("b", nn.Linear(512, 8), nn.Module(), 8))
with path.open("r+b") as file:  # as `cp` over it does
    file.truncate(0)
print(float(rows.weight.sum()))
"""


def test_a_file_may_change_once_it_is_read(tmp_path: Path) -> None:
    save_maps({"a>b.weight": torch.ones(8, 512).half(), "a>b.bias": torch.zeros(8)}, tmp_path / "maps")
    run = subprocess.run([sys.executable, "-c", LOADED, tmp_path / "maps"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "4096.0\n"), run.stderr
