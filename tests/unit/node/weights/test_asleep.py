"""A node that sleeps answers whoever knows no better."""

from __future__ import annotations

import pytest

from pdcluster.core import messages as m
from pdcluster.node.acceptance import Acceptance
from pdcluster.node.availability import NodeAvailability
from pdcluster.node.control import NodeLinks
from pdcluster.node.legs import EndedLegs
from pdcluster.node.native.asleep import SleepingSide
from pdcluster.node.outbox import Outbox
from pdcluster.transfer.backends.base import Peer

ROUTER, NODE = Peer("r", "r-1"), Peer("d1", "d1-1")


class Cluster:
    """Implements availability.CardPublisher."""

    def set_role(self, role: m.Role) -> None: ...

    def set_draining(self, is_draining: bool) -> None: ...


class Asleep:
    def __init__(self) -> None:
        self.outbox, standing = Outbox(), NodeAvailability("decode", Cluster(), is_sleeping=True)
        links = NodeLinks(
            Peer("d0", "d0-2"), standing, Acceptance("d0", standing, self.outbox), None, self.outbox, EndedLegs(),
            None, None,
        )  # type: ignore[arg-type]  # fmt: skip
        self.side = SleepingSide(links)
        self._said: list[m.AnyMessage] = []

    def send(self, to: object, message: m.AnyMessage) -> bool:
        self._said.append(message)
        return True

    def said(self) -> list[m.AnyMessage]:
        self.outbox.flush(self)
        return self._said


@pytest.fixture
def asleep() -> Asleep:
    return Asleep()


SAMPLING = m.Sampling(max_tokens=1, seed=1)
WORK = m.Work("q", 1, m.pack_tokens([1]), 1, b"", SAMPLING, 5.0)
OTHER = m.Endpoint("d1", "d1-1", "d1:1")
TICKET = m.Ticket(7, "q", 1, OTHER, m.Endpoint("d0", "d0-2", "d0:1"), 0, m.pack_tokens([4]), 32, 65536, 70, 32, 9.5)


def test_work_is_refused_so_that_the_router_tries_another_node(asleep: Asleep) -> None:
    asleep.side.prefill(ROUTER, m.Prefill(WORK, remote=True))
    asleep.side.reserve(ROUTER, m.Reserve(WORK, OTHER))
    legs = [(each.leg, each.reason, each.retryable) for each in asleep.said() if isinstance(each, m.Refused)]
    assert legs == [("prefill", "node d0 is asleep", True), ("reserve", "node d0 is asleep", True)]


def test_it_says_that_it_takes_no_work_and_has_nothing(asleep: Asleep) -> None:
    load = asleep.side.load()
    assert load.draining and load.role == "decode" and load.pages_total == 0
    assert asleep.side.snapshot().is_sleeping and asleep.side.is_idle and asleep.side.is_quiet
    assert asleep.side.cache.snapshot() == b"" and asleep.side.cache.drain_changes() == (b"", b"")


def test_who_asks_for_kv_is_declined_and_other_words_of_nodes_are_taken(asleep: Asleep) -> None:
    assert asleep.side.node_message(NODE, m.Fetch(TICKET, bytes(32)))
    assert asleep.said() == [m.Declined(7, "node d0 sleeps")]
    assert asleep.side.node_message(NODE, m.Abort(7, "late", 1.0)) and not asleep.side.node_message(NODE, m.AskCache())


def test_adapters_wait_until_it_wakes(asleep: Asleep) -> None:
    asleep.side.manage_adapter(ROUTER, m.ManageAdapter(3, "a", "/a"))
    (answer,) = asleep.said()
    assert isinstance(answer, m.AdapterManaged) and "wake it with pdctl wake" in answer.error
