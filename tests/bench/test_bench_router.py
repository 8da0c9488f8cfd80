"""What the benchmark of routers subtracts is what the fakes take for the exchange that a router has with them: every
leg, alone and at a rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import uvloop

from bench import router
from bench.router import FakesAlone, _direct, ours
from pdcluster.core.messages import AnyMessage, Endpoint
from pdcluster_router.cluster.node_table import NodeTable

NUM_ASKED = 20


@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")], ids=["local", "apart"])
def test_every_leg_is_asked(roles: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said: Counter[tuple[str, str]] = Counter()

    class Counting(NodeTable):
        def send(self, endpoint: Endpoint, message: AnyMessage) -> None:
            said[type(message).__name__, endpoint.node] += 1
            super().send(endpoint, message)

    monkeypatch.setattr(router, "NodeTable", Counting)
    with ours(roles) as (_, bootstrap):
        for interval_s in (0.0, 0.001):
            said.clear()
            assert uvloop.run(_direct(bootstrap, len(roles), NUM_ASKED, interval_s)) > 0.0
            said.pop(("Deliver", "f0"), None)  # of those whose ticket came before the answer
            legs = [("Prefill", "f0"), *([("Reserve", "f1"), ("Cancel", "f1")] if len(roles) > 1 else [])]
            assert said == dict.fromkeys(legs, NUM_ASKED)
        fakes = FakesAlone.measured(bootstrap, len(roles), 100.0, 0.2)
        assert [row.value for row in fakes.rows("apart")] == pytest.approx([fakes.alone_s * 1e3, fakes.half_s * 1e3])
