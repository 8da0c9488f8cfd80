"""A server that plays the Hugging Face hub for one repository: what it has, who may read it, and downloads that break
off."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1.0", COMMIT)
NAME = "org/tiny"


@dataclass
class FakeHub:
    """token: who may read it, None for everyone; is_gated: whether its terms were not accepted; cuts: how many
    downloads of a file break off."""

    files: dict[str, bytes]
    token: str | None = None
    is_gated: bool = False
    cuts: Counter[str] = field(default_factory=Counter)
    # Whole or partial bodies that were asked for, by name.
    fetched: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    tokens: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """Its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Tests look at what the hub noted."""

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        given = self.headers.get("authorization", "")
        if given:
            self.hub.tokens.add(given.removeprefix("Bearer "))
        if self.hub.token is not None and given != f"Bearer {self.hub.token}":
            self._refuse(401, "RepoNotFound", "Invalid username or password.", has_body)
        elif self.hub.is_gated:
            self._refuse(403, "GatedRepo", "Access to model org/tiny is restricted.", has_body)
        elif found := re.fullmatch(rf"/api/models/{NAME}/(?:revision|tree)/(.+)", path):
            self._describe(found[1], "/tree/" in path)
        elif path == f"/api/models/{NAME}":
            self._describe("main", False)
        elif found := re.fullmatch(rf"/{NAME}/resolve/([^/]+)/(.+)", path):
            self._file(found[1], found[2], has_body)
        else:
            self._refuse(404, "RepoNotFound", "Repository not found", has_body)

    def _describe(self, revision: str, is_tree: bool) -> None:
        if revision.split("/")[0] not in REVISIONS:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}", True)
            return
        tree = [
            {
                "type": "file",
                "path": name,
                "rfilename": name,
                "size": len(data),
                "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest(),
            }
            for name, data in sorted(self.hub.files.items())
        ]
        self._json(
            tree
            if is_tree
            else {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": tree, "private": False, "tags": []}
        )

    def _file(self, revision: str, name: str, has_body: bool) -> None:
        data = self.hub.files.get(name)
        if revision not in REVISIONS or data is None:
            kind = "EntryNotFound" if revision in REVISIONS else "RevisionNotFound"
            self._refuse(404, kind, f"{name} at {revision} does not exist", has_body)
            return
        begin = 0
        if has_body:
            begin = int((re.match(r"bytes=(\d+)-", self.headers.get("range", "")) or [0, 0])[1])
            with self.hub.lock:
                self.hub.fetched[name] += 1
                self.hub.resumed[name] += begin > 0
                is_cut = self.hub.cuts[name] > 0
                self.hub.cuts[name] -= is_cut
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if has_body and is_cut:
            self.wfile.write(data[begin : begin + (len(data) - begin) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
        elif has_body:
            self.wfile.write(data[begin:])

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str, has_body: bool) -> None:
        body = json.dumps({"error": message}).encode()
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)
