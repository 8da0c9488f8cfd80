"""Rules of autoscaling and their windows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster_router.scaling.rules import HPA_WINDOW_S, KEDA_WINDOW_S, RULES, PoolSize, PoolState, rules_of

POOL = PoolState(num_nodes=4, num_coming=0, num_waiting=0, busy=0.5, kv=0.3, wanted=4, needed=2.2)


@pytest.mark.parametrize(
    ("rule", "changes", "wanted"),
    [
        ("predicted", {"wanted": 7}, 7),
        ("waiting", {"num_waiting": 0}, 0),
        ("waiting", {"num_waiting": 21}, 5),
        ("running", {"busy": 0.75}, 4),
        ("running", {"busy": 1.0}, 6),
        ("running", {"busy": 0.35}, 2),
        ("kv-or-queue", {"kv": 0.85}, 5),
        ("kv-or-queue", {"num_waiting": 20}, 5),
        ("kv-or-queue", {"num_waiting": 20, "num_coming": 1}, 6),
        ("kv-or-queue", {"kv": 0.5}, 4),
        ("kv-or-queue", {"kv": 0.2}, 3),
        ("oracle", {}, 3),
    ],
)
def test_what_each_rule_wants(rule: str, changes: dict[str, float], wanted: int) -> None:
    assert RULES[rule].wants(replace(POOL, **changes)) == wanted  # type: ignore[arg-type]


def test_a_pool_grows_at_once_and_shrinks_by_one_after_its_window() -> None:
    size, now = PoolSize(RULES["predicted"], least=1, most=8), 0.0
    assert size.target(now, replace(POOL, wanted=9)) == 8, "no more than there may be"
    pool = replace(POOL, num_nodes=8, wanted=0)
    targets = []
    while now < HPA_WINDOW_S + 60:
        now += 15.0
        targets.append(size.target(now, pool))
        pool = replace(pool, num_nodes=targets[-1])
    assert targets[:20] == [8] * 20, "something more was wanted within the window"
    assert targets[20:24] == [7, 6, 5, 4]
    assert PoolSize(RULES["predicted"], 2, 8).target(0.0, replace(POOL, num_nodes=2, wanted=0)) == 2


def test_keda_keeps_its_nodes_and_then_drops_all_that_nobody_waits_for() -> None:
    size = PoolSize(RULES["waiting"], least=1, most=8)
    assert size.target(0.0, replace(POOL, num_waiting=30)) == 6
    pool = replace(POOL, num_nodes=6)
    assert size.target(KEDA_WINDOW_S, pool) == 6
    assert size.target(KEDA_WINDOW_S + 15, pool) == 1


def test_rules_are_named() -> None:
    assert [rule.name for rule in rules_of("predicted, waiting")] == ["predicted", "waiting"]
    assert len(rules_of("all")) == len(RULES)
    with pytest.raises(ConfigError, match="'guess'; use all or some of predicted, waiting"):
        rules_of("predicted,guess")
