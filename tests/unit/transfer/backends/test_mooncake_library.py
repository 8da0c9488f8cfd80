"""The traps in the calls and the environment of Mooncake's transfer engine. `Library` is its API with states by script;
one test has the real one."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdcluster.core.errors import ConfigError
from pdcluster.transfer.backends.base import WriteStatus
from pdcluster.transfer.backends.staged.mooncake import (
    ALTERING,
    QUEUE_LIMIT,
    MooncakeEngine,
    check_release,
    environment,
)
from pdcluster.transfer.backends.staged.staging import MAX_BLOCKS, Fabric, StagedSettings

# Entries that a lane of the library takes before it fails all of them, by default.
LANE_QUEUE = 1024


class Library:
    """TransferEngine as far as we use it; every other call is an error. calls: their names in order."""

    states: dict[int, int]

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: tuple[str, ...] = ()
        self.states = {}

    def initialize(self, *arguments: str) -> int:
        self.asked = arguments
        return 0

    def get_rpc_port(self) -> int:
        return 15428

    def register_memory(self, address: int, nbytes: int) -> int:
        return -1 if nbytes > 1 << 40 else 0

    def transfer_submit_write(self, *arguments: object) -> int:
        self.calls.append("transfer_submit_write")
        return len(self.calls)

    def transfer_check_status(self, batch: int) -> int:
        self.calls.append("transfer_check_status")
        return self.states[batch]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "mooncake.engine", SimpleNamespace(TransferEngine=lambda: library))  # type: ignore[arg-type]
    return library


@pytest.mark.parametrize("state", [-1, -2, -7, 2, 99])
def test_a_negative_or_strange_state_never_means_failed_and_only_the_last_word_on_a_write_lets_its_source_go(
    library: Library, state: int
) -> None:
    """-1: it ended, but may still land. Anything else: nothing is known, and it may be asked for again."""
    engine = MooncakeEngine(StagedSettings())
    library.states = {1: 1, 2: 0, 3: state}
    found = WriteStatus.LOST if state == -1 else WriteStatus.UNKNOWN
    assert [engine.check(batch) for batch in (1, 2, 3)] == [WriteStatus.DONE, WriteStatus.PENDING, found]


def test_over_rdma_sources_would_have_to_be_registered_so_they_are_gathered(library: Library) -> None:
    assert MooncakeEngine(StagedSettings()).reads_anywhere
    assert not MooncakeEngine(StagedSettings(fabric=Fabric(("mlx5_0",)))).reads_anywhere


def test_only_the_calls_that_neither_block_nor_spin_are_made(library: Library) -> None:
    engine = MooncakeEngine(StagedSettings())
    batch = engine.submit("far", 0, 0, 4096)
    assert batch is not None
    library.states = {batch: 1}
    engine.check(batch)
    assert library.calls == ["transfer_submit_write", "transfer_check_status"]


def test_the_session_is_named_by_the_rpc_port_that_the_library_took(library: Library) -> None:
    engine = MooncakeEngine(StagedSettings(host="10.0.0.5"))
    assert library.asked == ("10.0.0.5", "P2PHANDSHAKE", "tcp", "")
    assert engine.session == "10.0.0.5:15428" == engine.meet(engine.grant(0, 4096))


def test_named_devices_ask_for_rdma(library: Library) -> None:
    MooncakeEngine(StagedSettings(fabric=Fabric(("mlx5_0", "mlx5_1"))))
    assert library.asked[2:] == ("rdma", "mlx5_0,mlx5_1")


def test_memory_that_the_library_does_not_take_is_an_error(library: Library) -> None:
    with pytest.raises(OSError, match="could not register"):
        MooncakeEngine(StagedSettings()).register(0, 1 << 60)


def test_a_library_that_is_missing_or_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("0.3.12", "0.3.7.post2", "0.2"):
        with pytest.raises(ConfigError, match=f"needs release 0.3.13 or newer of .*, {release} is installed"):
            check_release(release)
    for release in ("0.3.13.post1", "0.4.0", "1.0", ""):
        check_release(release)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match=r"install pdcluster\[mooncake-cpu\], pdcluster\[mooncake\]"):
        MooncakeEngine(StagedSettings())


@pytest.mark.parametrize("name", ALTERING)
def test_a_library_whose_answers_would_mean_something_else_is_refused(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name} is set; unset it"):
        MooncakeEngine(StagedSettings())


def test_two_real_engines_of_one_host_have_sessions_of_their_own_that_answer() -> None:
    engines = [MooncakeEngine(StagedSettings()) for _ in range(2)]
    assert len({engine.session for engine in engines}) == 2
    for engine in engines:
        host, port = engine.session.split(":")
        socket.create_connection((host, int(port)), timeout=5).close()
        engine.close()


@given(unknown_s=st.floats(0.1, 600), progress_s=st.floats(0.1, 600))
def test_the_source_is_let_go_before_a_write_counts_as_unknown(unknown_s: float, progress_s: float) -> None:
    """A write that made no progress ends before its transfer times out; both must be at least a second apart."""
    found = environment(StagedSettings(unknown_s=unknown_s, progress_s=progress_s))
    assert (
        1
        <= int(found["MC_TCP_PROGRESS_TIMEOUT_SEC"])
        == int(found["MC_TCP_STATUS_TIMEOUT_SEC"])
        < int(found["MC_TRANSFER_TIMEOUT"])
    )
    assert int(found["MC_TRANSFER_TIMEOUT"]) >= 5, "the library takes no less"


def test_lanes_are_kept_their_address_is_ours_and_their_queues_hold_more_than_we_can_send() -> None:
    found = environment(StagedSettings(host="10.0.0.5"))
    assert (
        found["MC_FORCE_TCP"] == found["MC_TCP_ENABLE_CONNECTION_POOL"] == "1"
        and found["MC_TCP_BIND_ADDRESS"] == "10.0.0.5"
    )
    assert int(found["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"]) == QUEUE_LIMIT > LANE_QUEUE >= 2 * MAX_BLOCKS
