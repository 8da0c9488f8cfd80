"""How a process tells its parent that it serves: one JSON line on an inherited file descriptor (--ready-fd N).

{"ready": true, "address": "127.0.0.1:41234", "name": "decode-0", …}

A node announces itself once it is registered and warm. The bootstrap and the router do so once they accept connections.
Nothing is announced twice: the descriptor is closed after the line.
"""

from __future__ import annotations

import contextlib
import json
import os

from pdcluster.core.errors import ProtocolError

MAX_LINE_BYTES = 65536


def announce(fd: int | None, address: str, **facts: str | int | float | bool | list[str] | None) -> None:
    """Write the line and close `fd`. Does nothing without a descriptor. A parent that went away is no error."""
    if fd is None:
        return
    line = json.dumps({"ready": True, "address": address, **facts}).encode() + b"\n"
    try:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, so nobody waits for the line
            while line:
                line = line[os.write(fd, line) :]
    finally:
        os.close(fd)


def parse(line: bytes) -> dict[str, object]:
    """The facts of one announcement."""
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a child wrote {line[:80]!r} to its ready descriptor instead of a JSON line") from error
    if not isinstance(facts, dict) or facts.get("ready") is not True or not isinstance(facts.get("address"), str):
        raise ProtocolError(f"a child announced {line[:80]!r}, which lacks ready or address")
    return facts
