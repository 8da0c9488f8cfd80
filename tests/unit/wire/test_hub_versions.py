"""A caller of another protocol version is refused by name in the log of who is called."""

import logging

import msgspec
import pytest
import zmq

from pdcluster.core import messages as m
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire import codec
from pdcluster.wire.hub import Hub
from pdcluster.wire.sockets import WireSettings


def test_a_caller_of_another_protocol_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hub = Hub(Peer("node", "1"), listen="127.0.0.1:0", context=context, settings=WireSettings())
    caller = context.socket(zmq.DEALER)
    caller.connect(f"tcp://{hub.address}")
    hello = m.Envelope(m.PROTOCOL_VERSION + 1, "router", "2", "", 1, (m.Hello("router"),))
    try:
        caller.send(codec.seal(msgspec.msgpack.encode(hello)))
        with caplog.at_level(logging.WARNING):
            while not hub.dropped["other_protocol"]:
                hub.tick()
                hub.receive()
        assert f"peer speaks protocol {m.PROTOCOL_VERSION + 1}, this process speaks {m.PROTOCOL_VERSION}" in caplog.text
    finally:
        caller.close(0)
        hub.close(0.0)
        context.destroy(0)
