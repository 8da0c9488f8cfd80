"""Other weights beside those that serve, with a load of the test."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pdcluster.checkpoint.weight_image import WeightImage
from pdcluster.core.errors import ConfigError, ModelError
from pdcluster.core.messages import AnyMessage, DropWeights, PrepareWeights, SleepNode, SwitchWeights, WeightsManaged
from pdcluster.core.weights import WeightsVersion
from pdcluster.node.outbox import Outbox
from pdcluster.node.weights_loader import Prepare, WeightsLoader
from pdcluster.transfer.backends.base import Peer

ROUTER = Peer("r", "r1")
TUNED = WeightsVersion("tuned", 1)


@dataclass
class Boot:
    version: WeightsVersion
    image: WeightImage | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    lost: str = ""

    def broken(self) -> str:
        return self.lost

    def close(self) -> None:
        self.ended.set()


class World:
    """A loader, and what it answered."""

    def __init__(self, prepare: Prepare | None = None, *, is_asleep: bool = False) -> None:
        self.boots: list[Boot] = []
        self.goes_on = threading.Event()
        self.outbox = Outbox()
        self.asleep: list[Boot] = []
        # Why the node cannot sleep.
        self.full = ""
        self.loader = WeightsLoader(
            Peer("p0", "p0-1"), self.outbox, prepare or self.load, fall_asleep=self.fall_asleep, is_asleep=is_asleep
        )
        self.said: list[WeightsManaged] = []

    def load(self, message: PrepareWeights, image: WeightImage | None) -> Boot:
        assert self.goes_on.wait(10)
        if message.source == "bad":
            raise ModelError("half a file")
        self.boots.append(Boot(WeightsVersion(message.version.label, message.version.epoch, f"d-{message.source}")))
        return self.boots[-1]

    def fall_asleep(self) -> Boot:
        if self.full:
            raise ConfigError(self.full)
        self.asleep.append(Boot(WeightsVersion()))
        return self.asleep[-1]

    def send(self, to: object, message: AnyMessage) -> bool:
        assert isinstance(message, WeightsManaged)
        self.said.append(message)
        return True

    def answers(self) -> list[WeightsManaged]:
        self.outbox.flush(self)
        said, self.said = self.said, []
        return said

    def loaded(self) -> list[WeightsManaged]:
        """The thread ends, and the loop takes that in."""
        self.goes_on.set()
        poller = select.poll()
        poller.register(self.loader.wakeup_fd, select.POLLIN)
        assert poller.poll(10_000)
        self.loader.turn()
        return self.answers()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.goes_on.set()
    made.loader.close()


def test_what_was_asked_for_is_ready_and_taken_once(world: World) -> None:
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    world.loader.load(ROUTER, PrepareWeights(2, TUNED, "a"))
    assert world.answers() == []
    ready = WeightsVersion("tuned", 1, "d-a")
    assert world.loaded() == [WeightsManaged(1, "", ready), WeightsManaged(2, "", ready)]
    world.loader.load(ROUTER, PrepareWeights(3, ready, "a"))  # the same, by its digest
    assert world.answers() == [WeightsManaged(3, "", ready)] and len(world.boots) == 1
    assert world.loader.switch(ROUTER, SwitchWeights(4, 1, 0.0, 10.0)) and world.loader.is_switching
    assert not world.loader.switch(ROUTER, SwitchWeights(5, 1, 0.0))
    assert world.loader.share == 10.0 and world.loader.take() is world.boots[0]
    world.loader.close()
    assert not world.boots[0].ended.is_set()


def test_a_load_that_fails_says_why_and_another_may_follow(world: World) -> None:
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "bad"))
    assert world.loaded() == [WeightsManaged(1, "half a file")]
    assert not world.loader.switch(ROUTER, SwitchWeights(2, 1, 0.0))
    (refused,) = world.answers()
    assert "no weights of epoch 1 ready, but none" in refused.error
    world.loader.load(ROUTER, PrepareWeights(3, TUNED, "a"))
    assert world.loaded()[0].prepared == WeightsVersion("tuned", 1, "d-a")


def test_a_later_order_takes_the_place_of_what_is_ready(world: World) -> None:
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    world.loaded()
    world.loader.load(ROUTER, PrepareWeights(2, WeightsVersion("other", 2), "b"))
    assert world.boots[0].ended.is_set()
    assert world.loaded() == [WeightsManaged(2, "", WeightsVersion("other", 2, "d-b"))]


def test_one_load_at_a_time(world: World) -> None:
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    world.loader.load(ROUTER, PrepareWeights(2, WeightsVersion("other", 2), "b"))
    (refused,) = world.answers()
    assert refused.number == 2 and "has tuned (epoch 1) in hand" in refused.error


def test_what_is_dropped_is_freed_now_or_when_it_comes(world: World) -> None:
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    world.loader.drop(ROUTER, DropWeights(2))
    assert world.answers() == [WeightsManaged(2)]
    assert world.loaded() == [WeightsManaged(1, "they were dropped meanwhile")] and world.boots[0].ended.is_set()
    world.loader.load(ROUTER, PrepareWeights(3, TUNED, "a"))
    world.loaded()
    world.loader.drop(ROUTER, DropWeights(4))
    world.loader.drop(ROUTER, DropWeights(5))
    assert world.answers() == [WeightsManaged(4), WeightsManaged(5)] and world.boots[1].ended.is_set()


def test_a_switch_that_is_off_leaves_all_ready_for_another(world: World) -> None:
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    world.loaded()
    assert world.loader.switch(ROUTER, SwitchWeights(2, 1, 0.0))
    world.loader.drop(ROUTER, DropWeights(3))
    world.loader.stay("too long")
    dropped, stayed = world.answers()
    assert "about to serve them" in dropped.error
    assert (stayed.number, stayed.error, stayed.prepared) == (2, "too long", world.boots[0].version)
    assert world.loader.switch(ROUTER, SwitchWeights(4, 1, 0.0))


def test_an_engine_that_loads_no_weights_says_so() -> None:
    outbox, said = Outbox(), World()
    loader = WeightsLoader(Peer("p0", "p0-1"), outbox, None)
    loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    outbox.flush(said)
    assert "loads no other weights while it runs" in said.said[0].error
    loader.close()
    said.loader.close()


def test_what_comes_after_the_end_is_freed() -> None:
    world = World()
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    world.goes_on.set()
    world.loader.close()
    assert world.boots[0].ended.wait(5) and not world.loader.num_busy


def test_what_was_lost_since_it_was_ready_is_not_switched_to(world: World) -> None:
    """A rank of it died. The node serves on."""
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    world.loaded()
    world.boots[0].lost = "rank 1 died"
    assert not world.loader.switch(ROUTER, SwitchWeights(2, 1, 0.0)) and world.boots[0].ended.is_set()
    assert world.answers() == [WeightsManaged(2, "what node p0 had ready is lost: rank 1 died; load it again")]
    world.loader.load(ROUTER, PrepareWeights(3, TUNED, "a"))
    assert world.loaded()[0].prepared == WeightsVersion("tuned", 1, "d-a")


@pytest.mark.parametrize("source", ["/a\tb", "/" + 2000 * "b"])
def test_a_source_that_no_card_can_name_is_not_loaded(world: World, source: str) -> None:
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, source))
    (refused,) = world.answers()
    assert "printable characters" in refused.error and not world.boots


def test_who_asks_while_it_is_dropped_is_told_to_ask_again(world: World) -> None:
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    world.loader.drop(ROUTER, DropWeights(2))
    world.loader.load(ROUTER, PrepareWeights(3, TUNED, "a"))
    _, refused = world.answers()
    assert "is about to drop these weights" in refused.error
    assert world.loaded() == [WeightsManaged(1, "they were dropped meanwhile")]


def test_a_node_sleeps_once_and_drops_what_was_ready(world: World) -> None:
    world.loader.load(ROUTER, PrepareWeights(1, TUNED, "a"))
    world.loaded()
    assert world.loader.sleep(ROUTER, SleepNode(2, 0.0)) and world.boots[0].ended.is_set()
    assert not world.loader.sleep(ROUTER, SleepNode(3, 0.0)) and world.answers() == []
    assert world.loader.is_switching and world.loader.share is None
    assert world.loader.take() is world.asleep[0] and len(world.asleep) == 1


def test_sleep_that_is_off_leaves_the_node_as_it_was(world: World) -> None:
    assert world.loader.sleep(ROUTER, SleepNode(1, 0.0))
    world.loader.stay("too long")
    assert world.asleep[0].ended.is_set() and not world.loader.is_switching
    assert world.answers() == [WeightsManaged(1, "too long")]
    world.loader.load(ROUTER, PrepareWeights(2, TUNED, "a"))
    assert world.loaded()[0].prepared == WeightsVersion("tuned", 1, "d-a")


def test_a_node_that_loads_or_has_no_room_does_not_sleep(world: World) -> None:
    world.full = "no room on the disk"
    assert not world.loader.sleep(ROUTER, SleepNode(1, 0.0))
    assert world.answers() == [WeightsManaged(1, "no room on the disk")]
    world.loader.load(ROUTER, PrepareWeights(2, TUNED, "a"))
    assert not world.loader.sleep(ROUTER, SleepNode(3, 0.0))
    (refused,) = world.answers()
    assert refused.number == 3 and "in hand" in refused.error


def test_a_node_that_sleeps_says_so_and_wakes_by_a_load() -> None:
    world = World(is_asleep=True)
    assert not world.loader.sleep(ROUTER, SleepNode(1, 0.0))
    assert world.answers() == [WeightsManaged(1)]
    world.loader.load(ROUTER, PrepareWeights(2, TUNED, "node:p0"))  # its own, kept on the disk
    assert world.loaded()[0].error == ""
    assert world.loader.switch(ROUTER, SwitchWeights(3, 1, 0.0)) and world.loader.take() is world.boots[0]
    world.loader.close()


def test_an_engine_that_gives_no_memory_back_says_so() -> None:
    outbox, said = Outbox(), World()
    loader = WeightsLoader(Peer("p0", "p0-1"), outbox, None)
    assert not loader.sleep(ROUTER, SleepNode(1, 0.0))
    outbox.flush(said)
    assert "gives no memory back while its process runs" in said.said[0].error
    loader.close()
    said.loader.close()


def test_a_share_that_changed_outlives_sleep(world: World) -> None:
    world.loader.change_share(55.0)
    assert world.loader.sleep(ROUTER, SleepNode(1, 0.0)) and world.loader.share == 55.0
