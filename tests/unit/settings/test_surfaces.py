"""What may listen beyond this machine, and what the errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import SECTIONS, BootstrapConfig, NodeConfig, RouterConfig, UpConfig, load
from pdcluster.settings.surfaces import SECRET_OF, is_beyond_loopback

BEYOND = {
    "bootstrap": ("bootstrap", {"bootstrap.listen": "0.0.0.0:8998"}),
    "links": ("node", {"node.listen": "10.0.0.1:0", "node.transfer.backend": "shm"}),
    "kv": ("node", {"node.transfer.host": "fd00::1"}),
    "admin": ("router", {"router.admin": "[::]:50052"}),
    "console": ("router", {"router.console": "gateway.example:8001"}),
    "control": ("router", {"router.control": "[::]:8002"}),
    "scaler": ("router", {"router.scaler": "0.0.0.0:50053"}),
}


@pytest.fixture
def secret(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef0123\n")
    return str(file)


def secret_of(surface: str, file: str) -> dict[str, object]:
    section = BEYOND[surface][0]
    return {
        "cluster key": {f"{section}.security.cluster_key_file": file},
        "admin token": {"router.admin_token_file": file},
        "scaler token": {"router.scaler_token_file": file},
    }[SECRET_OF[surface]]  # type: ignore[index]


def test_every_surface_is_here() -> None:
    assert list(BEYOND) == list(SECRET_OF)


@pytest.mark.parametrize("surface", BEYOND)
def test_beyond_loopback_a_surface_without_its_secret_does_not_start(surface: str) -> None:
    section, given = BEYOND[surface]
    with pytest.raises(ConfigError) as refused:
        load(SECTIONS[section], dict(given), environ={})
    text = str(refused.value)
    flag = {"cluster key": "--security-cluster-key-file FILE"}.get(
        SECRET_OF[surface],  # type: ignore[index]
        f"--{SECRET_OF[surface].replace(' ', '-')}-file FILE",  # type: ignore[index]
    )
    assert flag in text and f"--insecure {surface}" in text and "loopback" in text
    assert next(iter(given)) in text and f"there is no {SECRET_OF[surface]}" in text  # type: ignore[index]


@pytest.mark.parametrize("surface", BEYOND)
def test_with_its_secret_it_starts_without_a_warning(surface: str, secret: str) -> None:
    section, given = BEYOND[surface]
    assert not list(load(SECTIONS[section], {**given, **secret_of(surface, secret)}, environ={}).config.warnings())


@pytest.mark.parametrize("surface", BEYOND)
def test_it_may_be_left_open_by_its_name_with_a_warning(surface: str) -> None:
    section, given = BEYOND[surface]
    loaded = load(SECTIONS[section], {**given, f"{section}.insecure": surface}, environ={})
    (warning,) = loaded.config.warnings()
    assert warning.startswith(f"{surface} at ") and "open to everybody" in warning
    others = ",".join(name for name in SECRET_OF if name != surface)
    with pytest.raises(ConfigError, match=f"--insecure {surface}"):
        load(SECTIONS[section], {**given, f"{section}.insecure": others}, environ={})


def test_a_name_that_is_no_surface_is_refused_with_the_list() -> None:
    for section in SECTIONS:
        with pytest.raises(ConfigError, match="'kvs'; it takes bootstrap, links, kv, admin, console, control, scaler"):
            load(SECTIONS[section], {f"{section}.insecure": "links, kvs"}, environ={})
    assert NodeConfig(insecure=("kv",)).insecure == ("kv",)
    assert load(NodeConfig, {"node.insecure": "kv,links,kv"}, environ={}).config.insecure == ("kv", "links")


def test_on_loopback_nothing_is_asked_for_and_nothing_said() -> None:
    configs = (
        BootstrapConfig(listen="[::1]:0"),
        NodeConfig(listen="127.9.9.9:0"),
        RouterConfig(
            http="localhost:0", admin="[::1]:0", console="127.0.0.1:0", control="127.0.0.1:0", scaler="localhost:0"
        ),
        UpConfig(),
    )
    assert not [line for config in configs for line in config.warnings()]


def test_links_and_kv_of_one_node_are_told_in_one_line() -> None:
    with pytest.raises(ConfigError) as refused:
        NodeConfig(listen="0.0.0.0:9000", advertise="node-3.cluster")
    text = str(refused.value)
    assert "links at 0.0.0.0:9000 (node.listen) and kv at node-3.cluster (node.transfer.host)" in text
    assert "--insecure links,kv" in text and "\n" not in text


def test_two_secrets_that_are_missing_are_two_lines() -> None:
    with pytest.raises(ConfigError) as refused:
        RouterConfig(admin="0.0.0.0:1", console="0.0.0.0:2", scaler="0.0.0.0:3")
    admin, scaler = str(refused.value).splitlines()
    assert "--admin-token-file" in admin and "--insecure admin,console" in admin
    assert "--scaler-token-file" in scaler and "--insecure scaler" in scaler


def test_kv_through_shared_memory_has_no_address() -> None:
    own = {"node.listen": "127.0.0.1:0", "node.transfer.host": "10.0.0.1"}
    load(NodeConfig, {**own, "node.transfer.backend": "shm"}, environ={})
    for more in ({"node.transfer.backend": "nixl"}, {"node.engine": "vllm", "node.transfer.backend": "shm"}, {}):
        with pytest.raises(ConfigError, match="kv at 10"):
            load(NodeConfig, {**own, **more}, environ={})


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1", "fd00::1", "localhost.example:1", "127.1"])
def test_wildcards_names_and_other_addresses_are_beyond(address: str) -> None:
    assert is_beyond_loopback(address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "::1", "localhost", "localhost:80", "127.255.0.1"])
def test_loopback_is_not(address: str) -> None:
    assert not is_beyond_loopback(address)


@pytest.mark.parametrize("section", [NodeConfig, RouterConfig])
def test_a_bootstrap_on_another_machine_is_warned_of_without_a_key(section: type[NodeConfig | RouterConfig]) -> None:
    """Whoever answers there says who the nodes are, and prompts go to them in clear text."""
    name = "node" if section is NodeConfig else "router"
    own = {f"{name}.bootstrap": "127.0.0.1:1,10.0.0.1:8998"}
    (warning,) = load(section, own, environ={}).config.warnings()
    assert f"{name}.bootstrap 10.0.0.1:8998" in warning and "cluster_key_file" in warning and "127.0.0.1" not in warning
    own[f"{name}.security.cluster_key"] = "a long enough secret"
    assert not list(load(section, own, environ={}).config.warnings())


def test_an_api_that_everybody_may_use_is_warned_of_and_starts(tmp_path: Path) -> None:
    (warning,) = RouterConfig(http="0.0.0.0:8000", grpc="10.0.0.1:50051").warnings()
    assert "router.http 0.0.0.0:8000 and router.grpc 10.0.0.1:50051" in warning and "router.tenants" in warning
    (warning,) = RouterConfig(http="127.0.0.1:8000", grpc="[::]:50051").warnings()
    assert "router.http" not in warning
    assert not list(RouterConfig(http="0.0.0.0:8000", tenants=tmp_path / "tenants.toml", grpc=None).warnings())
