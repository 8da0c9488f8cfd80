"""A trainer as a process of its own: it changes the weights of a cluster as it is told, and may be killed at any stage.

Reads orders as JSON lines, one after the other, and writes what it does as JSON lines: the stages, and then how it
ended. Where an order says so, it waits at a stage until it reads another line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
import msgspec
from safetensors.torch import load_file

from pdcluster.core.errors import PdclusterError
from pdcluster.core.messages import TensorDigests, WeightsTarget
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.transfer.backends.base import Backend, Handle, Peer, Stamp
from pdcluster.transfer.layout.spans import CopyRuns
from pdcluster.weights.publisher import Publisher

# For a rollout, and for an answer about a pause beside the pause's own time.
ROLL_S, CALL_S = 120.0, 10.0


class Order(msgspec.Struct, frozen=True):
    """One change.

    change: "load" or "push".
    pause: its mode; "": without one.
    source: of a load. directory: of what is pushed.
    admins: addresses of the routers that run; the first one is asked for the change.
    ca: the certificate that they are known by; "": without TLS.
    wait_at: the stage at which to wait; "": at none.
    """

    change: str
    pause: str
    label: str
    source: str
    directory: str
    admins: tuple[str, ...]
    max_unavailable: int
    finish_s: float
    max_pause_s: float
    ca: str = ""
    wait_at: str = ""


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


class Stages:
    """Says each stage once, and waits at one of them."""

    def __init__(self, wait_at: str) -> None:
        self._wait_at, self._reached = wait_at, set[str]()

    def reach(self, stage: str) -> None:
        if stage not in self._reached:
            self._reached.add(stage)
            say(stage=stage)
            if stage == self._wait_at:
                sys.stdin.readline()


class HalfwayBackend:
    """A backend that tells when half of the bytes are on their way."""

    def __init__(self, backend: Backend, half: int, tell: Callable[[], None]) -> None:
        self._backend, self._left, self._tell = backend, half, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def write(self, peer: Peer, source: int, target: int, stamp: Stamp, runs: CopyRuns) -> Handle:
        handle = self._backend.write(peer, source, target, stamp, runs)
        self._left -= stamp.nbytes
        if self._left <= 0:
            self._tell()
        return handle


class StagedPublisher(Publisher):
    """Stages: writing (half of the bytes), written (not committed), serving (the first node)."""

    def __init__(self, admin: str, ca: str, stages: Stages, nbytes: int) -> None:
        super().__init__(admin, ca=ca or None)
        self._stages, self._nbytes = stages, nbytes

    def _media(self, me: Peer, target: WeightsTarget) -> dict[str, Backend]:
        media: Mapping[str, Any] = super()._media(me, target)
        return {
            name: HalfwayBackend(backend, self._nbytes // 2, lambda: self._stages.reach("writing"))
            for name, backend in media.items()
        }

    def _commit(self, opened: pb.OpenPushReply, label: str, digests: TensorDigests) -> str:
        self._stages.reach("written")
        return super()._commit(opened, label, digests)


class ServingLog(logging.Handler):
    """The publisher logs each node that serves."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._stages = stages

    def emit(self, record: logging.LogRecord) -> None:
        if " serves " in record.getMessage():
            self._stages.reach("serving")


@lru_cache(maxsize=8)
def tensors_of(directory: str) -> dict[str, Any]:
    return load_file(Path(directory) / "model.safetensors")


class Change:
    """One order while it runs."""

    def __init__(self, order: Order) -> None:
        self._order, self._stages = order, Stages(order.wait_at)

    def run(self) -> None:
        if not self._order.pause:
            self._change()
            return
        try:
            self._ask_all("Pause", pb.PauseRequest(mode=self._order.pause, max_pause_s=self._order.max_pause_s))
            self._stages.reach("paused")
            self._change()
            self._stages.reach("changed")
        finally:
            self._ask_all("Resume", pb.ResumeRequest(), but=grpc.StatusCode.UNAVAILABLE)

    def _change(self) -> None:
        if self._order.change == "push":
            self._push()
        else:
            self._load()

    def _push(self) -> None:
        order, tensors = self._order, tensors_of(self._order.directory)
        nbytes, log, handler = (
            sum(each.nbytes for each in tensors.values()),
            logging.getLogger("pdcluster.weights.publisher"),
            ServingLog(self._stages),
        )
        log.addHandler(handler)
        try:
            with StagedPublisher(order.admins[0], order.ca, self._stages, nbytes) as publisher:
                publisher.push(tensors, order.label, finish_s=order.finish_s, max_unavailable=order.max_unavailable)
        finally:
            log.removeHandler(handler)

    def _load(self) -> None:
        order = self._order
        request = pb.LoadWeightsRequest(
            source=order.source, label=order.label, max_unavailable=order.max_unavailable, finish_s=order.finish_s
        )
        with self._channel(order.admins[0]) as channel:
            for progress in stubs.AdminStub(channel).LoadWeights(request, timeout=ROLL_S):
                self._stages.reach(progress.stage)

    def _ask_all(self, method: str, request: Any, but: grpc.StatusCode | None = None) -> None:
        """Of all routers at the same time. but: an error that counts as an answer: a router that is gone has no pause."""

        def ask(admin: str) -> None:
            with self._channel(admin) as channel:
                try:
                    getattr(stubs.AdminStub(channel), method)(request, timeout=self._order.max_pause_s + CALL_S)
                except grpc.RpcError as error:
                    if error.code() != but:
                        raise

        with ThreadPoolExecutor(len(self._order.admins)) as pool:
            for asking in [pool.submit(ask, admin) for admin in self._order.admins]:
                asking.result()

    def _channel(self, admin: str) -> grpc.Channel:
        if not self._order.ca:
            return grpc.insecure_channel(admin)
        return grpc.secure_channel(admin, grpc.ssl_channel_credentials(Path(self._order.ca).read_bytes()))


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    say(stage="ready")
    while line := sys.stdin.readline():
        if not line.strip():
            continue  # for a stage that was not reached
        try:
            Change(msgspec.json.decode(line, type=Order)).run()
        except (grpc.RpcError, PdclusterError) as error:
            logging.exception("the change failed")
            say(failed=str(error.details() if isinstance(error, grpc.RpcError) else error))
        else:
            say(done=True)


if __name__ == "__main__":
    main()
