"""Adapters at inference: replayed steps follow them, and what does not fit is refused before weights are read."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import with_long
from support.families import build_model, case_of, needs_adapters_of_transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from moegraft.injection import optimize_and_load
from moegraft.injection.cli.local_chat import app as local_chat
from moegraft.injection.cli.moegraft import app as moegraft
from moegraft.injection.demo import demo_path
from moegraft.injection.meta_model import build_meta_model
from moegraft.operators.errors import CheckpointError, UnsupportedModelError

pytest.importorskip("peft", reason="PEFT is not installed (the extra `train`)")

from peft import LoraConfig, get_peft_model

from moegraft.injection.lora import Adapters, check_adapter, load_adapter, lora_config

PROMPT = torch.tensor([[11, 40, 23, 96, 7, 130]])
TEXT: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
FIRST, SECOND, ROUTER = (
    {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    {"target_modules": ["k_proj", "lm_head"], "r": 4},  # other layers than the first one's
    {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
)


def adapted(model: PreTrainedModel, seed: int, size: float = 0.3, **options: Any) -> Any:
    """Return the model with a new adapter whose output is not zero, the same for each model."""
    options = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM", **options}
    torch.manual_seed(seed)
    found = get_peft_model(model, lora_config(model, **options) if hasattr(model, "moegraft") else LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, size, generator=generator)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the bundled model, trained beside stock weights and beside packed ones."""
    found = {}
    for seed, (name, options) in enumerate({"first": FIRST, "second": SECOND, "router": ROUTER}.items()):
        folder = found[name] = tmp_path_factory.mktemp(name)
        stock = name == "second"
        model = AutoModelForCausalLM.from_pretrained(demo_path()) if stock else optimize_and_load(demo_path(), "cpu", progress=False)
        adapted(model, seed, **options).save_pretrained(folder)
    return found


def replayed(model: Any) -> int:
    steps: Any = model.moegraft.statistics()["decode_steps"]
    return int(steps["replayed_steps"])


def texts(model: Any) -> list[int]:
    with torch.no_grad():
        return list(model.generate(PROMPT, **TEXT)[0].tolist())


def layer_by_layer(model: Any) -> list[int]:
    """Return the tokens of a model whose steps are not replayed."""
    context = model.moegraft.context
    steps, context.replay = context.replay, None
    try:
        return texts(model)
    finally:
        context.replay = steps


def same_text(model: Any, found: list[int], expected: list[int]) -> bool:
    """Whether two greedy texts are equal up to a place where rounding decides, as the sums of replayed steps have another order."""
    at = next((at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other), None)
    if at is None:
        return True
    with torch.no_grad():
        logits = model(torch.tensor([expected[:at]])).logits[0, -1].float()
    return float((logits[found[at]] - logits[expected[at]]).abs()) <= 0.01 * float(logits.max() - logits.min())


@pytest.mark.parametrize("rules", with_long(["cpu", "cpu-exact"], "cpu"))
def test_replayed_steps_follow_each_change_of_adapters(folders: dict[str, Path], rules: str) -> None:
    model = optimize_and_load(demo_path(), rules, dtype=torch.float32, progress=False)

    def text() -> list[int]:
        before = replayed(model)
        found = texts(model)
        assert replayed(model) > before + 10
        assert same_text(model, found, layer_by_layer(model))
        return found

    plain = text()
    several = load_adapter(model, folders["first"])
    first = text()
    load_adapter(several, folders["second"], name="second")
    assert text() == first  # it is not active
    several.set_adapter("second")
    second = text()
    assert len({tuple(each) for each in (plain, first, second)}) == 3
    several.set_adapter("default")
    assert text() == first
    with several.disable_adapter():
        assert text() == plain
    several.base_model.set_adapter(["default", "second"])  # both together
    assert text() not in (plain, first, second)
    several.delete_adapter("second")
    several.set_adapter("default")
    assert text() == first
    alone = load_adapter(optimize_and_load(demo_path(), rules, dtype=torch.float32, progress=False), folders["second"])
    assert texts(alone) == second


def test_logits_of_replayed_steps_are_those_of_the_model(folders: dict[str, Path]) -> None:
    """Of each step, with one adapter after the other over one cache's text."""
    from moegraft.injection.injected import new_cache

    model = optimize_and_load(demo_path(), "cpu-exact", dtype=torch.float32, progress=False)
    adapters = Adapters(model, {name: str(folders[name]) for name in ("first", "second")})
    stock: Any = None
    for name in ("first", "second", None, "first"):
        adapters.use(name)
        before, cache = replayed(model), new_cache(model)
        stock = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
        if name is not None:
            from peft import PeftModel

            stock = PeftModel.from_pretrained(stock, folders[name])
        ids = torch.arange(20, 36)[None]
        with torch.no_grad():
            expected = stock(ids).logits[0]
            found = [model(ids[:, :4], past_key_values=cache).logits[0, -1:]]
            found += [model(ids[:, at : at + 1], past_key_values=cache).logits[0] for at in range(4, 16)]
        torch.testing.assert_close(torch.cat(found), expected[3:], rtol=1e-3, atol=2e-3)
        assert replayed(model) > before + 5


def test_an_adapter_of_the_router_is_followed_layer_by_layer(folders: dict[str, Path]) -> None:
    model = optimize_and_load(demo_path(), "cpu", progress=False)
    plain = texts(model)
    before = replayed(model)
    several = load_adapter(model, folders["router"])
    with_router = texts(model)
    assert with_router != plain and replayed(model) == before
    with several.disable_adapter():
        assert texts(model) == plain


def test_adapters_go_between_exact_and_quantised_rules(folders: dict[str, Path]) -> None:
    for name in ("first", "second"):
        from peft import PeftModel

        exact = load_adapter(optimize_and_load(demo_path(), "cpu-exact", dtype=torch.float32, progress=False), folders[name])
        stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32), folders[name])
        with torch.no_grad():
            torch.testing.assert_close(exact(PROMPT).logits, stock(PROMPT).logits, rtol=1e-3, atol=1e-3)


def edited(folder: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(folder, to)
    path = to / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return to


def empty(folder: Path, first: Path) -> Path:
    folder.mkdir()
    return folder


def without_weights(folder: Path, first: Path) -> Path:
    edited(first, folder)
    (folder / "adapter_model.safetensors").unlink()
    return folder


def cut(folder: Path, first: Path) -> Path:
    edited(first, folder)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    return folder


def not_json(folder: Path, first: Path) -> Path:
    edited(first, folder)
    (folder / "adapter_config.json").write_text("{")
    return folder


def of_another_family(folder: Path, first: Path) -> Path:
    adapted(build_model(case_of("deepseek_v3")), 0, target_modules=["kv_b_proj"]).save_pretrained(folder)
    return folder


def of_another_size(folder: Path, first: Path) -> Path:
    adapted(build_model(case_of("qwen3_moe")), 0, target_modules=["q_proj"]).save_pretrained(folder)
    return folder


WRONG: dict[str, tuple[Callable[[Path, Path], Path], type[Exception], str]] = {
    "no folder": (lambda folder, first: folder, CheckpointError, "no adapter_config.json; give the folder"),
    "no adapter": (empty, CheckpointError, "no adapter_config.json; give the folder"),
    "no weights": (without_weights, CheckpointError, "no adapter_model.safetensors; save"),
    "a cut file": (cut, CheckpointError, "damaged file .*; save"),
    "no JSON": (not_json, CheckpointError, "damaged file .*; save"),
    "another kind": (lambda folder, first: edited(first, folder, peft_type="IA3"), UnsupportedModelError, "kind IA3; only LoRA"),
    "biases": (lambda folder, first: edited(first, folder, bias="all"), UnsupportedModelError, "bias: all .*; train"),
    "another family": (of_another_family, UnsupportedModelError, "kv_b_proj, which this model does not have.*; give"),
    "another size": (of_another_size, UnsupportedModelError, r"has \d+ inputs, where this model has \d+.*; give"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_read(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    make, error, message = WRONG[name]
    folder = make(tmp_path / "adapter", folders["first"])
    with pytest.raises(error, match=f"{folder}: .*{message}"):
        check_adapter(folder, build_meta_model(demo_path()).skeleton)
    for program, arguments in ((local_chat, ["--adapter", str(folder)]), (moegraft, ["serve", "--port", "0", "--adapter", f"a={folder}"])):
        done = CliRunner().invoke(program, [*arguments, *(["-p", "hello"] if program is local_chat else [])])
        assert done.exit_code == 2
        assert done.stderr.count("\n") == 1 and str(folder) in done.stderr, done.stderr
        assert not done.stdout


def test_adapters_of_a_model_check_what_the_rules_pack(folders: dict[str, Path], tmp_path: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(demo_path())
    adapted(stock, 0, size=0.0, target_modules=["q_proj"], modules_to_save=["lm_head"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="has lm_head as a whole, which the rules pack: leave"):
        load_adapter(optimize_and_load(demo_path(), "cpu", progress=False), tmp_path)
    plain = texts(optimize_and_load(demo_path(), "train", progress=False))
    assert texts(load_adapter(optimize_and_load(demo_path(), "train", progress=False), tmp_path)) == plain  # B is zero


def test_another_base_model_with_the_same_shapes_is_reported(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    skeleton = build_meta_model(demo_path()).skeleton
    check_adapter(folders["second"], skeleton)
    assert not caplog.messages
    skeleton.config.name_or_path = "some/other-model"
    check_adapter(folders["second"], skeleton)
    assert "was trained on" in caplog.text and "this model is other-model" in caplog.text


def test_chat_answers_with_an_adapter(folders: dict[str, Path], tmp_path: Path) -> None:
    def answer(*arguments: str) -> str:
        options = ["-p", "Who is there?", "--max-new-tokens", "16", "--no-do-sample", "--quiet"]
        done = CliRunner().invoke(local_chat, [*options, *arguments])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    plain, first, second = answer(), *(answer("--adapter", str(folders[name])) for name in ("first", "second"))
    assert len({plain, first, second}) == 3
    assert answer("--adapter", str(folders["first"])) == first


def test_a_saved_chat_is_not_resumed_with_another_adapter(folders: dict[str, Path], tmp_path: Path) -> None:
    from moegraft.injection.cli.chat.conversation import fingerprint

    def identity(folder: Path | None) -> str:
        model = optimize_and_load(demo_path(), "cpu", progress=False)
        if folder is not None:
            load_adapter(model, folder)
        return fingerprint(model)

    first = folders["first"]
    scaled = Path(shutil.copytree(first, tmp_path / "scaled"))
    config = json.loads((scaled / "adapter_config.json").read_text())
    (scaled / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 3 * config["lora_alpha"]}))
    assert len({identity(folder) for folder in (None, first, folders["second"], scaled)}) == 4
    assert identity(first) == identity(first)


def test_a_configuration_of_pefts_own_names_the_way() -> None:
    """For this family PEFT takes `gate_proj` for the experts' fused matrices, which its own layers would read."""
    needs_adapters_of_transformers()
    model: Any = optimize_and_load(demo_path(), "cpu", progress=False)
    with pytest.raises(AttributeError, match=r"packed experts have no parameter gate_up_proj: .* by moegraft\.injection\.lora"):
        model.add_adapter(LoraConfig(target_modules=["gate_proj", "up_proj"]))


def test_loading_adapters_warns_of_nothing(folders: dict[str, Path]) -> None:
    """As at the start of a server, to whose operator a warning for developers of PEFT is of no use."""
    model = optimize_and_load(demo_path(), "cpu", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        Adapters(model, {"one": str(folders["first"]), "two": str(folders["second"])})
