"""Addresses of peers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import ProtocolError
from pdcluster.wire.address import peer_address


def test_a_peer_has_a_host_and_a_port() -> None:
    assert peer_address("[fd00::1]:8100") == ("fd00::1", 8100)


@pytest.mark.parametrize("text", ["", "host", "host:0", "::1:80", "tcp://host:80", "h" * 400 + ":1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="address"):
        peer_address(text)


@given(st.text(max_size=40))
def test_no_text_makes_it_fail_otherwise(text: str) -> None:
    try:
        host, port = peer_address(text)
    except ProtocolError:
        return
    assert host and 0 < port < 65536
