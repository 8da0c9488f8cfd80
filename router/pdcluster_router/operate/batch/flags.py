"""Flags of `pdctl batch run`. Imports nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdcluster.settings.kinds import duration
from pdcluster.settings.tls_trust import TlsTrust

if TYPE_CHECKING:
    from pdcluster_router.operate.batch.run import BatchOptions

DAY_S = 86_400.0
DEADLINE_HELP = "Longest time for one line, all tries together: seconds, or 30s, 10m, 1h."
MOST_OPEN = 4096


def _seconds(given: object) -> float:
    try:
        return duration(0.001)(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True, slots=True)
class BatchFlags:
    """What `pdctl batch run` is given."""

    lines: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Lines with custom_id, method, url and body.")]
    answers: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.jsonl", help="Answers, one a line.")]
    errors: Annotated[
        Path | None, typer.Option("--errors", metavar="FILE", help="Lines that failed; default: OUT.errors.jsonl.")
    ] = None
    api: Annotated[
        str,
        typer.Option(
            "--api", envvar="PDCTL_API", metavar="HOST:PORT[,…]",
            help="HTTP APIs of the routers, which share the lines; a name may stand for several.",
        ),
    ] = "127.0.0.1:8000"  # fmt: skip
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", envvar="PDCTL_KEY_FILE", metavar="FILE", help="File with the API key."),
    ] = None
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca", envvar="PDCTL_CA", metavar="FILE", help="PEM that the routers' certificates are signed by."
        ),
    ] = None
    tls_name: Annotated[
        str | None,
        typer.Option("--tls-name", envvar="PDCTL_TLS_NAME", metavar="NAME", help="The name in those certificates."),
    ] = None
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=MOST_OPEN, help="Lines that are open at a time, at most.")
    ] = 128
    deadline: Annotated[float, typer.Option("--deadline", parser=_seconds, metavar="TIME", help=DEADLINE_HELP)] = DAY_S
    ordered: Annotated[bool, typer.Option("--ordered", help="Answers in the order of the input.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress on standard error.")] = False

    def options(self) -> BatchOptions:
        from pdcluster_router.operate.batch.run import BatchOptions

        trust = None if self.ca is None else TlsTrust(self.ca, self.tls_name)
        return BatchOptions(
            self.lines, self.answers, self.errors, self.api, self.key_file, trust, self.concurrency, self.deadline,
            self.ordered, self.quiet,
        )  # fmt: skip
