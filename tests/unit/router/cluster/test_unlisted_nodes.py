"""A boot that the bootstrap no longer names: believed as long as its link stands, and not called again after that."""

from __future__ import annotations

import asyncio

from local_cluster import LocalCluster
from oracle import reference

from pdcluster.bootstrap.card import ClusterSnapshot


async def test_a_node_that_is_no_longer_listed_works_until_its_link_breaks_and_is_forgotten_then() -> None:
    async with LocalCluster({"m0": "mixed", "m1": "mixed"}) as cluster:
        follower = asyncio.create_task(cluster.router.follow(never()))
        cluster.router.apply(ClusterSnapshot("boot", 99, False, (cluster.nodes["m1"].card(),)))
        assert {card.node for card in cluster.router.cards()} == {"m0", "m1"}, "absence from a list is no proof"
        await cluster.nodes["m0"].kill()
        await cluster.until(lambda: {card.node for card in cluster.router.cards()} == {"m1"})
        await asyncio.sleep(0.8)  # longer than the pause between two calls
        assert list(cluster.router._nodes) == [cluster.nodes["m1"].me.incarnation]
        tokens, _ = await cluster.run([1, 2, 3], 4)
        assert tokens == reference([1, 2, 3], 4)
        follower.cancel()


async def test_a_listed_node_whose_link_breaks_is_called_again() -> None:
    async with LocalCluster({"m0": "mixed", "m1": "mixed"}) as cluster:
        follower = asyncio.create_task(cluster.router.follow(never()))
        state = cluster.router._nodes[cluster.nodes["m0"].me.incarnation]
        assert state.link is not None
        state.link._client_link.close("cut by the test")
        await cluster.until(lambda: len(cluster.router.view().nodes) == 1)
        await cluster.until(lambda: len(cluster.router.view().nodes) == 2)
        follower.cancel()


async def never():
    await asyncio.get_running_loop().create_future()
    yield ClusterSnapshot("boot", 0, True, ())
