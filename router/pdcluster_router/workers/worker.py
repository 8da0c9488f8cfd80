"""One worker among several: its number, its supervisor, and its share of the router's bounds.

Bounds (requests, hold queue, tenants') are divided by the number of workers, at least 1 each. Connections spread evenly
but not exactly, so a worker may refuse while another has room.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import RouterConfig


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """A worker.

    number: from 0.
    control: the supervisor's socket.
    """

    number: int
    count: int
    control: Path

    @classmethod
    def parse(cls, text: str) -> Self:
        match = re.fullmatch(r"(\d{1,3})/(\d{1,3})@(.+)", text)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(
                f"--worker is {text[:200]!r}; only a supervisor sets it, to NUMBER/COUNT@SOCKET: use --workers"
            )
        return cls(int(match[1]), int(match[2]), Path(match[3]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}@{self.control}"

    @property
    def id_prefix(self) -> str:
        """Begins the ids of its requests."""
        return f"w{self.number}-"

    def share(self, config: RouterConfig) -> RouterConfig:
        hold = replace(
            config.hold,
            requests=share_of(config.hold.requests, self.count),
            memory_bytes=share_of(config.hold.memory_bytes, self.count),
        )
        arriving = max(share_of(config.most_arriving_bytes, self.count), 2 * config.max_body_bytes)
        return replace(
            config, max_requests=share_of(config.max_requests, self.count), hold=hold, arriving_bytes=arriving
        )


def show(name: str) -> None:
    """Set the name in ps and top, where a former spare's arguments say nothing. The kernel keeps 15 bytes."""
    Path("/proc/self/comm").write_bytes(name.encode()[-15:])


def share_of(bound: int, count: int) -> int:
    return max(bound // count, 1)
