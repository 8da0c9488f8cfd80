"""Prefix hashes: one chained hash per full hash block of tokens. Pure; knows no pages and no nodes.

A chain is cut into stretches of STRETCH_BLOCKS blocks. A block's hash is SHA-256, cut to 128 bits, of a mark, the hash
before its stretch, and the stretch's tokens up to the block's end as little-endian int32. So a hash names all tokens up
to the end of its block. The chain's root stands before the first stretch. It holds what else decides whether requests
may share KV: tenant salt, adapter, weight version, block size. Who knows hashes and tokens can extend a chain.
Beginning one, or extending its first stretch, needs the root.

One state goes through a stretch and yields a hash after each block, at a third of the cost of separate hashes. CPUs of
this decade have instructions for SHA-256. Stretches are short, so extending a chain costs a few microseconds anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from struct import iter_unpack

from pdcluster.core.messages import HASH_BYTES, pack_tokens

BLOCK_TOKENS = 32
STRETCH_BLOCKS = 32

_TOKEN_BYTES = 4
# A slice object made once: hashing is a few calls.
_CUT = slice(HASH_BYTES)
_ROOT_PERSON = b"pdcluster.root"
# Never changed. A copy costs half of a new state.
_START = hashlib.sha256(b"pdcluster.block.")

# Token ids: packed little-endian int32 in anything bytes-like, which is fast, or plain ints.
Tokens = bytes | bytearray | memoryview | Iterable[int]


def chain_root(*, block_tokens: int = BLOCK_TOKENS, salt: bytes = b"", adapter: str = "", weights: str = "") -> bytes:
    """The root of a chain. Fields are length-prefixed, so that no two choices collide."""
    root = hashlib.blake2b(digest_size=HASH_BYTES, person=_ROOT_PERSON)
    for part in (str(block_tokens).encode(), salt, adapter.encode(), weights.encode()):
        root.update(len(part).to_bytes(8, "little"))
        root.update(part)
    return root.digest()


def block_hashes(
    tokens: Tokens, *, block_tokens: int = BLOCK_TOKENS, salt: bytes = b"", adapter: str = "", weights: str = ""
) -> bytes:
    """The hashes of all full blocks of `tokens`, HASH_BYTES each."""
    root = chain_root(block_tokens=block_tokens, salt=salt, adapter=adapter, weights=weights)
    return extend(b"", tokens, root=root, block_tokens=block_tokens)


def extend(hashes: bytes | bytearray, tokens: Tokens, *, root: bytes, block_tokens: int = BLOCK_TOKENS) -> bytes:
    """The hashes of the full blocks of `tokens` behind those that `hashes` covers.

    tokens: all, from the first on.
    root: used only in the first stretch.
    """
    packed = _packed(tokens)
    block_bytes = block_tokens * _TOKEN_BYTES
    at, end = len(hashes) // HASH_BYTES, len(packed) // block_bytes
    if not at and end <= STRETCH_BLOCKS:  # the case of short prompts
        return _stretch(root, packed[:0], packed[: end * block_bytes], block_bytes) if end else b""
    fresh: list[bytes] = []
    while at < end:
        begin = at - at % STRETCH_BLOCKS
        stop = min(begin + STRETCH_BLOCKS, end)
        before = (
            root
            if not begin
            else fresh[-1][-HASH_BYTES:]
            if fresh
            else bytes(hashes[(begin - 1) * HASH_BYTES : begin * HASH_BYTES])
        )
        fresh.append(
            _stretch(
                before,
                packed[begin * block_bytes : at * block_bytes],
                packed[at * block_bytes : stop * block_bytes],
                block_bytes,
            )
        )
        at = stop
    return fresh[0] if len(fresh) == 1 else b"".join(fresh)


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """The last block of a chain, from which the next block's hash follows without the tokens before.

    hash: of the block; the root where the chain has none.
    num_blocks: in the chain.
    """

    hash: bytes
    num_blocks: int = 0
    _stretch: hashlib._Hash | None = None

    def followed_by(self, block: bytes | memoryview) -> ChainEnd:
        """The end after one more full block of packed tokens."""
        if self._stretch is None or self.num_blocks % STRETCH_BLOCKS == 0:
            state = _START.copy()
            state.update(self.hash)
        else:
            state = self._stretch.copy()
        state.update(block)
        return ChainEnd(state.digest()[_CUT], self.num_blocks + 1, state)


def is_extendable(hashes: bytes | bytearray, root: bytes) -> bool:
    """Whether a chain can be begun or extended."""
    return bool(root) or len(hashes) >= STRETCH_BLOCKS * HASH_BYTES


def _stretch(before: bytes, known: memoryview, fresh: memoryview, block_bytes: int) -> bytes:
    """The hashes of the blocks in `fresh`, in a stretch that begins with the blocks in `known`."""
    if len(before) != HASH_BYTES:
        raise ValueError(f"a chain starts from a root of {HASH_BYTES} bytes, not of {len(before)}; see chain_root")
    state = _START.copy()
    state.update(before)
    if known:
        state.update(known)
    add, tell, cut = state.update, state.digest, _CUT
    blocks = iter_unpack(f"{block_bytes}s", fresh)
    return b"".join(
        [tell()[cut] for (block,) in blocks if add(block) is None]
    )  # a loop that appends takes a third longer


def _packed(tokens: Tokens) -> memoryview:
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        return memoryview(tokens).cast("B")
    return memoryview(pack_tokens(tokens))
