"""An injected model is one graph to torch.compile, also with a static cache, and graphs hold their operators weakly."""

import copy
import gc
import weakref

import pytest
import torch
from support.families import build_model, case_of, tiny_model
from transformers import CompileConfig, PreTrainedModel, StaticCache

from moegraft.injection import optimize_and_load
from moegraft.operators.errors import UnsupportedModelError

RULES = """
version: 1
extends: cpu-exact
rules:
- match: {kind: linear, name: 'self_attn\\.|^lm_head$'}
  replace: {class: quantized_linear}
"""


@pytest.fixture(autouse=True)
def others_compilations_do_not_count() -> None:
    """PyTorch compiles a function for at most eight forms of its arguments, which tests of other files in this process may have used."""
    torch.compiler.reset()


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("traceable")
    rules = folder / "rules.yaml"
    rules.write_text(RULES)
    return optimize_and_load(tiny_model(), rules, progress=False)


def test_the_whole_model_is_one_graph(injected: PreTrainedModel) -> None:
    """`aot_eager` traces like inductor and calls the fake implementations, but does not compile C++ code."""
    compiled = torch.compile(injected, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([[5, 17, 33, 90, 3]])
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, injected(ids).logits)


def test_decode_with_a_static_cache_is_one_graph(injected: PreTrainedModel) -> None:
    compiled = torch.compile(injected, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([[5, 17, 33, 90, 3]])
    with torch.no_grad():
        whole = injected(ids).logits
        cache = StaticCache(injected.config, max_cache_len=16)
        for position in range(ids.shape[1]):
            step = compiled(ids[:, position : position + 1], past_key_values=cache, position_ids=torch.tensor([[position]]))
            torch.testing.assert_close(step.logits[:, 0], whole[:, position], rtol=2e-2, atol=2e-2)


def test_a_model_that_compares_the_name_of_its_attention_is_one_graph() -> None:
    ids = torch.tensor([[5, 17, 33, 90, 3]])
    model = optimize_and_load(build_model(case_of("minimax_m3_vl_text")), "cpu-exact", progress=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits)


@pytest.mark.parametrize("batch", [1, 2])
def test_generate_compiles_its_steps_where_that_is_asked_for(injected: PreTrainedModel, batch: int) -> None:
    """For one sequence, which has a loop of moegraft's own, as for several."""
    settings = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    settings._compile_all_devices = True  # not for GPUs alone
    given = {"inputs": torch.tensor([[5, 17, 33, 90, 3]] * batch), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    given["cache_implementation"] = "static"
    expected = injected.generate(**given)  # type: ignore[operator]
    vars(injected).pop("_compiled_call", None)
    found = injected.generate(**given, compile_config=settings)  # type: ignore[operator]
    assert hasattr(injected, "_compiled_call")
    assert torch.equal(found, expected)


def test_a_freed_model_leaves_no_operator_behind() -> None:
    model = optimize_and_load(tiny_model(num_hidden_layers=1), "cpu", progress=False)
    operators = [weakref.ref(operator) for operator in model.moegraft.operators.values()]
    assert operators and all(operator() is not None for operator in operators)
    del model
    gc.collect()
    assert all(operator() is None for operator in operators)


def test_a_copy_is_refused(injected: PreTrainedModel) -> None:
    """Graphs would call a copy in place of the original."""
    with pytest.raises(UnsupportedModelError, match="cannot be copied"):
        copy.deepcopy(injected)
