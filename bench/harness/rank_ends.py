"""A rank above 0 of a node in `bench.layouts`: a process of its own with the endpoint of `node.tensor_parallel.rank`
over its own pool, but no engine.

`RankProcess` is rank 0's side: it starts the process, learns its adverts and reaches it by
`node.tensor_parallel.endpoint_client`, as `node.native.tensor_parallel.engine` does. Measures nothing.

    python -m bench.harness.rank_ends FD SETUP     the process; it serves until its end of the socket closes
"""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
from typing import Protocol

import msgspec
import numpy as np

from pdcluster.core.messages import NodeMessage
from pdcluster.node.native.tensor_parallel.channel import RankChannel, Ready, frame
from pdcluster.node.native.tensor_parallel.endpoint import RankEndpoint
from pdcluster.node.native.tensor_parallel.endpoint_client import RankLink
from pdcluster.transfer.backends.base import Peer, Region
from pdcluster.transfer.paths.choose import create_backends

START_S, SEND_S = 60.0, 5.0


class Setup(NodeMessage, frozen=True):
    """pool_fd: inherited, the shared memory of its pool."""

    backend: str
    host: str
    staging_bytes: int
    node: str
    incarnation: str
    region: int
    pool_fd: int
    nbytes: int


class SharedPool(Protocol):
    fd: int
    region: Region


class RankProcess:
    def __init__(self, backend: str, host: str, staging_bytes: int, me: Peer, pool: SharedPool) -> None:
        region, (sock, there) = pool.region, socket.socketpair()
        setup = Setup(backend, host, staging_bytes, me.node, me.incarnation, region.id, pool.fd, region.nbytes)
        arguments = [str(there.fileno()), msgspec.json.encode(setup).decode()]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.harness.rank_ends", *arguments], pass_fds=[there.fileno(), pool.fd]
        )
        there.close()
        ready = RankChannel(sock, send_s=SEND_S).receive(START_S)
        if not isinstance(ready, Ready):
            raise RuntimeError(f"the process of rank {region.id} said {ready!r} instead of its adverts")
        self.link = RankLink(sock, region.id, dict(ready.adverts), _lost)

    def close(self) -> None:
        self.link.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _lost(reason: str) -> None:
    print(f"bench.harness.rank_ends: {reason}", file=sys.stderr)


def main() -> None:
    fd, argument = sys.argv[1:]
    setup = msgspec.json.decode(argument, type=Setup)
    channel = RankChannel(socket.socket(fileno=int(fd)), send_s=SEND_S)
    memory = np.frombuffer(mmap.mmap(setup.pool_fd, setup.nbytes), dtype=np.uint8)
    memory[::4096].sum()  # this process's page tables
    backends = create_backends(
        setup.backend, Peer(setup.node, setup.incarnation), host=setup.host, staging_bytes=setup.staging_bytes
    )
    try:
        for backend in backends.values():
            backend.register(Region(setup.region, memory.ctypes.data, setup.nbytes, setup.pool_fd))
        channel.send(frame(Ready(0, "", tuple((name, backend.advert()) for name, backend in backends.items()))))
        RankEndpoint(channel, backends, memory.data).run()
    finally:
        for backend in backends.values():
            backend.shutdown()


if __name__ == "__main__":
    main()
