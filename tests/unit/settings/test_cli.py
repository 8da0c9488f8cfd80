"""The commands' glue: flags made from keys, one clear line for a mistake, config check. Typed in as users do, without a
cluster."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pdcluster import cli
from pdcluster.core.errors import Unavailable
from pdcluster.settings import flags
from pdcluster.settings.config import BootstrapConfig, LoadedSection, NodeConfig
from pdcluster_router import cli as router_cli


def run(*words: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli.app, list(words), env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["up", "demo", "node", "bootstrap"])
def test_help_lists_the_flags(command: str) -> None:
    code, out, _ = run(command, "--help", env={"COLUMNS": "150"})
    assert code == 0
    assert "--config" in out
    assert "--ready-fd" not in out


def test_the_routers_help_lists_its_flags() -> None:
    done = CliRunner().invoke(router_cli.app, ["--help"], env={"COLUMNS": "150"})
    assert done.exit_code == 0
    assert "--max-requests" in done.stdout


def test_config_check_shows_value_origin_and_variable(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[node]\nlease_s = 9\n")
    code, out, _ = run(
        "config", "check", "--config", str(file), "--set", "router.max_requests=7", env={"PDCLUSTER_UP_DECODE": "3"}
    )
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert code == 0
    assert rows["node.lease_s"][1] == "9.0"
    assert rows["router.max_requests"][1:3] == ["7", "flag"]
    assert rows["up.decode"][1:] == ["3", "environment", "PDCLUSTER_UP_DECODE"]
    assert rows["bootstrap.lease_s"][2] == "default"
    assert "node.ready_fd" not in rows


def test_config_check_warns_of_what_is_open_and_refuses_what_is_not_told() -> None:
    code, out, err = run("config", "check", "--set", "router.http=0.0.0.0:8000", "--section", "router")
    assert code == 0 and "router.http" in out
    assert "warning: router.http 0.0.0.0:8000 can be reached from other machines without an API key" in err
    code, _, err = run("config", "check", "--set", "node.listen=10.0.0.1:0")
    assert code == 2
    assert "--insecure links,kv" in err
    code, _, err = run("config", "check", "--set", "node.listen=10.0.0.1:0", "--set", "node.insecure=links,kv")
    assert code == 0
    assert "warning: links at 10.0.0.1:0" in err


def test_config_check_of_one_section_still_checks_all() -> None:
    code, out, _ = run("config", "check", "--section", "router")
    assert code == 0
    assert "node.role" not in out
    code, _, err = run("config", "check", "--section", "router", "--set", "node.lease_s=soon")
    assert code == 2
    assert "a duration" in err


def test_config_check_tells_all_that_is_wrong_and_reads_every_file(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    tenants, short = tmp_path / "tenants.toml", tmp_path / "token"
    tenants.write_text("[a]\nkeys = 3\n")
    short.write_text("short")
    settings = {
        "node.security.cluster_key_file": gone / "key",
        "node.model": gone / "model",
        "router.tokenizer": gone / "tokenizer",
        "router.tenants": tenants,
        "router.admin_token_file": short,
        "router.policy": "kvcost",
        "router.shadow_policy": "kv-cost:wait=2",
        "up.targets": gone / "targets.json",
        "node.lease_s": "soon",
    }
    pairs = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    code, _, err = run("config", "check", *pairs)
    assert code == 2
    said = ("soon", "tokenizer", "tenants.toml", "admin token has 5", "kvcost", "wait", "targets.json")
    assert all(what in err for what in said), err
    del settings["node.lease_s"]
    pairs = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    code, out, err = run("config", "check", *pairs)
    assert code == 2 and not out and str(gone / "key") in err and str(gone / "model") in err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == len(settings)


def test_a_command_tells_all_wrong_keys_at_once() -> None:
    code, _, err = run(
        "up", "--http", "8000", "--set", "node.memory=3", "--set", "up.decode=x", env={"PDCLUSTER_X": "1"}
    )
    assert code == 2
    assert all(what in err for what in ("--http", "node.memory", "--decode", "PDCLUSTER_X"))


def test_config_check_masks_secrets() -> None:
    code, out, _ = run("config", "check", env={"PDCLUSTER_NODE_SECURITY_CLUSTER_KEY": "correct horse battery"})
    assert code == 0
    assert "correct horse" not in out
    assert "********" in out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["up", "--grpc", "50051"], "--grpc is '50051', but must be HOST:PORT"),
        (["up", "--http", "8000"], "--http is '8000', but must be HOST:PORT"),
        (["up", "--set", "node.kv"], "must be KEY=VALUE"),
        (["up", "--set", "node.memory=3"], "there is no key node.memory"),
        (["node", "--role", "router"], "must be one of prefill, decode, mixed"),
        (["bootstrap", "--config", "/no/such/file"], "cannot be read"),
        (["config", "check", "--section", "nodes"], "must be one of node, router, bootstrap, up"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(words: list[str], what: str) -> None:
    code, _, err = run(*words)
    assert code == 2
    assert what in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_flags_reach_the_config_and_the_return_value_is_the_exit_code() -> None:
    seen: list[LoadedSection[NodeConfig]] = []
    app = typer.Typer()
    flags.command(app, NodeConfig, "node", "help", lambda loaded: seen.append(loaded) or 7)
    done = CliRunner().invoke(
        app, ["--role", "decode", "--no-warmup", "--transfer", "tcp", "--kv-memory-bytes", "2MiB", "--ready-fd", "9"]
    )
    assert done.exit_code == 7
    config = seen[0].config
    assert (config.role, config.warmup, config.transfer.backend, config.kv.memory_bytes, config.ready_fd) == (
        "decode",
        False,
        "tcp",
        2 * 2**20,
        9,
    )
    assert seen[0].flags["node.transfer.backend"] == "tcp"


def test_a_flag_wins_over_set() -> None:
    seen: list[LoadedSection[BootstrapConfig]] = []
    app = typer.Typer()
    flags.command(app, BootstrapConfig, "bootstrap", "help", lambda loaded: seen.append(loaded) or 0)
    CliRunner().invoke(app, ["--set", "bootstrap.lease_s=7", "--lease-s", "8"])
    assert seen[0].config.lease_s == 8.0


def test_our_errors_at_run_time_are_one_line_and_exit_code_1() -> None:
    def fail(loaded: LoadedSection[BootstrapConfig]) -> int:
        raise Unavailable("nothing there; start it")

    app = typer.Typer(pretty_exceptions_enable=False)
    flags.command(app, BootstrapConfig, "bootstrap", "help", fail)
    done = CliRunner().invoke(app, [])
    assert (done.exit_code, done.stderr) == (1, "error: nothing there; start it\n")
