"""Other weights in the place of those that vLLM serves, read from files, wholly or not at all. Owned by the engine's
thread.

Rules:
1. No block of the KV cache is in use, and none is cached, before a weight changes. So no KV of one version meets the
   other's weights: what a request, a parked prompt or a read still has must end first.
2. The digest of the files is taken again after vLLM read them. Files that changed since the order are refused.
3. Where anything fails, vLLM reads the former weights again. They serve on only if vLLM's own checksums of all tensors
   are those of before; otherwise the engine ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final

from pdcluster.core.errors import ModelError, PdclusterError
from pdcluster.node.vllm.engine.interface import WeightsChange
from pdcluster.node.vllm.engine.weight_files import weight_files_digest

logger = logging.getLogger(__name__)

# Beyond the lease of parked KV, for blocks to be free; how often they are looked at.
FREE_S: Final = 10.0
LOOK_S: Final = 0.05
# For an answer that takes no load: checksums read all weights.
CALL_S: Final = 300.0


class WeightsLost(PdclusterError):
    """Nobody knows which weights the engine has. It must not serve on."""

    code = "weights_lost"


class EngineWeights:
    """lease_s: after which nobody holds parked KV."""

    def __init__(self, llm: Any, lease_s: float) -> None:
        self._llm = llm
        self._longest_s = lease_s + FREE_S
        self._stop = threading.Event()

    def stop(self) -> None:
        """The engine ends: read no more files. Safe in any thread."""
        self._stop.set()

    async def replace(self, change: WeightsChange) -> None:
        """Raises ModelError where the former weights are in place, WeightsLost where they are not, and EngineDeadError
        of vLLM.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._clear_cache()
            sums = await self._sums()
        except (EngineDeadError, ModelError):
            raise
        except Exception as error:
            raise ModelError(f"vLLM could not be made ready for other weights: {error}") from error
        try:
            await self._load(change.path, change.timeout_s)
            await self._check_files(change)
        except (EngineDeadError, WeightsLost):
            raise
        except Exception as error:
            logger.warning(
                "the weights in %s cannot be loaded, the former ones are loaded again: %s", change.path, error
            )
            await self._load_back(change, sums, error)
            raise ModelError(
                f"vLLM could not load the weights in {change.path}, and serves the former ones: {error}"
            ) from error

    async def _clear_cache(self) -> None:
        """Rule 1. vLLM forgets its prefix cache only while no block is in use."""
        until = time.monotonic() + self._longest_s
        while not await _answered(self._llm.reset_prefix_cache(reset_connector=True), "to empty its cache"):
            if time.monotonic() >= until:
                raise ModelError(
                    f"KV of the weights that serve was in use for {self._longest_s:g} s more, by a read or as parked "
                    "KV; load the weights again"
                )
            await asyncio.sleep(LOOK_S)

    async def _sums(self) -> object:
        return await _answered(self._llm.compute_weight_checksums(), "for the checksums of its weights")

    async def _load(self, path: str, timeout_s: float) -> None:
        """A worker that is late may still write, so nothing is known after that."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._llm.collective_rpc("load_weights_from", args=(path,))
        except TimeoutError:
            raise WeightsLost(f"vLLM did not load the weights in {path} within {timeout_s:g} s") from None

    async def _check_files(self, change: WeightsChange) -> None:
        """Rule 2. Where vLLM lacks a tensor in the files it only logs that, so they must be those of the order."""
        digest = await asyncio.to_thread(weight_files_digest, Path(change.path), self._stop)
        if digest != change.digest:
            raise ModelError("the files changed since they were checked")

    async def _load_back(self, change: WeightsChange, sums: object, cause: Exception) -> None:
        """Rule 3."""
        from vllm.v1.engine.exceptions import EngineDeadError

        lost = f"vLLM could not load the weights in {change.path} ({cause}), and has not the former ones"
        try:
            await self._load(change.former, change.timeout_s)
            found = await self._sums()
        except (EngineDeadError, WeightsLost):
            raise
        except Exception as error:
            raise WeightsLost(f"{lost}: {change.former} cannot be loaded: {error}") from error
        if found != sums:
            raise WeightsLost(f"{lost}: those in {change.former} are others by now")


async def _answered(call: Awaitable[Any], what: str) -> Any:
    """Raises ModelError where vLLM does not answer in time."""
    try:
        async with asyncio.timeout(CALL_S):
            return await call
    except TimeoutError:
        raise ModelError(f"vLLM was asked {what}, and did not answer within {CALL_S:g} s") from None
