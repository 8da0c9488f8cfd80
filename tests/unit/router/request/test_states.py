"""The table of a request's states: each is reached and can end, and nothing else happens."""

from __future__ import annotations

import pytest

from pdcluster.core.lifecycle import IllegalTransition, advance
from pdcluster_router.request.states import HAS_SLOT, REQUEST, RequestState


def test_every_state_is_reached_from_the_start_and_can_end() -> None:
    reached = {RequestState.WAITING, RequestState.FOLLOWING}
    while more := {after for (before, _), after in REQUEST.items() if before in reached} - reached:
        reached |= more
    assert reached == set(RequestState)
    assert {state for state, event in REQUEST if event == "end"} == set(RequestState) - {RequestState.ENDED}


def test_nothing_follows_an_end_and_only_waiting_requests_get_nodes() -> None:
    assert not [event for state, event in REQUEST if state is RequestState.ENDED]
    assert {state for state, event in REQUEST if event in ("compute", "prefill")} == {RequestState.WAITING}
    assert {state for state, event in REQUEST if event == "retry"} >= HAS_SLOT


@pytest.mark.parametrize("state", RequestState)
def test_what_the_table_lacks_is_refused(state: RequestState) -> None:
    for event in {event for _, event in REQUEST} - {event for before, event in REQUEST if before is state}:
        with pytest.raises(IllegalTransition, match=state.name):
            advance(REQUEST, state, event)
