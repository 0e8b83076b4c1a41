"""Tiny checkpoints with and without shared experts, and thresholds made for one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.byte_tokenizer import byte_tokenizer
from support.sparse_models import OSS, SHARED, save_model
from transformers import PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.calibration import CalibrationOptions, calibrate, sparse_rules
from moegraft.injection.meta_model import find_model
from moegraft.injection.rules import read_rules
from moegraft.injection.texts import read_text
from moegraft.operators.registry import load_registry
from moegraft.operators.sparsity import Thresholds, write_thresholds

Load = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def oss_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("oss"), OSS)


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("other"), SHARED, seed=1)


@pytest.fixture(scope="session")
def text_ids() -> torch.Tensor:
    return torch.tensor(byte_tokenizer()(read_text("calibration")[:3000])["input_ids"])


@pytest.fixture(scope="session")
def thresholds(folder: Path, text_ids: torch.Tensor) -> Thresholds:
    return calibrated(folder, text_ids)


@pytest.fixture(scope="session")
def file(thresholds: Thresholds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thresholds") / "thresholds.json"
    write_thresholds(thresholds, path)
    return path


def calibrated(folder: Path, ids: torch.Tensor, **options: object) -> Thresholds:
    """By the shipped rules for exact weights."""
    registry = load_registry()
    model = optimize_and_load(folder, sparse_rules(read_rules("cpu-exact", registry=registry), registry), progress=False, threads=1)
    run = CalibrationOptions(**options)  # type: ignore[arg-type]
    return calibrate(model, find_model(folder), ids, run, name="tiny", text_sha256="f" * 64)


@pytest.fixture
def calibrate_folder() -> Callable[..., Thresholds]:
    return calibrated


@pytest.fixture
def rules(tmp_path: Path) -> Callable[[str], Path]:
    """A rule file that gives all experts to hybrid_experts with these options of `sparsity`."""

    def write(sparsity: str, more: str = "") -> Path:
        path = tmp_path / "rules.yaml"
        path.write_text(f"- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{sparsity: {{{sparsity}}}{more}}}}}\n")
        return path

    return write


@pytest.fixture
def load(folder: Path, rules: Callable[..., Path]) -> Load:
    """Loads the model with shared experts with these options of `sparsity`."""

    def load(sparsity: str, model: Path | PreTrainedModel = folder) -> PreTrainedModel:
        return optimize_and_load(model, rules(sparsity), progress=False, threads=1)

    return load
