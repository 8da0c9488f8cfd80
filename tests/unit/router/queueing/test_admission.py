"""Admission: what is refused and with which word, and how fast the hold queue drains."""

import pytest
from scripted_cluster import make_node

from pdcluster.core import errors
from pdcluster_router.cluster.view import ClusterView
from pdcluster_router.policy.base import Query
from pdcluster_router.queueing.admission import MIN_RETRY_S, DrainRate, Outlook, Slo, check_fits, check_service, refusal


def test_without_a_service_level_nobody_is_refused_for_being_late() -> None:
    check_service(Outlook(1e6, 1e6, 1e6), Slo())


def test_who_would_be_late_is_told_how_long_the_wait_is() -> None:
    with pytest.raises(errors.Overloaded, match=r"predicted after 2.30 s") as refused:
        check_service(Outlook(2.0, 0.2, 0.1), Slo(ttft_s=2.0))
    assert refused.value.retry_after_s == 2.0 and refused.value.reason == "slo"


@pytest.mark.parametrize(
    ("wait_s", "retry_after_s"), [(0.0, MIN_RETRY_S), (0.09, MIN_RETRY_S), (0.11, 0.11), (7.5, 7.5)]
)
def test_a_refusal_says_to_retry_after_the_predicted_wait_or_the_least(wait_s: float, retry_after_s: float) -> None:
    refused = refusal("hold_count", "the queue is full", wait_s)
    assert MIN_RETRY_S == 0.1 and refused.retry_after_s == retry_after_s
    assert refused.reason == "hold_count" and f"predicted wait {wait_s:.2f} s, retry then" in str(refused)


def test_the_margin_is_kept_free() -> None:
    check_service(Outlook(0.6, 0.0, 0.3), Slo(ttft_s=1.0, margin=0.1))
    with pytest.raises(errors.Overloaded):
        check_service(Outlook(0.65, 0.0, 0.3), Slo(ttft_s=1.0, margin=0.1))


def test_short_prompts_are_refused_at_the_same_length_of_the_queue_as_longer_ones() -> None:
    """Else they would fill it up to where no longer one fits."""
    for prefill_s in (0.001, 0.1, 0.25):
        check_service(Outlook(0.74, 0.0, prefill_s), Slo(ttft_s=1.0, margin=0.0))
        with pytest.raises(errors.Overloaded):
            check_service(Outlook(0.76, 0.0, prefill_s), Slo(ttft_s=1.0, margin=0.0))


def test_a_prompt_that_is_too_long_for_the_level_is_measured_by_its_own_length() -> None:
    """Else long prompts would never be served, while short ones are."""
    check_service(Outlook(2.0, 0.5, 4.0), Slo(ttft_s=1.0))
    with pytest.raises(errors.Overloaded, match=r"near to the 8.00 s"):
        check_service(Outlook(3.0, 0.5, 4.0), Slo(ttft_s=1.0))


def test_what_can_never_fit_and_what_has_no_node_are_told_apart() -> None:
    view = ClusterView((make_node("p0", "prefill"), make_node("d0", "decode")))
    check_fits(Query(4095), view, 4096)
    with pytest.raises(errors.BadRequest, match=r"length is 4096 tokens.*has 4096 tokens; shorten it"):
        check_fits(Query(4096), view, 4096)
    with pytest.raises(errors.Unavailable, match=r"none of 0"):
        check_fits(Query(1), ClusterView(()), 0)


def test_the_drain_rate_follows_what_left_while_requests_waited() -> None:
    drain = DrainRate(memory_s=10.0)
    assert drain.rate(2.0) == 2.0, "as expected, while nothing was seen"
    drain.is_held(True, 0.0)
    for second in range(1, 101):
        drain.released(0.5, float(second))
    assert drain.rate(2.0) == pytest.approx(0.5, rel=0.1)
    drain.is_held(False, 100.0)
    drain.is_held(True, 10_000.0)
    assert drain.rate(2.0) == pytest.approx(0.5, rel=0.1), "time in which nobody waited says nothing"


def test_a_moment_in_which_nothing_left_is_no_standstill() -> None:
    """One prompt may take a node that long."""
    drain = DrainRate(memory_s=10.0)
    drain.is_held(True, 0.0)
    drain.is_held(True, 1.3)
    assert 1.0 < drain.rate(2.0) < 2.0


def test_a_queue_that_does_not_drain_has_a_long_wait() -> None:
    drain = DrainRate(memory_s=10.0)
    drain.is_held(True, 0.0)
    rates = []
    for moment in (0.0, 5.0, 15.0, 60.0, 600.0):
        drain.is_held(True, moment)
        rates.append(drain.rate(2.0))
    assert (
        rates == sorted(rates, reverse=True) and rates[0] == 2.0 and rates[3] < 0.01 and rates[4] == pytest.approx(1e-6)
    )


def test_a_short_prompt_of_a_tenant_that_keeps_nobody_out_is_taken_at_its_own_length() -> None:
    check_service(Outlook(0.9, 0.0, 0.01, is_modest=True), Slo(ttft_s=1.0, margin=0.0))
    with pytest.raises(errors.Overloaded):
        check_service(Outlook(0.9, 0.0, 0.01), Slo(ttft_s=1.0, margin=0.0))


@pytest.mark.parametrize(("query", "num_prompt"), [(Query(4096), 4096), (Query(100, most_tokens=5000), None)])
def test_a_prompt_that_no_node_takes_is_told_from_an_output_that_none_does(
    query: Query, num_prompt: int | None
) -> None:
    """Clients shorten a conversation by the tokens of its prompt."""
    view = ClusterView((make_node("m0", "mixed"),))
    with pytest.raises(errors.ContextTooLong) as refused:
        check_fits(query, view, 4096)
    assert (refused.value.max_len, refused.value.num_prompt) == (4096, num_prompt)
