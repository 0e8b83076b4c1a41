"""What a machine runs that has some of the dependencies alone, such as a borrowed one with a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import ROOT

# Hides distributions as if they were not installed, from `import` and from those who ask whether they are there.
HIDING = """
import re
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if path is None and name in {hidden!r} else PathFinder.find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *args, **kwargs):
        found = PathFinder.find_distributions(*args, **kwargs)
        return (each for each in found if re.sub("[-_.]+", "-", each.metadata["Name"]).lower() in {kept!r})

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
"""


def with_requirements(packages: Iterable[str]) -> set[str]:
    """Return distributions and everything that they require, by their canonical names."""
    found, left = set[str](), [*packages]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needed = map(Requirement, requires(name) or [])
        except PackageNotFoundError:
            continue
        left += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def run_with(packages: Iterable[str], code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code where these packages and what they require are installed, and nothing else: moegraft is run from its folder."""
    kept = with_requirements(packages)
    usable = kept | {"moegraft"}
    hidden = {name for name, owners in packages_distributions().items() if not usable & set(map(canonicalize_name, owners))}
    command = [sys.executable, "-c", HIDING.format(hidden=hidden, kept=kept) + code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


NEEDED = ("torch", "transformers", "numpy", "pyyaml", "safetensors", "psutil", "regex", "rich", "typer")
MODEL = """
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, eos_token_id=None, dtype=torch.float32,
)
stock = Qwen3MoeForCausalLM(config).eval()
ids = torch.arange(5)[None] + 7
"""
GPU_EXPERTS = f"""{MODEL}
sys.path.append({str(ROOT / "tests")!r})
import support.emulated
import moegraft.injection.cli.models
from moegraft.injection import build_meta_model, graft, load, plan

folder, rules, *_ = sys.argv[1:]
stock.save_pretrained(folder)
skeleton = build_meta_model(folder, weights=True)
model = load(graft(skeleton, plan(skeleton, rules)))
with torch.no_grad():
    assert torch.allclose(model(ids).logits, stock(ids).logits, atol=1e-4)
asked = dict(max_new_tokens=12, do_sample=False)
assert model.generate(ids, **asked).tolist() == stock.generate(ids, **asked).tolist()
(engine,) = model.moegraft.context.gpu_engines
print(engine.statistics.used - engine.statistics.on_cpu, engine.statistics.replayed)
"""
RULES = """
version: 1
rules:
- match: {kind: experts}
  replace: {class: hybrid_experts, kwargs: {gpu: emulated, cache: {ratio: 0.5}, decode: graph, cache_dir: "packed"}}
"""


# Runs one command after another, and prints the exit code and the output of each as JSON.
COMMANDS = """
import contextlib, io, json
from moegraft.injection.cli.moegraft import main
from moegraft.operators import cpu

cpu.instruction_sets = list  # tested, in seconds, where the doctor is
for command in json.loads(sys.argv.pop()):
    sys.argv = ["moegraft", *command.split()]
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue()]))
"""


def test_a_machine_without_packages_of_files_or_servers(tmp_path: Path) -> None:
    """It has experts on a GPU, also without Triton, which is an extra as well; its version is known, the doctor examines it, and GGUF
    files are refused in a sentence without their package."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.replace("packed", str(tmp_path / "packed")))
    (tmp_path / "theirs.gguf").write_bytes(b"GGUF")
    commands = ["--version", "doctor", f"plan cpu --gguf {tmp_path}/theirs.gguf", f"quantize --weights Q4_K --out {tmp_path}/model.gguf"]
    done = run_with(NEEDED, GPU_EXPERTS + COMMANDS, str(tmp_path / "model"), str(rules), json.dumps(commands))
    assert done.returncode == 0, done.stderr
    figures, *answers = done.stdout.splitlines()
    on_gpu, replayed = map(int, figures.split())
    assert on_gpu > 0 and replayed > 0
    version, doctor, *refused = map(json.loads, answers)
    assert version == [0, "moegraft, run from its folder without being installed\n"]
    assert doctor[0] == 0 and "notice: moegraft is run from its folder" in doctor[1]
    assert len(refused) == 2
    for code, output in refused:
        assert code == 2
        assert "GGUF files need gguf, which is not installed: pip install 'gguf>=0.19'" in " ".join(output.split())


COLLECT = """
import pytest

sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests"]))
"""


@pytest.mark.long
def test_every_test_module_is_collected_without_the_extras() -> None:
    """One that is not is an error of the whole run, also of one that selects the tests for a GPU."""
    done = run_with((*NEEDED, "triton", "pytest"), COLLECT, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if line.startswith("E"))
