"""The last layer of a prompt is computed for one token where no other's output is read, with the logits and cache of a whole pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import support.emulated  # noqa: F401 # the device `emulated`
import torch
from support.families import FamilyCase, build_model, case_of, family_cases, prompt
from torch import nn
from transformers import MixtralForCausalLM, MixtralForTokenClassification, PreTrainedModel, StaticCache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from moegraft.injection import new_cache, optimize_and_load
from moegraft.injection.cli.serve.open_pool import open_pool

TOLERANCE = 1e-5  # relative, in float32
APPLIED = {"mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4v_moe", "gpt_oss", "granitemoe"}
APPLIED |= {"ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "phimoe", "dots1", "granitemoe_swa", "mimo_v2_flash", "step3p7", "afmoe"}
CODES = "rules:\n- {match: {kind: model}, replace: {class: quantized_kv_cache, kwargs: {backend: native}}}\n"


def loaded(name: str | FamilyCase, rules: str | Path = "cpu-exact") -> Any:
    case = case_of(name) if isinstance(name, str) else name
    return optimize_and_load(build_model(case).eval(), rules, progress=False, threads=1)


@contextmanager
def tokens_of_last_block(model: PreTrainedModel) -> Iterator[list[int]]:
    """Record how many tokens of each call the block behind the last layer's attention computes."""
    layer: Any = model.get_decoder().layers[-1]
    names = [name for name, child in layer.named_children() if "mlp" in name or "moe" in name or "feed" in name or "experts" in name]
    block, calls = getattr(layer, names[0]), list[int]()
    forward = type(block).forward

    def counting(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self is block:
            calls.append(x.shape[:-1].numel())
        return forward(self, x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:  # of the class: a module with a `forward` of its own gets all tokens
        patch.setattr(type(block), "forward", counting)
        yield calls


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def padding(batch: int, tokens: int, *padded: int) -> torch.Tensor:
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    for row, count in enumerate(padded):
        mask[row, :count] = 0
    return mask


@pytest.mark.parametrize("case", [each for each in family_cases() if each.generates and not each.reason], ids=lambda case: case.model_type)
@torch.no_grad()
def test_prompts_of_every_family_have_the_logits_of_a_whole_pass(case: FamilyCase) -> None:
    model, counted = loaded(case), []
    for tokens, given in ((9, {}), (9, {"attention_mask": padding(2, 9, 4)}), (70, {})):
        ids = prompt(tokens, batch=2, seed=tokens)
        whole = model(ids, **given)
        if case.model_type in APPLIED:
            with tokens_of_last_block(model) as calls:
                alone = model(ids, logits_to_keep=1, **given)
            counted += calls
        else:
            alone = model(ids, logits_to_keep=1, **given)
        assert error(alone.logits[:, -1], whole.logits[:, -1]) < TOLERANCE
        if not given:
            caches = whole.past_key_values, alone.past_key_values
            following = [model(prompt(10, batch=2), past_key_values=cache, logits_to_keep=1).logits for cache in caches]
            assert error(following[1], following[0]) < TOLERANCE
    assert counted == ([2] * 3 if case.model_type in APPLIED else [])


def test_families_are_those_of_the_installed_transformers() -> None:
    assert {case.model_type for case in family_cases()} >= APPLIED - {"granitemoe_swa", "step3p7"}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mimo_v2_flash"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "codes", "chunks"])
@torch.no_grad()
def test_every_cache_has_what_a_whole_pass_leaves(name: str, kind: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"extends: cpu-exact\n{CODES if kind == 'codes' else ''}")
    model = loaded(name, rules)
    ids, found = prompt(40, seed=1), []
    for kept in (0, 1):
        cache = StaticCache(config=model.config, max_cache_len=64) if kind == "static" else new_cache(model)
        with tokens_of_last_block(model) as calls:
            for part in ids.split(13 if kind == "chunks" else 40, dim=1):
                logits = model(part, past_key_values=cache, logits_to_keep=kept).logits
        assert calls == ([1] if kept else [13, 13, 13, 1] if kind == "chunks" else [40]) * (4 if kept and kind == "chunks" else 1)
        found.append((logits[:, -1], model(prompt(1, seed=2), past_key_values=cache).logits, cache))
    (whole, step, cache), (alone, other_step, other_cache) = found
    assert type(cache) is type(other_cache) and cache.get_seq_length() == other_cache.get_seq_length() == 41
    assert error(alone, whole) < TOLERANCE and error(other_step, step) < TOLERANCE


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@torch.inference_mode()
def test_pages_of_a_server_have_what_a_whole_pass_leaves(name: str, coded: bool, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"extends: cpu-exact\n{CODES if coded else ''}")
    model, found = loaded(name, rules), []
    for kept in (0, 1):
        pool = open_pool(model, limit=1 << 22, prefix_bytes=None, most=4, context=512, coded=coded)
        texts = [prompt(45, seed=row)[0].tolist() for row in range(2)]
        rows = [pool.begin(ids, 80) for ids in texts]
        with tokens_of_last_block(model) as calls:
            for chunk in range(0, 45, 15):
                logits = pool.forward(rows, [ids[chunk : chunk + 15] for ids in texts], logits_to_keep=kept)
        assert calls == [2 if kept else 30] * 3
        found.append((logits[:, -1], pool.step(rows, [1, 2])))
    assert all(error(alone, whole) < TOLERANCE for whole, alone in zip(*found, strict=True))


def whole(model: Any, **arguments: Any) -> list[int]:
    """Return how many tokens the last block computes in a prompt with these arguments."""
    with tokens_of_last_block(model) as calls:
        model(prompt(12), **arguments)
    return calls


@torch.no_grad()
def test_passes_whose_outputs_are_read_compute_all_tokens() -> None:
    model = loaded("mixtral")
    assert whole(model, logits_to_keep=1) == [1]
    others: list[dict[str, Any]] = [
        {},
        {"logits_to_keep": 0},
        {"logits_to_keep": 2},
        {"logits_to_keep": torch.tensor([11])},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"output_router_logits": True},
    ]
    for arguments in others:
        assert whole(model, **{"logits_to_keep": 1, **arguments} if arguments else {}) == [12], arguments
    with torch.enable_grad():
        assert whole(model, logits_to_keep=1) == [12]
    model.config.output_router_logits = True
    assert whole(model, logits_to_keep=1) == [12]
    model.config.output_router_logits = False
    assert whole(model, logits_to_keep=1) == [1]
    with tokens_of_last_block(model) as calls:
        assert model(prompt(8), logits_to_keep=1).logits.shape[:2] == (1, 1)  # which may be a step
    assert calls == [8]


@pytest.mark.parametrize("path", ["model", "model.norm", "model.layers.2", "model.layers.2.self_attn", "model.layers.2.mlp"])
@torch.no_grad()
def test_hooks_see_all_tokens(path: str) -> None:
    model, seen = loaded("mixtral"), list[int]()

    def look(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        seen.append(first.shape[1])

    handle = model.get_submodule(path).register_forward_hook(look)
    model(prompt(12), logits_to_keep=1)
    assert seen == [12]
    handle.remove()
    assert whole(model, logits_to_keep=1) == [1]


@torch.no_grad()
def test_an_interrupted_pass_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("qwen3_moe")
    layer, ids = model.get_decoder().layers[-1], prompt(12)
    expected = model(ids).logits[:, -1]
    for broken in (layer.mlp, layer.self_attn.o_proj, layer.self_attn.q_proj, layer.input_layernorm):
        forward = type(broken).forward

        def interrupt(self: nn.Module, *args: Any, broken: nn.Module = broken, forward: Any = forward) -> Any:
            if self is broken:
                raise KeyboardInterrupt
            return forward(self, *args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(type(broken), "forward", interrupt)
            model(ids, logits_to_keep=1)
        assert error(model(ids, logits_to_keep=1).logits[:, -1], expected) < TOLERANCE
        assert whole(model) == [12]
        assert model.model(ids).last_hidden_state.shape[1] == 12


@torch.no_grad()
def test_changed_modules_get_all_tokens() -> None:
    model, seen = loaded("mixtral"), list[int]()
    layers, norm, attention = model.model.layers, model.model.norm, model.model.layers[-1].self_attn
    seeing: Any = lambda module, args, output: seen.append(args[0].shape[1])  # noqa: E731
    attention.o_proj = nn.Sequential(attention.o_proj)  # as an adapter may wrap it
    attention.o_proj.register_forward_hook(seeing)
    model(prompt(12), logits_to_keep=1)
    attention.o_proj = attention.o_proj[0]
    model.model.norm = nn.Sequential(norm)
    model.model.norm.register_forward_hook(seeing)
    model(prompt(12), logits_to_keep=1)
    model.model.norm = norm
    forward = layers[-1].mlp.forward
    layers[-1].mlp.forward = lambda x: (seen.append(x.shape[1]), forward(x))[1]
    model(prompt(12), logits_to_keep=1)
    del layers[-1].mlp.forward
    assert seen == [12, 12, 12]
    assert whole(model, logits_to_keep=1) == [1]
    layers[0], layers[-1] = layers[-1], layers[0]
    expected = model(prompt(12), use_cache=False).logits[:, -1:]
    assert error(model(prompt(12), use_cache=False, logits_to_keep=1).logits, expected) < TOLERANCE


@torch.no_grad()
def test_hooks_of_accelerate_see_all_tokens() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, seen = loaded("mixtral"), list[int]()

    class Seeing(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            seen.append(output.shape[1])
            return output

    for module in (model.model.layers[-1].self_attn.o_proj, model.model.layers[-1], model.model.norm):
        hooks.add_hook_to_module(module, Seeing())
    model(prompt(12), logits_to_keep=1)
    assert seen == [12, 12, 12]


@torch.no_grad()
def test_a_layer_that_is_shared_computes_all_tokens() -> None:
    stock = build_model(case_of("mixtral")).eval()
    stock.model.layers[0] = stock.model.layers[-1]
    model = optimize_and_load(stock, "cpu-exact", progress=False, threads=1)
    expected = model(prompt(12), use_cache=False).logits[:, -1:]
    assert error(model(prompt(12), use_cache=False, logits_to_keep=1).logits, expected) < TOLERANCE


@torch.no_grad()
def test_heads_without_logits_to_keep_read_all_tokens() -> None:
    config = build_model(case_of("mixtral")).config
    model = optimize_and_load(MixtralForTokenClassification(config).eval(), "cpu-exact", progress=False, threads=1)
    assert model(prompt(12), logits_to_keep=1).logits.shape[1] == 12


@torch.no_grad()
def test_statistics_of_sparsity_have_all_tokens(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    options = "{weights: stored, sparsity: {target: 0, scope: routed}}"
    rules.write_text(f"extends: cpu-exact\nrules:\n- {{match: {{kind: experts}}, replace: {{class: hybrid_experts, kwargs: {options}}}}}\n")
    assert whole(loaded("mixtral", rules), logits_to_keep=1) == [12]


class Summing(MixtralForCausalLM):
    """A head that reads the states of all tokens, whatever it is asked for."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(args[0])
        return MoeCausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state.mean(1, keepdim=True)))


@torch.no_grad()
def test_models_of_others_compute_all_tokens() -> None:
    stock = build_model(case_of("mixtral")).eval()
    own = Summing(stock.config).eval()
    own.load_state_dict(stock.state_dict())
    ids, expected = prompt(12), own(prompt(12)).logits
    model = optimize_and_load(own, "cpu-exact", progress=False, threads=1)
    assert error(model(ids, logits_to_keep=1).logits, expected) < TOLERANCE


@pytest.mark.parametrize("tokens", [8, 9])
@torch.no_grad()
def test_experts_that_are_deferred_to_the_last_layer_are_added(tokens: int, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    experts = "{match: {kind: experts}, replace: {class: hybrid_experts, kwargs: {gpu: emulated, defer: 1, cache: {ratio: 0.5}}}}"
    rules.write_text(f"version: 1\nrules:\n- {experts}\n- {{match: {{kind: attention}}, replace: {{class: cpu_attention}}}}\n")
    model = loaded("granitemoe", rules)
    expected, found = (model(prompt(tokens), logits_to_keep=kept).logits[:, -1] for kept in (0, 1))
    assert error(found, expected) < TOLERANCE


@torch.no_grad()
def test_positional_arguments_are_not_read() -> None:
    model = loaded("mixtral")
    router_logits = model(prompt(12), None, None, None, None, None, None, True, logits_to_keep=1).router_logits
    assert {each.shape[0] for each in router_logits} == {12}


def test_threads_and_models_do_not_disturb_each_other() -> None:
    """Passes over all tokens beside passes for one, of one model and of another of the same class."""
    models, ids = [loaded("qwen3_moe"), loaded("mixtral")], prompt(30)
    failures: list[str] = []

    def repeat(model: Any, kept: int) -> None:
        with torch.no_grad():
            for _ in range(15):
                logits = model(ids, logits_to_keep=kept).logits
                if logits.shape[1] != (1 if kept else 30) or error(logits[:, -1], expected[id(model)]) > TOLERANCE:
                    failures.append(f"{kept}: {tuple(logits.shape)}")

    with torch.no_grad():
        expected = {id(model): model(ids).logits[:, -1] for model in models}
    threads = [threading.Thread(target=repeat, args=(model, kept)) for model in models for kept in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@torch.no_grad()
def test_stock_operators_of_a_comparison_compute_all_tokens() -> None:
    model, ids = loaded("qwen3_moe"), prompt(12)
    expected = model(ids).logits[:, -1]
    attention = model.get_decoder().layers[-1].self_attn
    operator = next(each for path, each in model.moegraft.operators.items() if path.endswith("layers.2.self_attn"))
    with operator.set_aside(attention):
        assert whole(model, logits_to_keep=1) == [12]
        assert error(model(ids, logits_to_keep=1).logits[:, -1], expected) < TOLERANCE


@pytest.mark.parametrize("name", ["jamba", "deepseek_v4", "kimi_linear", "gemma4_text", "deepseek_v32"])
@torch.no_grad()
def test_layers_that_keep_more_than_keys_and_values_are_left_alone(name: str) -> None:
    assert not any("_moegraft_operator" in vars(layer) for layer in loaded(name).get_decoder().layers)
