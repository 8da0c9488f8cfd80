"""The writing end of pulls: what is given, what is declined, and how long its pages are held."""

from __future__ import annotations

import msgspec
from fake_backend import Fault
from pulling_nodes import BLOCK, PullingNodes, prompt_of
from stepped_nodes import Letter

from pdcluster.core.messages import Declined, Fetch
from pdcluster.node.native.kv_fetch import ExportSide

PROMPT = prompt_of(42)
HELD = 40
SLOW = Fault(delay_s=0.2)


def declined(nodes: PullingNodes) -> list[str]:
    return [letter.message.reason for letter in nodes.seen if isinstance(letter.message, Declined)]


def pulling(nodes: PullingNodes) -> Fetch:
    """r is about to be fetched from d0; the Fetch has not been handed over."""
    nodes.cache("d0", PROMPT)
    nodes.lose = lambda letter: isinstance(letter.message, Fetch)
    nodes.ask("r", PROMPT, pull="d0")
    nodes.until(lambda: bool(nodes.fetches()))
    nodes.lose = lambda letter: False
    return nodes.fetches()[0]


def test_source_pages_are_pinned_until_the_reader_has_them() -> None:
    nodes = PullingNodes(lambda _: SLOW)
    fetch, exports = pulling(nodes), nodes["d0"].parts.export
    exports.open(nodes["p0"].me, fetch)
    assert exports.num_pinned == nodes["d0"].parts.pages.num_used == HELD // BLOCK and exports.owns(fetch.ticket.nonce)
    assert nodes["d0"].side.load().pages_pinned == HELD // BLOCK and not nodes["d0"].side.is_idle
    nodes.finish("r", PROMPT)
    assert exports.num_pinned == 0 and nodes.pulls() == {"ok": 1}
    nodes.end()


def test_only_pages_that_are_read_are_pinned() -> None:
    nodes = PullingNodes(lambda _: SLOW)
    nodes.cache("p0", PROMPT[:18])
    fetch, exports = pulling(nodes), nodes["d0"].parts.export
    exports.open(nodes["p0"].me, fetch)
    assert exports.num_pinned == (HELD - 16) // BLOCK
    nodes.finish("r", PROMPT)
    nodes.end()


def test_what_is_asked_for_twice_is_written_once() -> None:
    nodes = PullingNodes(lambda _: SLOW)
    fetch = pulling(nodes)
    for _ in range(3):
        nodes.cluster.hand_over(Letter(nodes["p0"].me, nodes["d0"].me, fetch))
    nodes.finish("r", PROMPT)
    assert nodes["d0"].parts.export.counters == {"acked": 1} and nodes.pulls() == {"ok": 1}
    nodes.cluster.hand_over(Letter(nodes["p0"].me, nodes["d0"].me, fetch))
    nodes.turns(3)
    assert nodes["d0"].parts.export.counters == {"acked": 1, "impossible": 1}, "a ticket is used once"
    assert nodes["d0"].parts.export.num_pinned == 0
    nodes.end()


def test_a_ticket_of_somebody_else_or_for_somebody_else_is_not_served() -> None:
    nodes = PullingNodes()
    fetch, exports = pulling(nodes), nodes["d0"].parts.export
    exports.open(nodes["d1"].me, fetch)
    assert exports.counters == {"foreign_message": 1}
    strange = msgspec.structs.replace(
        fetch, ticket=msgspec.structs.replace(fetch.ticket, nonce=1, writer=nodes["d1"].endpoint)
    )
    exports.open(nodes["p0"].me, strange)
    assert exports.counters == {"foreign_message": 1, "impossible": 1} and exports.num_pinned == 0
    nodes.finish("r", PROMPT)
    nodes.end()


def test_a_draining_node_gives_what_it_has() -> None:
    nodes = PullingNodes()
    nodes.cache("d0", PROMPT)
    nodes["d0"].loop._start_draining()
    nodes.ask("r", PROMPT, pull="d0")
    nodes.finish("r", PROMPT)
    assert declined(nodes) == [] and nodes.pulls() == {"ok": 1}
    nodes.end()


def test_so_many_exports_at_a_time_and_no_more() -> None:
    nodes = PullingNodes(lambda _: SLOW)
    node = nodes["d0"].parts
    few = ExportSide(node.scheduler, node.pages, node.writer, node.links.outbox, max_open=0)
    few.open(nodes["p0"].me, pulling(nodes))
    nodes.finish("r", PROMPT)
    assert few.counters == {"busy": 1} and declined(nodes) == ["0 exports are open, 0 may be"]
    nodes.end()


def test_pages_that_running_rows_may_need_are_not_pinned() -> None:
    """The row's growth is promised all pages that are left, so the cached ones must stay evictable."""
    nodes = PullingNodes(num_pages=18)
    nodes.cache("d0", PROMPT)
    nodes.ask("long", prompt_of(20, seed=3), count=20, at="d0")
    nodes.until(lambda: bool(nodes.tokens.get("long")))
    nodes.ask("r", PROMPT, pull="d0")
    nodes.finish("r", PROMPT)
    assert nodes["d0"].parts.export.counters["no_room"] + nodes["d0"].parts.export.counters["gone"] == 1
    assert nodes.pulls() == {"declined": 1}
    nodes.finish("long", prompt_of(20, seed=3))
    nodes.end()


def test_kv_of_a_row_that_still_runs_can_be_given() -> None:
    nodes = PullingNodes(lambda _: SLOW)
    nodes.ask("long", PROMPT, count=30, at="d0")
    nodes.until(lambda: len(nodes.tokens.get("long", ())) > 2)
    nodes.ask("r", PROMPT, pull="d0")
    assert nodes.finish("r", PROMPT).timings.pulled_tokens == HELD
    nodes.finish("long", PROMPT)
    nodes.end()
