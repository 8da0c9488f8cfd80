"""A routing decision with what it was made from, in two forms. Values only.

`Decision` has its query and its view. `PackedDecision` has bare numbers, for a request that clearly goes at once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

from pdcluster_router.cluster.view import ClusterView
from pdcluster_router.policy.base import Fallback, Force, Query, RoutingDecision
from pdcluster_router.policy.predicted.placing import FIRST_TOLD

HEAD = struct.Struct(f"={FIRST_TOLD}d")


class Decision(msgspec.Struct, frozen=True):
    """One choice and what it was made from.

    shadow: the shadow's choice; None without one.
    """

    query: Query
    view: ClusterView
    choice: RoutingDecision
    shadow: RoutingDecision | None = None


class PlacementQuery(msgspec.Struct, frozen=True, eq=False):
    """A request that may go to every node that takes work.

    num_tokens, hashes, force, fallback, model, row_tokens: see Query.
    numbers: as `scales.asked_of` begins.
    held, expected: leading blocks, each of block_tokens, that nodes hold and will soon hold, by incarnation.
    usual_tokens: of a prompt.
    room_s: backlog of a node that is open.
    """

    num_tokens: int
    hashes: bytes
    numbers: tuple[float, ...]
    held: Mapping[str, int]
    expected: Mapping[str, int]
    block_tokens: int
    force: Force
    fallback: Fallback
    usual_tokens: int
    room_s: float
    row_tokens: int
    model: str = ""


class PackedComparison(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What a decision compared, in few bytes.

    told: the numbers of `placing`, as doubles.
    names: of the view's nodes, by row.
    best: the row of the node estimated fastest of all others, with its estimate; -1: none.
    """

    policy: str
    num_tokens: int
    told: bytes
    names: tuple[str, ...]
    ttft_s: float
    best: int
    best_s: float


class PackedDecision(msgspec.Struct, frozen=True, eq=False):
    """The choice has no record: what was compared is packed.

    sent_s: seconds of work for the node that computes the prompt.
    estimate_s: until the first token there.
    hashes: of the prompt.
    cached_tokens: of the prompt, on that node.
    most_held, most_cached: the most that some node holds, and holds or will hold.
    """

    choice: RoutingDecision
    sent_s: float
    estimate_s: float
    hashes: bytes
    cached_tokens: int
    most_held: int
    most_cached: int
    packed: PackedComparison
