"""The process of one rank above 0: its share of the weights, its pool, its transfer endpoint, and plans from rank 0.

`engine` beside it starts it: `python -m pdcluster.node.native.tensor_parallel.rank PLANS TRANSFERS PULSE PARENT`, with
three inherited descriptors and the parent's pid. It ends with a channel and with its parent. Terminal signals are
rank 0's business.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import cast

from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.model.collective import Ranks, join_store
from pdcluster.engine.model.weights import DTypeChoice
from pdcluster.engine.ops.quantized import Quantization
from pdcluster.node.native.tensor_parallel.channel import (
    Here,
    Media,
    RankChannel,
    RankPlan,
    Ready,
    Start,
    frame,
    unpack_plan,
)
from pdcluster.node.native.tensor_parallel.endpoint import RankEndpoint
from pdcluster.processes.garbage import collect_seldom
from pdcluster.settings.config import LogConfig, LogFormat, LogLevel
from pdcluster.telemetry import log
from pdcluster.transfer.backends.base import Backend, Peer, Region
from pdcluster.transfer.backends.staged.staging import Fabric
from pdcluster.transfer.paths.choose import create_backends

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
SEND_S = 10.0
PARENT_GONE, ENDPOINT_FAILED = 127, 71


def main() -> int:
    plans_fd, transfers_fd, pulse_fd, parent = map(int, sys.argv[1:])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = RankChannel(socket.socket(fileno=plans_fd), send_s=SEND_S)
    transfers = RankChannel(socket.socket(fileno=transfers_fd), send_s=SEND_S)
    start = channel.receive()
    if not isinstance(start, Start):
        return PARENT_GONE
    log.configure(log_config(start), process=f"rank {start.rank}")
    threading.Thread(target=pulse, args=(pulse_fd, start.pulse_s), name="pulse", daemon=True).start()
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    channel.send(frame(Here()))
    engine = start_engine(start)
    backends = open_backends(start.media, engine, start.rank) if start.media is not None else {}
    try:
        adverts = tuple((name, backend.advert()) for name, backend in backends.items())
        if backends:
            endpoint = RankEndpoint(transfers, backends, engine.pool.view)
            threading.Thread(target=move, args=(endpoint,), name="endpoint", daemon=True).start()
        channel.send(frame(Ready(engine.num_pages, engine.weights_digest, adverts)))
        collect_seldom()
        serve(channel, engine)
    finally:
        for backend in backends.values():
            backend.shutdown()
        engine.close()
    return 0


def serve(channel: RankChannel, engine: Engine) -> None:
    """Compute plans until the stream ends. A failed step leaves the ranks out of step, so it ends this process and the
    node.
    """
    while (message := channel.receive()) is not None:
        assert isinstance(message, RankPlan)
        engine.step(unpack_plan(message))


def move(endpoint: RankEndpoint) -> None:
    """The thread of the transfer endpoint. An error there ends the process, and with it the node."""
    try:
        endpoint.run()
    except Exception:
        logger.exception("the transfer endpoint of this rank failed")
        os._exit(ENDPOINT_FAILED)


def open_backends(media: Media, engine: Engine, rank: int) -> dict[str, Backend]:
    fabric = Fabric(media.devices, media.gid_index, media.rails)
    backends = create_backends(
        media.backend, Peer(media.node, media.incarnation), host=media.host, staging_bytes=media.staging_bytes,
        fabric=fabric, port=None if media.port is None else media.port + rank,
        is_sealed=media.is_sealed,
    )  # fmt: skip
    for backend in backends.values():
        backend.register(Region(media.region, engine.pool.address, engine.pool.nbytes, engine.pool.fd))
    return backends


def start_engine(start: Start) -> Engine:
    group = Ranks(start.rank, start.size, join_store(start.store_port, start.timeout_s), start.device, start.timeout_s)
    config = EngineConfig(
        model_dir=Path(start.model_dir),
        cache_dir=Path(start.cache_dir),
        dtype=cast(DTypeChoice, start.dtype),
        device=start.device,
        page_tokens=start.page_tokens,
        num_pages=start.num_pages,
        kv_bytes=start.kv_bytes,
        max_len=start.max_len,
        threads=start.threads,
        deterministic=start.deterministic,
        quantization=cast(Quantization, start.quantization),
        weights_files=tuple(map(Path, start.weights_files)),
        populates=start.populates,
    )
    return Engine(config, group=group)


def log_config(start: Start) -> LogConfig:
    return LogConfig(cast(LogLevel, start.log_level), cast(LogFormat, start.log_format))


def pulse(fd: int, interval_s: float) -> None:
    """Write a byte now and then, to show that this process runs. Rank 0 may be stopped and not read; that is no
    error.
    """
    os.set_blocking(fd, False)
    while True:
        try:
            os.write(fd, b".")
        except BlockingIOError:
            logger.debug("nobody reads the pulse")
        except OSError:
            return  # rank 0 is gone
        time.sleep(interval_s)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        os._exit(PARENT_GONE)  # it died before prctl could tie us to it


if __name__ == "__main__":
    sys.exit(main())
