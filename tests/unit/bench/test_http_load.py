"""The load client counts what was answered, and tells what was not."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.harness.http_load import Ask, load

ASK = Ask("/v1/completions", b"{}")
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Server(socketserver.ThreadingTCPServer):
    """Gives each connection so many answers, then closes it."""

    daemon_threads = True
    answers: tuple[bytes, ...] = ()


class Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        for answer in self.server.answers:
            received = b""
            while not received.endswith(b"\r\n\r\n" + ASK.body):
                if not (piece := self.request.recv(4096)):
                    return
                received += piece
            self.request.sendall(answer)


@contextmanager
def serving(answers: list[bytes]) -> Iterator[str]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.answers = tuple(answers)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def test_all_that_is_answered_is_counted():
    with serving([ANSWER] * 1_000_000) as address:
        outcome = load(address, ASK, connections=2, seconds=0.1)
    assert outcome.num_failed == 0 and len(outcome.latencies) > 2 and outcome.requests_s > 0


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([ANSWER] * 3, b"closed"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}"], b"closed"),
        ([b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"], b"503"),
    ],
    ids=["closes behind an answer", "closes within an answer", "refuses"],
)
def test_a_server_that_closes_or_refuses_has_failed(answers, words):
    with serving(answers) as address:
        outcome = load(address, ASK, connections=2, seconds=0.2)
    assert outcome.num_failed == 2 and words in outcome.failure
