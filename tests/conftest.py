"""What every test shares: no network, quiet libraries, one thread for stock PyTorch, Triton interpreted where there is no GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
from functools import cache
from importlib.metadata import EntryPoints
from pathlib import Path

# Read by the libraries when they are imported, so set before anything here imports them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch

# Rare collections: what tests import makes half a million objects, recordings of steps many more, and each collection walks them.
gc.set_threshold(20_000, 10, 10)

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined. "0" where a test's own process compiles kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")


import support.emulated  # noqa: E402, F401  registers `gpu: emulated`

from moegraft.operators import registry  # noqa: E402

_entry_points = registry.entry_points


@cache
def _entry_points_of(path: tuple[str, ...], group: str) -> EntryPoints:
    return _entry_points(group=group)


# Each load of a model asks for operators of other packages, and reads the metadata of all packages: an eighth of a tiny model's load.
registry.entry_points = lambda group: _entry_points_of(tuple(sys.path), group)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts what it puts in the background deaf to Ctrl-C, and the tests of Ctrl-C with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run generated tests in their long form: up to an hour each, instead of seconds")
    text = "a checkout of transformers' repository, whose tests of generation and of families tests/test_peers.py then runs as well"
    parser.addoption("--transformers-tests", type=Path, metavar="FOLDER", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: runs on a CUDA GPU where there is one")
    config.addinivalue_line("markers", "long: another combination of what shorter tests show each; runs with --long alone")


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether generated tests run in their long form."""
    return bool(pytestconfig.getoption("--long"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of Triton kernels run on the GPU where there is one, and so can be selected by `-m gpu` as those of CUDA devices."""
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        if "_poison" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


_imported = 0


def pytest_collection_finish(session: pytest.Session) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton.runtime.interpreter" in sys.modules:
        from support.triton_cases import quicken_interpreter

        quicken_interpreter(overflows=session.config.getoption("--long"))
    _freeze()


def pytest_runtest_setup() -> None:
    if len(sys.modules) > _imported:
        _freeze()


def _freeze() -> None:
    """Keep what is imported by now out of garbage collection, which would take a third of a second for the libraries alone."""
    global _imported
    gc.collect()
    gc.freeze()
    _imported = len(sys.modules)


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`gpu`, for tests and fixtures that ask for it: the emulated device, and CUDA where there is a GPU."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    own = any("gpu" in (names.replace(",", " ").split() if isinstance(names, str) else names) for names in given)
    if "gpu" in metafunc.fixturenames and not own:
        from support.gpus import GPUS  # not before the libraries' settings are made

        metafunc.parametrize("gpu", GPUS)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny models: more threads cost more than they bring
