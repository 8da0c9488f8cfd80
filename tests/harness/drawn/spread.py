"""Which tests `make test` and `make test-full` may run side by side. A file's tests stay on one worker, one after the
other, as xdist's `loadfile` has it; but those of a few files take so long together that the last worker would be alone
with them at the end. Each of these goes to whoever is free."""

from __future__ import annotations

import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

# Minutes long in a full run, of tests that share nothing but what is cheap to make twice.
SPREAD = frozenset(
    {
        "tests/faults/test_fault_matrix.py",
        "tests/faults/test_ownership.py",
        "tests/faults/test_real_media_faults.py",
        "tests/fuzz/test_request_fuzz.py",
        "tests/parity/test_tensor_parallel.py",
        "tests/unit/transfer/protocol/test_session_interleavings.py",
    }
)


def unit_of(nodeid: str) -> str:
    """What a test is given to a worker with: the tests of its file, or itself alone."""
    file = nodeid.split("::", 1)[0]
    return nodeid if file in SPREAD else file


class SpreadScheduling(LoadFileScheduling):
    """Files, and the tests of those that are spread, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def scheduling(config: pytest.Config, log: object) -> SpreadScheduling | None:
    """None: xdist's own, for any other way to share tests out than by file."""
    return SpreadScheduling(config, log) if config.getvalue("dist") == "loadfile" else None
