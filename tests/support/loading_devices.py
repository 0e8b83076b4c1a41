"""The devices that tests of slots and transfers run on."""

import pytest

from moegraft.operators.offload.devices.cuda import why_no_cuda
from support.loading_rig import EMULATED

DEVICES = [*EMULATED, pytest.param("cuda", marks=pytest.mark.skipif(why_no_cuda() is not None, reason=str(why_no_cuda())))]
