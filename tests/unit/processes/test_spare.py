"""Spare processes over real ones (fake_spare.py): whoever dies is replaced by the process that was ready for it, and
none is left over."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pdcluster.processes import spare
from pdcluster.processes.spare import MAX_LINE_BYTES, Spare
from pdcluster.processes.supervisor import Spec, Supervisor

FAKE_CHILD = Path(__file__).with_name("fake_child.py")
SPARE = (sys.executable, str(Path(__file__).with_name("fake_spare.py")))


class Stage:
    """A supervisor that keeps a spare; its children's names and what it said."""

    def __init__(self, tmp_path: Path) -> None:
        self.journal = tmp_path / "journal"
        self.said: list[str] = []
        self.output: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            self.said.append, lambda name, line: self.output.append((name, line)), 60.0, 5, 0.01
        )

    def spec(self, name: str, *options: str) -> Spec:
        return Spec(name, (sys.executable, "-I", "-S", str(FAKE_CHILD), name, str(self.journal), *options), 20.0)

    async def kill(self, name: str) -> int:
        """The pid of the process that came for it."""
        pid, told = self.supervisor.pid(name), len(self.said)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await self.until(lambda: any("is back" in line for line in self.said[told:]), f"{name} back")
        found = self.supervisor.pid(name)
        assert found is not None
        return found

    async def spare(self) -> int:
        """The pid of the idle process, waited for."""
        idle: list[int] = []

        def is_there() -> bool:
            idle[:] = [child.pid for child in psutil.Process().children() if SPARE[1] in child.cmdline()]
            return bool(idle)

        await self.until(is_there, "a spare")
        (pid,) = idle
        return pid

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (
                f"never: {what}; the supervisor said {self.said}, its children {self.output}"
            )
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_the_spare_becomes_the_child_that_died_and_another_one_waits(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.supervisor.start(stage.spec("a"))
    await stage.supervisor.start(stage.spec("b", "--say", "b speaks"))
    await stage.supervisor.keep_spare(SPARE)
    first = await stage.spare()
    assert await stage.kill("b") == first
    second = await stage.spare()
    assert await stage.kill("a") == second != first
    third = await stage.spare()
    await stage.supervisor.stop([["a", "b"]])
    assert stage.supervisor.killed == [] and stage.output.count(("b", "b speaks")) == 2
    assert not any(psutil.pid_exists(pid) for pid in (first, second, third))


async def test_without_a_spare_that_lives_a_child_is_started_afresh(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.supervisor.start(stage.spec("a"))
    await stage.supervisor.keep_spare(SPARE)
    dead = await stage.spare()
    os.kill(dead, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(dead)], timeout=20)
    assert await stage.kill("a") != dead
    assert await stage.spare() != dead, "and there is a spare again"
    await stage.supervisor.stop([["a"]])


async def test_a_spare_whose_end_was_not_reported_yet_is_replaced_all_the_same() -> None:
    """The loop hears of an end from a thread, on a busy machine long after it."""
    one = Spare(SPARE)
    await one.prepare()
    dead = one.pid
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    while is_alive(dead):  # without a turn of the loop, so that it does not hear of the end
        time.sleep(0.001)
    assert one.pid == dead and one.take(["a"]) is None
    await one.prepare()
    assert one.pid not in (None, dead)
    await one.close()


async def test_the_pid_of_a_spare_that_died_is_not_killed_for_it_may_be_somebody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(spare, "kill_group", killed.append)
    one = Spare(SPARE)
    await one.prepare()
    dead = one.pid
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    while one.pid is not None:
        await asyncio.sleep(0.01)
    await one.prepare()
    assert killed == [] and one.pid not in (None, dead)
    monkeypatch.undo()
    await one.close()
    assert one.pid is None


async def test_a_spare_that_cannot_be_started_is_told_and_costs_no_child(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.supervisor.start(stage.spec("a"))
    await stage.supervisor.keep_spare(("/no/such/program",))
    assert "there is no spare process" in stage.said[0]
    await stage.kill("a")
    await stage.supervisor.stop([["a"]])


async def test_an_argument_list_that_no_pipe_holds_leaves_the_spare_idle() -> None:
    spare = Spare(SPARE)
    await spare.prepare()
    pid = spare.pid
    assert spare.take(["x" * MAX_LINE_BYTES]) is None
    await spare.prepare()
    assert spare.pid == pid, "one is enough"
    await spare.close()
    assert spare.pid is None and pid is not None and not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("said", "code", "complaint"),
    [(b"", 0, b""), (b'["half', 0, b""), (b"[]\n", 1, b"ProtocolError"), (b"{}\n", 1, b"ProtocolError")],
)
async def test_a_spare_runs_nothing_but_a_whole_argument_list(said: bytes, code: int, complaint: bytes) -> None:
    process = await asyncio.create_subprocess_exec(
        *SPARE, "--ready-fd", "9", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate(said)
    assert process.returncode == code and complaint in errors
