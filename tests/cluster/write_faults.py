"""What may happen to a write on the scripted medium, by name; each must leave every token right."""

from __future__ import annotations

import pytest
from fake_backend import Fault

from pdcluster.transfer.backends.base import WriteStatus

WRITE_FAULTS = {
    "slow": Fault(delay_s=0.05),
    "failed": Fault(status=WriteStatus.FAILED),
    "flipped": Fault(flip_byte=5),
    "torn": Fault(torn_bytes=16),
    "no-stamp": Fault(arrivals=0),
    "two-stamps": Fault(arrivals=2),
    "lost": Fault(delay_s=0.02, lost_s=0.001),
    "unknown": Fault(delay_s=0.05, unknown_s=0.01),
}

each_write_fault = pytest.mark.parametrize("fault", WRITE_FAULTS.values(), ids=WRITE_FAULTS)
