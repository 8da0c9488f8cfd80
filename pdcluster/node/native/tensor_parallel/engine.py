"""A tensor-parallel engine for the node's loop: rank 0 computes in this process, every other rank in a child process.

Rank 0 plans. `launch` sends the plan to all. Rank 0's result is the result, since its sums hold every rank's share. The
ranks are one engine: when one dies, falls silent or fails a step, they are out of step for good. `on_lost` must then
end this process, and its supervisor restarts it. Children die with this process. Each rank owns its pool and moves its
own KV through a `RankLink`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from pdcluster.core.awake_clock import AwakeClock
from pdcluster.core.errors import DeadlineExceeded, IntegrityError, ModelError, NodeLost, PdclusterError
from pdcluster.core.step import StepPlan, StepResult
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.model.base import LayerProgress
from pdcluster.engine.model.collective import Ranks, host_store
from pdcluster.engine.model.config import read_config
from pdcluster.engine.model.shard import share_of
from pdcluster.node.native.tensor_parallel.channel import Here, Media, RankChannel, Ready, Start, frame, pack_plan
from pdcluster.node.native.tensor_parallel.endpoint_client import RankLink
from pdcluster.settings.config import LogConfig

logger = logging.getLogger(__name__)

# Called from any thread with the reason why the engine cannot go on.
OnLost = Callable[[str], None]

STOP_S = 5.0
M = TypeVar("M", Here, Ready)


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Ranks.

    size: with this one.
    cores: what each is pinned to; empty for anywhere.
    start_s: longest time until all are ready.
    step_s: longest wait for other ranks within a step.
    pulse_s, silence_s: how often a rank shows that it lives, and when it counts as lost.
    media: of rank 0; the others' regions have the next ids. None: no transfers.
    """

    size: int
    cores: tuple[tuple[int, ...], ...] = ()
    start_s: float = 300.0
    step_s: float = 60.0
    pulse_s: float = 0.5
    silence_s: float = 5.0
    log: LogConfig = field(default_factory=LogConfig)
    media: Media | None = None


@dataclass(slots=True)
class RankProcess:
    rank: int
    process: subprocess.Popen[bytes]
    channel: RankChannel
    pulse_fd: int
    pidfd: int
    transfers: socket.socket
    link: RankLink | None = None


class RankedEngine:
    """Implements components.StepEngine. launch, collect, step, warmup and close belong to one thread.

    local: rank 0's engine.
    layout: of every rank's pool.
    """

    def __init__(
        self, config: EngineConfig, settings: RankSettings, on_lost: OnLost, progress: LayerProgress | None = None
    ) -> None:
        share_of(read_config(config.model_dir), 0, settings.size)  # a mistake is reported before anything starts
        self._on_lost = on_lost
        self._settings = settings
        self._children: list[RankProcess] = []
        self._closing = threading.Event()
        self._is_lost = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watcher: threading.Thread | None = None
        store, local = host_store(settings.start_s), None
        try:
            for rank in range(1, settings.size):
                self._children.append(_spawn(rank, config, settings, store.port))
            deadline = time.monotonic() + settings.start_s
            for child in self._children:
                self._await(child, Here, deadline)
            group = Ranks(0, settings.size, store, config.device, settings.step_s)
            self.local = local = Engine(_of_rank(config, 0), progress, group)
            for child in self._children:
                self._take_ready(child, self._await(child, Ready, deadline))
        except BaseException:
            self._end_children(0.0)
            if local is not None:
                local.close()
            os.close(self._wake_fd)
            raise
        self.layout, self.num_pages = self.local.layout, self.local.num_pages
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks above 0."""
        return tuple(child.process.pid for child in self._children)

    @property
    def links(self) -> tuple[RankLink, ...]:
        """Links to the transfer endpoints of the ranks above 0; empty without transfers."""
        return tuple(child.link for child in self._children if child.link is not None)

    @property
    def done_fd(self) -> int:
        return self.local.done_fd

    @property
    def layer_fd(self) -> int:
        return self.local.layer_fd

    @property
    def layers_done(self) -> int:
        """Layers done. A layer is done when its last sum is: every rank wrote its KV before contributing."""
        return self.local.layers_done

    @property
    def progress(self) -> int:
        """Rank 0's. It waits for the others in every layer."""
        return self.local.progress

    @property
    def is_compiling(self) -> bool:
        return self.local.is_compiling

    def launch(self, plan: StepPlan) -> None:
        """Raises IntegrityError, before any rank computes, for a plan that continues with tokens that only rank 0
        samples.
        """
        if any(row.follows for row in plan.rows):
            raise IntegrityError(
                "a step was planned before the tokens of the one before it were known, which the ranks above 0 never "
                "learn"
            )
        data = frame(pack_plan(plan))
        for child in self._children:
            try:
                child.channel.send(data)
            except OSError as error:
                self._lose(f"rank {child.rank} takes no plans: {error}")
                raise NodeLost(f"rank {child.rank} of this node is gone") from error
        self.local.launch(plan)

    def collect(self, timeout: float | None = None) -> StepResult:
        try:
            return self.local.collect(timeout)
        except DeadlineExceeded:
            raise
        except Exception as error:
            self._lose(f"a step failed, and the ranks are out of step: {error}")
            raise

    def step(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.collect()

    def warmup(self) -> None:
        for plan in self.local.warmup_plans():
            self.step(plan)

    def close(self) -> None:
        """End the children, then the own rank. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.eventfd_write(self._wake_fd, 1)
        if self._watcher is not None:
            self._watcher.join()
        self._end_children(0.0 if self._is_lost else STOP_S)
        self.local.close()
        os.close(self._wake_fd)

    # ------------------------------------------------------------ starting and ending

    def _await(self, child: RankProcess, kind: type[M], deadline: float) -> M:
        try:
            received = child.channel.receive(max(0.1, deadline - time.monotonic()))
        except TimeoutError as error:
            raise PdclusterError(f"rank {child.rank} was not ready within {self._settings.start_s:g} s") from error
        if not isinstance(received, kind):
            child.process.wait(STOP_S)
            raise PdclusterError(
                f"rank {child.rank} ended before it was ready (status {child.process.returncode}); its log says why"
            )
        return received

    def _take_ready(self, child: RankProcess, ready: Ready) -> None:
        if ready.adverts:
            child.link = RankLink(child.transfers, child.rank, dict(ready.adverts), self._lose)
        if (ready.num_pages, ready.weights_digest) != (self.local.num_pages, self.local.weights_digest):
            raise ModelError(
                f"rank {child.rank} loaded other weights or another pool than rank 0; the model directory changed "
                "meanwhile"
            )

    def _end_children(self, patience_s: float) -> None:
        for child in self._children:
            child.channel.close()  # which they take as the end
            if child.link is not None:
                child.link.close()
        deadline = time.monotonic() + patience_s
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.transfers.close()
            os.close(child.pulse_fd)
            os.close(child.pidfd)
        self._children.clear()

    # ------------------------------------------------------------ watching, on a thread of its own

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        for child in self._children:
            poller.register(child.pulse_fd, select.POLLIN)
            poller.register(child.pidfd, select.POLLIN)
        clock = AwakeClock(2 * self._settings.pulse_s)
        heard_at = dict.fromkeys((child.rank for child in self._children), clock())
        while not self._closing.is_set():
            ready = {fd for fd, _ in poller.poll(self._settings.pulse_s * 1000)}
            now = clock()
            for child in self._children:
                if child.pidfd in ready and not self._closing.is_set():
                    self._lose(f"rank {child.rank} (pid {child.process.pid}) died")
                    return
                if child.pulse_fd in ready:
                    os.read(child.pulse_fd, 4096)
                    heard_at[child.rank] = now
                silent_s = now - heard_at[child.rank]
                if silent_s >= self._settings.silence_s:
                    self._lose(f"rank {child.rank} (pid {child.process.pid}) was silent for {silent_s:.1f} s")
                    return

    def _lose(self, reason: str) -> None:
        if not self._closing.is_set():
            self._is_lost = True
            self._on_lost(reason)


def _of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """A rank's engine config. On GPUs every rank has its own device."""
    return config if config.device == "cpu" else replace(config, device=f"{config.device}:{rank}")


def _spawn(rank: int, config: EngineConfig, settings: RankSettings, store_port: int) -> RankProcess:
    (plans, its_plans), (transfers, its_transfers) = socket.socketpair(), socket.socketpair()
    pulse_fd, pulse_writer = os.pipe()
    its_fds = (its_plans.fileno(), its_transfers.fileno(), pulse_writer)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdcluster.node.native.tensor_parallel.rank", *map(str, its_fds), str(os.getpid())],
            pass_fds=its_fds,
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        plans.close()
        transfers.close()
        os.close(pulse_fd)
        raise
    finally:
        its_plans.close()
        its_transfers.close()
        os.close(pulse_writer)
    child = RankProcess(
        rank, process, RankChannel(plans, send_s=settings.silence_s), pulse_fd, os.pidfd_open(process.pid), transfers
    )
    child.channel.send(frame(_start_message(rank, config, settings, store_port)))
    return child


def _start_message(rank: int, config: EngineConfig, settings: RankSettings, store_port: int) -> Start:
    own = _of_rank(config, rank)
    return Start(
        rank=rank,
        size=settings.size,
        store_port=store_port,
        timeout_s=settings.step_s,
        pulse_s=settings.pulse_s,
        model_dir=str(own.model_dir),
        cache_dir=str(own.cache_dir),
        dtype=own.dtype,
        device=own.device,
        page_tokens=own.page_tokens,
        num_pages=own.num_pages,
        kv_bytes=own.kv_bytes,
        max_len=own.max_len,
        threads=own.threads,
        log_level=settings.log.level,
        log_format=settings.log.format,
        cores=settings.cores[rank] if settings.cores else (),
        media=msgspec.structs.replace(settings.media, region=settings.media.region + rank)
        if settings.media is not None
        else None,
        deterministic=own.deterministic,
        quantization=own.quantization,
        weights_files=tuple(map(str, own.weights_files)),
        populates=own.populates,
    )
