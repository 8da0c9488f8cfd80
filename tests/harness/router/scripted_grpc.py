"""The gRPC front door over a real socket, and code made from a .proto."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scripted_dispatcher import ScriptedDispatcher

from pdcluster.telemetry.metrics import RouterMetrics
from pdcluster_router.frontend.grpc import GrpcSettings, Inference, listening
from pdcluster_router.frontend.places import Places
from pdcluster_router.frontend.server import router_metrics


@asynccontextmanager
async def served_grpc(
    dispatcher: ScriptedDispatcher,
    settings: GrpcSettings | None = None,
    max_requests: int = 64,
    metrics: RouterMetrics | None = None,
) -> AsyncIterator[str]:
    chosen = settings or GrpcSettings()
    servicer = Inference(dispatcher, chosen, metrics or router_metrics(), Places(max_requests))
    async with listening(servicer, dispatcher, "127.0.0.1:0", chosen, drain_s=1.0) as address:
        yield address


def protoc(*arguments: str) -> None:
    """The compiler brings libraries that cannot live in one process with NIXL's, so it gets a process of its own."""
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True, timeout=60)
