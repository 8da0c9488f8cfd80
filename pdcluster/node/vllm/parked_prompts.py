"""Prompts that vLLM computes for remote decode nodes: queued, computed, parked, read.

A prompt's life: Prefill → queued here → computed (vLLM's own token is dropped) → parked. With a ticket the node sends
Commit, which names the parked KV and how long it holds. The decode node reads it, and makes every token. The prompt
ends with CommitAck (Delivered to the router), Cancel, Release or its parking deadline, which lies before vLLM's lease.

A reference serves one reader. Once a decode node refuses a Commit, nobody can tell what was read, so the prompt ends
and its router computes it again; vLLM's prefix cache has most of it. Owned by the node loop's thread; no sockets here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum, auto

from pdcluster.core import errors
from pdcluster.core.lifecycle import Table
from pdcluster.core.messages import (
    Commit,
    CommitAck,
    Computed,
    Deliver,
    Delivered,
    Failed,
    LegTimings,
    Prefill,
    Refused,
    Scheduled,
    Ticket,
)
from pdcluster.node.legs import (
    REFUSALS,
    EmittedTokens,
    EndedLeg,
    EndedLegs,
    check_newest,
    of_router,
    refusal,
    unawaited,
)
from pdcluster.node.outbox import Outbox
from pdcluster.node.parking import ParkedKV
from pdcluster.node.reports.leg_records import EndedStages, LegRecorder, LegStage
from pdcluster.node.vllm.engine.interface import EngineOutput, EngineRequest
from pdcluster.node.vllm.requests import EngineQueue
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.protocol.session import peer_of

# A reference is not given to a decode node when less of its lease is left.
SHORTEST_HOLD_S = 2.0
# A Commit that is not answered goes again.
RESEND_S = 1.0
MEDIUM = "nixl"


class PromptState(Enum):
    QUEUED = auto()
    COMPUTING = auto()
    PARKED = auto()
    # A decode node has the reference.
    SENT = auto()
    OVER = auto()


P = PromptState
_of_prompts: dict[tuple[PromptState, str], PromptState] = {
    (P.QUEUED, "add"): P.COMPUTING,
    (P.COMPUTING, "computed"): P.PARKED,
    (P.PARKED, "commit"): P.SENT,
    # Its reader is gone, and another may come.
    (P.SENT, "reader lost"): P.PARKED,
    **{(state, "end"): P.OVER for state in P if state is not P.OVER},
}
PROMPT = Table(_of_prompts)


@dataclass(slots=True)
class PromptLeg:
    """A prompt for a remote decode node.

    holds_until: when its KV must be read at the latest; None before it is parked.
    """

    router: Peer
    request: str
    attempt: int
    work: EngineRequest
    deadline: float
    arrived: float
    output: EmittedTokens
    trace: bytes
    state: PromptState = PromptState.QUEUED
    ticket: Ticket | None = None
    reference: bytes = b""
    holds_until: float | None = None
    resend_at: float | None = None
    cached_tokens: int = 0
    scheduled_at: float | None = None
    computed_at: float | None = None

    @property
    def key(self) -> str:
        return self.work.key

    @property
    def num_tokens(self) -> int:
        return len(self.work.token_ids)


class ParkedPrompts:
    def __init__(
        self,
        queue: EngineQueue,
        outbox: Outbox,
        ended: EndedLegs,
        records: LegRecorder,
        parking: ParkedKV,
        clock: Callable[[], float],
    ) -> None:
        """parking.deadline_s: how long KV is kept for a decode node, less than vLLM's lease."""
        self._queue, self._outbox, self._ended, self._records = queue, outbox, ended, records
        self._parking, self._clock = parking, clock
        self._legs: dict[str, PromptLeg] = {}
        self._by_key: dict[str, PromptLeg] = {}
        # Names for parked blocks: vLLM's own ids may be shared, and are not counted so.
        self._names = itertools.count()

    # ------------------------------------------------------------ what a router asks

    def start(self, router: Peer, message: Prefill) -> None:
        """Queue a prompt. Answers Refused when the node cannot take it."""
        work = message.work
        self.cancel(work.request, work.attempt, "a newer attempt came")
        try:
            check_newest(work, self._legs.get(work.request))
            if work.sampling.prompt_logprobs is not None:
                raise errors.BadRequest(
                    "prompt_logprobs cannot be had where mode remote is required and nodes run vLLM; "
                    "leave prompt_logprobs out, or allow mode local",
                    "prompt_logprobs",
                )
            self._parking.check_room()
            request = self._queue.request_of(work, parks=True)
            now = self._clock()
            leg = PromptLeg(
                router, work.request, work.attempt, request, now + work.deadline_s, now, EmittedTokens.of(work),
                work.trace,
            )  # fmt: skip
            self._queue.push(request, lambda: self._on_scheduled(leg))
        except REFUSALS as error:
            self._outbox.message(router, refusal(work, "prefill", error))
            return
        self._legs[leg.request] = self._by_key[leg.key] = leg

    def deliver(self, router: Peer, message: Deliver) -> None:
        """Hand the KV to the ticket's decode node, now or once it is computed. A later ticket replaces an earlier one:
        that decode node is gone or full.
        """
        ticket = message.ticket
        leg = self._legs.get(ticket.request)
        if leg is None or leg.router != router:
            reason = "this node has no KV for the request"
            self._outbox.message(router, Refused(ticket.request, ticket.attempt, "deliver", reason, 0.0))
            return
        if leg.ticket is not None and leg.ticket.nonce == ticket.nonce:
            return  # repeated, because the router could not know that the first one came
        if ticket.num_tokens != leg.num_tokens:
            reason = f"the ticket is for {ticket.num_tokens} tokens, not {leg.num_tokens}"
            self._outbox.message(router, Refused(ticket.request, ticket.attempt, "deliver", reason, 0.0))
            return
        self._drop_reader(leg)
        leg.ticket = ticket
        self._commit(leg)

    def cancel(self, request: str, attempt: int, reason: str) -> None:
        """End the leg if it is of this attempt or an earlier one."""
        leg = self._legs.get(request)
        if leg is not None and leg.attempt <= attempt:
            self._end(leg, reason)

    def release(self, request: str) -> None:
        leg = self._legs.get(request)
        if leg is not None and leg.state in (P.PARKED, P.SENT):
            self._end(leg, "released")

    def cancel_router(self, router: Peer) -> None:
        for leg in of_router(self._legs.values(), router):
            self._end(leg, "router lost")

    def keep_only(self, router: Peer, awaited: Set[tuple[str, int]]) -> None:
        """Computed may have been lost with the link, so it goes again."""
        for leg in unawaited(self._legs.values(), router, awaited):
            self._end(leg, "the router no longer waits for it")
        for leg in of_router(self._legs.values(), router):
            if leg.computed_at is not None:
                self._outbox.message(router, Computed(leg.request, leg.attempt, leg.cached_tokens))

    # ------------------------------------------------------------ what the engine and decode nodes say

    def owns(self, key: str) -> bool:
        return key in self._by_key

    def on_output(self, output: EngineOutput) -> None:
        """Of one of our prompts. Its token is dropped: the decode node makes every one."""
        leg = self._by_key[output.key]
        if output.cached_tokens:
            leg.cached_tokens = min(output.cached_tokens, leg.num_tokens)
        if not output.finish:
            return
        if not output.reference:
            self._fail(leg, errors.PdclusterError.code, output.error or "vLLM kept no KV of the prompt", retryable=True)
            return
        now = self._clock()
        leg.state = PROMPT[leg.state, "computed"]
        leg.reference, leg.computed_at = output.reference, now
        leg.holds_until = now + self._parking.deadline_s
        num_blocks = self._queue.blocks_of(leg.num_tokens)
        self._parking.enter(leg.key, [next(self._names) for _ in range(num_blocks)])
        self._outbox.message(leg.router, Computed(leg.request, leg.attempt, leg.cached_tokens))
        self._commit(leg)

    def on_ack(self, peer: Peer, ack: CommitAck) -> bool:
        """A decode node's answer to a Commit of ours. False when it answers none."""
        legs = self._legs.values()
        leg = next((each for each in legs if each.ticket is not None and each.ticket.nonce == ack.nonce), None)
        if leg is None or leg.ticket is None or peer_of(leg.ticket.reader) != peer or leg.state is not P.SENT:
            return False
        if ack.refused:
            reason = f"node {peer.node} could not take the KV: {ack.refused}"
            self._fail(leg, errors.TransferError.code, reason, retryable=True)
            return True
        word = Delivered(leg.request, leg.attempt, self._timings(leg))
        self._ended.add(EndedLeg(leg.router, leg.output, word))
        self._outbox.message(leg.router, word)
        self._end(leg, "delivered")
        return True

    def node_gone(self, peer: Peer) -> None:
        """A decode node is gone. KV that it did not read stays parked for another."""
        for leg in self._legs.values():
            if leg.ticket is not None and peer_of(leg.ticket.reader) == peer:
                self._drop_reader(leg)

    # ------------------------------------------------------------ clocks and questions

    def expire(self) -> None:
        """End legs past a deadline, and repeat Commits that nobody answered."""
        now = self._clock()
        for leg in list(self._legs.values()):
            if now >= leg.deadline:
                reason = "prefill node gave up: the request's deadline passed"
                self._fail(leg, errors.DeadlineExceeded.code, reason, retryable=False)
            elif leg.holds_until is not None and now >= leg.holds_until:
                self._give_up(leg)
            elif leg.resend_at is not None and now >= leg.resend_at:
                self._send_commit(leg)

    def next_deadline(self) -> float | None:
        return min((self._next_of(leg) for leg in self._legs.values()), default=None)

    def find(self, request: str, attempt: int) -> PromptLeg | None:
        leg = self._legs.get(request)
        return leg if leg is not None and leg.attempt == attempt else None

    def end_all(self, code: str, reason: str) -> int:
        legs = list(self._legs.values())
        for leg in legs:
            self._fail(leg, code, reason, retryable=True)
        return len(legs)

    @property
    def num_legs(self) -> int:
        return len(self._legs)

    # ------------------------------------------------------------ inside

    def _on_scheduled(self, leg: PromptLeg) -> None:
        """The prompt went to vLLM."""
        leg.state = PROMPT[leg.state, "add"]
        leg.scheduled_at = self._clock()
        self._outbox.message(leg.router, Scheduled(leg.request, leg.attempt, None))

    def _commit(self, leg: PromptLeg) -> None:
        """Give the reference to the decode node, when both are there and enough of the lease is left."""
        if leg.state is not P.PARKED or leg.ticket is None:
            return
        assert leg.holds_until is not None
        if leg.holds_until - self._clock() < SHORTEST_HOLD_S:
            self._fail(leg, errors.Overloaded.code, "the KV's lease is nearly over", retryable=True)
            return
        leg.state = PROMPT[leg.state, "commit"]
        self._send_commit(leg)

    def _send_commit(self, leg: PromptLeg) -> None:
        assert leg.ticket is not None and leg.holds_until is not None
        now = self._clock()
        leg.resend_at = now + RESEND_S
        commit = Commit(leg.ticket.nonce, 1, (), None, opaque=leg.reference, holds_s=max(leg.holds_until - now, 0.0))
        self._outbox.message(leg.ticket.reader, commit)

    def _give_up(self, leg: PromptLeg) -> None:
        """The lease is nearly over: no decode node had room, or the one that had is slow."""
        after = f"within {self._parking.deadline_s:g} s"
        if leg.state is P.SENT and leg.ticket is not None:
            reason = f"prefill node gave up: node {leg.ticket.reader.node} did not read the KV {after}"
            self._fail(leg, errors.TransferError.code, reason, retryable=True)
        else:
            reason = f"prefill node gave up: no decode node was there for the KV {after}"
            self._fail(leg, errors.Overloaded.code, reason, retryable=True)

    def _drop_reader(self, leg: PromptLeg) -> None:
        """Its decode node reads no more. Whoever reads next is checked by the engine: a reference serves once."""
        if leg.state is P.SENT:
            leg.state = PROMPT[leg.state, "reader lost"]
        leg.ticket = leg.resend_at = None

    def _fail(self, leg: PromptLeg, code: str, reason: str, *, retryable: bool) -> None:
        self._outbox.message(leg.router, Failed(leg.request, leg.attempt, code, reason, retryable))
        self._end(leg, reason, has_failed=True)

    def _end(self, leg: PromptLeg, reason: str, *, has_failed: bool = False) -> None:
        """The engine frees what it has of the prompt."""
        if self._records.wants(leg.trace):
            stages = self._stages(leg)
            self._records.ended(EndedStages("prefill", leg.request, leg.attempt, leg.trace, stages, reason, has_failed))
        self._queue.drop(leg.key, is_parked=leg.state in (P.PARKED, P.SENT))
        self._parking.leave(leg.key)
        leg.state = PROMPT[leg.state, "end"]
        del self._legs[leg.request], self._by_key[leg.key]

    def _next_of(self, leg: PromptLeg) -> float:
        return min(moment for moment in (leg.deadline, leg.holds_until, leg.resend_at) if moment is not None)

    def _stages(self, leg: PromptLeg) -> list[LegStage]:
        now, scheduled, computed = self._clock(), leg.scheduled_at, leg.computed_at
        stages = [LegStage("queue", leg.arrived, now if scheduled is None else scheduled)]
        if scheduled is not None:
            tokens = {"pdcluster.tokens": leg.num_tokens, "pdcluster.cached_tokens": leg.cached_tokens}
            stages.append(LegStage("prefill", scheduled, now if computed is None else computed, tokens))
        if computed is not None:
            stages.append(LegStage("transfer", computed, now, {"pdcluster.transfer.medium": MEDIUM}))
        return stages

    def _timings(self, leg: PromptLeg) -> LegTimings:
        now = self._clock()
        scheduled = leg.scheduled_at if leg.scheduled_at is not None else leg.arrived
        computed = leg.computed_at if leg.computed_at is not None else scheduled
        return LegTimings(
            queue_s=scheduled - leg.arrived,
            prefill_s=computed - scheduled,
            transfer_s=now - computed,
            exposed_s=now - computed,
            cached_tokens=leg.cached_tokens,
            backend=MEDIUM,
        )
