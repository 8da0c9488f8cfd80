"""Programs as users write them, against `pdcluster up` with the bundled model: one prefill node, two decode nodes.

They run in a venv of their own (`make test-clients`), whose clients the other tests do not need. Under any other
configuration nothing here is collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from interrupted import Cluster, Program

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
# The first start compiles kernels.
READY_S = 280.0


class Served(NamedTuple):
    url: str
    model: str

    @property
    def base_url(self) -> str:
        """As clients of OpenAI's API want it."""
        return f"{self.url}/v1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if config.inipath == HERE / "clients.ini" else True


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    running = Cluster(str(REPOSITORY / ".venv/bin/python"), READY_S)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def served(cluster: Cluster) -> Served:
    return Served(cluster.url, cluster.model)


@pytest.fixture
def over_a_kill(cluster: Cluster) -> Callable[[Program], str]:
    """Runs a program twice, the second time with a kill of the decode node; gives the text that both streamed."""
    return cluster.over_a_kill
