"""What a routing policy is given and what it returns: frozen values and one Protocol.

A policy is a pure function of a Query and a ClusterView. It has no clock, no I/O, no state, and no randomness but
Query.counter. So the live router, a dry run, a shadow and the replay call the same object. Two routers with equal views
choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pdcluster_router.cluster.view import ClusterView, NodeView, Roster
from pdcluster_router.core.generation import Force as Force
from pdcluster_router.core.generation import Mode
from pdcluster_router.core.node_row import alone_s
from pdcluster_router.policy.candidates import Candidates
from pdcluster_router.policy.predicted.records import MODES, NOWHERE

Fallback = Literal["deny", "on-failure", "conditional"]


class Query(msgspec.Struct, frozen=True):
    """What a choice depends on besides the view.

    num_tokens: the prompt and what was emitted.
    hashes: its block hashes.
    cached: tokens of the longest prefix that each node holds or will hold in time, by incarnation.
    held: those that it holds already and can be copied; None: the same.
    excluded: incarnations that failed the request.
    busy: those that said to come back later. Another node of the pool is preferred, but the pool is not left.
    expected_output: tokens still to come, as a guess.
    session: key of a conversation, "" for none. Policies that need one then use the prompt's first blocks.
    force: the required mode.
    fallback: when one node may serve alone though both pools exist.
    counter: number of this decision on this router, the only source of chance.
    previous: the mode of the last choice that no request asked for, for hysteresis.
    itl_s: the longest gap between tokens of running requests; 0: judged by the batch's own pace.
    num_held: requests that wait in the router.
    busy_serving, busy_decoding: nodes kept busy by the prompts that this router sent lately, to nodes that compute for
    others and to decode nodes.
    lost: share of the cacheable tokens of recent prompts that no node had kept.
    model: digest of the model that it was prepared for; "" for any.
    most_tokens: the prompt and the output that was asked for; 0: not stated, so it goes wherever the prompt fits.
    least_output: tokens that every answer has; 0 for an embedding.
    """

    num_tokens: int
    hashes: bytes = b""
    cached: Mapping[str, int] = {}
    excluded: Set[str] = frozenset()
    busy: Set[str] = frozenset()
    expected_output: int = 256
    session: str = ""
    force: Force = "auto"
    fallback: Fallback = "conditional"
    held: Mapping[str, int] | None = None
    counter: int = 0
    previous: Mode | None = None
    itl_s: float = 0.0
    num_held: int = 0
    busy_serving: float = 0.0
    busy_decoding: float = 0.0
    lost: float = 0.0
    model: str = ""
    most_tokens: int = 0
    least_output: int = 1

    @property
    def least_tokens(self) -> int:
        """Tokens that a node must take to compute its prompt, with the first token of the output."""
        return self.num_tokens + self.least_output

    @property
    def row_tokens(self) -> int:
        """Tokens that a node must take to decode it."""
        least = self.num_tokens + self.least_output
        return self.most_tokens if self.most_tokens > least else least

    def cached_on(self, node: NodeView) -> int:
        cached = self.cached.get(node.endpoint.incarnation, 0) if self.cached else 0
        return cached if cached < self.num_tokens else self.num_tokens

    def held_on(self, node: NodeView) -> int:
        return (
            self.cached_on(node)
            if self.held is None
            else min(self.held.get(node.endpoint.incarnation, 0), self.num_tokens)
        )

    def uncached_on(self, node: NodeView) -> int:
        """Tokens to compute on the node. At least one: its logits give the first output token."""
        return max(self.num_tokens - self.cached_on(node), 1)


class KnownPrefix(msgspec.Struct, frozen=True):
    """What nodes have of a prompt.

    cached: tokens by row.
    source: of the rows that give KV the one that holds most (NOWHERE: none), the first of equals; held: how much.
    most: of any node.
    """

    cached: NDArray[Any]
    source: int
    held: int
    most: int


def known_prefix(query: Query, roster: Roster) -> KnownPrefix:
    if not query.cached and not query.held:
        return KnownPrefix(roster.zeros, NOWHERE, 0, 0)
    row_of, givers, limit = roster.row_of, roster.givers, query.num_tokens
    cached, most, source, held = np.zeros(len(roster.names)), 0, NOWHERE, 0
    is_alike = query.held is None or query.held is query.cached
    for incarnation, tokens in query.cached.items():
        row = row_of.get(incarnation, NOWHERE)
        if row == NOWHERE:
            continue
        if tokens > limit:
            tokens = limit
        cached[row] = tokens
        if tokens > most:
            most = tokens
        if is_alike and (tokens > held or (tokens == held and row < source)) and row in givers:
            source, held = row, tokens
    if query.held is not None and not is_alike:
        for incarnation, tokens in query.held.items():
            row = row_of.get(incarnation, NOWHERE)
            if tokens > limit:
                tokens = limit
            if (tokens > held or (tokens == held and row < source)) and row in givers:
                source, held = row, tokens
    return KnownPrefix(cached, source, held, most)


def request_values(
    query: Query,
    known: KnownPrefix,
    weights: tuple[float, float, float],
    *,
    wants_local: bool = False,
    parked_chunk: float = 0.0,
) -> tuple[Any, ...]:
    """The fields of a RequestRow."""
    return (
        float(query.num_tokens),
        float(query.expected_output),
        query.itl_s,
        float(query.num_held),
        query.busy_serving,
        query.busy_decoding,
        MODES[query.previous],
        query.lost,
        known.source,
        float(known.held),
        int(wants_local),
        parked_chunk,
        *weights,
    )


Terms = tuple[tuple[str, float], ...]


class ShadowRecord(msgspec.Struct, frozen=True):
    policy: str
    mode: Mode
    prefill: str | None
    decode: str
    agrees: bool


class DecisionRecord(msgspec.Struct, frozen=True):
    """A decision without the view: what is explained, traced, compared with a shadow, logged and replayed.

    prefill: None in mode local.
    ttft_s, tpot_s: what the policy expects; None where it has no model in seconds.
    estimate_s: until the first token, by what waits on the node and its own prompt. The same measure for all policies.
    best, best_s: who else is estimated to be soonest; None for nobody.
    most_cached: of the prompt, on the node that has most of it.
    shadow: what the shadow policy would have done.
    is_estimated: the computing node reports costs by gaps between its steps.
    """

    policy: str
    mode: Mode
    prefill: str | None
    decode: str
    num_tokens: int
    candidates: Candidates
    estimate_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    best: str | None = None
    best_s: float = 0.0
    most_cached: int = 0
    pull: str | None = None
    pull_tokens: int = 0
    shadow: ShadowRecord | None = None
    is_estimated: bool = False


class Decision(msgspec.Struct, frozen=True, eq=False):
    """A policy's answer, with what it was made from. It ends with the turn that it was made in; its record stays.

    first: the node that computes the prompt. prefill: the same, None in mode local.
    decode: the node that runs the request to its end.
    rows: of first and decode.
    legs: bits of the nodes; those with the leg of the chosen mode could compute the prompt. The gate asks.
    work_s: of the node that computes the prompt.
    pull: the node from which that node first copies its missing prefix, pull_tokens of it; None for none.
    """

    record: DecisionRecord
    first: NodeView
    prefill: NodeView | None
    decode: NodeView
    rows: tuple[int, int]
    query: Query
    view: ClusterView
    legs: NDArray[Any]
    work_s: float
    pull: NodeView | None = None
    pull_tokens: int = 0

    def pulling(self, holder: NodeView | None, num_tokens: int = 0) -> Decision:
        """The decision with another pull. Fetched tokens are not computed."""
        name = None if holder is None else holder.name
        record = replace(self.record, pull=name, pull_tokens=num_tokens)
        known = min(max(self.query.cached_on(self.first), num_tokens), self.query.num_tokens - 1)
        work_s = alone_s(self.view.row(self.rows[0]), self.query.num_tokens - known, known)
        return replace(self, record=record, pull=holder, pull_tokens=num_tokens, work_s=work_s)


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, query: Query, view: ClusterView) -> Decision:
        """Raises Unavailable when no node may take the request."""
        ...

    def choose_decode(self, query: Query, view: ClusterView, prefill: NodeView) -> NodeView | None:
        """Another decode node for KV that `prefill` holds; None for none."""
        ...
