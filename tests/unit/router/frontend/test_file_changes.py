"""Tenants that change while the router runs: keys, counts, and what an operator sees of a file that is broken."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from scripted_dispatcher import ScriptedDispatcher, until

from pdcluster.core.errors import Overloaded, Unauthorized
from pdcluster.processes.tasks import running
from pdcluster.settings.changed_files import ChangedFiles
from pdcluster.telemetry.metrics import FileMetrics
from pdcluster_router.cluster.events import EventLog
from pdcluster_router.core.tenants import Tenant, read_tenants
from pdcluster_router.frontend import file_changes
from pdcluster_router.frontend.file_changes import FileChanges
from pdcluster_router.frontend.health import readiness_of
from pdcluster_router.frontend.places import Places

OLD, NEW, OTHER = "sk-acme-old", "sk-acme-new", "sk-other-1"


def tenants_of(acme: str, max_requests: int = 2) -> str:
    return f'[acme]\nkeys = ["{acme}"]\nmax_requests = {max_requests}\n[other]\nkeys = ["{OTHER}"]\n'


class Followed:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(file_changes, "LOOK_S", 0.005)
        self.file = folder / "tenants.toml"
        self.write(tenants_of(OLD))
        self.registry, self.events = CollectorRegistry(), EventLog()
        self.changes = FileChanges(FileMetrics(self.registry), self.events)
        self.files = ChangedFiles([self.file], partial(read_tenants, self.file))
        self.places = Places(4, self.files.first)

    def write(self, text: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.file)

    def knows(self, key: str) -> bool:
        try:
            return self.places.identify(f"Bearer {key}").name != ""
        except Unauthorized:
            return False

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"file": "tenants", **labels})

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.since(0)]

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        follow = partial(self.changes.follow, "tenants", self.files, self.places.use)
        async with running(follow, "test"), asyncio.timeout(30.0):
            yield


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(tmp_path, monkeypatch)


def taken(places: Places, key: str) -> Tenant:
    """The key's tenant, who has a place now."""
    tenant = places.identify(f"Bearer {key}")
    places.take(tenant)
    return tenant


async def test_a_key_that_is_removed_ends_and_counts_go_on(followed: Followed) -> None:
    places = followed.places
    async with followed.following():
        held = [taken(places, OLD), taken(places, OTHER)]
        followed.write(tenants_of(NEW, max_requests=1))
        await until(lambda: followed.knows(NEW))
        assert not followed.knows(OLD) and followed.knows(OTHER)
        with pytest.raises(Overloaded, match="1 requests of tenant acme"):
            taken(places, NEW)  # what it held before counts
        for tenant in held:
            places.give_back(tenant)
        assert places.num_taken == 0
        places.give_back(taken(places, NEW))
    assert followed.value("pdcluster_file_reloads_total", outcome="used") == 1
    assert followed.value("pdcluster_file_refused") == 0 and followed.kinds == ["files-read"]


@pytest.mark.parametrize(
    "broken",
    [
        "", "[acme\n", "[acme]\nkeys = ['sk-acme-new'", "x" * 100, "a = " + "[" * 100_000, "a = " + "1" * 10_000,
        "\xff\x00", "[acme]\nkeys = ['sk-acme-new']\n[b]\nkeys = ['sk-acme-new']\n",
    ],
)  # fmt: skip
async def test_a_broken_file_keeps_the_old_tenants_and_says_so(
    followed: Followed, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with followed.following():
        followed.write(broken)
        await until(lambda: followed.value("pdcluster_file_refused") == 1)
        assert followed.knows(OLD) and not followed.knows(NEW)
        verdict = readiness_of(ScriptedDispatcher(), warnings=followed.changes.warnings())
        assert (verdict.is_good, verdict.status) == (True, "degraded") and "files of tenants" in verdict.reasons[0]
        followed.write(tenants_of(NEW))
        await until(lambda: followed.knows(NEW))
        assert not followed.changes.warnings()
    assert followed.kinds == ["files-refused", "files-read"]
    assert followed.value("pdcluster_file_refused") == 0
    told = "".join(event.message for event in followed.events.since(0)) + caplog.text
    assert str(followed.file) in told and "sk-" not in told


async def test_a_file_that_is_gone_keeps_the_old_tenants(followed: Followed) -> None:
    async with followed.following():
        followed.file.unlink()
        await until(lambda: followed.kinds == ["files-refused"])
        assert followed.knows(OLD)
