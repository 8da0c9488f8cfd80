"""A replay of nodes as a real one was measured: what Admin says of it is read, and each node is another one within its
error bars."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean, pstdev

import pytest
from google.protobuf.json_format import MessageToJson
from replay_cases import random_trace

from pdcluster.core.errors import ConfigError
from pdcluster.cost.cost import CostError, DecodeCost, NodeCost, PrefillCost
from pdcluster.rpc import admin_pb2 as pb
from pdcluster_router.replay.command import layout_of, rows
from pdcluster_router.replay.fitted import drawn, read_cost
from pdcluster_router.replay.options import NodeOptions, Routing, Traffic
from pdcluster_router.replay.scenario import replay

COST = NodeCost(
    PrefillCost(2e-3, 1e-4, 1e-8, 512, 90, CostError(0.1, 0.02, (2e-4, 0.0, 1e-5, 0.0, 0.0, 1e-9))),
    DecodeCost(4e-3, 3e-4, 2e-7, 1 << 40, CostError(0.2, 0.01, (1e-4, -1e-6, 2e-5, 0.0, 0.0, 1e-8))),
)


def described(cost: NodeCost = COST) -> pb.NodeDescription:
    report = cost.report()
    return pb.NodeDescription(
        node=pb.Node(name="d0"), cost=pb.NodeCost(**{name: getattr(report, name) for name in report.__struct_fields__})
    )


@pytest.mark.parametrize("is_proto_spelling", [False, True])
def test_the_json_of_a_described_node_is_read_in_both_spellings(tmp_path: Path, is_proto_spelling: bool) -> None:
    path = tmp_path / "node.json"
    path.write_text(MessageToJson(described(), preserving_proto_field_name=is_proto_spelling))
    assert read_cost(path) == COST


def test_its_cost_alone_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(MessageToJson(described().cost))
    assert read_cost(path) == COST


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "holds no cost"),
        ("{", "holds no cost"),
        ('{"cost": 3}', "holds no cost"),
        ('{"prefill_token_s": -1}', "prefill_token_s"),
        ('{"prefill_tokens": 1}', "prefill_tokens"),
        ('{"prefill_token_s": 1, "decode_row_s": 1, "prefill_root": [1, 2]}', "prefill_root"),
        ('{"prefill_samples": "1e9"}', "prefill_samples"),
        ("{}", "no time at all"),
    ],
)
def test_what_is_no_cost_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_cost(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        read_cost(tmp_path / "none.json")


def test_nodes_are_drawn_within_the_error_bars() -> None:
    chance = random.Random(1)
    nodes = [drawn(COST, chance) for _ in range(2000)]
    tokens_s = [node.prefill.token_s for node in nodes]
    assert mean(tokens_s) == pytest.approx(1e-4, rel=0.02)
    assert pstdev(tokens_s) == pytest.approx(1e-5 / 1.645, rel=0.1)
    within = [
        abs(node.decode.seconds(8, 4000) - COST.decode.seconds(8, 4000))
        <= COST.decode.error.model_s((1.0, 8.0, 4000.0))
        for node in nodes
    ]
    assert mean(within) == pytest.approx(0.9, abs=0.03)


def test_a_certain_cost_is_every_nodes() -> None:
    certain = NodeCost(PrefillCost(2e-3, 1e-4, 1e-8, 512, 90), DecodeCost(4e-3, 3e-4, 2e-7, 90))
    assert drawn(certain, random.Random(1)) == certain


def test_a_replay_takes_the_fitted_cost_and_repeats_itself_by_seed(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text(MessageToJson(described()))
    layout = layout_of(NodeOptions(mixed=2, cost=path), 3)
    assert layout.cost == COST
    assert layout.chunk_tokens == 512
    ends = [[flight.end_s for flight in replay(random_trace(1), layout, "seconds").flights] for _ in range(2)]
    assert ends[0] == ends[1]
    other = layout_of(NodeOptions(mixed=2, cost=path), 4)
    assert [flight.end_s for flight in replay(random_trace(1), other, "seconds").flights] != ends[0]


def test_the_command_prints_figures_of_the_fitted_nodes(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(
        json.dumps({"prefillTokenS": 1e-5, "decodeFixedS": 1e-3, "prefillSamples": "99", "decodeSamples": 99})
    )
    traffic, routing = Traffic("generate:chat:40"), Routing()
    assert (
        rows(traffic, NodeOptions(mixed=2, cost=path), routing)[0].ttft_mean_s
        < rows(traffic, NodeOptions(mixed=2), routing)[0].ttft_mean_s
    )
