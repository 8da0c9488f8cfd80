"""Which version of a model's weights a request gets that names none. Plain values; `cluster.models` keeps them.

1. A version is complete where nodes that take work can compute its prompts, and nodes that take work can decode them.
   In mode local one node that takes work is enough.
2. Versions with a share below 100 percent are canaries. A complete canary gets its share of requests, by a hash of
   their ids, the newest canary first.
3. All others get the newest complete version of share 100, else the newest that some node takes work for, else the
   newest. Where no version has share 100, all count as if they had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from pdcluster.core.messages import Role
from pdcluster_router.core.generation import ModelInfo

WHOLE = 100.0
HASHES = 1 << 32

# Roles of nodes that take work, by model digest.
RolesByDigest = Mapping[str, Collection[Role]]


@dataclass(frozen=True, slots=True)
class Version:
    """A model under one version of its weights. share: percent of the requests that name no weights."""

    info: ModelInfo
    share: float = WHOLE


@dataclass(frozen=True, slots=True)
class VersionPlan:
    """What requests for one name get while nodes stay as they are.

    default: of most requests. canaries: each with the percentage below which a request's hash must be.
    able: digests of complete versions. taking: of those with a node that takes work.
    """

    default: ModelInfo
    canaries: tuple[tuple[float, ModelInfo], ...]
    able: frozenset[str]
    taking: frozenset[str]

    def choose(self, request: str) -> ModelInfo:
        """Of one API request, by its id."""
        if self.canaries:
            point = crc32(request.encode()) * WHOLE / HASHES
            for below, info in self.canaries:
                if point < below:
                    return info
        return self.default

    def successor(self, digest: str) -> ModelInfo | None:
        """Where a request goes on whose own version no node takes work for; None while some do, or none else does."""
        found = self.default
        return None if digest in self.able or found.digest == digest or found.digest not in self.taking else found


def plan_of(versions: Sequence[Version], roles: RolesByDigest, *, is_local: bool) -> VersionPlan:
    """versions: of one name, the newest first."""
    taking = frozenset(each.info.digest for each in versions if roles.get(each.info.digest))
    able = frozenset(digest for digest in taking if is_local or _is_complete(roles[digest]))
    whole = [each.info for each in versions if each.share >= WHOLE]
    candidates = whole or [each.info for each in versions]
    default = min(candidates, key=lambda info: (info.digest not in able, info.digest not in taking))
    canaries, below = [], 0.0
    for each in versions if whole else ():
        if each.share < WHOLE and each.info.digest in able:
            below += each.share
            canaries.append((below, each.info))
    return VersionPlan(default, tuple(canaries), able, taking)


def _is_complete(roles: Collection[Role]) -> bool:
    return any(role != "decode" for role in roles) and any(role != "prefill" for role in roles)
