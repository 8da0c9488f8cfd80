"""How many requests a router process works on at a time, whichever front door they came through. Taken before a body is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdcluster.errors import Overloaded


class Places:
    """Owned by the router's event loop."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.num_taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """One place while the block runs; raises Overloaded when there is none."""
        if self.num_taken >= self._max_requests:
            raise Overloaded(f"{self.num_taken} requests are being worked on, as many as --max-requests allows; retry later")
        self.num_taken += 1
        try:
            yield
        finally:
            self.num_taken -= 1
