"""What tests over drawn requests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chat_router import Router, chat_router


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with chat_router() as router:
        yield router
