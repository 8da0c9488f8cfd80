"""The seam between a decoder layer and the ways to attend over pages. Implementations: `engine.ops.reference` (any device), `engine.ops.attention_cpu`.

One contract test (tests/unit/engine/test_attention.py) runs over all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdcluster.engine.model.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """eps belongs to the q/k norms of families that have them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the RMS norms over each query and key head, before rotation."""

    q: Tensor
    k: Tensor


@dataclass(frozen=True, slots=True)
class Angles:
    """float32 [num_tokens, head_dim / 2] each, for the tokens of the step."""

    cos: Tensor
    sin: Tensor


class Attention(Protocol):
    def run(self, qkv: Tensor, norms: HeadNorms | None, angles: Angles, layer: int, batch: Batch) -> Tensor:
        """Norm and rotate q and k, write k and v into the batch's slots, attend causally over each row's pages.

        qkv: [num_tokens, (heads + 2 kv heads) * head_dim]; returns [num_tokens, heads * head_dim] in the same type.
        """
