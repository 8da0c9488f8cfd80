"""The options of `pdctl replay`, in groups: each field is a flag with its help. `command` checks them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


class Mode(StrEnum):
    AUTO = "auto"
    REMOTE = "remote"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Traffic:
    trace: Annotated[
        str,
        Argument(
            help="a file (Mooncake JSON lines or Azure CSV), or generate:KIND[:REQUESTS], such as generate:chat:5000"
        ),
    ]
    speedup: Annotated[float, Option(metavar="X", help="how many times as fast as recorded requests come")] = 1.0
    seed: Annotated[int, Option(metavar="S", help="of generated traces, random choices and lost messages")] = 0
    requests: Annotated[int, Option(metavar="N", help="only the first N requests; 0: all")] = 0


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """None: not given."""

    prefill: Annotated[int | None, Option(metavar="N", help="prefill nodes (default: 8 when no role is given)")] = None
    decode: Annotated[int | None, Option(metavar="N", help="decode nodes (default: 4 when no role is given)")] = None
    mixed: Annotated[int | None, Option(metavar="N", help="nodes that do both (default: 0)")] = None
    cache_tokens: Annotated[int, Option(metavar="C", help="KV tokens of one node")] = 4_000_000
    cost: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="nodes as a real one was measured: JSON of Admin's DescribeNode, or its cost; each node is drawn "
            "within the error bars "
            "(default: a model of 8 GPUs)",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Routing:
    policy: Annotated[
        str,
        Option(help="one or several, separated by commas; parameters follow a colon: product,kv-cost:weight=2,decay=1"),
    ] = ""
    mode: Annotated[Mode, Option(help="take every request through this mode")] = Mode.AUTO
    feed_delay_ms: Annotated[float, Option(metavar="MS", help="how late the router hears of nodes")] = 0.0
    feed_loss: Annotated[float, Option(metavar="SHARE", help="share of nodes' messages that are lost")] = 0.0
    in_this_router: Annotated[
        bool,
        Option(
            "--in-this-router",
            help="with this router's hold queue and pulls around every policy, as router.policy has them; without, "
            "all but seconds run as published: "
            "requests are sent at once, and KV is pulled only where the rule says so",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class Scaling:
    autoscale: Annotated[
        str,
        Option(
            metavar="RULES",
            help="let prefill and decode pools grow to --prefill and --decode nodes and shrink to one, by one or "
            "several rules: predicted (the router's own signal), waiting (KEDA), running (an HPA), kv-or-queue (as "
            "llm-d), oracle (knows the future); all: each",
        ),
    ] = ""
    start_s: Annotated[float, Option(metavar="S", help="with --autoscale: seconds that a node takes to start")] = 60.0


@dataclass(frozen=True, slots=True)
class Printing:
    output: Annotated[OutputFormat, Option("-o", "--output", help="how rows are printed")] = OutputFormat.TABLE
