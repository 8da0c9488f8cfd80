"""The command `pdctl`: what an operator asks of a cluster, and of traces without one. Only glue; a command's work is imported when it runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pdcluster import flags

app = typer.Typer(help="Operate a pdcluster; replay traces without one.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"


class Mode(StrEnum):
    AUTO = "auto"
    REMOTE = "remote"
    LOCAL = "local"


@app.callback()
def pdctl() -> None:
    """Operate a pdcluster; replay traces without one."""


@app.command("replay")
def replay(
    trace: Annotated[str, typer.Argument(help="a file (Mooncake JSON lines or Azure CSV), or generate:KIND[:REQUESTS], such as generate:chat:5000")],
    policy: Annotated[str, typer.Option(help="one or several, separated by commas; parameters follow a colon: product,kv-cost:overlap=2")] = "",
    prefill: Annotated[int | None, typer.Option(metavar="N", help="prefill nodes (default: 8 when no role is given)")] = None,
    decode: Annotated[int | None, typer.Option(metavar="N", help="decode nodes (default: 4 when no role is given)")] = None,
    mixed: Annotated[int | None, typer.Option(metavar="N", help="nodes that do both (default: 0)")] = None,
    speedup: Annotated[float, typer.Option(metavar="X", help="how many times as fast as recorded requests come")] = 1.0,
    cache_tokens: Annotated[int, typer.Option(metavar="C", help="KV tokens of one node")] = 4_000_000,
    seed: Annotated[int, typer.Option(metavar="S", help="of generated traces, random choices and lost messages")] = 0,
    mode: Annotated[Mode, typer.Option(help="take every request through this mode")] = Mode.AUTO,
    feed_delay_ms: Annotated[float, typer.Option(metavar="MS", help="how late the router hears of nodes")] = 0.0,
    feed_loss: Annotated[float, typer.Option(metavar="SHARE", help="share of nodes' messages that are lost")] = 0.0,
    requests: Annotated[int, typer.Option(metavar="N", help="only the first N requests; 0: all")] = 0,
    in_this_router: Annotated[
        bool,
        typer.Option(
            "--in-this-router",
            help="with this router's hold queue and pulls around every policy, as router.policy has them; without, all but seconds run as published: "
            "requests are sent at once, and KV is pulled only where the rule says so",
        ),
    ] = False,
    cost: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="nodes as a real one was measured: JSON of Admin's DescribeNode, or its cost; each node is drawn within the error bars "
            "(default: a model of 8 GPUs)",
        ),
    ] = None,
    output: Annotated[Output, typer.Option("-o", "--output", help="how rows are printed")] = Output.TABLE,
) -> None:
    """Drive the production routing policies through a trace in simulated time; one row per policy. Needs no cluster."""
    with flags.reported():
        from pdcluster_router.replay import command

        asked = command.Asked(
            trace=trace,
            policies=policy,
            prefill=prefill,
            decode=decode,
            mixed=mixed,
            speedup=speedup,
            cache_tokens=cache_tokens,
            seed=seed,
            mode=mode.value,
            feed_delay_s=feed_delay_ms / 1000,
            feed_loss=feed_loss,
            requests=requests,
            in_this_router=in_this_router,
            cost=cost,
        )
        command.show(command.rows(asked), output.value)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
