"""Policies by name, with their parameters from text: `product`, `kv-cost:overlap=2`. The one place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdcluster.errors import ConfigError
from pdcluster_router.policy.base import Policy
from pdcluster_router.policy.product import Product
from pdcluster_router.policy.scored import Scored

DEFAULT = "product"

Make = Callable[..., Policy]

POLICIES: Mapping[str, Make] = {
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
        raise ConfigError(f"routing policy {name} does not take {', '.join(parameters)}; see its docstring") from error


def _parameter(name: str, text: str) -> tuple[str, float]:
    key, _, value = text.partition("=")
    try:
        return key.strip().replace("-", "_"), float(value)
    except ValueError as error:
        raise ConfigError(f"routing policy {name}: {text!r} is not key=number") from error
