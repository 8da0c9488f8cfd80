"""Places: how many requests a router process works on at a time, over all front doors, and for which tenant.

HTTP takes a place when the body is there: slow senders keep no place from whole requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdcluster.core.errors import Overloaded
from pdcluster.telemetry.metrics import HoldMetrics
from pdcluster_router.core.shares import GREED, Shares
from pdcluster_router.core.tenants import ANYBODY, Tenant, Tenants


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

    def take(self, tenant: Tenant) -> None:
        """Take a place for the tenant, until `give_back`. Raises Overloaded when there is none."""
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

    def give_back(self, tenant: Tenant) -> None:
        self._shares.give_back(tenant.name)

    @contextmanager
    def taken(self, tenant: Tenant) -> Iterator[None]:
        """A place while the block runs."""
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)

    def no_room_for_body(self, tenant: Tenant | None) -> Overloaded:
        """The error for a body that is not there as a whole, and cannot be kept longer."""
        return self._refused(
            tenant or ANYBODY,
            "arriving",
            "bodies that have not arrived whole take as much memory as router.arriving_bytes allows; raise it, or send "
            "yours faster",
        )

    @property
    def is_shared(self) -> bool:
        """Whether there are several tenants."""
        return self._tenants.is_configured

    def _refused(self, tenant: Tenant, reason: str, message: str) -> Overloaded:
        if self._metrics is not None:
            self._metrics.refused(reason, tenant.name)
        return Overloaded(f"{message}; retry later", reason=reason)
