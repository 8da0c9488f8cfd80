"""Runs containers as processes, each pod with a network and files of its own: python pod_network.py < PODS.json

It stands for a kubelet, and is started by NAMESPACED: as root of namespaces of its own. Prints one line of JSON: what
was answered, how each pod ended, and what it said.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TypedDict

NAMESPACED = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")  # fmt: skip
READY_S, ANSWER_S, END_S = 150.0, 60.0, 60.0
# Waits until the network is there. Then it makes a root of its own: the machine's folders, and over them the pod's files.
POD = """
set -e
echo made; read -r _
ip link set lo up
ip addr add "$ADDRESS" dev eth0 nodad 2>/dev/null || ip addr add "$ADDRESS" dev eth0
ip link set eth0 up
mount -t tmpfs tmpfs "$ROOT"
for entry in /*; do
    if [ -L "$entry" ]; then cp -P "$entry" "$ROOT$entry"
    elif [ -d "$entry" ] && [ "$entry" != /etc ]; then mkdir -p "$ROOT$entry"; mount --rbind "$entry" "$ROOT$entry"; fi
done
mkdir -p "$ROOT/machine/etc" && mount --rbind /etc "$ROOT/machine/etc"
cp -a "$FILES/." "$ROOT/"
for entry in /etc/*; do [ -e "$ROOT$entry" ] || ln -s "/machine$entry" "$ROOT$entry"; done
mount --bind "$ROOT/meminfo" "$ROOT/proc/meminfo"
for place in $MOUNTS; do mkdir -p "$ROOT${place%%=*}"; mount --bind "${place#*=}" "$ROOT${place%%=*}"; done
exec chroot "$ROOT" "$@"
"""


class Pod(TypedDict):
    """hosts: names by which others reach it. files: content by absolute path. mounts: folders of this machine by absolute path.
    memory: bytes that it has. health: port of its probes, and the path that says it serves."""

    name: str
    address: str
    hosts: list[str]
    argv: list[str]
    env: dict[str, str]
    files: dict[str, str]
    mounts: dict[str, str]
    memory: int
    health: tuple[int, str]


class Request(TypedDict):
    address: str
    port: int
    path: str
    headers: dict[str, str]
    body: Any


class Started:
    def __init__(self, pod: Pod, index: int, hosts: str, width: int, folder: Path) -> None:
        self.pod = pod
        self.log = (folder / f"{pod['name']}.log").open("w+b")
        files = folder / pod["name"]
        kib = pod["memory"] // 1024
        memory = f"MemTotal: {kib} kB\nMemFree: {kib} kB\nMemAvailable: {kib} kB\n"
        for path, content in {**pod["files"], "/etc/hosts": hosts, "/meminfo": memory}.items():
            place = files / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(content)
        root = folder / f"root-{pod['name']}"
        root.mkdir()
        own = {
            "ADDRESS": f"{pod['address']}/{width}", "ROOT": str(root), "FILES": str(files),
            "MOUNTS": " ".join(f"{place}={source}" for place, source in pod["mounts"].items()),
        }  # fmt: skip
        self.process = subprocess.Popen(
            ("unshare", "--net", "--mount", "sh", "-c", POD, "pod", *pod["argv"]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env={**os.environ, **own, **pod["env"]},
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        assert self.process.stdout.readline() == b"made\n", self.said()
        link = f"pod{index}"
        run(f"ip link add {link} type veth peer name eth0 netns {self.process.pid}")
        run(f"ip link set {link} master pods up")
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-3000:]

    def wait_ready(self) -> None:
        port, path = self.pod["health"]
        deadline = time.monotonic() + READY_S
        while get(self.pod["address"], port, path)[0] != 200:
            assert self.process.poll() is None, (
                f"{self.pod['name']} ended with {self.process.returncode}: {self.said()}"
            )
            assert time.monotonic() < deadline, f"{self.pod['name']} is not ready: {self.said()}"
            time.sleep(0.1)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


def get(host: str, port: int, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """(status, body); status 0 while nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, sent, headers or {})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def main() -> None:
    given = json.load(sys.stdin)
    pods: list[Pod] = given["pods"]
    requests: list[Request] = given["requests"]
    is_new = ":" in pods[0]["address"]
    width = 64 if is_new else 24
    gateway = "fd00:7::1" if is_new else "10.7.0.1"
    run("ip link set lo up")
    run("ip link add pods type bridge")
    run(f"ip addr add {gateway}/{width} dev pods" + (" nodad" if is_new else ""))
    run("ip link set pods up")
    lines = [f"{pod['address']} {' '.join(pod['hosts'])}" for pod in pods if pod["hosts"]]
    hosts = "\n".join(("127.0.0.1 localhost", "::1 localhost", *lines, ""))
    with tempfile.TemporaryDirectory() as folder:
        started: list[Started] = []
        try:
            for index, pod in enumerate(pods):
                started.append(Started(pod, index, hosts, width, Path(folder)))
            for each in started:
                each.wait_ready()
            answers = [
                get(each["address"], each["port"], each["path"], each["body"], each["headers"]) for each in requests
            ]
        finally:
            codes = {each.pod["name"]: each.end() for each in reversed(started)}
        print(
            json.dumps(
                {"answers": answers, "codes": codes, "said": {each.pod["name"]: each.said() for each in started}}
            )
        )


if __name__ == "__main__":
    main()
