"""pdctl status says what a router's settings leave open, and is no failure for it."""

from __future__ import annotations

import asyncio
import json

from scripted_admin import ScriptedAdmin, admin_node, administered
from typer.testing import CliRunner

from pdcluster_router import pdctl

OPEN = "router.http 0.0.0.0:8000 can be reached from other machines without an API key"


async def test_status_shows_the_warnings_of_each_router() -> None:
    async with administered(ScriptedAdmin([admin_node("n", "mixed")]), warnings=(OPEN,)) as address:
        shown, data = [
            await asyncio.to_thread(CliRunner().invoke, pdctl.app, ["status", "--admin", address, *more])
            for more in ((), ("-o", "json"))
        ]
    assert shown.exit_code == data.exit_code == 0
    assert f"warning: router r0: {OPEN}" in " ".join(shown.stdout.split())
    assert "nothing is wrong" in shown.stdout
    assert json.loads(data.stdout)["routers"][0]["warnings"] == [OPEN]
