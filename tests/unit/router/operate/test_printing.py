"""What pdctl prints: rows of any width, numbers as numbers, any encoding; and kubectl's habits."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console
from scripted_admin import ScriptedAdmin, admin_node, administered
from typer.testing import CliRunner, Result

from pdcluster.core.messages import Load
from pdcluster_router import pdctl
from pdcluster_router.admin.operations import RequestStatus
from pdcluster_router.operate import printing
from pdcluster_router.operate.printing import PrintedColumn, PrintFormat

LOAD = Load(0, 3, 0, 0, 200, 120, 30, 0, 0, 8, 3)
REQUEST = RequestStatus("r1-0", "bundled", "decode", "remote", "p0", "d0", 100, 7, 1, 2.25)
COLUMNS = (
    PrintedColumn("NAME", "name"), PrintedColumn("WHERE", "where"), PrintedColumn("TOKENS", "tokens", is_number=True),
)  # fmt: skip


def admin() -> ScriptedAdmin:
    nodes = [admin_node("p0", "prefill", load=LOAD), admin_node("d0", "decode", load=LOAD), admin_node("d1", "decode")]
    return ScriptedAdmin(nodes, [REQUEST])


async def run(*words: str) -> Result:
    async with administered(admin()) as address:
        return await asyncio.to_thread(CliRunner().invoke, pdctl.app, [*words, "--admin", address])


async def test_numbers_are_numbers_in_json_and_yaml() -> None:
    rows = {row["name"]: row for row in json.loads((await run("get", "nodes", "-o", "json")).stdout)}
    assert (rows["p0"]["slots"], rows["p0"]["slots_used"], rows["p0"]["kv_used"]) == (8, 3, 0.25)
    assert rows["d1"]["kv_used"] is None
    (request,) = json.loads((await run("get", "requests", "-o", "json")).stdout)
    assert request["age_s"] == 2.25 and request["output_tokens"] == 7 and "age" not in request
    shown = (await run("get", "nodes")).stdout
    assert "3/8" in shown and "25 %" in shown and "2.2 s" in (await run("get", "requests")).stdout


async def test_kubectls_habits() -> None:
    assert (await run("get", "node", "-o", "name")).stdout.split() == ["d0", "d1", "p0"]
    assert (await run("get", "nodes", "d1", "p0", "-o", "name")).stdout.split() == ["d1", "p0"]
    assert (await run("get", "nodes", "-l", "role=decode", "-o", "name")).stdout.split() == ["d0", "d1"]
    assert (await run("get", "nodes", "-l", "role=decode,name=d1", "-o", "name")).stdout.split() == ["d1"]
    assert (await run("get", "request", "r1-0", "-o", "name")).stdout.split() == ["r1-0"]
    unknown = await run("get", "nodes", "d7")
    assert unknown.exit_code == 1 and "d7" in unknown.stderr and "d0, d1, p0" in unknown.stderr
    for wrong in ("rolle=decode", "role"):
        told = await run("get", "nodes", "-l", wrong)
        assert told.exit_code == 2 and wrong.partition("=")[0] in told.stderr
    told = await run("describe", "nodes", "d0", "p0")
    assert told.exit_code == 0 and "d0" in told.stdout and "p0" in told.stdout
    told = await run("drain", "d0", "p0", "--timeout", "30s")
    assert told.exit_code == 0 and told.stdout.count("is empty") == 2
    assert (await run("describe", "request", "nobody")).exit_code == 1


def test_a_narrow_terminal_cuts_texts_and_never_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(printing, "console", lambda: Console(file=sys.stdout, width=80, highlight=False))
    rows = [{"name": "n" * 60, "where": "w" * 60, "tokens": 1234567}, {"name": "m", "where": "", "tokens": 2}]
    printing.show(rows, COLUMNS, PrintFormat.TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(len(line) <= 80 for line in lines), "one line for each row"
    assert lines[1].endswith("1234567") and lines[1].count("…") == 2
    printing.show(rows, COLUMNS, PrintFormat.WIDE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "n" * 60 in lines[1] and "w" * 60 in lines[1], "wide: the terminal wraps or scrolls"


def test_an_output_that_lacks_characters_ends_no_command() -> None:
    program = (
        "from pdcluster_router.operate import printing\n"
        "printing.print_any_text()\n"
        "print('→ 你好')\n"
        "printing.console().print('… –', markup=False)\n"
    )
    for encoding in ("latin-1", "ascii"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60.0)
        assert done.returncode == 0 and b"?" in done.stdout, done.stderr.decode()


def test_a_stream_that_is_no_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    printing.print_any_text()


async def test_shells_complete_policies_roles_and_requests() -> None:
    async with administered(admin()) as address:

        def completed(line: str) -> set[str]:
            environment = {
                **os.environ, "PDCTL_ADMIN": address, "_PDCTL_COMPLETE": "complete_bash", "COMP_WORDS": line,
                "COMP_CWORD": str(len(line.split(" ")) - 1), "PYTHONPATH": os.pathsep.join(sys.path),
            }  # fmt: skip
            argv = [sys.executable, "-m", "pdcluster_router.pdctl"]
            done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60.0)
            return set(done.stdout.split())

        lines = {
            "pdctl set policy --live ": {"seconds", "kv-cost"},
            "pdctl set-role d0 ": {"prefill", "decode", "mixed"},
            "pdctl get requests ": {"r1-0"},
        }
        found = await asyncio.gather(*(asyncio.to_thread(completed, line) for line in lines))
        assert dict(zip(lines, found, strict=True)) == lines
