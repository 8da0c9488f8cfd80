"""Figures of a replay, by hand."""

import pytest
from replay_cases import COST, layout, request, trace

from pdcluster_router.replay.report import ReplaySlo, figures, imbalance, longest, quantile
from pdcluster_router.replay.scenario import at_load, oracle, replay

SLO = ReplaySlo(COST, mean_tokens=100)


def test_goodput_counts_requests_within_both_limits_over_all_that_were_offered() -> None:
    # The second waits behind the first's 4000 tokens and is late; the third can be held by no node.
    workload = trace(request(0.0, 4000), request(0.01, 100), request(0.02, 9000), request(100.0, 100))
    found = figures("p", replay(workload, layout(mixed=1), "product"), SLO, hit_oracle=0.5)
    assert (found.num_requests, found.num_refused, found.hit_oracle) == (4, 1, 0.5)
    assert found.attainment == 0.5 and found.goodput == pytest.approx(2 / 100)
    assert found.token_goodput == pytest.approx((4001 + 101) / 100)
    assert found.remote == 0 and found.imbalance == 1


def test_short_prompts_have_the_time_of_the_mean_one() -> None:
    assert SLO.ttft_s(1) == SLO.ttft_s(100) == 5 * COST.prefill.seconds(100)
    assert SLO.ttft_s(2000) == 5 * COST.prefill.seconds(2000)


def test_long_prompts_are_the_longest_tenth() -> None:
    flights = replay(trace(*(request(float(n), 10 + n) for n in range(20))), layout(mixed=1), "product").flights
    assert [flight.task.request.num_tokens for flight in longest(flights)] == [29, 28]


def test_quantiles_are_values_that_occurred() -> None:
    assert [quantile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], share) for share in (0, 0.5, 0.9, 0.99, 1)] == [1, 5, 9, 10, 10]
    assert quantile([], 0.9) == 0


def test_imbalance_is_of_the_nodes_that_compute_prompts() -> None:
    nodes = layout(prefill=2, decode=1).nodes(16)
    for node, busy_s in zip(nodes, (3.0, 1.0, 90.0), strict=True):
        node.busy_s = busy_s
    assert imbalance(nodes) == 1.5


def test_at_load_one_the_oracle_s_work_fills_the_computing_nodes() -> None:
    shared = [1, 2, 3]
    workload = trace(
        request(0.0, 64, contents=shared), request(5.0, 64, contents=shared), request(10.0, 48, contents=shared)
    )
    two = layout(prefill=2, decode=1)
    known = oracle(workload, two)
    assert known.cached == (0, 48, 47) and known.hit == pytest.approx(95 / 176)
    work_s = COST.prefill.seconds(64) + COST.prefill.seconds(16, 48) + COST.prefill.seconds(1, 47)
    assert known.work_s == pytest.approx(work_s)
    assert at_load(workload, two, known, 1.0).span_s == pytest.approx(work_s / 2)
    assert at_load(workload, two, known, 0.5).span_s == pytest.approx(work_s)
