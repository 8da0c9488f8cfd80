"""Metrics of nodes and of the prefix index, read at scrape time.

Each field of `messages.Load` is one family, labelled by node. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdcluster.bootstrap.card import NodeCard
from pdcluster.core.messages import Load, PathLoad
from pdcluster.cost.cost import DecodeCost, PrefillCost
from pdcluster_router.cluster.node_table import NodeTable
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.prefix_index.updates import CacheUpdates

EXAMPLE_TOKENS = 512
# Paths of KV with series of their own. Pairs of nodes grow with the square of their number.
MAX_PATHS = 1000
LABELS = ("node", "role")
PATH_LABELS = ("node", "peer", "backend")
BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}


class NodeCollector(Collector):
    def __init__(self, cluster: NodeTable) -> None:
        self._cluster = cluster

    def collect(self) -> Iterator[Metric]:
        nodes = self._cluster.view().nodes
        yield _family("up", "1 for each node with a link and a report.", nodes, lambda node: 1.0)
        yield _family("in_flight", "Requests of this router on the node.", nodes, lambda node: node.in_flight)
        yield _family(
            "waiting", "Requests in the node's queue.", nodes, lambda node: node.load.waiting if node.load else 0
        )
        yield _family(
            "running", "Rows in the node's running batch.", nodes, lambda node: node.load.running if node.load else 0
        )
        yield _family(
            "slots_used", "Rows and reservations taken.", nodes, lambda node: node.load.slots_used if node.load else 0
        )
        yield _weights(self._cluster.listed())
        yield _pages(nodes)
        yield _costs(
            nodes, "cost_samples", "Steps that the node's cost model was fitted to.", lambda half: half.samples
        )
        yield _costs(
            nodes,
            "cost_spread_ratio",
            "Share of its prediction within which 9 of 10 steps last.",
            lambda half: half.error.spread,
        )
        yield _costs(
            nodes,
            "cost_doubt_ratio",
            "Share of a prediction by which the model itself may be wrong.",
            lambda half: half.error.doubt,
        )
        yield _predicted(nodes)
        yield CounterMetricFamily(
            "pdcluster_refused_hashes",
            "Works that a node refused, as their block hashes are not those of their tokens.",
            value=self._cluster.num_refused_hashes,
        )
        yield from _paths(nodes)
        yield _reasons(
            nodes, "failed_writes", "KV writes that ended badly, by reason.", lambda load: load.failed_writes
        )
        yield _reasons(nodes, "resent_chunks", "KV chunks written again, by reason.", lambda load: load.resent_chunks)
        yield _reasons(
            nodes,
            "pulls",
            "Prompts for which another node was named as holder of their KV, by result.",
            lambda load: load.pulls,
        )


def _family(name: str, help_text: str, nodes: tuple[NodeView, ...], value: Callable[[NodeView], float]) -> Metric:
    family = GaugeMetricFamily(f"pdcluster_node_{name}", help_text, labels=LABELS)
    for node in nodes:
        family.add_metric((node.name, node.role), value(node))
    return family


def _weights(cards: Sequence[NodeCard]) -> Metric:
    """Of each node, so that what it counts can be joined with them."""
    family = GaugeMetricFamily(
        "pdcluster_node_weights",
        "1 for the weights of each node, by label and epoch; 0 while it sleeps and has none in memory.",
        labels=(*LABELS, "label", "epoch"),
    )
    for card in cards:
        family.add_metric(
            (card.node, card.role, card.weights_label, str(card.weights_epoch)), 0.0 if card.sleeping else 1.0
        )
    return family


def _paths(nodes: tuple[NodeView, ...]) -> Iterator[Metric]:
    """Paths that were measured, or failed before they were. Those in trouble come first."""
    known = [
        (node.name, path)
        for node in nodes
        for path in (node.load.paths if node.load else ())
        if path.bytes_s or path.state != "closed"
    ]
    known.sort(key=lambda each: (each[1].state == "closed", each[0], each[1].peer, each[1].backend))
    shown = known[:MAX_PATHS]
    yield _path_family("bandwidth_bytes_per_second", "KV bytes per second to the peer.", shown, lambda p: p.bytes_s)
    yield _path_family(
        "breaker_state", "0 closed, 1 half open, 2 open.", shown, lambda path: BREAKER_STATES[path.state]
    )
    yield _path_family(
        "path_chosen", "1 for the backend that the next writes to the peer go by.", shown, lambda path: path.is_chosen
    )
    yield GaugeMetricFamily(
        "pdcluster_node_transfer_paths_left_out",
        f"Paths that the other families of paths lack, which show {MAX_PATHS} at most.",
        value=len(known) - len(shown),
    )


def _path_family(
    name: str, help_text: str, shown: Sequence[tuple[str, PathLoad]], value: Callable[[PathLoad], float]
) -> Metric:
    family = GaugeMetricFamily(f"pdcluster_node_transfer_{name}", help_text, labels=PATH_LABELS)
    for node, path in shown:
        family.add_metric((node, path.peer, path.backend), value(path))
    return family


def _costs(
    nodes: tuple[NodeView, ...], name: str, help_text: str, value: Callable[[PrefillCost | DecodeCost], float]
) -> Metric:
    family = GaugeMetricFamily(f"pdcluster_node_{name}", help_text, labels=(*LABELS, "half"))
    for node in nodes:
        if node.cost is not None:
            family.add_metric((node.name, node.role, "prefill"), value(node.cost.prefill))
            family.add_metric((node.name, node.role, "decode"), value(node.cost.decode))
    return family


def _predicted(nodes: tuple[NodeView, ...]) -> Metric:
    """Predicted seconds of the same examples on every node. So nodes can be compared, and a change is visible."""
    help_text = (
        f"By the node's model: a prompt of {EXAMPLE_TOKENS} tokens, a step of one row of as many; and their error "
        "bars (9 of 10)."
    )
    family = GaugeMetricFamily("pdcluster_node_predicted_seconds", help_text, labels=(*LABELS, "half", "figure"))
    for node in nodes:
        if (cost := node.cost) is None:
            continue
        figures = {
            ("prefill", "value"): cost.prefill.seconds(EXAMPLE_TOKENS),
            ("prefill", "error"): cost.prefill.error_s(EXAMPLE_TOKENS),
            ("decode", "value"): cost.decode.seconds(1, EXAMPLE_TOKENS),
            ("decode", "error"): cost.decode.error_s(1, EXAMPLE_TOKENS),
        }
        for labels, seconds in figures.items():
            family.add_metric((node.name, node.role, *labels), seconds)
    return family


def _reasons(
    nodes: tuple[NodeView, ...], name: str, help_text: str, counts: Callable[[Load], tuple[tuple[str, int], ...]]
) -> Metric:
    family = CounterMetricFamily(f"pdcluster_node_transfer_{name}", help_text, labels=(*LABELS, "reason"))
    for node in nodes:
        for reason, count in counts(node.load) if node.load else ():
            family.add_metric((node.name, node.role, reason), count)
    return family


def _pages(nodes: tuple[NodeView, ...]) -> Metric:
    """Pages by state. Pinned and parked pages also count as used, cached or free."""
    family = GaugeMetricFamily("pdcluster_node_kv_pages", "KV pages by state.", labels=(*LABELS, "state"))
    for node in nodes:
        for state, count in node.load.pages_by_state().items() if node.load else ():
            family.add_metric((node.name, node.role, state), count)
    return family


class IndexCollector(Collector):
    def __init__(self, caches: CacheUpdates) -> None:
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        caches, index = self._caches, self._caches.index
        expected = index.expected
        yield GaugeMetricFamily(
            "pdcluster_index_entries", "(block, node) pairs that the router knows.", value=index.num_entries
        )
        yield GaugeMetricFamily(
            "pdcluster_index_holder_sets", "Distinct sets of nodes that hold a block.", value=index.num_sets
        )
        yield GaugeMetricFamily("pdcluster_index_bytes", "Memory of the prefix index.", value=index.num_bytes)
        yield CounterMetricFamily(
            "pdcluster_index_dropped", "Entries that found no room in the index.", value=index.num_dropped
        )
        yield CounterMetricFamily("pdcluster_cache_deltas", "Cache deltas taken in.", value=caches.num_deltas)
        yield CounterMetricFamily("pdcluster_cache_snapshots", "Cache snapshots taken in.", value=caches.num_snapshots)
        yield CounterMetricFamily(
            "pdcluster_cache_gaps", "Times when deltas of a node were missing.", value=caches.num_gaps
        )
        yield GaugeMetricFamily(
            "pdcluster_cache_expected", "Requests whose blocks are expected on a node.", value=len(expected)
        )
        ended = CounterMetricFamily(
            "pdcluster_cache_expectations", "Expectations that ended, by how.", labels=("outcome",)
        )
        ended.add_metric(("hit",), expected.num_hits)
        ended.add_metric(("missed",), expected.num_missed)
        ended.add_metric(("crowded_out",), expected.num_crowded_out)
        yield ended
