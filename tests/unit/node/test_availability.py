"""What operators may change of a running node: its role, and whether it takes new work."""

from __future__ import annotations

from pdcluster.core.messages import Manage, Managed, Role
from pdcluster.node.availability import NodeAvailability


class Card:
    def __init__(self) -> None:
        self.told: list[object] = []

    def set_role(self, role: Role) -> None:
        self.told.append(role)

    def set_draining(self, is_draining: bool) -> None:
        self.told.append(is_draining)


def test_a_role_is_changed_and_told_once() -> None:
    card = Card()
    standing = NodeAvailability("prefill", card)
    assert standing.apply(Manage(1, "decode")) == Managed(1, "decode", False)
    assert standing.apply(Manage(2, "decode")) == Managed(2, "decode", False)
    assert card.told == ["decode"] and standing.takes_work


def test_a_cordon_is_put_up_and_taken_down() -> None:
    card = Card()
    standing = NodeAvailability("mixed", card)
    assert standing.apply(Manage(1, cordoned=True)).cordoned and not standing.takes_work
    assert not standing.apply(Manage(2, cordoned=False)).cordoned and standing.takes_work
    assert card.told == [True, False]


def test_a_wish_for_nothing_says_how_it_is() -> None:
    standing = NodeAvailability("mixed", Card())
    standing.apply(Manage(1, "prefill", True))
    assert standing.apply(Manage(9)) == Managed(9, "prefill", True)


def test_a_node_on_its_way_out_takes_no_work_again() -> None:
    card = Card()
    standing = NodeAvailability("mixed", card)
    standing.drain()
    standing.apply(Manage(1, cordoned=True))
    standing.apply(Manage(2, cordoned=False))
    assert not standing.takes_work and card.told == [True, True, True]


def test_a_cordon_refuses_nothing_before_the_work_moved_and_all_behind_that() -> None:
    standing = NodeAvailability("mixed", Card())
    standing.apply(Manage(1, cordoned=True))
    assert not standing.refuses_work
    standing.apply(Manage(2, moves=True))
    assert standing.refuses_work
    standing.apply(Manage(3, cordoned=False))
    assert not standing.refuses_work, "it takes work again"
    standing.apply(Manage(4, moves=True))
    assert not standing.refuses_work, "work may come back to a node that is not cordoned"
