"""A node with a serving engine goes over to other weights: when, what becomes of KV of before, and of what fails."""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import Any

import pytest
from fake_serving_engine import answer_of
from serving_engine_nodes import VllmNode, VllmNodes, card_of

from pdcluster.core.errors import NodeDrains, TransferError
from pdcluster.core.messages import (
    AdapterManaged,
    Commit,
    Deliver,
    Endpoint,
    Failed,
    Finished,
    ManageAdapter,
    PrepareWeights,
    ReceiveWeights,
    Refused,
    Reserved,
    SwitchWeights,
    WeightsManaged,
)
from pdcluster.core.weights import WeightsVersion
from pdcluster.node.vllm.engine_side import EngineLost

TUNED = WeightsVersion("tuned", 1)
PROMPT = list(range(1, 41))


@pytest.fixture
def nodes() -> Iterator[VllmNodes]:
    found = VllmNodes()
    yield found
    for node in found.nodes.values():
        node.control.close()
        node.engine.close()


def last(nodes: VllmNodes, kind: type) -> Any:
    return nodes.all_of(kind)[-1]


def load(nodes: VllmNodes, name: str, source: str) -> WeightsManaged:
    """What the node says when its thread is done."""
    said = len(nodes.all_of(WeightsManaged))
    nodes.say(name, PrepareWeights(1, TUNED, source))
    nodes.turn(steps=False)
    if len(nodes.all_of(WeightsManaged)) == said:
        waiting = select.poll()
        waiting.register(nodes[name].loader.wakeup_fd, select.POLLIN)
        assert waiting.poll(10_000)
        nodes.turn(steps=False)
    answer: WeightsManaged = last(nodes, WeightsManaged)
    return answer


def switch(nodes: VllmNodes, name: str, finish_s: float = 0.0) -> None:
    nodes.say(name, SwitchWeights(2, TUNED.epoch, finish_s))
    nodes.turn()


def is_over(node: VllmNode) -> bool:
    return node.control.is_over()


def test_the_next_boot_begins_when_the_engine_has_the_weights(nodes: VllmNodes) -> None:
    assert load(nodes, "d", "d-tuned") == WeightsManaged(1, "", WeightsVersion("tuned", 1, "d-tuned"))
    assert nodes["d"].engine.changes == [] and nodes["d"].links.standing.takes_work
    switch(nodes, "d")
    assert not is_over(nodes["d"]) and not is_over(nodes["d"])
    (change,) = nodes["d"].engine.changes
    assert (change.path, change.digest, change.former) == ("d-tuned", "d-tuned", "start")
    nodes.turn()  # the engine answers
    nodes["d"].control.turn()
    nodes.next_boot("d")
    nodes.hand_over("r", PROMPT)
    nodes.turn(2)
    assert nodes["d"].engine.weights == "d-tuned" and nodes["p"].engine.weights == ""


def test_running_rows_end_first_and_those_that_are_late_move(nodes: VllmNodes) -> None:
    nodes.hand_over("short", PROMPT, 4)
    nodes.hand_over("long", PROMPT, 500)
    nodes.turn(4)
    load(nodes, "d", "d-tuned")
    switch(nodes, "d", finish_s=3.0)
    nodes.turn(8)
    assert nodes.tokens("short") == answer_of(PROMPT, 4) and len(nodes.all_of(Finished)) == 1
    assert not is_over(nodes["d"]) and nodes["d"].engine.changes == []
    nodes.now += 4.0
    nodes.turn(3)
    assert last(nodes, Failed).code == NodeDrains.code
    assert not is_over(nodes["d"]) and len(nodes["d"].engine.changes) == 1
    nodes.turn(2)
    nodes.next_boot("d")


def test_a_change_waits_for_parked_kv_and_an_old_reference_gives_no_token(nodes: VllmNodes) -> None:
    """P goes over while its KV is parked for D: the reference reaches D afterwards."""
    nodes.delivers = False
    nodes.hand_over("r", PROMPT)
    nodes.turn(3)
    ticket, (parked,) = last(nodes, Reserved).ticket, nodes["p"].engine.parked
    reference = b'"' + parked.encode() + b'"'
    load(nodes, "p", "p-tuned")
    switch(nodes, "p")
    nodes.turn(2)
    assert nodes["p"].engine.released == [parked] and not nodes.store.parked, "KV outlives the boot that parked it"
    assert not is_over(nodes["p"])
    nodes.turn()
    nodes["p"].control.turn()
    old = nodes["p"].me
    nodes.next_boot("p")
    nodes.say("d", Commit(ticket.nonce, 1, (), None, opaque=reference, holds_s=20.0), old)
    nodes.turn(3)
    failed = [each for each in nodes.all_of(Failed, "d") if each.request == "r"]
    assert [(each.code, each.retryable) for each in failed] == [(TransferError.code, True)]
    assert nodes.tokens("r") == [] and nodes["d"].engine.mixed == []


def test_a_ticket_of_the_boot_before_finds_no_kv(nodes: VllmNodes) -> None:
    nodes.delivers = False
    nodes.hand_over("r", PROMPT)
    nodes.turn(3)
    ticket = last(nodes, Reserved).ticket
    load(nodes, "p", "p-tuned")
    switch(nodes, "p")
    nodes.turn(2)
    assert not is_over(nodes["p"])
    nodes.turn()
    nodes["p"].control.turn()
    nodes.next_boot("p")
    nodes.say("p", Deliver(ticket))
    nodes.turn(2)
    assert last(nodes, Refused).leg == "deliver" and nodes.tokens("r") == []


def test_parked_kv_that_is_not_free_holds_the_change_up(nodes: VllmNodes) -> None:
    engine = nodes["p"].engine
    nodes.delivers = False
    nodes.hand_over("r", PROMPT)
    nodes.turn(3)
    load(nodes, "p", "p-tuned")
    switch(nodes, "p")
    nodes.turn(1)
    nodes.store.parked[engine.added[0].key] = "held by a read"
    for _ in range(5):
        assert not is_over(nodes["p"])
        nodes.turn()
    assert engine.weights == ""
    nodes.store.parked.clear()
    nodes.turn()
    nodes["p"].control.turn()
    nodes.next_boot("p")
    assert engine.weights == "p-tuned"


def test_weights_that_cannot_be_loaded_leave_the_node_as_it_was(nodes: VllmNodes) -> None:
    node = nodes["d"]
    load(nodes, "d", "bad files")
    switch(nodes, "d")
    assert not is_over(node) and not node.links.standing.takes_work
    nodes.turn()
    node.control.turn()
    assert not is_over(node) and node.links.standing.takes_work
    nodes.turn()
    answer = last(nodes, WeightsManaged)
    assert (answer.number, answer.error) == (2, "bad files cannot be loaded")
    nodes.hand_over("r", PROMPT)
    nodes.turn(10)
    assert nodes.tokens("r") == answer_of(PROMPT, 4) and node.engine.weights == ""
    assert load(nodes, "d", "d-tuned").error == ""
    switch(nodes, "d")
    assert not is_over(node)
    nodes.turn()
    node.control.turn()
    nodes.next_boot("d")


def test_a_node_that_has_neither_weights_ends(nodes: VllmNodes) -> None:
    node = nodes["d"]
    node.parts.weights.serving = node.parts.weights.serving.with_name("gone")
    load(nodes, "d", "bad files")
    switch(nodes, "d")
    assert not is_over(node)
    node.engine.step()
    with pytest.raises(EngineLost, match="bad files cannot be loaded, and gone cannot, either"):
        node.control.turn()


def test_a_stop_while_the_engine_loads_ends_the_node(nodes: VllmNodes) -> None:
    node = nodes["d"]
    load(nodes, "d", "d-tuned")
    switch(nodes, "d")
    assert not is_over(node)
    node.control.stop()
    assert node.control.run() is None
    assert not node.parts.weights.is_done
    node.engine.close()
    del nodes.nodes["d"]
    nodes._carry()
    assert last(nodes, WeightsManaged).error == "the node stops"


def test_adapters_are_unloaded_by_hand_first(nodes: VllmNodes) -> None:
    """vLLM would drop them without a word."""
    nodes["d"].adapters.introduce(card_of(nodes["d"]), {})
    nodes.say("d", ManageAdapter(7, "sql", "files-1"))
    nodes.turn(2)
    assert "has the LoRA adapters sql" in load(nodes, "d", "d-tuned").error
    nodes.say("d", ManageAdapter(8, "sql"))
    nodes.turn()
    assert load(nodes, "d", "d-tuned").error == ""
    nodes.say("d", ManageAdapter(9, "sums", "files-2"))  # meanwhile
    switch(nodes, "d")
    nodes.turn()
    answer = last(nodes, WeightsManaged)
    assert answer.number == 2 and "has the LoRA adapters sums" in answer.error
    assert nodes["d"].links.standing.takes_work and nodes["d"].engine.changes == []


def test_a_node_that_goes_over_loads_no_adapter(nodes: VllmNodes) -> None:
    nodes["d"].adapters.introduce(card_of(nodes["d"]), {})
    load(nodes, "d", "d-tuned")
    switch(nodes, "d")
    nodes.say("d", ManageAdapter(7, "sql", "files-1"))
    nodes.turn()
    answer = last(nodes, AdapterManaged)
    assert answer.number == 7 and "goes over to other weights" in answer.error and not nodes["d"].engine.adapters


def test_weights_in_memory_are_refused_by_name(nodes: VllmNodes) -> None:
    assert "write them to files" in load(nodes, "d", "node:p").error
    nodes.say("d", ReceiveWeights(3, TUNED, Endpoint("trainer", "t-1", "127.0.0.1:9"), ()))
    nodes.turn()
    assert last(nodes, WeightsManaged).number == 3 and "write them to files" in last(nodes, WeightsManaged).error


@pytest.mark.parametrize(("source", "is_done"), [("d-tuned", True), ("bad files", False)])
def test_a_node_catches_up_only_when_its_engine_has_the_weights(
    nodes: VllmNodes, monkeypatch: pytest.MonkeyPatch, source: str, is_done: bool
) -> None:
    """It registers with its own weights where the engine fails."""
    node = nodes["d"]
    own_wait = node.control._wait

    def wait() -> None:
        own_wait()
        node.engine.step()

    monkeypatch.setattr(node.control, "_wait", wait)
    assert node.control.catch_up(PrepareWeights(0, TUNED, source), 100.0) is is_done
    assert len(node.engine.changes) == 1 and is_over(node) is is_done
    assert is_over(node) is is_done and len(node.engine.changes) == 1  # asked again, nothing is changed again
    assert node.links.standing.takes_work is not is_done
