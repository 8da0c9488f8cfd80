"""ZMTP 3 as a DEALER without encryption says it (RFC 23 and 37, NULL mechanism): bytes of a connection into frames, and
frames into bytes. No I/O.

Of the protocol, what a ROUTER of libzmq says to such a caller: its greeting, READY or ERROR, messages of one part,
PING. Whatever else comes is a `ProtocolError`, after which nothing is read any more. A size is checked before anything
is kept for it.
"""

from __future__ import annotations

from collections import deque

from pdcluster.core.errors import ProtocolError

_MORE, _LONG, _COMMAND = 1, 2, 4
_FLAGS = _MORE | _LONG | _COMMAND
_SHORT_BYTES = 255
GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = slice(12, 32)
_NULL = b"NULL".ljust(20, b"\0")
# Version 3.1, NULL, and that we are no server.
GREETING = _SIGNATURE + b"\x03\x01" + _NULL + bytes(GREETING_BYTES - 32)
_READY, _ERROR, _PING, _PONG = b"\x05READY", b"\x05ERROR", b"\x04PING", b"\x04PONG"
_TTL_BYTES = 2
MAX_COMMAND_BYTES = 4096
# Of a PING, which its PONG repeats.
MAX_CONTEXT_BYTES = 16


def framed(body: bytes, flags: int = 0) -> bytes:
    """A message of one part as it stands on the wire."""
    return head_of(len(body), flags) + body


def head_of(size: int, flags: int = 0) -> bytes:
    """What stands before that many bytes."""
    if size <= _SHORT_BYTES:
        return bytes((flags, size))
    return bytes((flags | _LONG,)) + size.to_bytes(8, "big")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


READY = framed(_READY + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""), _COMMAND)


class Reader:
    """One connection's incoming half. frames: those that came whole, for whoever takes them; answers: what is to be
    said back, in its order; is_ready: frames may be sent."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.frames: deque[bytes] = deque()
        self.answers: list[bytes] = []
        self.is_ready = False
        self._has_greeted = False
        self._max_frame_bytes = max_frame_bytes
        # Of what is not whole yet.
        self._begun = bytearray()
        # Bytes of it with which there is something to be read.
        self._needed = GREETING_BYTES

    def feed(self, data: bytes) -> None:
        """Take in what came; raises ProtocolError."""
        if self._begun:
            self._begun += data
            if len(self._begun) < self._needed:
                return
            data = bytes(self._begun)
            self._begun.clear()
        at = 0 if self._has_greeted else self._greeted(data)
        at = self._read(data, at)
        if at < len(data):
            self._begun += memoryview(data)[at:]

    def _greeted(self, data: bytes) -> int:
        """Bytes of the greeting, 0 while it is not whole."""
        if not _SIGNATURE.startswith(data[:1]):
            raise ProtocolError("it does not speak ZMTP")
        if len(data) < GREETING_BYTES:
            return 0
        if not data[9] & 1 or data[10] < 3:
            raise ProtocolError("it speaks ZMTP of a version before 3")
        mechanism = data[_MECHANISM]
        if mechanism != _NULL:
            spoken = mechanism.rstrip(b"\0").decode("ascii", "replace")
            raise ProtocolError(
                f"it wants the mechanism {spoken!r}; give this process the cluster key that the other one has, or "
                "none to both"
            )
        self._has_greeted = True
        self.answers.append(READY)
        return GREETING_BYTES

    def _read(self, data: bytes, at: int) -> int:
        """Frames from there on; where the one begins that is not whole."""
        size = len(data)
        self._needed = GREETING_BYTES
        while self._has_greeted and at + 2 <= size:
            flags, length, start = data[at], data[at + 1], at + 2
            if flags & _LONG:
                start = at + 9
                if start > size:
                    self._needed = 9
                    break
                length = int.from_bytes(data[at + 1 : start], "big")
            if flags:
                self._check(flags, length)
            end = start + length
            if end > size:
                self._needed = end - at
                break
            if flags & _COMMAND:
                self._obey(data[start:end])
            elif self.is_ready:
                self.frames.append(data[start:end])
            else:
                raise ProtocolError("it sent a message before it was ready")
            at = end
        else:
            self._needed = 2 if self._has_greeted else GREETING_BYTES
        return at

    def _check(self, flags: int, length: int) -> None:
        """Of a frame that is not a short message."""
        if flags & ~_FLAGS or (flags & _COMMAND and flags & _MORE):
            raise ProtocolError(f"a frame has the flags {flags:#x}")
        if flags & _MORE:
            raise ProtocolError("a message has more than one part")
        most = MAX_COMMAND_BYTES if flags & _COMMAND else self._max_frame_bytes
        if length > most:
            raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {most} bytes")

    def _obey(self, command: bytes) -> None:
        if command.startswith(_PING):
            context = command[len(_PING) + _TTL_BYTES :]
            if len(context) > MAX_CONTEXT_BYTES:
                raise ProtocolError(f"a PING has a context of {len(context)} bytes, allowed are {MAX_CONTEXT_BYTES}")
            self.answers.append(framed(_PONG + context, _COMMAND))
        elif command.startswith(_READY) and not self.is_ready:
            self.is_ready = True
        elif command.startswith(_ERROR):
            raise ProtocolError(f"it refuses us: {command[len(_ERROR) + 1 :][:100]!r}")
        elif not command.startswith(_PONG):
            raise ProtocolError(f"it sent a command that is not known here: {command[:16]!r}")
