"""pdctl top: which nodes it calls slow, and rates over routers that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pdcluster.rpc import admin_pb2 as pb
from pdcluster_router.operate import rates, top
from pdcluster_router.operate.clients import RouterAnswer
from pdcluster_router.operate.reading import Row

LABELS = 'half="{half}",figure="value",node="{name}",role="x"'


def node(name: str, role: str, itl_s: float, running: int = 1) -> Row:
    return {"name": name, "role": role, "load": {"itl_s": itl_s, "running": running}}


def slow(nodes: list[Row], prefill_s: dict[str, float]) -> dict[str, list[str]]:
    lines = [
        f"pdcluster_node_predicted_seconds{{{LABELS.format(half='prefill', name=name)}}} {value}"
        for name, value in prefill_s.items()
    ]
    scrape = rates.samples_of("\n".join(["# TYPE pdcluster_node_predicted_seconds gauge", *lines, ""]))
    look = top.ClusterLook(0.0, nodes, [{"name": "router"}], {"router": scrape, "another": {}})
    return {each["name"]: each["slow"] for each in top.figures(look, None)["nodes"] if each["slow"]}


def test_a_node_is_slow_beside_those_of_its_pool() -> None:
    nodes = [
        node("p0", "prefill", 0.0),
        node("p1", "prefill", 0.0),
        node("d0", "decode", 0.01),
        node("d1", "decode", 0.03),
    ]
    assert slow(nodes, {"p0": 0.1, "p1": 0.4}) == {"p1": ["prefill"], "d1": ["tokens"]}


def test_nodes_of_different_pools_are_not_compared() -> None:
    assert slow([node("p0", "prefill", 0.0), node("m0", "mixed", 0.0)], {"p0": 0.1, "m0": 0.9}) == {}


def test_what_decode_nodes_know_of_prompts_makes_none_of_them_slow() -> None:
    assert slow([node("d0", "decode", 0.01), node("d1", "decode", 0.01)], {"d0": 0.1, "d1": 0.9}) == {}


def test_an_idle_nodes_last_tokens_do_not_count() -> None:
    assert slow([node("d0", "decode", 0.01), node("d1", "decode", 0.9, running=0)], {}) == {}


class Routers:
    """What routers answer to `top.look`: by address, the output tokens that each worker counted, and since when."""

    def __init__(self, told: Mapping[str, Mapping[str, tuple[int, float]]]) -> None:
        self._told = told

    def read(self, method: str, _: object) -> list[RouterAnswer]:
        if method == "ListNodes":
            return [RouterAnswer(address, pb.ListNodesReply()) for address in self._told]
        return [
            RouterAnswer(address, pb.RouterStatus(metrics=scrape(workers))) for address, workers in self._told.items()
        ]


def scrape(workers: Mapping[str, tuple[int, float]]) -> str:
    lines = ["# TYPE pdcluster_output_tokens counter"]
    lines += [f'pdcluster_output_tokens_total{{worker="{name}"}} {count}' for name, (count, _) in workers.items()]
    lines += ["# TYPE process_start_time_seconds gauge"]
    lines += [f'process_start_time_seconds{{worker="{name}"}} {began}' for name, (_, began) in workers.items()]
    return "\n".join([*lines, ""])


BUSY, CALM = {"0": (1_000_000, 1.0)}, {"0": (50, 1.0)}


@pytest.mark.parametrize(
    ("before", "now", "tokens"),
    [
        ({"a": BUSY, "b": CALM}, {"a": {"0": (1_000_007, 1.0)}, "b": {"0": (53, 1.0)}}, 10),
        ({"a": BUSY, "b": CALM}, {"b": {"0": (60, 1.0)}}, 10),
        ({"a": BUSY, "b": CALM}, {"a": {"0": (5, 2.0)}, "b": {"0": (55, 1.0)}}, 10),
        ({"a": CALM}, {"a": {"0": (70, 2.0)}}, 70),
        ({"b": CALM}, {"a": BUSY, "b": {"0": (60, 1.0)}}, 10),
        ({"a": {**BUSY, "1": (50, 1.0)}}, {"a": {"1": (60, 1.0)}}, 10),
        ({"a": {"1": (50, 1.0)}}, {"a": {**BUSY, "1": (60, 1.0)}}, 10),
    ],
    ids=["both", "one leaves", "one restarts", "restarts and did more", "one comes", "worker silent", "worker back"],
)
def test_rates_are_of_what_each_router_did_meanwhile(before: Any, now: Any, tokens: int) -> None:
    first, second = top.look(Routers(before)), top.look(Routers(now))  # type: ignore[arg-type]
    second = top.ClusterLook(first.moment + 1.0, second.nodes, second.statuses, second.samples)
    assert top.figures(second, first)["output_tokens"] == tokens


def test_what_one_router_knows_of_a_node_is_not_halved_by_one_that_does_not_see_it() -> None:
    text = f"pdcluster_node_predicted_seconds{{{LABELS.format(half='prefill', name='p0')}}} 0.1\n"
    statuses: list[Row] = [{"name": "a"}, {"name": "b"}]
    look = top.ClusterLook(0.0, [node("p0", "prefill", 0.0)], statuses, {"a": rates.samples_of(text), "b": {}})
    assert top.figures(look, None)["nodes"][0]["prefill_s"] == 0.1
