"""Connections to the Admin services of one or several routers. Reads are merged, writes go to all.

A host name that stands for several addresses, as a headless Kubernetes service does, stands for several routers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from pdcluster.core.errors import ConfigError, PdclusterError
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs

CALL_S = 10.0
MAX_MESSAGE_BYTES = 64 << 20
MAX_ROUTERS = 64
OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0))
# The router cannot be reached, or does not take this client.
UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)

T = TypeVar("T")


class Unreachable(PdclusterError):
    """No router answers."""

    code = "unreachable"


class NotReached(PdclusterError):
    """What was waited for did not happen in time."""

    code = "not_reached"


@dataclass(frozen=True, slots=True)
class RouterAdmin:
    """One router's Admin service."""

    address: str
    stub: Any
    channel: grpc.Channel


@dataclass(frozen=True, slots=True)
class Told:
    """One router's answer. reply: None where it did not answer, with its error."""

    address: str
    reply: Any
    error: grpc.RpcError | None = None


class _Token(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    """Adds the admin token to each call."""

    def __init__(self, token: str) -> None:
        self._metadata = ("authorization", f"Bearer {token}")

    def _with_token(self, details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), self._metadata])

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)


class AdminClients:
    """Opens channels to all routers that the addresses stand for. Close it."""

    def __init__(self, addresses: str, token_file: Path | None, warn: Callable[[str], None]) -> None:
        """addresses: HOST:PORT[,HOST:PORT…]. warn: is told of routers that do not answer."""
        token = token_of(token_file)
        self.warn = warn
        self.routers = [_open(address, token) for address in resolved(addresses)]

    def close(self) -> None:
        for router in self.routers:
            router.channel.close()

    # ------------------------------------------------------------ calls

    def ask(self, method: str, request: Any, timeout_s: float = CALL_S) -> list[Told]:
        """The answers of all routers, side by side. Raises Unreachable when none can be reached."""

        def call(router: RouterAdmin) -> Told:
            try:
                return Told(router.address, getattr(router.stub, method)(request, timeout=timeout_s))
            except grpc.RpcError as error:
                return Told(router.address, None, error)

        with ThreadPoolExecutor(len(self.routers)) as pool:
            told = list(pool.map(call, self.routers))
        lost = [each for each in told if each.error is not None and each.error.code() in UNREACHABLE]
        if len(lost) == len(told):
            raise Unreachable("; ".join(problem(each.address, each.error) for each in lost))
        for each in lost:
            self.warn(f"{problem(each.address, each.error)}; what it knows is missing here")
        return told

    def read(self, method: str, request: Any) -> list[Told]:
        """The answers of the routers that have one. Raises the first refusal when none has."""
        told = self.ask(method, request)
        good = [each for each in told if each.error is None]
        if not good:
            raise refusal(
                next(each for each in told if each.error is not None and each.error.code() not in UNREACHABLE)
            )
        return good

    def write(self, method: str, request: Any, *, by_all: bool) -> Told:
        """Change something. by_all: at every router, each of which must take it; else through any router.

        A change of a node reaches all routers by that node.
        """
        if not by_all:
            for router in self.routers[:-1]:
                try:
                    return Told(router.address, getattr(router.stub, method)(request, timeout=CALL_S))
                except grpc.RpcError as error:
                    if error.code() not in UNREACHABLE:
                        raise refusal(Told(router.address, None, error)) from error
                    self.warn(f"{problem(router.address, error)}; another router is asked")
            last = self.routers[-1]
            try:
                return Told(last.address, getattr(last.stub, method)(request, timeout=CALL_S))
            except grpc.RpcError as error:
                raise refusal(Told(last.address, None, error)) from error
        told = self.ask(method, request)
        failed = [each for each in told if each.error is not None]
        if failed:
            kept = ", ".join(problem(each.address, each.error) for each in failed)
            done = ", ".join(each.address for each in told if each.error is None) or "no router"
            raise PdclusterError(f"changed at {done}, but not everywhere: {kept}; do it again")
        return told[0]

    def first(self) -> RouterAdmin:
        """A router that answers. Raises Unreachable."""
        for told, router in zip(self.ask("GetPolicy", pb.GetPolicyRequest()), self.routers, strict=True):
            if told.error is None:
                return router
        raise Unreachable("no router answers")


def problem(address: str, error: grpc.RpcError) -> str:
    """What went wrong at an address, with the way out."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return f"{address} wants the admin token; pass --token-file FILE or set PDCTL_TOKEN_FILE"
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return f"no router answers at {address}; pass its router.admin address with --admin or PDCTL_ADMIN"
    return f"{address}: {error.details()}"


def refusal(told: Told) -> PdclusterError:
    """The error of a call that a router refused, or that could not be made."""
    assert told.error is not None
    kind = Unreachable if told.error.code() in UNREACHABLE else PdclusterError
    return kind(problem(told.address, told.error))


def resolved(addresses: str) -> list[str]:
    """Every router's HOST:PORT. Raises ConfigError for a bad address, Unreachable for an unknown host."""
    found: dict[str, None] = {}
    for address in filter(None, (each.strip() for each in addresses.split(","))):
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdigit():
            raise ConfigError(f"--admin {address!r} is no HOST:PORT")
        try:
            known = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unreachable(f"the host of --admin {address} is not known: {error.strerror}; check its name") from None
        families = {family for family, *_ in known}
        only = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        for family, _, _, _, where in known:
            if family == only:
                name = str(where[0])
                found[f"[{name}]:{port}" if ":" in name else f"{name}:{port}"] = None
    if not found:
        raise ConfigError("--admin is empty; pass HOST:PORT[,HOST:PORT]")
    if len(found) > MAX_ROUTERS:
        raise ConfigError(f"--admin stands for {len(found)} routers; at most {MAX_ROUTERS} are asked")
    return list(found)


def token_of(file: Path | None) -> str | None:
    """The token in a file; None without one. Raises ConfigError."""
    if file is None:
        return None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}; check the path and its mode") from error


def _open(address: str, token: str | None) -> RouterAdmin:
    channel = grpc.insecure_channel(address, options=OPTIONS)
    guarded = channel if token is None else grpc.intercept_channel(channel, _Token(token))
    return RouterAdmin(address, stubs.AdminStub(guarded), channel)


def differing(values: Iterable[tuple[str, str]]) -> str:
    """Which routers say what, where they differ; "" where all agree."""
    by_value: dict[str, list[str]] = {}
    for address, value in values:
        by_value.setdefault(value, []).append(address)
    if len(by_value) < 2:
        return ""
    return "; ".join(f"{value or 'none'} at {', '.join(where)}" for value, where in by_value.items())


def joined(lists: Iterable[Sequence[T]]) -> list[T]:
    return [each for part in lists for each in part]
