"""Policies by name, with parameters from text: `seconds`, `kv-cost:weight=2,decay=1`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature

from pdcluster.core.errors import ConfigError
from pdcluster_router.policy.base import Policy
from pdcluster_router.policy.baselines import (
    Conductor,
    KvCost,
    LeastLoad,
    PowerOfTwo,
    Prefix,
    Product,
    Random,
    RoundRobin,
    Session,
)
from pdcluster_router.policy.predicted_seconds import Seconds
from pdcluster_router.policy.scored import Rule, Scored

DEFAULT = "seconds"

WHOLE: Mapping[str, Callable[..., Policy]] = {"seconds": Seconds, "conductor": Conductor}
# Policies that only score a node.
RULES: Mapping[str, Callable[..., Rule]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "session": Session,
    "prefix": Prefix,
    "kv-cost": KvCost,
    "product": Product,
}
POLICIES = (*WHOLE, *RULES)


def make_policy(text: str) -> Policy:
    """Make a policy from `name` or `name:key=number,key=number`. Raises ConfigError for an unknown name, key or
    number.
    """
    name, _, rest = text.partition(":")
    make = WHOLE.get(name) or RULES.get(name)
    if make is None:
        raise ConfigError(f"no routing policy is called {name!r}; use one of {', '.join(POLICIES)}")
    given = dict(_parameter(name, part) for part in rest.split(",")) if rest else {}
    allowed = list(signature(make).parameters)
    unknown = [key for key in given if key not in allowed]
    if unknown:
        takes = f"takes {', '.join(allowed)}" if allowed else "takes no parameters"
        raise ConfigError(f"routing policy {name} does not take {', '.join(unknown)}; it {takes}")
    return WHOLE[name](**given) if name in WHOLE else Scored(RULES[name](**given))


def _parameter(name: str, text: str) -> tuple[str, float]:
    key, _, value = text.partition("=")
    try:
        return key.strip().replace("-", "_"), float(value)
    except ValueError as error:
        raise ConfigError(f"routing policy {name}: {text!r} is not key=number") from error
