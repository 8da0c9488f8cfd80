"""A bounded amount that tenants share, so that none takes all of it.

A tenant may take at most `greed` times what is still free (dynamic thresholds, Choudhury and Hahne 1998). Alone it gets
greed / (greed + 1) of the whole. However many come, each finds room. Nothing is taken back. Pure bookkeeping.
"""

from __future__ import annotations

from pdcluster.core.errors import IntegrityError

GREED = 4.0


class Shares:
    """The amount and what each tenant took.

    greed: None: first come, first served, for a single tenant.
    """

    def __init__(self, limit: int, greed: float | None = None) -> None:
        self._limit = limit
        self._greed = greed
        self._taken: dict[str, int] = {}
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    @property
    def limit(self) -> int:
        return self._limit

    def taken_by(self, tenant: str) -> int:
        return self._taken.get(tenant, 0)

    def has_room(self, tenant: str, amount: int = 1) -> bool:
        free = self._limit - self._used
        if amount > free:
            return False
        return self._greed is None or self._taken.get(tenant, 0) + amount <= self._greed * free

    def take(self, tenant: str, amount: int = 1) -> None:
        """Take an amount. The caller has asked `has_room`, or may pass a tenant's share. Never past the limit."""
        if self._used + amount > self._limit:
            raise IntegrityError(f"{tenant} takes {amount} where {self._used} of {self._limit} are taken")
        if amount:
            self._taken[tenant] = self._taken.get(tenant, 0) + amount
            self._used += amount

    def take_if_room(self, tenant: str) -> bool:
        """Take one if there is room."""
        used, own = self._used, self._taken.get(tenant, 0)
        if used >= self._limit or (self._greed is not None and own + 1 > self._greed * (self._limit - used)):
            return False
        self._taken[tenant], self._used = own + 1, used + 1
        return True

    def give_back(self, tenant: str, amount: int = 1) -> None:
        left = self._taken.get(tenant, 0) - amount
        if left < 0:
            raise IntegrityError(f"{tenant} gives back {amount} of {left + amount}")
        self._used -= amount
        if left:
            self._taken[tenant] = left
        else:
            self._taken.pop(tenant, None)  # tenants that left cost nothing

    def check_integrity(self) -> None:
        if (
            self._used != sum(self._taken.values())
            or not 0 <= self._used <= self._limit
            or min(self._taken.values(), default=1) <= 0
        ):
            raise IntegrityError(f"shares do not add up: {self._used} of {self._limit} used, {dict(self._taken)}")
