"""The place of a request in a distributed trace, as W3C's `traceparent` carries it. Plain values.

Source: https://www.w3.org/TR/trace-context/, version 00.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TRACE_BYTES, SPAN_BYTES = 16, 8
# Of a packed context.
CONTEXT_BYTES = TRACE_BYTES + SPAN_BYTES
# Later versions may have more fields behind these.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


class TraceContext(NamedTuple):
    """A span that others may be children of.

    trace_id: TRACE_BYTES, not all zero.
    span_id: SPAN_BYTES, not all zero.
    """

    trace_id: bytes
    span_id: bytes

    def pack(self) -> bytes:
        """CONTEXT_BYTES."""
        return self.trace_id + self.span_id

    @classmethod
    def unpack(cls, packed: bytes) -> TraceContext:
        """Inverse of `pack`."""
        return cls(packed[:TRACE_BYTES], packed[TRACE_BYTES:])


def parse(traceparent: str) -> tuple[TraceContext, bool] | None:
    """The caller's span, and whether it is sampled. None for text that is no traceparent: it counts as absent."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    context = TraceContext(bytes.fromhex(found[2]), bytes.fromhex(found[3]))
    if not any(context.trace_id) or not any(context.span_id):
        return None
    return context, bool(int(found[4], 16) & _SAMPLED)
