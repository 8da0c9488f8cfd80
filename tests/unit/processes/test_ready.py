"""The ready line between a process and the one that started it."""

import json
import os

import pytest

from pdcluster.core.errors import ProtocolError
from pdcluster.processes.ready import announce, parse


def test_what_is_announced_is_what_is_parsed() -> None:
    reader, writer = os.pipe()
    announce(writer, "127.0.0.1:1", name="decode-0", transfer="shm")
    with os.fdopen(reader, "rb") as pipe:
        line = pipe.read()
    assert parse(line) == {"ready": True, "address": "127.0.0.1:1", "name": "decode-0", "transfer": "shm"}


def test_without_a_descriptor_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    announce(None, "127.0.0.1:1")
    assert capfd.readouterr() == ("", "")


def test_a_parent_that_left_is_no_error_and_the_descriptor_is_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    announce(writer, "127.0.0.1:1")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writer)


@pytest.mark.parametrize(
    "line",
    [b"hello\n", b"[]\n", b"\xff\n", json.dumps({"address": "a:1"}).encode(), json.dumps({"ready": True}).encode()],
)
def test_nonsense_is_a_protocol_error(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(line)
