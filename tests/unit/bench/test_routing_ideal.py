"""The ideal pool of bench.routing, by cases that can be told by hand."""

import pytest

from bench.parts.routing_ideal import ORDERS, Prompt, goodput, num_good
from bench.parts.routing_runs import Workload
from pdcluster_router.replay.scenario import Layout

SHORT, LONG = 1.0, 10.0


def prompt(arrival_s: float, work_s: float, patience_s: float) -> Prompt:
    return Prompt(arrival_s, work_s, arrival_s + patience_s)


def test_an_idle_pool_is_as_fast_as_its_nodes() -> None:
    assert num_good([prompt(0.0, 1.0, 1.0), prompt(5.0, 1.0, 0.9)], 1, ORDERS["due"]) == 1


def test_every_node_takes_a_prompt_at_a_time() -> None:
    both = [prompt(0.0, 1.0, 1.5), prompt(0.0, 1.0, 1.5)]
    assert num_good(both, 1, ORDERS["due"]) == 1
    assert num_good(both, 2, ORDERS["due"]) == 2


def test_an_idle_node_begins_nothing_before_it_came() -> None:
    assert num_good([prompt(5.0, 1.0, 0.5)] * 2, 2, ORDERS["due"]) == 0


def test_what_is_due_first_goes_first_and_not_what_came_first() -> None:
    """While one is computed, a long one comes and then three short ones; only the order decides who is late."""
    prompts = [prompt(0.0, SHORT, 5.0), prompt(0.1, LONG, 50.0), *(prompt(0.2, SHORT, 5.0) for _ in range(3))]
    assert num_good(prompts, 1, ORDERS["due"]) == 5
    assert num_good(prompts, 1, ORDERS["arrival"]) == 2


def test_a_pool_that_has_little_to_do_answers_all_in_time() -> None:
    workload, layout = Workload("balanced", requests=60, seed=3), Layout(mixed=4, chunk_tokens=256)
    calm, busy = (goodput(workload, layout, load) for load in (0.3, 0.6))
    assert busy == pytest.approx(2 * calm, rel=1e-6)
