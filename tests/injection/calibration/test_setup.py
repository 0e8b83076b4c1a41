"""A model's layers get their thresholds when it is loaded: from the right file, from no wrong one, or from a short calibration."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.byte_tokenizer import byte_tokenizer
from support.sparse_models import OSS, SHARED, experts_of, left_out, save_model, stock
from transformers import AutoModelForCausalLM, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.calibration import CalibrationOptions
from moegraft.injection.injected import sparse_layers
from moegraft.injection.rules import Position, RuleErrors, read_rules
from moegraft.injection.texts import read_text
from moegraft.operators.errors import ThresholdsError, UnsupportedModelError
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.registry import load_registry
from moegraft.operators.sparsity import FILE_NAME, Thresholds

Load = Callable[..., PreTrainedModel]
BIN = 2 ** (1 / 256)


def thresholds_of(model: PreTrainedModel) -> dict[str, float]:
    found = {path: layer.threshold for path, layer in sparse_layers(model).items()}
    assert found, "no layer leaves neurons out"
    return found


def activations(model: PreTrainedModel) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """Every |act(gate)| of the stock model on the bundled text."""
    seen: dict[str, list[torch.Tensor]] = {}
    ids = torch.tensor(byte_tokenizer()(read_text("calibration"))["input_ids"])
    with torch.no_grad(), left_out(model, dict.fromkeys(experts_of(model), 0.0), seen):
        for window in ids.split(CalibrationOptions().window):
            model(window[None])
    return {path: torch.cat(found).numpy() for path, found in seen.items()}


@pytest.fixture(scope="module")
def magnitudes(folder: Path) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return activations(stock(folder))


def test_without_a_file_a_calibration_finds_the_quantiles(
    load: Load,
    magnitudes: dict[str, np.ndarray],  # type: ignore[type-arg]
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load("target: 0.7, scope: routed")
    found = thresholds_of(model)
    assert list(found) == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    for path, threshold in found.items():
        exact = float(np.quantile(magnitudes[path], 0.7, method="inverted_cdf"))
        assert exact / 1.001 < threshold <= exact * BIN * 1.001, path  # sums in another order move a value a little
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith("sparsity: there is no thresholds file, so 2 layers were calibrated on ")
    assert f"on {len(byte_tokenizer()(read_text('calibration'))['input_ids'])} tokens of a bundled text" in message


def test_global_is_one_threshold_for_all_layers(load: Load, magnitudes: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
    (threshold,) = set(thresholds_of(load("target: 0.7, scope: routed, mode: global")).values())
    exact = float(np.quantile(np.concatenate(list(magnitudes.values())), 0.7, method="inverted_cdf"))
    assert exact / 1.001 < threshold <= exact * BIN * 1.001


def test_biases_clamps_and_interleaved_weights_calibrate_too(load: Load, oss_folder: Path) -> None:
    found = thresholds_of(load("target: 0.6, scope: routed", oss_folder))
    for path, seen in activations(stock(oss_folder)).items():
        exact = float(np.quantile(seen, 0.6, method="inverted_cdf"))
        assert exact / 1.001 < found[path] <= exact * BIN * 1.001, path
    assert len(found) == OSS.num_hidden_layers


def test_thresholds_come_from_the_file(load: Load, file: Path, thresholds: Thresholds, caplog: pytest.LogCaptureFixture) -> None:
    model = load(f"target: 0.85, scope: routed, thresholds: '{file}'")
    for path, threshold in thresholds_of(model).items():
        assert threshold == pytest.approx(thresholds.threshold(path, 0.85, "layer"), rel=1e-5)
    assert not caplog.records
    both = load(f"target: 0.85, scope: routed, thresholds: '{file}', mode: global")
    (threshold,) = set(thresholds_of(both).values())
    assert threshold == pytest.approx(thresholds.threshold("", 0.85, "global"), rel=1e-5)


def test_shared_experts_count_in_total(load: Load, file: Path, thresholds: Thresholds) -> None:
    # Two routed experts of 24 and a shared one of 24: 60 % of all are 90 % of the routed.
    for path, threshold in thresholds_of(load(f"target: 0.6, scope: total, thresholds: '{file}'")).items():
        assert threshold == pytest.approx(thresholds.threshold(path, 0.9, "layer"), rel=1e-5)


def test_the_models_own_file_is_found(load: Load, folder: Path, file: Path, thresholds: Thresholds, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "model"))
    shutil.copy(file, own / FILE_NAME)
    for path, threshold in thresholds_of(load("target: 0.5, scope: routed", own)).items():
        assert threshold == pytest.approx(thresholds.threshold(path, 0.5, "layer"), rel=1e-5)
    (own / FILE_NAME).write_text("{}")
    with pytest.raises(ThresholdsError, match="not a thresholds file of format"):
        load("target: 0.5, scope: routed", own)
    load(f"target: 0.5, scope: routed, thresholds: '{file}'", own)  # the rule's own file is asked first


def test_a_target_of_zero_needs_no_thresholds(load: Load, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.tensor([[5, 17, 33, 60, 3, 8, 61]])
    model = load("target: 0, scope: total")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(folder)(ids).logits, rtol=1e-4, atol=1e-4)
    assert set(thresholds_of(model).values()) == {0.0} and not caplog.records


def text_at(file: Path, position: Position) -> str:
    """What stands at a place of a file."""
    return file.read_text().splitlines()[position.line - 1][position.column - 1 :]


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(HybridExperts, "load", refuse)


@pytest.mark.usefixtures("nothing_loads")
def test_other_weights_are_refused_before_any_is_read(load: Load, file: Path, other_weights: Path) -> None:
    with pytest.raises(ThresholdsError, match=r"made from the weights of 'tiny', and those of model.layers.1.mlp.experts differ"):
        load(f"target: 0.5, scope: routed, thresholds: '{file}'", other_weights)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_intermediate_size": 32}, "model.layers.1.mlp.experts has 24 intermediate there and 32 in this model"),
        ({"shared_expert_intermediate_size": 32}, "has 24 shared neurons there and 32 in this model"),
        ({"num_experts_per_tok": 3}, "has 2 experts per token there and 3 in this model"),
        ({"mlp_only_layers": []}, "it has no layer model.layers.0.mlp.experts"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_another_model_is_refused_where_the_rule_names_the_file(
    load: Load, file: Path, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    other = type(SHARED)(**{**SHARED.to_dict(), **changes})
    folder = save_model(tmp_path / "other", other)
    with pytest.raises(RuleErrors) as raised:
        load(f"target: 0.5, scope: routed, thresholds: '{file}'", folder)
    (finding,) = raised.value.diagnostics
    found = message.replace("has", "model.layers.1.mlp.experts has") if message.startswith("has") else message
    expected = f"rule 'rule-1': {file}: made for 'tiny' (qwen2_moe): {found}; calibrate this one with moegraft calibrate"
    assert finding.message == expected
    assert text_at(tmp_path / "rules.yaml", finding.position).startswith(f"'{file}'")


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("sparsity", "at", "message"),
    [
        ("target: 0.5", "{target", "option 'sparsity.scope' of hybrid_experts is missing"),
        (
            "target: 85, scope: routed",
            "85",
            "option 'sparsity' of hybrid_experts: target is a share from 0 to below 1, not 85; write 0.85",
        ),
        (
            "target: 0.7, scope: total",
            "0.7",
            "target 0.7 of all neurons cannot be reached: shared neurons are always computed",
        ),
        (
            "target: 0.5, scope: routd",
            "routd",
            "option 'sparsity.scope' of hybrid_experts must be one of routed, total, not text 'routd'",
        ),
        (
            "target: 0.5, scope: routed, thresholds: no.json",
            "no.json",
            "no.json: no such file; write it with: moegraft calibrate --out no.json",
        ),
        ("target: 0.5, scope: routed, modes: global", "modes", "unknown option 'modes' of option 'sparsity' of hybrid_experts"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("target") else "",
)
def test_mistakes_have_a_place(load: Load, sparsity: str, at: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RuleErrors) as raised:
        load(sparsity)
    (finding,) = raised.value.diagnostics
    assert message in finding.message
    assert text_at(tmp_path / "rules.yaml", finding.position).startswith(at)


def test_a_target_beyond_the_file_is_refused(load: Load, file: Path) -> None:
    with pytest.raises(RuleErrors, match=r"its last share is 0.999, below the target of 0.9995 of routed neurons"):
        load(f"target: 0.9995, scope: routed, thresholds: '{file}'")


def test_no_tokenizer_to_calibrate_with(load: Load, folder: Path, file: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*")))
    with pytest.raises(ThresholdsError, match=r"sparsity has no thresholds, and a calibration is not possible: .*; set 'thresholds'"):
        load("target: 0.5, scope: routed", bare)
    load(f"target: 0.5, scope: routed, thresholds: '{file}'", bare)


def test_a_model_in_memory(load: Load, folder: Path, file: Path, other_weights: Path) -> None:
    model = load("target: 0.5, scope: routed", stock(folder))  # its folder is known
    assert all(thresholds_of(model).values())
    model = load(f"target: 0.5, scope: routed, thresholds: '{file}'", stock(folder))
    assert all(thresholds_of(model).values())
    with pytest.raises(ThresholdsError, match="made from the weights of 'tiny'"):
        load(f"target: 0.5, scope: routed, thresholds: '{file}'", stock(other_weights))
    nameless = AutoModelForCausalLM.from_config(SHARED)
    nameless.config.name_or_path = ""
    with pytest.raises(ThresholdsError, match="the model has no folder with a tokenizer to calibrate with"):
        load("target: 0.5, scope: routed", nameless)


def test_rules_that_were_read_already(folder: Path, rules: Callable[..., Path]) -> None:
    read = read_rules(rules("target: 0, scope: routed"), registry=load_registry())
    assert sparse_layers(optimize_and_load(folder, read, progress=False))
    with pytest.raises(UnsupportedModelError, match="this rule file is read already"):
        optimize_and_load(folder, read, vars={"a": 1}, progress=False)


def test_drift_and_statistics_of_a_model(load: Load, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(f"target: 0.8, scope: routed, thresholds: '{file}'")
    ids = torch.randint(0, 260, (4, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids)
    (total,) = model.moegraft.statistics()["sparsity"]
    modules = model.moegraft.statistics()["modules"]
    assert set(modules) == set(sparse_layers(model)) and total["layers"] == 2
    assert modules["model.layers.1.mlp.experts"]["sparsity"]["neurons"] == 4 * 300 * 2 * 24
    assert not caplog.records
    for layer in sparse_layers(model).values():
        layer.threshold *= 2  # the text becomes another
    with torch.no_grad():
        for _ in range(3):
            model(ids)
    (record,) = caplog.records
    assert "where the target is 80.0 %" in record.getMessage()
