"""pdctl describe node: KV that it writes, and KV that it receives."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from pdcluster.bootstrap.card import NATIVE, Capabilities
from pdcluster.bootstrap.card_messages import capabilities_to_proto
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import bootstrap_pb2
from pdcluster_router.operate import commands
from pdcluster_router.operate.clients import RouterAnswer
from pdcluster_router.operate.printing import PrintFormat

FROM_PREFILL = pb.Path(peer="prefill-7", backend="tcp", bytes_per_s=250e6, breaker="open", is_chosen=True)
OTHER = Capabilities(pulls=False, parks_s=25.0, digests=False, estimated_cost=True, first_token="decode")


class Router:
    """node: what it says of the node beside its name."""

    def __init__(self, **node: Any) -> None:
        self.node = node

    def read(self, _: str, request: pb.DescribeNodeRequest) -> list[RouterAnswer]:
        return [
            RouterAnswer(
                "a",
                pb.NodeDescription(
                    node=pb.Node(name=request.node, role=bootstrap_pb2.ROLE_DECODE, **self.node),
                    received=[FROM_PREFILL],
                ),
            )
        ]


def test_a_decode_node_shows_who_writes_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    commands.describe(Router(), "decode-0", PrintFormat.TABLE)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "none" in said.partition("KV that it writes")[2].partition("KV that it receives")[0]
    line = next(line for line in said.partition("KV that it receives")[2].splitlines() if "prefill-7" in line)
    assert line.split() == ["prefill-7", "tcp", "250", "open", "True"]


def test_scripts_read_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    commands.describe(Router(), "decode-0", PrintFormat.JSON)  # type: ignore[arg-type]
    (path,) = json.loads(capsys.readouterr().out)["received"]
    assert path == {"peer": "prefill-7", "backend": "tcp", "mb_per_s": 250.0, "breaker": "open", "is_chosen": True}


@pytest.mark.parametrize(
    "node, says",
    [
        ({}, "native"),
        ({"engine": "native", "capabilities": capabilities_to_proto(NATIVE)}, "native"),
        (
            {"engine": "vllm", "capabilities": capabilities_to_proto(OTHER)},
            "vllm (no pulls, no digests of KV, costs are estimated, the decode node makes the first token, finished KV "
            "waits 25 s)",
        ),
    ],
    ids=["of an earlier router", "ours", "another"],
)
def test_a_node_shows_its_engine_and_in_what_it_differs_from_ours(
    capsys: pytest.CaptureFixture[str], node: dict[str, Any], says: str
) -> None:
    commands.describe(Router(**node), "decode-0", PrintFormat.TABLE)  # type: ignore[arg-type]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("engine:"))
    assert line.removeprefix("engine:").strip() == says


def test_scripts_read_each_capability(capsys: pytest.CaptureFixture[str]) -> None:
    node = {"engine": "vllm", "capabilities": capabilities_to_proto(OTHER)}
    commands.describe(Router(**node), "decode-0", PrintFormat.JSON)  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "vllm" and found["capabilities"] == asdict(OTHER)
