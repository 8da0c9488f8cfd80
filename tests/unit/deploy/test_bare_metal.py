"""What stands in deploy/systemd and docs/bare-metal.md is what the commands take."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pdcluster.settings.config import BootstrapConfig, NodeConfig, RouterConfig, load

ROOT = Path(__file__).parents[3]
SYSTEMD = ROOT / "deploy" / "systemd"
PAGE = (ROOT / "docs" / "bare-metal.md").read_text()
SECTIONS = {"node": NodeConfig, "router": RouterConfig, "bootstrap": BootstrapConfig}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_settings_file_is_taken(section: str) -> None:
    loaded = load(SECTIONS[section], file=SYSTEMD / "pdcluster.toml", environ={})
    assert any(origin.startswith("file") for origin in loaded.origins.values())


def test_the_pages_variables_are_settings_and_win_over_the_file() -> None:
    given = dict(re.findall(r"^(PDCLUSTER_\w+)=(\S+)$", PAGE, re.MULTILINE))
    assert len(given) >= 8
    loaded = load(NodeConfig, file=SYSTEMD / "pdcluster.toml", environ=given)
    assert loaded.config.listen == "10.0.0.1:8100"
    assert loaded.config.transfer.port == 8101
    assert loaded.config.health == "0.0.0.0:9080" or given["PDCLUSTER_NODE_HEALTH"] == loaded.config.health


@pytest.mark.parametrize("unit", sorted(SYSTEMD.glob("*.service")), ids=lambda unit: unit.stem)
def test_units_call_commands_that_there_are(unit: Path) -> None:
    (command,) = re.findall(r"^ExecStart=/opt/pdcluster/bin/(.+)$", unit.read_text(), re.MULTILINE)
    program = command.split()[0]
    assert f'{program} = "' in (ROOT / "pyproject.toml").read_text()
    assert "--config /etc/pdcluster/pdcluster.toml" in command
    assert unit.stem.rstrip("@") in PAGE
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)[0])
    if unit.stem != "pdcluster-bootstrap":
        assert stop_s > NodeConfig().drain_s + 10


@pytest.mark.parametrize("unit", sorted(SYSTEMD.glob("*.service")), ids=lambda unit: unit.stem)
def test_units_are_started_again_for_ever_in_a_sandbox(unit: Path) -> None:
    text = unit.read_text()
    start, service = text.index("[Unit]"), text.index("[Service]")
    assert "StartLimitIntervalSec=0" in text[start:service], "it is a key of [Unit]; elsewhere systemd passes over it"
    for key in ("NoNewPrivileges=true", "ProtectSystem=strict", "RestrictAddressFamilies=", "SystemCallFilter="):
        assert f"\n{key}" in text[service:], key
    assert ("PrivateDevices=true" in text) == (unit.stem != "pdcluster-node@"), "a node may use a GPU"


def test_the_drop_in_for_vllm_starts_what_the_page_installs_and_ends_its_processes() -> None:
    text = (SYSTEMD / "vllm.conf").read_text()
    reset, command = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert reset == "", "a second ExecStart of a service is an error; an empty one drops the unit's"
    words = command.split()
    assert f"{words[0].partition('/bin/')[0]}/bin/pip install '.[vllm]'" in PAGE
    (plain,) = re.findall(r"^ExecStart=\S+ (.+)$", (SYSTEMD / "pdcluster-node@.service").read_text(), re.MULTILINE)
    assert " ".join(words[1:]) == f"{plain} --engine vllm"
    keys = dict(re.findall(r"^([A-Z]\w+)=(.+)$", text, re.MULTILINE))
    assert (keys["KillMode"], keys["LimitMEMLOCK"]) == ("mixed", "infinity")
    assert int(keys["TimeoutStopSec"]) > NodeConfig().drain_s + 2 * 10, "vLLM's processes get 10 s to end by themselves"
    assert "pdcluster-node@.service.d/" in PAGE


def test_the_firewall_opens_the_ports_that_the_page_and_the_file_use() -> None:
    (inner, outer) = re.findall(r"^nft add rule .*dport \{ (.+) \} accept$", PAGE, re.MULTILINE)
    opened: set[int] = set()
    for part in f"{inner}, {outer}".split(", "):
        first, _, last = part.partition("-")
        opened |= set(range(int(first), int(last or first) + 1))
    given = re.findall(r"^PDCLUSTER_NODE_(?:LISTEN|HEALTH)=\S+:(\d+)$", PAGE, re.MULTILINE)
    given += re.findall(r"^PDCLUSTER_NODE_TRANSFER_PORT=(\d+)$", PAGE, re.MULTILINE)
    given += re.findall(
        r"^(?:listen|health|http|grpc|admin) = \"\S+:(\d+)\"$", (SYSTEMD / "pdcluster.toml").read_text(), re.MULTILINE
    )
    given += re.findall(r"ports (\d+) and (\d+)", PAGE)[0]
    used = {int(port) for port in given} | {int(port) for port in re.findall(r"NODE_HEALTH=\S+:(\d+)", PAGE)}
    assert used == opened, (used - opened, opened - used)


def test_no_page_installs_a_name_that_is_not_ours() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")]
    for page in pages:
        assert not re.search(r"pip install (?:-\S+ )*['\"]?pdcluster\b", page.read_text()), page


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in SYSTEMD.glob("*.service"):
        text = re.sub(r"/opt/pdcluster/bin/\S+", "/bin/true", unit.read_text()).replace("User=pdcluster", "User=root")
        name = unit.name.replace("@", "@x")
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            ("systemd-analyze", "verify", str(tmp_path / name)), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert all("Restart" in line for line in done.stderr.splitlines()), "only keys of later versions are unknown"


def test_commands_of_pages_for_several_machines_have_the_key() -> None:
    commands = [
        (page.name, line)
        for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))
        for line in page.read_text().splitlines()
        if re.match(r"pdcluster(-router| node| bootstrap) ", line) and re.search(r"\b10\.0\.0\.", line)
    ]
    assert len(commands) >= 8
    assert [found for found in commands if " $KEY " not in found[1]] == []
