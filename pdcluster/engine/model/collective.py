"""Sums and joins of tensors between the ranks of a tensor-parallel engine, over torch.distributed.

A group has its own store and its own process group, not torch's global one, so a process may hold several. Every rank
must make the same calls in the same order. A rank that fails, or falls silent for `timeout_s`, makes the others' calls
raise.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed
from torch import Tensor

from pdcluster.core.errors import ConfigError
from pdcluster.processes.listening import listening_place, loopback

# Its stores and process groups are documented, but not in its type stubs.
_dist = cast(Any, torch.distributed)


class RendezvousStore(Protocol):
    """Where the ranks of a group find each other."""

    port: int


class Collective(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in place."""

    def join_columns(self, x: Tensor) -> Tensor:
        """[n, width] of each rank (the same width everywhere) → [n, size * width], in the order of ranks."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class Alone:
    """The group of one."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def join_columns(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        """Nobody is left behind."""


class InOrder:
    """Sums in float32 in the order of ranks. So an element's sum does not depend on where in x it stands, as it does in
    a ring.
    """

    def __init__(self, group: Collective) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def sum(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        first, *others = self._group.join_columns(x).chunk(self.size, dim=-1)
        total = first.float()
        for part in others:
            total = total + part
        return x.copy_(total)

    def join_columns(self, x: Tensor) -> Tensor:
        return self._group.join_columns(x)

    def close(self) -> None:
        self._group.close()


class Ranks:
    """Gloo on a CPU, NCCL on GPUs. Used by one thread, the one that computes."""

    def __init__(self, rank: int, size: int, store: RendezvousStore, device: str, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._group: _Group | None = _make_group(store, rank, size, device, timedelta(seconds=timeout_s))

    def sum(self, x: Tensor) -> Tensor:
        self._require_group().allreduce([x]).wait()
        return x

    def join_columns(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._require_group().allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)

    def close(self) -> None:
        self._group = None

    def _require_group(self) -> _Group:
        assert self._group is not None, "the group was left"
        return self._group


class _Group(Protocol):
    """The part of a torch process group that is used here."""

    def allreduce(self, tensors: list[Tensor]) -> Any: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any: ...


def host_store(timeout_s: float) -> RendezvousStore:
    """Rank 0's store, on a free port of this machine (its `port`); the other ranks find each other there. It listens on
    loopback alone: torch's own socket would listen on every address.
    """
    family, place = listening_place(loopback(), 0)
    listener = socket.create_server(place, family=family)
    host, port = listener.getsockname()[:2]
    return cast(
        RendezvousStore,
        _dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        ),
    )  # fmt: skip


def join_store(port: int, timeout_s: float) -> RendezvousStore:
    return cast(
        RendezvousStore, _dist.TCPStore(loopback(), port, is_master=False, timeout=timedelta(seconds=timeout_s))
    )


def _make_group(store: RendezvousStore, rank: int, size: int, device: str, timeout: timedelta) -> _Group:
    if device == "cpu":
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=loopback())]
        options._timeout = timeout
        return cast(_Group, _dist.ProcessGroupGloo(store, rank, size, options))
    if not _dist.is_nccl_available():
        raise ConfigError(f"tensor parallel on {device} needs a torch with NCCL; install one, or use --device cpu")
    settings = _dist.ProcessGroupNCCL.Options()
    settings._timeout = timeout
    return cast(_Group, _dist.ProcessGroupNCCL(store, rank, size, settings))
