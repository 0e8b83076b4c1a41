"""Training beside packed weights: gradients and losses are the stock model's, and what has no backward pass is refused when it starts."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT
from support.families import FamilyCase, build_model, case_of, served_cases, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments

from moegraft.cpu_backend import Runtime
from moegraft.injection import MoegraftConfig, optimize_and_load
from moegraft.injection.demo import demo_path
from moegraft.operators.errors import UnsupportedModelError

FAMILIES = [
    "qwen3_moe",
    "gpt_oss",  # clamped and biased gates
    "deepseek_v3",  # latent attention, a router with groups
    "qwen3_next",  # recurrent layers
    "llama4_text",  # rows of chosen experts
]
WORDS = 60  # of the vocabulary that prompts have, fewer than any of these models knows


def ids(seed: int = 0, batch: int = 2, length: int = 24, most: int = WORDS) -> torch.Tensor:
    return torch.randint(3, most, (batch, length), generator=torch.Generator().manual_seed(seed))


def verse(length: int = 64) -> torch.Tensor:
    """Two texts that the bundled model knows; on random tokens its experts are nearly equal, so that rounding decides between them."""
    text = (ROOT / "benchmarks" / "data" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:2000]
    tokens = AutoTokenizer.from_pretrained(demo_path())(text).input_ids
    return torch.tensor([tokens[:length], tokens[length : 2 * length]])


def step(model: PreTrainedModel, given: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, and the gradients of all parameters."""
    torch.manual_seed(0)  # the routers of phimoe sample experts in training
    model.train()
    model.zero_grad()
    loss = model(input_ids=given, labels=given, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def cosine(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the cosine of the gradients of all parameters that both models have."""
    assert found and found.keys() <= expected.keys()
    pair = (torch.cat([grads[name].double().flatten() for name in found]) for grads in (found, expected))
    return float(torch.nn.functional.cosine_similarity(*pair, 0))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.model_type in FAMILIES else pytest.mark.long) for case in served_cases() if case.generates],
    ids=lambda case: case.model_type,
)
def test_gradients_are_those_of_the_stock_model(case: FamilyCase, tmp_path: Path) -> None:
    stock = build_model(case)
    stock.save_pretrained(tmp_path)
    expected_loss, expected = step(stock, ids())
    loss, found = step(optimize_and_load(tmp_path, "cpu-exact", progress=False), ids())
    left_out = expected.keys() - found.keys()
    assert left_out and all(".experts." in name for name in left_out)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    assert cosine(found, expected) > 0.99999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_beside_int8_are_near_the_stock_models(dtype: torch.dtype) -> None:
    given = verse()
    _, expected = step(AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32), given)
    _, found = step(optimize_and_load(demo_path(), "train", dtype=dtype, progress=False), given)
    assert len(found) > 20
    assert cosine(found, expected) > (0.999 if dtype == torch.float32 else 0.998)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "nemotron_h"])
def test_layers_of_mamba2_train_beside_packed_ones(model_type: str) -> None:
    """In training mode they read the weight of `out_proj`, which the rule file `train` leaves to PyTorch."""
    loss, found = step(optimize_and_load(build_model(case_of(model_type)), "train", progress=False), ids())
    assert loss.isfinite() and all(grad.isfinite().all() for grad in found.values())
    assert any(name.endswith("out_proj.weight") for name in found)


@pytest.mark.parametrize("rules", ["train", "cpu-exact"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_of_activations_changes_nothing(rules: str, use_reentrant: bool) -> None:
    """The first pass of a reentrant checkpoint has no gradients, and the second one has."""
    model = optimize_and_load(demo_path(), rules, progress=False)
    model.enable_input_require_grads()
    loss, expected = step(model, ids(most=500))
    expected = {name: grad.clone() for name, grad in expected.items()}
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    again, found = step(model, ids(most=500))
    assert torch.equal(loss, again)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_evaluation_uses_the_kernels_again() -> None:
    model, given = optimize_and_load(demo_path(), "train", progress=False), verse()
    with torch.no_grad():
        expected = model(given).logits
        model.train()
        trained = model(given).logits
        assert torch.equal(model.eval()(given).logits, expected)
    assert not torch.equal(trained, expected)  # PyTorch's attention and norms sum in another order
    torch.testing.assert_close(trained, expected, rtol=0.1, atol=0.5)


REFUSED = {
    "sparsity": ("kwargs: {weights: int8, sparsity: {target: 0.5, scope: routed}}", "remove it"),
    "gpu": ("kwargs: {weights: int8, gpu: auto}", "set gpu: none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_backward_pass_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    kwargs, advice = REFUSED[name]
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"version: 1\nrules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, {kwargs}}}\n")
    model = optimize_and_load(demo_path(), rules, progress=False)
    with pytest.raises(UnsupportedModelError, match=rf"cannot be trained: model\.layers\.0\.mlp\.experts: .*no gradients; {advice}"):
        model.train()
    assert not any(module.training for module in model.modules())
    assert model.eval() is model


def rows() -> list[dict[str, Any]]:
    """Return a batch of four texts, several times."""
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids(batch=4, length=32, most=500)] * 6


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, learning_rate=1e-3, **options)


def test_the_trainer_accumulates_gradients(tmp_path: Path) -> None:
    """transformers' Trainer on the layers that stay; adapters are tested where PEFT is."""
    losses = []
    for batch, steps in ((4, 1), (2, 2)):
        model = optimize_and_load(demo_path(), "train", dtype=torch.float32, progress=False)
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps, "max_steps": 3}
        trainer = Trainer(model, arguments(tmp_path, **options), train_dataset=rows())
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3 and losses[0][-1] < losses[0][0]
    # int8 kernels round by the number of tokens.
    assert losses[1] == pytest.approx(losses[0], rel=4e-3 if Runtime().isa == "amx" else 2e-3)


class TestAdapters:
    """PEFT's LoRA, where it is installed (the extra `train`)."""

    TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")

    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("peft", reason="PEFT is not installed (the extra `train`)")

    @staticmethod
    def adapted(model: PreTrainedModel, **options: Any) -> Any:
        """Return the model with an adapter whose output is not zero, the same on each."""
        from peft import LoraConfig, get_peft_model

        from moegraft.injection.lora import lora_config

        torch.manual_seed(7)
        options = {"r": 8, "lora_alpha": 16, "target_modules": TestAdapters.TARGETS, "task_type": "CAUSAL_LM", **options}
        found = get_peft_model(model, lora_config(model, **options) if hasattr(model, "moegraft") else LoraConfig(**options))
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.02)
        return found

    @pytest.mark.parametrize(
        ("rules", "dtype", "least"),
        [("cpu-exact", torch.float32, 0.99999), ("train", torch.float32, 0.999), ("train", torch.bfloat16, 0.998)],
        ids=str,
    )
    def test_gradients_are_those_beside_the_stock_model(self, rules: str, dtype: torch.dtype, least: float) -> None:
        given = verse()
        expected_loss, expected = step(self.adapted(AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)), given)
        loss, found = step(self.adapted(optimize_and_load(demo_path(), rules, dtype=dtype, progress=False)), given)
        assert found.keys() == expected.keys()
        assert cosine(found, expected) > least
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5 if rules == "cpu-exact" else 0.01)

    def test_all_linear_is_every_linear_layer_but_the_head(self) -> None:
        from moegraft.injection.lora import lora_config

        def targets(model: PreTrainedModel) -> set[str]:
            found = self.adapted(model, target_modules="all-linear")
            return {name.partition(".lora_A")[0] for name, each in found.named_parameters() if "lora_A" in name}

        stock = AutoModelForCausalLM.from_pretrained(demo_path())
        linears = {name for name, module in stock.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
        for rules in ("train", "cpu"):
            model = optimize_and_load(demo_path(), rules, progress=False)
            assert set(lora_config(model, target_modules="all-linear").target_modules) == linears
            assert targets(model) == {f"base_model.model.{name}" for name in linears}

    def test_an_adapter_of_the_router_learns(self) -> None:
        model = self.adapted(optimize_and_load(demo_path(), "train", progress=False), target_parameters=["mlp.gate.weight"])
        _, found = step(model, ids(most=500))
        gates = [grad for name, grad in found.items() if ".mlp.gate." in name]
        assert len(gates) == 10 and all(grad.norm() > 0 for grad in gates)
        assert model.eval().generate(ids(length=5, most=500), max_new_tokens=4, do_sample=False).shape == (2, 9)

    def test_modules_that_are_trained_whole(self) -> None:
        """The kernels of norms and routers answer for PEFT's copies of these modules, whose weights are others."""
        wanted: list[dict[str, Any]] = [{"kind": "norm", "by": "cpu_norm"}, {"kind": "router", "by": "cpu_router"}]
        wanted.append({"kind": "experts", "by": "hybrid_experts"})
        rules = {"version": 1, "rules": [{"match": {"kind": each["kind"]}, "replace": {"class": each["by"]}} for each in wanted]}
        stock: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
        models: list[Any] = [stock, optimize_and_load(demo_path(), rules, dtype=torch.float32, progress=False)]
        given, logits = verse(), []
        models = [self.adapted(model, modules_to_save=["input_layernorm", "gate"]) for model in models]
        expected, found = (step(model, given)[1] for model in models)
        assert cosine(found, expected) > 0.99999
        assert sum("modules_to_save" in name for name in found) == 10
        for model in models:
            with torch.no_grad():
                for name, parameter in model.eval().named_parameters():
                    if "modules_to_save" in name:
                        parameter.mul_(1.5)
                logits.append(torch.stack([model(input_ids=given).logits[:, -1], model(input_ids=given[:, :5]).logits[:, -1]]))
                with model.disable_adapter():
                    assert not torch.allclose(model(input_ids=given).logits[:, -1], logits[-1][0], atol=0.1)
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)

    def test_dropout_is_the_same_when_activations_are_computed_again(self) -> None:
        given = ids(most=500)
        model = self.adapted(optimize_and_load(demo_path(), "train", progress=False), target_modules="all-linear", lora_dropout=0.3)
        model.enable_input_require_grads()
        loss, expected = step(model, given)
        expected = {name: grad.clone() for name, grad in expected.items()}
        with torch.no_grad():
            assert not torch.equal(model.eval()(input_ids=given, labels=given).loss, loss)
        for use_reentrant in (True, False):
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            again, found = step(model, given)
            assert torch.equal(loss, again)
            assert all(torch.equal(found[name], expected[name]) for name in expected)

    EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")

    @pytest.mark.parametrize(
        ("rules", "dtype", "least"),
        [("cpu-exact", torch.float32, 0.99999), ("train", torch.float32, 0.999), ("train", torch.bfloat16, 0.999)],
        ids=str,
    )
    def test_adapters_of_experts_learn_as_beside_the_stock_model(self, rules: str, dtype: torch.dtype, least: float) -> None:
        """Own matrices for each expert, with checkpointing of activations as well."""
        given, options = verse(), {"target_parameters": self.EXPERTS, "target_modules": ["q_proj"]}
        expected_loss, expected = step(
            self.adapted(AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32), **options), given
        )
        model = self.adapted(optimize_and_load(demo_path(), rules, dtype=dtype, progress=False), **options)
        loss, found = step(model, given)
        assert found.keys() == expected.keys() and sum(".experts." in name for name in found) == 20
        assert cosine(found, expected) > least
        for part in ("base_layer.lora_A", "base_layer.lora_B", "experts.lora_A", "experts.lora_B"):  # gate and up, then down
            assert cosine({name: found[name] for name in found if part in name}, expected) > least
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5 if rules == "cpu-exact" else 0.01)
        found = {name: grad.clone() for name, grad in found.items()}
        for use_reentrant in (True, False):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            again, recomputed = step(model, given)
            assert torch.equal(loss, again)
            assert all(torch.equal(recomputed[name], found[name]) for name in found)

    @pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_next", "nemotron_h", "deepseek_v3"])
    def test_experts_of_other_forms_have_adapters(self, model_type: str, tmp_path: Path) -> None:
        """Stored with inputs first, gate and up interleaved, with biases, without gates."""
        stock = build_model(case_of(model_type))
        stock.save_pretrained(tmp_path)
        matrices = {name.rpartition(".")[2] for name, each in stock.named_parameters() if ".experts." in name and each.ndim == 3}
        options = {"target_parameters": [f"experts.{name}" for name in sorted(matrices) if "bias" not in name], "target_modules": []}
        expected_loss, expected = step(self.adapted(stock, **options), ids())
        loss, found = step(self.adapted(optimize_and_load(tmp_path, "cpu-exact", progress=False), **options), ids())
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        assert found.keys() == expected.keys() and len(found) >= 4
        assert cosine(found, expected) > 0.99999

    def test_adapters_of_one_matrix_and_two_at_once(self, tmp_path: Path) -> None:
        from peft import PeftModel

        from moegraft.injection.lora import load_adapter

        given = ids(batch=1, length=9, most=500)
        for number, targets in enumerate((self.EXPERTS[:1], self.EXPERTS[1:], self.EXPERTS)):
            folders = [tmp_path / f"{number}{each}" for each in range(2)]
            models = []
            for folder, rank in zip(folders, (4, 2), strict=True):
                made = optimize_and_load(demo_path(), "train", dtype=torch.float32, progress=False)
                models.append(self.adapted(made, target_modules=[], target_parameters=targets, r=rank))
                for name, parameter in models[-1].named_parameters():
                    if "lora_B" in name:
                        torch.nn.init.normal_(parameter, 0, 0.3)
                models[-1].save_pretrained(folder)
            exact = load_adapter(optimize_and_load(demo_path(), "cpu-exact", dtype=torch.float32, progress=False), folders[0])
            load_adapter(exact, folders[1], name="second")
            stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32), folders[0])
            stock.load_adapter(folders[1], "second")
            seen = []
            with torch.no_grad():
                for active in ("default", "second", ["default", "second"]):
                    for model in (exact, stock):
                        model.base_model.set_adapter(active)
                    seen.append(exact(given).logits)
                    torch.testing.assert_close(seen[-1], stock(given).logits, rtol=1e-3, atol=1e-3)
                with exact.disable_adapter():
                    seen.append(exact(given).logits)
            assert all(float((one - other).norm() / one.norm()) > 1e-3 for one, other in pairwise(seen))
            options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
            for active in ("default", "second"):
                exact.set_adapter(active), stock.set_adapter(active)
                assert torch.equal(exact.generate(given, **options), stock.generate(given, **options))

    def test_experts_without_gradients_have_no_adapters(self, tmp_path: Path) -> None:
        from moegraft.injection.lora import load_adapter

        folder, rules = tmp_path / "adapter", tmp_path / "rules.yaml"
        self.adapted(AutoModelForCausalLM.from_pretrained(demo_path()), target_parameters=self.EXPERTS).save_pretrained(folder)
        kwargs, _ = REFUSED["sparsity"]
        rules.write_text(f"version: 1\nrules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, {kwargs}}}\n")
        with pytest.raises(UnsupportedModelError, match="has no place for 20 tensors"):
            load_adapter(optimize_and_load(demo_path(), rules, progress=False), folder)

    def test_all_linear_leaves_out_what_peft_takes_for_experts(self, caplog: pytest.LogCaptureFixture) -> None:
        from moegraft.injection.lora import lora_config

        model = optimize_and_load(build_model(case_of("deepseek_v3")), "cpu-exact", progress=False)
        config = lora_config(model, target_modules="all-linear")
        asked = set(config.target_modules or ())
        linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
        left_out = linears - asked
        assert asked < linears and left_out and all("shared_experts" in name or ".mlp." in name for name in left_out)
        assert f"{len(left_out)} linear layers get no adapters: for this family PEFT takes the names" in caplog.text
        adapted = self.adapted(model, target_modules="all-linear")
        assert {name.partition(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name} == {
            f"base_model.model.{name}" for name in asked
        }

    def test_saved_adapters_load_with_and_without_injection(self, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
        from peft import PeftModel

        from moegraft.injection.lora import load_adapter

        def logits(model: Any) -> torch.Tensor:
            with torch.no_grad():
                found: torch.Tensor = model.eval()(ids(most=500)).logits
            return found

        trained = self.adapted(optimize_and_load(demo_path(), "train", dtype=torch.float32, progress=False))
        trained.save_pretrained(tmp_path)
        assert not [each for each in recwarn if "Unsupported layer" in str(each.message) or "state_dict" in str(each.message)]
        expected = logits(trained)
        fresh = optimize_and_load(demo_path(), "train", dtype=torch.float32, progress=False)
        base = logits(fresh)
        assert torch.equal(logits(load_adapter(fresh, tmp_path)), expected)
        beside_stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32), tmp_path)
        assert float((logits(beside_stock) - expected).norm()) < 0.2 * float((expected - base).norm())

    def test_generated_tokens_follow_the_adapter(self) -> None:
        """Replayed steps too, after it is switched off and on."""
        model = self.adapted(optimize_and_load(demo_path(), "train", progress=False))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.3)
        options: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        prompt = ids(batch=1, length=8, most=500)
        adapted = model.eval().generate(prompt, **options)
        with model.disable_adapter():
            plain = model.generate(prompt, **options)
        assert torch.equal(plain, optimize_and_load(demo_path(), "train", progress=False).generate(prompt, **options))
        assert not torch.equal(plain, adapted)
        assert torch.equal(model.generate(prompt, **options), adapted)

    def test_what_needs_the_packed_weights_is_refused(self) -> None:
        from moegraft.injection.lora import lora_config

        model = optimize_and_load(demo_path(), "train", progress=False)
        for options, name in (({"use_dora": True}, "DoRA"), ({"init_lora_weights": "pissa"}, "pissa")):
            with pytest.raises(UnsupportedModelError, match=f"{name}.* needs the weights"):
                lora_config(model, target_modules=["q_proj"], **options)
        for bias in ("all", "lora_only"):
            with pytest.raises(UnsupportedModelError, match=f"bias: {bias} .* set bias: none"):
                lora_config(model, target_modules=["q_proj"], bias=bias)
        with pytest.raises(UnsupportedModelError, match="modules_to_save: the rules pack o_proj, which cannot be trained"):
            lora_config(model, target_modules=["q_proj"], modules_to_save=["norm", "o_proj"])
        with pytest.raises(UnsupportedModelError, match="quantized_linear cannot be copied or pickled: leave its module out of the rules"):
            copy.deepcopy(model.model.layers[0].self_attn)
        adapted = self.adapted(model)
        for merge in (adapted.merge_adapter, adapted.merge_and_unload):
            with pytest.raises(UnsupportedModelError, match="cannot be merged into packed weights"):
                merge()
        with pytest.raises(UnsupportedModelError, match="not injected"):
            lora_config(tiny_model(), target_modules=["q_proj"])

    def test_the_trainer_trains_an_adapter_of_a_model_from_transformers(self, tmp_path: Path) -> None:
        """`is_trainable` of the quantisation method, and checkpoints of activations."""
        given = arguments(tmp_path, per_device_train_batch_size=4, max_steps=6, gradient_checkpointing=True)
        model = AutoModelForCausalLM.from_pretrained(demo_path(), quantization_config=MoegraftConfig("train"))
        with pytest.raises(ValueError, match="adapters"):
            Trainer(model, given, train_dataset=rows())
        trainer = Trainer(self.adapted(model), given, train_dataset=rows())
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < losses[0]

    def test_trl_trains_an_adapter(self, tmp_path: Path) -> None:
        """SFTTrainer reads `lm_head.weight`, which the rule file leaves to PyTorch."""
        trl = pytest.importorskip("trl", reason="TRL is not installed; it brings `datasets` and is no dependency of the tests")
        from datasets import Dataset

        from moegraft.injection.lora import lora_config

        model = AutoModelForCausalLM.from_pretrained(demo_path(), quantization_config=MoegraftConfig("train"))
        options: dict[str, Any] = {"use_cpu": True, "report_to": [], "logging_steps": 1, "max_length": 64, "bf16": False}
        config = trl.SFTConfig(str(tmp_path), max_steps=3, learning_rate=1e-3, **options)
        texts = Dataset.from_dict({"text": ["First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak."] * 24})
        adapter = lora_config(model, r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        tokenizer = AutoTokenizer.from_pretrained(demo_path())
        trainer = trl.SFTTrainer(model, args=config, train_dataset=texts, processing_class=tokenizer, peft_config=adapter)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 3 and losses[-1] < losses[0]
