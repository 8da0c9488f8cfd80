"""What tests of choices share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from checkpoints import KERNEL_CACHE

from pdcluster_router.policy.predicted import compiled


@pytest.fixture(params=["plain", "compiled"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nodes are weighed by functions as the Python that they are, and compiled."""
    if request.param == "compiled":
        assert compiled.load(KERNEL_CACHE)
    yield
    compiled.use(compiled.PLAIN)
