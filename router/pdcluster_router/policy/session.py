"""Sticky conversations by consistent hashing with bounded load (Mirrokni, Thorup, Zadimoghaddam, 2016; SMG's `prefix_hash` has the same bound).

The key is the session, or the hash of the prompt's first blocks. Nodes are ordered by a hash of (key, node), and the first one whose requests stay
below `bound` × the mean takes it: a node that comes or goes moves only the keys that it has or had. No cache is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster.core.messages import HASH_BYTES
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.policy.base import LegName, Query, Terms
from pdcluster_router.policy.chance import mix, number_of

KEY_TOKENS = 256


class Session:
    name = "session"

    def __init__(self, bound: float = 1.25) -> None:
        self._bound = bound

    def score(self, nodes: Sequence[NodeView], leg: LegName, query: Query) -> Sequence[tuple[float, Terms]]:
        limit = self._bound * (sum(node.num_requests for node in nodes) + 1) / len(nodes)
        key = session_key(query, nodes[0].block_tokens)
        return [_score(node, key, limit) for node in nodes]


def _score(node: NodeView, key: int, limit: float) -> tuple[float, Terms]:
    place = mix(key, number_of(node.name)) / 2**64
    over = float(node.num_requests + 1 > limit and node.num_requests > 0)
    return over + place, (("over_bound", over), ("place", place))


def session_key(query: Query, block_tokens: int) -> int:
    """Of a prompt shorter than a block: its length, so that it does not always go to one node."""
    if query.session:
        return number_of(query.session)
    blocks = min(max(KEY_TOKENS // block_tokens, 1), len(query.hashes) // HASH_BYTES)
    return int.from_bytes(query.hashes[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES][:8], "little") if blocks else query.num_tokens
