"""Attention of decode steps against float64, and `fused_attention` in models: stock's logits, and stock's modules for all other calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

pytest.importorskip("triton", reason="Triton is an extra: pip install 'moegraft[gpu]'")
import torch
from support import combinations
from support.families import build_model, case_of, prompt
from support.kernel_cases import relative_error
from support.triton_cases import DEVICE, INTERPRETED, ROUNDED, launched, poisoned, with_fused
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from moegraft.operators.base import CACHE
from moegraft.operators.cpu_ops.fused_attention import FusedAttention
from moegraft.operators.cpu_ops.norm import FusedNorm
from moegraft.operators.cpu_ops.router import FusedRouter
from moegraft.operators.kernels import attention as kernels
from moegraft.operators.kernels.attention import HeadNorm, decode_attention

injected = partial(with_fused, ("attention",))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    batch: int
    queries: int
    heads: int
    columns: int
    value_columns: int
    places: int
    length: int
    rotary: int = 0
    angles: int = 0


SHAPES = [
    Shape(1, 8, 2, 16, 16, 12, 0),  # the first token
    Shape(2, 4, 4, 33, 20, 70, 69, 32, 32),  # odd sizes, a part of the columns rotated, the last place
    Shape(1, 32, 1, 64, 64, 300, 290, 64, 32),  # several parts; angles of a half
    Shape(3, 6, 2, 40, 40, 520, 30, 40, 40),  # most parts are empty
    Shape(1, 4, 2, 8, 8, 200, 130, 6, 3),  # heads of fewer columns than a product has
]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def normalised(x: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon) * (norm.offset + norm.weight.double())


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> torch.Tensor:
    """Rotate the first columns of heads (B, heads, D); angles (B, N)."""
    cos, sin = (each.double().repeat(1, rotary // each.shape[1])[:, None] for each in (cos, sin))
    first, second = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    turned = x[..., :rotary] * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, x[..., rotary:]), -1)


MORE = ["", "norms", "sinks", "gate", "float mask", "one mask"]


@pytest.mark.parametrize(("dtype", "more", "shape"), combinations(DTYPES, MORE, SHAPES), ids=str)
def test_every_form(shape: Shape, more: str, dtype: torch.dtype) -> None:
    batch, queries, heads, columns = shape.batch, shape.queries, shape.heads, shape.columns
    gated = more == "gate"
    value_columns = columns if gated else shape.value_columns
    query = random(batch, 1, queries * columns * (1 + gated), seed=0, dtype=dtype)
    key, value = (random(batch, 1, heads * width, seed=seed, dtype=dtype) for seed, width in ((1, columns), (2, value_columns)))
    cos, sin = (random(batch, 1, shape.angles, seed=seed, dtype=dtype) for seed in (3, 4))
    weights = [random(columns, seed=seed, dtype=dtype) for seed in (5, 6)]
    norms = [HeadNorm(weight, EPSILON, 1.0, rounds_first=True) for weight in weights] if more == "norms" else None
    sinks = random(queries, seed=7, dtype=dtype) if more == "sinks" else None
    keys, values = (random(batch, heads, shape.places, width, seed=seed, dtype=dtype) for seed, width in ((8, columns), (9, value_columns)))
    length = torch.tensor(shape.length, device=DEVICE)
    places = torch.arange(shape.places, device=DEVICE)
    hidden = torch.arange(batch, device=DEVICE)[:, None] * shape.length // (2 * batch)  # places of padding
    seen = (places <= shape.length) & (places >= (0 * hidden[:1] if more == "one mask" else hidden))
    mask = seen[:, None, None]
    if more == "float mask":
        mask = torch.zeros(mask.shape, dtype=dtype, device=DEVICE).masked_fill(~mask, torch.finfo(dtype).min)

    wide = query.double().view(batch, queries, -1)
    gate = torch.sigmoid(wide[..., columns:]) if gated else 1.0
    parts = [wide[..., :columns], key.double().view(batch, heads, columns)]
    if norms is not None:
        parts = [normalised(x, norm) for x, norm in zip(parts, norms, strict=True)]
    new_query, new_key = (rotated(x, cos[:, 0], sin[:, 0], shape.rotary) if shape.rotary else x for x in parts)
    wanted_keys, wanted_values = keys.double(), values.double()
    wanted_keys[:, :, shape.length], wanted_values[:, :, shape.length] = new_key, value.double().view(batch, heads, -1)
    group = queries // heads
    scores = (new_query[:, :, None] * wanted_keys.repeat_interleave(group, 1)).sum(-1) * 0.3
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None].expand(batch, -1, 1)), -1)
    shares = scores.softmax(-1)[..., : shape.places]
    expected = (shares[..., None] * wanted_values.repeat_interleave(group, 1)).sum(2) * gate

    angles = (cos, sin) if shape.rotary else None
    with poisoned():
        found = decode_attention(
            (query, key, value), angles, shape.rotary, norms and (norms[0], norms[1]), (keys, values, length), mask, 0.3, sinks, gated=gated
        )
    assert (found.shape, found.dtype) == ((batch, 1, queries * value_columns), dtype)
    tolerance = 4 * ROUNDED[dtype] if more == "norms" else 2 * ROUNDED[dtype]
    assert relative_error(found.view(batch, queries, -1).cpu(), expected.cpu()) <= tolerance
    assert relative_error(keys.cpu(), wanted_keys.cpu()) <= ROUNDED[dtype]
    assert torch.equal(values.double(), wanted_values)
    assert int(length) == shape.length + 1


def test_a_full_cache_is_left_alone() -> None:
    keys, values = random(2, 2, 6, 16, seed=0), random(2, 2, 6, 16, seed=1)
    before = keys.clone(), values.clone()
    around = torch.tensor(6, device=DEVICE)
    states = (random(2, 1, 64, seed=2), random(2, 1, 32, seed=3), random(2, 1, 32, seed=4))
    mask = torch.ones(1, 1, 1, 6, dtype=torch.bool, device=DEVICE)
    found = decode_attention(states, None, 0, None, (keys, values, around), mask, 0.25)
    assert found.isnan().all()
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])


def test_sequences_that_see_no_token_are_zeros() -> None:
    keys, values = random(2, 2, 100, 16, seed=0), random(2, 2, 100, 16, seed=1)
    states = (random(2, 1, 64, seed=2), random(2, 1, 32, seed=3), random(2, 1, 32, seed=4))
    mask = torch.ones(2, 1, 1, 100, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    found = decode_attention(states, None, 0, None, (keys, values, torch.tensor(70, device=DEVICE)), mask, 0.25)
    assert found[0].isfinite().all()
    assert not found[1].any()


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(FusedNorm, "on_gpu", True)
        monkeypatch.setattr(FusedAttention, "on_gpu", True)


@pytest.fixture
def launches() -> Iterator[list[torch.Size]]:
    """The shapes of the queries that the kernels are given."""
    with launched(kernels, "decode_attention") as found:
        yield found


def stock(model_type: str, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    model = build_model(case_of(model_type)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "sinks" in name:
                weight.normal_()  # else an offset and a product with ones would be the same
    if attention == "eager":
        model.set_attn_implementation(attention)
    return model.to(DEVICE)


def decoded(model: PreTrainedModel, ids: torch.Tensor, steps: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits (B, steps, V) of tokens that follow a prompt over a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + steps + 1)
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        model(ids, attention_mask=mask, **{CACHE: cache})
        logits = []
        for step in range(steps):
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
            logits.append(model(ids[:, step : step + 1], attention_mask=mask, **{CACHE: cache}).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize(
    ("model_type", "form"),
    [
        ("qwen3_moe", {"rotary": 16, "angles": 16, "head_norm": (1e-6, 0.0, True), "norms_rows": False, "gated": False}),
        ("qwen3_next", {"rotary": 4, "angles": 4, "head_norm": (1e-6, 1.0, True), "norms_rows": False, "gated": True}),
        ("glm4_moe", {"rotary": 8, "angles": 8, "head_norm": None, "norms_rows": False, "gated": False}),
        ("gpt_oss", {"rotary": 16, "angles": 8, "head_norm": None, "norms_rows": False, "gated": False}),
        ("olmoe", {"rotary": 16, "angles": 16, "head_norm": None, "norms_rows": True, "gated": False}),
        ("jamba", {"rotary": 0, "angles": 0, "head_norm": None, "norms_rows": False, "gated": False}),
        ("granitemoe", {"rotary": 16, "angles": 16, "head_norm": None, "norms_rows": False, "gated": False}),
    ],
)
def test_logits_stay(model_type: str, form: dict[str, Any], tmp_path: Path, launches: list[torch.Size]) -> None:
    model, ids = stock(model_type), prompt(6, batch=2, seed=3).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    expected = decoded(model, ids, 3, mask)
    ours = injected(model, tmp_path)
    operators = [each for each in ours.moegraft.operators.values() if isinstance(each, FusedAttention)]
    found_forms = [each._form for each in operators]
    assert all({name: getattr(each, name) for name in form} == form for each in found_forms)
    launches.clear()
    found = decoded(ours, ids, 3, mask)
    full = len(operators) - sum(kind == "sliding_attention" for kind in getattr(model.config, "layer_types", None) or [])
    assert len(launches) == 3 * full > 0
    assert float((found - expected).norm()) <= (2e-5 if INTERPRETED else 1e-3) * float(expected.norm())


def test_eager_modules_have_masks_to_add(tmp_path: Path, launches: list[torch.Size]) -> None:
    model, ids = stock("qwen3_moe", "eager"), prompt(6, batch=1, seed=3).to(DEVICE)
    expected = decoded(model, ids, 2)
    ours = injected(model, tmp_path)
    launches.clear()
    found = decoded(ours, ids, 2)
    assert len(launches) == 2 * model.config.num_hidden_layers
    assert float((found - expected).norm()) <= (2e-5 if INTERPRETED else 1e-3) * float(expected.norm())


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama4_text", "hunyuan_v1_moe"])
def test_other_forms_are_left_alone(model_type: str, tmp_path: Path) -> None:
    model = injected(stock(model_type), tmp_path)
    lines = {each.placement() for each in model.moegraft.operators.values()}
    assert lines == {"attention: fused_attention, left to PyTorch"}


def test_limits_that_random_states_do_not_reach_are_left_to_the_module(tmp_path: Path, launches: list[torch.Size]) -> None:
    model, ids = stock("olmoe"), prompt(6, batch=1, seed=3).to(DEVICE)
    model.config.clip_qkv = 8.0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.mul_(100)
    expected = decoded(model, ids, 2)
    ours = injected(model, tmp_path)
    launches.clear()
    found = decoded(ours, ids, 2)
    assert not launches
    assert torch.equal(found, expected)


def test_modules_without_a_layer_of_the_cache_are_left_alone(tmp_path: Path) -> None:
    model: Any = stock("qwen3_moe")
    model.model.layers[0].self_attn.layer_idx = None
    operators = injected(model, tmp_path).moegraft.operators
    assert operators["model.layers.0.self_attn"].placement() == "attention: fused_attention, left to PyTorch"


def test_angles_of_another_rotation_are_left_to_the_module(
    tmp_path: Path, launches: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

    def interleaved(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    monkeypatch.setattr(modeling, "rotate_half", interleaved)
    first = stock("granitemoehybrid")
    first.config.position_embedding_type = "rope"
    model, ids = type(first)(first.config).eval().to(DEVICE), prompt(6, batch=1, seed=3).to(DEVICE)
    expected = decoded(model, ids, 2)
    ours = injected(model, tmp_path)
    launches.clear()
    found = decoded(ours, ids, 2)
    assert not launches
    assert float((found - expected).norm()) <= (2e-5 if INTERPRETED else 1e-3) * float(expected.norm())


@pytest.mark.parametrize("kind", ["own update", "offloaded"])
def test_caches_that_do_more_than_add_tokens_are_asked(
    kind: str, tmp_path: Path, launches: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    updated = []

    def update(cache: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, **kwargs: Any) -> Any:
        updated.append(layer)
        return cache.layers[layer].update(keys, values)

    model, ids = injected(stock("qwen3_moe"), tmp_path), prompt(6, batch=1, seed=3).to(DEVICE)
    launches.clear()
    monkeypatch.setattr(StaticCache if kind == "own update" else Cache, "update", update)
    cache: Any = StaticCache(config=model.config, max_cache_len=12)
    cache.offloading = kind == "offloaded"
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        model(ids[:, :1], **{CACHE: cache})
    assert updated == 2 * list(range(model.config.num_hidden_layers))
    assert not launches


def test_models_in_float64_are_left_alone(tmp_path: Path) -> None:
    model = injected(stock("qwen3_moe").double(), tmp_path)
    assert {each.placement() for each in model.moegraft.operators.values()} == {"attention: fused_attention, left to PyTorch"}


@pytest.mark.parametrize("call", ["two tokens", "growing cache", "gradients", "training", "attention weights", "no mask", "set aside"])
def test_other_calls_run_in_the_module(call: str, tmp_path: Path, launches: list[torch.Size]) -> None:
    model = stock("qwen3_moe", "eager" if call == "attention weights" else "sdpa")
    ids = prompt(6, batch=1, seed=3).to(DEVICE)
    injected(model, tmp_path)
    cache: Any = DynamicCache() if call == "growing cache" else StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    launches.clear()
    tokens = ids[:, : 2 if call == "two tokens" else 1]
    if call == "gradients":
        model(tokens, **{CACHE: cache})
    with torch.no_grad():
        if call == "training":
            model.train()
            model(tokens, **{CACHE: cache})
            model.eval()
        elif call == "attention weights":
            assert model(tokens, output_attentions=True, **{CACHE: cache}).attentions[0].shape[-1] == 12
        elif call == "no mask":
            layer: Any = model.model.layers[0].self_attn
            x, angles = torch.randn(1, 1, model.config.hidden_size, device=DEVICE), torch.randn(1, 1, layer.head_dim, device=DEVICE)
            layer(hidden_states=x, position_embeddings=(angles, angles), attention_mask=None, **{CACHE: cache})
        elif call == "set aside":
            layer = model.model.layers[0].self_attn
            with model.moegraft.operators["model.layers.0.self_attn"].set_aside(layer):
                model(tokens, **{CACHE: cache})
            assert len(launches) == model.config.num_hidden_layers - 1
            launches.clear()
        elif call in ("two tokens", "growing cache"):
            model(tokens, **{CACHE: cache})
        assert not launches
        if call != "growing cache":
            model(ids[:, :1], **{CACHE: cache})
            assert len(launches) == model.config.num_hidden_layers


def test_projections_are_one_product_and_their_weights_stay_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = stock("qwen2_moe"), prompt(6, batch=2, seed=3).to(DEVICE)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    again = stock("qwen2_moe")
    expected = decoded(model, ids, 2)
    ours = injected(model, tmp_path)
    layer: Any = ours.model.layers[0].self_attn
    called: list[torch.Size] = []
    product = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *args, **kwargs: called.append(x.shape) or product(x, *args, **kwargs))
    hook = layer.q_proj.register_forward_hook(lambda *_: called.append("hook"))  # only layers that nothing watches are joined
    decoded(ours, ids, 1)
    assert called.count("hook") == 2  # the prompt, and the step
    hook.remove()
    called.clear()
    assert float((decoded(ours, ids, 2) - expected).norm()) <= (2e-5 if INTERPRETED else 1e-3) * float(expected.norm())
    assert "hook" not in called
    assert all(torch.equal(weight, weights[name]) for name, weight in ours.state_dict().items())
    with torch.no_grad():
        layer.k_proj.weight = torch.nn.Parameter(torch.zeros_like(layer.k_proj.weight))
        layer.k_proj.bias.zero_()
        wanted: Any = again.model.layers[0].self_attn
        wanted.k_proj.weight.zero_()
        wanted.k_proj.bias.zero_()
    changed = decoded(again, ids, 2)
    assert float((decoded(ours, ids, 2) - changed).norm()) <= (2e-5 if INTERPRETED else 1e-3) * float(changed.norm())
    assert float((changed - expected).norm()) > 1e-2 * float(expected.norm())


class CountedLaunches(TorchDispatchMode):
    """Names what the body launches: operations of PyTorch that compute, and Triton kernels, whose interpreter is not looked into."""

    # The tests fill what `torch.empty` returns.
    NOTHING = (
        "fill_",
        "view",
        "expand",
        "slice",
        "select",
        "squeeze",
        "split",
        "transpose",
        "permute",
        "alias",
        "detach",
        "empty",
        "as_strided",
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[str] = []
        self.counting = self.launching = False
        run = JITFunction.run if not INTERPRETED else GridExecutor.__call__

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if self.counting:
                self.found.append((kernel.fn if INTERPRETED else kernel).__name__)
            self.launching = True
            try:
                return run(kernel, *args, **kwargs)
            finally:
                self.launching = False

        monkeypatch.setattr(GridExecutor if INTERPRETED else JITFunction, "__call__" if INTERPRETED else "run", launch)

    def __enter__(self) -> Self:
        self.counting = True
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *raised: object) -> None:
        self.counting = False
        super().__exit__(*raised)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not self.launching and not any(part in name for part in self.NOTHING) and name != "t":
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_launches_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the experts a layer has 11: with three for those in slots, 14."""
    if INTERPRETED:
        monkeypatch.setattr(FusedRouter, "on_gpu", True)
    model, ids = stock("qwen3_moe"), prompt(6, batch=1, seed=3).to(DEVICE)
    with_fused(("attention", "norm", "router"), model, tmp_path)
    layer: Any = model.model.layers[1]
    monkeypatch.setattr(layer.mlp.experts, "forward", lambda x, *_: x)
    cache = StaticCache(config=model.config, max_cache_len=256)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        counted = CountedLaunches(monkeypatch)
        forward = layer.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            with counted:
                return forward(*args, **kwargs)

        monkeypatch.setattr(layer, "forward", watched)
        model(ids[:, :1], **{CACHE: cache})
    kernels = [name for name in counted.found if name.endswith("_kernel")]
    assert counted.found.count("mm") == 3  # queries, keys and values in one; the output; the router
    assert kernels == ["_norm_kernel", "_place_kernel", "_part_kernel", "_merge_kernel", "_norm_kernel", "_choice_kernel"]
    assert len(counted.found) == 11, counted.found


class Twice(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("change", ["parametrization", "forward", "forward before", "weight of two"])
def test_projections_that_compute_otherwise_are_not_joined(change: str, tmp_path: Path, launches: list[torch.Size]) -> None:
    models, ids = [stock("granitemoe") for _ in range(2)], prompt(6, batch=2, seed=3).to(DEVICE)

    def before(model: Any) -> None:
        layer = model.model.layers[0].self_attn
        if change == "weight of two":
            layer.v_proj.weight = layer.k_proj.weight
        elif change == "forward before":
            after(model)

    def after(model: Any) -> None:
        projection = model.model.layers[0].self_attn.v_proj
        if change == "parametrization":
            torch.nn.utils.parametrize.register_parametrization(projection, "weight", Twice())
        elif change == "weight of two":
            with torch.no_grad():
                projection.weight.mul_(2)
        else:
            own = projection.forward
            projection.forward = lambda x: 2 * own(x)

    before(models[0])
    before(models[1])
    ours = injected(models[1], tmp_path)
    if change != "forward before":
        after(models[0])
        after(ours)
    expected, found = decoded(models[0], ids, 2), decoded(ours, ids, 2)
    assert launches
    assert float((found - expected).norm()) <= (2e-5 if INTERPRETED else 1e-3) * float(expected.norm())


class Stored(torch.Tensor):
    """A weight as those of quantising libraries: a product reads it, and it cannot be joined to others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat:
            raise TypeError("no such operation")
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor) if func is torch.nn.functional.linear else found


def test_weights_of_other_types_are_not_joined(tmp_path: Path, launches: list[torch.Size]) -> None:
    model, ids = stock("granitemoe"), prompt(6, batch=2, seed=3).to(DEVICE)
    expected = decoded(model, ids, 2)
    layer: Any = model.model.layers[0].self_attn
    layer.v_proj.weight = torch.nn.Parameter(layer.v_proj.weight.detach().as_subclass(Stored))
    found = decoded(injected(model, tmp_path), ids, 2)
    assert launches
    assert isinstance(layer.v_proj.weight, Stored)
    assert float((found - expected).norm()) <= (2e-5 if INTERPRETED else 1e-3) * float(expected.norm())
