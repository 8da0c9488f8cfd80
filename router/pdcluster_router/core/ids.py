"""Request ids: those that this router makes, and the names under which they come back."""

from __future__ import annotations

import re

# Random bytes of an id.
ID_BYTES = 12
_ID_OF_ANSWER = re.compile(r"(?:chat)?cmpl-(.*[0-9a-f]{24}(?:-[0-9]+)?)")
_ID_OF_WORKER = re.compile(r"w(\d{1,3})-[0-9a-f]{24}(?:-[0-9]+)?")


def own_id(request: str) -> str:
    """The router's own id for a request named as in its answer's body. Any other name stays as it is."""
    named = _ID_OF_ANSWER.fullmatch(request)
    return request if named is None else named[1]


def worker_of(request: str) -> int | None:
    """The number of the worker that made the id; None for any other name."""
    named = _ID_OF_WORKER.fullmatch(own_id(request))
    return None if named is None else int(named[1])
