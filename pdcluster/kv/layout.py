"""The layout of KV pages: what a page holds, in which order, in how many bytes. Pure arithmetic; `kv.pool` has the
tensors.

Page-major: [page][layer][K, V][kv head][token][dim]. So a page is one contiguous run for a transfer. A head range of a
page is contiguous per (layer, K or V).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

# What our own engine computes in, and so keeps KV in.
DType = Literal["float32", "bfloat16"]
# What KV may be kept in by any engine.
KVType = Literal["float32", "bfloat16", "float16", "fp8"]
ITEM_BYTES: dict[KVType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class KVLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: KVType

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
    """The kv heads [first, end) of a rank of a tensor-parallel node.

    With more ranks than heads, several ranks hold the same head. All do with a latent that every head shares (one kv
    head here).
    """
    if ranks >= num_heads:
        first = rank * num_heads // ranks
        return first, first + 1
    return rank * num_heads // ranks, (rank + 1) * num_heads // ranks


# Arithmetic of nodes that promise no equal bits.
DEFAULT_ARITHMETIC = "default"

# Our own engine.
NATIVE_ENGINE = "native"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two nodes must agree on to attend to each other's KV. Compared when a node joins.

    layout: with the heads of all ranks. Its page_tokens may differ, as a multiple of hash_block_tokens.
    arithmetic: how sums are made, where bits must be equal.
    engine: its name. A cluster has one.
    weight_groups: tell what of the weights differs where the weights do (`checkpoint.weights_digest`); they follow from
    the weights.
    """

    model: str
    weights: str
    protocol: int
    hash_block_tokens: int
    layout: KVLayout
    arithmetic: str = DEFAULT_ARITHMETIC
    weight_groups: bytes = field(default=b"", repr=False, compare=False)
    engine: str = field(default=NATIVE_ENGINE, repr=False)

    def digest(self) -> str:
        """16 hex digits, equal exactly when every field that is compared is.

        The engine's name counts only where it is another than ours: earlier versions, which know no other, compute the
        same digest of a native node.
        """
        text = repr(self) if self.engine == NATIVE_ENGINE else repr((self, self.engine))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
