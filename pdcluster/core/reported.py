"""What a node says in numbers of its steps and its ways to other nodes: parts of its load report."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdcluster.core.bounds import BigCount, BytesPerSecond, Id, Seconds, SecondsLeft

BreakerName = Literal["closed", "open", "half_open"]


class Value(msgspec.Struct, frozen=True, array_like=True):
    """Base of parts of messages."""


Root = tuple[SecondsLeft, SecondsLeft, SecondsLeft, SecondsLeft, SecondsLeft, SecondsLeft]


class CostReport(Value, frozen=True, array_like=True):
    """Coefficients of the node's cost model in seconds, the numbers of steps they were fitted to, and error bars."""

    prefill_fixed_s: Seconds
    prefill_token_s: Seconds
    prefill_pair_s: Seconds
    decode_fixed_s: Seconds
    decode_row_s: Seconds
    decode_context_s: Seconds
    chunk_tokens: BigCount
    prefill_samples: BigCount
    decode_samples: BigCount
    prefill_spread: Seconds = 0.0
    prefill_doubt: Seconds = 0.0
    prefill_root: Root = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    decode_spread: Seconds = 0.0
    decode_doubt: Seconds = 0.0
    decode_root: Root = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class PathLoad(Value, frozen=True, array_like=True):
    """One way of KV out of the reporting node, to node `peer` by `backend`.

    bytes_s: KV bytes (not bits) a second of all ranks' last writes to that peer. 0 as long as none was measured.
    state: of its breaker.
    is_chosen: the next writes go by it.
    """

    peer: Id
    backend: Id
    bytes_s: BytesPerSecond
    state: BreakerName = "closed"
    is_chosen: bool = False
