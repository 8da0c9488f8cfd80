"""One attempt of a request: its legs on nodes, its clocks, and what nodes said of it. Made and dropped as one.

What a request keeps over its attempts is in `Job`. `node_events` says what each message leads to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pdcluster.core.messages import Finished, LegTimings, Pull, Ticket, TokenRow
from pdcluster_router.cluster.legs import RequestLeg
from pdcluster_router.cluster.view import NodeView
from pdcluster_router.core.generation import RequestRoute, TokenChunk
from pdcluster_router.core.job import Job
from pdcluster_router.explain.recorder import Record
from pdcluster_router.policy.base import Decision
from pdcluster_router.request.shared import Shared
from pdcluster_router.request.states import ATTEMPT, AttemptState

S = AttemptState
NO_TIMINGS = LegTimings()


class Attempt:
    """Owned by its request.

    decision: its record, without the view.
    placed_at: when it began.
    emit: receives new tokens, in their order.
    """

    # Its legs, while they run. Class defaults cost nothing until they are set.
    prefill: RequestLeg | None = None
    decode: RequestLeg | None = None
    pull: Pull | None = None
    # Of the pages on the decode node.
    ticket: Ticket | None = None
    backend = ""
    # Nodes that refused or failed it.
    avoid: frozenset[str] = frozenset()
    # Legs that decode nodes refused, which keep a place in line.
    places: Mapping[str, RequestLeg] = {}
    decode_failures = 0
    # The first token, while no decode node has reserved, and rows that came before their turn.
    held: TokenRow | None = None
    early: Sequence[TokenRow] = ()
    # What the prefill node says it did.
    report: LegTimings | None = None
    # Of an embedding.
    vector = b""
    finished: Finished | None = None
    finished_by: RequestLeg | None = None
    # The route, until some part of it changes.
    known_route: RequestRoute | None = None
    # When the prompt must have been taken up, and when this state must be over.
    queue_by = state_by = math.inf
    # When the prompt was taken up, and was done.
    scheduled_at: float | None = None
    computed_at: float | None = None
    # How long the prefill node keeps what it computed for a decode node.
    kv_until = math.inf
    has_fast_path = False

    def __init__(
        self,
        shared: Shared,
        job: Job,
        record: Record,
        decision: Decision,
        placed_at: float,
        emit: Callable[[TokenChunk], None],
    ) -> None:
        self.shared, self.job, self.record, self.placed_at, self.emit = shared, job, record, placed_at, emit
        self.decision = decision.record
        self.prefill_node = decision.prefill
        # Where it is to decode; None while no node has room.
        self.decode_node: NodeView | None = decision.decode
        if decision.pull is not None and decision.pull_tokens:
            self.pull = Pull(decision.pull.endpoint, decision.pull_tokens)
        self.state = S.CHOSEN
        # Tokens of earlier attempts.
        self.base = len(job.emitted)
        # Not later than any clock.
        self.due = job.deadline
        # A batch request waits on its node for as long as others do. A node that hangs says so, or its lease ends.
        stages = shared.settings.stages
        self.queue_s = math.inf if job.is_batch else stages.queue_s
        self.liveness_s = math.inf if job.is_batch else stages.liveness_s

    def set_clock(self, seconds: float) -> None:
        """This state must be over by then."""
        self.state_by = moment = self.shared.clock() + seconds
        if moment < self.due:
            self.due = moment

    def note_computed(self) -> None:
        """The prompt's KV is there. Idempotent."""
        self.queue_by = math.inf
        if self.computed_at is not None:
            return
        self.computed_at = now = self.shared.clock()
        parks_s = 0.0 if self.prefill_node is None else self.prefill_node.capabilities.parks_s
        if parks_s:
            self.kv_until = now + parks_s

    def look_at_clocks(self, now: float) -> None:
        """Bring `due` up to date. Rows on the fast token path move no clock."""
        leg = self.decode
        if leg is not None and (self.state is S.DECODING or self.state is S.DELIVERED):
            self.state_by = max(self.state_by, leg.heard_at + self.liveness_s)
        self.due = min(self.job.deadline, self.queue_by, self.state_by)

    def await_report(self) -> None:
        """Every token is here; give the prefill node a moment to report."""
        self.state = ATTEMPT[self.state, "report"]
        self.queue_by = math.inf
        self.set_clock(self.shared.settings.late_report_s)

    @property
    def is_complete(self) -> bool:
        """Every token was emitted and the last message is here."""
        return self.finished is not None and len(self.job.emitted) >= self.finished.num_output

    def leave_fast_path(self) -> None:
        """What comes next may be more than a row that continues."""
        self.has_fast_path = False
        if self.decode is not None:
            self.decode.way = None

    def route(self) -> RequestRoute:
        if self.known_route is None:
            decision, decode = self.decision, self.decode_node
            backend = (self.report or NO_TIMINGS).backend or self.backend
            self.known_route = RequestRoute(
                decision.mode,
                decision.prefill,
                None if decode is None else decode.endpoint.node,
                backend,
                self.job.cached_tokens,
                self.job.tries,
            )
        return self.known_route

    def seen_timings(self, num_output: int) -> LegTimings:
        """What it took as the router saw it, for what no node says."""
        now, placed = self.shared.clock(), self.placed_at
        computed = now if self.computed_at is None else self.computed_at
        scheduled = placed if self.scheduled_at is None else min(self.scheduled_at, computed)
        num_decoded = max(num_output - self.base - 1, 0)
        return LegTimings(
            queue_s=scheduled - placed,
            prefill_s=computed - scheduled,
            decode_s=now - computed if num_decoded else 0.0,
            decode_tokens=num_decoded,
        )
