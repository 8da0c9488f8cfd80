"""Policies by name, with their parameters from text: `seconds`, `kv-cost:weight=2,decay=1`. The one place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdcluster.errors import ConfigError
from pdcluster_router.policy.base import Policy
from pdcluster_router.policy.conductor import Conductor
from pdcluster_router.policy.kv_cost import KvCost
from pdcluster_router.policy.prefix import Prefix
from pdcluster_router.policy.product import Product
from pdcluster_router.policy.scored import Scored
from pdcluster_router.policy.seconds import Seconds
from pdcluster_router.policy.session import Session
from pdcluster_router.policy.turns import LeastLoad, PowerOfTwo, Random, RoundRobin

DEFAULT = "seconds"

Make = Callable[..., Policy]

POLICIES: Mapping[str, Make] = {
    "seconds": Seconds,
    "round-robin": lambda: Scored(RoundRobin()),
    "random": lambda: Scored(Random()),
    "least-load": lambda: Scored(LeastLoad()),
    "power-of-two": lambda: Scored(PowerOfTwo()),
    "session": lambda **given: Scored(Session(**given)),
    "prefix": lambda **given: Scored(Prefix(**given)),
    "kv-cost": lambda **given: Scored(KvCost(**given)),
    "conductor": Conductor,
    "product": lambda: Scored(Product()),
}


def make_policy(text: str) -> Policy:
    """`name` or `name:key=number,key=number`. Raises ConfigError for a name, key or number that does not exist."""
    name, _, rest = text.partition(":")
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"no routing policy is called {name!r}; use one of {', '.join(POLICIES)}")
    parameters = dict(_parameter(name, part) for part in rest.split(",")) if rest else {}
    try:
        return make(**parameters)
    except TypeError as error:
        raise ConfigError(f"routing policy {name} does not take {', '.join(parameters)}; see its module in pdcluster_router/policy") from error


def _parameter(name: str, text: str) -> tuple[str, float]:
    key, _, value = text.partition("=")
    try:
        return key.strip().replace("-", "_"), float(value)
    except ValueError as error:
        raise ConfigError(f"routing policy {name}: {text!r} is not key=number") from error
