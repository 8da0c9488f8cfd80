"""An HTTP server that plays a router for tests of pdctl batch: a script says what each line gets, try by try."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# (status, headers, body) of a line's try; None: the connection ends without an answer.
Answer = tuple[int, dict[str, str], bytes] | None


def good(name: str, num_try: int) -> Answer:
    return 200, {}, json.dumps({"name": name, "usage": {"completion_tokens": 3}}).encode()


@dataclass
class BatchRouter:
    """answer: for the body's field "name" and the number of its try, from 0."""

    answer: Callable[[str, int], Answer] = good
    pause_s: float = 0.0
    tries: Counter[str] = field(default_factory=Counter)
    heads: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, name: str, path: str, head: dict[str, str]) -> int:
        with self.lock:
            self.paths.append(path)
            self.heads.append(head)
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            self.tries[name] += 1
            return self.tries[name] - 1

    def give_back(self) -> None:
        with self.lock:
            self.num_open -= 1


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


@contextmanager
def serving(router: BatchRouter) -> Iterator[str]:
    """Serve until the end; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            num_try = router.take(body["name"], self.path, dict(self.headers))
            time.sleep(router.pause_s)
            found = router.answer(body["name"], num_try)
            router.give_back()
            if found is None:
                self.close_connection = True
                return
            status, headers, text = found
            self.send_response(status)
            for name, value in {"x-request-id": f"id-{body['name']}", **headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
