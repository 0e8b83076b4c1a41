"""Transformers' own model tests over injected models, and the evaluation harness's tasks beside the stock model; the long form alone.

    pytest --long -n 2 tests/test_peers.py

The tests come from the source distribution of the installed transformers, which pip downloads; without it they are skipped.
"""

from __future__ import annotations

import copy
import importlib
import re
import subprocess
import sys
import tarfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.testing_utils
from support import import_benchmark
from support.families import build_config, case_of, model_class, prompt
from support.family_rows import FamilyCase
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe")
PACKAGE = "transformers_tests"
# The modules that the distribution lacks, with the classes that are imported from them.
STUBS = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}
# By the beginning of a test's name. The mixins of expert and tensor parallelism are not run: they shard parameters, and packed experts
# are none.
NOT_APPLICABLE = {
    "test_eager_matches_batched_and_grouped_inference": "compares transformers' own ways to compute experts, which are replaced",
    "test_model_weights_reload_no_missing_tied_weights": "expects all weights among the parameters, and packed ones are none",
    "test_tp_plan_matches_params": "expects all weights among the parameters, and packed ones are none",
    "test_num_layers_is_small": "is about the sizes that transformers' own tests use",
    "test_retain_grad_hidden_states_attentions": "needs gradients, and injected models are for inference",
}


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot get transformers' tests: {(done.stderr.strip() or 'no reason').splitlines()[-1]}")


@pytest.fixture(scope="module")
def common(long: bool, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module with `ModelTesterMixin`."""
    if not long:
        pytest.skip("takes minutes and downloads transformers' source distribution: pytest --long")
    folder = tmp_path_factory.mktemp("peers")
    _pip("download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder), f"transformers=={transformers.__version__}")
    _pip("install", "-q", "--no-deps", "--target", str(folder / "packages"), "parameterized")
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    package = folder / "packages" / PACKAGE
    next(folder.glob("transformers-*/tests")).rename(package)
    for name, stub in STUBS.items():
        file = package / name
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"class {stub}:\n    pass\n")
            (file.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    for file in (*package.glob("*.py"), Path(transformers.testing_utils.__file__ or "")):
        for name in set(re.findall(r"\bmark\.(\w+)", file.read_text(encoding="utf-8"))):
            pytestconfig.addinivalue_line("markers", f"{name}: of transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "packages"))
        yield importlib.import_module(f"{PACKAGE}.test_modeling_common")


def inject(model: PreTrainedModel) -> None:
    """Inject a model that has weights; what it saves is the stock model, as its own weights are packed."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        stock = copy.deepcopy(model)
        optimize_and_load(model, "cpu-exact", progress=False, threads=1)
        vars(model)["save_pretrained"] = stock.save_pretrained


def injected_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class whose models are injected as soon as they have weights."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:  # of the class below
        stock.__init__(self, *args, **options)
        inject(self)

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        found = stock.from_pretrained.__func__(cls, *args, **options)  # type: ignore[attr-defined]
        inject(found[0] if isinstance(found, tuple) else found)
        return found

    members = {"__init__": __init__, "from_pretrained": classmethod(from_pretrained), "__module__": stock.__module__}
    return type(stock.__name__, (stock,), members)


class Family:
    """What the common tests ask of a family's tester."""

    def __init__(self, case: FamilyCase) -> None:
        self._case = case
        config = self.get_config()
        self.batch_size, self.seq_length, self.is_training = 2, 7, False
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_hidden_layers, self.num_attention_heads = config.num_hidden_layers, config.num_attention_heads

    def get_config(self) -> Any:
        return build_config(self._case)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = prompt(self.seq_length, batch=self.batch_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("family", FAMILIES)
def test_common_model_tests(family: str, common: Any, capsys: pytest.CaptureFixture[str]) -> None:
    case = case_of(family)
    generation = importlib.import_module(f"{PACKAGE}.generation.test_utils")
    members: dict[str, Any] = {
        "all_model_classes": (injected_class(model_class(case)),),
        "test_torch_exportable": False,
        "setUp": lambda self: setattr(self, "model_tester", Family(case)),
        "has_attentions": True,
    }
    tests = type("CommonTests", (common.ModelTesterMixin, generation.GenerationTesterMixin, unittest.TestCase), members)
    passed, left_out, skipped, failed = 0, 0, 0, []
    for name in unittest.TestLoader().getTestCaseNames(tests):
        if name.startswith(tuple(NOT_APPLICABLE)):
            left_out += 1
            continue
        result = unittest.TestResult()
        tests(name).run(result)
        problems = [*result.errors, *result.failures]
        failed += [f"{name}: {text.strip().splitlines()[-1]}\n{text}" for _, text in problems]
        skipped += len(result.skipped)
        passed += result.wasSuccessful() and not result.skipped
    with capsys.disabled():
        print(f"\n{family}: {passed} passed, {skipped} skipped by themselves, {left_out} do not apply, {len(failed)} failed")
    assert not failed, "\n\n".join(failed)
    assert passed >= 60


def test_evaluation_harness(long: bool, tmp_path: Path) -> None:
    """The scores of a task that needs no download are those of the stock model.

    It is the project's: those of the harness have data of the Hub, and the ones that generate it (RULER's) fetch NLTK's.
    """
    if not long:
        pytest.skip("takes minutes: pytest --long")
    pytest.importorskip("lm_eval", reason="the evaluation harness is not installed (pip install lm-eval)")
    recipe = import_benchmark("lm_eval_recipe")
    tokenizer: Callable[..., Any] = AutoTokenizer.from_pretrained(demo_path())
    recipe.write_task(tmp_path, 40)
    found = []
    for model in (AutoModelForCausalLM.from_pretrained(demo_path()), optimize_and_load(demo_path(), "cpu-exact", progress=False)):
        (_, scores), *_ = recipe.scores(model, tokenizer, ["word_order"], 40, tmp_path)
        found.append({name: value for name, value in scores.items() if isinstance(value, float)})
    assert found[0] == found[1] and found[0]
