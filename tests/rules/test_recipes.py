"""Each recipe is a whole rule file that fits a model: the bundled one, which has no shared experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.documents import Block, blocks
from support.eagle3 import write_head
from support.rule_support import findings_of, write

from moegraft.injection.demo import demo_path
from moegraft.injection.meta_model import MetaModel, build_meta_model
from moegraft.injection.planning import plan
from moegraft.injection.rules import read_rules
from moegraft.operators.registry import load_registry
from moegraft.operators.routing import routers_of
from moegraft.operators.routing_trace import Trace

RECIPES = [block for block in blocks("yaml") if block.page.name == "recipes.md"]


@pytest.fixture(scope="module")
def bundled() -> MetaModel:
    return build_meta_model(demo_path())


@pytest.mark.parametrize("block", RECIPES, ids=lambda block: block.place)
def test_a_recipe_fits_a_model(block: Block, bundled: MetaModel, tmp_path: Path) -> None:
    registry = load_registry()
    if "routing.npz" in block.text:
        paths, sizes = tuple(routers_of(bundled.skeleton)), (5, len(routers_of(bundled.skeleton)))
        num_experts = next(iter(routers_of(bundled.skeleton).values())).num_experts
        scores = np.zeros((*sizes, num_experts), np.float32)
        chosen, weights = np.broadcast_to([[[1, 0]]], (*sizes, 2)), np.ones((*sizes, 2), np.float32)
        Trace(scores, chosen, weights, np.zeros((0, *sizes, 2), np.int64), np.ones(5, bool), paths, "zeros").save(tmp_path / "routing.npz")
    if "EAGLE3" in block.text:
        write_head(tmp_path / "Qwen3-235B-A22B-EAGLE3", bundled.skeleton)
    rules = read_rules(write(tmp_path, block.text), registry=registry)
    found = findings_of(lambda: plan(bundled, rules, registry=registry))
    if "shared_expert_gate" in block.text:  # a rule that takes nothing is an error, as the page says
        assert ["rule 'gates' matches no module" in finding.message for finding in found] == [True]
        return
    assert found == ()
    taken = {swap.operator for swap in plan(bundled, rules, registry=registry).swaps}
    assert "hybrid_experts" in taken


def test_there_is_one_for_each_question() -> None:
    text = RECIPES[0].page.read_text(encoding="utf-8")
    for title in ("24 GB GPU and 64 GB", "CPU only", "Two GPUs", "Quality first", "A new family"):
        assert f"## {title}" in text or f"## A {title}" in text
