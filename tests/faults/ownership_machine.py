"""Random histories of whole nodes: pages, slots, tickets, fences and rows together, as the product composes them.

Two prefill and two decode nodes, a router that only forwards, and a network that loses, repeats and delays letters and
writes. After every step: no page has two owners, no live page has a foreign writer, no source page is free while a
write reads it, and every token is the right one. In the end everybody lets go of everything.
"""

from __future__ import annotations

import random
from collections import defaultdict

from fake_backend import FakeBackend, FakeNetwork, Fault
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from local_cluster import BLOCK
from oracle import reference
from stepped_nodes import Letter, SteppedNodes, pages_of

from pdcluster.core.lifecycle import Residence
from pdcluster.core.messages import (
    AnyMessage,
    Cancel,
    Deliver,
    Prefill,
    Pull,
    Release,
    Reserve,
    Reserved,
    Sampling,
    Tokens,
    Work,
    pack_tokens,
)
from pdcluster.kv.hashing import chain_root, extend
from pdcluster.transfer.backends.base import Peer, Stamp, WriteStatus

ROUTER = Peer("router", "router-1")
PREFILLS, DECODES = ("p0", "p1"), ("d0", "d1")
FAULTS = (
    Fault(),
    Fault(),
    Fault(delay_s=0.4),
    Fault(delay_s=0.1, answer_s=0.5),
    Fault(status=WriteStatus.FAILED, answer_s=0.1),
    Fault(delay_s=1.5, lost_s=0.2),
    Fault(delay_s=1.5, unknown_s=0.2),
    Fault(delay_s=9.0, unknown_s=0.0),
    Fault(flip_byte=3),
    Fault(torn_bytes=40),
    Fault(arrivals=0),
    Fault(arrivals=2, arrival_s=0.3),
)
DEADLINE_S = 20.0
ROOT = chain_root(block_tokens=BLOCK)


class Asked:
    """A request as its router sees it."""

    def __init__(self, name: str, prompt: list[int], count: int, prefill: str, decode: str) -> None:
        self.name, self.prompt, self.prefill, self.decode = name, prompt, prefill, decode
        self.count = count
        self.expected = reference(prompt, count)
        self.attempt = 1
        self.is_over = False

    def work(self, attempt: int) -> Work:
        sampling = Sampling(max_tokens=self.count, seed=1)
        packed = pack_tokens(self.prompt)
        hashes = extend(b"", packed, root=ROOT, block_tokens=BLOCK)
        return Work(self.name, attempt, packed, len(self.prompt), hashes, sampling, DEADLINE_S, ROOT)


class Ownership(RuleBasedStateMachine):
    @initialize(
        media=st.lists(st.booleans(), min_size=1, max_size=2),
        faults=st.lists(st.integers(0, len(FAULTS) - 1), min_size=1, max_size=10),
        layered=st.booleans(),
    )
    def start(self, media: list[bool], faults: list[int], layered: bool) -> None:
        """media: for each, whether its reader's end checks permits; a ticket may be written over all of them."""
        self.now = 1000.0
        self.count = 0

        def plan(_: Stamp) -> Fault:
            self.count += 1
            return Fault() if self.is_healed else FAULTS[faults[self.count % len(faults)]]

        self.is_healed = False
        self.problems: list[str] = []
        self.networks = {
            f"medium{number}": FakeNetwork(lambda: self.now, plan=plan, checks_permits=checks, on_land=self.on_land)
            for number, checks in enumerate(media)
        }
        roles = {**dict.fromkeys(PREFILLS, "prefill"), **dict.fromkeys(DECODES, "decode")}
        self.cluster = SteppedNodes(roles, self.networks, num_pages=24, group_s=1e-12 if layered else 1.0)  # type: ignore[arg-type]
        self.asked: dict[str, Asked] = {}
        self.old: list[Letter] = []

    # ------------------------------------------------------------ requests

    @precondition(lambda self: len(self.asked) < 12)
    @rule(
        length=st.integers(1, 44),
        count=st.integers(2, 5),
        prefill=st.sampled_from(PREFILLS),
        decode=st.sampled_from(DECODES),
        holder=st.sampled_from((None, *DECODES, *PREFILLS)),
    )
    def ask(self, length: int, count: int, prefill: str, decode: str, holder: str | None) -> None:
        """holder: from whom the prefill node shall pull; it may have the prompt, a part of it, or nothing."""
        name = f"r{len(self.asked)}"
        asked = self.asked[name] = Asked(
            name, [random.Random(length % 3).randrange(5000) for _ in range(length)], count, prefill, decode
        )
        writer = self.cluster.nodes[prefill]
        pull = (
            None
            if holder in (None, prefill)
            else Pull(self.cluster.nodes[holder].endpoint, max(length // BLOCK * BLOCK, 1))
        )
        self.say(prefill, Prefill(asked.work(0), remote=True, pull=pull))
        self.say(decode, Reserve(asked.work(1), writer.endpoint))

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 11), decode=st.sampled_from(DECODES))
    def reserve_elsewhere(self, which: int, decode: str) -> None:
        """The decode leg is made anew, under a new attempt; the prefill node sends again what it holds."""
        asked = self.pick(which)
        asked.attempt += 1
        self.say(asked.decode, Cancel(asked.name, asked.attempt - 1, "another decode node"))
        asked.decode = decode
        self.say(decode, Reserve(asked.work(asked.attempt), self.cluster.nodes[asked.prefill].endpoint))

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 11))
    def client_leaves(self, which: int) -> None:
        self.end_request(self.pick(which))

    def pick(self, which: int) -> Asked:
        return list(self.asked.values())[which % len(self.asked)]

    def end_request(self, asked: Asked) -> None:
        asked.is_over = True
        for name in {asked.prefill, *DECODES}:
            self.say(name, Cancel(asked.name, asked.attempt, "client left"))
        self.say(asked.prefill, Release(asked.name))

    def say(self, node: str, message: AnyMessage) -> None:
        """What the router says is not lost here: its links make up for that."""
        self.cluster.hand_over(Letter(ROUTER, self.cluster.nodes[node].me, message), "router")

    def on_router(self, message: AnyMessage) -> None:
        if isinstance(message, Reserved):
            asked = self.asked[message.ticket.request]
            if message.ticket.attempt == asked.attempt and not asked.is_over:
                self.say(asked.prefill, Deliver(message.ticket))
        elif isinstance(message, Tokens):
            for row in message.rows:
                asked = self.asked[row.request]
                assert row.tokens == tuple(asked.expected[row.position : row.position + len(row.tokens)]), (
                    f"wrong tokens of {row.request}"
                )

    # ------------------------------------------------------------ time and turns

    @rule(seconds=st.sampled_from([0.0, 0.002, 0.05, 0.3, 1.1, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(which=st.integers(0, 3))
    def turn(self, which: int) -> None:
        nodes = self.cluster.living()
        self.take_turn(nodes[which % len(nodes)])

    @rule(rounds=st.integers(1, 4))
    def all_turn(self, rounds: int) -> None:
        for _ in range(rounds):
            self.now += 0.002
            for node in self.cluster.living():
                self.take_turn(node)
            self.deliver_all()

    def take_turn(self, node: object) -> None:
        node.turn()  # type: ignore[attr-defined]
        mine = [letter for letter in self.cluster.pending_messages if letter.to == ROUTER]
        self.cluster.pending_messages[:] = [letter for letter in self.cluster.pending_messages if letter.to != ROUTER]
        for letter in mine:
            self.on_router(letter.message)

    # ------------------------------------------------------------ letters between nodes

    @rule()
    def deliver_all(self) -> None:
        pending_messages, self.cluster.pending_messages[:] = list(self.cluster.pending_messages), []
        for letter in pending_messages:
            self.cluster.hand_over(letter)

    @precondition(lambda self: self.cluster.pending_messages)
    @rule(which=st.integers(0, 9), fate=st.sampled_from(["deliver", "drop", "duplicate", "keep for later"]))
    def treat_letter(self, which: int, fate: str) -> None:
        letter = self.cluster.pending_messages.pop(which % len(self.cluster.pending_messages))
        if fate in ("duplicate", "keep for later"):
            self.old.append(letter)
        if fate in ("deliver", "duplicate"):
            self.cluster.hand_over(letter)

    @precondition(lambda self: self.old)
    @rule(which=st.integers(0, 9))
    def repeat_old_letter(self, which: int) -> None:
        self.cluster.hand_over(self.old[which % len(self.old)])

    # ------------------------------------------------------------ nodes

    @rule(gone=st.sampled_from(PREFILLS + DECODES), told=st.sampled_from(PREFILLS + DECODES))
    def is_told_that_a_node_is_gone(self, gone: str, told: str) -> None:
        """Wrongly, perhaps."""
        if gone != told:
            self.cluster.nodes[told].neighbours.news.append(self.cluster.nodes[gone].me)

    @precondition(lambda self: all(self.cluster.nodes[name].is_alive for name in PREFILLS))
    @rule(name=st.sampled_from(PREFILLS), tell=st.booleans())
    def prefill_node_dies(self, name: str, tell: bool) -> None:
        self.kill(name, DECODES if tell else ())

    def kill(self, name: str, told: tuple[str, ...]) -> None:
        node = self.cluster.nodes[name]
        if node.is_alive:
            node.is_alive = False
            for network in self.networks.values():
                network.kill(node.me)
        for other in told:
            self.cluster.nodes[other].neighbours.news.append(node.me)

    # ------------------------------------------------------------ what must hold

    def on_land(self, backend: FakeBackend, stamp: Stamp, spans: list[tuple[int, int]]) -> None:
        node = self.cluster.node_of(backend.me)
        if node is None:
            return
        page_bytes = node.engine.page_bytes
        for offset, nbytes in spans:
            for page in range(offset // page_bytes, -(-(offset + nbytes) // page_bytes)):
                if node.parts.pages.writer_of(page) != stamp.nonce:
                    self.problems.append(f"a write of {stamp.nonce:x} lands in page {page} of {backend.me.node}")

    @invariant()
    def no_live_page_has_a_foreign_writer(self) -> None:
        assert not self.__dict__.get("problems"), self.problems[0]

    @invariant()
    def no_page_has_two_owners(self) -> None:
        for node in self.cluster.living() if "cluster" in self.__dict__ else ():
            parts = node.parts
            for books in (parts.pages, parts.scheduler, parts.reader, parts.writer, parts.fetch, parts.export):
                books.check_integrity()
            rows: defaultdict[int, list[str]] = defaultdict(list)
            for sequence in parts.scheduler._live.values():
                for page in sequence.pages.tolist():
                    rows[page].append(sequence.key)
                    running = sequence.state is not Residence.RESERVED
                    assert not (running and parts.pages.writer_of(page) is not None), (
                        f"{sequence.key} runs in page {page}, which has a writer"
                    )
            for nonce, pulling in parts.fetch._pulls.items():
                for page in pulling.pages[pulling.num_cached :]:
                    rows[page].append(f"pull {nonce:x}")
            shared = {page: keys for page, keys in rows.items() if len(keys) > 1 and not parts.pages._hashes[page]}
            assert not shared, f"pages with two owners on {node.me.node}: {shared}"

    @invariant()
    def no_source_is_free_while_a_write_reads_it(self) -> None:
        for write in [write for network in self.__dict__.get("networks", {}).values() for write in network.writes]:
            node = self.cluster.node_of(write.writer.me)
            if node is None or write.cut or write.snapshot is not None:
                continue
            for page in pages_of(write.runs, node.engine.page_bytes, source=True):
                assert node.parts.pages.num_owners(page), (
                    f"page {page} of {node.me.node} is free while a write reads it"
                )

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        if "cluster" not in self.__dict__:
            return
        try:
            self.end_all()
        finally:
            self.cluster.end()

    def end_all(self) -> None:
        """The network is good again, every client leaves. What only a death can prove is proved by one."""
        self.is_healed = True
        self.old.clear()
        for asked in self.asked.values():
            self.end_request(asked)
        self.settle()
        if self.holders():
            for name in PREFILLS:
                self.kill(name, DECODES)
            self.settle()
        assert not self.holders()

    def settle(self) -> None:
        for _ in range(80):
            self.now += 0.5
            for node in self.cluster.living():
                self.take_turn(node)
            self.deliver_all()
            self.no_live_page_has_a_foreign_writer()
            self.no_source_is_free_while_a_write_reads_it()
        self.no_page_has_two_owners()

    def holders(self) -> list[str]:
        """Living nodes that hold anything."""
        found = []
        for node in self.cluster.living():
            parts = node.parts
            counts = (
                parts.pages.num_used,
                parts.pages.num_quarantined,
                node.side.num_pinned,
                parts.scheduler.load().slots_used,
            )
            if any(counts) or not parts.reader.is_idle() or not parts.writer.is_idle():
                found.append(f"{node.me.node}: used, quarantined, pinned, slots {counts}")
        return found
