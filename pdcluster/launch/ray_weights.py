"""Rolls out other weights as the router's user_config says. It does not need Ray."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from pdcluster.core.errors import ConfigError
from pdcluster.core.weights import Label
from pdcluster.launch.ray_args import environment_of
from pdcluster.processes.tasks import watched
from pdcluster.settings.config import own_environment

log = logging.getLogger("ray.serve")

# Nodes may not be there yet when the router is.
RETRY_S, GIVE_UP_S = 5.0, 1800.0
STOP_S = 10.0
# How often a router that rolls out takes its turn again.
RENEW_S = 60.0


class RolloutArgs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """As `pdctl weights load` has them.

    source: a directory or file on all machines, or ORG/NAME.
    """

    label: Label
    source: Annotated[str, msgspec.Meta(min_length=1)]
    max_unavailable: Annotated[int, msgspec.Meta(ge=0)] = 1
    release_first: bool = False


def read_rollout(given: Any) -> RolloutArgs | None:
    """None where no weights are asked for. Raises ConfigError."""
    if not given:
        return None
    try:
        return msgspec.convert(given, RolloutArgs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"weights of user_config: {error}") from error


def rollout_command(args: RolloutArgs, admin: str, token_file: str | None) -> tuple[str, ...]:
    return (
        sys.executable, "-m", "pdcluster_router.pdctl", "weights", "load", f"--admin={admin}", f"--label={args.label}",
        f"--max-unavailable={args.max_unavailable}", *(("--release-first",) if args.release_first else ()),
        *((f"--token-file={token_file}",) if token_file else ()), "--", args.source,
    )  # fmt: skip


class WeightsRoller:
    """Owned by the loop that runs the replica's code. One rollout at a time: another one takes its place.

    command: of a rollout, by the router's present address; None while it has none.
    take_turn, end_turn: among the routers of the application: whether this one may roll out now. A turn that is not
    taken again lasts a few times renew_s.
    """

    def __init__(
        self,
        command: Callable[[RolloutArgs], tuple[str, ...] | None],
        take_turn: Callable[[], Awaitable[bool]],
        end_turn: Callable[[], Awaitable[None]],
        retry_s: float = RETRY_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self._command, self._take_turn, self._end_turn = command, take_turn, end_turn
        self._retry_s, self._renew_s = retry_s, renew_s
        self._wanted: RolloutArgs | None = None
        self._rolling: asyncio.Task[None] | None = None

    async def want(self, wanted: RolloutArgs | None) -> None:
        """Begin to roll out, if these are other weights than before."""
        if wanted == self._wanted:
            return
        await self.stop()
        self._wanted = wanted
        if wanted is not None:
            self._rolling = watched(self._roll_out(wanted), f"weights {wanted.label}")

    async def stop(self) -> None:
        rolling, self._rolling = self._rolling, None
        if rolling is not None:
            rolling.cancel()
            await asyncio.wait({rolling})

    async def done(self) -> None:
        """Wait for the rollout that is under way."""
        if self._rolling is not None:
            await asyncio.wait({self._rolling})

    async def _roll_out(self, wanted: RolloutArgs) -> None:
        """Try until it is done. A log says how each try ended."""
        until = asyncio.get_running_loop().time() + GIVE_UP_S
        while True:
            is_done, said = await self._try(wanted)
            if is_done:
                log.info("weights %s: %s", wanted.label, said)
                return
            if asyncio.get_running_loop().time() > until:
                log.error("weights %s are given up after %g s: %s", wanted.label, GIVE_UP_S, said)
                self._wanted = None  # the same wish, once more, is another try
                return
            log.warning("weights %s are not rolled out yet: %s", wanted.label, said)
            await asyncio.sleep(self._retry_s)

    async def _try(self, wanted: RolloutArgs) -> tuple[bool, str]:
        """Whether all nodes serve them, and what pdctl said last."""
        command = self._command(wanted)
        if command is None:
            return False, "the router is being started"
        try:
            if not await self._take_turn():
                return False, "another router does it"
            try:
                return await self._run_in_turn(command)
            finally:
                await self._end_turn()
        except Exception as error:  # the top of a try: Ray's store may not answer, and another try follows
            return False, f"{type(error).__name__}: {error}"

    async def _run_in_turn(self, command: tuple[str, ...]) -> tuple[bool, str]:
        """Keep the turn as long as pdctl runs."""
        running = asyncio.ensure_future(_run(command))
        try:
            while not (await asyncio.wait({running}, timeout=self._renew_s))[0]:
                await self._take_turn()
            return await running
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})


async def _run(command: tuple[str, ...]) -> tuple[bool, str]:
    process = await asyncio.create_subprocess_exec(
        *command, env=environment_of(own_environment()), stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
    lines = output.decode(errors="replace").strip().splitlines()
    return process.returncode == 0, lines[-1] if lines else f"pdctl ended with {process.returncode}"
