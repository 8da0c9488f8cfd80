"""The proof that a process is over, and that it is not kept for ever."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdcluster.transfer.backends.base import Peer
from pdcluster.transfer.backends.shm_memory import Processes, has_exited, pidfd_of

CALLER = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"


class Callers:
    """Processes that connect to a unix socket and stay until they are ended."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._running: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    def call(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        process = subprocess.Popen([sys.executable, "-c", CALLER, self._path], stdin=subprocess.PIPE)
        self._running.append((process, self._listener.accept()[0]))
        return self._running[-1]

    def close(self) -> None:
        for process, sock in self._running:
            sock.close()
            process.kill()
            process.communicate()
        self._listener.close()


@pytest.fixture
def callers(tmp_path) -> Iterator[Callers]:
    callers = Callers(str(tmp_path / "s"))
    yield callers
    callers.close()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_a_process_has_exited_when_it_was_killed_and_not_before(callers: Callers) -> None:
    process, sock = callers.call()
    pidfd = pidfd_of(sock, process.pid)
    assert not has_exited(pidfd)
    end(process)
    assert has_exited(pidfd)
    os.close(pidfd)


def test_a_boot_is_over_when_all_its_processes_are(callers: Callers) -> None:
    processes, peer = Processes(), Peer("p0", "p0-1")
    assert processes.have_exited(peer), "it never came"
    (first, one), (second, two) = callers.call(), callers.call()
    processes.meet(peer, first.pid, one)
    processes.meet(peer, second.pid, two)
    processes.meet(peer, second.pid, two)
    assert len(processes) == 2
    end(first)
    assert not processes.have_exited(peer)
    end(second)
    assert processes.have_exited(peer)
    assert processes.forget(peer) and not processes.forget(peer)
    assert len(processes) == 0


def test_descriptors_of_boots_that_are_over_are_let_go_when_another_one_comes(callers: Callers) -> None:
    processes = Processes()
    for boot in range(6):
        process, sock = callers.call()
        processes.meet(Peer("p0", f"p0-{boot}"), process.pid, sock)
        assert len(processes) <= 2, "one that is over, at most, and the one that came"
        end(process)
    processes.close()
    assert len(processes) == 0


def test_a_pid_that_was_given_away_again_is_the_new_process(callers: Callers) -> None:
    processes, peer = Processes(), Peer("p0", "p0-1")
    (old, one), (new, two) = callers.call(), callers.call()
    processes.meet(peer, 7, one)
    end(old)
    assert processes.have_exited(peer)
    processes.meet(peer, 7, two)
    assert not processes.have_exited(peer)
    end(new)
    processes.close()
