"""What steps cost where nobody measured them: typical costs of the cluster."""

from dataclasses import replace

from pdcluster.cost.cost import DecodeCost, NodeCost, PrefillCost
from pdcluster_router.cluster.pacing import MIN_SAMPLES, SURE_SAMPLES, typical_cost

COST = NodeCost(PrefillCost(0.005, 1e-4, 2e-9, 256, 100), DecodeCost(0.02, 1e-4, 1e-8, 100))


def _cost(times: float, samples: int) -> NodeCost:
    """Of a node that is so many times as slow."""
    prefill = replace(COST.prefill, fixed_s=0.005 * times, token_s=1e-4 * times, samples=samples)
    return NodeCost(prefill, replace(COST.decode, fixed_s=0.02 * times, samples=samples))


def test_who_claims_most_steps_does_not_say_alone_what_is_typical() -> None:
    """The largest claim was believed, however large: one node that lies, or counts wrongly, priced all nodes that know
    little of themselves."""
    honest = [_cost(times, 100 + round(10 * times)) for times in (0.9, 1.0, 1.1)]
    for liar in (_cost(0.001, 1 << 60), _cost(1000.0, 1 << 60)):
        found = typical_cost([*honest, liar])
        assert found in honest
        assert typical_cost([liar, *reversed(honest)]) == found, "whatever the order"


def test_a_node_that_is_sure_counts_before_those_that_are_not() -> None:
    sure = _cost(1.0, SURE_SAMPLES)
    assert typical_cost([_cost(0.5, SURE_SAMPLES - 1), sure, _cost(0.6, MIN_SAMPLES)]) == sure
    assert typical_cost([_cost(0.5, MIN_SAMPLES), _cost(0.7, MIN_SAMPLES - 1)]) == _cost(0.5, MIN_SAMPLES)


def test_nothing_is_typical_before_somebody_ran_steps_of_both_kinds() -> None:
    few = _cost(1.0, MIN_SAMPLES - 1)
    assert typical_cost([]) is None
    assert typical_cost([NodeCost(COST.prefill, few.decode), few]) is None
    assert typical_cost([NodeCost(COST.prefill, few.decode), NodeCost(few.prefill, COST.decode)]) == COST, (
        "each half from who knows it"
    )
