"""The two clients of the bootstrap. `NodeAgent` keeps a node registered and says who left. `watch` follows the cluster
for a router.

Traffic never waits for the bootstrap. While it is away, nodes keep trying and watchers keep the last snapshot. Several
addresses are independent bootstraps. A node registers with each, and a watcher merges what they say (`merging`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue

import grpc

from pdcluster.bootstrap.card import Adapter, ClusterSnapshot, NodeCard
from pdcluster.bootstrap.card_messages import adapters_to_proto, card_to_proto, role_to_proto, snapshot_from_proto
from pdcluster.bootstrap.credentials import NAME_OPTIONS, BootstrapCredentials
from pdcluster.bootstrap.merging import RegistryMerge
from pdcluster.core.errors import BadRequest, ConfigError, NameTaken, PdclusterError, Unavailable
from pdcluster.core.messages import Endpoint, Role
from pdcluster.processes.tasks import running
from pdcluster.rpc import bootstrap_pb2 as pb
from pdcluster.rpc import bootstrap_pb2_grpc as stubs
from pdcluster.rpc.status import error_of
from pdcluster.transfer.backends.base import Peer

__all__ = ["NodeAgent", "Retry", "watch"]

CALL_S = 3.0
LEAVE_S = 1.0
# So long a node waits for the end of another one of its name. One that has ended is silent for a lease.
TAKEN_LEASES = 3
# Snapshots that were not taken in yet; a bootstrap that has more to say waits.
MAX_NEWS = 16
MAX_SNAPSHOT_BYTES = 64 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_SNAPSHOT_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),  # a watch may be quiet for hours, and must still notice a dead server
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
)
# What gRPC says where one end has no key, or another one.
_HANDSHAKE_SIGNS = ("handshake failed", "Socket closed", "Broken pipe", "Connection reset")
OTHER_KEY = (
    "if something listens there, it has another cluster key, or only one of both has one; set the same "
    "security.cluster_key_file in all sections, or none"
)
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Retry:
    """Pauses between tries that fail. They double from first_s to last_s. Each is cut by a random part, so that nodes
    do not come back together.
    """

    first_s: float = 0.1
    last_s: float = 2.0
    failures: int = 0

    def next_s(self) -> float:
        pause = min(self.last_s, self.first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return pause * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.failures = 0


class NodeAgent:
    """Keeps one node registered. It runs two threads per bootstrap: one registers, one watches. Every method may be
    called from any thread.

    `wakeup_fd` is readable when `gone` has news.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        heartbeat_s: float | None = None,
        credentials: BootstrapCredentials | None = None,
    ) -> None:
        """heartbeat_s: the longest time between two renewals. A third of the granted lease, when that is shorter.
        credentials: None where bootstraps have no cluster key.
        """
        self._addresses, self._credentials = _required(addresses), credentials
        self._heartbeat_s = heartbeat_s
        self.wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news: SimpleQueue[Peer | BaseException] = SimpleQueue()
        self._lock = threading.Lock()
        self._card: NodeCard | None = None
        self._nudges = [threading.Event() for _ in self._addresses]
        self._stopping = threading.Event()
        self._watching: dict[str, grpc.Call] = {}
        self._merge = RegistryMerge()
        self._cluster: ClusterSnapshot | None = None
        self._has_heard = threading.Event()
        self._is_watching = False
        self._registered: Callable[[], None] | None = None
        self._threads: list[threading.Thread] = []
        self._registered_at: set[str] = set()
        # Epoch and digest of the weights with which some bootstrap took the node last.
        self._taken: tuple[int, str] | None = None

    @property
    def num_registered(self) -> int:
        """Bootstraps that have this node, as far as their last answers say."""
        return len(self._registered_at)

    def start(self, card: NodeCard, registered: Callable[[], None] = lambda: None) -> None:
        """Begin to register. Returns at once. An agent's thread calls `registered` once, when the first bootstrap took
        the node.
        """
        with self._lock:
            self._card, self._registered = card, registered
        for address, nudge in zip(self._addresses, self._nudges, strict=True):
            self._run_thread(f"bootstrap {address}", partial(self._keep, address, nudge))
        self._start_watching()

    def _start_watching(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            for address in self._addresses:
                self._run_thread(f"bootstrap {address} watch", partial(self._watch, address))

    @property
    def is_started(self) -> bool:
        """Whether the node registers."""
        with self._lock:
            return self._card is not None

    def cards(self, timeout_s: float) -> tuple[NodeCard, ...]:
        """The nodes of the cluster. Waits for the first word of a bootstrap; none where none comes. May be called
        before `start`.
        """
        self._start_watching()
        self._has_heard.wait(timeout_s)
        with self._lock:
            return () if self._cluster is None else self._cluster.nodes

    def gone(self) -> list[Peer]:
        """Boots of other nodes that left the cluster since the last call.

        Raises BadRequest or ConfigError when a bootstrap refused this node for good. The node cannot serve then.
        """
        self._clear_wakeup()
        peers: list[Peer] = []
        while True:
            try:
                news = self._news.get_nowait()
            except Empty:
                return peers
            if isinstance(news, BaseException):
                raise news
            peers.append(news)

    def find(self, name: str) -> Endpoint | None:
        """Another node, as the bootstraps have it."""
        with self._lock:
            cards = () if self._cluster is None else self._cluster.nodes
        return next((card.endpoint for card in cards if card.node == name), None)

    def set_draining(self, is_draining: bool = True) -> None:
        """Tell the cluster whether this node takes no new work."""
        self._change(lambda card: replace(card, draining=is_draining))

    def set_role(self, role: Role) -> None:
        self._change(lambda card: replace(card, role=role))

    def set_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        self._change(lambda card: replace(card, adapters=adapters))

    def set_weights_share(self, share: float) -> None:
        self._change(lambda card: replace(card, weights_share=share))

    def succeed(self, card: NodeCard) -> None:
        """Leave as the boot that is registered, and register as the node's next one. Returns at once."""
        self._change(lambda _: card)

    def stop(self) -> None:
        """Leave the cluster and end the threads. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        for nudge in self._nudges:
            nudge.set()
        with self._lock:
            for call in self._watching.values():
                call.cancel()
        for thread in self._threads:
            thread.join()
        os.close(self.wakeup_fd)

    # ------------------------------------------------------------ registration

    def _keep(self, address: str, nudge: threading.Event) -> None:
        """Stay registered at one bootstrap until the node stops or is refused."""
        retry, registered = Retry(), False
        # Of the card that was last registered.
        boot: Peer | None = None
        # When this bootstrap first said, of late, that another process has the node's name.
        taken_since: float | None = None
        with _channel(address, self._credentials) as stub:
            while not self._stopping.is_set():
                nudge.clear()
                if self._stopping.is_set():  # set before the nudge that was just cleared
                    break
                try:
                    card = self._current_card()
                    if registered and boot is not None and card.peer != boot:
                        registered = False
                        self._leave(stub, boot, address)
                    boot = card.peer
                    pause_s, registered = self._renew(stub, card, address, registered)
                    (self._registered_at.add if registered else self._registered_at.discard)(address)
                    retry.reset()
                    taken_since = None
                except grpc.RpcError as error:
                    translated = bootstrap_error(error, address)
                    if isinstance(translated, BadRequest | ConfigError):
                        raise translated from error
                    self._registered_at.discard(address)
                    pause_s = retry.next_s()
                    taken_since = self._waits_for_name(translated, taken_since)
                    if retry.failures == 1:
                        log.warning("%s; this node goes on without it and tries again", translated)
                nudge.wait(pause_s)
            if registered and boot is not None:
                self._leave(stub, boot, address)

    def _waits_for_name(self, error: PdclusterError, since: float | None) -> float | None:
        """Since when the node waits for another process of its name to end; None where it does not. Raises ConfigError
        after TAKEN_LEASES.
        """
        if not isinstance(error, NameTaken) or self._registered_at:
            return None
        now = time.monotonic()
        since = now if since is None else since
        if now - since > TAKEN_LEASES * error.retry_after_s:
            raise ConfigError(f"{error} (asked for {now - since:.0f} s)")
        return since

    def _renew(self, stub: stubs.BootstrapStub, card: NodeCard, address: str, registered: bool) -> tuple[float, bool]:
        """One call that keeps the node known. Returns the seconds until the next one, and whether the node is
        registered.
        """
        if registered:
            request = pb.KeepAliveRequest(
                node=card.node, incarnation=card.incarnation, role=role_to_proto(card.role), draining=card.draining,
                adapters=adapters_to_proto(card.adapters), weights_share=card.weights_share,
            )  # fmt: skip
            reply = stub.KeepAlive(request, timeout=CALL_S)
            return (self._pause_s(reply.lease_s), True) if reply.known else (0.0, False)
        weights = card.weights_epoch, card.weights
        request_in = pb.RegisterRequest(card=card_to_proto(card), again=weights == self._taken)
        lease_s = stub.Register(request_in, timeout=CALL_S).lease_s
        self._taken = weights
        log.info("registered with bootstrap %s for %g s at a time", address, lease_s)
        self._tell_registered()
        return self._pause_s(lease_s), True

    def _pause_s(self, lease_s: float) -> float:
        return lease_s / 3 if self._heartbeat_s is None else min(self._heartbeat_s, lease_s / 3)

    def _leave(self, stub: stubs.BootstrapStub, boot: Peer, address: str) -> None:
        try:
            stub.Leave(pb.LeaveRequest(node=boot.node, incarnation=boot.incarnation), timeout=LEAVE_S)
        except grpc.RpcError as error:
            log.info("%s; it will notice by the lease that this node left", error_of(error, f"bootstrap {address}"))

    def _tell_registered(self) -> None:
        with self._lock:
            registered, self._registered = self._registered, None
        if registered is not None:
            registered()

    # ------------------------------------------------------------ watching

    def _watch(self, address: str) -> None:
        """Follow one bootstrap until the node stops."""
        retry = Retry()
        while not self._stopping.is_set():
            try:
                for snapshot in self._snapshots(address):
                    retry.reset()
                    self._apply(address, snapshot)
            except grpc.RpcError as error:
                if not self._stopping.is_set():
                    log.info("%s; watching again", bootstrap_error(error, address))
            except BadRequest as error:
                log.warning("bootstrap %s sent a cluster that this version does not understand: %s", address, error)
            self._apply(address, None)
            self._stopping.wait(retry.next_s())

    def _snapshots(self, address: str) -> Iterator[ClusterSnapshot]:
        with _channel(address, self._credentials) as stub:
            with self._lock:
                if self._stopping.is_set():
                    return
                self._watching[address] = call = stub.Watch(pb.WatchRequest())
            for snapshot in call:
                yield snapshot_from_proto(snapshot)

    def _apply(self, address: str, snapshot: ClusterSnapshot | None) -> None:
        """Tell which boots left by what one bootstrap said; None: its watch ended."""
        with self._lock:
            before, merge = self._cluster, self._merge
            now = merge.lost(address) if snapshot is None else merge.update(address, snapshot)
            if now is None:
                return
            self._cluster = now
            self._has_heard.set()
            own = None if self._card is None else self._card.peer
        for peer in now.gone_since(before):
            if peer != own:
                self._tell(peer)

    # ------------------------------------------------------------ threads

    def _run_thread(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                log.exception("%s ended", name)
                self._tell(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _tell(self, news: Peer | BaseException) -> None:
        self._news.put(news)
        os.eventfd_write(self.wakeup_fd, 1)

    def _clear_wakeup(self) -> None:
        try:
            os.eventfd_read(self.wakeup_fd)
        except BlockingIOError:
            return

    def _current_card(self) -> NodeCard:
        with self._lock:
            assert self._card is not None
            return self._card

    def _change(self, change: Callable[[NodeCard], NodeCard]) -> None:
        with self._lock:
            if self._card is not None:
                self._card = change(self._card)
        for nudge in self._nudges:
            nudge.set()


async def watch(
    addresses: Sequence[str], credentials: BootstrapCredentials | None = None
) -> AsyncIterator[ClusterSnapshot]:
    """The cluster as all bootstraps have it, again whenever it changes, for ever. Nothing comes while none answers."""
    news: asyncio.Queue[tuple[str, ClusterSnapshot | None]] = asyncio.Queue(MAX_NEWS)
    merge = RegistryMerge()
    async with AsyncExitStack() as stack:
        for address in _required(addresses):
            await stack.enter_async_context(
                running(partial(_follow, address, news, credentials), f"bootstrap {address}")
            )
        while True:
            address, snapshot = await news.get()
            found = merge.lost(address) if snapshot is None else merge.update(address, snapshot)
            if found is not None:
                yield found


async def _follow(
    address: str,
    news: asyncio.Queue[tuple[str, ClusterSnapshot | None]],
    credentials: BootstrapCredentials | None,
) -> None:
    """Pass on what one bootstrap says; None when its watch ends."""
    retry = Retry()
    while True:
        try:
            async with open_channel(address, credentials) as channel:
                async for found in stubs.BootstrapStub(channel).Watch(pb.WatchRequest()):
                    retry.reset()
                    await news.put((address, snapshot_from_proto(found)))
            reason: PdclusterError = Unavailable(f"bootstrap {address} ended the watch")
        except grpc.RpcError as error:
            reason = bootstrap_error(error, address)
        except BadRequest as error:
            reason = error
        await news.put((address, None))
        pause_s = retry.next_s()
        if retry.failures == 1:
            log.warning("%s; what is known holds until a bootstrap answers", reason)
        await asyncio.sleep(pause_s)


def bootstrap_error(error: grpc.RpcError, address: str) -> PdclusterError:
    """The error of pdcluster for gRPC's, which says of a failed handshake only what TLS calls it."""
    found = error_of(error, f"bootstrap {address}")
    if isinstance(found, Unavailable) and any(sign in str(found) for sign in _HANDSHAKE_SIGNS):
        return Unavailable(f"{found}; {OTHER_KEY}")
    return found


def open_channel(address: str, credentials: BootstrapCredentials | None) -> grpc.aio.Channel:
    """To a bootstrap, for calls in an event loop."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials.of_client(), options=(*CHANNEL_OPTIONS, *NAME_OPTIONS))


@contextmanager
def _channel(address: str, credentials: BootstrapCredentials | None) -> Iterator[stubs.BootstrapStub]:
    if credentials is None:
        channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    else:
        channel = grpc.secure_channel(address, credentials.of_client(), options=(*CHANNEL_OPTIONS, *NAME_OPTIONS))
    with channel:
        yield stubs.BootstrapStub(channel)


def _required(addresses: Sequence[str]) -> tuple[str, ...]:
    if not addresses:
        raise ConfigError("no bootstrap address is given; pass --bootstrap HOST:PORT")
    return tuple(addresses)
