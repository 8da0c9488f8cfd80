"""Rows that vLLM runs to their end here: with KV of a prefill node, or from the prompt on in mode local. In mode local
vLLM may also embed a prompt: its row has no token, and ends with Embedded.

A remote row's life: Reserve → Reserved(ticket) → Commit names the KV → vLLM reads it and makes every token → Finished.
vLLM keeps no room for a row before it has one, so a slot is a promise: the node counts rows and blocks that it gave
away. The first token proves that the prefill node confirmed the read, and answers the Commit. Owned by the node loop's
thread; no sockets here.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum, auto

from pdcluster.core import errors
from pdcluster.core.lifecycle import Table
from pdcluster.core.messages import (
    Commit,
    CommitAck,
    Embedded,
    Endpoint,
    Failed,
    Finished,
    FinishReason,
    LegTimings,
    Pooling,
    Prefill,
    Reserve,
    Reserved,
    Scheduled,
    Ticket,
    Work,
    pack_tokens,
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
from pdcluster.node.reports.leg_records import EndedStages, LegRecorder, LegStage
from pdcluster.node.vllm.engine.interface import EngineFacts, EngineOutput, EngineRequest, Finish
from pdcluster.node.vllm.parked_prompts import MEDIUM, SHORTEST_HOLD_S
from pdcluster.node.vllm.requests import GROWTH_TOKENS, EngineQueue
from pdcluster.node.wait_queue import WaitQueue
from pdcluster.telemetry.tracing import Attribute
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.breaker import Breaker, BreakerSettings
from pdcluster.transfer.protocol.session import peer_of

RETRY_S = 0.1
# Commits that were answered: they may come again.
MAX_ANSWERED = 4096
# Prefill nodes whose failures are counted.
MAX_PEERS = 1024
NEWER = "a newer attempt came"


class RowState(Enum):
    # A local prompt in the node's queue, or a fork whose parent has no token.
    QUEUED = auto()
    # A slot that waits for its Commit.
    RESERVED = auto()
    # vLLM has it, and has said no token.
    STARTED = auto()
    DECODING = auto()
    OVER = auto()


R = RowState
_of_rows: dict[tuple[RowState, str], RowState] = {
    (R.QUEUED, "add"): R.STARTED,
    (R.RESERVED, "commit"): R.STARTED,
    (R.STARTED, "token"): R.DECODING,
    (R.DECODING, "token"): R.DECODING,
    **{(state, "end"): R.OVER for state in R if state is not R.OVER},
}
ROW = Table(_of_rows)


@dataclass(slots=True)
class DecodeRow:
    """A request that is decoded here.

    ticket: of a remote one.
    key: in the engine; "" before it is given to it.
    """

    router: Peer
    work: Work
    deadline: float
    arrived: float
    output: EmittedTokens
    state: RowState
    ticket: Ticket | None = None
    key: str = ""
    fork_of: str | None = None
    # An embedding is wanted, and no token.
    pooling: Pooling | None = None
    cached_tokens: int = 0
    scheduled_at: float | None = None
    first_at: float | None = None

    @property
    def request(self) -> str:
        return self.work.request

    @property
    def attempt(self) -> int:
        return self.work.attempt

    @property
    def num_tokens(self) -> int:
        return len(self.work.token_ids) // 4


class ReaderBreakers:
    """Prefill nodes whose KV could not be read lately. Bounded; the oldest is forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._breakers: OrderedDict[Peer, Breaker] = OrderedDict()

    def check(self, writer: Peer) -> None:
        """Raises Overloaded while KV of this node is left alone."""
        breaker, now = self._breakers.get(writer), self._clock()
        if breaker is not None and not breaker.has_room(now):
            raise errors.Overloaded(
                f"KV of {writer.node} could not be read several times; it is tried again later",
                max(breaker.opens_until - now, RETRY_S),
            )

    def begin(self, writer: Peer) -> None:
        if (breaker := self._breakers.get(writer)) is not None:
            breaker.begin(self._clock())

    def failed(self, writer: Peer, began: float) -> None:
        self._breakers.setdefault(writer, Breaker(BreakerSettings())).failed(began, self._clock())
        while len(self._breakers) > MAX_PEERS:
            self._breakers.popitem(last=False)

    def succeeded(self, writer: Peer, began: float) -> None:
        if (breaker := self._breakers.get(writer)) is not None:
            breaker.succeeded(began, self._clock())

    def forget(self, writer: Peer) -> None:
        self._breakers.pop(writer, None)


class DecodeRows:
    def __init__(
        self,
        me: Endpoint,
        facts: EngineFacts,
        queue: EngineQueue,
        outbox: Outbox,
        ended: EndedLegs,
        records: LegRecorder,
        clock: Callable[[], float],
    ) -> None:
        """me: as prefill nodes name it."""
        self._me, self._facts = me, facts
        self._queue, self._outbox, self._ended, self._records = queue, outbox, ended, records
        self._clock = clock
        self._line = WaitQueue()
        self.breakers = ReaderBreakers(clock)
        self._rows: dict[str, DecodeRow] = {}
        self._by_key: dict[str, DecodeRow] = {}
        self._by_nonce: dict[int, DecodeRow] = {}
        self._answered: OrderedDict[int, CommitAck] = OrderedDict()

    # ------------------------------------------------------------ what a router asks

    def start_local(self, router: Peer, message: Prefill) -> None:
        """Run a request from prompt to end on this node. A fork waits for its parent's first token: then vLLM finds
        the prompt in its cache.
        """
        work = message.work
        self.cancel(work.request, work.attempt, NEWER)
        try:
            check_newest(work, self._rows.get(work.request))
            row = self._enter(router, work, R.QUEUED)
            row.pooling = message.pooling
            parent = self._rows.get(message.fork_of) if message.fork_of is not None else None
            if parent is not None and parent.router == router and parent.state in (R.QUEUED, R.STARTED):
                row.fork_of = parent.request
            else:
                self._push(row)
        except REFUSALS as error:
            entered = self._rows.get(work.request)
            if entered is not None and entered.attempt == work.attempt:
                self._forget(entered)
            self._outbox.message(router, refusal(work, "prefill", error))

    def reserve(self, router: Peer, message: Reserve, *, num_blocks: int) -> None:
        """Reserve a slot and answer with its ticket, or refuse.

        num_blocks: of the pool, without those that parked KV has.
        """
        work = message.work
        self.cancel(work.request, work.attempt, NEWER)
        try:
            check_newest(work, self._rows.get(work.request))
            self.breakers.check(peer_of(message.writer))
            self._take_room(router, work, num_blocks)
        except REFUSALS as error:
            self._outbox.message(router, refusal(work, "reserve", error))
            return
        row = self._enter(router, work, R.RESERVED)
        row.ticket = self._ticket(row, message.writer)
        self._by_nonce[row.ticket.nonce] = row
        self._outbox.message(router, Reserved(row.ticket))

    def cancel(self, request: str, attempt: int, reason: str) -> None:
        """End the row if it is of this attempt or an earlier one. The request asks for no slot here any more."""
        if reason != NEWER:
            self._line.leave(request)
        row = self._rows.get(request)
        if row is not None and row.attempt <= attempt:
            self._end(row, reason)

    def cancel_router(self, router: Peer) -> None:
        self._line.leave_router(router)
        for row in of_router(self._rows.values(), router):
            self._end(row, "router lost")

    def keep_only(self, router: Peer, awaited: Set[tuple[str, int]]) -> None:
        self._line.leave_router(router, {request for request, _ in awaited})
        for row in unawaited(self._rows.values(), router, awaited):
            self._end(row, "the router no longer waits for it")

    # ------------------------------------------------------------ what prefill nodes and the engine say

    def on_commit(self, peer: Peer, commit: Commit) -> None:
        """The KV of a slot is there: have vLLM read it. Repeated ones change nothing."""
        row = self._by_nonce.get(commit.nonce)
        if row is not None and row.ticket is not None and peer_of(row.ticket.writer) == peer:
            if row.state is R.RESERVED:
                self._read(row, row.ticket, commit)
            return
        answer = self._answered.get(commit.nonce)
        self._outbox.message(peer, answer or CommitAck(commit.nonce, refused="the ticket is not known here"))

    def owns(self, key: str) -> bool:
        return key in self._by_key

    def on_output(self, output: EngineOutput) -> None:
        """Of one of our rows: tokens for the router, and perhaps the row's end."""
        row = self._by_key[output.key]
        if output.finish in ("error", "abort"):
            self._on_error(row, output)
            return
        if output.cached_tokens and row.ticket is None:  # else it contains what was read
            row.cached_tokens = min(output.cached_tokens, row.num_tokens)
        if output.prompt_logprobs and not row.output.tokens:
            row.output.prompt_logprobs.extend(output.prompt_logprobs)
        if output.tokens:
            self._on_tokens(row, output)
        if output.finish and row.pooling is not None:
            self._close(row, Embedded(row.request, row.attempt, output.vector, self._timings(row)), "embedded")
        elif output.finish:
            self._finish(row, output.finish, output.stop_token)

    def node_gone(self, peer: Peer) -> None:
        """A prefill node is gone. Slots that wait for its KV end."""
        self.breakers.forget(peer)
        for row in list(self._rows.values()):
            if row.state is R.RESERVED and row.ticket is not None and peer_of(row.ticket.writer) == peer:
                self._fail(row, errors.TransferError.code, f"prefill node {peer.node} is gone")

    # ------------------------------------------------------------ clocks and questions

    def expire(self) -> None:
        now = self._clock()
        for row in [row for row in self._rows.values() if now >= row.deadline]:
            reason = "decode node gave up: the request's deadline passed"
            self._fail(row, errors.DeadlineExceeded.code, reason, retryable=False)

    def next_deadline(self) -> float | None:
        return min((row.deadline for row in self._rows.values()), default=None)

    def find(self, request: str, attempt: int) -> DecodeRow | None:
        row = self._rows.get(request)
        return row if row is not None and row.attempt == attempt else None

    def end_all(self, code: str, reason: str) -> int:
        rows = list(self._rows.values())
        for row in rows:
            self._fail(row, code, reason)
        return len(rows)

    @property
    def num_legs(self) -> int:
        return len(self._rows)

    @property
    def num_rows(self) -> int:
        """Rows that vLLM has or that are promised to prefill nodes."""
        return sum(row.state is not R.QUEUED for row in self._rows.values())

    @property
    def num_promised_blocks(self) -> int:
        """Blocks of these rows, with room to grow."""
        return sum(self._blocks_of(row.work) for row in self._rows.values() if row.state is not R.QUEUED)

    @property
    def context_tokens(self) -> int:
        return sum(row.num_tokens + len(row.output.tokens) for row in self._rows.values() if row.state is R.DECODING)

    # ------------------------------------------------------------ inside

    def _take_room(self, router: Peer, work: Work, num_blocks: int) -> None:
        """Raises Overloaded, and keeps the request's place in line, when there is no room."""
        now = self._clock()
        try:
            if not self._line.may_try(work.request, now):
                raise errors.Overloaded("requests that asked earlier wait for a slot; retry later", RETRY_S)
            if self.num_rows >= self._facts.max_rows:
                raise errors.Overloaded(f"all {self._facts.max_rows} rows are taken; retry later", RETRY_S)
            if self.num_rows and self.num_promised_blocks + self._blocks_of(work) > num_blocks:
                raise errors.Overloaded(f"{num_blocks} KV blocks have no room for the request; retry later", RETRY_S)
        except errors.Overloaded as error:
            self._line.refused(work.request, router, now, error.retry_after_s)
            raise
        self._line.served(work.request)

    def _blocks_of(self, work: Work) -> int:
        num_tokens = len(work.token_ids) // 4
        left = max(work.num_prompt + work.sampling.max_tokens - num_tokens, 0)
        return self._queue.blocks_of(min(num_tokens + min(left, GROWTH_TOKENS), self._facts.max_len))

    def _ticket(self, row: DecodeRow, writer: Endpoint) -> Ticket:
        """vLLM places the KV itself, so the ticket's pages are one that stands for all."""
        return Ticket(
            nonce=secrets.randbits(63),
            request=row.request,
            attempt=row.attempt,
            reader=self._me,
            writer=writer,
            region=0,
            pages=pack_tokens([0]),
            page_tokens=row.num_tokens,
            page_bytes=row.num_tokens * self._facts.token_bytes,
            num_tokens=row.num_tokens,
            cached_tokens=0,
            deadline_s=row.deadline - self._clock(),
        )

    def _enter(self, router: Peer, work: Work, state: RowState) -> DecodeRow:
        now = self._clock()
        row = DecodeRow(router, work, now + work.deadline_s, now, EmittedTokens.of(work), state)
        self._rows[row.request] = row
        return row

    def _push(self, row: DecodeRow) -> None:
        """Raises Overloaded and BadRequest."""
        request = self._queue.request_of(row.work, pooling=row.pooling)
        self._give_key(row, request)
        row.fork_of = None
        self._queue.push(request, lambda: self._on_scheduled(row))

    def _on_scheduled(self, row: DecodeRow) -> None:
        row.state = ROW[row.state, "add"]
        row.scheduled_at = self._clock()
        self._outbox.message(row.router, Scheduled(row.request, row.attempt, None))

    def _read(self, row: DecodeRow, ticket: Ticket, commit: Commit) -> None:
        writer = peer_of(ticket.writer)
        if not commit.opaque or commit.holds_s < SHORTEST_HOLD_S:
            why = "it names no KV" if not commit.opaque else f"its KV holds for {commit.holds_s:.1f} s only"
            self._answer(ticket, why)
            self._fail(row, errors.TransferError.code, f"prefill node {writer.node} sent a Commit, but {why}")
            return
        request = self._queue.request_of(row.work, reference=commit.opaque)
        self._give_key(row, request)
        row.state = ROW[row.state, "commit"]
        row.scheduled_at = self._clock()
        self.breakers.begin(writer)
        self._queue.add_row(request)

    def _give_key(self, row: DecodeRow, request: EngineRequest) -> None:
        row.key = request.key
        self._by_key[row.key] = row

    def _on_tokens(self, row: DecodeRow, output: EngineOutput) -> None:
        is_first = row.state is R.STARTED
        row.state = ROW[row.state, "token"]
        if is_first:
            row.first_at = self._clock()
            self._queue.is_computed(row.key)
            if row.ticket is not None:
                self.breakers.succeeded(peer_of(row.ticket.writer), self._began(row))
                self._answer(row.ticket, "")
        position = row.output.num_output
        row.output.tokens.extend(output.tokens)
        row.output.logprobs.extend(output.logprobs)
        self._outbox.row(row.router, row.output.since(position))
        if is_first:
            self._start_forks(row)

    def _start_forks(self, parent: DecodeRow) -> None:
        for fork in [each for each in self._rows.values() if each.fork_of == parent.request]:
            try:
                self._push(fork)
            except REFUSALS as error:
                self._fail(fork, error.code, str(error), retryable=error.retryable)

    def _on_error(self, row: DecodeRow, output: EngineOutput) -> None:
        """vLLM gave the row up. Before its first token a remote row's KV is at fault."""
        reason = output.error or f"vLLM ended it: {output.finish}"
        code = errors.TransferError.code if output.is_failed_read else errors.PdclusterError.code
        if output.is_bad_request:
            code = errors.BadRequest.code
        if output.is_failed_read and row.ticket is not None:
            self.breakers.failed(peer_of(row.ticket.writer), self._began(row))
        word = Failed(row.request, row.attempt, code, reason, not output.is_bad_request, output.param)
        self._outbox.message(row.router, word)
        self._end(row, reason, has_failed=True, is_ended=True)

    def _finish(self, row: DecodeRow, finish: Finish, stop_token: int | None) -> None:
        reason: FinishReason = "eos" if finish == "eos" else "stop" if finish == "stop" else "length"
        num_output = row.output.num_output
        self._close(row, Finished(row.request, row.attempt, reason, num_output, self._timings(row), stop_token), reason)

    def _close(self, row: DecodeRow, word: Finished | Embedded, reason: str) -> None:
        """The row ended well."""
        self._ended.add(EndedLeg(row.router, row.output, word))
        self._outbox.message(row.router, word)
        self._record(row, reason)
        self._forget(row)

    def _began(self, row: DecodeRow) -> float:
        return row.scheduled_at if row.scheduled_at is not None else row.arrived

    def _answer(self, ticket: Ticket, refused: str) -> None:
        self._by_nonce.pop(ticket.nonce, None)
        ack = CommitAck(ticket.nonce, refused=refused)
        self._answered[ticket.nonce] = ack
        while len(self._answered) > MAX_ANSWERED:
            self._answered.popitem(last=False)
        self._outbox.message(ticket.writer, ack)

    def _fail(self, row: DecodeRow, code: str, reason: str, *, retryable: bool = True) -> None:
        """Idempotent."""
        if self._rows.get(row.request) is not row:
            return
        self._outbox.message(row.router, Failed(row.request, row.attempt, code, reason, retryable))
        self._end(row, reason, has_failed=True)

    def _end(self, row: DecodeRow, reason: str, *, has_failed: bool = False, is_ended: bool = False) -> None:
        """Drop the row. A prefill node whose KV was being read is told so; nobody else may read it then. Idempotent: a
        parent's end takes its forks along.
        """
        if self._rows.get(row.request) is not row:
            return
        if row.ticket is not None and row.state is R.STARTED and row.ticket.nonce in self._by_nonce:
            self._answer(row.ticket, reason)
        if row.key and not is_ended:
            self._queue.drop(row.key)
        self._record(row, reason, has_failed=has_failed)
        self._forget(row)

    def _forget(self, row: DecodeRow) -> None:
        row.state = ROW[row.state, "end"]
        del self._rows[row.request]
        self._by_key.pop(row.key, None)
        if row.ticket is not None:
            self._by_nonce.pop(row.ticket.nonce, None)
        for fork in [each for each in self._rows.values() if each.fork_of == row.request]:
            self._fail(fork, errors.Overloaded.code, "the choice whose KV it was to share has ended here")

    def _record(self, row: DecodeRow, reason: str, *, has_failed: bool = False) -> None:
        if self._records.wants(row.work.trace):
            name, work = "decode" if row.ticket is not None else "local", row.work
            stages = self._stages(row)
            self._records.ended(EndedStages(name, work.request, work.attempt, work.trace, stages, reason, has_failed))

    def _stages(self, row: DecodeRow) -> list[LegStage]:
        now = self._clock()
        scheduled = now if row.scheduled_at is None else row.scheduled_at
        first = now if row.first_at is None else row.first_at
        names = ("reserve", "transfer") if row.ticket is not None else ("queue", "prefill")
        cached: dict[str, Attribute] = {"pdcluster.cached_tokens": row.cached_tokens}
        if row.ticket is not None:
            cached["pdcluster.transfer.medium"] = MEDIUM
        stages = [LegStage(names[0], row.arrived, scheduled)]
        if row.scheduled_at is not None:
            stages.append(LegStage(names[1], scheduled, first, cached))
        if row.first_at is not None:
            stages.append(LegStage("decode", first, now, {"pdcluster.tokens": max(len(row.output.tokens) - 1, 0)}))
        return stages

    def _timings(self, row: DecodeRow) -> LegTimings:
        now = self._clock()
        scheduled = row.scheduled_at if row.scheduled_at is not None else row.arrived
        first = row.first_at if row.first_at is not None else now
        return LegTimings(
            queue_s=scheduled - row.arrived,
            prefill_s=first - scheduled if row.ticket is None else 0.0,
            decode_s=now - first,
            decode_tokens=max(len(row.output.tokens) - 1, 0),
            cached_tokens=row.cached_tokens,
        )
