"""Where the model directory that comes with the package lies."""

from __future__ import annotations

from pathlib import Path

from pdcluster.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1] / "bundled"


def path() -> Path:
    """The bundled model's directory, in the layout of Hugging Face."""
    found = sorted(config.parent for config in ROOT.glob("*/config.json"))
    if not found:
        raise ConfigError(
            f"this installation carries no bundled model ({ROOT} is missing or empty); give one with --model DIR"
        )
    return found[0]
