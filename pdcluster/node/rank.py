"""The process of one rank above 0 of a tensor-parallel node: its share of the weights, its pool, and the plans that rank 0 sends.

Started by `node.ranks`, never by hand: `python -m pdcluster.node.rank CHANNEL PULSE PARENT` with two inherited descriptors and the parent's pid.
It ends when its channel ends, and with its parent however that dies. Signals of a terminal are rank 0's business.
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

from pdcluster import log
from pdcluster.config import LogConfig, LogFormat, LogLevel
from pdcluster.engine.collective import Ranks, join_store
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.weights import DTypeChoice
from pdcluster.node.rank_channel import Here, Plan, RankChannel, Ready, Start, frame, unpack_plan

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
SEND_S = 10.0
PARENT_GONE = 127


def main() -> int:
    channel_fd, pulse_fd, parent = map(int, sys.argv[1:])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = RankChannel(socket.socket(fileno=channel_fd), send_s=SEND_S)
    received = channel.receive()
    if received is None or not isinstance(received[0], Start):
        return PARENT_GONE
    start = received[0]
    log.configure(log_config(start), process=f"rank {start.rank}")
    threading.Thread(target=pulse, args=(pulse_fd, start.pulse_s), name="pulse", daemon=True).start()
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    channel.send(frame(Here()))
    engine = start_engine(start)
    try:
        pool = engine.pool
        channel.send(frame(Ready(engine.num_pages, pool.nbytes, engine.weights_digest)), () if pool.fd is None else (pool.fd,))
        serve(channel, engine)
    finally:
        engine.close()
    return 0


def serve(channel: RankChannel, engine: Engine) -> None:
    """Compute what is sent until the stream ends. A step that fails leaves the ranks out of step, so it ends this one, and with it the node."""
    while (received := channel.receive()) is not None:
        message, _ = received
        assert isinstance(message, Plan)
        engine.step(unpack_plan(message))


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
    )
    return Engine(config, group=group)


def log_config(start: Start) -> LogConfig:
    return LogConfig(cast(LogLevel, start.log_level), cast(LogFormat, start.log_format))


def pulse(fd: int, interval_s: float) -> None:
    """Show that this process runs: a byte now and then. Nobody reads them while rank 0 is stopped, which is no error."""
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
