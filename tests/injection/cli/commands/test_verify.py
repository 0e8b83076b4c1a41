"""`moegraft verify`: its stock model is the stock model, its figures are right, and a wrong layer is found and named."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import tiny_model
from transformers import PreTrainedModel
from typer.testing import Result

from moegraft.injection import optimize_and_load
from moegraft.injection.meta_model import find_model
from moegraft.injection.verify import BY_ENCODING, compare_logits, expected_error, verify
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.weight_formats import FORMATS, PACKED_TYPES

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
Write = Callable[..., Path]


def perplexity(model: PreTrainedModel, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model(ids[None], labels=ids[None]).loss.double().exp())


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"], ids=["per-expert", "transposed-interleaved-bias"])
def test_exact_weights_give_stock(experts_rules: Path, model_type: str, tmp_path: Path) -> None:
    stock = tiny_model(model_type)
    stock.save_pretrained(tmp_path)
    injected = optimize_and_load(tmp_path, experts_rules, vars={"weights": "stored"}, progress=False)
    ids = torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(1))
    found = verify(injected, find_model(tmp_path), ids)
    assert found.ok and len(found.layers) == 2 and not found.unreached
    assert all(layer.relative_error < 1e-5 and layer.cosine > 1 - 1e-9 for layer in found.layers)
    assert found.logits.kl_nats < 1e-8 and found.logits.top1_agreement == 1
    assert found.logits.stock_perplexity == pytest.approx(perplexity(stock, ids), rel=1e-4)


def test_the_stock_side_does_not_depend_on_the_rules(folder: Path, run_json: RunJson, tmp_path: Path) -> None:
    """Coarse weights change the injected model alone: hooks that put the stock outputs in place give one and the same stock."""
    experts = tmp_path / "experts.yaml"
    rule = '{match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {weights: "${weights}"}}}'
    experts.write_text(f"vars: {{weights: stored}}\nrules:\n- {rule}\n")
    exact, coarse = (
        run_json("verify", "--model", folder, "--rules", experts, "--var", f"weights={weights}", "--tokens", 48)
        for weights in ("stored", "int4")
    )
    assert exact["exit_code"] == coarse["exit_code"] == 0
    assert exact["logits"]["stock_perplexity"] == pytest.approx(coarse["logits"]["stock_perplexity"], rel=1e-4)
    assert coarse["logits"]["kl_nats"] > 100 * abs(exact["logits"]["kl_nats"])
    assert [layer["module"] for layer in coarse["layers"]] == [f"model.layers.{number}.mlp.experts" for number in range(1, 12)]
    assert all(0.05 < layer["relative_error"] < layer["expected"]["limit"] for layer in coarse["layers"])


def test_the_model_is_as_before(experts_rules: Path, folder: Path) -> None:
    injected = optimize_and_load(folder, experts_rules, progress=False)
    ids = torch.arange(20)
    with torch.no_grad():
        before = injected(ids[None]).logits
        verify(injected, find_model(folder), ids)
        assert torch.equal(injected(ids[None]).logits, before)


def break_layer(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], place: int) -> None:
    """The operator of the `place`-th experts module computes with changed routing weights."""
    right = HybridExperts.forward
    seen: list[HybridExperts] = []

    def wrong(self: HybridExperts, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self not in seen:
            seen.append(self)
        return right(self, hidden_states, index, change(weights) if seen.index(self) == place else weights)

    monkeypatch.setattr(HybridExperts, "forward", wrong)


@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
def test_another_experts_routing_weight_is_found(
    experts_rules: Path, weights: str, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug of HybriMoE's public code: experts with each other's routing weights."""
    break_layer(monkeypatch, lambda given: given.flip(-1), 4)
    result = run("verify", "--model", folder, "--rules", experts_rules, "--var", f"weights={weights}", "--tokens", 48)
    assert result.exit_code == 1
    assert "verdict: WRONG: model.layers.5.mlp.experts is the first too far from stock" in result.stdout
    assert result.stdout.count("<- too far") == 1


def test_nan_is_wrong(experts_rules: Path, folder: Path, run_json: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    break_layer(monkeypatch, lambda given: given * float("nan"), 0)
    found = run_json("verify", "--model", folder, "--rules", experts_rules, "--var", "weights=stored", "--tokens", 16)
    assert (found["exit_code"], found["ok"], found["first_bad"]) == (1, False, "model.layers.1.mlp.experts")
    assert found["layers"][0]["relative_error"] is None, "JSON has no NaN"


def test_linear_layers_are_compared_too(folder: Path, run_json: RunJson, rules: Write) -> None:
    path = rules("- {match: {kind: linear, name: '(o_proj|lm_head)$'}, replace: {class: quantized_linear, kwargs: {weights: int8}}}\n")
    found = run_json("verify", "--model", folder, "--rules", path, "--tokens", 32)
    assert (found["exit_code"], len(found["layers"])) == (0, 13)
    assert all(1e-3 < layer["relative_error"] < 0.04 for layer in found["layers"])


def test_text_and_tokens(experts_rules: Path, folder: Path, run: Run, run_json: RunJson, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Nobody expects it.")
    arguments = ("verify", "--model", folder, "--rules", experts_rules, "--var", "weights=stored", "--text", text)
    assert run_json(*arguments)["tokens"] == 18
    assert run_json(*arguments, "--tokens", 5)["tokens"] == 5
    for content, says in [(b"", "2 are needed"), (b"\xff\xfe", "not UTF-8")]:
        text.write_bytes(content)
        refused = run(*arguments)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert says in refused.stderr
    assert run("verify", "--model", folder, "--text", tmp_path / "none.txt").exit_code == 2


def test_logit_figures_by_hand() -> None:
    """Two tokens: p = (3/4, 1/4) against q = (1/2, 1/2) at the first position, equal at the second."""
    stock, injected = torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log(), torch.tensor([[1.0, 1.0], [1.0, 3.0]]).log()
    found = compare_logits(stock, injected, torch.tensor([0, 1]))
    kl = 0.75 * torch.tensor(1.5).log() + 0.25 * torch.tensor(0.5).log()
    assert found.kl_nats == pytest.approx(float(kl) / 2)
    assert found.top1_agreement == 1
    assert (found.stock_perplexity, found.injected_perplexity) == (pytest.approx(4), pytest.approx(2))


def test_logit_figures_do_not_depend_on_chunks() -> None:
    """65 and 130 positions: one past a chunk, and several."""
    generator = torch.Generator().manual_seed(0)
    for positions in (65, 130):
        ids = torch.randint(0, 11, (positions,), generator=generator)
        stock, injected = torch.randn(2, positions, 11, generator=generator)
        found = compare_logits(stock, injected, ids)
        losses = [float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:])) for logits in (stock, injected)]
        assert torch.tensor(losses).exp().tolist() == pytest.approx([found.stock_perplexity, found.injected_perplexity], rel=1e-5)
        assert found.top1_agreement == pytest.approx(float((stock.argmax(-1) == injected.argmax(-1)).float().mean()))


def test_types_that_weights_are_packed_to_have_an_expected_error() -> None:
    assert set(BY_ENCODING) == {name for name in PACKED_TYPES if FORMATS[name].stored}
    assert all(expected.typical < expected.limit < 1 for expected in BY_ENCODING.values())


def test_of_types_with_equal_errors_the_first_by_name_gives_the_reason() -> None:
    """Sets of names have another order in each process."""
    pairs = [sorted(pair) for pair in combinations(BY_ENCODING, 2) if BY_ENCODING[pair[0]].limit == BY_ENCODING[pair[1]].limit]
    assert len(pairs) > 3
    for first, second in pairs:
        for types in (f"{first}+{second}", f"{second}+{first}"):
            found = expected_error(types, torch.float32, stored=())
            assert found is not None and found.reason == BY_ENCODING[first].reason


def test_expected_errors_are_ordered() -> None:
    limits = [expected_error(name, torch.float32).limit for name in ("float32", "float16", "bfloat16", "int8", "int4")]  # type: ignore[union-attr]
    assert limits == sorted(limits)
    assert expected_error("int8", torch.bfloat16).limit > expected_error("int8", torch.float32).limit  # type: ignore[union-attr]
    assert expected_error("ternary", torch.float32) is None
