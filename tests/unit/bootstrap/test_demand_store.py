"""What routers tell each other through a bootstrap."""

import asyncio
import math

import pytest

from pdcluster.bootstrap import demand as module
from pdcluster.bootstrap.demand import (
    DemandStore,
    RoleDemand,
    RouterDemand,
    demand_from_proto,
    demand_to_proto,
    newest,
)
from pdcluster.bootstrap.demand_client import DemandExchange
from pdcluster.bootstrap.server import serving
from pdcluster.bootstrap.store import StoreSettings
from pdcluster.core.errors import BadRequest, Overloaded

TOLD = RouterDemand("boot-a", 7, (("prefill", RoleDemand(0.5, 0.0)), ("decode", RoleDemand(0.0, 90.0))), 1.5, 3)


def test_a_demand_crosses_the_wire() -> None:
    assert demand_from_proto(demand_to_proto(TOLD)) == TOLD


@pytest.mark.parametrize(
    "bad",
    [
        RouterDemand("", 1),
        RouterDemand("x" * 129, 1),
        RouterDemand("a", 1, held_s=-1.0),
        RouterDemand("a", 1, held_s=math.nan),
        RouterDemand("a", 1, (("prefill", RoleDemand(math.inf, 0.0)),)),
        RouterDemand("a", 1, (("prefill", RoleDemand()),) * 4),
    ],
)
def test_what_cannot_be_is_refused(bad: RouterDemand) -> None:
    with pytest.raises(BadRequest):
        demand_from_proto(demand_to_proto(bad))


def test_a_store_keeps_the_last_word_for_a_lease() -> None:
    now = [0.0]
    store = DemandStore(3.0, lambda: now[0])
    assert store.share(TOLD) == []
    assert store.share(RouterDemand("boot-b", 1)) == [TOLD]
    later = RouterDemand("boot-a", 8)
    assert store.share(later) == [RouterDemand("boot-b", 1)]
    now[0] = 3.5
    assert store.share(RouterDemand("boot-c", 1)) == []


def test_a_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROUTERS", 2)
    store = DemandStore(3.0, lambda: 0.0)
    store.share(RouterDemand("a", 1))
    store.share(RouterDemand("b", 1))
    with pytest.raises(Overloaded):
        store.share(RouterDemand("c", 1))
    assert store.share(RouterDemand("a", 2)) == [RouterDemand("b", 1)]


def test_of_several_words_the_newest_counts() -> None:
    old, new = RouterDemand("a", 1), RouterDemand("a", 2)
    assert newest([new, old, TOLD]) == {"a": new, "boot-a": TOLD}


async def test_routers_learn_of_each_other_through_any_bootstrap_that_is_there() -> None:
    async with serving("127.0.0.1:0", StoreSettings()) as first, serving("127.0.0.1:0", StoreSettings()) as second:
        exchanges = [
            DemandExchange([first, second], lambda: RouterDemand("a", 1, held_s=1.0)),
            DemandExchange([second, "127.0.0.1:1"], lambda: RouterDemand("b", 1, held_s=2.0)),
        ]
        tasks = [asyncio.create_task(each.keep()) for each in exchanges]
        async with asyncio.timeout(20):
            while not all(sum(told.held_s for told in each.all()) == 3.0 for each in exchanges):
                await asyncio.sleep(0.02)
        assert [{told.router for told in each.all()} for each in exchanges] == [{"a", "b"}] * 2
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), "no error on the way"
