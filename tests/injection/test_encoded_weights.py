"""Experts of floats that are packed to any type, also to those that the kernels do not quantise to."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from support.families import tiny_model
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moegraft.injection import optimize_and_load
from moegraft.injection.rules import RuleErrors
from moegraft.operators.experts.hybrid import HybridExperts
from moegraft.operators.weight_formats import ENCODED, FORMATS, WEIGHT_TYPES

EXPERTS = 5


def load(folder: Path, weights: str, **sizes: int) -> PreTrainedModel:
    forms = {"num_experts": EXPERTS, "norm_topk_prob": True, "initializer_range": 0.1, "max_position_embeddings": 128}
    tiny_model(num_hidden_layers=1, **forms, **sizes).save_pretrained(folder)
    rules = folder / "rules.yaml"
    rules.write_text(f"rules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {{weights: {weights}}}}}\n")
    return optimize_and_load(folder, rules, progress=False, dtype="float32", threads=1)


@pytest.mark.parametrize(
    ("weights", "intermediate", "limit"),
    [
        ("float32", 96, 1e-6),  # nothing is rounded: sums in another order
        ("iq4_nl", 96, 2e-2),  # three blocks in a row; activations are rounded to 8 bits in groups of 32
        ("int4", 40, 2e-2),  # rows that are no whole number of groups
        ("{gate: q2_k, up: q2_k, down: q6_k}", 256, 2e-2),  # super-blocks, both encoded
        ("iq3_xxs", 256, 2e-2),  # points of a grid
    ],
)
def test_outputs_are_those_of_the_dequantised_weights(tmp_path: Path, weights: str, intermediate: int, limit: float) -> None:
    model = load(tmp_path, weights, moe_intermediate_size=intermediate, hidden_size=256 if intermediate == 256 else 64)
    operator = next(module for module in model.modules() if isinstance(module, HybridExperts))
    model.config._experts_implementation = "eager"
    stock, packed = Qwen3MoeExperts(model.config), operator.on_cpu.packed
    assert packed is not None
    torch.manual_seed(1)
    with torch.no_grad():
        for expert in range(EXPERTS):
            gate, up, down = (torch.from_numpy(packed.unpack(expert, part)) for part in ("gate", "up", "down"))
            stock.gate_up_proj[expert], stock.down_proj[expert] = torch.cat([gate, up]), down
        for tokens in (0, 1, 3, 40):  # 1 and 3 by tiles, 40 perhaps by a matrix kernel
            x, shares = torch.randn(tokens, operator.layout.hidden), torch.rand(tokens, 3)
            chosen = torch.rand(tokens, EXPERTS).argsort(dim=1)[:, :3]
            expected = stock(x, chosen, shares)
            assert float((operator(x, chosen, shares) - expected).norm()) <= limit * float(expected.norm())


def test_every_type_is_one_that_weights_can_be_packed_to() -> None:
    names = {form.gguf: name for name, form in FORMATS.items()}
    assert set(get_args(WEIGHT_TYPES)) == {"stored", *(names[each] for each in ENCODED)}


def test_rows_that_are_no_whole_number_of_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleErrors, match=r"q3_k has blocks of 256 weights, of which rows of 64 are no whole number; use int4"):
        load(tmp_path, "q3_k", moe_intermediate_size=256)
