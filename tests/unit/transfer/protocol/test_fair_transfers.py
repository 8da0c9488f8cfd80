"""A slow peer never delays another's transfer, and within a peer no ticket waits for the end of another: in simulated
time, step by step."""

from __future__ import annotations

import random

from fake_backend import FakeNetwork, Fault
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_harness import NUM_PAGES, PAGE_BYTES, PAGE_TOKENS, QUICK, WRITER, Clock, Node

from pdcluster.core.messages import Abort, CommitAck, Endpoint
from pdcluster.transfer.backends.base import Peer, Stamp
from pdcluster.transfer.layout.geometry import PageShape
from pdcluster.transfer.protocol.reader import Reader
from pdcluster.transfer.protocol.session import Acked, LocalPages, Send
from pdcluster.transfer.protocol.writer import Writer

TICK_S = 0.01


class Star:
    """One writer and several readers; `delays`: seconds that a write to each takes."""

    def __init__(self, delays: dict[str, float]) -> None:
        self.clock = Clock()
        self.reader_of: dict[int, str] = {}
        network = FakeNetwork(self.clock, plan=lambda stamp: Fault(delay_s=delays[self.reader_of[stamp.nonce]]))
        self.networks = {"fake": network}
        shape, common = PageShape.plain(PAGE_TOKENS, PAGE_BYTES), {"clock": self.clock, "settings": QUICK}
        self.source = Node(WRITER, self.networks, 1)
        self.writer = Writer(
            WRITER,
            self.source.backends,
            ["fake"],
            local=LocalPages(0, shape, [memoryview(self.source.memory)]),
            **common,
        )
        dice = random.Random(3)
        self.nodes = {name: Node(Peer(name, "boot"), self.networks, 2) for name in delays}
        self.readers = {
            name: Reader(
                Endpoint(name, "boot", f"{name}:1"),
                node.backends,
                ["fake"],
                local=LocalPages(0, shape, [memoryview(node.memory)]),
                rng=dice,
                **common,
            )
            for name, node in self.nodes.items()
        }
        self.acked_at: dict[int, float] = {}

    def send(self, reader: str, num_pages: int, first: int = 0) -> int:
        writer = Endpoint(WRITER.node, WRITER.incarnation, "p0:1")
        ticket = self.readers[reader].open(
            "r", 0, writer, list(range(first, first + num_pages)), num_pages * PAGE_TOKENS, 0, 1000.0
        )
        self.reader_of[ticket.nonce] = reader
        self.writer.open(ticket)
        self.writer.push(ticket.nonce, list(range(num_pages)), 0, ticket.num_tokens)
        self.writer.finish(ticket.nonce, 1, None)
        return ticket.nonce

    def step(self) -> None:
        self.clock.now += TICK_S
        for name, reader in self.readers.items():
            for event in reader.poll():
                if isinstance(event, Send) and isinstance(event.message, CommitAck | Abort):
                    self.writer.handle(Peer(name, "boot"), event.message)
        for event in self.writer.poll():
            if isinstance(event, Acked):
                self.acked_at[event.nonce] = self.clock.now
            elif isinstance(event, Send):
                self.readers[event.to.node].handle(WRITER, event.message)  # type: ignore[arg-type]
        self.writer.check_integrity()

    def run(self, *nonces: int) -> None:
        for _ in range(20_000):
            if set(nonces) <= set(self.acked_at):
                return
            self.step()
        raise AssertionError(f"only {len(self.acked_at)} of {len(nonces)} transfers ended")


def test_a_peer_that_takes_nothing_delays_no_other() -> None:
    alone = Star({"fast": 0.02})
    nonce = alone.send("fast", 40)
    alone.run(nonce)
    both = Star({"stuck": 500.0, "fast": 0.02})
    for first in range(0, NUM_PAGES, 16):
        both.send("stuck", 16, first)
    both.step()
    both.step()
    begun = both.clock.now
    nonce = both.send("fast", 40)
    both.run(nonce)
    assert both.acked_at[nonce] - begun <= alone.acked_at[next(iter(alone.acked_at))] - 100.0 + TICK_S / 2, (
        "as fast as alone"
    )


@settings(max_examples=40, deadline=None)
@given(
    slow=st.lists(st.sampled_from([0.3, 3.0, 90.0]), min_size=1, max_size=4),
    pages=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    later=st.integers(0, 30),
)
def test_whatever_others_do_a_transfer_takes_the_steps_that_it_takes_alone(
    slow: list[float], pages: list[int], later: int
) -> None:
    def steps(others: bool) -> float:
        star = Star({"fast": 0.03, **{f"slow{number}": delay for number, delay in enumerate(slow)}})
        for number in range(len(slow) if others else 0):
            for place, count in enumerate(pages):
                star.send(f"slow{number}", count, 15 * place)
        for _ in range(later):
            star.step()
        begun = star.clock.now
        nonce = star.send("fast", 25)
        star.run(nonce)
        return round((star.acked_at[nonce] - begun) / TICK_S)

    assert steps(others=True) == steps(others=False)


def test_a_small_ticket_does_not_wait_for_the_end_of_a_large_one_to_the_same_peer() -> None:
    star = Star({"d0": 0.05})
    large = star.send("d0", 60)
    star.step()
    small = star.send("d0", 2, first=60)
    star.run(large, small)
    assert star.acked_at[small] < star.acked_at[large]


def test_no_peer_has_more_in_flight_than_its_window() -> None:
    star = Star({"d0": 5.0, "d1": 5.0})
    stamps: list[Stamp] = []
    for name in star.readers:
        star.send(name, 60)
    for _ in range(50):
        star.step()
        for name in star.readers:
            flying = [write.stamp for write in star.networks["fake"].writes if write.target.node == name]
            assert sum(stamp.nbytes for stamp in flying) <= QUICK.window_bytes
            stamps += flying
    assert stamps
