"""The tables of a request's states and of its attempt's: each is reached and can end, and nothing else happens."""

from __future__ import annotations

from enum import Enum

import pytest

from pdcluster.core.lifecycle import IllegalTransition, Table
from pdcluster_router.request.states import ATTEMPT, HAS_SLOT, REQUEST, AttemptState, RequestState

# Each table with the states that it begins with, and the event and state that end it.
TABLES = [
    (REQUEST, {RequestState.WAITING, RequestState.FORKING}, "end", RequestState.ENDED),
    (ATTEMPT, {AttemptState.CHOSEN}, "stop", AttemptState.OVER),
]


@pytest.mark.parametrize(("table", "first", "event", "last"), TABLES, ids=["request", "attempt"])
def test_every_state_is_reached_from_the_start_and_can_end(
    table: Table[Enum], first: set[Enum], event: str, last: Enum
) -> None:
    reached = set(first)
    while more := {after for (before, _), after in table.items() if before in reached} - reached:
        reached |= more
    states = set(type(last))
    assert reached == states
    assert {state for (state, each), after in table.items() if each == event and after is last} == states - {last}
    assert not [each for state, each in table if state is last], "nothing follows an end"


def test_an_attempt_begins_where_a_request_waits_and_ends_before_the_next() -> None:
    assert {state for state, event in REQUEST if event == "begin"} == {RequestState.WAITING}
    assert {state for state, event in REQUEST if event == "retry"} == {RequestState.RUNNING}
    assert REQUEST[RequestState.RUNNING, "retry"] is RequestState.WAITING


def test_a_slot_is_had_only_by_attempts_whose_nodes_know_of_them() -> None:
    assert {state for state, event in ATTEMPT if event in ("compute", "prefill")} == {AttemptState.CHOSEN}
    assert AttemptState.CHOSEN not in HAS_SLOT and AttemptState.OVER not in HAS_SLOT
    losing = {state for state, event in ATTEMPT if event == "slot lost"}
    assert losing == HAS_SLOT - {AttemptState.COMPUTING} | {AttemptState.RESERVING}


@pytest.mark.parametrize(
    ("table", "state"), [(table, state) for table, _, _, last in TABLES for state in type(last)], ids=str
)
def test_what_the_table_lacks_is_refused(table: Table[Enum], state: Enum) -> None:
    for event in {event for _, event in table} - {event for before, event in table if before is state}:
        with pytest.raises(IllegalTransition, match=state.name):
            table[state, event]
