"""The supervisor over real processes (fake_child.py): readiness, restarts, order of stopping, and nothing that stays
behind."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pdcluster.core.errors import ProtocolError
from pdcluster.processes.child_process import describe
from pdcluster.processes.supervisor import CRASH_WINDOW_S, LONGEST_DELAY_S, RestartPolicy, Spec, StartFailed, Supervisor

FAKE = Path(__file__).with_name("fake_child.py")


class Stage:
    """A supervisor, what it said and forwarded, and the journal that its children write."""

    def __init__(self, tmp_path: Path, ready_s: float = 20.0, restarts: int = 5) -> None:
        self.journal_file = tmp_path / "journal"
        self.said: list[str] = []
        self.output: list[tuple[str, str]] = []
        self.supervisor = Supervisor(
            self.said.append, lambda name, line: self.output.append((name, line)), ready_s, restarts
        )

    def spec(
        self, name: str, *options: str, drain_s: float = 20.0, address_flags: tuple[tuple[str, str], ...] = ()
    ) -> Spec:
        return Spec(
            name,
            (sys.executable, "-I", "-S", str(FAKE), name, str(self.journal_file), *options),
            drain_s,
            address_flags,
        )

    def journal(self) -> list[str]:
        return self.journal_file.read_text().splitlines()

    async def until(self, what: str) -> None:
        """Wait until something that was said contains `what`."""
        while not any(what in line for line in self.said):
            await asyncio.sleep(0.01)

    def pids(self) -> list[int]:
        return [int(line.split()[2]) for line in self.journal() if line.split()[1] in ("started", "grandchild")]

    def living(self) -> list[int]:
        return [
            pid
            for pid in self.pids()
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]


async def test_start_returns_what_the_child_announced(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    facts = await stage.supervisor.start(stage.spec("a", "--address", "127.0.0.1:77"))
    assert facts["address"] == "127.0.0.1:77"
    assert facts["pid"] == stage.supervisor.pid("a")
    await stage.supervisor.stop([["a"]])
    assert stage.supervisor.pid("a") is None


async def test_a_child_that_ends_before_it_is_ready_is_reported_with_its_output(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with pytest.raises(StartFailed, match="a ended before it was ready") as caught:
        await stage.supervisor.start(stage.spec("a", "--exit-first", "3", "--say", "no such model"))
    assert "exit code 3" in str(caught.value)
    assert "no such model" in str(caught.value)


async def test_a_child_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ready_s=0.5)
    with pytest.raises(StartFailed, match=r"a was not ready within 0\.5 s"):
        await stage.supervisor.start(stage.spec("a", "--never-ready"))
    assert stage.living() == []


async def test_a_child_that_announces_nonsense_is_a_protocol_error_and_can_still_be_stopped(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with pytest.raises(ProtocolError, match="babble"):
        await stage.supervisor.start(stage.spec("a", "--babble"))
    await stage.supervisor.stop([["a"]])
    assert stage.living() == []


async def test_a_program_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with pytest.raises(StartFailed, match="a could not be started"):
        await stage.supervisor.start(Spec("a", ("/no/such/program",), 1.0))
    await stage.supervisor.stop([["a"]])


async def test_a_crashed_child_is_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.supervisor.start(stage.spec("a", "--crash-times", "2"))
    while sum("a is back" in line for line in stage.said) < 2:
        await asyncio.sleep(0.01)
    assert sum("a crashed (exit code 7)" in line for line in stage.said) == 2
    await stage.supervisor.stop([["a"]])
    assert len(stage.pids()) == 3


async def test_a_killed_child_is_started_again_and_keeps_its_address(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    facts = await stage.supervisor.start(
        stage.spec("a", "--address", "127.0.0.1:55", address_flags=(("address", "--address"),))
    )
    os.kill(int(str(facts["pid"])), signal.SIGKILL)
    await stage.until("a is back")
    assert any("a crashed (killed by SIGKILL)" in line for line in stage.said)
    assert stage.supervisor.facts("a")["pid"] == stage.supervisor.pid("a"), "of the present process"
    await stage.supervisor.stop([["a"]])
    assert [line.split()[3] for line in stage.journal() if " started " in line] == ["127.0.0.1:55"] * 2


async def test_a_child_that_crashes_too_often_is_given_up(tmp_path: Path) -> None:
    stage = Stage(tmp_path, restarts=1)
    await stage.supervisor.start(stage.spec("a", "--crash-times", "99"))
    failure = await stage.supervisor.failed()
    assert "a is given up: it ended more than 1 times" in str(failure)
    await stage.supervisor.stop([["a"]])
    assert len(stage.pids()) == 2


async def test_a_child_that_ends_well_by_itself_is_started_again(tmp_path: Path) -> None:
    """Somebody sent it a SIGTERM. It is missed all the same."""
    stage = Stage(tmp_path, restarts=1)
    await stage.supervisor.start(stage.spec("a", "--leave"))
    await stage.until("a ended by itself")
    await stage.until("a is back")
    assert "a" in str(await stage.supervisor.failed()), "and given up when it never stays"
    await stage.supervisor.stop([["a"]])
    assert len(stage.pids()) == 2


@pytest.mark.parametrize("number", [signal.SIGRTMIN, signal.SIGRTMIN + 1, signal.SIGKILL])
async def test_a_child_that_any_signal_ended_is_started_again(tmp_path: Path, number: int) -> None:
    stage = Stage(tmp_path)
    facts = await stage.supervisor.start(stage.spec("a"))
    os.kill(int(str(facts["pid"])), number)
    await stage.until("a is back")
    await stage.supervisor.stop([["a"]])


async def test_a_child_whose_keeper_fails_is_given_up_and_not_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def say(line: str) -> None:
        raise RuntimeError("nobody hears")

    stage = Stage(tmp_path)
    supervisor = Supervisor(say, lambda name, line: None, 20.0, 5)
    facts = await supervisor.start(stage.spec("a"))
    os.kill(int(str(facts["pid"])), signal.SIGKILL)
    assert "nobody hears" in await asyncio.wait_for(supervisor.failed(), 20.0)
    assert "keep a" in caplog.text
    await supervisor.stop([["a"]])


async def test_groups_are_stopped_one_after_the_other(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    for name in ("bootstrap", "node-1", "node-2", "router"):
        await stage.supervisor.start(stage.spec(name))
    await stage.supervisor.stop([["router"], ["node-1", "node-2"], ["bootstrap"]])
    ended = [line.split()[0] for line in stage.journal() if line.endswith("terminated")]
    assert (ended[0], set(ended[1:3]), ended[3]) == ("router", {"node-1", "node-2"}, "bootstrap")
    assert stage.supervisor.killed == []
    assert stage.living() == []


async def test_a_child_that_ignores_sigterm_is_killed_after_its_drain_time(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.supervisor.start(stage.spec("a", "--stubborn", drain_s=0.3))
    await stage.supervisor.stop([["a"]])
    assert stage.supervisor.killed == ["a"]
    assert any("a did not stop within 0.3 s" in line for line in stage.said)
    assert stage.living() == []


async def test_hurry_ends_a_drain_that_is_under_way(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.supervisor.start(stage.spec("a", "--stubborn", drain_s=1e6))
    stopping = asyncio.create_task(stage.supervisor.stop([["a"]]))
    await asyncio.sleep(0.05)
    assert not stopping.done()
    stage.supervisor.hurry()
    await stopping
    assert stage.living() == []


async def test_what_a_child_leaves_in_its_process_group_is_gone_after_stop(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.supervisor.start(stage.spec("a", "--grandchild"))
    assert len(stage.living()) == 2
    await stage.supervisor.stop([["a"]])
    while stage.living():  # init reaps the grandchild, not we
        await asyncio.sleep(0.01)


async def test_stop_during_a_restart_leaves_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.supervisor.start(stage.spec("a", "--crash-times", "99"))
    await stage.until("a crashed")
    await stage.supervisor.stop([["a"]])
    assert stage.living() == []


async def test_a_cancelled_start_leaves_nothing_after_stop(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    starting = asyncio.create_task(stage.supervisor.start(stage.spec("a", "--never-ready")))
    while not stage.output:
        await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await stage.supervisor.stop([["a"]])
    assert stage.living() == []


async def test_output_is_forwarded_line_by_line_with_the_childs_name(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.supervisor.start(stage.spec("a", "--say", "one\ntwo"))
    await stage.supervisor.stop([["a"]])
    assert stage.output == [("a", "one"), ("a", "two")]


async def test_a_line_that_is_too_long_is_dropped_and_the_next_ones_are_not(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    long = "import sys; print('x' * (1 << 21)); print('after', flush=True)"
    with pytest.raises(StartFailed):
        await stage.supervisor.start(Spec("a", (sys.executable, "-I", "-S", "-c", long), 1.0))
    lines = [line for _, line in stage.output]
    assert lines[-1] == "after"
    assert any("more than 1 MiB was dropped" in line for line in lines)


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    parent = f"""
import asyncio, sys
from pdcluster.processes.supervisor import Spec, Supervisor
async def main():
    supervisor = Supervisor(print, lambda name, line: None, 20.0, 5)
    await supervisor.start(Spec("a", (sys.executable, "-I", "-S", {str(FAKE)!r}, "a", {str(journal)!r}, "--stubborn"), 1.0))
    print("up", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        child = psutil.Process(int(journal.read_text().split()[2]))
        assert child.is_running()
        process.kill()
        child.wait(timeout=20)


def test_crashes_are_answered_with_doubling_delays_up_to_the_limit() -> None:
    policy = RestartPolicy(7, clock=lambda: 0.0)
    delays = [policy.crashed() for _ in range(8)]
    assert delays[:4] == [0.2, 0.4, 0.8, 1.6]
    assert delays[6] == LONGEST_DELAY_S
    assert delays[7] is None


def test_old_crashes_are_forgotten() -> None:
    now = [0.0]
    policy = RestartPolicy(1, clock=lambda: now[0])
    assert policy.crashed() == 0.2
    now[0] += CRASH_WINDOW_S + 1
    assert policy.crashed() == 0.2
    assert policy.crashed() is None


def test_exit_statuses_are_told_in_words() -> None:
    assert describe(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert describe(3) == "exit code 3"
