"""A boot of a node for the request fuzz: it says what real nodes say to a router, and does to requests what its plan
says. Nothing is computed: tokens follow from the prompt, the seed and the position (`fuzz_tokens`).
By the plan its prefill legs say token 1, or Computed: then the decode node makes token 1, a reference to KV may be spent
by a transfer that breaks, and KV is gone after `parks_s` whoever has a ticket for it.

One prompt is computed at a time. All rows go on by a step together. Pages, prefix cache and reports are the real ones.
What the node does to a leg depends on the plan's seed and the leg alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from fuzz_link import FuzzLink, Network
from fuzz_plan import BLOCK, NodeSpec, Plan
from fuzz_tokens import ending, token_at
from virtual_time import VirtualLoop

from pdcluster.core import messages as m
from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost, num_pairs
from pdcluster.kv.pages import PagePool
from pdcluster.node.legs import EmittedTokens, EndedLeg, EndedLegs
from pdcluster.node.reports.load_report import Reporter
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.client_link import LinkState

TOKEN_BYTES = 4
REPORT_S = 0.05
TRANSFER_S = 0.01
# How much too late something is said at most, but for what the router has ended by then.
LATE_S = 0.06
PARKING_S = 10.0
# Finished KV fills at most one part in so many of the pool.
PARKED_SHARE = 2
MAX_WAITING = 8
NUM_STEPS = 1000

Kind = Literal["remote", "local", "slot"]


class World(Protocol):
    """What a node knows of the rest."""

    loop: VirtualLoop
    plan: Plan
    network: Network
    # From now on nodes do nothing bad.
    is_healed: bool

    def note(self, text: str) -> None: ...

    def fault(self, request: str, incarnation: str) -> None:
        """The node did something bad to the request, for which it may be avoided."""
        ...

    def refused(self, request: str, incarnation: str, hint_s: float) -> None: ...

    def forbid(self, request: str) -> None:
        """A node said that the request can never be."""
        ...

    def chunk(self, message: m.FetchFile) -> m.FileChunk: ...

    def problem(self, kind: str, text: str) -> None: ...

    def node_of(self, incarnation: str) -> FuzzNode | None: ...

    def check_work(self, node: FuzzNode, work: m.Work) -> None:
        """Notes a problem where no router should send it."""
        ...


@dataclass(eq=False)
class Leg:
    """One attempt of a request here.

    remote: the prompt alone; local: all of it; slot: room for KV that comes.
    """

    kind: Kind
    work: m.Work
    output: EmittedTokens
    pages: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    is_computed: bool = False
    is_row: bool = False
    is_over: bool = False
    is_stalled: bool = False
    ticket: m.Ticket | None = None
    nonce: int | None = None
    fork_of: str | None = None
    prompt_logprobs: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.work.token_ids) // TOKEN_BYTES

    @property
    def num_uncached(self) -> int:
        return max(self.num_tokens - self.cached_tokens, 1)

    def most_tokens(self, max_len: int) -> int:
        """Tokens for which it needs pages."""
        left = self.work.sampling.max_tokens - self.output.first_position
        return self.num_tokens if self.kind == "remote" else min(self.num_tokens + left, max_len)


class FuzzNode:
    def __init__(self, world: World, spec: NodeSpec, incarnation: str, weights: str) -> None:
        """weights: by which it makes tokens."""
        self.world, self.spec, self.weights = world, spec, weights
        self.me = Peer(spec.name, incarnation)
        self.role = spec.role
        self.pages = PagePool(spec.num_pages, BLOCK, BLOCK)
        self.is_dead = self.is_stuck = self.is_cordoned = self.is_draining = self.refuses_all = False
        self.link: FuzzLink | None = None
        self.prefills: dict[str, Leg] = {}
        self.decodes: dict[str, Leg] = {}
        # Requests that it lost, and of which it has not told yet.
        self.forgotten: set[str] = set()
        # By the watch.
        self.idle_since = self.accepting_since = float("inf")
        # Digests of what it serves, by its card.
        self.models: frozenset[str] = frozenset()
        self._ended = EndedLegs()
        self._queue: list[Leg] = []
        self._computing: Leg | None = None
        self._is_stepping = self._is_reporting = False
        self._seen = self._num_nonces = 0
        clock = world.loop.time
        self._reporter = Reporter(self.pages, self.load, interval_s=REPORT_S, clock=clock, seen=lambda _: self._seen)

    # ------------------------------------------------------------ what is true of it

    @property
    def endpoint(self) -> m.Endpoint:
        return m.Endpoint(self.me.node, self.me.incarnation, f"{self.me.node}:1", (("shm", b""),))

    @property
    def takes_work(self) -> bool:
        return not (self.is_dead or self.is_stuck or self.is_cordoned or self.is_draining)

    @property
    def is_linked(self) -> bool:
        """Whether the router takes it for reachable."""
        return self.link is not None and not self.link.is_closed and self.link.state is LinkState.UP

    def legs(self) -> Iterator[Leg]:
        yield from self.prefills.values()
        yield from self.decodes.values()

    @property
    def leaves_first(self) -> bool:
        """Whether token 1 of a pair is its decode node's."""
        return self.world.plan.first_token == "decode"

    @property
    def is_idle(self) -> bool:
        return not self.prefills and not self.decodes

    @property
    def num_slots_used(self) -> int:
        return sum(leg.is_row or leg.kind == "slot" for leg in self.decodes.values()) + (self._computing is not None)

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + (self._computing is not None)

    def fits(self, num_tokens: int) -> bool:
        """Whether so many tokens, with the output, may ever be here."""
        return num_tokens <= self.spec.max_len and self.pages.pages_for(num_tokens) <= self.pages.num_pages

    def has_room(self, num_tokens: int) -> bool:
        """Whether a row of so many tokens, with the output, finds room now."""
        return self.num_slots_used < self.spec.slots and self.pages.pages_for(num_tokens) <= self.pages.num_available

    def has_parked(self, request: str) -> bool:
        """Whether it has computed the prompt and waits for a ticket."""
        leg = self.prefills.get(request)
        return leg is not None and leg.is_computed and leg.ticket is None

    def load(self) -> m.Load:
        waiting = [*self._queue, *([self._computing] if self._computing is not None else [])]
        rows = [leg for leg in self.decodes.values() if leg.is_row or leg.kind == "slot"]
        parked = sum(len(leg.pages) for leg in self.prefills.values() if leg.is_computed)
        spec = self.spec
        cost = NodeCost(
            PrefillCost(spec.prompt_s, spec.prompt_token_s, samples=NUM_STEPS),
            DecodeCost(spec.step_s, spec.step_s / 100, samples=NUM_STEPS),
        )
        return m.Load(
            waiting=len(self._queue),
            running=sum(leg.is_row for leg in rows) + (self._computing is not None),
            waiting_tokens=sum(leg.num_uncached for leg in waiting),
            context_tokens=sum(leg.num_tokens + len(leg.output.tokens) for leg in rows),
            pages_total=self.pages.num_pages,
            pages_free=self.pages.num_free,
            pages_cached=self.pages.num_cached,
            pages_quarantined=0,
            pages_pinned=0,
            slots=spec.slots,
            slots_used=self.num_slots_used,
            pages_parked=parked,
            draining=self.is_cordoned or self.is_draining,
            waiting_pairs=round(sum(num_pairs(leg.num_uncached, leg.cached_tokens) for leg in waiting)),
            rows=len(rows),
            cost=cost.report() if spec.tells_cost else None,
            role=self.role,
            stuck=self.is_stuck,
        )

    # ------------------------------------------------------------ messages

    def receive(self, link: FuzzLink, number: int, message: m.AnyMessage) -> None:
        if self.is_dead:
            return
        if isinstance(message, m.Hello):
            self._on_hello(link, number, message)
            return
        if link is not self.link:
            return
        self._seen = number
        match message:
            case m.Prefill():
                self._on_prefill(message)
            case m.Reserve():
                self._on_reserve(message)
            case m.Deliver():
                self._on_deliver(message.ticket)
            case m.Cancel():
                self._cancel(message.request, message.attempt)
            case m.Release():
                leg = self.prefills.get(message.request)
                if leg is not None and leg.is_computed:
                    self._end(leg)
            case m.Manage():
                self._on_manage(message)
            case m.AskCache():
                self._reporter.add(link.me, self._tell_peer)
            case m.FetchFile():
                self._tell(self.world.chunk(message))
            case _:
                raise AssertionError(f"a router sent {message}")
        self.changed()

    def _on_hello(self, link: FuzzLink, number: int, message: m.Hello) -> None:
        """As a node does: end what is not awaited, say again what may be lost, name what it does not know."""
        self.link, self._seen = link, number
        awaited, lost = {(request, attempt) for request, attempt, _ in message.open}, []
        for leg in list(self.legs()):
            if (leg.work.request, leg.work.attempt) not in awaited:
                self._end(leg)
        for request, attempt, position in message.open:
            leg = next((leg for leg in self.legs() if (leg.work.request, leg.work.attempt) == (request, attempt)), None)
            ended = self._ended.get(request, attempt)
            if leg is not None:
                if leg.kind == "remote" and leg.is_computed and self.leaves_first:
                    self._say_computed(leg)
                if leg.output.num_output > position:
                    self._tell(m.Tokens((leg.output.since(position),)))
            elif ended is not None:
                self._tell(m.Tokens((ended.output.since(position),)))
                self._tell(ended.word)
            else:
                lost.append((request, attempt))
                self.world.fault(request, self.me.incarnation)
                self.forgotten.discard(request)
        self._tell(m.Welcome(self.role, tuple(lost)))
        self._reporter.add(link.me, self._tell_peer)
        self.changed()

    def note_silence(self) -> None:
        """Perhaps the router is gone: then nobody waits for what runs here."""
        network = self.world.network
        if self.link is not None and (self.link.is_closed or network.is_muted(self.me.node)):
            self._reporter.remove(self.link.me)
            self.link = None
            for leg in list(self.legs()):
                self._end(leg)
            self._ended = EndedLegs()

    def _on_manage(self, message: m.Manage) -> None:
        self.role = message.role or self.role
        self.is_cordoned = self.is_cordoned if message.cordoned is None else message.cordoned
        num_moved = self.move_work("node_draining") if message.moves else 0
        self._tell(m.Managed(message.number, self.role, self.is_cordoned, num_moved))

    def _on_prefill(self, message: m.Prefill) -> None:
        work = message.work
        leg = self._leg("remote" if message.remote else "local", work)
        known = (self.prefills if message.remote else self.decodes).get(work.request)
        if known is not None:
            self._end(known)
        if self._is_refused(leg, "prefill"):
            return
        if message.remote and self.leaves_first and work.sampling.prompt_logprobs is not None:
            self._refuse_for_ever(leg, "prefill", "no logprobs of a prompt that another node decodes")
            return
        parked = sum(len(each.pages) for each in self.prefills.values() if each.is_computed)
        if len(self._queue) >= MAX_WAITING or (message.remote and parked * PARKED_SHARE > self.pages.num_pages):
            self._refuse(leg, "prefill", "the queue or the parking is full")
            return
        if self._has_fate("forget", leg):
            return
        leg.fork_of = message.fork_of
        self._enter(leg)
        self._queue.append(leg)
        self._compute_next()

    def _on_reserve(self, message: m.Reserve) -> None:
        leg = self._leg("slot", message.work)
        known = self.decodes.get(message.work.request)
        if known is not None:
            self._end(known)
        if self._is_refused(leg, "reserve"):
            return
        if self.num_slots_used >= self.spec.slots or not self._take_pages(leg):
            self._refuse(leg, "reserve", "no row or no pages are left")
            return
        if self._has_fate("forget", leg):
            self.pages.release(leg.pages)
            return
        self._num_nonces += 1
        leg.nonce = int(self.world.plan.chance("nonce", self.me.incarnation, self._num_nonces) * 2**53)
        self._enter(leg)
        ticket = m.Ticket(
            leg.nonce, leg.work.request, leg.work.attempt, self.endpoint, message.writer, 0, b"", BLOCK, BLOCK,
            leg.num_tokens, min(leg.cached_tokens, leg.num_tokens), leg.work.deadline_s,
        )  # fmt: skip
        self._tell(m.Reserved(ticket))
        if self._has_fate("fail", leg):
            self._later(0.02, leg, partial(self._fail, leg, "a slot that breaks"))

    def _is_refused(self, leg: Leg, name: m.RefusedLeg) -> bool:
        """Whether the node takes no work, not this, or says so."""
        work = leg.work
        if self.is_draining or self.is_stuck:
            self._refuse(leg, name, "draining or stuck", 0.05)
            return True
        self.world.check_work(self, work)
        if work.model and work.model not in self.models:
            why = f"{work.model} is not served here"
            refused = m.Refused(work.request, work.attempt, name, why, 0.0, retryable=False, param=m.MODEL_PARAM)
            self._tell(refused)
            return True
        why = ""
        if leg.num_tokens >= self.spec.max_len:
            why = f"the prompt has {leg.num_tokens} tokens, this node takes {self.spec.max_len} with the output"
        if why or self._has_fate("refuse_for_ever", leg):
            self._tell(m.Refused(work.request, work.attempt, name, why or "this can never be", 0.0, retryable=False))
            return True
        if self.refuses_all or self._has_fate("refuse", leg):
            self._refuse(leg, name, "not now")
            return True
        return False

    def _refuse_for_ever(self, leg: Leg, name: m.RefusedLeg, reason: str) -> None:
        work = leg.work
        self.world.forbid(work.request)
        self._tell(m.Refused(work.request, work.attempt, name, reason, 0.0, retryable=False))

    def _refuse(self, leg: Leg, name: m.RefusedLeg, reason: str, hint_s: float | None = None) -> None:
        hint_s = self.spec.hint_s if hint_s is None else hint_s
        self.world.refused(leg.work.request, self.me.incarnation, hint_s)
        self._tell(m.Refused(leg.work.request, leg.work.attempt, name, reason, hint_s))

    def _on_deliver(self, ticket: m.Ticket) -> None:
        leg = self.prefills.get(ticket.request)
        if leg is None:
            self._refuse_ticket(ticket, "this node has no KV for the request")
        elif leg.ticket is None or leg.ticket.nonce != ticket.nonce:
            leg.ticket = ticket
            self._push(leg)

    def _refuse_ticket(self, ticket: m.Ticket, reason: str) -> None:
        self.world.fault(ticket.request, ticket.reader.incarnation)
        self._tell(m.Refused(ticket.request, ticket.attempt, "deliver", reason, 0.05))

    def _cancel(self, request: str, attempt: int) -> None:
        for side in (self.prefills, self.decodes):
            leg = side.get(request)
            if leg is not None and leg.work.attempt <= attempt:
                self.world.fault(request, self.me.incarnation)  # perhaps it took too long
                self._end(leg)

    # ------------------------------------------------------------ prompts

    def _compute_next(self) -> None:
        """Begin with the first prompt for which there is room."""
        if self._computing is not None or self.is_stuck:
            return
        for leg in self._queue:
            parent = self.decodes.get(leg.fork_of) if leg.fork_of is not None else None
            if parent is not None and not parent.output.tokens:
                continue
            if self.num_slots_used < self.spec.slots and self._take_pages(leg):
                break
        else:
            return
        self._queue.remove(leg)
        self._computing = leg
        if parent is not None:
            leg.cached_tokens = leg.num_tokens - 1
        quiet = self.world.plan.chance("unscheduled", leg.work.request, leg.work.attempt)
        is_quiet = self.leaves_first and quiet < 0.3
        if (leg.kind == "remote" and not is_quiet) or leg.cached_tokens:
            self._tell(m.Scheduled(leg.work.request, leg.work.attempt, min(leg.cached_tokens, leg.num_tokens)))
        seconds = self.spec.prompt_s + self.spec.prompt_token_s * leg.num_uncached
        self._later(seconds, leg, partial(self._on_computed, leg))

    def _on_computed(self, leg: Leg) -> None:
        self._computing = None
        leg.is_computed = True
        self._publish(leg)
        if self._has_fate("fail", leg):
            self._fail(leg, "the engine failed")
        elif leg.kind == "local":
            leg.is_row = True
            self._say_next(leg, 1)
            self._step_soon()
        else:
            if self.leaves_first:
                self._say_computed(leg)
            else:
                self._say_next(leg, 1)
            if not leg.is_over:
                self._later(self.world.plan.parks_s or PARKING_S, leg, partial(self._end_parking, leg))
                self._push(leg)
        self._compute_next()
        self.changed()

    def _say_computed(self, leg: Leg) -> None:
        cached = min(leg.cached_tokens, leg.num_tokens)
        self._tell(m.Computed(leg.work.request, leg.work.attempt, cached))

    def _end_parking(self, leg: Leg) -> None:
        if leg.ticket is None or self.world.plan.parks_s:
            self._tell(m.Failed(leg.work.request, leg.work.attempt, "overloaded", "no decode node took the KV", True))
            self._end(leg)
        else:
            self._later(PARKING_S, leg, partial(self._end_parking, leg))

    def _push(self, leg: Leg) -> None:
        ticket = leg.ticket
        if ticket is None or not leg.is_computed:
            return
        if self._has_fate("break_transfer", leg, ticket.attempt):
            if self.world.plan.chance("quiet", leg.work.request, ticket.attempt) < 0.5:
                self._later(0.05, leg, partial(self._give_up, leg, ticket, "the transfer broke"))
            return
        self._later(TRANSFER_S, leg, partial(self._commit, leg, ticket))

    def _give_up(self, leg: Leg, ticket: m.Ticket, reason: str) -> None:
        if leg.ticket is not ticket:
            return
        if self.leaves_first and self.world.plan.chance("spent", leg.work.request, ticket.attempt) < 0.5:
            self.world.fault(ticket.request, ticket.reader.incarnation)
            self._fail(leg, f"{reason}, and its reference is spent")
            return
        leg.ticket = None
        self._refuse_ticket(ticket, reason)

    def _commit(self, leg: Leg, ticket: m.Ticket) -> None:
        """The last word on a ticket. The reader takes the KV, or the ticket is dead."""
        if leg.ticket is not ticket:
            return
        network, reader = self.world.network, self.world.node_of(ticket.reader.incarnation)
        if network.is_muted(self.me.node) or network.is_muted(ticket.reader.node):
            self._later(1.0, leg, partial(self._commit, leg, ticket))
        elif reader is None or not reader.land(ticket):
            self._give_up(leg, ticket, "the reader or its slot is gone")
        else:
            timings = m.LegTimings(prefill_s=0.01, cached_tokens=min(leg.cached_tokens, leg.num_tokens), backend="shm")
            word = m.Delivered(leg.work.request, leg.work.attempt, timings)
            self._ended.add(EndedLeg(self._router, leg.output, word))
            self._tell(word)
            self._end(leg)

    def land(self, ticket: m.Ticket) -> bool:
        """KV came under a ticket of this node. False when its slot is gone."""
        leg = self.decodes.get(ticket.request)
        if leg is None or leg.nonce != ticket.nonce:
            return False
        leg.nonce, leg.is_row, leg.is_computed = None, True, True
        self._publish(leg)
        self._say_next(leg, 1)
        self._step_soon()
        self.changed()
        return True

    # ------------------------------------------------------------ rows

    def _step_soon(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self.world.loop.call_later(self.spec.step_s, self._step)

    def _step(self) -> None:
        """Each row gets a token, some get several. One frame has them all."""
        self._is_stepping = False
        if self.is_dead or self.is_stuck:
            return
        rows = []
        for leg in [leg for leg in self.decodes.values() if leg.is_row and not leg.is_stalled]:
            position = leg.output.num_output
            if self._meets_fate("fail", leg, position):
                self._fail(leg, "the row failed")
            elif self._meets_fate("stall", leg, position):
                leg.is_stalled = True
                self.world.fault(leg.work.request, self.me.incarnation)
            else:
                count = 1 if self.world.plan.chance("count", leg.work.request, position) < 0.9 else 3
                rows += self._grown(leg, count)
        self._say_rows(rows)
        if any(leg.is_row and not leg.is_stalled for leg in self.decodes.values()):
            self._step_soon()
        self._compute_next()
        self.changed()

    def _say_next(self, leg: Leg, count: int) -> None:
        self._say_rows(self._grown(leg, count))

    def _grown(self, leg: Leg, count: int) -> list[tuple[Leg, m.TokenRow, m.Finished | None]]:
        """The next tokens of a leg, up to its end."""
        work, output, first = leg.work, leg.output, leg.output.num_output
        tokens, reason = [], None
        while len(tokens) < count and reason is None:
            tokens.append(token_at(work, first + len(tokens), self.weights))
            reason = ending(work, first + len(tokens), tokens[-1], self.spec.max_len)
        output.tokens += tokens
        row = output.since(first)
        if reason is None:
            return [(leg, row, None)]
        timings = m.LegTimings(decode_tokens=output.num_output, cached_tokens=min(leg.cached_tokens, leg.num_tokens))
        word = m.Finished(
            work.request, work.attempt, reason, output.num_output, timings, tokens[-1] if reason == "eos" else None
        )
        return [(leg, row, word)]

    def _say_rows(self, rows: list[tuple[Leg, m.TokenRow, m.Finished | None]]) -> None:
        plain = []
        for leg, row, _ in rows:
            if self._has_fate("disorder", leg, row.position):
                self._tell(m.Tokens((row,)), min(self.spec.step_s * 2.5, LATE_S), in_order=False)
                continue
            plain.append(row)
            if self._has_fate("repeat", leg, row.position):
                plain.append(leg.output.since(max(row.position - 2, 0)))
        if plain:
            self._tell(m.Tokens(tuple(plain)))
        for leg, row, word in rows:
            if word is None:
                continue
            self._ended.add(EndedLeg(self._router, leg.output, word))
            late_s = LATE_S if self._has_fate("end_late", leg, row.position) else 0.0
            self._tell(word, late_s, in_order=not late_s)
            if self._has_fate("repeat", leg, "end"):
                self._tell(m.Tokens((leg.output.since(0),)), 0.2, in_order=False)
                self._tell(word, 0.2, in_order=False)
            self._end(leg)

    # ------------------------------------------------------------ what befalls it

    def die(self) -> None:
        self.is_dead = True
        for leg in list(self.legs()):
            self._end(leg)
        self.world.network.end(self.me.node)

    def move_work(self, code: str) -> int:
        """End all that runs, so that routers go on with it elsewhere."""
        legs = list(self.legs())
        for leg in legs:
            if code != "node_draining":
                self.world.fault(leg.work.request, self.me.incarnation)
            self._tell(m.Failed(leg.work.request, leg.work.attempt, code, f"node {self.me.node} moves its work", True))
            self._end(leg)
        self.changed()
        return len(legs)

    def set_stuck(self, *, is_stuck: bool) -> None:
        if is_stuck:
            self.is_stuck = True
            self.move_work("node_stuck")
        else:
            self.is_stuck = False
            self._compute_next()
        self.changed()

    def forget_some(self) -> None:
        """It has a bug: every other leg is gone, and nobody hears of it before the next Hello."""
        for leg in list(self.legs())[::2]:
            self.world.fault(leg.work.request, self.me.incarnation)
            self.forgotten.add(leg.work.request)
            self._end(leg)
        self.changed()

    def evict(self) -> None:
        """Other work takes all the cached pages."""
        taken = self.pages.allocate(self.pages.num_available)
        self.pages.release(taken or [])
        self.changed()

    # ------------------------------------------------------------ small things

    def _leg(self, kind: Kind, work: m.Work) -> Leg:
        leg = Leg(kind, work, EmittedTokens.of(work))
        wanted = work.sampling.prompt_logprobs
        if kind != "slot" and wanted is not None:
            leg.output.prompt_logprobs = [m.TokenLogprobs(-0.5)] * (work.num_prompt - 1)
        return leg

    def _enter(self, leg: Leg) -> None:
        (self.prefills if leg.kind == "remote" else self.decodes)[leg.work.request] = leg
        self._later(leg.work.deadline_s, leg, partial(self._end_late, leg))

    def _end_late(self, leg: Leg) -> None:
        reason = "gave up: the request's deadline passed"
        self._tell(m.Failed(leg.work.request, leg.work.attempt, "deadline_exceeded", reason, False))
        self._end(leg)

    def _take_pages(self, leg: Leg) -> bool:
        cached = self.pages.match(leg.work.hashes)
        self.pages.acquire(cached)
        fresh = self.pages.allocate(self.pages.pages_for(leg.most_tokens(self.spec.max_len)) - len(cached))
        if fresh is None:
            self.pages.release(cached)
            return False
        leg.pages, leg.cached_tokens = cached + fresh, len(cached) * BLOCK
        return True

    def _publish(self, leg: Leg) -> None:
        parent: bytes | None = None
        hashes = leg.work.hashes
        for number in range(len(hashes) // m.HASH_BYTES):
            block = hashes[number * m.HASH_BYTES : (number + 1) * m.HASH_BYTES]
            leg.pages[number] = self.pages.publish(leg.pages[number], block, parent)
            parent = block

    def _fail(self, leg: Leg, reason: str) -> None:
        self.world.fault(leg.work.request, self.me.incarnation)
        self._tell(m.Failed(leg.work.request, leg.work.attempt, "internal", reason, True))
        self._end(leg)
        self.changed()

    def _end(self, leg: Leg) -> None:
        if leg.is_over:
            return
        leg.is_over, leg.is_row = True, False
        self.pages.release(leg.pages)
        del (self.prefills if leg.kind == "remote" else self.decodes)[leg.work.request]
        if leg in self._queue:
            self._queue.remove(leg)
        if leg is self._computing:
            self._computing = None
        for fork in [each for each in self._queue if each.fork_of == leg.work.request and not leg.output.tokens]:
            self._tell(m.Failed(fork.work.request, fork.work.attempt, "overloaded", "its parent ended", True))
            self._end(fork)
        self.world.loop.call_soon(self._compute_next)
        self.changed()

    def _later(self, seconds: float, leg: Leg, action: Callable[[], None]) -> None:
        """Unless the leg is over then, or the process."""

        def act() -> None:
            if not leg.is_over and not self.is_dead:
                action()

        self.world.loop.call_later(seconds, act)

    def _has_fate(self, name: str, leg: Leg, *more: object) -> bool:
        world, work = self.world, leg.work
        rate = getattr(world.plan.rates, name)
        if not rate or (world.is_healed and name not in ("repeat", "disorder")):
            return False
        has = world.plan.chance(name, self.spec.name, work.request, work.attempt, leg.kind, *more) < rate
        if has:
            world.note(f"{self.me.incarnation}: {name} {work.request} {work.attempt} {leg.kind}")
            if name in ("forget", "break_transfer"):
                world.fault(work.request, self.me.incarnation)
            if name == "forget":
                self.forgotten.add(work.request)
            if name == "refuse_for_ever":
                world.forbid(work.request)
        return has

    def _meets_fate(self, name: str, leg: Leg, position: int) -> bool:
        """As a row, at one of its first tokens."""
        when = int(self.world.plan.chance("when", leg.work.request, leg.work.attempt) * 6)
        return position == leg.output.first_position + 1 + when and self._has_fate(name, leg, "row")

    @property
    def _router(self) -> Peer:
        return self.link.me if self.link is not None else Peer("", "")

    def _tell(self, message: m.AnyMessage, delay_s: float = 0.0, *, in_order: bool = True) -> None:
        if self.link is not None and not self.is_dead:
            self.link.reply(message, delay_s, in_order=in_order)

    def _tell_peer(self, peer: Peer, message: m.AnyMessage) -> None:
        self._tell(message)

    def changed(self) -> None:
        """Something may be reported."""
        if not self._is_reporting and not self.is_dead:
            self._is_reporting = True
            self.world.loop.call_soon(self._report)

    def _report(self) -> None:
        self._is_reporting = False
        if self.is_dead:
            return
        self._reporter.report(self._tell_peer)
        due = self._reporter.next_deadline()
        if due is not None:
            self._is_reporting = True
            self.world.loop.call_at(due, self._report)
