"""Sealed bytes of a lane: AES-256-GCM (NIST SP 800-38D), a record at a time, numbered in each direction.

A record is its length, which is authenticated too, and the ciphertext with its tag. The nonce is the record's number,
so a record that is missing, repeated, moved or changed fails, and the lane ends. Keys are of one lane and direction,
hence no nonce is used twice.
"""

from __future__ import annotations

import struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pdcluster.core.errors import ProtocolError

LENGTH: Final = struct.Struct("<I")
TAG_BYTES: Final = 16
# Of plain bytes.
RECORD_BYTES: Final = 1 << 20
NONCE_BYTES: Final = 12
# Far below what GCM allows under one key (2^32 records).
MAX_RECORDS: Final = 1 << 31


class RecordSealer:
    """Of one direction. Every record goes into the same memory."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._memory = memoryview(bytearray(LENGTH.size + RECORD_BYTES + TAG_BYTES))
        self._number = 0

    def seal(self, plain: memoryview | bytes) -> memoryview:
        """A record of up to RECORD_BYTES. Valid until the next call. Raises ProtocolError after MAX_RECORDS."""
        number = self._number = _next(self._number)
        size = len(plain) + TAG_BYTES
        head = LENGTH.pack(size)
        record = self._memory[: LENGTH.size + size]
        record[: LENGTH.size] = head
        self._cipher.encrypt_into(number.to_bytes(NONCE_BYTES, "big"), plain, head, record[LENGTH.size :])
        return record


class RecordOpener:
    """Of one direction."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._number = 0

    @staticmethod
    def size_of(head: bytes | bytearray | memoryview) -> int:
        """Of the ciphertext behind this head, with its tag. Raises ProtocolError."""
        (size,) = LENGTH.unpack(head)
        if not TAG_BYTES < size <= RECORD_BYTES + TAG_BYTES:
            raise ProtocolError(f"a sealed record of {size} bytes")
        return int(size)

    def open_into(self, head: bytes | bytearray | memoryview, sealed: memoryview, plain: memoryview) -> None:
        """Write the record's plain bytes. Raises ProtocolError for any but the next record of this lane; `plain` is
        then of no use.
        """
        number = self._number = _next(self._number)
        try:
            self._cipher.decrypt_into(number.to_bytes(NONCE_BYTES, "big"), sealed, bytes(head), plain)
        except InvalidTag as error:
            raise ProtocolError("a sealed record is not the next one of its lane, or was changed") from error


def _next(number: int) -> int:
    if number >= MAX_RECORDS:
        raise ProtocolError(f"a lane ends after {MAX_RECORDS} sealed records")
    return number + 1
