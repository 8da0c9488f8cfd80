"""The store of a tensor-parallel group can be reached from this machine alone."""

from __future__ import annotations

import psutil

from pdcluster.engine.model.collective import host_store, join_store


def test_the_store_listens_on_loopback_alone() -> None:
    store = host_store(20.0)
    mine = psutil.Process().net_connections()
    places = {each.laddr.ip for each in mine if each.status == psutil.CONN_LISTEN and each.laddr.port == store.port}
    assert places == {"127.0.0.1"}
    assert join_store(store.port, 20.0).port == store.port
