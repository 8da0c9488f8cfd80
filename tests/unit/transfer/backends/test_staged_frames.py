"""What the reader of a staged backend says of its ring is checked before anything is allocated."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from staged_ends import READER

from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends.staged import staging
from pdcluster.transfer.backends.staged.staging import MAX_BLOCKS
from pdcluster.transfer.backends.tcp_links import Link, sealed


@contextmanager
def answered(data: bytes) -> Iterator[Link]:
    """A link of a writer to a reader that says this."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        with ours:
            theirs.sendall(data)
            yield Link(ours, READER, 1.0)


@pytest.mark.parametrize(
    ("blocks", "block_bytes"),
    [
        (0, 4096),
        (MAX_BLOCKS + 1, 4096),
        (1 << 31, 4096),
        (8, 1 << 40),
        (8, 0),
        (8, 1),
        (1 << 62, 1 << 62),
        (512, 64 << 20),
    ],
)
def test_a_ring_of_an_absurd_shape_is_refused_before_anything_is_allocated(blocks: int, block_bytes: int) -> None:
    grant = msgspec.msgpack.encode(staging.Grant(b"far", 0, block_bytes, blocks))
    with (
        answered(sealed(staging.LENGTH.pack(len(grant)) + grant)) as link,
        pytest.raises(ProtocolError, match="a ring of"),
    ):
        staging.read_grant(link)


@pytest.mark.parametrize(
    "grant", [b"", b"\xc1", b"\x94\xc4\x01a\xff\x00\x00", msgspec.msgpack.encode((b"far", -(1 << 62), "8", 8))]
)
def test_a_grant_that_is_none_is_refused(grant: bytes) -> None:
    with answered(sealed(staging.LENGTH.pack(len(grant)) + grant)) as link, pytest.raises(ProtocolError):
        staging.read_grant(link)


def test_a_grant_of_an_absurd_length_is_refused_before_it_is_read() -> None:
    with (
        answered(staging.LENGTH.pack((1 << 32) - 1)) as link,
        pytest.raises(ProtocolError, match="a grant of 4294967295 bytes"),
    ):
        staging.read_grant(link)
