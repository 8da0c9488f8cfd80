"""Where a process can listen."""

from __future__ import annotations

import socket

import pytest
import zmq

from pdcluster.processes.listening import listening_place, loopback, reserved_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_families_can_be_listened_on(host: str) -> None:
    family, where = listening_place(host, 0)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(where)
        assert listener.getsockname()[0] == host


def test_a_name_is_listened_on_in_the_family_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        v6 = (socket.AF_INET6, 1, 6, "", ("fd00::1", port, 0, 0))
        return [v6] if host == "new" else [v6, (socket.AF_INET, 1, 6, "", ("10.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    assert listening_place("new", 1) == (socket.AF_INET6, ("fd00::1", 1, 0, 0))
    assert listening_place("both", 1) == (socket.AF_INET, ("10.0.0.1", 1))


def test_a_reserved_port_is_given_to_nobody_but_who_is_told_it() -> None:
    with reserved_port("127.0.0.1") as port:
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
        assert port not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()
        with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
            listener.bind(f"tcp://127.0.0.1:{port}")
            socket.create_connection(("127.0.0.1", port)).close()


def test_a_port_where_somebody_listens_cannot_be_reserved() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"), reserved_port("127.0.0.1", port):
            pass


def test_a_port_is_reserved_once() -> None:
    with reserved_port("127.0.0.1") as port:
        refusal = pytest.raises(OSError, match="in use")
        with refusal, reserved_port("127.0.0.1", port):
            pass
    with reserved_port("127.0.0.1", port) as again:
        assert again == port


def test_a_machine_without_ipv4_has_another_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback() == "127.0.0.1"

    class SixOnly(socket.socket):
        def bind(self, where: object) -> None:
            raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "socket", SixOnly)
    assert loopback() == "::1"
