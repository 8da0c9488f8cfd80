"""The shape of KV pages: what one page holds, in which order, in how many bytes. Pure arithmetic; the tensors are in
`kv.pool`.

Page-major: [page][layer][K, V][kv head][token][dim], so that a page is one contiguous run for a transfer, and a head
range of a page is contiguous per (layer, K or V).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

DType = Literal["float32", "bfloat16"]
ITEM_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: DType

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold num_tokens tokens."""
        return -(-num_tokens // self.page_tokens)


def head_range(num_heads: int, rank: int, ranks: int) -> tuple[int, int]:
    """The kv heads [first, end) that a rank of a tensor-parallel node holds. With more ranks than heads several hold
    the same one, as all ranks do with a latent that every head shares (one kv head here)."""
    if ranks >= num_heads:
        first = rank * num_heads // ranks
        return first, first + 1
    return rank * num_heads // ranks, (rank + 1) * num_heads // ranks


# Of nodes that promise no equal bits.
DEFAULT_ARITHMETIC = "default"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that two nodes must agree on before one may attend to the other's KV, but for layout.page_tokens, which may
    differ (each is a multiple of hash_block_tokens). layout: with the heads of all of a node's ranks; arithmetic: how
    sums are made, where bits must be equal. Compared when a node joins."""

    model: str
    weights: str
    protocol: int
    hash_block_tokens: int
    layout: KVLayout
    arithmetic: str = DEFAULT_ARITHMETIC

    def digest(self) -> str:
        """16 hex digits that are equal exactly when every field is."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()
