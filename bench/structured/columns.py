"""What is compared: this tree, the tree of another commit, and xgrammar's own converter, each as a process."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from pdcluster.settings.config import cache_directory

ROOT = Path(__file__).resolve().parents[2]
RIVALS = ROOT / "bench" / "rivals"
# The last commit with xgrammar.
BEFORE = "13a5968"
XGRAMMAR = ("xgrammar==0.2.8", "apache-tvm-ffi==0.1.15.post2")
OWN, CONVERTER = "this tree", "xgrammar"


class Ended(Exception):
    """A process that ended before it answered."""


@dataclass(slots=True)
class Column:
    """One of those that are compared. A process that ended is started again with the next line."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    core: int
    # The first line of each process.
    vocabulary: Mapping[str, object] = field(default_factory=lambda: {"kind": "bytes"})
    _process: subprocess.Popen[str] | None = None

    def ask(self, what: Mapping[str, object]) -> dict[str, object]:
        """Raises Ended."""
        if self._process is None:
            self._start()
        return self._say(what)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def _start(self) -> None:
        assignments = [f"{name}={value}" for name, value in self.environment.items()]
        self._process = subprocess.Popen(
            ["taskset", "-c", str(self.core), "env", *assignments, *self.command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()
        self._say(self.vocabulary)

    def _say(self, what: Mapping[str, object]) -> dict[str, object]:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            self.close()
            raise Ended(f"{self.name} ended: {error}") from error
        return self._answer()

    def _answer(self) -> dict[str, object]:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                found: dict[str, object] = json.loads(line[1:])
                return found
        code = self._process.wait(timeout=10)
        self.close()
        raise Ended(f"{self.name} ended with {code} before it answered")


@contextmanager
def columns(names: Sequence[str], core: int) -> Iterator[list[Column]]:
    """Those of the names: OWN, CONVERTER, or a commit."""
    found = [_column(name, core) for name in names]
    try:
        yield found
    finally:
        for column in found:
            column.close()


def _column(name: str, core: int) -> Column:
    if name == OWN:
        return Column(name, [sys.executable, "-m", "bench.rivals.own_grammars"], {"PYTHONPATH": f"{ROOT}"}, core)
    paths = [_library()] if name == CONVERTER else [_library(), _tree(name)]
    command = [sys.executable, str(RIVALS / "rival_xgrammar.py"), "converter" if name == CONVERTER else "before"]
    return Column(name, command, {"PYTHONPATH": ":".join(map(str, paths))}, core)


def _library() -> Path:
    """A directory with xgrammar alone; what it needs else is in this environment."""
    target = cache_directory() / "bench-structured" / "-".join(XGRAMMAR)
    if not (target / "xgrammar").exists():
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps"]
        subprocess.run([*pip, "--target", str(target), *XGRAMMAR], check=True)
    return target


def _tree(commit: str) -> Path:
    """The package as it was."""
    target = cache_directory() / "bench-structured" / commit
    if not target.exists():
        archive = subprocess.run(["git", "archive", commit, "pdcluster"], cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
            files.extractall(target, filter="data")
    return target
