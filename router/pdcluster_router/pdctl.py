"""The command `pdctl`. A subcommand's work is imported when it runs."""

from __future__ import annotations

import typer

from pdcluster.settings import flags
from pdcluster_router.replay.options import NodeOptions, Printing, Routing, Traffic

app = typer.Typer(
    help="Operate a pdcluster; replay traces without one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def pdctl() -> None:
    """Operate a pdcluster; replay traces without one."""


def replay(traffic: Traffic, nodes: NodeOptions, routing: Routing, printing: Printing) -> None:
    """Drive the production routing policies through a trace in simulated time; one row per policy. Needs no cluster.

    hit: share of prompt tokens that were cached where they were computed; hit_oracle: the same with one cache over the
    nodes that compute prompts for others, which a policy that also fetches from decode nodes, or computes there, can do
    better than. remote: share of requests by two nodes."""
    with flags.reported():
        from pdcluster_router.replay import command

        command.show(command.rows(traffic, nodes, routing), printing.output.value)


app.command("replay")(flags.grouped(replay, Traffic, NodeOptions, Routing, Printing))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
