"""Whether a node's transfer sockets are sealed, by its settings."""

from __future__ import annotations

import pytest

from pdcluster.node.native import process
from pdcluster.node.native.engine_start import _media
from pdcluster.settings.config import NodeConfig, TransferConfig
from pdcluster.settings.security import SecurityConfig
from pdcluster.transfer.backends.base import Peer

KEY = SecurityConfig(cluster_key="a long enough secret")
ME = Peer("prefill-0", "boot-1")


@pytest.mark.parametrize(
    ("config", "is_sealed"),
    [
        (NodeConfig(security=KEY), True),
        (NodeConfig(security=KEY, transfer=TransferConfig(seal="never")), False),
        (NodeConfig(), False),
    ],
    ids=["a key", "a key, and switched off", "no key"],
)
def test_a_key_seals_the_sockets_of_every_rank(
    config: NodeConfig, is_sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(process, "create_backends", lambda *_, **given: asked.append(given["is_sealed"]) or {})
    process.open_backends(config, ME)
    assert asked == [is_sealed] and _media(config, ME, 0).is_sealed is is_sealed
