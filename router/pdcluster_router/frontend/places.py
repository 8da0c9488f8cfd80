"""Places: how many requests a router process works on at a time, over all front doors, and for which tenant.

A place is taken before the body is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdcluster.core.errors import Overloaded
from pdcluster.telemetry.metrics import HoldMetrics
from pdcluster_router.core.tenants import Tenant, Tenants
from pdcluster_router.queueing.shares import GREED, Shares


class Places:
    """Owned by the router's event loop. With tenants, none of them can take all places."""

    def __init__(self, max_requests: int, tenants: Tenants | None = None, metrics: HoldMetrics | None = None) -> None:
        self._tenants = tenants or Tenants()
        self._metrics = metrics
        self._shares = Shares(max_requests, GREED if self._tenants.is_configured else None)

    def use(self, tenants: Tenants) -> None:
        """Know these from now on. Requests that have a place keep it, and a name keeps its count."""
        self._tenants = tenants

    @property
    def num_taken(self) -> int:
        return self._shares.used

    def identify(self, authorization: str | None) -> Tenant:
        """The tenant of a key. Raises Unauthorized."""
        return self._tenants.identify(authorization)

    def take(self, authorization: str | None = None) -> Tenant:
        """Take a place for the tenant with that key, until `give_back`. Raises Unauthorized, and Overloaded when there
        is none.
        """
        tenant = self._tenants.identify(authorization)
        shares = self._shares
        if tenant.max_requests is not None and (own := shares.taken_by(tenant.name)) >= tenant.max_requests:
            raise self._refused(
                tenant,
                "tenant_requests",
                f"{own} requests of tenant {tenant.name} are being worked on, as many as it may have",
            )
        if not shares.take_if_room(tenant.name):
            raise self._refused(
                tenant, "requests", f"{self.num_taken} requests are being worked on, as many as --max-requests allows"
            )
        return tenant

    def give_back(self, tenant: Tenant) -> None:
        self._shares.give_back(tenant.name)

    @contextmanager
    def taken(self, authorization: str | None = None) -> Iterator[Tenant]:
        """A place while the block runs."""
        tenant = self.take(authorization)
        try:
            yield tenant
        finally:
            self.give_back(tenant)

    def _refused(self, tenant: Tenant, reason: str, message: str) -> Overloaded:
        if self._metrics is not None:
            self._metrics.refused(reason, tenant.name)
        return Overloaded(f"{message}; retry later", reason=reason)
