"""Transformers' own model tests over injected models, and the evaluation harness's tasks beside the stock model; the long form alone.

    pytest --long -n 2 tests/test_peers.py
    pytest --long -n 2 tests/test_peers.py --transformers-tests=CHECKOUT

The tests come from the source distribution of the installed transformers, which pip downloads; without it they are skipped. Those of
generation and of each family are in no distribution: a checkout of transformers' repository, of about the installed version, has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import evaluation_harness
from support import transformers_suite as suite
from support.families import case_of, served_cases
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from moegraft.injection import optimize_and_load
from moegraft.injection.demo import demo_path

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With a checkout, all families, and those that it has tests of."""
    checkout = metafunc.config.getoption("--transformers-tests")
    if "model_type" in metafunc.fixturenames:
        every = [case.model_type for case in served_cases() if case.generates]
        metafunc.parametrize("model_type", FAMILIES if checkout is None else every)
    if "family" in metafunc.fixturenames:
        own = {case.family for case in served_cases() if checkout is not None and suite.has_tests(checkout, case.family)}
        metafunc.parametrize("family", sorted(own))


@pytest.fixture(scope="module")
def tests_of_transformers(long: bool, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package `tests` of transformers."""
    if not long:
        pytest.skip("takes minutes and downloads transformers' source distribution: pytest --long")
    root, marks = suite.fetch(tmp_path_factory.mktemp("peers"), pytestconfig.getoption("--transformers-tests"))
    for mark in marks:
        pytestconfig.addinivalue_line("markers", f"{mark}: of transformers")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_warning()  # some tests read the log
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield
    logging.set_verbosity(verbosity)


def check(name: str, outcomes: suite.Outcomes, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{name}: {outcomes}", *(f"  with the stock model too: {name}" for name in outcomes.fail_with_stock), sep="\n")
    assert not outcomes.failed, "\n\n".join(f"{name}: {text}" for name, text in outcomes.failed.items())
    if not outcomes.passed and not outcomes.fail_with_stock:
        pytest.skip("transformers skips all of these tests itself")
    assert len(outcomes.passed) >= 60


@pytest.mark.usefixtures("tests_of_transformers")
def test_common_model_tests(model_type: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(model_type, suite.run(*suite.common_tests(case_of(model_type))), capsys)


@pytest.mark.usefixtures("tests_of_transformers")
def test_tests_of_a_family(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    for injected, stock in suite.family_tests(family):
        check(injected.__name__, suite.run(injected, stock), capsys)


def test_evaluation_harness(long: bool, tmp_path: Path) -> None:
    """The scores of a task that needs no download are those of the stock model.

    It is the project's: those of the harness have data of the Hub, and the ones that generate it (RULER's) fetch NLTK's.
    """
    if not long:
        pytest.skip("takes minutes: pytest --long")
    pytest.importorskip("lm_eval", reason="the evaluation harness is not installed (pip install lm-eval)")
    tokenizer: Callable[..., Any] = AutoTokenizer.from_pretrained(demo_path())
    evaluation_harness.write_task(tmp_path, 40)
    found = []
    for model in (AutoModelForCausalLM.from_pretrained(demo_path()), optimize_and_load(demo_path(), "cpu-exact", progress=False)):
        (_, scores), *_ = evaluation_harness.scores(model, tokenizer, ["word_order"], 40, tmp_path)
        found.append({name: value for name, value in scores.items() if isinstance(value, float)})
    assert found[0] == found[1] and found[0]
