"""Who waits for a leader hears of it once."""

from __future__ import annotations

from pdcluster_router.request.forks import ForkGroups


def test_followers_hear_once_where_their_leader_decodes() -> None:
    fork_groups, heard = ForkGroups(), []
    fork_groups.enter("a")
    assert fork_groups.follow("a", heard.append) and fork_groups.follow("a", heard.append)
    fork_groups.settle("a", "d0-1")
    fork_groups.settle("a", None)
    assert heard == ["d0-1", "d0-1"] and len(fork_groups) == 0


def test_nobody_waits_for_a_request_that_does_not_lead_or_is_settled() -> None:
    fork_groups, heard = ForkGroups(), []
    assert not fork_groups.follow("a", heard.append)
    fork_groups.enter("a")
    fork_groups.settle("a", None)
    assert not fork_groups.follow("a", heard.append) and heard == []
