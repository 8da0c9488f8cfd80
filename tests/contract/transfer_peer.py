"""The other end of a transfer, as a process of its own that tests can stop and kill. Speaks JSON lines on stdin and
stdout.

    python transfer_peer.py reader BACKEND NBYTES          prints {"advert": hex}; permits nonce 7 to the writer for all
    of it python transfer_peer.py writer BACKEND NBYTES ADVERT   writes all of it under nonce 7, again and again, until
    it is killed Peers are always Peer("r", "r1") and Peer("w", "w1").
"""

from __future__ import annotations

import json
import sys
import time

from transfer_memory import Memory

from pdcluster.core.errors import PeerUnreachable
from pdcluster.transfer.backends.base import Backend, Peer, Permit, Stamp, WriteStatus
from pdcluster.transfer.layout.spans import CopyRun
from pdcluster.transfer.paths.choose import create_backends

READER, WRITER = Peer("r", "r1"), Peer("w", "w1")
# tcp with sealed frames.
SEALED = "tcp-sealed"
CHUNK = 4 << 20


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def start(name: str, me: Peer) -> Backend:
    is_sealed = name == SEALED
    name = "tcp" if is_sealed else name
    return create_backends(name, me, host="127.0.0.1", staging_bytes=8 << 20, is_sealed=is_sealed)[name]


def read(name: str, nbytes: int) -> None:
    memory, backend = Memory(nbytes), start(name, READER)
    backend.register(memory.region)
    backend.permit(Permit(7, WRITER, 0, ((0, nbytes),)))
    say(advert=backend.advert().hex())
    sys.stdin.read()


def write(name: str, nbytes: int, advert: bytes) -> None:
    memory, backend = Memory(nbytes), start(name, WRITER)
    memory.bytes[:] = 0xAB
    backend.register(memory.region)
    backend.connect(READER, advert)
    say(ready=True)
    trial = 0
    while True:
        trial += 1
        pending = []
        for offset in range(0, nbytes, CHUNK):
            run = CopyRun(offset, offset, min(CHUNK, nbytes - offset))
            try:
                pending.append(backend.write(READER, 0, 0, Stamp(7, offset // CHUNK, trial, run.nbytes), (run,)))
            except PeerUnreachable:
                time.sleep(0.05)
        while pending:
            pending = [handle for handle in pending if backend.poll(handle) is WriteStatus.PENDING]
            time.sleep(0.001)


if __name__ == "__main__":
    role, name, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "reader":
        read(name, size)
    else:
        write(name, size, bytes.fromhex(sys.argv[4]))
