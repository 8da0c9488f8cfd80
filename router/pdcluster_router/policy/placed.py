"""A choice whose request goes at once, as `placing` tells it: what its request needs is named here, the rest stays bare
numbers. Values only."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

from pdcluster_router.cluster.view import NodeView
from pdcluster_router.core.generation import Mode
from pdcluster_router.policy.base import Fallback, Force, Predicted, RoutingDecision
from pdcluster_router.policy.predicted.placing import FIRST_TOLD
from pdcluster_router.policy.predicted.scoring import FOUND_TPOT_S, TTFT_S

HEAD = struct.Struct(f"={FIRST_TOLD}d")


class PlacementQuery(msgspec.Struct, frozen=True, eq=False):
    """Of a request that may go to every node that takes work. numbers: as `scales.asked_of` begins; held, expected:
    leading blocks of so many tokens that nodes hold, and are expected to, by incarnation; usual_tokens: of a prompt;
    room_s: backlog of a node that is open; the others: see Query."""

    num_tokens: int
    numbers: tuple[float, ...]
    held: Mapping[str, int]
    expected: Mapping[str, int]
    block_tokens: int
    force: Force
    fallback: Fallback
    usual_tokens: int
    room_s: float


class Placed(msgspec.Struct, frozen=True, eq=False):
    """prefill, decode: see Choice, first: the one that computes the prompt; as they last reported, since only what a
    report changes is asked of them. Tokens of the prompt: cached_tokens: on that node; most_held, most_cached: that
    some node holds, and that some node of the view holds or will. sent_s: seconds of work for that node; told: the
    numbers of `placing`, head: the first of them; names: of the nodes of the view, by row."""

    mode: Mode
    prefill: NodeView | None
    decode: NodeView
    first: NodeView
    sent_s: float
    policy: str
    num_tokens: int
    cached_tokens: int
    most_held: int
    most_cached: int
    told: bytes
    head: tuple[float, ...]
    names: tuple[str, ...]

    def choice(self) -> RoutingDecision:
        """But for its record: what was compared stands in `told`."""
        head = self.head
        return RoutingDecision(
            self.mode, self.prefill, self.decode, tuple, Predicted(head[TTFT_S], head[FOUND_TPOT_S]), self.policy
        )
