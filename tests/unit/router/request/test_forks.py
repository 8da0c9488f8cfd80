"""Who waits for a leader hears of it once."""

from __future__ import annotations

from pdcluster_router.request.forks import Leaders


def test_followers_hear_once_where_their_leader_decodes() -> None:
    leaders, heard = Leaders(), []
    leaders.enter("a")
    assert leaders.follow("a", heard.append) and leaders.follow("a", heard.append)
    leaders.settle("a", "d0-1")
    leaders.settle("a", None)
    assert heard == ["d0-1", "d0-1"] and len(leaders) == 0


def test_nobody_waits_for_a_request_that_does_not_lead_or_is_settled() -> None:
    leaders, heard = Leaders(), []
    assert not leaders.follow("a", heard.append)
    leaders.enter("a")
    leaders.settle("a", None)
    assert not leaders.follow("a", heard.append) and heard == []
