"""Router maps: they are what least squares give, name more experts than routers, and files of others are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.families import build_model, case_of, prompt
from torch import nn
from transformers import AutoTokenizer

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.injection.texts import text_content
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.offload.executors import LookAhead
from moegraft.operators.router_maps import PRIOR_TOKENS, RouterMaps, RouterMapsError, fit_maps, named_shares, save_maps, why_unfit
from moegraft.operators.routing import Router, RouterRows, routers_of
from moegraft.operators.routing_trace import watch_routing


def texts(count: int, tokens: int = 40) -> list[torch.Tensor]:
    return [prompt(tokens, seed=seed)[0] for seed in range(count)]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@torch.no_grad()
def test_maps_are_ridge_regression_toward_the_router(model_type: str, tmp_path: Path) -> None:
    model = build_model(case_of(model_type))
    found = fit_maps(model, texts(5))
    calls = []
    with watch_routing(model, calls.append):
        for ids in texts(5):
            model(input_ids=ids[None])
    paths = list(routers_of(model))
    source, target = paths[0], paths[-1]
    x, seen = (torch.cat([call.router_input for call in calls if call.router.path == path]).double() for path in (source, target))
    rows = routers_of(model)[target].rows()
    assert rows is not None and (rows.bias is not None) == (model_type == "gpt_oss")
    assert (rows.choice_bias is not None) == (model_type == "deepseek_v3")
    weight, bias = rows.weight.double(), 0 if rows.bias is None else rows.bias.double()
    logits = F.linear(seen, weight) + bias
    centred = x - x.mean(0)
    prior = PRIOR_TOKENS * centred.square().mean()
    # The stacked problem whose plain least squares are the ridge's: one row of the prior for each column.
    inputs = torch.cat([centred, prior.sqrt() * torch.eye(x.shape[1], dtype=torch.float64)])
    outputs = torch.cat([logits - logits.mean(0), prior.sqrt() * weight.T])
    expected = torch.linalg.lstsq(inputs, outputs).solution.T
    torch.testing.assert_close(found[f"{source}>{target}.weight"].double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found[f"{source}>{target}.bias"].double(), logits.mean(0) - expected @ x.mean(0), atol=2e-3, rtol=2e-3)


def test_maps_name_more_experts_than_routers(tmp_path: Path) -> None:
    model = optimize_and_load(demo_path(), "cpu", progress=False)
    ids = torch.tensor(AutoTokenizer.from_pretrained(demo_path())(text_content(None, "calibration").decode())["input_ids"])
    windows = ids.split(200)
    save_maps(fit_maps(model, windows[:-3]), tmp_path / "maps")
    for routers, maps in named_shares(model, windows[-3:], RouterMaps(tmp_path / "maps")):
        assert 0.2 < routers < maps < 1


def test_rows_choose_as_their_router() -> None:
    for model_type in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        model = build_model(case_of(model_type))
        router = next(iter(routers_of(model).values()))
        rows, x = router.rows(), torch.randn(50, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
        assert rows is not None
        if model_type == "deepseek_v3":  # groups limit its choice
            router.module.num_group = router.module.topk_group = 1
        assert torch.equal(rows.choose(x, router.top_k()).sort(-1).values, router.route(x).sort(-1).values)


def test_a_router_of_another_form_has_no_rows() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 6), nn.Linear(8, 6)

    assert Router("experts", Two(), nn.Module(), 6).rows() is None


def test_look_ahead_asks_maps_of_the_layer_where_the_tokens_are(tmp_path: Path) -> None:
    model = build_model(case_of("qwen3_moe"))
    routers = list(routers_of(model).values())
    first, second = routers[:2]
    own = second.rows()
    assert own is not None
    turned = own.weight.flip(0).contiguous()
    save_maps(
        {f"{first.path}>{second.path}.weight": turned, f"{first.path}>{second.path}.bias": torch.zeros(len(turned))}, tmp_path / "maps"
    )
    look_ahead = LookAhead(routers)
    look_ahead.use(RouterMaps(tmp_path / "maps"), torch.device("cpu"))
    x = torch.randn(7, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    expected = RouterRows(turned, None, None).choose(x, second.top_k())
    assert torch.equal(look_ahead.chosen(x, range(1, 2), 0)[0], expected)
    assert torch.equal(look_ahead.chosen(x, range(1, 2))[0], second.route(x))
    assert not torch.equal(expected, second.route(x))


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    path.write_bytes(b"no maps")
    with pytest.raises(RouterMapsError, match=r"maps: no file of router maps \("):
        RouterMaps(path)
    save_maps({"layers.0>layers.1.weight": torch.zeros(6, 4), "layers.0>layers.1.bias": torch.zeros(6)}, path)
    assert why_unfit(path, (6, 4), "layers.0") is why_unfit(path, (6, 4), "layers.1") is None
    assert "the maps of another model, which has no layers.2" in str(why_unfit(path, (6, 4), "layers.2"))
    assert "maps of layers with 6 experts of width 4, where this one has 8 of width 4" in str(why_unfit(path, (8, 4), "layers.1"))


def test_nothing_to_fit() -> None:
    model = build_model(case_of("qwen3_moe"))
    with pytest.raises(UnsupportedModelError, match="no two layers have routers"):
        fit_maps(model, [])


def test_states_that_are_not_finite_fit_nothing() -> None:
    model = build_model(case_of("qwen3_moe"))
    torch.nn.init.constant_(model.get_parameter("model.norm.weight"), float("nan"))
    fit_maps(model, texts(1))  # behind all routers
    torch.nn.init.constant_(model.get_parameter("model.embed_tokens.weight"), float("nan"))
    with pytest.raises(UnsupportedModelError, match="the inputs of its router are not finite"):
        fit_maps(model, texts(1))


def test_damaged_files_and_folders_are_refused(tmp_path: Path) -> None:
    save_maps({"a>b.weight": torch.zeros(6, 4)}, tmp_path / "half")
    with pytest.raises(RouterMapsError, match=r"half: damaged: a>b\.weight \(6, 4\) has no matching other part"):
        RouterMaps(tmp_path / "half")
    with pytest.raises(RouterMapsError, match=rf"{tmp_path.name}: not a file"):
        RouterMaps(tmp_path)
