"""The locked packages of each image: deploy/docker/*.lock, by image and device as the Dockerfile installs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "deploy" / "docker"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# (image, device) and the locks that the Dockerfile installs into it, in order.
IMAGE_LOCKS = {
    ("router", "cpu"): ("router",),
    ("router", "cuda"): ("router",),
    ("node", "cpu"): ("torch-cpu", "node-cpu"),
    ("node", "cuda"): ("node-cuda",),
    ("vllm", "cpu"): ("torch-cpu", "vllm-cpu"),
    ("vllm", "cuda"): ("vllm-cuda",),
}
_PACKAGE = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class LockedPackage:
    """One pinned package of a lock."""

    name: str
    version: str
    hashes: tuple[str, ...]  # SHA-256 of each file that may be installed

    @property
    def public_version(self) -> str:
        """The version without a local part: torch's 2.13.0+cpu is a build of 2.13.0."""
        return self.version.partition("+")[0]


def locked_packages(lock: Path) -> tuple[LockedPackage, ...]:
    """Raises ValueError for a lock without packages, or with lines that are no pinned package with hashes."""
    text = lock.read_text()
    found = tuple(
        LockedPackage(name=name, version=version, hashes=tuple(_HASH.findall(hashes)))
        for name, version, hashes in _PACKAGE.findall(text)
    )
    if not found:
        raise ValueError(f"{lock} locks no package; write it by scripts/image_locks.sh")
    if rest := _PACKAGE.sub("", text).split():
        raise ValueError(
            f"{lock} has {rest[0]!r}, which is no pinned package with hashes; write it by scripts/image_locks.sh"
        )
    return found


def image_packages(image: str, device: str) -> tuple[LockedPackage, ...]:
    """All that the Dockerfile installs into an image besides pdcluster."""
    return tuple(each for lock in IMAGE_LOCKS[image, device] for each in locked_packages(DOCKER / f"{lock}.lock"))
