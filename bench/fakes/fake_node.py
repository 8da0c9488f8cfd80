"""A node without an engine: the node's side of the protocol over real sockets, with scripted speed, so that a router
can be measured or tested alone.

Real: links, load reports, cache deltas, the page pool that is the prefix cache, Commit and CommitAck between two fakes.
Not real: KV is not moved (tickets name pages that nobody writes), tokens are a function of their position, and there is
no batch: requests do not slow each other but for the queue of prompts, which are computed one after the other. After a
gap or a cut nothing is said again but what reports say: for faults use real nodes.

`python -m bench.fakes.fake_node --bootstrap HOST:PORT --model DIR` serves until it is stopped; DIR gives the tokenizer.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import zmq

from pdcluster.api.text.model_text import TextModel
from pdcluster.bootstrap.agent import NodeAgent
from pdcluster.bootstrap.card import NodeCard
from pdcluster.bootstrap.credentials import Identity, bootstrap_credentials
from pdcluster.core import messages as m
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost, num_pairs
from pdcluster.kv.hashing import BLOCK_TOKENS, extend
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster.kv.pages import PagePool
from pdcluster.node.outbox import Outbox
from pdcluster.node.reports.load_report import ModelFiles, Reporter
from pdcluster.settings.security import SecurityConfig
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.hub import Hub, LeaseEnded
from pdcluster.wire.sockets import WireSettings

TOKEN_BYTES = 4
NUM_WORDS = 100
# From which its costs are said to be known: enough that routers take them for measured, and choose as they do in a
# cluster that has run a while.
NUM_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Speed:
    """prefill_s: of a prompt, prefill_token_s: of each token of it that is not cached; token_s: from one output token
    to the next. 0: the whole answer comes in one row."""

    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    token_s: float = 0.0

    def cost(self) -> NodeCost:
        prefill = PrefillCost(self.prefill_s, self.prefill_token_s, samples=NUM_STEPS)
        return NodeCost(prefill, DecodeCost(self.token_s, 0.0, samples=NUM_STEPS))


@dataclass(slots=True, eq=False)
class Served:
    """One leg on the node. emitted: output tokens of the whole request so far; ticket, is_computed: a remote leg is
    delivered when it has both; output: the request's whole output, None where tokens follow from their position."""

    router: Peer
    work: m.Work
    remote: bool
    cached_tokens: int
    emitted: int
    output: Sequence[int] | None = None
    pages: list[int] = field(default_factory=list)
    ticket: m.Ticket | None = None
    is_computed: bool = False
    is_over: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.work.token_ids) // TOKEN_BYTES

    @property
    def num_uncached(self) -> int:
        return max(self.num_tokens - self.cached_tokens, 1)

    @property
    def num_output(self) -> int:
        """Output tokens of the whole request."""
        most = self.work.sampling.max_tokens
        return most if self.output is None else min(most, len(self.output))


class FakeNode:
    """One thread owns it: call `turn` whenever `sockets` are readable or `next_deadline` is over. files: None when no
    router will ask for any. output: what a request is answered with, its end of sequence last."""

    def __init__(
        self,
        name: str,
        role: m.Role,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        wire: WireSettings | None = None,
        speed: Speed | None = None,
        num_pages: int = 4096,
        block_tokens: int = BLOCK_TOKENS,
        report_s: float = 0.05,
        files: ModelFiles | None = None,
        token: Callable[[int], int] = lambda position: 100 + position % 100,
        output: Callable[[m.Work], Sequence[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me = Peer(name, f"{name}-{secrets.token_hex(4)}")
        self.role, self.speed = role, speed or Speed()
        self.pages = PagePool(num_pages, block_tokens, block_tokens)
        self.hub = Hub(self.me, listen="127.0.0.1:0", context=context, settings=wire or WireSettings(), clock=clock)
        self.num_refused = 0
        self._cost = self.speed.cost().report()
        self._files, self._token, self._output, self._clock = files, token, output, clock
        self._reporter = Reporter(self.pages, self._load, interval_s=report_s, clock=clock, seen=self.hub.last_received)
        self._served: dict[str, Served] = {}
        self._slots: dict[int, Served] = {}
        self._sent: dict[int, Served] = {}
        self._prompts: deque[Served] = deque()
        # Of batch requests, computed while no other prompt waits.
        self._batch_prompts: deque[Served] = deque()
        self._computing: Served | None = None
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._loses_delta = False
        self._outbox = Outbox()
        self._nonces = itertools.count(secrets.randbits(32) << 24)

    def card(self, model: str = "model", max_len: int = 1 << 18, vocab_size: int = 1 << 16) -> NodeCard:
        tokens = self.pages.block_tokens
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_tokens=tokens, dtype="float32")
        fingerprint = Fingerprint(model, "fake", m.PROTOCOL_VERSION, tokens, layout)
        digest = self._files.digest if self._files is not None else ""
        return NodeCard(
            self.me.node, self.me.incarnation, self.role, self.hub.address, model, fingerprint, max_len, vocab_size,
            self.pages.num_pages,
            tokenizer_hash=digest, backends=("fake",), link_key=self.hub.link_key,
        )  # fmt: skip

    # ------------------------------------------------------------ the loop

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return self.hub.sockets()

    def next_deadline(self) -> float | None:
        report = self._reporter.next_deadline()
        times = [self._due[0][0]] if self._due else []
        return min([*times, *([report] if report is not None else [])], default=None)

    def turn(self) -> None:
        for received in self.hub.receive():
            self._on_message(received.peer, received.message, received.kind)
        for event in self.hub.events():
            if isinstance(event, LeaseEnded):
                self._lose(event.peer)
        while self._due and self._due[0][0] <= self._clock():
            heapq.heappop(self._due)[2]()
        self._outbox.flush(self.hub)
        self._reporter.report(self._tell)
        self.hub.tick()

    def run(self, is_stopped: Callable[[], bool]) -> None:
        while not is_stopped():
            poller = zmq.Poller()
            for socket in self.sockets():
                poller.register(socket, zmq.POLLIN)
            deadline = self.next_deadline()
            wait_s = 0.05 if deadline is None else min(max(deadline - self._clock(), 0.0), 0.05)
            poller.poll(int(wait_s * 1000 + 0.999))
            self.turn()

    def close(self) -> None:
        self.hub.close()

    def lose_next_delta(self) -> None:
        """The next cache delta never leaves, as if it had been lost on the way after it was numbered."""
        self._loses_delta = True

    # ------------------------------------------------------------ messages

    def _on_message(self, peer: Peer, message: m.AnyMessage, kind: str) -> None:
        if isinstance(message, m.Hello):
            known = {(served.work.request, served.work.attempt) for served in self._served.values()}
            lost = tuple((request, attempt) for request, attempt, _ in message.open if (request, attempt) not in known)
            self._tell(peer, m.Welcome(self.role, lost))
            if kind == "router":
                self._reporter.add(peer, self._tell)
        elif isinstance(message, m.Prefill):
            self._prefill(peer, message)
        elif isinstance(message, m.Reserve):
            self._reserve(peer, message)
        elif isinstance(message, m.Deliver):
            self._deliver(message.ticket)
        elif isinstance(message, m.Commit):
            self._commit(peer, message)
        elif isinstance(message, m.CommitAck):
            self._committed(message)
        elif isinstance(message, m.Cancel):
            served = self._served.get(message.request)
            if served is not None and served.work.attempt <= message.attempt:
                self._end(served)
        elif isinstance(message, m.AskCache):
            self._reporter.add(peer, self._tell)
        elif isinstance(message, m.FetchFile) and self._files is not None:
            self._tell(peer, self._files.chunk(message))

    def _prefill(self, router: Peer, message: m.Prefill) -> None:
        served = self._accept(router, message.work, remote=message.remote, leg="prefill")
        if served is not None:
            (self._batch_prompts if message.work.is_batch else self._prompts).append(served)
            self._start_prompt()

    def _reserve(self, router: Peer, message: m.Reserve) -> None:
        served = self._accept(router, message.work, remote=False, leg="reserve")
        if served is None:
            return
        nonce = next(self._nonces)
        self._slots[nonce] = served
        reader = m.Endpoint(self.me.node, self.me.incarnation, self.hub.address, (("fake", b""),))
        work, block = message.work, self.pages.block_tokens
        ticket = m.Ticket(
            nonce, work.request, work.attempt, reader, message.writer, 0, m.pack_tokens(served.pages), block, block,
            served.num_tokens,
            min(served.cached_tokens, served.num_tokens), work.deadline_s,
        )  # fmt: skip
        self._tell(router, m.Reserved(ticket))

    def _accept(self, router: Peer, work: m.Work, *, remote: bool, leg: m.RefusedLeg) -> Served | None:
        """Pages for the prompt, of which those that are cached need not be computed; None when there are none left, and
        the router was told."""
        known = self._served.get(work.request)
        if known is not None:
            self._end(known)
        num_tokens = len(work.token_ids) // TOKEN_BYTES
        cached = self.pages.match(work.hashes)
        self.pages.acquire(cached)
        fresh = self.pages.allocate(self.pages.pages_for(num_tokens) - len(cached))
        if fresh is None:
            self.pages.release(cached)
            self.num_refused += 1
            self._tell(router, m.Refused(work.request, work.attempt, leg, "no pages are left", 0.05))
            return None
        output = None if self._output is None else self._output(work)
        cached_tokens, emitted = len(cached) * self.pages.block_tokens, num_tokens - work.num_prompt
        served = Served(router, work, remote, cached_tokens, emitted, output, cached + fresh)
        self._served[work.request] = served
        return served

    # ------------------------------------------------------------ prompts

    def _start_prompt(self) -> None:
        while self._computing is None and (self._prompts or self._batch_prompts):
            served = (self._prompts or self._batch_prompts).popleft()
            if served.is_over:
                continue
            self._computing = served
            self._tell(
                served.router,
                m.Scheduled(served.work.request, served.work.attempt, min(served.cached_tokens, served.num_tokens)),
            )
            self._after(
                self.speed.prefill_s + self.speed.prefill_token_s * served.num_uncached, partial(self._computed, served)
            )

    def _computed(self, served: Served) -> None:
        """The prompt is done: it is cached, and the first token goes to the router."""
        self._computing = None
        if not served.is_over:
            self._publish(served, served.work.hashes)
            served.is_computed = True
            if not served.remote:
                self._decode(served)
            else:
                self._say(served, 1)
                self._send_on(served)
        self._start_prompt()

    def _deliver(self, ticket: m.Ticket) -> None:
        served = self._served.get(ticket.request)
        if served is not None and served.remote:
            served.ticket = ticket
            self._send_on(served)

    def _send_on(self, served: Served) -> None:
        if served.is_over or not served.is_computed or served.ticket is None:
            return
        self._sent[served.ticket.nonce] = served
        self.hub.send(
            served.ticket.reader,
            m.Commit(served.ticket.nonce, self.pages.block_tokens, (), self._token_of(served, served.emitted - 1)),
        )

    def _committed(self, message: m.CommitAck) -> None:
        served = self._sent.pop(message.nonce, None)
        if served is not None and not served.is_over:
            timings = m.LegTimings(cached_tokens=min(served.cached_tokens, served.num_tokens), backend="fake")
            self._tell(served.router, m.Delivered(served.work.request, served.work.attempt, timings))
            self._end(served)

    def _commit(self, writer: Peer, message: m.Commit) -> None:
        served = self._slots.pop(message.nonce, None)
        if served is None or served.is_over:
            self.hub.send(writer, m.CommitAck(message.nonce, refused="the slot is gone"))
            return
        self.hub.send(writer, m.CommitAck(message.nonce))
        self._publish(served, served.work.hashes)
        self._decode(served)

    # ------------------------------------------------------------ output

    def _decode(self, served: Served) -> None:
        """The next tokens: one, or all that are left when they cost no time."""
        if served.is_over:
            return
        left = served.num_output - served.emitted
        self._say(served, left if self.speed.token_s == 0 else 1)
        if not served.is_over:
            self._after(self.speed.token_s, partial(self._decode, served))

    def _say(self, served: Served, count: int) -> None:
        work, first = served.work, served.emitted
        tokens = tuple(self._token_of(served, position) for position in range(first, first + count))
        served.emitted += count
        self._outbox.row(served.router, m.TokenRow(work.request, work.attempt, first, tokens))
        if served.emitted >= served.num_output:
            timings = m.LegTimings(
                cached_tokens=min(served.cached_tokens, served.num_tokens), decode_tokens=served.emitted
            )
            stop = tokens[-1] if served.output is not None and served.emitted == len(served.output) else None
            reason: m.FinishReason = "length" if stop is None else "eos"
            self._outbox.message(
                served.router, m.Finished(work.request, work.attempt, reason, served.emitted, timings, stop)
            )
            self._keep_output(served)
            self._end(served)

    def _token_of(self, served: Served, position: int) -> int:
        return self._token(position) if served.output is None else served.output[position]

    def _keep_output(self, served: Served) -> None:
        """Full blocks of what was decoded are cached, too, when there are pages; the last token's KV was never
        computed."""
        work = served.work
        num_before = served.num_tokens - work.num_prompt
        output = m.pack_tokens(self._token_of(served, position) for position in range(num_before, served.emitted - 1))
        hashes = work.hashes + extend(
            work.hashes, work.token_ids + output, root=work.hash_root, block_tokens=self.pages.block_tokens
        )
        more = self.pages.allocate(max(len(hashes) // m.HASH_BYTES - len(served.pages), 0))
        if more is not None:
            served.pages += more
            self._publish(served, hashes)

    def _publish(self, served: Served, hashes: bytes) -> None:
        parent: bytes | None = None
        for number in range(len(hashes) // m.HASH_BYTES):
            block = hashes[number * m.HASH_BYTES : (number + 1) * m.HASH_BYTES]
            served.pages[number] = self.pages.publish(served.pages[number], block, parent)
            parent = block

    def _end(self, served: Served) -> None:
        if served.is_over:
            return
        served.is_over = True
        self.pages.release(served.pages)
        if self._served.get(served.work.request) is served:
            del self._served[served.work.request]
        for held in (self._slots, self._sent):
            for nonce in [nonce for nonce, each in held.items() if each is served]:
                del held[nonce]

    def _lose(self, router: Peer) -> None:
        self._reporter.remove(router)
        for served in [served for served in self._served.values() if served.router == router]:
            self._end(served)

    # ------------------------------------------------------------ small things

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        if seconds == 0:
            action()
        else:
            heapq.heappush(self._due, (self._clock() + seconds, next(self._order), action))

    def _tell(self, peer: Peer, message: m.AnyMessage) -> None:
        if self._loses_delta and isinstance(message, m.CacheDelta):
            self._loses_delta = False
            return
        self.hub.send(peer, message)

    def _load(self) -> m.Load:
        queued = (*self._prompts, *self._batch_prompts, *([self._computing] if self._computing else []))
        waiting = [served for served in queued if not served.is_over]
        prompts = [served for served in waiting if not served.work.is_batch]
        running = [served for served in self._served.values() if served.is_computed or not served.remote]
        return m.Load(
            waiting=len(waiting),
            running=len(self._served) - len(waiting),
            waiting_tokens=sum(served.num_uncached for served in prompts),
            waiting_pairs=round(sum(num_pairs(served.num_uncached, served.cached_tokens) for served in prompts)),
            batch_tokens=sum(served.num_uncached for served in waiting if served.work.is_batch),
            context_tokens=sum(served.num_tokens for served in running),
            pages_total=self.pages.num_pages,
            pages_free=self.pages.num_free,
            pages_cached=self.pages.num_cached,
            pages_quarantined=0,
            pages_pinned=0,
            slots=1 << 16,
            slots_used=len(self._served),
            cost=self._cost,
        )


def words(model: Path) -> Callable[[int], int]:
    """Tokens that are whole texts, as nearly all are that models say: ids of single bytes would have a router look for
    the rest of a character."""
    pieces = TextModel.from_dir(model).pieces
    whole = [index for index, text in enumerate(pieces.texts) if text and text.strip() and index not in pieces.special][
        -NUM_WORDS:
    ]
    return lambda position: whole[position % len(whole)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.fakes.fake_node")
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", default=f"fake-{secrets.token_hex(3)}")
    parser.add_argument("--role", choices=("prefill", "decode", "mixed"), default="mixed")
    parser.add_argument("--prefill-token-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--cluster-key-file", type=Path)
    chosen = parser.parse_args()
    keys = SecurityConfig(cluster_key_file=chosen.cluster_key_file).cluster_keys()
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.append(number))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    speed = Speed(0.0, chosen.prefill_token_s, chosen.token_s)
    node = FakeNode(
        chosen.name,
        chosen.role,
        context=context,
        wire=WireSettings(cluster_keys=keys),
        speed=speed,
        files=ModelFiles(chosen.model),
        token=words(chosen.model),
    )
    agent = NodeAgent([chosen.bootstrap], credentials=bootstrap_credentials(keys, Identity("node", node.me.node)))
    agent.start(node.card(chosen.model.resolve().name))
    try:
        node.run(lambda: bool(stopped))
    finally:
        agent.stop()
        node.close()
        context.destroy(0)


if __name__ == "__main__":
    main()
