"""An operator of another installed package: every command takes it with nothing but its class and its entry point.

It overrides only what `Operator` declares abstract, so that a hook whose default is wrong for such an operator shows here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import Result

from moegraft.injection import build_meta_model, graft, load, plan
from moegraft.injection.estimate import measure as store
from moegraft.injection.estimate.measure import Measurements
from moegraft.operators.base import Rate

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
PACKAGE = """
from dataclasses import dataclass

import torch
from moegraft.operators.base import Footprint, Operator
from moegraft.operators.layout import read_layout, why_unsupported
from moegraft.operators.reference import reference_experts


@dataclass(frozen=True, slots=True)
class LoopOptions:
    double: bool = False

    @property
    def dtype(self):
        return torch.float64 if self.double else torch.float32


class LoopExperts(Operator):
    name = "loop_experts"
    kind = "experts"
    options_type = LoopOptions
    summary = "experts in a plain loop"

    def __init__(self, layout, options):
        super().__init__()
        self.layout, self.options, self.matrices = layout, options, {}

    @classmethod
    def unsupported_reason(cls, module, options):
        return why_unsupported(module) or ("experts with biases are not supported" if module.has_bias else None)

    @classmethod
    def footprint(cls, module, options, dtype):
        return Footprint({"cpu": options.dtype.itemsize * sum(parameter.numel() for parameter in module.parameters())})

    @classmethod
    def build(cls, module, options, context):
        return cls(read_layout(module), options)

    def load(self, source, advance):
        for part in source.parts():
            pieces = []
            for expert in range(self.layout.num_experts):
                piece = source.read(part, expert)
                pieces.append(piece.to(self.options.dtype, copy=True))
                advance(piece.nbytes)
            self.matrices[part] = torch.stack(pieces)

    def placement(self):
        return f"experts: loop_experts, {self.options.dtype}"

    def forward(self, hidden_states, top_k_index, top_k_weights):
        matrices = (self.matrices.get("gate"), self.matrices["up"], self.matrices["down"])
        out = reference_experts(hidden_states, top_k_index, top_k_weights, *matrices, self.layout.gate, dtype=self.options.dtype)
        return out.to(hidden_states.dtype)
"""
RULES = "version: 1\nrules: [{id: experts, match: {kind: experts}, replace: {class: loop_experts, kwargs: {double: true}}}]\n"
LAYERS = 11  # of the tiny model, those with experts
EXPERTS_BYTES = LAYERS * 4 * 3 * 64 * 32 * 8  # layers, experts, matrices, hidden, intermediate, float64


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as pip would leave it: a module, and metadata with an entry point."""
    site = tmp_path / "site"
    info = site / "loop_experts-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "loop_experts.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loop-experts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[moegraft.operators]\nloop = loop_experts:LoopExperts\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "loop_experts", raising=False)


@pytest.fixture
def path(rules: Callable[[str], Path], installed: None) -> Path:
    return rules(RULES)


def test_explain_gives_its_bytes(path: Path, folder: Path, run_json: RunJson) -> None:
    found = run_json("explain", path, "--model", folder)
    assert [row["operator"] for row in found["modules"]] == ["loop_experts"] * LAYERS
    assert sum(row["bytes_by_device"]["cpu"] for row in found["modules"]) == EXPERTS_BYTES
    result = run_json("explain", path, "--model", folder, "--module", "model.layers.1.mlp.experts")
    assert [trial["outcome"] for trial in result["trials"]] == ["won"]


def test_plan_counts_its_memory(path: Path, folder: Path, run_json: RunJson) -> None:
    found = run_json("plan", path, "--model", folder)
    assert found["exit_code"] == 0 and found["ok"]
    assert found["bytes_by_device"]["cpu"] > EXPERTS_BYTES
    assert found["speed"] is None and found["no_speed"]  # nothing is known of its rate, which is reported


def test_it_loads_and_computes(path: Path, folder: Path) -> None:
    model = build_meta_model(folder, weights=True)
    the_plan = plan(model, path)
    injected = load(graft(model, the_plan), progress=False)
    stock = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([[5, 17, 33, 90]])
    with torch.no_grad():
        torch.testing.assert_close(injected(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    assert injected.moegraft.placement() == [f"{LAYERS} x experts: loop_experts, torch.float64"]
    assert injected.moegraft.statistics() == {"modules": {}, "sparsity": [], "devices": {}, "files": {}, "decode_steps": {}, "ranks": []}
    generated = injected.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, stock.generate(ids, max_new_tokens=3, do_sample=False))


def test_verify_compares_it_with_stock(path: Path, folder: Path, run_json: RunJson) -> None:
    found = run_json("verify", "--model", folder, "--rules", path, "--tokens", 12)
    assert found["exit_code"] == 0, found["verdict"]
    assert len(found["layers"]) == LAYERS
    assert all(layer["operator"] == "loop_experts" and layer["relative_error"] < 1e-5 for layer in found["layers"])


@pytest.mark.usefixtures("installed")
def test_init_and_schema_take_no_harm(folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = dict.fromkeys(("float32", "bfloat16", "int8", "int4"), Rate(1.0, 1.0))
    store.save(Measurements(10.0, rates, rates, 0.1, 0.0))  # or it would measure this machine, for a quarter of a minute
    result = run("init", "--model", folder, "--out", tmp_path / "initial.yaml")
    assert result.exit_code == 0, result.output
    assert run("check", tmp_path / "initial.yaml", "--model", folder).exit_code == 0
    assert '"loop_experts"' in run("schema").stdout
