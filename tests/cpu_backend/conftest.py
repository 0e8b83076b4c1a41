"""One runtime for each instruction set this machine has."""

from __future__ import annotations

import pytest

from moegraft.cpu_backend import Runtime

OF_ONE_SET = ("runtime", "rig", "isa")  # parameters that choose an instruction set
SHARE = 3


@pytest.fixture(scope="session")
def runtimes() -> dict[str, Runtime]:
    return {isa: Runtime(threads=2, isa=isa) for isa in Runtime.available_isas()}


@pytest.fixture(params=Runtime.available_isas())
def runtime(request: pytest.FixtureRequest, runtimes: dict[str, Runtime]) -> Runtime:
    return runtimes[request.param]


def _places(item: pytest.Item) -> list[int]:
    """Return the place of a case on each axis of its test; names that one `parametrize` gives together are one axis."""
    places = dict(item.callspec.indices) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for name in names[1:]:
            places.pop(name.strip(), None)
    return list(places.values()) if places.keys() & {*OF_ONE_SET} else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a third of the cases of each instruction set, and every value of every axis; --long runs all.

    All instruction sets are compared with each other in full by tests that are not thinned out.
    """
    if config.getoption("--long"):
        return
    cases: dict[str, list[tuple[pytest.Item, list[int]]]] = {}
    for item in items:
        if places := _places(item):
            cases.setdefault(item.nodeid.partition("[")[0], []).append((item, places))
    left_out = []
    for of_test in cases.values():
        # Wherever two axes have as many values as the share, each value meets one of the other axis that is kept.
        sizes = sorted(max(axis) + 1 for axis in zip(*(places for _, places in of_test), strict=True))
        share = min(SHARE, sizes[-2]) if len(sizes) > 1 else 1
        left_out += [item for item, places in of_test if sum(places) % share]
    names = {id(item) for item in left_out}
    items[:] = [item for item in items if id(item) not in names]
    config.hook.pytest_deselected(items=left_out)
