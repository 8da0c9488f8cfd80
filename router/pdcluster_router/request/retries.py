"""When another attempt follows a failed one, and which nodes it avoids. Plain state; times are passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdcluster.core import errors
from pdcluster.telemetry.log import Log
from pdcluster_router.core.generation import WeightsChange
from pdcluster_router.core.job import Job, RetryAttempt
from pdcluster_router.core.stages import StageDeadlines
from pdcluster_router.queueing.admission import Slo
from pdcluster_router.queueing.headroom import Headroom
from pdcluster_router.queueing.hold_queue import HoldLimits

log = Log("request")

# Pauses before the first retry, the second, and later ones.
RETRY_PAUSES_S = (0.0, 0.1, 0.5)

# Nodes that one request may lose without progress.
MAX_LOST_NODES = 3

# Longest time that a refusal of one request counts for others. A small one may find room where a large one did not.
REFUSING_S = 0.1


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Limits of dispatch.

    retries: attempts after the first failed one, since the last progress. Refusals for want of room do not count.
    hold_s: how long a request may wait for room without progress.
    late_report_s: wait for the prefill node's report, which only the timeline needs.
    from_zero: requests wait for the first node.
    weights_change: what becomes of requests whose weights no node has any more, unless they say it themselves.
    """

    retries: int = 3
    hold_s: float = 60.0
    late_report_s: float = 0.1
    stages: StageDeadlines = field(default_factory=StageDeadlines)
    hold: HoldLimits = field(default_factory=HoldLimits)
    headroom: Headroom = field(default_factory=Headroom)
    slo: Slo = field(default_factory=Slo)
    from_zero: bool = False
    weights_change: WeightsChange = "fail"


class RetryBudget:
    """Decides after a failed attempt whether another follows.

    It counts since the last attempt with progress, so a long answer may outlive many nodes. Progress is more than one
    token: the first one comes with the prompt, so a request that ends every node that decodes it has one, too. Nodes
    that were lost count apart, since a request may be what ends them.

    A node that drains is no failure. Refusals for want of room, or of a node, may go on for hold_s after the last
    token. The first retry is immediate, because most failures are a node's end. Later ones pause, because a path may be
    coming back.
    """

    __slots__ = ("_emitted", "_failures", "_held_since", "_lost", "_settings", "attempts")

    def __init__(self, settings: DispatchSettings) -> None:
        self._settings = settings
        # Since the last token: when refusals began.
        self._held_since: float | None = None
        # Since the last progress: failed attempts, and nodes that were lost.
        self._failures = 0
        self._lost: set[str] = set()
        # Tokens at the last failure or refusal.
        self._emitted = 0
        # With the running one. Refusals are no attempts.
        self.attempts = 1

    def pass_over(self, seconds: float) -> None:
        """Time that counts for no wait passed."""
        if self._held_since is not None:
            self._held_since += seconds

    def spend(self, failure: RetryAttempt, job: Job, now: float) -> float:
        """Seconds to wait before the next attempt. Raises the cause when there must be none."""
        gained, self._emitted = len(job.emitted) - self._emitted, len(job.emitted)
        if gained:
            self._held_since = None
        if gained > 1:
            self._failures = 0
            self._lost.clear()
            job.excluded.clear()
        if isinstance(failure.cause, errors.Overloaded | errors.NoNodeTakesWork):
            if self._held_since is None:
                self._held_since = now
            if now >= self._held_since + self._settings.hold_s:
                raise failure.cause
            return 0.0 if isinstance(failure.cause, errors.Overloaded) else self._settings.stages.hold_s
        if isinstance(failure.cause, errors.NodeDrains):
            self.attempts += 1
            return 0.0
        if failure.incarnation is not None:
            job.excluded.add(failure.incarnation)
            if isinstance(failure.cause, errors.NodeLost):
                self._lost.add(failure.incarnation)
        self.attempts += 1
        self._failures += 1
        if len(self._lost) >= MAX_LOST_NODES:
            raise errors.RequestStopped(
                f"request {job.request} lost {len(self._lost)} nodes without progress and is stopped, "
                f"since it may be what ends them; last: {failure.cause}"
            ) from failure.cause
        if self._failures > self._settings.retries:
            raise errors.Unavailable(
                f"request {job.request} failed {self._failures} times without progress, last: {failure.cause}"
            ) from failure.cause
        log.warning("an attempt failed, trying again", request=job.request, cause=str(failure.cause))
        return RETRY_PAUSES_S[min(self._failures, len(RETRY_PAUSES_S)) - 1]


class RefusingNodes:
    """Nodes that just had no room. Without it, every waiting request would try them and be refused. Owned by one
    router.
    """

    def __init__(self) -> None:
        # Until when, by incarnation.
        self.until: dict[str, float] = {}

    def note(self, failure: RetryAttempt, now: float) -> None:
        if failure.incarnation is None or not isinstance(failure.cause, errors.Overloaded):
            return
        self.until = {incarnation: until for incarnation, until in self.until.items() if until > now}
        self.until[failure.incarnation] = now + min(failure.cause.retry_after_s, REFUSING_S)

    def apply(self, job: Job, now: float) -> None:
        """The request avoids these nodes, too."""
        for incarnation, until in self.until.items():
            if until > now:
                job.busy[incarnation] = max(job.busy.get(incarnation, now), until)
