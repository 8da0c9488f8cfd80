"""Secrets of the settings: the cluster's keys and tokens. They are read from their files here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pdcluster.core.errors import ConfigError
from pdcluster.settings.keys import key
from pdcluster.settings.kinds import path, text
from pdcluster.settings.secret_file import read_secret_file
from pdcluster.settings.surfaces import MAKE_SECRET

MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """The cluster's shared secret; None: links, KV over tcp and the bootstrap are open."""

    cluster_key: str | None = key(None, text, "shared secret of the cluster, as text", secret=True)
    cluster_key_file: Path | None = key(
        None, path, "file of the cluster's keys, one a line: the first is used, all are accepted, so that keys change"
    )

    def __post_init__(self) -> None:
        if self.cluster_key is not None and self.cluster_key_file is not None:
            raise ConfigError("cluster_key and cluster_key_file are both set; keep one of them")

    @property
    def has_key(self) -> bool:
        """Reads no file."""
        return self.cluster_key is not None or self.cluster_key_file is not None

    def cluster_keys(self) -> tuple[bytes, ...]:
        """32 bytes each, the one to use first; empty without a secret. Reads the file."""
        if self.cluster_key is not None:
            lines = [self.cluster_key.encode()]
        elif self.cluster_key_file is not None:
            name = "cluster_key_file"
            lines = [
                line for line in map(bytes.strip, read_secret_file(name, self.cluster_key_file).splitlines()) if line
            ]
            if not lines:
                raise ConfigError(f"{name} {self.cluster_key_file} is empty; {MAKE_SECRET}")
        else:
            return ()
        return tuple(map(_key_of, lines))


def _key_of(line: bytes) -> bytes:
    if len(line) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"a cluster key has {len(line)} bytes, it must have at least {MIN_SECRET_BYTES}; {MAKE_SECRET}"
        )
    return hashlib.blake2b(line, digest_size=32).digest()


def read_token(name: str, file: Path | None) -> str | None:
    """name: admin or scaler, for errors."""
    if file is None:
        return None
    try:
        token = read_secret_file(f"{name}_token_file", file).decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}_token_file {file} is no text; {MAKE_SECRET}") from error
    if len(token) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the {name} token has {len(token)} characters, at least {MIN_SECRET_BYTES} are needed; {MAKE_SECRET}"
        )
    return token
