"""Addresses that a node's socket takes."""

from __future__ import annotations

import threading

import pytest
import zmq

from pdcluster.core.errors import ConfigError
from pdcluster.wire.sockets import WireSettings, open_router


def test_an_address_that_is_given_up_a_moment_later_is_taken_then() -> None:
    """ZMQ gives an address up after the close that says so."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    former, address = open_router(context, "127.0.0.1:0", WireSettings())
    with pytest.raises(ConfigError, match="cannot listen on"):
        open_router(context, address, WireSettings(rebind_s=0.01))
    threading.Timer(0.05, former.close, (0,)).start()
    socket, found = open_router(context, address, WireSettings(rebind_s=5.0))
    assert found == address
    socket.close(0)
    context.term()
