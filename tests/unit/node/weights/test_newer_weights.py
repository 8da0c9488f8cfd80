"""Which weights a node that starts takes, and from where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdcluster.bootstrap.card import NodeCard
from pdcluster.kv.layout import Fingerprint, KVLayout
from pdcluster.node.catching_up import newer_weights


def card_of(name: str, epoch: int, source: str = "", share: float = 100.0) -> NodeCard:
    fingerprint = Fingerprint("base", f"w{epoch}", 1, 32, KVLayout(1, 1, 2, 32, "float32"))
    made = NodeCard(name, f"{name}-1", "mixed", "127.0.0.1:7", "base", fingerprint, 1024, 1000, 64)
    return replace(made, weights_epoch=epoch, weights_source=source, weights_share=share, weights_label=f"l{epoch}")


CARDS = [card_of("a", 1, "/old"), card_of("b", 2, "/new"), card_of("c", 2, "/new"), card_of("d", 3, "/tried", 10.0)]


@pytest.mark.parametrize(("from_files", "sources"), [(False, ["node:b", "node:c"]), (True, ["/new"])])
def test_the_newest_of_the_whole_cluster_each_source_once(from_files: bool, sources: list[str]) -> None:
    found = newer_weights(CARDS, card_of("e", 0), from_files=from_files)
    assert [each.order.source for each in found] == sources
    assert {(each.order.version.epoch, each.source) for each in found} == {(2, "/new")}


def test_a_node_that_has_them_takes_none() -> None:
    assert newer_weights(CARDS, card_of("e", 2)) == [] == newer_weights(CARDS, card_of("b", 2), from_files=True)
