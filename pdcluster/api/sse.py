"""Server-sent events as OpenAI frames them: one `data:` line of JSON per event, `[DONE]` at the end, an `error` event when it went wrong."""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """data: JSON, so without line breaks."""
    return b"data: " + data + b"\n\n"


def error_event(data: bytes) -> bytes:
    """The last event of a stream that failed after its first byte; no `[DONE]` follows, because it is not."""
    return b"event: error\ndata: " + data + b"\n\n"
