"""What each call of a trainer does: Admin's operations, under vLLM's and SGLang's names.

1. A pause that the trainer began ends by its /resume or /continue_generation. Updates and releases end only a pause
   that they began themselves, and that nobody has asked for since.
2. Between /start_weight_update and /finish_weight_update an update is open. It holds a source, and its files are read
   at the finish, when the label is known. It closes with the finish, with a resume, or when max_pause_s is over.
3. Nodes go over together (max_unavailable 0), and the answer comes when all serve.
4. A call that is cancelled takes its rollout back, as a gRPC call does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from pdcluster_router.admin import sleeping
from pdcluster_router.admin.operations import NodeStatus, Operations, WeightsRollout
from pdcluster_router.admin.rollouts import check_wanted
from pdcluster_router.control.parameters import (
    Conflict,
    ContinueParameters,
    DiskUpdate,
    FinishUpdate,
    FlushParameters,
    GivenUpdate,
    Parameters,
    PauseGenerationParameters,
    PauseParameters,
    ReleaseParameters,
    ResetCacheParameters,
    SleepParameters,
    StartUpdate,
    WakeParameters,
)
from pdcluster_router.queueing.pauses import USUAL_PAUSE_S, PauseMode, pause_mode

Answer = dict[str, Any]
PauseHolder = Literal["nobody", "trainer", "update", "load", "release"]
# Of a label that is made from a path, without the epoch behind it.
MAX_STEM_CHARS = 40


@dataclass(slots=True)
class OpenUpdate:
    """Rule 2.

    until: when it closes by itself, by the clock of the calls.
    source: "" before it is given.
    """

    until: float
    source: str = ""


class TrainerCalls:
    """Owned by one event loop."""

    def __init__(self, operations: Operations, clock: Callable[[], float] = time.monotonic) -> None:
        self._operations, self._clock = operations, clock
        self._update: OpenUpdate | None = None
        # For whom requests are held (rule 1).
        self._holder: PauseHolder = "nobody"

    async def _hold(self, holder: PauseHolder, mode: PauseMode, max_pause_s: float) -> None:
        """Pause, where nobody has."""
        if await self._operations.is_paused():
            return
        self._holder = holder
        try:
            await self._operations.pause(mode, max_pause_s)
        except BaseException:  # a caller that goes, too
            await self._let_go(holder)
            raise

    async def _let_go(self, holder: PauseHolder) -> None:
        if self._holder == holder:
            self._holder = "nobody"
            await self._operations.resume()

    # ------------------------------------------------------------ pauses

    async def pause(self, said: PauseParameters) -> Answer:
        return {"status": "paused", "requests": await self._pause(said.pause_mode, said.max_pause_s)}

    async def pause_generation(self, said: PauseGenerationParameters) -> Answer:
        num_running = await self._pause(said.pause_mode, said.max_pause_s)
        return {"status": "ok", "message": f"paused; {num_running} requests were running"}

    async def _pause(self, mode: PauseMode, max_pause_s: float) -> int:
        self._holder = "trainer"
        return await self._operations.pause(mode, max_pause_s)

    async def resume(self, said: Parameters) -> Answer:
        return {"status": "resumed", "was_paused": await self._resume()}

    async def continue_generation(self, said: ContinueParameters) -> Answer:
        was_paused = await self._resume()
        return {"status": "ok", "message": "requests go on" if was_paused else "there was no pause"}

    async def _resume(self) -> bool:
        was_paused = await self._operations.resume()
        self._update, self._holder = None, "nobody"
        return was_paused

    async def is_paused(self, said: Parameters) -> Answer:
        return {"is_paused": await self._operations.is_paused()}

    # ------------------------------------------------------------ sleep

    async def sleep(self, said: SleepParameters) -> Answer:
        mode = pause_mode(said.mode)
        self._holder = "trainer"
        names = await sleeping.put_to_sleep(self._operations, mode, said.max_pause_s, said.finish_s)
        return {"status": "sleeping", "nodes": names}

    async def wake_up(self, said: WakeParameters) -> Answer:
        names = await sleeping.wake(self._operations)
        self._holder = "nobody"
        return {"status": "awake", "nodes": names}

    async def is_sleeping(self, said: Parameters) -> Answer:
        return {"is_sleeping": await sleeping.is_sleeping(self._operations)}

    async def release_memory(self, said: ReleaseParameters) -> Answer:
        if not await self._operations.is_paused():
            self._holder = "release"
        try:
            names = await sleeping.put_to_sleep(self._operations, "keep", said.max_pause_s, said.finish_s)
        except BaseException:
            if not await self._operations.is_paused():  # no node sleeps
                self._holder = "nobody"
            raise
        return {"success": True, "message": f"{len(names)} nodes sleep", "nodes": names}

    async def resume_memory(self, said: WakeParameters) -> Answer:
        names = await self._operations.wake()
        await self._let_go("release")
        return {"success": True, "message": f"{len(names)} nodes woke", "nodes": names}

    # ------------------------------------------------------------ caches

    async def flush_cache(self, said: FlushParameters | ResetCacheParameters) -> Answer:
        """The caller wants that no KV of former weights is used afterwards, which holds anyway."""
        return {"success": True, "message": "nothing was dropped: KV is used under the weights that computed it only"}

    # ------------------------------------------------------------ weights

    async def weight_version(self, said: Parameters) -> Answer:
        """The newest version that serves, and all of them."""
        nodes = await self._operations.nodes()
        versions = sorted({node.weights for node in nodes}, key=lambda version: -version.epoch)
        newest = versions[0].label if versions else None
        served = [
            {
                "weight_version": version.label,
                "epoch": version.epoch,
                "digest": version.digest,
                "nodes": sorted(node.name for node in nodes if node.weights == version),
            }
            for version in versions
        ]
        return {"weight_version": newest, "weight_versions": served}

    async def model_info(self, said: Parameters) -> Answer:
        nodes = await self._operations.nodes()
        newest = max(nodes, key=lambda node: node.weights.epoch, default=None)
        path = None if newest is None else newest.weights_source or newest.model
        return {"model_path": path, "is_generation": True, **await self.weight_version(said)}

    async def update_from_disk(self, said: DiskUpdate) -> Answer:
        wanted = await self._wanted(said.model_path, said.weight_version, said.finish_s, said.release_first)
        if not said.abort_all_requests:
            return {"success": True, "message": await self._load(wanted)}
        was_paused = await self._operations.is_paused()
        await self._hold("load", "abort", USUAL_PAUSE_S)
        if was_paused:
            await self._operations.pause("abort", USUAL_PAUSE_S)
        try:
            return {"success": True, "message": await self._load(wanted)}
        finally:
            await self._let_go("load")

    async def start_update(self, said: StartUpdate) -> Answer:
        if self._open is not None:
            raise Conflict("an update is open already; end it with /finish_weight_update, or give it up with /resume")
        update = self._update = OpenUpdate(self._clock() + said.max_pause_s)
        try:
            await self._hold("update", "keep", said.max_pause_s)
        except BaseException:  # nor is it open for a caller that goes
            self._update = None if self._update is update else self._update
            raise
        return {"message": "Weight update started"}

    async def give_update(self, said: GivenUpdate) -> Answer:
        update, source = self._must_be_open(), said.source
        if update.source:
            raise Conflict("weights were given already, and one source has all tensors; call /finish_weight_update")
        update.source = source.model_path
        return {"message": f"Weights are read from {source.model_path} at /finish_weight_update"}

    async def finish_update(self, said: FinishUpdate) -> Answer:
        update = self._must_be_open()
        if not update.source:
            raise Conflict("no weights were given; call /update_weights before, or give up with /resume")
        wanted = await self._wanted(update.source, said.weight_version, said.finish_s, said.release_first)
        message = await self._load(wanted)
        if self._update is update:  # nobody gave it up meanwhile
            self._update = None
            await self._let_go("update")
        return {"message": f"Weight update finished: {message}"}

    @property
    def _open(self) -> OpenUpdate | None:
        if self._update is not None and self._clock() >= self._update.until:
            self._update = None
        return self._update

    def _must_be_open(self) -> OpenUpdate:
        if (update := self._open) is None:
            raise Conflict("no update is open, or its max_pause_s is over; call /start_weight_update")
        return update

    async def _wanted(self, source: str, label: str | None, finish_s: float, releases_first: bool) -> WeightsRollout:
        """What nodes shall serve. Raises BadRequest and Conflict before anything is touched."""
        nodes = await self._operations.nodes()
        if label is None:
            label = label_of(source, 1 + max((node.weights.epoch for node in nodes), default=0))
        _require_unserved(nodes, label)
        wanted = WeightsRollout(source, label, 0, finish_s=finish_s, releases_first=releases_first)
        check_wanted(wanted)
        return wanted

    async def _load(self, wanted: WeightsRollout) -> str:
        """Have all nodes serve weights. Returns what was done."""
        told = f"no node was there for {wanted.label}"
        async with aclosing(self._operations.load_weights(wanted)) as steps:
            async for progress in steps:
                told = f"{progress.num_done} of {progress.num_nodes} nodes serve {progress.version}"
        return told


def _require_unserved(nodes: list[NodeStatus], label: str) -> None:
    """A trainer that gives a label twice believes that new weights serve. Raises Conflict."""
    is_served = all(node.weights.label == label and node.state != "sleeping" for node in nodes)
    if nodes and is_served and len({node.weights for node in nodes}) == 1:
        raise Conflict(
            f"all nodes serve the weights {label!r} already, and nothing was loaded; give other weights another "
            "weight_version"
        )


def label_of(source: str, epoch: int) -> str:
    """A label for weights without one: the last part of their path, and the epoch."""
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "-", PurePosixPath(source).name).lstrip("._+-")[:MAX_STEM_CHARS]
    return f"{stem or 'weights'}:{epoch}"


@dataclass(frozen=True, slots=True)
class Call:
    """One path. run: a method of TrainerCalls."""

    methods: tuple[str, ...]
    parameters: type[Parameters]
    run: Callable[[TrainerCalls, Any], Awaitable[Answer]]


_GET, _POST = ("GET",), ("POST",)
CALLS: dict[str, Call] = {
    "/pause": Call(_POST, PauseParameters, TrainerCalls.pause),
    "/pause_generation": Call(_POST, PauseGenerationParameters, TrainerCalls.pause_generation),
    "/resume": Call(_POST, Parameters, TrainerCalls.resume),
    "/continue_generation": Call(_POST, ContinueParameters, TrainerCalls.continue_generation),
    "/is_paused": Call(_GET, Parameters, TrainerCalls.is_paused),
    "/sleep": Call(_POST, SleepParameters, TrainerCalls.sleep),
    "/wake_up": Call(_POST, WakeParameters, TrainerCalls.wake_up),
    "/is_sleeping": Call(_GET, Parameters, TrainerCalls.is_sleeping),
    "/release_memory_occupation": Call(_POST, ReleaseParameters, TrainerCalls.release_memory),
    "/resume_memory_occupation": Call(_POST, WakeParameters, TrainerCalls.resume_memory),
    "/start_weight_update": Call(_POST, StartUpdate, TrainerCalls.start_update),
    "/update_weights": Call(_POST, GivenUpdate, TrainerCalls.give_update),
    "/finish_weight_update": Call(_POST, FinishUpdate, TrainerCalls.finish_update),
    "/update_weights_from_disk": Call(_POST, DiskUpdate, TrainerCalls.update_from_disk),
    "/weight_info": Call(_GET, Parameters, TrainerCalls.weight_version),
    "/get_weight_version": Call(_GET, Parameters, TrainerCalls.weight_version),
    "/model_info": Call(_GET, Parameters, TrainerCalls.model_info),
    "/flush_cache": Call(_GET + _POST, FlushParameters, TrainerCalls.flush_cache),
    "/reset_prefix_cache": Call(_POST, ResetCacheParameters, TrainerCalls.flush_cache),
}
