"""The command `pdcluster`: up, demo, node, bootstrap, config.

A subcommand's module is imported when it runs, so that --help is instant. Settings, flags and the commands' work are in
other modules.
"""

from __future__ import annotations

import os
import shlex
import sys

import typer

from pdcluster.settings import flags
from pdcluster.settings.config import BootstrapConfig, LoadedSection, NodeConfig, UpConfig
from pdcluster.settings.settings_table import SectionName, SettingPairs, SettingsFile, show_settings
from pdcluster.telemetry import log

app = typer.Typer(
    help="LLM serving with prefill and decode on separate nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at the settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def _up(loaded: LoadedSection[UpConfig]) -> int:
    from pdcluster.launch import up

    log.configure(loaded.config.log)
    return up.run(loaded)


def _demo(loaded: LoadedSection[UpConfig]) -> int:
    from pdcluster.launch import demo

    log.configure(loaded.config.log)
    return demo.run(loaded)


def _node(loaded: LoadedSection[NodeConfig]) -> int:
    config = loaded.config
    if config.cores:
        _pin(config.cores)  # before numpy and torch size their thread pools
    log.configure(config.log, process=config.name or config.role)
    flags.log_warnings(loaded)
    if config.engine == "vllm":
        from pdcluster.node.vllm.process import run
    else:
        from pdcluster.node.native.process import run
    return run(config)


def _bootstrap(loaded: LoadedSection[BootstrapConfig]) -> int:
    log.configure(loaded.config.log, process="bootstrap")
    flags.log_warnings(loaded)
    from pdcluster.bootstrap import server

    return server.run(loaded.config)


def _pin(cores: tuple[int, ...]) -> None:
    from pdcluster.core.errors import ConfigError

    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(
            f"node.cores {','.join(map(str, cores))} cannot be used: {error.strerror}; this process may use {allowed}"
        ) from error


flags.command(app, UpConfig, "up", "Run a whole cluster on this machine until Ctrl-C.", _up)
flags.command(
    app, UpConfig, "demo", "Start a cluster, send it real requests, print their streams and timelines, stop.", _demo
)
flags.command(app, NodeConfig, "node", "Run one node.", _node)
flags.command(app, BootstrapConfig, "bootstrap", "Run the bootstrap service.", _bootstrap)


@config_app.command("check")
def check(file: SettingsFile = None, pairs: SettingPairs = None, section: SectionName = None) -> None:
    """Print the effective value of every key and where it comes from; exit 2 with all that is wrong.

    Files that settings name are read, and what a process would refuse at its start is refused.
    """
    with flags.reported():
        from pdcluster.launch.config_check import problems

        show_settings(file, pairs or [], section, problems)


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["node"] and "--" in arguments:
        # What stands behind -- is vLLM's.
        cut = arguments.index("--")
        arguments[cut:] = ["--vllm-args", shlex.join(arguments[cut + 1 :])]
    app(arguments)


if __name__ == "__main__":
    main()
