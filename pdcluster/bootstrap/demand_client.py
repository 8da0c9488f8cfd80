"""A router's side of the exchange of demand: tell each bootstrap what clients ask for, and keep what other routers say.

Requests never wait for it. While no bootstrap answers, the last words of other routers hold for LAST_S.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import grpc

from pdcluster.bootstrap.agent import Retry, open_channel
from pdcluster.bootstrap.credentials import BootstrapCredentials
from pdcluster.bootstrap.demand import RouterDemand, demand_from_proto, demand_to_proto, newest
from pdcluster.core.errors import BadRequest
from pdcluster.rpc import bootstrap_pb2 as pb
from pdcluster.rpc import bootstrap_pb2_grpc as stubs
from pdcluster.rpc.status import error_of

# Twice within the second in which all routers agree.
SHARE_S = 0.4
CALL_S = 2.0
# Words of other routers are used for this long after they came.
LAST_S = 10.0

log = logging.getLogger(__name__)


class DemandExchange:
    """Owned by the router's event loop.

    own: makes the router's demand as of now.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        own: Callable[[], RouterDemand],
        clock: Callable[[], float] = time.monotonic,
        credentials: BootstrapCredentials | None = None,
    ) -> None:
        self._addresses, self._own, self._clock, self._credentials = tuple(addresses), own, clock, credentials
        self.latest = own()
        self._others: dict[str, tuple[float, list[RouterDemand]]] = {}

    def all(self) -> list[RouterDemand]:
        """The demand of all routers, the own one first."""
        now = self._clock()
        told = [each for came, others in self._others.values() if now - came < LAST_S for each in others]
        return [self.latest, *newest(told).values()]

    async def keep(self) -> None:
        """Share until cancelled. A bug in it ends the call, too."""
        async with asyncio.TaskGroup() as group:
            for address in self._addresses:
                group.create_task(self._share_with(address))
            while True:
                self.latest = self._own()
                await asyncio.sleep(SHARE_S)

    async def _share_with(self, address: str) -> None:
        retry = Retry()
        async with open_channel(address, self._credentials) as channel:
            stub = stubs.BootstrapStub(channel)
            while True:
                pause_s = SHARE_S
                try:
                    request = pb.ShareDemandRequest(demand=demand_to_proto(self.latest))
                    reply = await stub.ShareDemand(request, timeout=CALL_S)
                    self._others[address] = self._clock(), [demand_from_proto(each) for each in reply.others]
                    retry.reset()
                except (grpc.RpcError, BadRequest) as error:
                    pause_s = max(retry.next_s(), SHARE_S)
                    if retry.failures == 1:
                        cause = error_of(error, f"bootstrap {address}") if isinstance(error, grpc.RpcError) else error
                        log.warning("the demand of other routers is not known there: %s", cause)
                await asyncio.sleep(pause_s)
