"""Transformers' own tests of models over injected ones, beside the stock classes where they fail; run by `tests/test_peers.py`.

The source distribution of the installed transformers has the tests of all models, but neither those of generation nor those of each
family. A checkout of the repository completes it, of the same version or an older one: what both have is the distribution's.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import unittest
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
import transformers.testing_utils
from transformers import Cache, GenerationMixin, PreTrainedModel, set_seed

from moegraft.injection import optimize_and_load
from moegraft.operators.decode.cache import cache_tensors
from support.families import build_config, model_class, prompt
from support.family_rows import FamilyCase

CACHE_CHECK = "_check_past_key_values_for_generate"
TOKENS = 8  # that a test generates: the third step, and those after it, may be replayed
PACKAGE = "transformers_tests"
# The modules that both may lack, with the names that are imported from them.
STUBS = {
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
    "distributed_testing_utils.py": "run_distributed",
}
UNUSED = ("librosa",)  # packages that test modules import for tests over downloaded models, which transformers skips
# What a checkout of transformers 5.6 has, and what the present version has in its place.
REPLACED = {'"cache_implementation": "dynamic_full",': "", ".get_max_cache_shape(": ".get_max_length("}
# By the beginning of a test's name. The mixins of expert and tensor parallelism are not run: they shard parameters, and packed experts
# are none.
NOT_APPLICABLE = {
    "test_eager_matches_batched_and_grouped_inference": "compares transformers' own ways to compute experts, which are replaced",
    "test_model_weights_reload_no_missing_tied_weights": "expects all weights among the parameters, and packed ones are none",
    "test_tp_": "expects all weights among the parameters, and packed ones are none",
    "test_attn_implementation_composite_models": "expects transformers' attention, which is replaced",
    "test_num_layers_is_small": "is about the sizes that transformers' own tests use",
    "test_retain_grad_hidden_states_attentions": "needs gradients, and injected models are for inference",
}


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot get transformers' tests: {(done.stderr.strip() or 'no reason').splitlines()[-1]}")


def fetch(folder: Path, checkout: Path | None) -> tuple[Path, set[str]]:
    """Put the tests of the installed transformers into a folder, completed by those of a checkout.

    Returns:
        The folder that `PACKAGE` is imported from, and the names of the marks of pytest in it.
    """
    _pip("download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder), f"transformers=={transformers.__version__}")
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    root = next(folder.glob("transformers-*/"))
    package = (root / "tests").rename(root / PACKAGE)
    shutil.rmtree(root / "src")
    (root / "src").mkdir()
    (root / "src/transformers").symlink_to(Path(transformers.__file__ or "").parent)  # tests look for both where the repository has them
    (root / "tests").symlink_to(package)
    _pip("install", "-q", "--target", str(root), "parameterized", "httpx")
    if checkout is not None:
        for source in (*checkout.glob("tests/**/*"), *checkout.glob("utils/**/*")):
            target = root / source.relative_to(checkout)
            if source.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
                if source.suffix == ".py":
                    text = target.read_text(encoding="utf-8")
                    for former, present in REPLACED.items():
                        text = text.replace(former, present)
                    target.write_text(text, encoding="utf-8")
    for name, stub in STUBS.items():
        file = package / name
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"class {stub}:\n    pass\n")
            (file.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            (root / f"{name}.py").touch()
    sources = (*package.rglob("*.py"), Path(transformers.testing_utils.__file__ or ""))
    return root, {mark for file in sources for mark in re.findall(r"\bmark\.(\w+)", file.read_text(encoding="utf-8"))}


def has_tests(checkout: Path, family: str) -> bool:
    """Whether a checkout has tests of a family."""
    return (checkout / f"tests/models/{family}/test_modeling_{family}.py").exists()


def inject(model: PreTrainedModel) -> None:
    """Inject a model that has experts with weights; what it saves is the stock model, as its own weights are packed."""
    has_experts = any(type(module).__name__.endswith("Experts") for module in model.modules())
    if has_experts and not any(parameter.is_meta for parameter in model.parameters()):
        stock = copy.deepcopy(model)
        optimize_and_load(model, "cpu-exact", progress=False, threads=1)
        vars(model)["save_pretrained"] = stock.save_pretrained


@cache
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
    # A test looks for the mixin among the bases themselves.
    return type(stock.__name__, (stock, GenerationMixin) if issubclass(stock, GenerationMixin) else (stock,), members)


class Family:
    """What the common tests ask of a family's tester."""

    def __init__(self, case: FamilyCase) -> None:
        self._case = case
        config = self.get_config().get_text_config(decoder=True)
        self.batch_size, self.seq_length, self.is_training = 4, 7, False
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_hidden_layers, self.num_attention_heads = config.num_hidden_layers, config.num_attention_heads

    def get_config(self) -> Any:
        return build_config(self._case)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = prompt(self.seq_length, batch=self.batch_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


Tests = type[unittest.TestCase]


def common_tests(case: FamilyCase) -> tuple[Tests, Tests]:
    """Return the tests of all models over the tiny model of a family, injected and stock."""
    common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    generation = importlib.import_module(f"{PACKAGE}.generation.test_utils")
    stock = model_class(case)
    members: dict[str, Any] = {
        "test_torch_exportable": False,
        "setUp": lambda self: setattr(self, "model_tester", Family(case)),
        "has_attentions": True,
        CACHE_CHECK: _record_shapes,
        "max_new_tokens": TOKENS,
    }
    bases = (common.ModelTesterMixin, generation.GenerationTesterMixin, unittest.TestCase)
    injected, plain = (type("CommonTests", bases, {**members, "all_model_classes": (one,)}) for one in (injected_class(stock), stock))
    return injected, plain


def family_tests(family: str) -> Iterator[tuple[Tests, Tests]]:
    """Yield transformers' tests of a family, of which there may be several classes, over injected models and over stock ones."""
    module = importlib.import_module(f"{PACKAGE}.models.{family}.test_modeling_{family}")
    common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    for tests in list(vars(module).values()):
        if isinstance(tests, type) and issubclass(tests, common.ModelTesterMixin) and tests.__module__ == module.__name__:
            yield _set_up(tests, module, injected=True), _set_up(tests, module, injected=False)


def _set_up(tests: Any, module: Any, injected: bool) -> Tests:
    """Return a class of tests without those of training and exports, in which each class of models has its injected one's place."""

    def setUp(self: Any) -> None:
        tests.setUp(self)
        self.model_tester.is_training = False
        if injected:
            self.all_model_classes = tuple(map(injected_class, self.all_model_classes))
            for name in dir(self.model_tester):
                if _is_model_class(found := getattr(self.model_tester, name)):
                    setattr(self.model_tester, name, injected_class(found))
            own = {name: injected_class(found) for name, found in vars(module).items() if _is_model_class(found)}
            patch = mock.patch.dict(vars(module), own)
            patch.start()
            self.addCleanup(patch.stop)

    members = {"setUp": setUp, "test_torch_exportable": False, CACHE_CHECK: _record_shapes, "max_new_tokens": TOKENS}
    return type(tests.__name__, (tests,), members)


def _record_shapes(self: Any, batch_size: int, past_key_values: Cache, seq_length: int, config: Any) -> None:
    """Keep the shapes of a cache that a test looks at, in the place of a comparison with those of the checkout's version."""
    shapes = [tensor.shape for _, tensor in cache_tensors(past_key_values) if tensor.dim() > 1]
    assert shapes and all(shape[0] == batch_size for shape in shapes), f"expected caches of {batch_size} sequences, found {shapes}"
    vars(self).setdefault("cache_shapes", []).append(shapes)


def _is_model_class(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, PreTrainedModel) and found is not PreTrainedModel


@dataclass
class Outcomes:
    """Names of tests; `failed` and `fail_with_stock` with the traceback of the injected model, `not_applicable` with the reason."""

    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    not_applicable: dict[str, str] = field(default_factory=dict)
    fail_with_stock: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = f"{len(self.passed)} passed, {len(self.skipped)} skipped by themselves, {len(self.not_applicable)} do not apply"
        return f"{counts}, {len(self.fail_with_stock)} fail with the stock model too, {len(self.failed)} failed"


def run(injected: Tests, stock: Tests) -> Outcomes:
    """Run each test over injected models, and over stock ones where it fails or looks at caches.

    A test fails with stock models too if it raises the same error, and fails if their caches have other shapes.
    """
    outcomes = Outcomes()
    for name in unittest.TestLoader().getTestCaseNames(injected):
        reason = next((reason for beginning, reason in NOT_APPLICABLE.items() if name.startswith(beginning)), None)
        if reason is not None:
            outcomes.not_applicable[name] = reason
            continue
        skipped, problem, shapes = _run(injected, name)
        stock_problem = None
        if problem is not None or shapes:
            _, stock_problem, stock_shapes = _run(stock, name)
            if problem is None and stock_problem is None and shapes != stock_shapes:
                problem = f"expected caches of the shapes {stock_shapes}, found {shapes}"
        if problem is None:
            (outcomes.skipped if skipped else outcomes.passed).append(name)
        elif stock_problem is not None and _kind(stock_problem) == _kind(problem):
            outcomes.fail_with_stock[name] = problem
        else:
            outcomes.failed[name] = problem
    return outcomes


def _kind(traceback: str) -> str:
    """Return the type of the last error in a traceback."""
    return re.findall(r"^([\w.]+)(?::|$)", traceback, re.MULTILINE)[-1]


def _run(tests: Tests, name: str) -> tuple[bool, str | None, list[list[torch.Size]]]:
    """Return whether a test is skipped, its traceback where it fails, and the shapes of caches that it has looked at."""
    importlib.import_module(f"{PACKAGE}.test_modeling_common").global_rng.seed(0)
    set_seed(0)
    test, result = tests(name), unittest.TestResult()
    test.run(result)
    problems = [*result.errors, *result.failures]
    return bool(result.skipped), problems[0][1] if problems else None, vars(test).get("cache_shapes", [])
