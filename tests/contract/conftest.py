"""Both ends of each backend, and the libraries behind them, which end with the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from backend_ends import ENGINES, REAL, Ends


@pytest.fixture(scope="module", autouse=True)
def _close_engines() -> Iterator[None]:
    yield
    while ENGINES:
        ENGINES.popitem()[1].close()


@pytest.fixture(params=[*REAL, "fake"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.close()
