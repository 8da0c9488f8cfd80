"""Which functions a process weighs nodes with, and where compiled ones are kept. That they find the same is in
test_seconds_oracle."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import batch, make_node, view

from pdcluster.api.openai import token_list
from pdcluster.api.openai.token_id_scan import scan_ids
from pdcluster.settings.config import cache_directory
from pdcluster_router import process
from pdcluster_router.policy.base import Query
from pdcluster_router.policy.predicted import compiled
from pdcluster_router.policy.predicted_seconds import Seconds

# Where this process keeps what is compiled, also while a test says otherwise.
KERNEL_CACHE = cache_directory()


@pytest.fixture(autouse=True)
def plain_again() -> Iterator[None]:
    yield
    compiled.use(compiled.PLAIN)


def endless(directory: Path) -> Path:
    """In place of Python: notes its number and never ends."""
    program = directory / "endless"
    program.write_text(f"#!/bin/sh\necho $$ > {directory}/pid\nexec sleep 600\n")
    program.chmod(0o755)
    return program


def test_the_compiled_scan_of_token_ids_finds_what_the_plain_one_does() -> None:
    assert compiled.load(KERNEL_CACHE)
    scan = compiled.active.scan_ids
    assert scan is not None

    @given(text=st.text("0123456789,] 0,1] \n[x", max_size=60))
    def finds_the_same(text: str) -> None:
        body = text.encode()
        found, wanted = np.zeros(len(body) + 1, np.int32), np.zeros(len(body) + 1, np.int32)
        assert scan(np.frombuffer(body, np.uint8), found) == scan_ids(body, wanted)  # type: ignore[arg-type]
        assert (found == wanted).all()

    finds_the_same()


def test_long_lists_of_token_ids_are_read_by_the_compiled_scan_once_it_is_loaded() -> None:
    body = json.dumps({"model": "m", "prompt": list(range(10_000))}).encode()
    assert token_list.cut_list(body, re.compile(rb"\[")) is None
    assert compiled.load(KERNEL_CACHE)
    cut = token_list.cut_list(body, re.compile(rb"\["))
    assert (
        cut is not None
        and cut[0] == array("i", range(10_000))
        and json.loads(cut[1])["prompt"] == json.loads(token_list.MARK)
    )


def test_nothing_is_compiled_until_a_process_asks_for_it() -> None:
    assert compiled.active is compiled.PLAIN


async def test_a_router_that_starts_takes_what_is_kept_or_compiles_it() -> None:
    await process.compile_choices()
    assert compiled.active is not compiled.PLAIN
    assert compiled.is_kept(KERNEL_CACHE)


async def test_what_is_not_kept_is_compiled_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which compiles into the same place; here it is there already, so that it only has to be started and waited
    for."""
    monkeypatch.setattr(compiled, "is_kept", lambda cache_dir: False)
    await process.compile_choices()
    assert compiled.active is not compiled.PLAIN


async def test_a_router_goes_on_in_python_when_that_process_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "is_kept", lambda cache_dir: False)
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    await process.compile_choices()
    assert compiled.active is compiled.PLAIN and "ended with 1" in caplog.text


async def test_a_router_goes_on_in_python_when_that_process_does_not_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "is_kept", lambda cache_dir: False)
    monkeypatch.setattr(process.sys, "executable", str(endless(tmp_path)))
    monkeypatch.setattr(process, "COMPILE_S", 0.3)
    async with asyncio.timeout(30):
        await process.compile_choices()
    assert compiled.active is compiled.PLAIN and "did not end within 0.3 s" in caplog.text
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()


@pytest.mark.parametrize(
    "failure",
    [EOFError("Ran out of input"), pickle.UnpicklingError("pickle data was truncated"), KeyError("no such function")],
)
async def test_a_file_of_the_cache_that_cannot_be_read_does_not_stop_a_router(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, failure: Exception
) -> None:
    """numba reads what is kept with pickle, and a power cut may leave half of it. Here it stays so."""
    monkeypatch.setenv("PDCLUSTER_CACHE_DIR", str(tmp_path))

    def broken() -> compiled.Scoring:
        raise failure

    monkeypatch.setattr(compiled, "_compiled", broken)
    monkeypatch.setattr(compiled, "is_kept", lambda cache_dir: True)
    await process.compile_choices()
    assert compiled.active is compiled.PLAIN
    assert "set aside and compiled again" in caplog.text and "they are not compiled" in caplog.text


async def test_a_router_that_stops_leaves_no_process_that_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiled, "is_kept", lambda cache_dir: False)
    monkeypatch.setattr(process.sys, "executable", str(endless(tmp_path)))
    compiling = asyncio.create_task(process.compile_choices())
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    compiling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await compiling
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}").exists()


def test_a_machine_without_numba_weighs_in_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    caplog.set_level("INFO")
    assert compiled.is_kept(tmp_path), "there is nothing to wait for"
    assert not compiled.load(tmp_path)
    assert compiled.active is compiled.PLAIN and "numba is not installed" in caplog.text


def test_where_nothing_can_be_kept_a_router_weighs_in_python(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert not compiled.load(tmp_path / "file")
    assert compiled.active is compiled.PLAIN and "slower" in caplog.text


def test_what_is_compiled_of_other_sources_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba looks at one file only, the formulas stand in two."""
    assert compiled.load(KERNEL_CACHE)
    monkeypatch.setattr(compiled, "SOURCES", compiled.SOURCES[:1])
    assert not compiled.is_kept(KERNEL_CACHE)


def test_a_record_says_the_same_after_the_view_went_on() -> None:
    """It is read when somebody asks, long after other choices were made."""
    assert compiled.load(KERNEL_CACHE)
    cluster = view(make_node("p0", "prefill"), make_node("d0", "decode", batch(4)), make_node("d1", "decode", batch(9)))
    policy, query = Seconds(), Query(num_tokens=1000, cached={"d0-boot": 640})
    candidates = policy.choose(query, cluster).record.candidates
    before = candidates.read()
    changed = cluster.replaced({"d0-boot": make_node("d0", "decode", batch(30))})
    assert policy.choose(Query(num_tokens=4000), changed).record.candidates.read() != before
    assert candidates.read() == before
