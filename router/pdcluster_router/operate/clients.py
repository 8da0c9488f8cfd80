"""Connections to the Admin services of one or several routers. Reads are merged, writes go to all.

A host name that stands for several addresses, as a headless Kubernetes service does, stands for several routers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import grpc

from pdcluster.core.address import format_address, parse_address
from pdcluster.core.errors import BadRequest, ConfigError, PdclusterError, UnknownName
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import admin_pb2_grpc as stubs
from pdcluster.settings.tls_trust import TlsTrust, read_roots

# Every router is asked side by side, and all have this long. A node must answer some changes, too.
CALL_S = 8.0
MAX_MESSAGE_BYTES = 64 << 20
MAX_ROUTERS = 64
OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.enable_http_proxy", 0))
# The router answered: it refuses. With any other code it did not answer, or did not take this client.
REFUSALS = frozenset(
    (
        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED, grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.CANCELLED,
    )
)  # fmt: skip
# What grpc says when a call's own time is over.
LATE = "Deadline Exceeded"

T = TypeVar("T")


class Unreachable(PdclusterError):
    """A router does not answer, or none does."""

    code = "unreachable"


class TokenRefused(Unreachable):
    """A router wants another admin token."""

    code = "token_refused"


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
class RouterAnswer:
    """One router's answer. reply: None where it did not answer, with its error."""

    address: str
    reply: Any
    error: grpc.RpcError | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the router did not answer, or did not take this client."""
        if self.error is None or self.error.code() in REFUSALS:
            return False
        # A router says with the same code that a node did not answer it, and names the node.
        is_own = self.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self.error.details() != LATE
        return not is_own


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
    """Opens channels to all routers that the addresses stand for. Close it.

    Every call asks all routers side by side. `silent` has each one that did not answer its last call, with the error.
    """

    def __init__(
        self, addresses: str, token_file: Path | None, warn: Callable[[str], None], trust: TlsTrust | None = None
    ) -> None:
        """addresses: HOST:PORT[,HOST:PORT…]. warn: is told once of each router that does not answer. trust: None: in
        clear text.
        """
        token = token_of(token_file)
        self._warn = warn
        self.silent: dict[str, PdclusterError] = {}
        self.routers = [_open(address, host, token, trust) for address, host in resolved_hosts(addresses).items()]

    def close(self) -> None:
        for router in self.routers:
            router.channel.close()

    def raise_silent(self) -> None:
        """Raise the errors of routers that did not answer, if there are any. Wrong tokens go first."""
        found = sorted(self.silent.values(), key=lambda error: not isinstance(error, TokenRefused))
        if found:
            raise type(found[0])("; ".join(str(error) for error in found if type(error) is type(found[0])))

    # ------------------------------------------------------------ calls

    def ask(self, method: str, request: Any, timeout_s: float | None = None) -> list[RouterAnswer]:
        """The answers of all routers. Raises Unreachable or TokenRefused when none takes the call."""
        return self._checked([_settled(*call) for call in self._calls(method, request, timeout_s or CALL_S)])

    def ask_streams(self, method: str, request_of: Callable[[str], Any]) -> list[RouterAnswer]:
        """As `ask`, for a call whose answer is a stream that ends: reply is the list of its messages.

        request_of: the request by a router's address.
        """

        def read(router: RouterAdmin) -> RouterAnswer:
            try:
                found = list(getattr(router.stub, method)(request_of(router.address), timeout=CALL_S))
            except grpc.RpcError as error:
                return RouterAnswer(router.address, None, error)
            return RouterAnswer(router.address, found)

        with ThreadPoolExecutor(len(self.routers)) as pool:
            return self._checked(list(pool.map(read, self.routers)))

    def read(self, method: str, request: Any, timeout_s: float | None = None) -> list[RouterAnswer]:
        """The answers of the routers that have one. Raises the first refusal when none has."""
        return answered(self.ask(method, request, timeout_s))

    def change_node(self, method: str, request: Any) -> RouterAnswer:
        """Change a node through every router that reaches it: one is enough, since the node tells all.

        Raises the first refusal when none reached it.
        """
        return answered(self.ask(method, request))[0]

    def change_all(self, method: str, request: Any) -> RouterAnswer:
        """Change something at every router. Raises PdclusterError when one did not take it."""
        told = self.ask(method, request)
        failed = [each for each in told if each.error is not None]
        if failed:
            kept = ", ".join(problem(each.address, each.error) for each in failed)
            done = ", ".join(each.address for each in told if each.error is None) or "no router"
            raise PdclusterError(f"changed at {done}, but not everywhere: {kept}; do it again")
        return told[0]

    def first(self) -> RouterAdmin:
        """The router that answers first. Raises Unreachable or TokenRefused when none does."""
        ended: SimpleQueue[int] = SimpleQueue()
        calls = list(self._calls("GetPolicy", pb.GetPolicyRequest(), CALL_S))
        for number, (_, call) in enumerate(calls):
            call.add_done_callback(lambda _, number=number: ended.put(number))
        told = []
        for _ in calls:
            number = ended.get()  # each call ends within CALL_S
            told.append(_settled(*calls[number]))
            if told[-1].error is None:
                for _, call in calls:
                    call.cancel()
                return self.routers[number]
        self._checked(told)
        raise refusal(told[0])

    def _calls(self, method: str, request: Any, timeout_s: float) -> list[tuple[str, Any]]:
        return [
            (router.address, getattr(router.stub, method).future(request, timeout=timeout_s)) for router in self.routers
        ]

    def _checked(self, told: list[RouterAnswer]) -> list[RouterAnswer]:
        """Note who is silent. Raises when all are."""
        silent = {each.address: refusal(each) for each in told if each.is_silent}
        fresh = {address: error for address, error in silent.items() if address not in self.silent}
        for each in told:
            self.silent.pop(each.address, None)
        self.silent |= silent
        if len(silent) == len(told):
            self.raise_silent()
        for error in fresh.values():
            self._warn(f"{error}; what it knows is missing here")
        return told


def _settled(address: str, call: Any) -> RouterAnswer:
    try:
        return RouterAnswer(address, call.result())
    except grpc.RpcError as error:
        return RouterAnswer(address, None, error)


def answered(told: Sequence[RouterAnswer]) -> list[RouterAnswer]:
    """Those with a reply. Raises the first refusal when there is none."""
    good = [each for each in told if each.error is None]
    if not good:
        raise refusal(next(each for each in told if not each.is_silent))
    return good


def problem(address: str, error: grpc.RpcError) -> str:
    """What went wrong at an address, with the way out."""
    code = error.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{address} does not take the admin token; pass the right one with --token-file FILE or PDCTL_TOKEN_FILE"
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(address, error.details() or "")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and error.details() == LATE:
        return f"{address} did not answer in time; see its log, or leave it out of --admin"
    return f"{address}: {error.details()}"


def _unavailable(address: str, details: str) -> str:
    """By what gRPC's library says: it has one code for all that keeps a connection from beginning."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"{address} shows a certificate that --ca did not sign; pass the right --ca FILE or PDCTL_CA"
    if "is not in peer certificate" in details:
        return f"{address} shows a certificate of another name; dial it by that name, or pass --tls-name NAME"
    if "WRONG_VERSION_NUMBER" in details:
        return f"{address} speaks no TLS; leave --ca and PDCTL_CA out"
    return (
        f"no router answers at {address}; pass its router.admin address with --admin or PDCTL_ADMIN, and --ca FILE "
        "where it speaks TLS"
    )


KINDS: dict[grpc.StatusCode, type[PdclusterError]] = {
    grpc.StatusCode.UNAUTHENTICATED: TokenRefused,
    grpc.StatusCode.NOT_FOUND: UnknownName,
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
}


def refusal(told: RouterAnswer) -> PdclusterError:
    """The error of a call that a router refused, or that could not be made."""
    assert told.error is not None
    kind = KINDS.get(told.error.code(), Unreachable if told.is_silent else PdclusterError)
    return kind(problem(told.address, told.error))


def resolved(addresses: str) -> list[str]:
    """Every router's HOST:PORT. Raises ConfigError for a bad address, Unreachable for an unknown host."""
    return list(resolved_hosts(addresses))


def resolved_hosts(addresses: str, flag: str = "--admin") -> dict[str, str]:
    """As `resolved`, with the host that each address was found by. flag: that has the addresses, for errors."""
    found: dict[str, str] = {}
    for address in filter(None, (each.strip() for each in addresses.split(","))):
        try:
            host, port = parse_address(address)
            known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except ValueError as error:
            raise ConfigError(f"{flag} {address!r} {error}") from None
        except OSError as error:
            raise Unreachable(f"the host of {flag} {address} is not known: {error.strerror}; check its name") from None
        found |= dict.fromkeys((format_address(each, port) for each in _routers_of(host, known)), host)
    if not found:
        raise ConfigError(f"{flag} is empty; pass HOST:PORT[,HOST:PORT]")
    if len(found) > MAX_ROUTERS:
        raise ConfigError(f"{flag} stands for {len(found)} routers; at most {MAX_ROUTERS} are asked")
    return found


def _routers_of(host: str, known: Sequence[tuple[Any, ...]]) -> list[str]:
    """One host per router that a name stands for. A router may have an address of each family."""
    v4, v6 = (
        list(dict.fromkeys(str(where[0]) for family, *_, where in known if family == each))
        for each in (socket.AF_INET, socket.AF_INET6)
    )
    if len(v4) == len(v6) == 1:
        return [host]  # it may listen on either, and gRPC tries both
    return v4 or v6


def token_of(file: Path | None) -> str | None:
    """The token in a file; None without one. Raises ConfigError."""
    if file is None:
        return None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}; check the path and its mode") from error


def _open(address: str, host: str, token: str | None, trust: TlsTrust | None) -> RouterAdmin:
    if trust is None:
        channel = grpc.insecure_channel(address, options=OPTIONS)
    else:
        named = (("grpc.ssl_target_name_override", trust.name or host),)
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(read_roots(trust.ca)), (*OPTIONS, *named))
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
