"""The devices that tests of slots and transfers run on."""

import pytest
from loading_rig import EMULATED

from moegraft.operators.experts.devices.cuda import why_no_cuda

DEVICES = [*EMULATED, pytest.param("cuda", marks=pytest.mark.skipif(why_no_cuda() is not None, reason=str(why_no_cuda())))]
