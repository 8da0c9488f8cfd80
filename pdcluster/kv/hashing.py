"""Names for KV contents: one chained hash per full hash block of tokens. Pure; knows no pages and no nodes.

The hash of a block is keyed BLAKE2b-128: the data are the block's tokens as little-endian int32, the key is the hash of the block before it. So a
hash names all tokens up to the end of its block. The first block's key is the chain's root, which holds what else decides whether two requests may
share KV: tenant salt, adapter, weight version, and the block size. Whoever knows the last hash can extend a chain; only whoever knows the root can
start one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from struct import iter_unpack

from pdcluster.messages import HASH_BYTES, pack_tokens

BLOCK_TOKENS = 32

_TOKEN_BYTES = 4
_ROOT_PERSON = b"pdcluster.root"
_BLOCK_PERSON = b"pdcluster.block"

Tokens = bytes | bytearray | memoryview | Iterable[int]
"""Token ids: packed little-endian int32 in anything bytes-like, which is fast, or plain ints."""


def chain_root(*, block_tokens: int = BLOCK_TOKENS, salt: bytes = b"", adapter: str = "", weights: str = "") -> bytes:
    """The key of a chain's first block. Fields are length-prefixed, so that no two choices run together."""
    root = hashlib.blake2b(digest_size=HASH_BYTES, person=_ROOT_PERSON)
    for part in (str(block_tokens).encode(), salt, adapter.encode(), weights.encode()):
        root.update(len(part).to_bytes(8, "little"))
        root.update(part)
    return root.digest()


def block_hashes(tokens: Tokens, *, block_tokens: int = BLOCK_TOKENS, salt: bytes = b"", adapter: str = "", weights: str = "") -> bytes:
    """The hashes of all full blocks of `tokens`, HASH_BYTES each."""
    root = chain_root(block_tokens=block_tokens, salt=salt, adapter=adapter, weights=weights)
    return extend(b"", tokens, root=root, block_tokens=block_tokens)


def extend(hashes: bytes | bytearray, tokens: Tokens, *, root: bytes, block_tokens: int = BLOCK_TOKENS) -> bytes:
    """The hashes of those full blocks of `tokens` that come after the ones `hashes` covers.

    tokens: all of them, from the first on. root: used only when `hashes` is empty.
    """
    packed = _packed(tokens)
    block_bytes = block_tokens * _TOKEN_BYTES
    parent = bytes(hashes[-HASH_BYTES:]) if hashes else root
    if len(parent) != HASH_BYTES:
        raise ValueError(f"a chain starts from a root of {HASH_BYTES} bytes, not of {len(parent)}; see chain_root")
    start = len(hashes) // HASH_BYTES * block_bytes
    blake2b, size, person = hashlib.blake2b, HASH_BYTES, _BLOCK_PERSON
    fresh = []
    for (block,) in iter_unpack(f"{block_bytes}s", packed[start : len(packed) // block_bytes * block_bytes]):
        parent = blake2b(block, digest_size=size, key=parent, person=person).digest()
        fresh.append(parent)
    return b"".join(fresh)


def _packed(tokens: Tokens) -> memoryview:
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        return memoryview(tokens).cast("B")
    return memoryview(pack_tokens(tokens))
