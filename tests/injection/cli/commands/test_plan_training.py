"""`moegraft plan --train`: the figures add up, and the memory is about that of a real training in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import Result

from moegraft.injection.estimate.measure import Measurements
from moegraft.injection.estimate.memory import PlannedModel
from moegraft.injection.estimate.training import TrainingForecast, TrainingLoad, training_forecast
from moegraft.injection.meta_model import build_meta_model
from moegraft.injection.planning import plan
from moegraft.injection.rules import read_rules
from moegraft.operators.base import Rate
from moegraft.operators.registry import load_registry

Run = Callable[..., Result]
RunJson = Callable[..., dict[str, Any]]
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}


def predicted(folder: Path, rules: str, load: TrainingLoad, measured: Measurements | None = None) -> TrainingForecast:
    registry, meta_model = load_registry(), build_meta_model(folder)
    planned = plan(meta_model, read_rules(rules, registry=registry), registry=registry)
    return training_forecast(PlannedModel(meta_model, planned, registry), load, measured)


def test_figures_add_up(run: Run, run_json: RunJson, config_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = "plan", "train", "--model", config_folder, "--train", "--batch", 4, "--prompt", 100, "--rank", 8
    found = run_json(*given)
    assert found["exit_code"] == 0 and found["ok"]
    assert found["weights"] == run_json("plan", "train", "--model", config_folder)["memory_bytes"]["weights"]
    assert found["parameters"] == 8 * (12 * (64 + 64 + 64 + 32 + 64 + 32 + 64 + 64) + 3 * (64 + 64))  # q, k, v and o; a dense layer
    assert found["adapters"] == 16 * found["parameters"]
    assert found["checkpoints"] == 12 * 400 * 64 * 4
    assert found["head"] == 400 * 260 * (4 + 12)
    assert found["step"] == found["checkpoints"] + max(found["layer"], found["head"])
    assert found["peak"] == found["weights"] + found["program"] + found["adapters"] + found["step"]
    more = run_json(*given[:-3], 200, *given[-2:])
    assert all(more[name] == 2 * found[name] for name in ("checkpoints", "layer", "head"))
    text = run(*given).stdout
    assert "speed: not predicted" in text and "4 x 100 tokens" in text
    assert run(*given, "--ram", "1MiB").exit_code == 1 and "it does not fit" in run(*given, "--ram", "1MiB").stdout


def test_speed_by_hand(config_folder: Path) -> None:
    """Rates at which only arithmetic takes time: of experts five forward passes, of linear layers three."""
    rate = Rate(decode_gbps=1e9, prefill_gflops=1.0)
    measured = Measurements(1e9, {"int8": rate}, {"int8": rate, "float32": rate}, 0.0, 0.0)
    load = TrainingLoad(2, 50, 8)
    found = predicted(config_folder, "train", load, measured)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(config_folder))
    experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    rest = sum(each.numel() for name, each in model.named_parameters() if ".experts." not in name) - model.model.embed_tokens.weight.numel()
    seconds = 2 * load.tokens * (5 * experts * 0.5 + 3 * rest) / 1e9
    assert found.tokens_s == pytest.approx(load.tokens / seconds)
    slower = Measurements(1e9, {}, {"int8": rate, "float32": rate}, 0.0, 0.0)
    assert predicted(config_folder, "train", load, slower).missing == ("experts, int8",)


def test_rules_without_a_backward_pass_are_refused(run: Run, rules: Callable[[str], Path], config_folder: Path) -> None:
    kwargs = "{weights: int8, sparsity: {target: 0.5, scope: routed}}"
    text = f"rules:\n- match: {{kind: experts}}\n  replace: {{class: hybrid_experts, kwargs: {kwargs}}}\n"
    done = run("plan", rules(text), "--model", config_folder, "--train")
    assert done.exit_code == 2 and "cannot be trained with these rules: model.layers.1.mlp.experts: " in done.stderr
    done = run("plan", "--model", config_folder, "--train", "--nodes", 2)
    assert done.exit_code == 2 and "--train plans for one machine" in done.stderr


MEASURE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from moegraft.injection import optimize_and_load
from moegraft.injection.lora import lora_config
from peft import get_peft_model

folder, rules, rows, length = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)

def anonymous(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

model = optimize_and_load(folder, rules, progress=False)
adapted = get_peft_model(model, lora_config(model, r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
model.enable_input_require_grads()
model.gradient_checkpointing_enable()
adapted.train()
learned = [each for each in adapted.parameters() if each.requires_grad]
optimizer = torch.optim.AdamW(learned)

def step(rows, length):
    ids = torch.randint(0, 2048, (rows, length))
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

step(1, 8)  # what libraries allocate once
before = anonymous("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak so far
step(rows, length)
print(json.dumps({"grown": anonymous("VmHWM") - before, "learned": sum(each.numel() for each in learned)}))
"""


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [("train", torch.bfloat16), pytest.param("cpu-exact", torch.float32, marks=pytest.mark.long)],
    ids=["train", "cpu-exact"],
)
def test_the_memory_of_a_step_is_about_the_real_one(rules: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The peak of resident memory in a fresh process, whose allocator returns what is freed (by default glibc's keeps several times it)."""
    pytest.importorskip("peft", reason="PEFT is not installed (the extra `train`)")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, dtype=dtype)).to(dtype).save_pretrained(tmp_path)
    load = TrainingLoad(8, 512, 8)
    expected = predicted(tmp_path, rules, load)
    arguments = [sys.executable, "-c", MEASURE, str(tmp_path), rules, str(load.batch), str(load.length)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["learned"] == expected.parameters
    ratio = found["grown"] / expected.step
    assert 0.6 < ratio < 1.2, (found, expected)  # measured: 0.75 to 0.91, with two and with eight layers
