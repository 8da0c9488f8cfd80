"""The one process of a Ray replica. It does not need Ray."""

from __future__ import annotations

import asyncio
import http.client
import logging
import time
from collections.abc import Mapping

from pdcluster.core.errors import PdclusterError, Unavailable
from pdcluster.launch.ray_args import environment_of
from pdcluster.processes.supervisor import ChildGaveUp, Facts, Spec, Supervisor
from pdcluster.settings.config import own_environment

log = logging.getLogger("ray.serve")

# Crashes of a replica's process within a minute, before Ray replaces the replica.
RESTARTS = 5
# Past its drain, before it is killed.
KILL_GRACE_S = 6.0
# For an answer of a health port, and between two looks of Ray.
HEALTH_S = 5.0
# How long a look waits for a process that is being started again, and how long Ray waits for a look.
BACK_S, LOOK_WITHIN_S = 60.0, 75.0
LOOK_S = 0.2


class ServedProcess:
    """One process of a replica, started again when it crashes. Owned by the loop that runs the replica's code."""

    def __init__(self, name: str, ready_s: float) -> None:
        self.name = name
        self._supervisor = Supervisor(log.warning, self._forward, ready_s, RESTARTS)
        self._failed = asyncio.ensure_future(self._supervisor.failed())

    async def start(self, command: tuple[str, ...], drain_s: float, variables: Mapping[str, str] | None = None) -> None:
        """variables: besides those that Ray's worker has."""
        environment = environment_of(own_environment()) | dict(variables or {})
        spec = Spec(self.name, command, drain_s + KILL_GRACE_S, environment=environment)
        try:
            await self._supervisor.start(spec)
        except PdclusterError:
            await self.stop()
            raise
        log.info("%s is ready at %s", self.name, self.facts["address"])

    @property
    def facts(self) -> Facts:
        """What the present process announced. A process that was started again has other ports."""
        return self._supervisor.facts(self.name)

    @property
    def last_facts(self) -> Facts:
        """What the last process announced that was ready. It may have ended."""
        return self._supervisor.last_facts(self.name)

    def _running_facts(self) -> Facts:
        """Empty while it is down. Raises when it crashed too often, and after `stop`."""
        if self._failed.cancelled():
            raise Unavailable(f"{self.name} was stopped; ask the one that came after it")
        if self._failed.done():
            raise ChildGaveUp(self._failed.result())
        return self.facts if self._supervisor.pid(self.name) is not None else {}

    async def probe(self, within_s: float = HEALTH_S, back_s: float = BACK_S) -> None:
        """Ask its health port. Raises when it stands still. One that ended is waited for, and then raises, too.

        Ray replaces a replica after three looks that raise: so a process that loads its model anew has the time to.
        """
        until = time.monotonic() + back_s
        while not (facts := self._running_facts()):
            if time.monotonic() >= until:
                raise Unavailable(f"{self.name} ended and is not back; its output says why")
            await asyncio.sleep(LOOK_S)
        if facts.get("health") is None:
            return
        address = str(facts["health"])
        try:
            status, text = await asyncio.to_thread(_livez, address, within_s)
        except OSError as error:
            raise Unavailable(f"{self.name} does not answer at {address}, in {within_s:g} s: {error}") from error
        if status != 200:
            raise Unavailable(f"{self.name} is not alive: {text[:500]}")

    async def stop(self) -> None:
        await self._supervisor.stop([[self.name]])
        self._failed.cancel()

    @staticmethod
    def _forward(name: str, line: str) -> None:
        print(f"{name}: {line}", flush=True)


def _livez(address: str, within_s: float) -> tuple[int, str]:
    """The status and the text of a health port. Raises OSError."""
    connection = http.client.HTTPConnection(address, timeout=within_s)
    try:
        connection.request("GET", "/livez")
        reply = connection.getresponse()
        return reply.status, reply.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"its answer is not HTTP: {error!r}") from error
    finally:
        connection.close()
