"""Processes on an address that is not loopback, in a network of its own: python own_network.py WHAT FOLDER

What: keyed, keyless, open: a bootstrap, two nodes, and a router. Prints as JSON what each said at its start and what a
completion went over. up: which sockets of `pdcluster up` listen beyond loopback.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from child_cluster import Processes
from processes import running

from pdcluster.rpc import admin_pb2 as admin
from pdcluster.rpc import admin_pb2_grpc as admin_stubs
from pdcluster.rpc import externalscaler_pb2 as scaler
from pdcluster.rpc import externalscaler_pb2_grpc as scaler_stubs

HERE = "10.1.2.3"
KEY = "0123456789abcdef0123456789abcdef"
READY_S = 60.0
SMALL = ("--set=node.kv.memory_bytes=64MiB", "--set=router.mode=remote")


def flags_of(what: str, folder: Path) -> tuple[str, ...]:
    if what != "keyed":
        return ("--insecure", "links,kv,bootstrap") if what == "open" else ()
    file = folder / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    return ("--security-cluster-key-file", str(file))


async def cluster(what: str, folder: Path) -> dict[str, Any]:
    processes, flags, failed = Processes(folder), flags_of(what, folder), []
    try:
        bootstrap = processes.make("bootstrap", Path.cwd(), "pdcluster.cli", "bootstrap", *flags)
        failed += await refusals(bootstrap.start("--listen", f"{HERE}:0"))
        address = bootstrap.facts.get("address", f"{HERE}:1")
        for role in ("prefill", "decode"):
            node = processes.node(role, address, Path.cwd(), role)
            own = ("--listen", f"{HERE}:0", "--set=node.transfer.backend=tcp", *flags)
            failed += await refusals(node.start(*own))
        if failed:
            return {"failed": failed, "logs": {name: processes.log_of(name) for name in failed}}
        own = (*("--bootstrap", address, "--mode", "remote", "--grpc", "none"), *router_flags(what, folder))
        router = processes.make("router", Path.cwd(), "pdcluster_router.cli", *own)
        doors = ("http", "admin", "console", "control", "scaler")
        await router.start(*(word for name in doors for word in (f"--{name}", f"{HERE}:0")))
        reply = await complete(router.address)
        names = ("bootstrap", "prefill", "decode", "router")
        return {
            "reply": reply, "strangers": await strangers(router.facts),
            "logs": {name: processes.log_of(name) for name in names},
        }  # fmt: skip
    finally:
        processes.kill()


def router_flags(what: str, folder: Path) -> tuple[str, ...]:
    if what == "open":
        return ("--insecure", "admin,console,control,scaler")
    token = folder / "token"
    token.write_text(KEY[::-1] + "\n")
    token.chmod(0o600)
    return (*flags_of(what, folder), "--admin-token-file", str(token), "--scaler-token-file", str(token))


async def strangers(facts: dict[str, str]) -> dict[str, Any]:
    """What each surface of a router answers without a token."""
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        page = await client.get(f"http://{facts['console']}/api/node/decode")
        call = await client.get(f"http://{facts['control']}/is_paused")
    pool = scaler.ScaledObjectRef(name="p", namespace="n", scalerMetadata={"role": "decode"})
    async with grpc.aio.insecure_channel(facts["admin"]) as channel:
        listed = await code_of(admin_stubs.AdminStub(channel).ListNodes(admin.ListNodesRequest(), timeout=20.0))
    async with grpc.aio.insecure_channel(facts["scaler"]) as channel:
        asked = await code_of(scaler_stubs.ExternalScalerStub(channel).IsActive(pool, timeout=20.0))
    return {"console": page.status_code, "control": call.status_code, "admin": listed, "scaler": asked}


async def code_of(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def refusals(start: Any) -> list[str]:
    try:
        await start
    except AssertionError as error:
        name, *_ = str(error).split()
        return [name] if "ended with 2 " in str(error) else [str(error)]
    return []


async def complete(address: str) -> dict[str, Any]:
    body = {"model": "pystdlib-3m", "prompt": "def read(path):" * 40, "max_tokens": 4, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=60.0) as client:
        async with asyncio.timeout(READY_S):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.1)
        foreign = await client.get("/v1/models", headers={"host": "gateway.example"})
        reply = await client.post("/v1/completions", json=body)
        return {
            "status": reply.status_code,
            "mode": reply.headers.get("x-pdcluster-mode"),
            "foreign": foreign.status_code,
        }


def up() -> dict[str, Any]:
    with running("--http", f"{HERE}:0", "--grpc", f"{HERE}:0", "--set=router.console=127.0.0.1:0", *SMALL) as found:
        found.complete("def read(path):" * 40, 4)
        beyond = set()
        for child in (psutil.Process(found.process.pid), *found.children()):
            for each in child.net_connections("inet"):
                host = each.laddr.ip.removeprefix("::ffff:")  # gRPC listens so for IPv4
                if each.status == psutil.CONN_LISTEN and host not in ("127.0.0.1", "::1"):
                    beyond.add(f"{host}:{each.laddr.port}")
        return {
            "beyond": sorted(beyond), "served": sorted([found.url.removeprefix("http://"), found.grpc]),
            "warnings": [line for line in found.lines if "without an API key" in line],
        }  # fmt: skip


if __name__ == "__main__":
    what = sys.argv[1]
    print(json.dumps(up() if what == "up" else asyncio.run(cluster(what, Path(sys.argv[2])))))
