"""More clients than a router may open files: each gets an answer, and links, Admin and those who were first go on."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from fake_cluster import RouterProcess, fake_cluster, until

from bench.fakes.fake_node import Speed
from pdcluster.rpc import admin_pb2 as pb

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

ASKS = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
BODY = b'{"model": "fake", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": true}'
COMPLETES = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
OK, FULL = b"HTTP/1.1 200 OK", b"HTTP/1.1 503 Service Unavailable"
# A limit of open files, and how many clients come. Of a quarter of the files, which are kept, none goes to clients.
CROWDS = {64: 100, 256: 320}


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with fake_cluster(["prefill", "decode"], Speed(prefill_s=0.0005, token_s=0.002)) as (address, _):
        yield address


def answer_to(client: socket.socket, request: bytes) -> bytes:
    """Its first line; b"" for none."""
    with contextlib.suppress(OSError):  # a refused client may be told before it asks
        client.sendall(request)
    with contextlib.suppress(OSError):
        return client.recv(65536).partition(b"\r\n")[0]
    return b""


@pytest.mark.parametrize("limit", CROWDS)
def test_every_client_gets_an_answer(bootstrap: str, limit: int) -> None:
    router = RouterProcess(bootstrap, open_files=limit)
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    try:
        for _ in range(2):  # again when all have left
            until(lambda: httpx.get(f"{router.url}/ready", trust_env=False, timeout=60.0).status_code == 200)
            with contextlib.ExitStack() as stack:
                crowd = [
                    stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
                    for _ in range(CROWDS[limit])
                ]
                told = [answer_to(client, ASKS) for client in crowd]
                assert Counter(told).keys() == {OK, FULL}, Counter(told)
                assert told[0] == OK and 4 <= told.count(OK) <= limit * 3 // 4
                assert answer_to(crowd[0], COMPLETES) == OK, "by nodes, over links that still are"
                assert len(router.admin.ListNodes(pb.ListNodesRequest(), timeout=60).nodes) == 2
    finally:
        assert router.stop() == 0
