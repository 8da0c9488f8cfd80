"""What tests of choices share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdcluster.settings.config import cache_directory
from pdcluster_router.policy.predicted import compiled


@pytest.fixture(params=["plain", "compiled"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nodes are weighed by functions as the Python that they are, and compiled."""
    if request.param == "compiled":
        assert compiled.load(cache_directory())
    yield
    compiled.use(compiled.PLAIN)
