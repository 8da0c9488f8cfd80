"""The command `pdcluster-router`. Reads its section of the settings and serves until it is stopped."""

from __future__ import annotations

import typer

from pdcluster.settings import flags
from pdcluster.settings.config import QUIET_GRPC, LoadedSection, RouterConfig, set_library_environment
from pdcluster.telemetry import log

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _run(loaded: LoadedSection[RouterConfig]) -> int:
    log.configure(loaded.config.log, process=loaded.config.name or "router")
    set_library_environment(QUIET_GRPC)
    if loaded.config.worker is None:
        flags.log_warnings(loaded)
    if loaded.config.workers > 1 and loaded.config.worker is None:
        from pdcluster_router.workers import supervisor

        return supervisor.run(loaded)
    from pdcluster_router import process

    return process.run(loaded.config)


flags.command(app, RouterConfig, "pdcluster-router", "Run one router: the OpenAI API in front of the nodes.", _run)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
