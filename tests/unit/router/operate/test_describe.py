"""pdctl describe node: KV that it writes, and KV that it receives."""

from __future__ import annotations

import json

import pytest

from pdcluster.rpc import admin_pb2 as pb
from pdcluster.rpc import bootstrap_pb2
from pdcluster_router.operate import commands
from pdcluster_router.operate.clients import RouterAnswer
from pdcluster_router.operate.printing import PrintFormat

FROM_PREFILL = pb.Path(peer="prefill-7", backend="tcp", bytes_per_s=250e6, breaker="open", is_chosen=True)


class Router:
    def read(self, _: str, request: pb.DescribeNodeRequest) -> list[RouterAnswer]:
        return [
            RouterAnswer(
                "a",
                pb.NodeDescription(
                    node=pb.Node(name=request.node, role=bootstrap_pb2.ROLE_DECODE), received=[FROM_PREFILL]
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
