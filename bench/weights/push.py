"""What pushing weights costs: from a trainer's memory into a node's, and from node to node.

    python -m bench.weights.push [--quick] [--json FILE] [--transfer shm,tcp]

Each receiver is a process of its own. The ceiling of the same run is one thread that copies the same bytes into fresh
shared memory and digests them there. `push` is from the open target to the receiver's checked image: both ends digest.
`pass on` is from the first node's image to all receivers: each node that has the weights gives them to one other at a
time. The bytes of each link are counted. A push takes at most 1.5 times the ceiling.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench.harness.report import Row, add_output_flags, print_rows, row, save
from pdcluster.checkpoint.weight_image import WeightImage, new_image
from pdcluster.core.errors import IntegrityError
from pdcluster.core.messages import TensorDigests, WeightsTarget
from pdcluster.core.weights import WeightTensor
from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.paths.choose import create_backends
from pdcluster.weights.receiver import WeightsReceiver
from pdcluster.weights.sender import SourceTensor, WeightsSender, digest_of

TRAINER = Peer("trainer", "t-1")
MIB = 1 << 20
# Of a model: a few large tensors, many small ones.
LAYERS = 28
RECEIVERS = (2, 4)
GOAL = 1 / 1.5


def tensors_of(nbytes: int) -> list[WeightTensor]:
    layer = nbytes // (LAYERS + 4)
    found = [WeightTensor("embed", "BF16", (4 * layer // 2,))]
    for number in range(LAYERS):
        found += [WeightTensor(f"{number}.mlp", "BF16", (layer // 2,)), WeightTensor(f"{number}.n", "BF16", (2048,))]
    return found


class Trainer:
    """Tensors in this process's own memory."""

    def __init__(self, tensors: Sequence[WeightTensor]) -> None:
        rng = np.random.default_rng(1)
        self._arrays = [rng.integers(0, 256, each.nbytes, np.uint8) for each in tensors]
        self.sources = [
            SourceTensor(each, array.ctypes.data) for each, array in zip(tensors, self._arrays, strict=True)
        ]


class NodeProcess:
    """A process that receives weights, and gives them to others."""

    def __init__(self, name: str, transfer: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.peer = Peer(name, f"{name}-1")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.peer, transfer, theirs), daemon=True)
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.send(None)
        self._process.join()

    def ask(self, name: str, *arguments: object) -> Any:
        self._pipe.send((name, arguments))
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found


class NodeEnd:
    """In the process of a node."""

    def __init__(self, me: Peer, transfer: str) -> None:
        self._me, self._transfer = me, transfer
        self._receiver: WeightsReceiver | None = None
        self._thread = threading.Thread()
        self._image: WeightImage | None = None

    def open(self, writer: Peer, tensors: Sequence[WeightTensor]) -> WeightsTarget:
        if self._image is not None:
            self._image.close()
        self._receiver = WeightsReceiver(self._me, "-", writer, tensors, partial(media, self._transfer))
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()
        return self._receiver.target

    def _receive(self) -> None:
        assert self._receiver is not None
        self._image = self._receiver.receive()

    def commit(self, digests: TensorDigests) -> bool:
        assert self._receiver is not None
        self._receiver.commit(digests)
        self._thread.join()
        return self._image is not None and bool(self._image.fds)

    def send(self, target: WeightsTarget) -> tuple[TensorDigests, int]:
        assert self._image is not None
        sources = [SourceTensor(each.tensor, each.address) for each in self._image.tensors]
        sender = WeightsSender(self._me, sources, target, partial(media, self._transfer))
        digests = sender.send()
        return digests, sum(sender.sent_bytes.values())


def _serve(me: Peer, transfer: str, pipe: Connection) -> None:
    end = NodeEnd(me, transfer)
    while (asked := pipe.recv()) is not None:
        try:
            pipe.send(getattr(end, asked[0])(*asked[1]))
        except Exception as error:  # the bench raises it
            pipe.send(error)


def media(transfer: str, me: Peer) -> Any:
    return create_backends(transfer, me, host="127.0.0.1", staging_bytes=32 << 20)


def ceiling_s(trainer: Trainer) -> float:
    image = new_image([each.tensor for each in trainer.sources])
    began = time.monotonic()
    for source, place in zip(trainer.sources, image.tensors, strict=True):
        ctypes.memmove(place.address, source.address, source.tensor.nbytes)
        digest_of(SourceTensor(place.tensor, place.address))
    took = time.monotonic() - began
    image.close()
    return took


def push_s(trainer: Trainer, node: NodeProcess, transfer: str) -> float:
    began = time.monotonic()
    target = node.ask("open", TRAINER, [each.tensor for each in trainer.sources])
    sender = WeightsSender(TRAINER, trainer.sources, target, partial(media, transfer))
    if not node.ask("commit", sender.send()):
        raise IntegrityError("the node has no image")
    return time.monotonic() - began


def pass_on_s(first: NodeProcess, others: Sequence[NodeProcess], trainer: Trainer) -> tuple[float, list[int]]:
    """Seconds until all others have it, and the bytes of each link."""
    tensors, links = [each.tensor for each in trainer.sources], list[int]()

    def give(holder: NodeProcess, node: NodeProcess) -> None:
        digests, sent = holder.ask("send", node.ask("open", holder.peer, tensors))
        node.ask("commit", digests)
        links.append(sent)

    began, holders, left = time.monotonic(), [first], list(others)
    while left:
        pairs = list(zip(holders, left, strict=False))
        threads = [threading.Thread(target=give, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        holders += [node for _, node in pairs]
        left = left[len(pairs) :]
    return time.monotonic() - began, links


def rows_of(transfer: str, nbytes: int, repeats: int) -> list[Row]:
    trainer, case = Trainer(tensors_of(nbytes)), f"{transfer}, {nbytes // MIB} MiB"
    whole = sum(each.tensor.nbytes for each in trainer.sources)
    with ExitStack() as stack:
        nodes = [stack.enter_context(NodeProcess(f"n{number}", transfer)) for number in range(max(RECEIVERS) + 1)]
        push_s(trainer, nodes[0], transfer)  # starts what starts once
        ceilings, pushes = list[float](), list[float]()
        for _ in range(repeats):
            ceilings.append(ceiling_s(trainer))
            pushes.append(push_s(trainer, nodes[0], transfer))
        beside = row("", "", [each * 1e3 for each in ceilings], "ms").value
        compared: Callable[..., Row] = partial(row, unit="ms", against="copy + digest", better="less")
        rows = [compared("push", f"{case} to 1 node", [each * 1e3 for each in pushes], against_value=beside, goal=GOAL)]
        for count in RECEIVERS:
            found = [pass_on_s(nodes[0], nodes[1 : count + 1], trainer) for _ in range(repeats)]
            rows.append(
                compared(
                    "pass on", f"{case} to {count} more", [s * 1e3 for s, _ in found], against_value=count * beside
                )
            )
            per_link = [sent / whole for _, links in found for sent in links]
            rows.append(Row("bytes a link, most", f"{case} to {count} more", max(per_link), "of the weights"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer bytes and repeats")
    add_output_flags(parser)
    parser.add_argument("--transfer", default="shm,tcp")
    arguments = parser.parse_args()
    nbytes, repeats = (64 * MIB, 3) if arguments.quick else (300 * MIB, 7)
    rows = [each for transfer in arguments.transfer.split(",") for each in rows_of(transfer, nbytes, repeats)]
    print_rows(rows)
    save(rows, arguments)


if __name__ == "__main__":
    main()
