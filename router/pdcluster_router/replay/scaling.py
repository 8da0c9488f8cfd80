"""Pools that grow and shrink in simulated time: nodes take a while to start, drain before they go, and cost while they
are there.

All nodes that may ever serve are made at first. One that is away takes no work and has an empty cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pdcluster.core.messages import Role
from pdcluster_router.replay.node import SimNode
from pdcluster_router.scaling.rules import PoolSize, PoolState, ScalingRule

LOOK_S = 15.0
# Between two samples of the demand, as routers take them.
SAMPLE_S = 1.0

Place = Literal["away", "starting", "serving", "draining"]


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """start_s: from the decision until a node serves.
    least: nodes of each pool.
    needed: for the oracle: nodes of each role that the work needs, by seconds.
    """

    rule: ScalingRule
    start_s: float = 60.0
    least: int = 1
    needed: Mapping[Role, Sequence[float]] = field(default_factory=dict)


class ScaledRouter(Protocol):
    def sample(self, now: float) -> None:
        """Take note of the demand."""
        ...

    def set_serving(self, node: str, serves: bool) -> None: ...

    def wanted(self, role: Role, now: float) -> int: ...

    def num_waiting_for(self, role: Role) -> int:
        """Requests that wait in the router because of this pool."""
        ...


@dataclass(slots=True)
class _Seat:
    """A node and where it is in its life. since_s: since it is paid for."""

    node: SimNode
    place: Place = "away"
    since_s: float = 0.0
    ready_s: float = 0.0
    busy_s: float = 0.0


class ScaledPools:
    """Owned by one simulation. `node_s`: seconds of nodes so far, from their start to their end."""

    def __init__(self, nodes: Sequence[SimNode], router: ScaledRouter, spec: ScalingSpec) -> None:
        self._router, self._spec = router, spec
        self._seats: dict[Role, list[_Seat]] = {}
        for node in nodes:
            self._seats.setdefault(node.role, []).append(_Seat(node))
        self._sizes = {role: PoolSize(spec.rule, spec.least, len(seats)) for role, seats in self._seats.items()}
        self.node_s, self.most_nodes = 0.0, 0
        self._look_s = 0.0
        for seats in self._seats.values():
            for seat in seats:
                router.set_serving(seat.node.name, False)
            for seat in seats[: spec.least]:
                self._serve(seat)

    def tick(self, now: float) -> float:
        """Do what is due. Returns when the next tick is."""
        self._router.sample(now)
        for seats in self._seats.values():
            for seat in seats:
                if seat.place == "starting" and seat.ready_s <= now:
                    self._serve(seat)
                elif seat.place == "draining" and seat.node.is_idle:
                    self._leave(seat, now)
        if now >= self._look_s:
            self._look_s = now + LOOK_S
            for role, seats in self._seats.items():
                self._resize(role, seats, now)
        return now + SAMPLE_S

    def close(self, now: float) -> None:
        """The replay is over: nodes that are there have been paid for until now."""
        for seats in self._seats.values():
            for seat in seats:
                if seat.place != "away":
                    self.node_s += now - seat.since_s
                    seat.place = "away"

    def _resize(self, role: Role, seats: list[_Seat], now: float) -> None:
        serving = [seat for seat in seats if seat.place == "serving"]
        coming = [seat for seat in seats if seat.place == "starting"]
        target = self._sizes[role].target(now, self._state(role, serving, len(coming), now))
        there = len(serving) + len(coming)
        for seat in seats:
            if there < target and seat.place == "draining":  # sooner than a new one
                self._serve(seat)
                there += 1
        for seat in seats:
            if there < target and seat.place == "away":
                seat.place, seat.since_s, seat.ready_s = "starting", now, now + self._spec.start_s
                there += 1
        for seat in reversed(coming):
            if there > target:
                self._leave(seat, now)
                there -= 1
        for seat in sorted(serving, key=lambda seat: seat.node.num_open):
            if there > target:
                seat.place = "draining"
                self._router.set_serving(seat.node.name, False)
                there -= 1
        self.most_nodes = max(self.most_nodes, sum(s.place != "away" for every in self._seats.values() for s in every))

    def _state(self, role: Role, serving: Sequence[_Seat], num_coming: int, now: float) -> PoolState:
        busy, loads = 0.0, [seat.node.load(now) for seat in serving]
        for seat in serving:
            busy += min((seat.node.busy_s - seat.busy_s) / LOOK_S, 1.0)
            seat.busy_s = seat.node.busy_s
        pages = sum(load.pages_total for load in loads)
        used = sum(load.pages_total - load.pages_free - load.pages_cached for load in loads)
        waiting = sum(load.waiting for load in loads) + sum(seat.node.num_unreserved for seat in serving)
        return PoolState(
            len(serving), num_coming, waiting + self._router.num_waiting_for(role), busy / max(len(serving), 1),
            used / max(pages, 1), self._router.wanted(role, now), self._needed(role, now),
        )  # fmt: skip

    def _needed(self, role: Role, now: float) -> float:
        """The most that is needed until a node that starts now would serve, and a look longer."""
        series = self._spec.needed.get(role, ())
        return max(series[int(now) : int(now + self._spec.start_s + LOOK_S) + 1], default=0.0)

    def _serve(self, seat: _Seat) -> None:
        seat.place, seat.busy_s = "serving", seat.node.busy_s
        self._router.set_serving(seat.node.name, True)

    def _leave(self, seat: _Seat, now: float) -> None:
        seat.place = "away"
        self.node_s += now - seat.since_s
        seat.node.cache.clear()
