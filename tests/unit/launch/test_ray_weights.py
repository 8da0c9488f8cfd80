"""Rollouts that a Ray router's user_config asks for, by processes that stand for pdctl."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster.launch.ray_weights import RolloutArgs, WeightsRoller, read_rollout, rollout_command

WAIT_S = 30.0
TUNED = RolloutArgs("tuned", "/m/tuned")


class Turns:
    """Of the routers: whether another one has it."""

    def __init__(self) -> None:
        self.is_taken = False
        self.ends = 0

    async def take(self) -> bool:
        return not self.is_taken

    async def end(self) -> None:
        self.ends += 1


class Pdctl:
    """Notes each call in a file. code: what it ends with."""

    def __init__(self, folder: Path) -> None:
        self.calls, self.code, self.sleeps_s = folder / "calls", folder / "code", 0.0
        self.code.write_text("0")
        self.has_address = True

    def command(self, wanted: RolloutArgs) -> tuple[str, ...] | None:
        text = (
            f"import os, sys, time; open({str(self.calls)!r}, 'a').write('{wanted.label} %d\\n' % os.getpid()); "
            f"time.sleep({self.sleeps_s}); sys.exit(int(open({str(self.code)!r}).read()))"
        )
        return (sys.executable, "-I", "-S", "-c", text) if self.has_address else None

    def labels(self) -> list[str]:
        return [line.split()[0] for line in self.calls.read_text().splitlines()] if self.calls.exists() else []


@pytest.fixture
def pdctl(tmp_path: Path) -> Pdctl:
    return Pdctl(tmp_path)


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
async def roller(pdctl: Pdctl, turns: Turns) -> AsyncIterator[WeightsRoller]:
    made = WeightsRoller(pdctl.command, turns.take, turns.end, retry_s=0.05)
    yield made
    await made.stop()


async def until_called(pdctl: Pdctl, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(pdctl.labels()) < count:
            await asyncio.sleep(0.02)


async def test_each_wish_is_rolled_out_once(roller: WeightsRoller, pdctl: Pdctl, turns: Turns) -> None:
    for wanted in (None, TUNED, TUNED, RolloutArgs("third", "/m/third"), TUNED):
        await roller.want(wanted)
        async with asyncio.timeout(WAIT_S):
            await roller.done()
    assert pdctl.labels() == ["tuned", "third", "tuned"] and turns.ends == 3


async def test_what_fails_or_is_another_routers_turn_is_tried_again(
    roller: WeightsRoller, pdctl: Pdctl, turns: Turns
) -> None:
    pdctl.code.write_text("1")
    await roller.want(TUNED)
    await until_called(pdctl, 2)
    turns.is_taken = True
    await asyncio.sleep(0.5)
    count = len(pdctl.labels())
    await asyncio.sleep(0.5)
    assert len(pdctl.labels()) == count
    pdctl.code.write_text("0")
    turns.is_taken = False
    async with asyncio.timeout(WAIT_S):
        await roller.done()
    assert len(pdctl.labels()) == count + 1


async def test_another_wish_ends_the_one_before_and_its_process(roller: WeightsRoller, pdctl: Pdctl) -> None:
    pdctl.sleeps_s = 600.0
    await roller.want(TUNED)
    await until_called(pdctl, 1)
    pid = int(pdctl.calls.read_text().split()[1])
    pdctl.sleeps_s = 0.0
    await roller.want(RolloutArgs("third", "/m/third"))
    async with asyncio.timeout(WAIT_S):
        await roller.done()
    assert pdctl.labels() == ["tuned", "third"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_turn_is_taken_again_while_pdctl_runs(pdctl: Pdctl) -> None:
    taken, ended = [], []

    async def take() -> bool:
        taken.append(len(ended))
        return True

    async def end() -> None:
        ended.append(len(taken))

    pdctl.sleeps_s = 0.5
    roller = WeightsRoller(pdctl.command, take, end, retry_s=0.05, renew_s=0.05)
    await roller.want(TUNED)
    async with asyncio.timeout(WAIT_S):
        await roller.done()
    assert pdctl.labels() == ["tuned"] and len(taken) >= 3 and ended == [len(taken)]


async def test_a_store_that_does_not_answer_ends_no_rollout(pdctl: Pdctl, turns: Turns) -> None:
    failures = iter([ConnectionError("no store")])

    async def take() -> bool:
        for error in failures:
            raise error
        return True

    roller = WeightsRoller(pdctl.command, take, turns.end, retry_s=0.05)
    await roller.want(TUNED)
    async with asyncio.timeout(WAIT_S):
        await roller.done()
    assert pdctl.labels() == ["tuned"]


def test_a_wish_is_read_and_becomes_what_an_operator_would_type() -> None:
    assert read_rollout(None) is None and read_rollout({}) is None
    wanted = read_rollout({"label": "t", "source": "-x", "max_unavailable": 0, "release_first": True})
    assert wanted is not None
    command = rollout_command(wanted, "127.0.0.1:1", "/t")
    assert command[1:] == (
        "-m", "pdcluster_router.pdctl", "weights", "load", "--admin=127.0.0.1:1", "--label=t", "--max-unavailable=0",
        "--release-first", "--token-file=/t", "--", "-x",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"label": "t"}, "source"),
        ({"label": "no label", "source": "/m"}, "label"),
        ({"label": "t", "source": "/m", "canary": 1}, "canary"),
        ("tuned", "object"),
    ],
)
def test_a_wish_that_nobody_could_fulfil_is_refused(given: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"weights of user_config: .*{reason}"):
        read_rollout(given)
