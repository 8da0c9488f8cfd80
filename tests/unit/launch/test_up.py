"""What `up` decides: names, cores, command lines, refusals; and what it prints. Whole clusters are in tests/cluster."""

import asyncio
import io
import json
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import ConfigError, ModelError
from pdcluster.launch.demo import check_open
from pdcluster.launch.up import (
    BUNDLED_KV_BYTES,
    ClusterOutput,
    LocalCluster,
    Serving,
    check_free,
    plan_nodes,
    targets_of,
)
from pdcluster.processes.supervisor import Spec
from pdcluster.settings.config import LoadedSection, UpConfig, load


def loaded(values: dict[str, object] | None = None, file: Path | None = None) -> LoadedSection[UpConfig]:
    return load(UpConfig, values or {}, file, {})


def cluster(values: dict[str, object] | None = None, file: Path | None = None) -> LocalCluster:
    return LocalCluster(
        loaded(values, file), ClusterOutput(io.StringIO(), io.StringIO(), as_json=False, width=9), log_format="text"
    )


def test_targets_say_the_cluster_that_dashboards_and_alerts_keep_apart(tmp_path: Path) -> None:
    facts: dict[str, dict[str, object]] = {
        "bootstrap": {"health": "127.0.0.1:1"}, "decode-0": {"health": "127.0.0.1:2"}, "router": {"health": None},
    }  # fmt: skip
    found = targets_of(facts, "blue")
    assert found == [
        {"targets": ["127.0.0.1:1"], "labels": {"cluster": "blue", "process": "bootstrap", "component": "bootstrap"}},
        {"targets": ["127.0.0.1:2"], "labels": {"cluster": "blue", "process": "decode-0", "component": "node"}},
    ]


def option(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


# ---------------------------------------------------------------- plans


def test_nodes_are_named_by_role_and_number() -> None:
    plans = plan_nodes(UpConfig(prefill=2, decode=1, mixed=1), {0})
    assert [(plan.name, plan.role) for plan in plans] == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
        ("mixed-0", "mixed"),
    ]


@given(st.sets(st.integers(0, 63)), st.integers(1, 8), st.integers(1, 8))
def test_cores_are_shared_out_equally_and_never_twice(available: set[int], prefill: int, decode: int) -> None:
    plans = plan_nodes(UpConfig(prefill=prefill, decode=decode), available)
    given_out = [core for plan in plans for core in plan.cores]
    assert len(set(given_out)) == len(given_out)
    assert set(given_out) <= available
    assert {len(plan.cores) for plan in plans} == {len(available) // (prefill + decode)}


@pytest.mark.parametrize("config", [UpConfig(pin=False), UpConfig(device="cuda", prefill=0, decode=0, mixed=2)])
def test_nodes_are_not_pinned_when_told_so_or_on_a_gpu(config: UpConfig) -> None:
    assert all(plan.cores == () for plan in plan_nodes(config, {0, 1, 2, 3}))


# ---------------------------------------------------------------- command lines


async def test_a_node_is_told_its_role_name_bootstrap_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5})
    found = cluster()
    argv = found._node_spec(found._nodes[1], "127.0.0.1:99").argv
    assert (option(argv, "--role"), option(argv, "--name"), option(argv, "--bootstrap")) == (
        "decode",
        "decode-0",
        "127.0.0.1:99",
    )
    assert (option(argv, "--cores"), option(argv, "--threads")) == ("5", "1")
    assert "--transfer" not in argv, "a default of up must not hide what the node section says"


async def test_what_up_is_told_wins_over_the_sections_of_its_children() -> None:
    found = cluster({"up.transfer": "tcp", "node.transfer.backend": "shm", "up.log.level": "error"})
    argv = found._node_spec(found._nodes[0], "127.0.0.1:99").argv
    assert option(argv, "--transfer") == "tcp"
    assert option(argv, "--role") == "prefill"
    assert option(argv, "--log-level") == "error"
    assert "node.transfer.backend=shm" not in argv


async def test_processes_log_as_quietly_as_up_unless_their_section_says_otherwise() -> None:
    assert option(cluster()._router_spec("a:1").argv, "--log-level") == "warning"
    assert "--log-level" not in cluster({"router.log.level": "debug"})._router_spec("a:1").argv


@pytest.mark.parametrize(("name", "default"), [("http", "127.0.0.1:8000"), ("grpc", "127.0.0.1:50051")])
async def test_a_default_of_up_does_not_hide_where_the_router_section_wants_to_listen(name: str, default: str) -> None:
    section: dict[str, object] = {f"router.{name}": "127.0.0.1:1"}
    for settings, address in (
        ({}, default),
        (section, "127.0.0.1:1"),
        (section | {f"up.{name}": "127.0.0.1:2"}, "127.0.0.1:2"),
    ):
        assert option(cluster(settings)._router_spec("a:1").argv, f"--{name}") == address
    assert option(cluster({"router.grpc": "none"})._router_spec("a:1").argv, "--grpc") == "none"


async def test_only_where_the_router_will_listen_must_be_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.create_server(("127.0.0.1", 0)) as other:
        taken, also = (f"127.0.0.1:{server.getsockname()[1]}" for server in (busy, other))
        with pytest.raises(ConfigError, match=rf"router\.http {taken} cannot be used: Address already in use.*--http"):
            cluster({"router.http": taken})._check()
        with pytest.raises(ConfigError, match=rf"up\.grpc {also} cannot be used"):
            cluster({"up.http": "127.0.0.1:0", "up.grpc": also, "router.grpc": "none"})._check()
        cluster({"up.http": "127.0.0.1:0", "router.http": taken, "router.grpc": "none"})._check()


async def test_settings_of_a_section_reach_its_process_and_no_other() -> None:
    found = cluster({"node.kv.memory_bytes": "2MiB", "router.max_requests": "9"})
    node = found._node_spec(found._nodes[0], "127.0.0.1:99").argv
    router = found._router_spec("127.0.0.1:99").argv
    assert option(node, "--set") == "node.kv.memory_bytes=2MiB"
    assert option(router, "--set") == "router.max_requests=9"


async def test_the_config_file_is_handed_on(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[node]\nlease_s = 9\n")
    found = cluster(file=file)
    for spec in (found._bootstrap_spec(), found._router_spec("a:1"), found._node_spec(found._nodes[0], "a:1")):
        assert option(spec.argv, "--config") == str(file)


async def test_bootstrap_and_router_keep_their_addresses_over_restarts() -> None:
    found = cluster()
    assert found._bootstrap_spec().address_flags == (("address", "--listen"), ("health", "--health"))
    flags = [flag for _, flag in found._router_spec("a:1").address_flags]
    assert flags == ["--http", "--grpc", "--admin", "--console", "--control", "--health"]


async def test_the_bundled_model_gets_a_small_pool_unless_a_size_or_a_model_is_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plain = cluster()
    assert option(plain._node_spec(plain._nodes[0], "a:1").argv, "--kv-memory-bytes") == str(BUNDLED_KV_BYTES)
    for values in ({"node.kv.memory_bytes": "2MiB"}, {"up.model": str(tmp_path)}, {"node.model": str(tmp_path)}):
        found = cluster(values)
        assert "--kv-memory-bytes" not in found._node_spec(found._nodes[0], "a:1").argv


# ---------------------------------------------------------------- refusals


def test_a_busy_port_is_refused_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"up\.http 127\.0\.0\.1:{port} cannot be used: Address already in use.*--http"
        ):
            check_free("up.http", f"127.0.0.1:{port}")
    check_free("up.http", f"127.0.0.1:{port}")


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"up\.http"):
        check_free("up.http", "192.0.2.1:0")


@pytest.mark.parametrize("setting", ["up.model", "node.model"])
async def test_a_model_that_is_not_there_or_not_whole_is_refused_before_anything_starts(
    setting: str, tmp_path: Path
) -> None:
    for path, error in ((tmp_path, "is empty"), (tmp_path / "gone", "does not exist")):
        found = cluster({setting: str(path), "up.http": "127.0.0.1:0"})
        with pytest.raises(ModelError, match=error):
            await found.start()
        assert await found.stop()


async def test_the_type_to_compute_in_goes_to_every_node() -> None:
    found = cluster({"up.dtype": "float32"})
    assert option(found._node_spec(found._nodes[0], "127.0.0.1:1").argv, "--dtype") == "float32"
    assert "--dtype" not in cluster()._node_spec(found._nodes[0], "127.0.0.1:1").argv


def test_bad_settings_of_a_child_are_told_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="no multiple"):
        cluster({"node.kv.page_tokens": "24", "up.http": "127.0.0.1:0"})


async def test_a_file_of_targets_that_can_never_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    found = cluster({"up.targets": str(tmp_path / "gone" / "targets.json"), "up.http": "127.0.0.1:0"})
    with pytest.raises(ConfigError, match=r"up.targets .* there is no folder .*gone"):
        await found.start()
    assert await found.stop()


async def test_what_up_chooses_itself_is_refused_as_a_flag_and_passed_over_in_a_file(tmp_path: Path) -> None:
    found = cluster({"node.role": "mixed", "router.bootstrap": "127.0.0.1:9", "up.http": "127.0.0.1:0"})
    with pytest.raises(ConfigError, match=r"node.role is set, but up chooses it itself(.|\n)*router.bootstrap is set"):
        await found.start()
    assert await found.stop()
    file = tmp_path / "a.toml"
    file.write_text('[node]\nrole = "mixed"\n')
    found = cluster(file=file)
    assert option(found._node_spec(found._nodes[0], "127.0.0.1:1").argv, "--role") == "prefill"


@pytest.mark.parametrize("flags", [{}, {"up.secure": True}])
async def test_a_file_of_processes_beyond_loopback_needs_no_key_here(tmp_path: Path, flags: dict[str, object]) -> None:
    file = tmp_path / "pdcluster.toml"
    file.write_text('[bootstrap]\nlisten = "0.0.0.0:8998"\n[node]\nlisten = "10.0.0.1:9000"\n')
    own = cluster({"up.http": "127.0.0.1:0", **flags}, file)
    assert not any("0.0.0.0" in word or "10.0.0.1" in word for spec in specs_of(own) for word in spec.argv)
    assert await own.stop()


async def test_threads_cores_and_deadlines_of_a_section_reach_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    for values in ({"node.threads": "3"}, {"node.cores": "1,2"}):
        found = cluster(values)
        argv = found._node_spec(found._nodes[0], "127.0.0.1:1").argv
        assert (
            not {"--threads", "--cores"} & set(argv) and f"{next(iter(values))}={next(iter(values.values()))}" in argv
        )
    found = cluster({"node.drain_s": "33", "router.drain_s": "44"})
    node, router = found._node_spec(found._nodes[0], "127.0.0.1:1"), found._router_spec("127.0.0.1:1")
    assert "--drain-s" not in node.argv + router.argv and node.drain_s > 33 and router.drain_s > 44
    found = cluster({"router.drain_s": "44", "up.drain_s": "7"})
    assert option(found._router_spec("127.0.0.1:1").argv, "--drain-s") == "7.0"


async def test_ranks_of_up_count_more_than_those_of_the_section_node() -> None:
    for values, expected in (
        ({"node.tp": "2"}, [2, 2]),
        ({"node.tp": "2", "up.prefill_tp": "1"}, [1, 2]),
        ({"node.tp": "2", "up.tp": "1"}, [1, 1]),
        ({"up.tp": "2", "up.prefill_tp": "1"}, [1, 2]),
    ):
        found = cluster(dict(values))
        for plan, ranks in zip(found._nodes, expected, strict=True):
            argv = found._node_spec(plan, "127.0.0.1:1").argv
            told = option(argv, "--tp") if "--tp" in argv else values.get("node.tp", "1")
            assert plan.tp == int(told) == ranks, values


async def test_a_router_that_could_not_talk_to_its_nodes_is_refused() -> None:
    found = cluster({"node.security.cluster_key": "a long enough secret", "up.http": "127.0.0.1:0"})
    with pytest.raises(ConfigError, match="different cluster keys"):
        await found.start()
    assert await found.stop()


def specs_of(found: LocalCluster) -> list[Spec]:
    node = found._node_spec(found._nodes[0], "127.0.0.1:1")
    return [found._bootstrap_spec(), node, found._router_spec("127.0.0.1:1")]


async def test_secure_makes_a_key_that_all_processes_share_and_that_goes_with_the_run() -> None:
    first, second = cluster({"up.secure": True}), cluster({"up.secure": True})
    keys = []
    for found in (first, second):
        assert found._key is not None
        file = found._key.file
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        for section, spec in zip(("bootstrap", "node", "router"), specs_of(found), strict=True):
            assert f"{section}.security.cluster_key_file={file}" in spec.argv
            assert file.read_text().strip() not in " ".join(spec.argv)
        keys.append(found._node_settings.config.security.cluster_keys())
    assert keys[0] != keys[1]
    assert await first.stop() and await first.stop()
    assert not first._key.file.parent.exists() and second._key.file.exists()
    await second.stop()


def test_secure_beside_a_key_of_the_users_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router\.security\.cluster_key is set; keep one"):
        cluster({"up.secure": True, "router.security.cluster_key": "a long enough secret"})


async def test_without_secure_no_key_is_made() -> None:
    found = cluster()
    assert found._key is None
    assert not any("security" in word or "insecure" in word for spec in specs_of(found) for word in spec.argv)


async def test_insecure_is_passed_on_to_all_sections() -> None:
    beyond: dict[str, object] = {"router.admin": "0.0.0.0:0"}
    with pytest.raises(ConfigError, match="--insecure admin"):
        await cluster(beyond).start()
    found = cluster({**beyond, "up.insecure": "admin,kv", "node.insecure": "links"})
    bootstrap, node, router = (spec.argv for spec in specs_of(found))
    assert "bootstrap.insecure=admin,kv" in bootstrap and "router.insecure=admin,kv" in router
    assert "node.insecure=links" in node


async def test_what_only_this_machine_needs_stays_on_loopback_behind_an_api_for_everybody() -> None:
    found = cluster({"up.http": "0.0.0.0:0", "up.grpc": "[::]:0"})
    for spec in specs_of(found):
        given = dict(zip(spec.argv, spec.argv[1:], strict=False))
        for flag in ("--listen", "--admin", "--console", "--health"):
            assert given.get(flag, "127.0.0.1:0") == "127.0.0.1:0", (spec.name, flag)


# ---------------------------------------------------------------- what it prints


def test_the_ready_line_says_url_model_nodes_transfer_and_time() -> None:
    line = Serving("127.0.0.1", 8000, "tiny", ("prefill-0", "decode-0"), "shm", 3.21).line()
    assert line == "ready in 3.2 s: http://127.0.0.1:8000/v1  model tiny  nodes prefill-0 decode-0  transfer shm"
    assert Serving("::1", 80, "m", (), "tcp", 1.0).url == "http://[::1]:80"


def test_childrens_lines_carry_their_names() -> None:
    err = io.StringIO()
    ClusterOutput(io.StringIO(), err, as_json=False, width=9).forward("decode-0", "hello")
    assert err.getvalue() == "decode-0  | hello\n"


def test_json_stays_json() -> None:
    err = io.StringIO()
    output = ClusterOutput(io.StringIO(), err, as_json=True, width=9)
    output.forward("decode-0", '{"event": "a"}')
    output.forward("decode-0", "a library's print")
    assert [json.loads(line) for line in err.getvalue().splitlines()] == [
        {"event": "a"},
        {"process": "decode-0", "event": "a library's print"},
    ]


# ---------------------------------------------------------------- a router that asks for keys


class Announced:
    """In the supervisor's place: each process has announced itself already."""

    def __init__(self, router: str) -> None:
        self._router = router

    async def start(self, spec: Spec) -> dict[str, object]:
        address = self._router if spec.name == "router" else "127.0.0.1:1"
        return {"ready": True, "address": address, "model": "some-model", "transfer": ["shm"]}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a router with tenants: only its state is told without a key."""
    path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
    nodes = b'pdcluster_node_up{node="a"} 1\npdcluster_node_up{node="b"} 1\n'
    body = {b"/ready": b"{}", b"/metrics": nodes}.get(path)
    status = b"401 Unauthorized" if body is None else b"200 OK"
    writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body or b""), body or b""))
    await writer.drain()
    writer.close()


async def test_a_cluster_with_tenants_comes_up_without_a_key(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[acme]\nkeys = ["some-key-1"]\n')
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        found = cluster({"router.tenants": str(tenants), "up.http": "127.0.0.1:0", "up.grpc": "none"})
        found.supervisor = Announced(f"{host}:{port}")  # type: ignore[assignment]
        serving = await found.start()
    assert (serving.model, serving.port, serving.transfer) == ("some-model", port, "shm")


def test_the_demo_says_at_once_that_it_has_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the demo has no API key; leave it out, or use pdcluster up"):
        check_open(loaded({"router.tenants": str(tmp_path / "tenants.toml")}))
