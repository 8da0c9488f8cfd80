"""The node's one loop, where scheduler, engine and transfer meet.

Each turn drains the inbox, takes in the last step, moves transfers on, launches the next step and reports. One thread
runs it and owns all it touches (scheduler, pages, both sides, hub). It blocks only in `_wait`, which ends when a
socket, the engine, a backend or the stop signal has something, or the next timer fires. Messages are handled while a
step runs in the engine's thread. With `looks_ahead`, the results of the step before it are, too, and the engine has its
next step early.
"""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

import zmq
from msgspec import structs

from pdcluster.core.errors import BadRequest, DeadlineExceeded, IntegrityError, NodeDrains, NodeStuck
from pdcluster.core.messages import (
    MODEL_PARAM,
    Abort,
    AbortAck,
    AnyMessage,
    AskCache,
    Cancel,
    Commit,
    CommitAck,
    Declined,
    Deliver,
    Fetch,
    FetchFile,
    Hello,
    Load,
    Manage,
    Prefill,
    Refused,
    RefusedLeg,
    Release,
    Reserve,
    Welcome,
    Work,
)
from pdcluster.core.step import RowError, StepPlan
from pdcluster.node.components import NodeComponents
from pdcluster.node.reports.health import NodeHealth, NodeSnapshot
from pdcluster.node.reports.load_report import Reporter, by_reason, path_loads
from pdcluster.scheduler.sequence import Sequence
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.protocol.session import Send, peer_of
from pdcluster.wire.hub import LeaseEnded, LinkLost, Received

logger = logging.getLogger(__name__)

# done_fd was readable, so the result comes at once.
COLLECT_S = 5.0

# Failed steps in a row before the node gives up.
MAX_FAILURES = 3

RECOUNT_PAGES = 4096

# Time for a drained node's last frames to leave.
LINGER_S = 0.5

# Idle time before the books are recounted, once.
IDLE_CHECK_S = 1.0

# The hub's heartbeats and leases need a look this often.
LONGEST_WAIT_S = 0.1

# Time for a draining node's last transfers, once its requests moved.
MOVE_S = 5.0


class NodeLoop:
    def __init__(
        self,
        parts: NodeComponents,
        *,
        report_s: float,
        drain_s: float,
        clock: Callable[[], float],
        looks_ahead: bool = False,
        health: NodeHealth | None = None,
        models: Collection[str] = (),
    ) -> None:
        """looks_ahead: plan the next step of decode rows before the tokens of the running one are known.
        health: told of every turn; None: nobody looks.
        models: digests of what the node serves (NodeCard.model_digest); none: requests for any are taken.
        """
        self._models = frozenset(models)
        self._health = health
        if health is not None:
            parts.stopwatch.on_step = health.step
        self._parts = parts
        self._looks_ahead = looks_ahead
        self._drain_s = drain_s
        self._clock = clock
        self._reporter = Reporter(
            parts.pages, self._load, interval_s=report_s, clock=clock, seen=parts.hub.last_received
        )
        # Launched and not collected, oldest first.
        self._in_flight: deque[StepPlan] = deque()
        # The step in flight stands behind a failed one.
        self._is_behind_failure = False
        self._steps = 0
        # Steps that failed since start, and in a row.
        self._num_failed = 0
        self._failures = 0
        # When running work moves to other nodes, and then when the node ends whatever is left.
        self._drain_until: float | None = None
        self._has_moved = False
        self._idle_since = clock()
        self._is_checked = True
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._polled: list[object] = []
        self._done = select.poll()
        self._done.register(parts.engine.done_fd, select.POLLIN)
        self._milestone = select.poll()
        self._milestone.register(parts.engine.layer_fd, select.POLLIN)

    def stop(self) -> None:
        """Ask the loop to drain and return. Safe from signal handlers and other threads."""
        os.eventfd_write(self._stop_fd, 1)

    def run(self) -> None:
        """Serve until `stop`, then until running work is done. What still runs at the drain deadline moves to other
        nodes. Raises what the engine raises: the node is broken then.
        """
        try:
            while not self._is_over():
                self._wait()
                self.turn()
            self._parts.outbox.flush(self._parts.hub)
            self._parts.hub.close(LINGER_S)
        finally:
            os.close(self._stop_fd)

    def turn(self) -> None:
        """One pass over everything that may have news."""
        self._handle_messages()
        self._watch_layers()
        self._collect()
        self._watch_engine()
        self._handle_transfers()
        self._expire()
        self._launch()
        self._reporter.report(self._tell)
        self._parts.outbox.flush(self._parts.hub)
        self._parts.hub.tick()
        self._check_idle()
        if self._health is not None:
            self._health.turn(self._snapshot)

    # ------------------------------------------------------------ waiting

    def _wait(self) -> None:
        parts = self._parts
        watched = [
            *parts.hub.sockets(),
            parts.engine.done_fd,
            parts.engine.layer_fd,
            parts.neighbours.wakeup_fd,
            self._stop_fd,
            *(() if parts.grammars.news_fd is None else (parts.grammars.news_fd,)),
            *(b.wakeup_fd for b in parts.backends),
        ]
        if watched != self._polled:
            self._poller = zmq.Poller()
            for item in watched:
                self._poller.register(item, zmq.POLLIN)
            self._polled = watched
        ready = dict(self._poller.poll(self._wait_ms()))
        if self._stop_fd in ready:
            os.eventfd_read(self._stop_fd)
            self._start_draining()

    def _wait_ms(self) -> int:
        parts = self._parts
        clocks = (
            parts.prefill.next_deadline(),
            parts.decode.next_deadline(),
            parts.writer.next_deadline(),
            parts.reader.next_deadline(),
            parts.grammars.next_deadline(),
            self._reporter.next_deadline(),
        )
        now = self._clock()
        wait_s = min([LONGEST_WAIT_S, *(moment - now for moment in clocks if moment is not None)])
        return max(0, int(wait_s * 1000 + 0.999))

    def _start_draining(self) -> None:
        if self._drain_until is None:
            logger.info(
                "draining: %d requests are still here", self._parts.prefill.num_legs + self._parts.decode.num_legs
            )
            self._drain_until = self._clock() + self._drain_s
            self._parts.standing.drain()

    def _is_over(self) -> bool:
        if self._drain_until is None:
            return False
        if self._has_moved and self._clock() >= self._drain_until:
            logger.warning("the node ends although %d requests or transfers are not done", self._num_open)
            return True
        return self._is_idle() or (self._is_stuck and not self._num_open)

    def _move_at_deadline(self) -> None:
        """Give what still runs at the drain deadline to other nodes, once, and leave transfers a little more time."""
        if self._drain_until is None or self._has_moved or (now := self._clock()) < self._drain_until:
            return
        self._has_moved, self._drain_until = True, now + MOVE_S
        num_moved = self._move_work(NodeDrains.code, "gives its work to other nodes")
        logger.warning("the drain deadline of %g s passed: %d requests move to other nodes", self._drain_s, num_moved)

    def _move_work(self, code: str, why: str) -> int:
        """End what runs or waits here, so that routers go on with it elsewhere. Returns how many requests.

        Their KV stays cached: other nodes may fetch it.
        """
        reason, num_moved = f"node {self._parts.me.node} {why}", 0
        for side in (self._parts.prefill, self._parts.decode):
            keys = list(side.keys())
            num_moved += len(keys)
            for key in keys:
                side.fail(key, reason, code=code)
        return num_moved

    # ------------------------------------------------------------ messages

    def _handle_messages(self) -> None:
        hub, grammars = self._parts.hub, self._parts.grammars
        if grammars.is_full:
            grammars.trim(self._parts.prefill.grammars | self._parts.decode.grammars)
        for received in hub.receive():
            self._on_message(received)
        for event in hub.events():
            if isinstance(event, LeaseEnded):
                self._lose_router(event.peer)
            if isinstance(event, LinkLost):
                self._lose_node(event.peer)
        for peer in self._parts.neighbours.gone():
            self._lose_node(peer)
        for router, message in grammars.ready():
            self._on_work(router, message)

    def _on_message(self, received: Received) -> None:
        parts, peer, message = self._parts, received.peer, received.message
        if received.kind == "node" and isinstance(message, CommitAck | Abort):
            parts.writer.handle(peer, message)
        elif received.kind == "node" and isinstance(message, Commit | AbortAck):
            parts.reader.handle(peer, message)
        elif received.kind == "node" and isinstance(message, Fetch):
            parts.export.open(peer, message)
        elif received.kind == "node" and isinstance(message, Declined):
            parts.fetch.on_declined(peer, message)
        elif received.kind == "router":
            self._on_router_message(peer, message)
        elif isinstance(message, Hello):
            parts.hub.send(peer, Welcome(parts.standing.role))
        elif not isinstance(message, Welcome):
            logger.warning("node %s sent a %s, which only routers send: dropped", peer.node, type(message).__name__)

    def _on_router_message(self, router: Peer, message: AnyMessage) -> None:
        parts = self._parts
        if isinstance(message, Prefill | Reserve):
            if parts.grammars.admit(router, message):
                self._on_work(router, message)
        elif isinstance(message, Deliver):
            if not parts.grammars.keep_ticket(router, message):
                parts.prefill.deliver(router, message)
        elif isinstance(message, Cancel):
            parts.grammars.cancel(message.request, message.attempt)
            parts.prefill.cancel(message.request, message.attempt, message.reason)
            parts.decode.cancel(message.request, message.attempt, message.reason)
        elif isinstance(message, Release):
            parts.prefill.release(message.request)
        elif isinstance(message, Hello):
            self._on_hello(router, message)
        elif isinstance(message, Manage):
            answer = parts.standing.apply(message)
            if message.moves:
                num_moved = self._move_work(NodeDrains.code, "gives its work to other nodes")
                answer = structs.replace(answer, num_moved=num_moved)
            parts.outbox.message(router, answer)
        elif isinstance(message, AskCache):
            self._reporter.add(router, self._tell)
        elif isinstance(message, FetchFile):
            self._tell(router, parts.files.chunk(message))

    def _on_work(self, router: Peer, message: Prefill | Reserve | Deliver) -> None:
        if isinstance(message, Prefill):
            self._on_prefill(router, message)
        elif isinstance(message, Deliver):
            self._parts.prefill.deliver(router, message)
        else:
            self._on_reserve(router, message)

    def _on_prefill(self, router: Peer, message: Prefill) -> None:
        sequence = self._accept(router, message.work, "prefill", remote=message.remote)
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

    def _accept(self, router: Peer, work: Work, leg: RefusedLeg, *, remote: bool) -> Sequence | None:
        """The work as a sequence. None when the node takes no new work, or not this; the router was answered."""
        if self._parts.standing.refuses_work or self._is_stuck:
            state = "stuck" if self._is_stuck else "draining"
            self._parts.outbox.message(
                router, Refused(work.request, work.attempt, leg, f"node {self._parts.me.node} is {state}", 0.05)
            )
            return None
        try:
            self._check_model(work)
            return self._parts.sequences.make(work, remote=remote)
        except BadRequest as error:
            param = MODEL_PARAM if error.param == MODEL_PARAM else ""
            self._parts.outbox.message(
                router, Refused(work.request, work.attempt, leg, str(error), 0.0, retryable=False, param=param)
            )
            return None

    def _check_model(self, work: Work) -> None:
        """Raises BadRequest when the router prepared the work for what this node does not serve."""
        if work.model and self._models and work.model not in self._models:
            raise BadRequest(
                f"node {self._parts.me.node} does not serve the model, text and weights that the request was prepared "
                f"for: the router says {work.model}, the node has {', '.join(sorted(self._models))}",
                MODEL_PARAM,
            )

    def _on_hello(self, router: Peer, message: Hello) -> None:
        """(Re)welcome a router: send again what it lost, report what we do not know, end what it no longer awaits."""
        lost: list[tuple[str, int]] = []
        awaited = {(request, attempt) for request, attempt, _ in message.open}
        self._parts.prefill.keep_only(router, awaited)
        self._parts.decode.keep_only(router, awaited)
        self._parts.grammars.keep_only(router, awaited)
        for request, attempt, position in message.open:
            leg = self._parts.prefill.find(request, attempt) or self._parts.decode.find(request, attempt)
            ended = self._parts.ended.get(request, attempt)
            if leg is not None and leg.router == router:
                if leg.output.num_output > position:
                    self._parts.outbox.row(router, leg.output.since(position))
            elif ended is not None and ended.router == router:
                self._parts.outbox.row(router, ended.output.since(position))
                self._parts.outbox.message(router, ended.word)
            elif not self._parts.grammars.has(request, attempt):
                lost.append((request, attempt))
        self._parts.outbox.message(router, Welcome(self._parts.standing.role, tuple(lost)))
        self._reporter.add(router, self._tell)

    def _lose_router(self, router: Peer) -> None:
        logger.warning("router %s is gone: its requests are cancelled", router.node)
        self._reporter.remove(router)
        self._parts.ended.forget_router(router)
        self._parts.grammars.cancel_router(router)
        self._parts.prefill.cancel_router(router)
        self._parts.decode.cancel_router(router)

    def _lose_node(self, node: Peer) -> None:
        self._parts.writer.peer_gone(node)
        self._parts.reader.peer_gone(node)
        self._parts.fetch.forget(node)

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
        parts, was_stuck = self._parts, self._is_stuck
        plan = self._in_flight[0] if self._in_flight else None
        signs = self._steps, self._num_failed, parts.engine.progress
        parts.stuck.look(plan, signs, is_compiling=parts.engine.is_compiling)
        if self._is_stuck and not was_stuck:
            stood_s = parts.stuck.stood_s
            num_moved = self._move_work(NodeStuck.code, f"is stuck: its engine made no progress for {stood_s:.1f} s")
            logger.error("the engine made no progress for %.1f s: %d requests move to other nodes", stood_s, num_moved)
        elif was_stuck and not self._is_stuck:
            logger.warning("the engine makes progress again: the node takes work")

    @property
    def _is_stuck(self) -> bool:
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
        self._parts.hub.send(event.to if event.to.address else peer_of(event.to), event.message)

    def _expire(self) -> None:
        self._parts.prefill.expire()
        self._parts.decode.expire()
        self._parts.fetch.expire()
        self._move_at_deadline()

    # ------------------------------------------------------------ load and idleness

    def _is_idle(self) -> bool:
        return not (self._in_flight or self._num_open or self._num_pinned or self._parts.pages.num_quarantined)

    @property
    def _num_open(self) -> int:
        parts = self._parts
        return parts.prefill.num_legs + parts.decode.num_legs + parts.fetch.num_open + len(parts.grammars)

    def _check_idle(self) -> None:
        """After an idle while, check that the allocators add up, so that a leak is found early. Not at every pause: a
        recount visits all pages.
        """
        now = self._clock()
        if not self._is_idle():
            self._idle_since = now
            self._is_checked = False
        elif not self._is_checked and now - self._idle_since >= IDLE_CHECK_S:
            self._is_checked = True
            self._check_books()

    def _check_books(self) -> None:
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
    def _num_pinned(self) -> int:
        return self._parts.prefill.num_pinned + self._parts.export.num_pinned

    def _load(self) -> Load:
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
            pages_pinned=self._num_pinned,
            slots=self._parts.max_rows,
            slots_used=scheduler.slots_used,
            pages_parked=self._parts.prefill.num_parked_pages,
            draining=not self._parts.standing.takes_work,
            role=self._parts.standing.role,
            steps=self._steps,
            cost=self._parts.stopwatch.report(),
            itl_s=self._parts.stopwatch.itl_s,
            paths=path_loads(self._parts.writer.paths),
            failed_writes=by_reason(self._parts.writer.ladder.failures),
            resent_chunks=by_reason(self._parts.writer.ladder.resends),
            pulls=by_reason(self._parts.fetch.counters),
            stuck=self._is_stuck,
        )

    def _snapshot(self) -> NodeSnapshot:
        parts, scheduler = self._parts, self._parts.scheduler
        return NodeSnapshot(
            load=self._load(),
            stood_s=parts.stuck.stood_s if self._in_flight else 0.0,
            is_draining=parts.standing.is_draining,
            is_cordoned=parts.standing.is_cordoned,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            paths=parts.writer.paths.totals(),
        )

    def _tell(self, router: Peer, message: AnyMessage) -> None:
        self._parts.hub.send(router, message)
