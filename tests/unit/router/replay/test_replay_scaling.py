"""Pools that grow and shrink in replay: nothing is lost, nodes are paid for, and work that comes is met."""

from __future__ import annotations

import json
import random

import pytest
from replay_cases import COST, layout, trace
from replay_cases import request as make_request
from typer.testing import CliRunner

from pdcluster_router.pdctl import app
from pdcluster_router.replay.report import ReplaySlo, scaling_figures
from pdcluster_router.replay.scaling import ScalingSpec
from pdcluster_router.replay.scenario import needed_nodes, oracle, replay
from pdcluster_router.replay.trace import Trace
from pdcluster_router.scaling.rules import RULES

RUN = CliRunner()


def two_waves(seed: int) -> Trace:
    """Little, much, nothing for a while, and little again."""
    chance, requests, now = random.Random(seed), [], 0.0
    for rate, until in ((0.5, 120.0), (5.0, 420.0), (0.01, 1000.0), (0.5, 1300.0)):
        while now < until:
            now += chance.expovariate(rate)
            requests.append(make_request(now, chance.randint(50, 600), chance.randint(2, 40)))
    return trace(*requests)


@pytest.mark.parametrize("rule", RULES)
def test_every_request_ends_and_nodes_are_paid_from_start_to_end(rule: str) -> None:
    asked, most = two_waves(1), layout(prefill=4, decode=3, cache_tokens=20_000)
    spec = ScalingSpec(RULES[rule], start_s=30.0, needed=needed_nodes(asked, most, oracle(asked, most)))
    outcome = replay(asked, most, "seconds", scaling=spec)
    assert all(flight.end == "finished" for flight in outcome.flights)
    end_s = max(flight.end_s for flight in outcome.flights)
    assert 2 * asked.span_s <= outcome.node_s <= 7 * (end_s + 1.0)
    assert 2 <= outcome.most_nodes <= 7


def test_prediction_meets_a_wave_and_lets_nodes_go() -> None:
    asked, most = two_waves(2), layout(prefill=4, decode=3, cache_tokens=20_000)
    slo = ReplaySlo(COST, asked.mean_tokens)
    ours = scaling_figures(
        "predicted", replay(asked, most, "seconds", scaling=ScalingSpec(RULES["predicted"], 30.0)), slo
    )
    fixed = scaling_figures("all", replay(asked, most, "seconds"), slo)
    assert ours.most_nodes >= 4, "the wave needs more than one prefill node"
    assert ours.node_hours < 0.7 * 7 * asked.span_s / 3600
    assert ours.attainment > 0.7 * fixed.attainment


def test_a_run_is_a_function_of_its_arguments() -> None:
    asked, most = two_waves(3), layout(prefill=3, decode=2, cache_tokens=20_000)
    one, other = (replay(asked, most, "seconds", scaling=ScalingSpec(RULES["predicted"])) for _ in range(2))
    assert [f.end_s for f in one.flights] == [f.end_s for f in other.flights]
    assert one.node_s == other.node_s


def test_nodes_that_left_come_back_with_empty_caches() -> None:
    """The same prompt before and after a pause in which its node went."""
    same = [0, 1, 2, 3, 4, 5, 6, 7]
    asked = trace(make_request(0.0, 128, 4, same), make_request(20.0, 128, 4, same), make_request(2000.0, 128, 4, same))
    outcome = replay(asked, layout(prefill=2, decode=2), "seconds", scaling=ScalingSpec(RULES["predicted"], least=1))
    cached = [flight.task.cached_tokens for flight in outcome.flights]
    assert cached[0] == 0 and cached[1] > 100 and cached[2] > 100, "the last node of a pool stays"


def test_the_command_prints_a_row_for_each_rule() -> None:
    done = RUN.invoke(
        app, ["replay", "generate:day:200", "--prefill", "2", "--decode", "2", "--autoscale", "all", "-o", "json"]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["rule"] for row in rows] == list(RULES)
    assert all(row["node_hours"] > 0 and row["num_requests"] == 200 for row in rows)
    table = RUN.invoke(app, ["replay", "generate:day:60", "--prefill", "1", "--decode", "1", "--autoscale", "waiting"])
    assert table.stdout.splitlines()[0].split()[:4] == ["rule", "goodput", "attainment", "node_hours"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--autoscale", "guess"), "no rule of autoscaling is called"),
        (("--autoscale", "all", "--mixed", "3"), "give --prefill and --decode"),
        (("--autoscale", "all", "--policy", "product,seconds"), "under one policy"),
        (("--autoscale", "all", "--start-s", "-1"), "--start-s is -1"),
        (("--autoscale", "all", "--start-s", "nan"), "--start-s is nan"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, ...], message: str) -> None:
    done = RUN.invoke(app, ["replay", "generate:chat:20", *words])
    assert done.exit_code != 0
    assert message in done.output
