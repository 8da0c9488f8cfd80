"""Which routers `--admin` stands for, and which errors a bad one gives."""

from __future__ import annotations

import socket

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster_router.operate.clients import MAX_ROUTERS, Unreachable, differing, resolved


def test_addresses_are_listed_once_and_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved("127.0.0.1:1, 127.0.0.2:2,127.0.0.1:1") == ["127.0.0.1:1", "127.0.0.2:2"]
    assert resolved("[::1]:7") == ["[::1]:7"]

    def answers(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        numbers = (1, 2) if host == "routers" else (1,)
        v4 = [(socket.AF_INET, 1, 6, "", (f"10.0.0.{number}", port)) for number in numbers]
        return [*v4, (socket.AF_INET6, 1, 6, "", ("fd00::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", answers)
    assert resolved("router:50052") == ["router:50052"], "one router, which may listen on either family"
    assert resolved("routers:50052") == ["10.0.0.1:50052", "10.0.0.2:50052"], "each pod once, not by both families"


@pytest.mark.parametrize("bad", ["", "host", "host:", ":1", "host:port"])
def test_a_bad_address_is_named(bad: str) -> None:
    with pytest.raises(ConfigError, match="--admin"):
        resolved(bad)


def test_too_many_routers_and_unknown_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match=str(MAX_ROUTERS)):
        resolved(",".join(f"127.0.0.1:{port}" for port in range(1, MAX_ROUTERS + 2)))
    with pytest.raises(Unreachable, match="check its name"):
        resolved("no.such.host.invalid:1")


def test_differences_name_the_routers() -> None:
    assert differing([("a:1", "seconds"), ("b:1", "seconds")]) == ""
    assert differing([("a:1", "seconds"), ("b:1", ""), ("c:1", "seconds")]) == "seconds at a:1, c:1; none at b:1"
