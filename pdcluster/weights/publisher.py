"""Pushes a trainer's weights into a cluster that serves.

    from pdcluster.weights.publisher import Publisher

    with Publisher("127.0.0.1:50052", token="…") as publisher:
        version = publisher.push(model.state_dict(), "step-100")

The tensors go from this process's memory into one node's, over the best medium that both have. Then the router has all
nodes take them from there and serve them. A push that failed may be sent again under its label: what is done is not
done twice.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from pdcluster.checkpoint.inspection import OBSOLETE
from pdcluster.core.errors import BadRequest, TransferError
from pdcluster.core.messages import Endpoint, TensorDigests, WeightsTarget
from pdcluster.core.weights import Kind, WeightsVersion, WeightTensor, check_label
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.rpc.status import error_of
from pdcluster.settings.tls_trust import read_roots
from pdcluster.transfer.backends.base import Backend, Peer
from pdcluster.transfer.paths.choose import create_backends
from pdcluster.weights.sender import SourceTensor, WeightsSender, digest_of

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

KINDS: dict[str, Kind] = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
OPEN_S, COMMIT_S = 60.0, 1800.0
STAGING_BYTES = 32 << 20
_CHANNEL = (("grpc.keepalive_time_ms", 10_000), ("grpc.enable_http_proxy", 0))

NamedTensors = Mapping[str, "Tensor"] | Iterable[tuple[str, "Tensor"]]


class Publisher:
    """One trainer's way to one cluster. Used by one thread; one push at a time."""

    def __init__(
        self, admin: str, token: str | None = None, ca: Path | str | None = None, *, transfer: str = "auto"
    ) -> None:
        """admin: HOST:PORT of the router's Admin. token: its admin token. ca: for TLS, who signed its certificate.
        transfer: as node.transfer.backend.
        """
        self._admin, self._transfer = admin, transfer
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        if ca is None:
            self._channel = grpc.insecure_channel(admin, _CHANNEL)
        else:
            self._channel = grpc.secure_channel(admin, grpc.ssl_channel_credentials(read_roots(Path(ca))), _CHANNEL)
        self._stub = stubs.AdminStub(self._channel)
        self.me = Peer(f"publisher-{secrets.token_hex(4)}", secrets.token_hex(8))
        # Of the last push, by medium.
        self.sent_bytes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def push(
        self, named_tensors: NamedTensors, label: str, *, finish_s: float = 600.0, max_unavailable: int = 0
    ) -> WeightsVersion:
        """Have all nodes serve these weights. They may change again once this returns.

        finish_s: how long a node may end what runs; what is left moves to other nodes then.
        max_unavailable: how many nodes may change at the same time; 0: all, and none before all have the weights.
        Raises BadRequest for tensors that cannot be pushed or a label of other weights, TransferError where the bytes
        did not arrive, and Unavailable with the node's name and reason.
        """
        check_label(label)
        tensors = dict(_contiguous(named_tensors))
        sources = [SourceTensor(_described(name, tensor), tensor.data_ptr()) for name, tensor in tensors.items()]
        opened = self._open(sources, label)
        digests = self._write(sources, opened)
        digest = self._commit(opened, label, digests)
        self._roll_out(opened.node, label, finish_s, max_unavailable)
        return WeightsVersion(label, opened.epoch, digest)

    def _open(self, sources: Sequence[SourceTensor], label: str) -> pb.OpenPushReply:
        request = pb.OpenPushRequest(
            label=label,
            writer=self.me.node,
            writer_incarnation=self.me.incarnation,
            tensors=[
                pb.PushedTensor(name=each.tensor.name, kind=each.tensor.kind, shape=each.tensor.shape)
                for each in sources
            ],
        )
        try:
            reply: pb.OpenPushReply = self._stub.OpenPush(request, timeout=OPEN_S, metadata=self._metadata)
            return reply
        except grpc.RpcError as error:
            raise error_of(error, self._admin) from error

    def _write(self, sources: Sequence[SourceTensor], opened: pb.OpenPushReply) -> TensorDigests:
        if opened.is_there:
            logger.info("node %s has these weights already", opened.node)
            return tuple((each.tensor.name, digest_of(each)) for each in sources)
        receiver = Endpoint(
            opened.node, opened.incarnation, "", tuple((each.name, each.advert) for each in opened.adverts)
        )
        target = WeightsTarget(opened.nonce, receiver, opened.region, tuple(opened.starts), opened.is_sealed)
        sender = WeightsSender(self.me, sources, target, lambda me: self._media(me, target))
        try:
            digests = sender.send()
        except TransferError as error:
            raise TransferError(
                f"the weights did not reach node {opened.node}: {error}; see its log, and push them again"
            ) from error
        self.sent_bytes = sender.sent_bytes
        return digests

    def _media(self, me: Peer, target: WeightsTarget) -> dict[str, Backend]:
        return create_backends(
            self._transfer, me, host="127.0.0.1", staging_bytes=STAGING_BYTES, is_sealed=target.is_sealed
        )

    def _commit(self, opened: pb.OpenPushReply, label: str, digests: TensorDigests) -> str:
        request = pb.CommitPushRequest(node=opened.node, label=label, epoch=opened.epoch, digests=dict(digests))
        try:
            return str(self._stub.CommitPush(request, timeout=COMMIT_S, metadata=self._metadata).digest)
        except grpc.RpcError as error:
            raise error_of(error, self._admin) from error

    def _roll_out(self, node: str, label: str, finish_s: float, max_unavailable: int) -> None:
        request = pb.LoadWeightsRequest(
            source=f"node:{node}", label=label, max_unavailable=max_unavailable, finish_s=finish_s
        )
        try:
            for progress in self._stub.LoadWeights(request, metadata=self._metadata):
                if progress.stage == "serving" and progress.node:
                    logger.info("node %s serves %s (%d of %d)", progress.node, label, progress.done, progress.nodes)
        except grpc.RpcError as error:
            raise error_of(error, self._admin) from error


def _contiguous(named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """As they lie in memory; copies of those on devices and of views."""
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    for name, tensor in pairs:
        if not name.endswith(OBSOLETE):
            yield name, tensor.detach().cpu().contiguous()


def _described(name: str, tensor: Tensor) -> WeightTensor:
    kind = KINDS.get(str(tensor.dtype))
    if kind is None:
        raise BadRequest(
            f"tensor {name} is {tensor.dtype}, but only float32, bfloat16 and float16 are served; convert it", name
        )
    return WeightTensor(name, kind, tuple(tensor.shape))
