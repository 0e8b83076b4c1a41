"""One runtime for each instruction set this machine has."""

from __future__ import annotations

import pytest

from moegraft.cpu_backend import Runtime


@pytest.fixture(scope="session")
def runtimes() -> dict[str, Runtime]:
    return {isa: Runtime(threads=2, isa=isa) for isa in Runtime.available_isas()}


@pytest.fixture(params=Runtime.available_isas())
def runtime(request: pytest.FixtureRequest, runtimes: dict[str, Runtime]) -> Runtime:
    return runtimes[request.param]
