"""Links that cannot be opened now: the router tries again, and opens others meanwhile."""

from __future__ import annotations

import asyncio
import logging

import pytest
import zmq
from local_cluster import LocalCluster

from pdcluster.bootstrap.card import ClusterSnapshot
from pdcluster.transfer.backends.base import Peer
from pdcluster.wire.sockets import WireSettings
from pdcluster_router.cluster.node_table import NodeTable


async def test_links_are_opened_once_there_are_sockets_again(caplog: pytest.LogCaptureFixture) -> None:
    async with LocalCluster({"m0": "mixed", "m1": "mixed"}) as cluster:
        snapshot = ClusterSnapshot("boot", 1, True, tuple(node.card() for node in cluster.nodes.values()))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 8)
        taken = [context.socket(zmq.PAIR) for _ in range(7)]
        table = NodeTable(Peer("router-9", "r9"), context=context, settings=WireSettings())

        async def snapshots():
            yield snapshot
            await asyncio.Event().wait()

        following = asyncio.create_task(table.follow(snapshots()))
        await cluster.until(lambda: "no socket for" in caplog.text)
        for socket in taken:
            socket.close(0)
        await cluster.until(lambda: following.done() or len(list(table.cards())) == 2)
        assert not following.done(), "it goes on"
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        table.close()
        assert not [record for record in caplog.records if record.levelno > logging.WARNING]
        context.destroy(0)
