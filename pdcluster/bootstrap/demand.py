"""What routers tell each other of the work that clients ask for, through the bootstraps. Plain state with an injected
clock.

Autoscaling looks at one router and must see what waits in all of them, also while there are no nodes. A bootstrap keeps
the last word of each router for a lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from time import monotonic

from pdcluster.bootstrap.card_messages import role_from_proto, role_to_proto
from pdcluster.core.bounds import MAX_ID_CHARS, MAX_SECONDS
from pdcluster.core.errors import BadRequest, Overloaded
from pdcluster.core.messages import Role
from pdcluster.rpc import bootstrap_pb2 as pb

MAX_ROUTERS = 4096
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class RoleDemand:
    """Work that comes each second for nodes of one role.

    prompt_s: node-seconds of prompts.
    output_tokens: of answers.
    """

    prompt_s: float = 0.0
    output_tokens: float = 0.0


NO_DEMAND = RoleDemand()


@dataclass(frozen=True, slots=True)
class RouterDemand:
    """What one boot of a router is asked for.

    number: rises with each report.
    roles: by role, as sent lately.
    held_s: node-seconds of prompts that wait in the router.
    num_held: requests that wait there.
    """

    router: str
    number: int
    roles: tuple[tuple[Role, RoleDemand], ...] = ()
    held_s: float = 0.0
    num_held: int = 0

    def of(self, role: Role) -> RoleDemand:
        return next((demand for name, demand in self.roles if name == role), NO_DEMAND)


class DemandStore:
    """The last word of each router. Owned by one thread."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._lease_s, self._clock = lease_s, clock
        self._told: dict[str, tuple[RouterDemand, float]] = {}

    def share(self, demand: RouterDemand) -> list[RouterDemand]:
        """Keep a router's word. Returns what the others said within a lease. Raises Overloaded."""
        now = self._clock()
        self._told = {name: kept for name, kept in self._told.items() if kept[1] > now}
        if demand.router not in self._told and len(self._told) >= MAX_ROUTERS:
            raise Overloaded(f"{len(self._told)} routers share their demand, no more may", 1.0, "routers")
        self._told[demand.router] = demand, now + self._lease_s
        return [kept for name, (kept, _) in self._told.items() if name != demand.router]


def newest(told: Iterable[RouterDemand]) -> dict[str, RouterDemand]:
    """The last word of each router, where several bootstraps have one."""
    found: dict[str, RouterDemand] = {}
    for demand in told:
        other = found.get(demand.router)
        if other is None or other.number < demand.number:
            found[demand.router] = demand
    return found


def demand_to_proto(demand: RouterDemand) -> pb.RouterDemand:
    roles = [
        pb.RoleDemand(role=role_to_proto(role), prompt_seconds=each.prompt_s, output_tokens=each.output_tokens)
        for role, each in demand.roles
    ]
    return pb.RouterDemand(
        router=demand.router, number=demand.number, roles=roles, held_seconds=demand.held_s, held=demand.num_held
    )


def demand_from_proto(demand: pb.RouterDemand) -> RouterDemand:
    """Raises BadRequest for a value out of range."""
    if not 1 <= len(demand.router) <= MAX_ID_CHARS or len(demand.roles) > len(ROLES):
        raise BadRequest(f"a router is named by 1 to {MAX_ID_CHARS} characters and tells of each role once", "router")
    numbers = [
        demand.held_seconds,
        *(value for each in demand.roles for value in (each.prompt_seconds, each.output_tokens)),
    ]
    for value in numbers:
        if not isfinite(value) or not 0 <= value <= MAX_SECONDS:
            raise BadRequest(f"a demand of {value} cannot be; 0 to {MAX_SECONDS:g} are possible", "demand")
    roles = tuple(
        (role_from_proto(each.role), RoleDemand(each.prompt_seconds, each.output_tokens)) for each in demand.roles
    )
    return RouterDemand(demand.router, demand.number, roles, demand.held_seconds, demand.held)
