"""Settings: three sources, one name each, helpful errors, nothing secret shown."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import (
    SECTIONS,
    BootstrapConfig,
    KVConfig,
    NodeConfig,
    RouterConfig,
    UpConfig,
    cache_directory,
    keys,
    load,
)
from pdcluster.settings.keys import MASK
from pdcluster.settings.security import SecurityConfig

ALL_KEYS = [key for section in SECTIONS.values() for key in keys(section)]


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "pdcluster.toml"
    file.write_text(text)
    return file


def test_without_sources_every_value_is_its_default() -> None:
    loaded = load(NodeConfig, environ={})
    assert loaded.config == NodeConfig()
    assert set(loaded.origins.values()) == {"default"}


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[node]\nlease_s = 11\nreport_s = 0.5\n[node.scheduler]\nmax_rows = 3\n")
    environ = {"PDCLUSTER_NODE_LEASE_S": "12", "PDCLUSTER_NODE_REPORT_S": "600ms"}
    loaded = load(NodeConfig, {"node.lease_s": "13s"}, file, environ)
    assert (loaded.config.lease_s, loaded.config.report_s, loaded.config.scheduler.max_rows) == (13.0, 0.6, 3)
    assert loaded.origins["node.lease_s"] == "flag"
    assert loaded.origins["node.report_s"] == "environment"
    assert loaded.origins["node.scheduler.max_rows"] == f"file {file}"


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[router]\nmax_requests = 5\n")
    assert load(RouterConfig, environ={"PDCLUSTER_CONFIG": str(file)}).config.max_requests == 5


def test_a_section_ignores_the_values_of_the_others(tmp_path: Path) -> None:
    file = write(tmp_path, "[node]\nlease_s = 11\n[router]\nlease_s = 12\n")
    assert load(NodeConfig, file=file, environ={}).config.lease_s == 11.0
    assert load(RouterConfig, file=file, environ={}).config.lease_s == 12.0
    assert load(BootstrapConfig, file=file, environ={}).config == BootstrapConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [("HEAD_SVC_SERVICE_HOST", "10.0.0.9"), ("SERVICE_PORT_GRPC", "50051"), ("ROUTER_PORT", "tcp://10.0.0.9:8000"),
     ("ROUTER_PORT_8000_TCP_ADDR", "10.0.0.9")],
)  # fmt: skip
def test_a_variable_that_kubernetes_sets_for_a_service_is_named_as_that(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"PDCLUSTER_{name} to {value}, as Kubernetes.*enableServiceLinks: false"):
        load(NodeConfig, environ={f"PDCLUSTER_{name}": value})
    with pytest.raises(ConfigError, match="did you mean PDCLUSTER_NODE_TRANSFER_PORT"):
        load(NodeConfig, environ={"PDCLUSTER_NODE_TRANSFR_PORT": "8101"})


def test_an_unknown_variable_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"PDCLUSTER_NODE_TRANSFER_DEADLIN.*did you mean PDCLUSTER_NODE_TRANSFER_DEADLINE_S"
    ):
        load(UpConfig, environ={"PDCLUSTER_NODE_TRANSFER_DEADLIN": "3"})


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("[node]\nrolle = 'decode'\n", "node.role"),
        ("[nodes]\nrole = 'decode'\n", "node.role"),
        ("[node.transfer]\nbackends = 'shm'\n", "node.transfer.backend"),
    ],
)
def test_an_unknown_key_in_the_file_is_an_error_that_names_the_nearest(tmp_path: Path, text: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {near}"):
        load(UpConfig, file=write(tmp_path, text), environ={})


def test_an_unknown_flag_path_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no key node\.kv\.memory; did you mean node\.kv\.memory_bytes"):
        load(NodeConfig, {"node.kv.memory": "1"}, environ={})


def test_a_descriptor_can_be_given_as_a_flag_only(tmp_path: Path) -> None:
    assert load(NodeConfig, {"node.ready_fd": "7"}, environ={}).config.ready_fd == 7
    with pytest.raises(ConfigError, match="PDCLUSTER_NODE_READY_FD"):
        load(NodeConfig, environ={"PDCLUSTER_NODE_READY_FD": "7"})
    with pytest.raises(ConfigError, match="ready_fd"):
        load(NodeConfig, file=write(tmp_path, "[node]\nready_fd = 7\n"), environ={})


@pytest.mark.parametrize("text", ["[node\n", "role = ", "\x00"])
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"pdcluster\.toml is not valid TOML"):
        load(NodeConfig, file=write(tmp_path, text), environ={})


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml cannot be read"):
        load(NodeConfig, file=tmp_path / "gone.toml", environ={})


@pytest.mark.parametrize(
    ("path", "raw", "what"),
    [
        ("node.listen", "nonsense", "HOST:PORT"),
        ("node.listen", "127.0.0.1:70000", "65535"),
        ("node.role", "prefil", "did you mean prefill"),
        ("node.kv.memory_bytes", "2 gigs", "a size"),
        ("node.lease_s", "soon", "a duration"),
        ("node.lease_s", "-1", "a duration"),
        ("node.scheduler.max_rows", "0", "whole number from 1"),
        ("node.scheduler.max_rows", "1.5", "whole number from 1"),
        ("node.deterministic", "maybe", "true or false"),
        ("node.cores", "a-b", "CPU cores"),
        ("node.transfer.backend", "cuda_ipc", "cuda_ipc is not built yet"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_the_way_out(path: str, raw: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        load(NodeConfig, {path: raw}, environ={})
    assert repr(raw) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"up.tp": "0"}, "--tp is '0'"),
        ({"up.grpc": "50051"}, "must be HOST:PORT"),
        ({"up.transfer": "cuda_ipc"}, "cuda_ipc is not built yet"),
        ({"up.device": "cuda"}, "--mixed 1"),
        ({"up.prefill": "0", "up.decode": "0"}, "at least one node"),
        ({"up.decode": "0"}, "--decode 1"),
        ({"up.prefill": "0"}, "--prefill 1"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused(values: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load(UpConfig, values, environ={})


def test_a_cluster_of_mixed_nodes_alone_is_allowed() -> None:
    config = load(UpConfig, {"up.prefill": "0", "up.decode": "0", "up.mixed": "1"}, environ={}).config
    assert (config.prefill, config.decode, config.mixed) == (0, 0, 1)


def test_a_heartbeat_must_leave_room_for_a_lost_one() -> None:
    with pytest.raises(ConfigError, match="less than half"):
        NodeConfig(heartbeat_s=3.0, lease_s=5.0)


@pytest.mark.parametrize("page_tokens", [16, 24, 33])
def test_a_page_is_a_multiple_of_the_hash_block_as_the_pool_wants_it(page_tokens: int) -> None:
    assert KVConfig(page_tokens=64, hash_block_tokens=32).page_tokens == 64
    with pytest.raises(ConfigError, match="no multiple"):
        KVConfig(page_tokens=page_tokens, hash_block_tokens=32)


def test_a_secret_is_shown_in_no_place() -> None:
    environ = {"PDCLUSTER_NODE_SECURITY_CLUSTER_KEY": "correct horse battery"}
    loaded = load(NodeConfig, environ=environ)
    shown = [key.show(loaded.values[key.path]) for key in keys(NodeConfig)]
    assert MASK in shown
    assert "correct horse battery" not in " ".join(shown)
    assert "correct horse battery" not in repr(loaded.config)
    with pytest.raises(ConfigError) as caught:
        load(NodeConfig, environ={"PDCLUSTER_NODE_SECURITY_CLUSTER_KEY": ""})
    assert MASK in str(caught.value)


def test_the_cluster_key_is_the_same_from_text_and_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a long enough secret\n")
    from_file = SecurityConfig(cluster_key_file=file).cluster_keys()
    assert from_file == SecurityConfig(cluster_key="a long enough secret").cluster_keys()
    assert [len(key) for key in from_file] == [32]
    assert SecurityConfig().cluster_keys() == ()


def test_a_file_has_a_cluster_key_a_line_the_first_first(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("the new long secret\n\n  the old long secret \r\n")
    alone = [SecurityConfig(cluster_key=f"the {age} long secret").cluster_keys() for age in ("new", "old")]
    assert SecurityConfig(cluster_key_file=file).cluster_keys() == (*alone[0], *alone[1])


def test_a_cluster_key_that_is_weak_missing_or_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        SecurityConfig(cluster_key="short").cluster_keys()
    with pytest.raises(ConfigError, match="cannot be read"):
        SecurityConfig(cluster_key_file=tmp_path / "gone").cluster_keys()
    weak = tmp_path / "weak"
    weak.write_text("a long enough secret\nshort\n")
    with pytest.raises(ConfigError, match="at least 16"):
        SecurityConfig(cluster_key_file=weak).cluster_keys()
    weak.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        SecurityConfig(cluster_key_file=weak).cluster_keys()
    with pytest.raises(ConfigError, match="both set"):
        SecurityConfig(cluster_key="a long enough secret", cluster_key_file=tmp_path / "key")


def test_every_key_has_its_own_variable_and_help() -> None:
    assert len({key.variable for key in ALL_KEYS}) == len(ALL_KEYS)
    assert all(key.help for key in ALL_KEYS)


@pytest.mark.parametrize("section", list(SECTIONS))
def test_every_flag_of_a_section_is_unique(section: str) -> None:
    flags = [key.flag for key in keys(SECTIONS[section])]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize("key", ALL_KEYS, ids=lambda key: key.path)
def test_every_default_is_a_value_its_own_kind_accepts(key) -> None:
    if key.default not in (None, ()):
        raw = key.default if isinstance(key.default, int | float | tuple) else str(key.default)
        assert key.kind(raw) == key.default


def test_the_flags_that_are_promised_have_their_names() -> None:
    flags = {name: {key.flag for key in keys(section)} for name, section in SECTIONS.items()}
    assert {
        "--model",
        "--prefill",
        "--decode",
        "--mixed",
        "--tp",
        "--transfer",
        "--http",
        "--grpc",
        "--device",
    } <= flags["up"]
    assert {"--role", "--bootstrap", "--model"} <= flags["node"]
    assert {"--listen"} <= flags["bootstrap"]
    assert {"--bootstrap", "--http", "--grpc", "--tokenizer"} <= flags["router"]


def test_parts_are_frozen() -> None:
    config = NodeConfig()
    assert replace(config, role="decode").role == "decode"
    with pytest.raises(AttributeError):
        config.role = "decode"  # type: ignore[misc]
    assert all(part.init for part in fields(config))


def test_homes_in_variables_and_flags_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "[node]\nlease_s = 9\n")
    (name,) = (file.name for file in tmp_path.iterdir())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(NodeConfig, environ={"PDCLUSTER_CONFIG": f"~/{name}"}).config.lease_s == 9.0
    assert load(NodeConfig, file=Path(f"~/{name}"), environ={}).config.lease_s == 9.0
    assert cache_directory({"PDCLUSTER_CACHE_DIR": "~/kernels"}) == tmp_path / "kernels"
    with pytest.raises(ConfigError, match=r"PDCLUSTER_CONFIG is '~nobody-here/a.toml'"):
        load(NodeConfig, environ={"PDCLUSTER_CONFIG": "~nobody-here/a.toml"})


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(ConfigError, match="PDCLUSTER_CACHE_DIR"):
        cache_directory({})
    assert cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/pdcluster")
