"""HOST:PORT and hosts as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.address import (
    format_address,
    is_loopback,
    is_wildcard,
    loopback_like,
    parse_address,
    parse_host,
)

GOOD = [
    ("127.0.0.1:80", ("127.0.0.1", 80)),
    ("node-3.prefill.cluster_local:65535", ("node-3.prefill.cluster_local", 65535)),
    ("localhost:0", ("localhost", 0)),
    ("node-3.cluster.:9000", ("node-3.cluster.", 9000)),
    ("[::1]:8000", ("::1", 8000)),
    ("[::]:0", ("::", 0)),
    ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ("[::ffff:10.0.0.1]:1", ("::ffff:10.0.0.1", 1)),
]
BAD = [
    "", ":", "host", "host:", ":80", "host:x", "host:65536", "host:-1", "host:+1", "::1:80", "[::1]", "[::1]80", "[]:80",
    "[::1:80", "::1]:80", "[host]:80", "[127.0.0.1]:80", "[1::2::3]:80", "[fe80::1%]:80", "[fe80::1%a b]:80", "a b:80",
    "a/b:80", "host:80\n", "host:80/v1", "tcp://host:80", "host:\u0661", "h" * 400 + ":1",
    "foo..bar:1", ".foo:1", "foo..:1",
]  # fmt: skip


@pytest.mark.parametrize(("text", "parsed"), GOOD)
def test_an_address_is_read_and_written_alike(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed
    assert format_address(*parsed) == text


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        parse_address(text)


@given(st.text(max_size=40) | st.text("[]:.%0123456789abcf", max_size=40))
def test_what_is_read_is_written_alike_and_no_text_makes_it_fail_otherwise(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ValueError:
        return
    assert host and 0 <= port < 65536 and parse_host(host) == host
    assert parse_address(format_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("text", "host"),
    [("::1", "::1"), ("[::1]", "::1"), ("fd00::7", "fd00::7"), ("10.0.0.1", "10.0.0.1"), ("a.b", "a.b")],
)
def test_a_host_may_stand_in_brackets_or_not(text: str, host: str) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize("text", ["", "[]", "[::1", "[host]", "host:80", "[::1]:80", "1::2::3", "a b"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a host's name or address"):
        parse_host(text)


def test_which_hosts_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(
        map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "fd00::1", "127.example.com", "localhost.example.com"))
    )


def test_wildcards_and_the_loopback_of_their_family() -> None:
    assert is_wildcard("0.0.0.0") and is_wildcard("::") and not is_wildcard("127.0.0.1")
    assert loopback_like("::") == loopback_like("fd00::1") == "::1"
    assert loopback_like("0.0.0.0") == loopback_like("node-3") == "127.0.0.1"
