"""The hello of a lane: both ends prove that they know the token of the reader's advert, and agree on keys.

    writer → reader   HELLO, the writer's node and boot
    reader → writer   REPLY: the reader's nonce, its proof
    writer → reader   the writer's proof
    reader → writer   WELCOME

Proofs are HMAC-SHA256 under the token over all that was said before, with the name of who proves. The token itself is
never sent here: it travels in adverts, over links. Keys come of it and both nonces by HKDF (RFC 5869), one for each
direction. Both ends must want the same: sealed frames or plain ones.

The reader's half is a generator that yields how many bytes it needs next, so that whoever accepts connections can
run many of them without a thread each.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pdcluster.core.errors import ProtocolError
from pdcluster.transfer.backends.base import Peer

MAGIC: Final = b"pdclKV2\n"
# MAGIC, the writer's nonce, whether frames are sealed, bytes of the names of node and boot.
HELLO: Final = struct.Struct("<8s32s?BB")
# The reader's nonce and proof.
REPLY: Final = struct.Struct("<32s32s")
WELCOME: Final = b"\x01"
TOKEN_BYTES: Final = 32
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
KEY_BYTES: Final = 32

# Bytes that the generator needs next; the bytes; who the writer is, and the keys.
ReaderHello = Generator[int, bytes, "Greeted"]


@dataclass(frozen=True, slots=True)
class LaneKeys:
    """Of AES-256, one for each direction."""

    to_reader: bytes
    to_writer: bytes

    def __repr__(self) -> str:
        return "LaneKeys(<secret>)"


@dataclass(frozen=True, slots=True)
class Greeted:
    """What a reader knows after a hello. keys: None where frames are plain."""

    writer: Peer
    keys: LaneKeys | None


def say_hello(
    writer: Peer, token: bytes, *, is_sealed: bool, send: Callable[[bytes], None], receive: Callable[[int], bytes]
) -> LaneKeys | None:
    """The writer's half, over calls that block. Raises ProtocolError where the reader does not know the token."""
    node, boot = writer.node.encode(), writer.incarnation.encode()
    if max(len(node), len(boot)) > 255:
        raise ProtocolError(f"node name {writer.node!r} is longer than 255 bytes")
    nonce = os.urandom(NONCE_BYTES)
    said = HELLO.pack(MAGIC, nonce, is_sealed, len(node), len(boot)) + node + boot
    send(said)
    theirs, proof = REPLY.unpack(receive(REPLY.size))
    said += theirs
    if not hmac.compare_digest(proof, _proof(token, b"reader", said)):
        raise ProtocolError("the reader does not know the token of its advert")
    said += proof
    send(_proof(token, b"writer", said))
    if receive(len(WELCOME)) != WELCOME:
        raise ProtocolError("the reader did not accept the hello")
    return _keys(token, nonce + theirs, said) if is_sealed else None


def hear_hello(token: bytes, *, is_sealed: bool, send: Callable[[bytes], None]) -> ReaderHello:
    """The reader's half. Raises ProtocolError for a hello that is not a writer's of ours."""
    head = yield HELLO.size
    magic, nonce, wants_seal, node_bytes, boot_bytes = HELLO.unpack(head)
    if magic != MAGIC:
        raise ProtocolError("its hello is of no version that is known here")
    if wants_seal is not is_sealed:
        raise ProtocolError(
            f"it sends {'sealed' if wants_seal else 'plain'} frames, and this node takes "
            f"{'sealed' if is_sealed else 'plain'} ones; set the cluster key and node.transfer.seal alike everywhere"
        )
    names = yield node_bytes + boot_bytes
    try:
        writer = Peer(names[:node_bytes].decode(), names[node_bytes:].decode())
    except UnicodeDecodeError as error:
        raise ProtocolError("its hello is not UTF-8") from error
    own = os.urandom(NONCE_BYTES)
    said = head + names + own
    proof = _proof(token, b"reader", said)
    send(REPLY.pack(own, proof))
    said += proof
    theirs = yield PROOF_BYTES
    if not hmac.compare_digest(theirs, _proof(token, b"writer", said)):
        raise ProtocolError("its hello does not prove that it knows this boot's token")
    send(WELCOME)
    return Greeted(writer, _keys(token, nonce + own, said) if is_sealed else None)


def _proof(token: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(token, who + b"\0" + said, "sha256")


def _keys(token: bytes, nonces: bytes, said: bytes) -> LaneKeys:
    info = b"pdcluster lane" + hashlib.sha256(said).digest()
    found = HKDF(algorithm=SHA256(), length=2 * KEY_BYTES, salt=nonces, info=info).derive(token)
    return LaneKeys(found[:KEY_BYTES], found[KEY_BYTES:])
