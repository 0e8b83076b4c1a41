from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.transfer_harness import DEVICES, make_device

from moegraft.operators.offload.devices.base import Device


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = make_device(request.param)
    yield device
    device.close()
