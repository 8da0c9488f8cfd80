"""Programs as users write them, against `pdcluster up` with the bundled model.

They run in a venv of their own (`make test-clients`), whose clients the other tests do not need. Under any other
configuration nothing here is collected."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
READY = re.compile(r"ready in [\d.]+ s: (http://\S+)/v1 .* model (\S+)")
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
def served() -> Iterator[Served]:
    argv = [REPOSITORY / ".venv/bin/python", "-m", "pdcluster.cli", "up", "--http", "127.0.0.1:0", "--grpc", "none"]
    argv += ["--set", "router.tool_format=hermes"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)
    lines: list[str] = []
    is_ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if READY.search(line):
                is_ready.set()
        is_ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        is_ready.wait(READY_S)
        found = next((match for line in lines if (match := READY.search(line))), None)
        assert found is not None, "up did not become ready:\n" + "".join(lines)
        yield Served(found[1], found[2])
    finally:
        process.terminate()
        process.wait(60)
        reader.join(5)
