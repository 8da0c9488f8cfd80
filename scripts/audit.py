"""Looks for known vulnerabilities of what the images install, by pip-audit and the advisories of PyPI.

python -m scripts.audit [LOCK]... [--ignore-vuln ID]...

Exit status 0: every package was audited and none has an advisory. 1: at least one has. 2: not every package was
audited, for example because the service cannot be reached or does not know a version, so the answer is unknown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.image_packages import DOCKER, ROOT, locked_packages

TIMEOUT_S = 900.0
CLEAN, VULNERABLE, UNKNOWN = range(3)


@dataclass(frozen=True)
class Audit:
    """What pip-audit said of one lock."""

    num_packages: int
    num_audited: int
    advisories: tuple[str, ...]  # "NAME VERSION: ID, fixed in VERSIONS"
    failures: tuple[str, ...]  # why packages were not audited

    @property
    def status(self) -> int:
        if self.num_audited < self.num_packages or not self.num_packages:
            return UNKNOWN
        return VULNERABLE if self.advisories else CLEAN


def audit(lock: Path, pip_audit: Path, ignored: Sequence[str]) -> Audit:
    """pip-audit alone ends with 0 if it skipped every package, so packages with an answer are counted."""
    try:
        packages = locked_packages(lock)
    except ValueError as error:
        return Audit(num_packages=0, num_audited=0, advisories=(), failures=(str(error),))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(f"{each.name}=={each.public_version}\n" for each in packages)
        pins.flush()
        command = [
            str(pip_audit),
            "-r",
            pins.name,
            "--no-deps",
            "--disable-pip",
            "--format=json",
            "--progress-spinner=off",
        ]
        command += [word for each in ignored for word in ("--ignore-vuln", each)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    try:
        answers: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return Audit(num_packages=len(packages), num_audited=0, advisories=(), failures=(f"pip-audit: {said[0]}",))
    advisories = tuple(
        f"{each['name']} {each['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for each in answers
        for found in each.get("vulns", ())
    )
    failures = tuple(each["skip_reason"] for each in answers if "vulns" not in each)
    return Audit(
        num_packages=len(packages),
        num_audited=sum("vulns" in each for each in answers),
        advisories=advisories,
        failures=failures,
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("locks", nargs="*", type=Path, metavar="LOCK", help="all of deploy/docker by default")
    parser.add_argument(
        "--ignore-vuln", action="append", default=[], metavar="ID", help="an advisory that does not apply"
    )
    parser.add_argument("--pip-audit", type=Path, default=Path(sys.executable).with_name("pip-audit"))
    options = parser.parse_args(words)
    audits = []
    for lock in options.locks or sorted(DOCKER.glob("*.lock")):
        found = audit(lock, options.pip_audit, options.ignore_vuln)
        audits.append(found)
        name = lock.relative_to(ROOT) if lock.is_relative_to(ROOT) else lock
        print(
            f"{name}: {found.num_audited} of {found.num_packages} packages audited, {len(found.advisories)} advisories"
        )
        for line in (*found.advisories, *found.failures[:5]):
            print(f"  {line}")
        if len(found.failures) > 5:
            print(f"  and {len(found.failures) - 5} more that were not audited")
    num_audited, num_packages = sum(each.num_audited for each in audits), sum(each.num_packages for each in audits)
    status = max((each.status for each in audits), default=UNKNOWN)
    verdict = (
        "no known vulnerability",
        "known vulnerabilities",
        "failed: packages that were not audited may be vulnerable",
    )[status]
    print(f"audit: {num_audited} of {num_packages} packages of {len(audits)} locks audited; {verdict}")
    return status


if __name__ == "__main__":
    sys.exit(main())
