"""Server-sent events as OpenAI frames them: one `data:` line of JSON per event, `[DONE]` at the end, an `error` event
on failure.

Many clients split lines at Unicode's line breaks (str.splitlines, httpx.iter_lines). JSON escapes most of them, and
this module escapes the other three. They occur only in strings, keys included, so the JSON keeps its meaning.
"""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
LINE_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))

_encode = msgspec.json.Encoder().encode


def one_line(data: bytes) -> bytes:
    """data: JSON without line breaks between its values."""
    if data.isascii():
        return data
    for line_break, escaped in LINE_BREAKS:
        data = data.replace(line_break, escaped)
    return data


def text_json(text: str) -> bytes:
    """A text as JSON, in one line."""
    return one_line(_encode(text))


def event(data: bytes) -> bytes:
    return b"data: " + one_line(data) + b"\n\n"


def named_event(name: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, one_line(data))


def error_event(data: bytes) -> bytes:
    """The last event of a stream that failed after its first byte. No `[DONE]` follows."""
    return named_event(b"error", data)
