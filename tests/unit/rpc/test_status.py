"""Our errors as gRPC codes, and back."""

import grpc
import pytest

from pdcluster.core import errors
from pdcluster.rpc.status import error_of, status_of


class Answer(grpc.RpcError, grpc.Call):
    """An RPC error as a channel raises it."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "because"

    def add_callback(self, callback: object) -> bool:
        return False

    def cancel(self) -> bool:
        return False

    def initial_metadata(self) -> tuple[()]:
        return ()

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None:
        return None

    def trailing_metadata(self) -> tuple[()]:
        return ()


PAIRS = [
    (errors.BadRequest("x"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.RequestTooLarge("x"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownModel("x"), grpc.StatusCode.NOT_FOUND),
    (errors.ConfigError("x"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Overloaded("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.DeadlineExceeded("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled("x"), grpc.StatusCode.CANCELLED),
    (errors.Unavailable("x"), grpc.StatusCode.UNAVAILABLE),
    (errors.IntegrityError("x"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(
    ("error", "code"), PAIRS, ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name
)
def test_every_error_has_the_code_of_its_kind(error: errors.PdclusterError, code: grpc.StatusCode) -> None:
    assert status_of(error) is code


@pytest.mark.parametrize(
    "error", [errors.BadRequest, errors.UnknownModel, errors.ConfigError, errors.Overloaded, errors.Cancelled]
)
def test_a_code_becomes_the_error_that_stands_for_it(error: type[errors.PdclusterError]) -> None:
    translated = error_of(Answer(status_of(error("x"))), "bootstrap h:1")
    assert type(translated) is error and "bootstrap h:1" in str(translated) and "because" in str(translated)


def test_codes_that_mean_nothing_to_us_become_unavailable() -> None:
    assert type(error_of(Answer(grpc.StatusCode.UNIMPLEMENTED), "h")) is errors.Unavailable
    assert type(error_of(grpc.RpcError("no call"), "h")) is errors.Unavailable
