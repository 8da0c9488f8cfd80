"""A cluster in simulated time: arrivals, choices, nodes and KV transfers. Every request ends exactly once.

Events are a heap of (time, order, what). order is the event's number, so a run is a function of its arguments. A node
sends one transfer at a time and receives one at a time. KV follows while the prompt is computed. So a client waits for
the last piece, or for the link where that is slower.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Protocol

from pdcluster.core.errors import DeadlineExceeded, IntegrityError, Overloaded, PdclusterError
from pdcluster_router.policy.base import Decision
from pdcluster_router.replay.node import SimNode, Task
from pdcluster_router.replay.routing import ReplayPlacement
from pdcluster_router.replay.scaling import ScaledPools
from pdcluster_router.replay.trace import Trace

End = Literal["finished", "refused", "impossible"]


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link.

    fixed_s: of one transfer.
    pieces: of the last chunk, of which only the last is exposed.
    """

    bandwidth: float = 1e10
    fixed_s: float = 0.002
    pieces: int = 8


class Router(Protocol):
    @property
    def num_held(self) -> int: ...

    def try_admit(self, task: Task, now: float) -> Decision | None: ...

    def release(self, now: float) -> Iterator[ReplayPlacement]: ...

    def next_look(self, now: float) -> float: ...

    def sent(self, task: Task, choice: Decision, now: float) -> None: ...

    def reserved(self, task: Task, decode: str, now: float) -> None: ...

    def moved(self, source: str, target: str, num_bytes: float, seconds: float) -> None: ...

    def left(self, node: str) -> None: ...

    def ended(self, task: Task) -> None: ...


@dataclass(slots=True, eq=False)
class RequestInFlight:
    """A request, where it went and how it ended."""

    task: Task
    prefill: SimNode | None = None
    decode: SimNode | None = None
    end: End | None = None
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.task.first_token_s - self.task.request.arrival_s

    @property
    def tpot_s(self) -> float:
        later = self.task.request.num_output - 1
        return (self.task.finished_s - self.task.first_token_s) / later if later else 0.0


@dataclass(slots=True)
class Simulation:
    nodes: Sequence[SimNode]
    router: Router
    link: LinkSpec = LinkSpec()
    now: float = 0.0
    num_events: int = 0
    flights: list[RequestInFlight] = field(default_factory=list)
    _events: list[tuple[float, int, str, object]] = field(default_factory=list)
    _sends_until: dict[str, float] = field(default_factory=dict)
    _receives_until: dict[str, float] = field(default_factory=dict)
    _woken: dict[str, float] = field(default_factory=dict)
    _by_name: dict[str, SimNode] = field(default_factory=dict)
    _look_s: float = inf
    _is_freed: bool = False
    pools: ScaledPools | None = None
    # Called with the number of requests that arrived.
    progress: Callable[[int], None] | None = None
    _num_ended: int = 0

    def run(self, trace: Trace) -> list[RequestInFlight]:
        """Run until the last request has ended."""
        self.flights = [RequestInFlight(Task(number, request)) for number, request in enumerate(trace.requests)]
        self._by_name = {node.name: node for node in self.nodes}
        if self.pools is not None:
            self._scale()
        arrivals = iter(self.flights)
        upcoming = next(arrivals, None)
        while upcoming is not None or self._events or self.router.num_held:
            arrival_s = upcoming.task.request.arrival_s if upcoming is not None else inf
            event_s = self._events[0][0] if self._events else inf
            if self.router.num_held and self._look_s < min(arrival_s, event_s):
                self.now, self._is_freed = self._look_s, True
            elif upcoming is not None and arrival_s <= event_s:
                self.now = arrival_s
                self._arrive(upcoming)
                if self.progress is not None:
                    self.progress(upcoming.task.number + 1)
                upcoming = next(arrivals, None)
            else:
                self.now, _, what, subject = heapq.heappop(self._events)
                self._handle(what, subject)
            if self._is_freed and self.router.num_held:
                self._offer()
        if self.pools is not None:
            self.pools.close(self.now)
        self._check()
        return self.flights

    def _scale(self) -> None:
        """Let pools grow and shrink, as long as there are requests."""
        assert self.pools is not None
        if self._num_ended < len(self.flights):
            self._at(self.pools.tick(self.now), "scale", None)
            self._is_freed = True

    def _at(self, moment: float, what: str, subject: object) -> None:
        self.num_events += 1
        heapq.heappush(self._events, (moment, self.num_events, what, subject))

    def _handle(self, what: str, subject: object) -> None:
        if what == "node":
            node = self._by_name[str(subject)]
            if node.wake_s is not None and node.wake_s <= self.now:
                node.advance(self.now)
                self._after(node)
        elif what == "ready":
            node = self._by_name[str(subject)]
            node.wake(self.now)
            self._after(node)
        elif what == "scale":
            self._scale()
        elif what == "moved":
            assert isinstance(subject, tuple)
            self.router.moved(*subject)
        else:
            assert isinstance(subject, RequestInFlight)
            {"started": self._started, "arrived": self._arrived}[what](subject)

    # ------------------------------------------------------------ one request

    def _arrive(self, flight: RequestInFlight) -> None:
        try:
            choice = self.router.try_admit(flight.task, self.now)
        except PdclusterError as error:
            self._refuse(flight, error)
            return
        if choice is None:
            self._is_freed = True
        else:
            self._send(flight, choice)

    def _offer(self) -> None:
        """Place waiting requests that have room, then plan the next look."""
        for one in self.router.release(self.now):
            flight = self.flights[one.task.number]
            if one.decision is None:
                assert one.error is not None
                self._refuse(flight, one.error)
            else:
                self._send(flight, one.decision)
        self._is_freed = False
        if self.router.num_held:
            self._look_s = self.router.next_look(self.now)

    def _refuse(self, flight: RequestInFlight, error: PdclusterError) -> None:
        self._finish(flight, "refused" if isinstance(error, Overloaded | DeadlineExceeded) else "impossible")

    def _send(self, flight: RequestInFlight, choice: Decision) -> None:
        self.router.sent(flight.task, choice, self.now)
        flight.decode = self._by_name[choice.decode.name]
        flight.prefill = self._by_name[choice.prefill.name] if choice.prefill is not None else None
        first, task = flight.prefill or flight.decode, flight.task
        task.decodes_here = flight.prefill is None
        if choice.pull is not None:
            self._pull(task, self._by_name[choice.pull.name], first)
        first.enqueue(task, self.now)
        self._after(first)

    def _pull(self, task: Task, source: SimNode, target: SimNode) -> None:
        """Copy the prefix that `source` really holds and `target` lacks."""
        blocks, block_tokens = task.request.blocks, source.spec.block_tokens
        held, own = source.cache.depth(blocks), target.cache.depth(blocks)
        if held <= own:
            return
        task.pulled = held
        task.ready_s = self._move(source, target, self.now, (held - own) * block_tokens) + self.link.fixed_s
        self._at(task.ready_s, "ready", target.name)

    def _move(self, source: SimNode, target: SimNode, begun_s: float, num_tokens: int) -> float:
        """Occupy both links when both are free. Returns when they are free again, and tells the duration with the
        wait.
        """
        begin_s = max(begun_s, self._sends_until.get(source.name, 0.0), self._receives_until.get(target.name, 0.0))
        num_bytes = float(num_tokens * source.spec.kv_bytes_per_token)
        end_s = begin_s + num_bytes / self.link.bandwidth
        self._sends_until[source.name] = self._receives_until[target.name] = end_s
        if num_bytes:
            self._at(max(end_s, self.now), "moved", (source.name, target.name, num_bytes, end_s - begun_s))
        return end_s

    def _started(self, flight: RequestInFlight) -> None:
        """The prompt is being computed: ask the decode node."""
        decode, task = flight.decode, flight.task
        if task.decodes_here or decode is None or flight.end is not None:
            return
        decode.reserve(task, self.now)
        self._after(decode)

    def _prefilled(self, flight: RequestInFlight) -> None:
        task = flight.task
        if task.decodes_here:
            return
        if task.request.num_output <= 1:
            self._release(flight)
            assert flight.decode is not None
            flight.decode.cancel(task, self.now)
            self._after(flight.decode)
            task.finished_s = task.first_token_s
            self.router.left(flight.decode.name)
            self._finish(flight, "finished")
        elif task.row_hold is not None:
            self._transfer(flight, task.started_s)

    def _reserved(self, flight: RequestInFlight) -> None:
        assert flight.decode is not None
        self.router.reserved(flight.task, flight.decode.name, self.now)
        if flight.task.first_token_s:
            self._transfer(flight, self.now)

    def _transfer(self, flight: RequestInFlight, begun_s: float) -> None:
        """Called when prompt and slot are both there.

        begun_s: since when KV could flow.
        """
        source, target, task = flight.prefill, flight.decode, flight.task
        assert source is not None and target is not None
        token_s = source.spec.kv_bytes_per_token / self.link.bandwidth
        missing = task.request.num_tokens - task.decode_cached_tokens
        last_s = min(source.spec.chunk_tokens, missing) * token_s / self.link.pieces
        done_s = max(self._move(source, target, begun_s, missing), self.now + last_s) + self.link.fixed_s
        self._at(done_s, "arrived", flight)

    def _arrived(self, flight: RequestInFlight) -> None:
        self._release(flight)
        assert flight.decode is not None
        flight.decode.join(flight.task, self.now)
        self._after(flight.decode)

    def _release(self, flight: RequestInFlight) -> None:
        assert flight.prefill is not None
        flight.prefill.release(flight.task, self.now)
        self.router.left(flight.prefill.name)
        self._after(flight.prefill)

    def _finish(self, flight: RequestInFlight, end: End) -> None:
        if flight.end is not None:
            raise IntegrityError(f"request {flight.task.number} ended {flight.end} and again {end}")
        flight.end, flight.end_s = end, self.now
        self._num_ended += 1
        if end == "finished":
            self.router.ended(flight.task)

    # ------------------------------------------------------------ nodes

    def _after(self, node: SimNode) -> None:
        """Take in what the node did, and when it wants the next look."""
        self._is_freed = self._is_freed or bool(node.outcomes)
        while node.outcomes:
            outcomes, node.outcomes = node.outcomes, []
            for moment, what, task in outcomes:
                flight = self.flights[task.number]
                if what == "started":
                    self._at(max(moment, self.now), "started", flight)
                elif what == "prefilled":
                    self._prefilled(flight)
                elif what == "reserved":
                    self._reserved(flight)
                else:
                    self.router.left(node.name)
                    self._finish(flight, "finished")
        wake_s = node.wake_s
        if wake_s is not None and self._woken.get(node.name) != wake_s:
            self._woken[node.name] = wake_s
            self._at(max(wake_s, self.now), "node", node.name)

    def _check(self) -> None:
        """Check that nothing is left."""
        open_ends = [flight.task.number for flight in self.flights if flight.end is None]
        busy = [node.name for node in self.nodes if not node.is_idle]
        if open_ends or busy:
            raise IntegrityError(
                f"requests without an end: {open_ends[:5]} ({len(open_ends)} in all); nodes that still hold "
                f"something: {busy}"
            )
        for node in self.nodes:
            node.cache.check_integrity()
