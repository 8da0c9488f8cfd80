"""pdcluster's errors as gRPC status codes and back."""

from __future__ import annotations

import grpc

from pdcluster.core.errors import (
    BadRequest,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    ModelChanged,
    NameTaken,
    NodeLost,
    Overloaded,
    PdclusterError,
    Unauthorized,
    Unavailable,
    UnknownModel,
    UnknownName,
)

RETRY_AFTER = "retry-after-s"
_CODES: tuple[tuple[type[PdclusterError], grpc.StatusCode], ...] = (
    # The first that fits, so that subclasses come before their bases.
    (UnknownName, grpc.StatusCode.NOT_FOUND),
    (Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (BadRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (NameTaken, grpc.StatusCode.ALREADY_EXISTS),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (NodeLost, grpc.StatusCode.UNAVAILABLE),
    (ModelChanged, grpc.StatusCode.UNAVAILABLE),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
)
# Errors that say when to come back.
_WITH_TIME = (Overloaded, NameTaken)
_ERRORS: dict[grpc.StatusCode, type[PdclusterError]] = {code: error for error, code in _CODES}


def status_of(error: PdclusterError) -> grpc.StatusCode:
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def error_of(error: grpc.RpcError, who: str) -> PdclusterError:
    """The error of pdcluster for gRPC's. `who` names the server. An unknown code means that the server cannot serve."""
    if not isinstance(error, grpc.Call) and not isinstance(error, grpc.aio.AioRpcError):
        return Unavailable(f"{who}: {error}")
    kind = _ERRORS.get(error.code(), Unavailable)
    message = f"{who} answered {error.code().name}: {error.details()}"
    return kind(message, _retry_after_s(error)) if kind in _WITH_TIME else kind(message)


def retry_metadata(error: PdclusterError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that says when to come back, where that is known."""
    return ((RETRY_AFTER, f"{error.retry_after_s:.3f}"),) if isinstance(error, _WITH_TIME) else ()


def _retry_after_s(error: grpc.Call | grpc.aio.AioRpcError) -> float:
    given = next((value for key, value in error.trailing_metadata() or () if key == RETRY_AFTER), None)
    try:
        return max(float(given), 0.0) if given is not None else 1.0
    except ValueError:  # a stranger's metadata
        return 1.0
