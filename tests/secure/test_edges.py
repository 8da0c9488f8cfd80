"""A router of two workers with TLS and tenants, as a user starts it: every client of ours and curl over TLS, strangers
that begin handshakes, and files that change under way."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import httpx
import openai
import pytest
from certificates import NAME, Authority, replace
from fake_cluster import RouterProcess, fake_cluster, until

from bench.fakes.fake_node import Speed
from pdcluster import client as api
from pdcluster.core.errors import Unauthorized
from pdcluster.rpc import admin_pb2 as pb
from pdcluster.settings.tls_trust import TlsTrust, client_context

pytestmark = pytest.mark.timeout(300)

SPEED = Speed(prefill_s=0.0005, token_s=0.002)
# Output tokens of a request that runs for as long as a test looks at it.
LONG = 20_000
KEY, NEXT_KEY, OTHER_KEY = "sk-acme-first", "sk-acme-second", "sk-other-first"


def tenants_of(key: str) -> bytes:
    return f'[acme]\nkeys = ["{key}"]\n[other]\nkeys = ["{OTHER_KEY}"]\n'.encode()


class TlsRouter:
    def __init__(self, folder: Path, bootstrap: str) -> None:
        self.folder, self.authority = folder, Authority(folder)
        self.cert, self.key, self.tenants = folder / "tls.crt", folder / "tls.key", folder / "tenants.toml"
        self.authority.write(self.cert, self.key, NAME, "127.0.0.1")
        replace(self.tenants, tenants_of(KEY), 0o600)
        self.router = RouterProcess(
            bootstrap, "--workers", "2", "--name", "router", "--tenants", str(self.tenants), "--tls-cert",
            str(self.cert), "--tls-key", str(self.key), "--console", "127.0.0.1:0", "--control", "127.0.0.1:0",
            trust=self.authority.trust,
        )  # fmt: skip

    @cached_property
    def model(self) -> str:
        with self.openai() as client:
            return client.models.list().data[0].id

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = str(self.router.facts["address"]).rpartition(":")
        return host, int(port)

    @contextlib.contextmanager
    def openai(self, key: str = KEY) -> Iterator[openai.OpenAI]:
        http = httpx.Client(verify=client_context(self.authority.file), trust_env=False)
        with openai.OpenAI(base_url=f"{self.router.url}/v1", api_key=key, http_client=http, max_retries=0) as client:
            yield client

    def asks(self, client: openai.OpenAI, max_tokens: int = 8) -> openai.Stream[openai.types.Completion]:
        return client.completions.create(
            model=self.model,
            prompt=list(range(10, 40)),
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )

    def pdctl(self, *arguments: str, ca: Path | None = None) -> subprocess.CompletedProcess[str]:
        trusted = [] if ca is None else ["--ca", str(ca), "--tls-name", NAME]
        argv = [sys.executable, "-m", "pdcluster_router.pdctl", *arguments, "--admin", self.router.facts["admin"]]
        return subprocess.run([*argv, *trusted], capture_output=True, text=True, timeout=120, check=False)

    def num_open(self) -> int:
        return len(self.router.admin.ListRequests(pb.ListRequestsRequest(), timeout=60).requests)

    def sum_of(self, name: str, part: str = "") -> float:
        return sum(value for found, value in self.router.metrics().items() if found.startswith(name) and part in found)

    def raw(self) -> ssl.SSLSocket:
        plain = socket.create_connection(self.address, timeout=60.0)
        return client_context(self.authority.file).wrap_socket(plain, server_hostname=NAME)


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRouter]:
    with fake_cluster(["prefill", "decode", "mixed"], SPEED) as (bootstrap, _):
        found = TlsRouter(tmp_path_factory.mktemp("edges"), bootstrap)
        try:
            until(
                lambda: all(len(view) == 3 for view in found.router.views().values()) and len(found.router.views()) == 2
            )
            yield found
        finally:
            assert found.router.stop() == 0


def test_clients_speak_tls(edges: TlsRouter) -> None:
    assert edges.router.facts["tls"] is True
    with edges.openai() as client:
        for _ in range(8):  # both workers
            assert [chunk.choices[0].finish_reason for chunk in edges.asks(client) if chunk.choices][-1] == "length"
    for name in (NAME, None):
        with api.Client(edges.router.grpc, KEY, ca=edges.authority.file, tls_name=name) as typed:
            assert typed.complete([10, 11, 12], max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    told = subprocess.run(
        ["curl", "-sS", "--cacert", edges.authority.file, "-H", f"authorization: Bearer {KEY}", "--tls-max", "1.2",
         f"{edges.router.url}/v1/models", f"{edges.router.url}/health"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.returncode == 0 and '"object":"list"' in told.stdout, told.stderr


def test_pdctl_speaks_tls_and_says_what_is_wrong(edges: TlsRouter, tmp_path: Path) -> None:
    told = edges.pdctl("status", ca=edges.authority.file)
    assert told.returncode == 0 and "nothing is wrong" in told.stdout, told.stdout + told.stderr
    told = edges.pdctl("status", ca=edges.cert)  # the certificate itself may be what is trusted
    assert told.returncode == 0, told.stderr
    told = edges.pdctl("status")
    assert told.returncode == 4 and "--ca FILE where it speaks TLS" in told.stderr
    told = edges.pdctl("status", ca=Authority(tmp_path, "stranger").file)
    assert told.returncode == 4 and "that --ca did not sign" in told.stderr and "Handshake" not in told.stderr


def test_the_console_speaks_tls_to_both_sides(edges: TlsRouter) -> None:
    with httpx.Client(verify=client_context(edges.authority.file), trust_env=False, timeout=60.0) as client:
        url = f"https://{edges.router.facts['console']}"
        until(lambda: client.get(f"{url}/api/node/n0").status_code == 200)
        body = {"model": edges.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        told = client.post(f"{url}/api/chat", json=body, headers={"x-api-key": KEY})
        assert told.status_code == 200 and "data: [DONE]" in told.text, told.text


def test_calls_of_trainers_speak_tls(edges: TlsRouter) -> None:
    address = edges.router.facts["control"]
    with httpx.Client(verify=client_context(edges.authority.file), trust_env=False, timeout=60.0) as client:
        assert client.post(f"https://{address}/pause").json() == {"status": "paused", "requests": 0}
        assert client.get(f"https://{address}/is_paused").json() == {"is_paused": True}
        assert client.post(f"https://{address}/resume").json()["was_paused"]
        with pytest.raises(httpx.RemoteProtocolError):
            client.get(f"http://{address}/is_paused")


@pytest.mark.parametrize("way", ["said", "cut"])
def test_a_client_that_leaves_a_stream_frees_its_place(edges: TlsRouter, way: str) -> None:
    prompt = list(range(10, 40))
    asked = json.dumps({"model": edges.model, "prompt": prompt, "max_tokens": LONG, "stream": True, "ignore_eos": True})
    connection = edges.raw()
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(asked)}\r\n\r\n{asked}".encode()
    )
    until(lambda: b"data: " in connection.recv(65536))
    assert edges.num_open() == 1
    if way == "said":
        with contextlib.suppress(OSError):
            connection.settimeout(0.1)
            connection.unwrap()  # its goodbye; the socket stays
        until(lambda: edges.num_open() == 0)
        connection.close()
    else:
        socket.socket.close(connection)
        until(lambda: edges.num_open() == 0)


def test_a_call_that_is_left_frees_its_place(edges: TlsRouter) -> None:
    with api.Client(edges.router.grpc, KEY, ca=edges.authority.file) as client:
        outputs = client.generate([10, 11, 12], max_tokens=LONG, ignore_eos=True)
        next(outputs)
        assert edges.num_open() == 1
        outputs.close()
        until(lambda: edges.num_open() == 0)


def test_strangers_that_begin_handshakes_do_not_keep_others_out(edges: TlsRouter) -> None:
    grpc_host, _, grpc_port = edges.router.grpc.rpartition(":")
    strangers = []
    try:
        for _ in range(700):
            strangers.append(socket.create_connection(edges.address, timeout=60.0))
            strangers.append(socket.create_connection((grpc_host, int(grpc_port)), timeout=60.0))
        with edges.openai() as client:
            assert len(list(edges.asks(client))) > 1
        with api.Client(edges.router.grpc, KEY, ca=edges.authority.file) as typed:
            assert typed.complete([10, 11], max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        assert edges.sum_of("pdcluster_tls_handshakes_total", "displaced") > 0
        # All of them are cut once their time is over.
        for stranger in strangers:
            stranger.settimeout(60.0)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    finally:
        for stranger in strangers:
            stranger.close()


def test_keys_change_under_way(edges: TlsRouter) -> None:
    """Each worker reads the file again. What runs goes on, a key that is gone fails."""
    with edges.openai() as client, edges.openai(OTHER_KEY) as other:
        running = edges.asks(client, LONG)
        next(running)
        replace(edges.tenants, tenants_of(NEXT_KEY), 0o600)
        until(lambda: edges.sum_of("pdcluster_file_reloads_total", 'file="tenants",outcome="used"') == 2)
        next(running)
        assert edges.num_open() == 1
        for _ in range(8):
            with pytest.raises(openai.AuthenticationError):
                client.completions.create(model="any", prompt="hi")
            assert len(list(edges.asks(other))) > 1
        running.close()
    with api.Client(edges.router.grpc, KEY, ca=edges.authority.file) as typed, pytest.raises(Unauthorized):
        typed.models()
    with edges.openai(NEXT_KEY) as client:
        assert len(list(edges.asks(client))) > 1
        replace(edges.tenants, b"[acme\n", 0o600)
        until(lambda: edges.sum_of("pdcluster_file_refused", 'file="tenants"') == 2)
        for _ in range(8):
            assert len(list(edges.asks(client))) > 1
    told = edges.pdctl("status", ca=edges.authority.file)
    assert "files of tenants changed" in told.stdout, told.stdout
    told = edges.pdctl("events", ca=edges.authority.file)
    assert "files-refused" in told.stdout and "sk-" not in told.stdout
    replace(edges.tenants, tenants_of(KEY), 0o600)
    until(lambda: edges.sum_of("pdcluster_file_refused", 'file="tenants"') == 0)


def shown(address: tuple[str, int]) -> str:
    """PEM of the certificate that a listener shows, without judging it."""
    return ssl.get_server_certificate(address, timeout=60.0)


def test_the_certificate_changes_under_way(edges: TlsRouter, tmp_path: Path) -> None:
    """As Kubernetes swaps it; a key of another certificate changes nothing."""
    listeners = [
        (host, int(port))
        for host, _, port in (
            str(edges.router.facts[name]).rpartition(":") for name in ("address", "grpc", "admin", "console")
        )
    ]
    first = edges.cert.read_text()
    held = edges.raw()
    spoilt = tmp_path / "spoilt.crt"
    edges.authority.write(spoilt, edges.key, NAME)
    until(lambda: edges.sum_of("pdcluster_file_refused", 'file="tls"') == 2)
    assert {shown(each) for each in listeners} == {first}
    told = edges.pdctl("status", ca=edges.authority.file)
    assert "files of tls changed" in told.stdout, told.stdout
    edges.authority.write(edges.cert, edges.key, NAME, "127.0.0.1")
    second = edges.cert.read_text()
    until(lambda: all({shown(each) for _ in range(6)} == {second} for each in listeners))
    until(lambda: edges.sum_of("pdcluster_file_refused", 'file="tls"') == 0)
    held.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert held.recv(65536).startswith(b"HTTP/1.1 200 OK")
    held.close()
    test_clients_speak_tls(edges)
    test_pdctl_speaks_tls_and_says_what_is_wrong(edges, tmp_path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("half", "router.tls_key is not set"),
        ("open", "chmod o-rw"),
        ("other", "is not the key of"),
        ("gone", "tls.key cannot be read"),
    ],
)
def test_a_router_does_not_start_with_what_it_cannot_show(tmp_path: Path, spoil: str, words: str) -> None:
    authority, cert, key = Authority(tmp_path), tmp_path / "tls.crt", tmp_path / "tls.key"
    authority.write(cert, key)
    if spoil == "open":
        key.chmod(0o644)
    elif spoil == "other":
        authority.write(tmp_path / "other.crt", key)
    elif spoil == "gone":
        os.unlink(key)
    pair = ["--tls-cert", str(cert), *([] if spoil == "half" else ["--tls-key", str(key)])]
    argv = [sys.executable, "-m", "pdcluster_router.cli", "--http", "127.0.0.1:0", *pair]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 2 and words in told.stderr, told.stderr


def test_up_passes_the_pair_on_and_prints_https(tmp_path: Path) -> None:
    """Its certificate is for another name than the address that `up` asks."""
    authority, cert, key = Authority(tmp_path), tmp_path / "tls.crt", tmp_path / "tls.key"
    authority.write(cert, key)
    argv = [sys.executable, "-m", "pdcluster.cli", "up", "--prefill", "0", "--decode", "0", "--mixed", "1"]
    argv += ["--http", "127.0.0.1:0", "--grpc", "none", "--tls-cert", str(cert), "--tls-key", str(key)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "PDCTL_ADMIN" in line:
                break
        told = "".join(lines)
        assert ": https://127.0.0.1:" in told and "console https://" in told, told
        assert f"PDCTL_CA={cert} PDCTL_TLS_NAME={NAME}" in told
        variables = dict(word.split("=", 1) for word in lines[-1].split() if word.startswith("PDCTL_"))
        trust = TlsTrust(Path(variables["PDCTL_CA"]), variables["PDCTL_TLS_NAME"])
        status = subprocess.run(
            [sys.executable, "-m", "pdcluster_router.pdctl", "status"],
            env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert status.returncode == 0 and trust.name == NAME, status.stderr
    finally:
        process.terminate()
        process.wait(120)
        process.stdout.close()


def test_the_demo_speaks_tls(tmp_path: Path) -> None:
    authority, cert, key = Authority(tmp_path), tmp_path / "tls.crt", tmp_path / "tls.key"
    authority.write(cert, key)
    argv = [sys.executable, "-m", "pdcluster.cli", "demo", "--prefill", "0", "--decode", "0", "--mixed", "1"]
    argv += ["--tls-cert", str(cert), "--tls-key", str(key)]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert told.returncode == 0 and ": https://127.0.0.1:" in told.stdout, told.stdout + told.stderr
