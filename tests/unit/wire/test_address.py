"""Addresses as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import ProtocolError
from pdcluster.wire.address import format_address, is_wildcard, parse_address


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("node-3.prefill.cluster_local:65535", ("node-3.prefill.cluster_local", 65535)),
        ("[::1]:8000", ("::1", 8000)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed
    assert format_address(*parsed) == text


BAD = [
    "",
    ":",
    "host",
    "host:",
    ":80",
    "host:x",
    "host:65536",
    "host:0",
    "::1:80",
    "[::1]",
    "a b:80",
    "host:80\n",
    "tcp://host:80",
    "h" * 400 + ":1",
]


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        parse_address(text)


def test_port_0_is_for_listeners_only() -> None:
    assert parse_address("localhost:0", allow_port_0=True) == ("localhost", 0)


@given(st.text(max_size=40))
def test_no_text_makes_it_fail_otherwise(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ProtocolError:
        return
    assert host and 0 < port < 65536


def test_wildcards_are_known() -> None:
    assert is_wildcard("0.0.0.0") and is_wildcard("::") and not is_wildcard("127.0.0.1")
