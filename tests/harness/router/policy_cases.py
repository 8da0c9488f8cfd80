"""Views and queries for the tests of policies: by hand, and drawn by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from pdcluster.bootstrap.card import NATIVE, Capabilities
from pdcluster.core.messages import Endpoint, Load, Role
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.cluster.view import ClusterView, InFlightWork, NodeView
from pdcluster_router.policy.base import Decision, DecisionRecord, Query
from pdcluster_router.policy.candidates import Candidates

COST = NodeCost(PrefillCost(0.005, 1e-4, 1e-9, 512, 100), DecodeCost(0.008, 2e-4, 1e-8, 100))


NO_PULLS = Capabilities(pulls=False)
FIRST_BY_DECODE = Capabilities(pulls=False, first_token="decode", parks_s=25.0, estimated_cost=True)

COUNTS = (
    "waiting",
    "running",
    "waiting_tokens",
    "context_tokens",
    "pages_cached",
    "pages_quarantined",
    "pages_pinned",
    "slots_used",
)


def make_load(**changes: int) -> Load:
    values = {"pages_total": 4000, "pages_free": 4000, "slots": 32, **changes}
    return Load(**{**dict.fromkeys(COUNTS, 0), **values})  # type: ignore[arg-type]


def make_node(
    name: str, role: Role, load: Load | None = None, cost: NodeCost | None = COST, **changes: object
) -> NodeView:
    endpoint = Endpoint(name, f"{name}-boot", f"{name}:1")
    node = NodeView(endpoint, role, 0, load or make_load(), 32, 32768, ("shm",), cost=cost, kv_bytes_per_token=1024)
    return replace(node, **changes)  # type: ignore[arg-type]


def view(*nodes: NodeView) -> ClusterView:
    return ClusterView(nodes)


def make_decision(
    query: Query, view: ClusterView, prefill: NodeView | None, decode: NodeView, *, work_s: float = 0.0, **said: Any
) -> Decision:
    """A choice that no policy made. said: fields of its record."""
    fields = {"policy": "by hand", "candidates": Candidates(b"", (), True, (), 0), "estimate_s": 0.0, **said}
    mode, name = ("local", None) if prefill is None else ("remote", prefill.name)
    record = DecisionRecord(mode=mode, prefill=name, decode=decode.name, num_tokens=query.num_tokens, **fields)  # type: ignore[arg-type]
    first, rows = prefill or decode, view.roster.row_of
    pair = rows[first.incarnation], rows[decode.incarnation]
    return Decision(record, first, prefill, decode, pair, query, view, view.roster.legs, work_s)


def queue(tokens: int, requests: int = 1) -> Load:
    """A node that has prompts to compute."""
    return make_load(waiting=requests, waiting_tokens=tokens, waiting_pairs=tokens * tokens // (2 * requests))


def batch(rows: int, context: int = 1000) -> Load:
    """A node that decodes."""
    used = rows * context // 32
    return make_load(
        running=rows, rows=rows, slots_used=rows, context_tokens=rows * context, pages_free=max(4000 - used, 0)
    )


def cached(node: NodeView, tokens: int) -> dict[str, int]:
    return {node.incarnation: tokens}


def may_compute(node: NodeView, query: Query) -> bool:
    """Whether the prompt, and one token behind it, fit on a node of the model that takes work."""
    serves = query.model in node.models or not query.model
    return node.accepts_work and serves and node.max_len > query.num_tokens


def may_decode(node: NodeView, query: Query) -> bool:
    """The same, with all the output that was asked for."""
    return may_compute(node, query) and node.max_len >= query.most_tokens


@st.composite
def loads(draw: st.DrawFn) -> Load:
    total = draw(st.integers(0, 4000))
    free = draw(st.integers(0, total))
    rows = draw(st.integers(0, 40))
    return make_load(
        waiting=draw(st.integers(0, 50)),
        running=rows,
        waiting_tokens=draw(st.integers(0, 10**6)),
        waiting_pairs=draw(st.integers(0, 10**10)),
        context_tokens=draw(st.integers(0, 10**6)),
        rows=rows,
        slots=draw(st.integers(0, 64)),
        slots_used=rows,
        pages_total=total,
        pages_free=free,
        pages_cached=draw(st.integers(0, total - free)),
    )


def seconds(most: float) -> st.SearchStrategy[float]:
    """None, or what a clock could have measured: products of numbers near the smallest float vanish in one formulation
    and not in another."""
    return st.one_of(st.just(0.0), st.floats(most * 1e-9, most))


costs = st.one_of(
    st.none(),
    st.builds(
        NodeCost,
        st.builds(PrefillCost, seconds(1), seconds(1e-2), seconds(1e-6), st.sampled_from([0, 512]), st.integers(0, 20)),
        st.builds(DecodeCost, seconds(1), seconds(1e-2), seconds(1e-6), st.integers(0, 20)),
    ),
)


@st.composite
def clusters(draw: st.DrawFn, max_nodes: int = 6) -> ClusterView:
    nodes = []
    for index in range(draw(st.integers(1, max_nodes))):
        load = draw(st.one_of(st.none(), loads()))
        node = make_node(f"n{index}", draw(st.sampled_from(["prefill", "decode", "mixed"])), load, draw(costs))
        nodes.append(
            replace(
                node,
                load=load,
                in_flight=draw(st.integers(0, 20)),
                is_cordoned=draw(st.integers(0, 4)) == 0,
                max_len=draw(st.sampled_from([100, 32768])),
                models=draw(st.sampled_from([frozenset("a"), frozenset("ab")])),
                backends=draw(st.sampled_from([("shm",), ("tcp",), ("shm", "tcp"), ()])),
                pending=draw(st.builds(InFlightWork, *[st.integers(0, 1000)] * len(InFlightWork._fields))),
                capabilities=draw(st.sampled_from([NATIVE, NATIVE, NO_PULLS, FIRST_BY_DECODE])),
                bandwidth={f"n{other}": draw(st.sampled_from([0.0, 1e6, 1e9])) for other in range(3)},
            )
        )
    return ClusterView(tuple(nodes))


@st.composite
def queries(draw: st.DrawFn) -> Query:
    names = st.frozensets(st.sampled_from([f"n{index}-boot" for index in range(6)]), max_size=6)
    return Query(
        num_tokens=draw(st.sampled_from([1, 40, 101, 5000])),
        hashes=bytes(draw(st.integers(0, 3))) * 16,
        cached=draw(
            st.dictionaries(st.sampled_from([f"n{index}-boot" for index in range(6)]), st.integers(0, 5000), max_size=6)
        ),
        excluded=draw(names),
        busy=draw(names),
        expected_output=draw(st.integers(1, 4096)),
        session=draw(st.sampled_from(["", "a", "b"])),
        force=draw(st.sampled_from(["auto", "remote", "local"])),
        fallback=draw(st.sampled_from(["deny", "on-failure", "conditional"])),
        counter=draw(st.integers(0, 100)),
        previous=draw(st.sampled_from([None, "remote", "local"])),
        itl_s=draw(st.sampled_from([0.0, 0.05])),
        num_held=draw(st.sampled_from([0, 3, 50])),
        busy_serving=draw(st.sampled_from([0.0, 0.7, 5.0])),
        busy_decoding=draw(st.sampled_from([0.0, 0.2, 5.0])),
        lost=draw(st.sampled_from([0.0, 0.04, 0.3])),
        model=draw(st.sampled_from(["", "a", "a", "b"])),
        most_tokens=draw(st.sampled_from([0, 99, 100, 101, 6000])),
    )
