"""NIXL's side channel has a port before vLLM starts, or the node does not start."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster.node.vllm.process import reserve_side_port
from pdcluster.settings.config import NodeConfig, VllmConfig


def test_a_port_that_is_taken_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as stack:
        port = taken.getsockname()[1]
        config = NodeConfig(vllm=VllmConfig(side_port=port))
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*node.vllm.side_port"):
            reserve_side_port(config, stack)


def test_nodes_that_start_together_get_ports_of_their_own() -> None:
    with ExitStack() as stack:
        ports = {reserve_side_port(NodeConfig(), stack) for _ in range(50)}
    assert len(ports) == 50
