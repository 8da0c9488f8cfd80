"""ZMQ sockets as every link wants them: options, encryption, address, connection events."""

from __future__ import annotations

import errno
import hashlib
import itertools
import time
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pdcluster.core.address import format_address, is_wildcard, parse_address
from pdcluster.core.errors import ConfigError
from pdcluster.wire.codec import MAX_FRAME_BYTES

CLUSTER_KEY_BYTES = 32
CURVE_OVERHEAD_BYTES = 64
ZAP_DOMAIN = b"pdcluster"
# Pauses between attempts to connect, the first and the longest.
RECONNECT_S = 0.05, 0.5
# Between two tries to bind.
REBIND_PAUSE_S = 0.001
# Of TCP, under leases that notice sooner.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 5, 3
_monitor_names = itertools.count()


class ConnectionEvent(Enum):
    """What became of a connection.

    SILENT, CUT: its handshake did not end in time, or ended with the connection. DOWN follows both.
    """

    UP = auto()
    DOWN = auto()
    REFUSED = auto()
    SILENT = auto()
    CUT = auto()


# libzmq's event → ours.
_EVENTS: dict[int, ConnectionEvent] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: ConnectionEvent.UP,
    zmq.EVENT_DISCONNECTED: ConnectionEvent.DOWN,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ConnectionEvent.CUT,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: ConnectionEvent.DOWN,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ConnectionEvent.DOWN,
    zmq.EVENT_CONNECT_RETRIED: ConnectionEvent.REFUSED,
}


@dataclass(frozen=True, slots=True)
class WireSettings:
    """lease_s: a link on which nothing arrived for so long is lost.
    rewelcome_s: the time a cut connection has to come back.
    high_water: frames that may wait per peer.
    max_peers: bounds what strangers can make a node remember.
    advertise_host: the host others connect to when the listen address is a wildcard.
    cluster_keys: secrets of CLUSTER_KEY_BYTES shared by the cluster. The first one is used, all are accepted. None at
    all leaves links unencrypted.
    rebind_s: how long the address may still be that of this process's boot before, which ZMQ gives up a moment later.
    """

    heartbeat_s: float = 0.5
    lease_s: float = 2.5
    rewelcome_s: float = 0.5
    hello_interval_s: float = 0.1
    high_water: int = 4096
    max_frame_bytes: int = MAX_FRAME_BYTES
    max_peers: int = 4096
    max_drain: int = 512
    advertise_host: str | None = None
    cluster_keys: tuple[bytes, ...] = ()
    rebind_s: float = 0.0

    def __post_init__(self) -> None:
        for key in self.cluster_keys:
            if len(key) != CLUSTER_KEY_BYTES:
                raise ConfigError(
                    f"a cluster key has {len(key)} bytes, it must have {CLUSTER_KEY_BYTES}; take them from "
                    "SecurityConfig.cluster_keys"
                )
        if not 0 < self.heartbeat_s < self.lease_s:
            raise ConfigError(
                f"heartbeat_s is {self.heartbeat_s} and lease_s {self.lease_s}; a lease must outlast its heartbeats"
            )

    def __repr__(self) -> str:
        return (
            f"WireSettings(heartbeat_s={self.heartbeat_s}, lease_s={self.lease_s}, high_water={self.high_water}, "
            f"cluster_keys=<{len(self.cluster_keys)} secrets>)"
        )


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The CURVE key pair that every member of a cluster derives from a cluster key (Z85 text). The secret is never
    shown."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "KeyPair(<secret>)"


@lru_cache(maxsize=16)
def derive_keys(cluster_key: bytes) -> KeyPair:
    secret = z85.encode(hashlib.blake2b(cluster_key, digest_size=32, person=b"pdcluster-curve").digest())
    return KeyPair(public=zmq.curve_public(secret), secret=secret)


def link_key_of(settings: WireSettings) -> str:
    """What a process that listens with these settings tells others, so that they know which key it uses (Z85 text)."""
    return derive_keys(settings.cluster_keys[0]).public.decode() if settings.cluster_keys else ""


def open_router(
    context: zmq.Context[zmq.Socket[bytes]], listen: str, settings: WireSettings
) -> tuple[zmq.Socket[bytes], str]:
    """A bound ROUTER socket, and the address that others connect to."""
    host, port = parse_address(listen)
    if is_wildcard(host) and settings.advertise_host is None:
        raise ConfigError(
            f"listening on {listen} needs an advertise host: the name or address under which other nodes reach this one"
        )
    socket = context.socket(zmq.ROUTER)
    try:
        _set_options(socket, settings)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if settings.cluster_keys:
            _set_server_keys(socket, derive_keys(settings.cluster_keys[0]))
        endpoint = f"tcp://{format_address(host, port) if port else format_address(host, 0).removesuffix('0') + '*'}"
        _bind(socket, endpoint, settings.rebind_s)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"cannot listen on {listen}: {error}; choose another --listen address") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    bound_port = int(bound.rstrip(b"\0").rpartition(b":")[2])
    return socket, format_address(settings.advertise_host or host, bound_port)


def _bind(socket: zmq.Socket[bytes], endpoint: str, patience_s: float) -> None:
    """Raises ZMQError where the address is still taken after patience_s."""
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() >= until:
                raise
            time.sleep(REBIND_PAUSE_S)


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]], settings: WireSettings, link_key: str = ""
) -> zmq.Socket[bytes]:
    """A DEALER socket, not connected yet, so that a monitor misses nothing.

    link_key: what the other end says of its key; "": it does not say, and has our first one. A key that we do not have
    is not used: the handshake fails then, and the link says why.
    """
    socket = context.socket(zmq.DEALER)
    _set_options(socket, settings)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, int(settings.lease_s * 1000)))
    if settings.cluster_keys:
        own = derive_keys(settings.cluster_keys[0])
        known = {derive_keys(key).public for key in settings.cluster_keys}
        theirs = link_key.encode()
        _set_client_keys(socket, own, theirs if theirs in known else own.public)
    return socket


def _set_options(socket: zmq.Socket[bytes], settings: WireSettings) -> None:
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IPV6, 1),
        (zmq.SNDHWM, settings.high_water),
        (zmq.RCVHWM, settings.high_water),
        (zmq.RECONNECT_IVL, int(RECONNECT_S[0] * 1000)),
        (zmq.RECONNECT_IVL_MAX, int(RECONNECT_S[1] * 1000)),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S),
        (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S),
        (zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT),
        (zmq.HANDSHAKE_IVL, max(1, int(settings.lease_s * 1000))),
    ):
        socket.setsockopt(option, value)
    # libzmq counts the encrypted message; `codec` checks the exact limit.
    socket.setsockopt(zmq.MAXMSGSIZE, settings.max_frame_bytes + CURVE_OVERHEAD_BYTES)


def _set_server_keys(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    # Without it, libzmq lets everyone in when the authenticator is not there.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _set_client_keys(socket: zmq.Socket[bytes], keys: KeyPair, theirs: bytes) -> None:
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SERVERKEY, theirs)


# A bare number: combining flags of an enum makes another object, which takes microseconds.
READABLE = int(zmq.POLLIN)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a whole message can be received now. It costs half of an attempt that fails, and most turns end with
    one.
    """
    events = socket.get(zmq.EVENTS)
    assert isinstance(events, int)
    return events & READABLE != 0


class Monitor:
    """The connection events of one socket. Open it before the socket connects, close it before the socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        address = f"inproc://pdcluster-monitor-{next(_monitor_names)}"
        watched.monitor(address, sum(_EVENTS))
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def drain(self) -> list[ConnectionEvent]:
        """The events since the last call, in their order."""
        events = []
        while has_message(self.socket):
            told = recv_monitor_message(self.socket, zmq.NOBLOCK)
            event = _EVENTS[told["event"]]
            # The value of a cut is its errno; libzmq's timer has this one.
            is_late = event is ConnectionEvent.CUT and told["value"] == errno.EAGAIN
            events.append(ConnectionEvent.SILENT if is_late else event)
        return events

    def close(self) -> None:
        self._watched.monitor(None, 0)
        self.socket.close(0)
