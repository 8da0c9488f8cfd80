"""The native engine of a node: where scheduler, step engine and transfer meet.

Each turn takes in the last step, moves transfers on and launches the next step. Messages are handled while a step runs
in the engine's thread. With `looks_ahead`, the results of the step before it are, too, and the engine has its next step
early.
"""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import replace

from pdcluster.core.errors import DeadlineExceeded, IntegrityError, NodeStuck
from pdcluster.core.messages import (
    Abort,
    AbortAck,
    AdapterManaged,
    AnyMessage,
    Commit,
    CommitAck,
    Declined,
    Deliver,
    Fetch,
    Load,
    ManageAdapter,
    Prefill,
    RefusedLeg,
    Reserve,
    Work,
)
from pdcluster.core.step import RowError, StepPlan
from pdcluster.kv.pages import PagePool
from pdcluster.node.control import NodeLeg
from pdcluster.node.native.components import NodeComponents
from pdcluster.node.reports.health import NodeHealth, NodeSnapshot
from pdcluster.node.reports.load_report import by_reason, path_loads
from pdcluster.scheduler.sequence import Sequence
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.protocol.session import Send, peer_of

logger = logging.getLogger(__name__)

# done_fd was readable, so the result comes at once.
COLLECT_S = 5.0

# Failed steps in a row before the node gives up.
MAX_FAILURES = 3

RECOUNT_PAGES = 4096


class NativeSide:
    def __init__(
        self,
        parts: NodeComponents,
        *,
        clock: Callable[[], float],
        looks_ahead: bool = False,
        health: NodeHealth | None = None,
    ) -> None:
        """looks_ahead: plan the next step of decode rows before the tokens of the running one are known.
        health: told of every step; None: nobody looks.
        """
        if health is not None:
            parts.stopwatch.on_step = health.step
        self._parts = parts
        self._links = parts.links
        self._looks_ahead = looks_ahead
        self._clock = clock
        # Launched and not collected, oldest first.
        self._in_flight: deque[StepPlan] = deque()
        # The step in flight stands behind a failed one.
        self._is_behind_failure = False
        self._steps = 0
        # Steps that failed since start, and in a row.
        self._num_failed = 0
        self._failures = 0
        self._done = select.poll()
        self._done.register(parts.engine.done_fd, select.POLLIN)
        self._milestone = select.poll()
        self._milestone.register(parts.engine.layer_fd, select.POLLIN)

    @property
    def cache(self) -> PagePool:
        return self._parts.pages

    def turn(self) -> None:
        self._take_grammars()
        self._watch_layers()
        self._collect()
        self._watch_engine()
        self._handle_transfers()
        self._expire()
        self._launch()

    # ------------------------------------------------------------ waiting

    def wakeups(self) -> Iterable[int]:
        parts = self._parts
        yield parts.engine.done_fd
        yield parts.engine.layer_fd
        if parts.grammars.news_fd is not None:
            yield parts.grammars.news_fd
        for backend in parts.backends:
            yield backend.wakeup_fd

    def next_deadline(self) -> float | None:
        parts = self._parts
        clocks = (
            parts.prefill.next_deadline(),
            parts.decode.next_deadline(),
            parts.writer.next_deadline(),
            parts.reader.next_deadline(),
            parts.grammars.next_deadline(),
        )
        return min((moment for moment in clocks if moment is not None), default=None)

    # ------------------------------------------------------------ what a router asks

    def prefill(self, router: Peer, message: Prefill) -> None:
        if self._parts.grammars.admit(router, message):
            self._on_prefill(router, message)

    def reserve(self, router: Peer, message: Reserve) -> None:
        if self._parts.grammars.admit(router, message):
            self._on_reserve(router, message)

    def deliver(self, router: Peer, message: Deliver) -> None:
        if not self._parts.grammars.keep_ticket(router, message):
            self._parts.prefill.deliver(router, message)

    def cancel(self, request: str, attempt: int, reason: str) -> None:
        for side in (self._parts.prefill, self._parts.decode):
            side.cancel(request, attempt, reason)
        self._parts.grammars.cancel(request, attempt)

    def release(self, request: str) -> None:
        self._parts.prefill.release(request)

    def find(self, request: str, attempt: int) -> NodeLeg | None:
        return self._parts.prefill.find(request, attempt) or self._parts.decode.find(request, attempt)

    def awaits(self, request: str, attempt: int) -> bool:
        return self._parts.grammars.has(request, attempt)

    def cancel_router(self, router: Peer) -> None:
        self._parts.grammars.cancel_router(router)
        self._parts.prefill.cancel_router(router)
        self._parts.decode.cancel_router(router)

    def keep_only(self, router: Peer, awaited: Set[tuple[str, int]]) -> None:
        self._parts.prefill.keep_only(router, awaited)
        self._parts.decode.keep_only(router, awaited)
        self._parts.grammars.keep_only(router, awaited)

    def end_all(self, code: str, reason: str) -> int:
        """Cached KV stays, so other nodes may fetch it."""
        num_ended = 0
        for side in (self._parts.prefill, self._parts.decode):
            keys = list(side.keys())
            num_ended += len(keys)
            for key in keys:
                side.fail(key, reason, code=code)
        return num_ended

    def _take_grammars(self) -> None:
        """Go on with work whose grammar is compiled."""
        grammars, parts = self._parts.grammars, self._parts
        if grammars.is_full:
            grammars.trim(parts.prefill.grammars | parts.decode.grammars)
        for router, message in grammars.ready():
            if isinstance(message, Prefill):
                self._on_prefill(router, message)
            elif isinstance(message, Deliver):
                parts.prefill.deliver(router, message)
            else:
                self._on_reserve(router, message)

    def _on_prefill(self, router: Peer, message: Prefill) -> None:
        is_pooled = message.pooling is not None
        sequence = self._accept(router, message.work, "prefill", remote=message.remote, is_pooled=is_pooled)
        if sequence is None:
            return
        if message.remote:
            self._parts.prefill.start(router, message, sequence)
        else:
            self._parts.decode.start_local(router, message, sequence)
        if message.pull is not None and message.fork_of is None:
            self._parts.fetch.start(sequence, message.pull, message.work.deadline_s)

    def _on_reserve(self, router: Peer, message: Reserve) -> None:
        sequence = self._accept(router, message.work, "reserve", remote=False)
        if sequence is not None:
            self._parts.decode.reserve(router, message, sequence)

    def _accept(
        self, router: Peer, work: Work, leg: RefusedLeg, *, remote: bool, is_pooled: bool = False
    ) -> Sequence | None:
        """The work as a sequence. None when the node takes no new work, or not this; the router was answered."""
        acceptance, made = self._links.acceptance, list[Sequence]()
        if acceptance.takes(router, work, leg, is_stuck=self.is_stuck, is_pooled=is_pooled):
            acceptance.check(
                router, work, leg, lambda work: made.append(self._parts.sequences.make(work, remote=remote))
            )
        return made[0] if made else None

    def manage_adapter(self, router: Peer, message: ManageAdapter) -> None:
        error = "this node runs the native engine, which has no LoRA adapters; nodes with --engine vllm have"
        self._links.outbox.message(router, AdapterManaged(message.number, error))

    # ------------------------------------------------------------ what other nodes say

    def node_message(self, peer: Peer, message: AnyMessage) -> bool:
        parts = self._parts
        if isinstance(message, CommitAck | Abort):
            parts.writer.handle(peer, message)
        elif isinstance(message, Commit | AbortAck):
            parts.reader.handle(peer, message)
        elif isinstance(message, Fetch):
            parts.export.open(peer, message)
        elif isinstance(message, Declined):
            parts.fetch.on_declined(peer, message)
        else:
            return False
        return True

    def node_gone(self, peer: Peer) -> None:
        self._parts.writer.peer_gone(peer)
        self._parts.reader.peer_gone(peer)
        self._parts.fetch.forget(peer)

    # ------------------------------------------------------------ steps

    def _watch_layers(self) -> None:
        """Send layers of the running step that are ready."""
        engine = self._parts.engine
        if not self._milestone.poll(0):
            return
        os.eventfd_read(engine.layer_fd)
        if self._in_flight:
            self._parts.prefill.on_layers(engine.layers_done)

    def _watch_engine(self) -> None:
        """A stuck engine's work moves to other nodes, and new work is refused. Its step is the probe: once that gets
        on, the node takes work again. Rows of that step keep their pages until then.
        """
        parts, was_stuck = self._parts, self.is_stuck
        plan = self._in_flight[0] if self._in_flight else None
        signs = self._steps, self._num_failed, parts.engine.progress
        parts.stuck.look(plan, signs, is_compiling=parts.engine.is_compiling)
        if self.is_stuck and not was_stuck:
            stood_s = parts.stuck.stood_s
            reason = f"node {self._links.me.node} is stuck: its engine made no progress for {stood_s:.1f} s"
            num_moved = self.end_all(NodeStuck.code, reason)
            logger.error("the engine made no progress for %.1f s: %d requests move to other nodes", stood_s, num_moved)
        elif was_stuck and not self.is_stuck:
            logger.warning("the engine makes progress again: the node takes work")

    @property
    def is_stuck(self) -> bool:
        return self._parts.stuck.is_stuck

    def _collect(self) -> None:
        """Take in the results of a finished step."""
        parts = self._parts
        if not self._in_flight or not self._done.poll(0):
            return
        plan = self._in_flight[0]
        try:
            result = parts.engine.collect(COLLECT_S)
        except DeadlineExceeded:
            logger.error("the engine said that a step is done, but gave no result for %g s; waiting on", COLLECT_S)
            return
        except (
            Exception
        ) as error:  # the top of the engine's work: its rows fail, and the node goes on unless the engine keeps failing
            self._in_flight.popleft()
            self._fail_step(plan, error)
            return
        self._in_flight.popleft()
        parts.stopwatch.done(plan)
        if self._in_flight:  # the engine went on with it by itself
            parts.stopwatch.ready()
            parts.stopwatch.launched()
        self._failures = 0
        self._is_behind_failure = False
        self._steps += 1
        for update in parts.scheduler.update(plan, result):
            if update.error is not None:
                self._fail_row(update.key, update.error)
            elif parts.prefill.owns(update.key):
                parts.prefill.on_update(update)
            elif parts.decode.owns(update.key):
                parts.decode.on_update(update)
        parts.prefill.on_step(plan)

    def _fail_row(self, key: str, error: RowError) -> None:
        """One row cannot go on. Results of other rows stand."""
        logger.warning("%s ends: %s", key, error.reason)
        self._parts.prefill.fail(key, error.reason, retryable=error.retryable, param=error.param)
        self._parts.decode.fail(key, error.reason, retryable=error.retryable, param=error.param)

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """The step computed nothing: its requests may try another node. Raises when the engine keeps failing. A step
        fails with the one before it.
        """
        self._failures += not self._is_behind_failure
        self._num_failed += 1
        self._is_behind_failure = bool(self._in_flight)
        logger.error("a step of %d rows failed", len(plan.rows), exc_info=error)
        if self._failures >= MAX_FAILURES:
            raise error
        self._parts.scheduler.drop_step()
        for row in plan.rows:
            self._parts.prefill.fail(row.request, f"the engine failed: {error}")
            self._parts.decode.fail(row.request, f"the engine failed: {error}")

    def _launch(self) -> None:
        if not self._in_flight:
            self._launch_next()
        if self._looks_ahead and len(self._in_flight) == 1 and not self._is_behind_failure:
            self._launch_ahead()

    def _launch_next(self) -> None:
        self._parts.stopwatch.ready()
        plan = self._parts.scheduler.schedule()
        if plan is not None:
            self._parts.stopwatch.launched()
            self._parts.engine.launch(replace(plan, milestones=self._parts.prefill.milestones(plan)))
            self._in_flight.append(plan)
            self._parts.prefill.on_launch(plan)
            self._parts.decode.on_launch(plan)

    def _launch_ahead(self) -> None:
        """Launch a step behind the running one. It has no prefill rows, so no milestones, and no request leaves the
        queue for it.
        """
        plan = self._parts.scheduler.look_ahead()
        if plan is not None:
            self._parts.engine.launch(plan)
            self._in_flight.append(plan)

    # ------------------------------------------------------------ transfers and clocks

    def _handle_transfers(self) -> None:
        """The reader first: it clears the wake-up that both share."""
        parts = self._parts
        for report in parts.reader.poll():
            if isinstance(report, Send):
                self._send(report)
            elif parts.fetch.owns(report.nonce):
                parts.fetch.on_event(report)
            else:
                parts.decode.on_event(report)
        for event in parts.writer.poll():
            if isinstance(event, Send):
                self._send(event)
            elif parts.export.owns(event.nonce):
                parts.export.on_event(event)
            else:
                parts.prefill.on_event(event)

    def _send(self, event: Send) -> None:
        """Send a transfer event's message. A peer known only by its boot is answered on the link that it opened."""
        self._links.hub.send(event.to if event.to.address else peer_of(event.to), event.message)

    def _expire(self) -> None:
        self._parts.prefill.expire()
        self._parts.decode.expire()
        self._parts.fetch.expire()

    # ------------------------------------------------------------ load and idleness

    @property
    def is_idle(self) -> bool:
        return self.is_quiet and not self._parts.pages.num_quarantined

    @property
    def is_quiet(self) -> bool:
        return not (self._in_flight or self.num_open or self.num_pinned)

    @property
    def num_open(self) -> int:
        parts = self._parts
        return parts.prefill.num_legs + parts.decode.num_legs + parts.fetch.num_open + len(parts.grammars)

    def check_integrity(self) -> None:
        """Raises IntegrityError when something leaked. A pool too large for a quick recount is judged by its
        counters.
        """
        pages = self._parts.pages
        if pages.num_used or pages.num_quarantined:
            raise IntegrityError(
                f"the node is idle, but {pages.num_used} KV pages are in use and {pages.num_quarantined} in quarantine"
            )
        if pages.num_pages <= RECOUNT_PAGES:
            self._parts.scheduler.check_integrity()
            self._parts.fetch.check_integrity()

    @property
    def num_pinned(self) -> int:
        return self._parts.prefill.num_pinned + self._parts.export.num_pinned

    def load(self) -> Load:
        scheduler, pages = self._parts.scheduler.load(), self._parts.pages
        return Load(
            waiting=scheduler.waiting,
            running=scheduler.running,
            waiting_tokens=scheduler.waiting_tokens,
            waiting_pairs=scheduler.waiting_pairs,
            rows=scheduler.rows,
            context_tokens=scheduler.context_tokens,
            pages_total=pages.num_pages,
            pages_free=pages.num_free,
            pages_cached=pages.num_cached,
            pages_quarantined=pages.num_quarantined,
            pages_pinned=self.num_pinned,
            slots=self._parts.max_rows,
            slots_used=scheduler.slots_used,
            pages_parked=self._parts.prefill.num_parked_pages,
            draining=not self._links.standing.takes_work,
            role=self._links.standing.role,
            steps=self._steps,
            cost=self._parts.stopwatch.report(),
            itl_s=self._parts.stopwatch.itl_s,
            paths=path_loads(self._parts.writer.paths),
            failed_writes=by_reason(self._parts.writer.ladder.failures),
            resent_chunks=by_reason(self._parts.writer.ladder.resends),
            pulls=by_reason(self._parts.fetch.counters),
            stuck=self.is_stuck,
            batch_tokens=scheduler.batch_tokens,
            batch_rows=scheduler.batch_rows,
        )

    def snapshot(self) -> NodeSnapshot:
        parts, scheduler = self._parts, self._parts.scheduler
        return NodeSnapshot(
            load=self.load(),
            stood_s=parts.stuck.stood_s if self._in_flight else 0.0,
            is_draining=self._links.standing.is_draining,
            is_cordoned=self._links.standing.is_cordoned,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            paths=parts.writer.paths.totals(),
        )
