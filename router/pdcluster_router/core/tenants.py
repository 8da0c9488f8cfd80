"""Tenants by API key, and what each may use.

The router reads them from a TOML or JSON file (`router.tenants`), at start and when it changes:

    [acme]                         # the name, in logs and metrics
    keys = ["sk-acme-…"]           # as text, or better:
    key_hashes = ["sha256:9f86…"]  # printf %s KEY | sha256sum
    weight = 2.0                   # share of the cluster beside other tenants
    priority = 0                   # the most urgent that its requests may ask for; lower goes first
    max_requests = 64              # running at a time
    cache_salt = "team-a"          # tenants with the same text share cached prefixes

An empty cache_salt shares the prefixes of everybody. A tenant without cache_salt shares with no other tenant. With a
cluster key, names of cached prefixes are keyed with its first line, so that nobody outside can compute a tenant's.
Routers with the same first line compute the same names; a new one costs the cached prefixes of tenants.

Without a file everyone is one tenant and needs no key. Keys are never logged. A key is looked up by its digest under a
random secret of this process. So the time of a look-up reveals nothing about keys.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pdcluster.core.errors import BadRequest, ConfigError, Unauthorized
from pdcluster.settings.secret_file import read_secret_file
from pdcluster_router.core.generation import BATCH_PRIORITY, TenantPriority

MOST_URGENT, LEAST_URGENT = -10, 10
MAX_KEY_CHARACTERS = 512
# First byte of a tenant's salt. No text of a request begins with it, so no request can name another tenant's cache.
TENANT_MARK = b"\xff"

Priority = Annotated[int, Meta(ge=MOST_URGENT, le=LEAST_URGENT)]


class Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One tenant as the file has it."""

    keys: list[Annotated[str, Meta(min_length=8, max_length=MAX_KEY_CHARACTERS)]] = []
    key_hashes: list[str] = []
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    priority: Priority = 0
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, and what it may use."""

    name: str = ""
    weight: float = 1.0
    # The most urgent that its requests may ask for.
    priority: int = MOST_URGENT
    # Requests at a time; None for no bound of its own.
    max_requests: int | None = None
    # Of its cached prefixes; b"": shared by all.
    salt: bytes = b""

    def standing(self, priority: int | None, *, is_batch: bool = False) -> TenantPriority:
        """Its TenantPriority for a request of this priority; None: the usual one. A batch request is below all.

        Raises BadRequest.
        """
        usual = max(self.priority, 0)
        if priority is not None and priority < self.priority:
            raise BadRequest(
                f"priority {priority} is more urgent than {self.priority}, which is the most that this key may ask for",
                "priority",
            )
        if is_batch:
            return TenantPriority(self.name, self.weight, BATCH_PRIORITY)
        return TenantPriority(self.name, self.weight, usual if priority is None else priority)

    def cache_salt(self, asked: str | None) -> bytes:
        """The name of the prefix cache for a request that sent this cache_salt."""
        own = (asked or "").encode()
        return self.salt + own if self.salt else own


ANYBODY = Tenant()


class Tenants:
    """All tenants by key. Immutable once made."""

    def __init__(self, entries: Mapping[str, Entry] | None = None, cluster_key: bytes = b"") -> None:
        self._secret = secrets.token_bytes(32)
        self._by_digest: dict[bytes, Tenant] = {}
        self.is_configured = entries is not None
        for name, entry in (entries or {}).items():
            self._add(_tenant(name, entry, cluster_key), entry)

    def _add(self, tenant: Tenant, entry: Entry) -> None:
        hashes = [hashlib.sha256(key.encode()).digest() for key in entry.keys] + [
            _parse_hash(tenant.name, text) for text in entry.key_hashes
        ]
        if not hashes:
            raise ConfigError(f"tenant {tenant.name} has no keys and no key_hashes; give it at least one")
        for found in hashes:
            digest = self._digest(found)
            if digest in self._by_digest:
                raise ConfigError(
                    f"tenants {self._by_digest[digest].name} and {tenant.name} have a key in common; a key names one "
                    "tenant"
                )
            self._by_digest[digest] = tenant

    def identify(self, authorization: str | None) -> Tenant:
        """The tenant of the header `Authorization: Bearer KEY`. Raises Unauthorized."""
        if not self.is_configured:
            return ANYBODY
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("no API key was given; send the header Authorization: Bearer KEY")
        digest = self._digest(hashlib.sha256(key[: MAX_KEY_CHARACTERS + 1].encode("utf-8", "replace")).digest())
        tenant = self._by_digest.get(digest)
        if tenant is None:
            raise Unauthorized("the API key is not known here; check it, or ask whoever runs this cluster for one")
        return tenant

    def _digest(self, key_hash: bytes) -> bytes:
        return hashlib.blake2b(key_hash, key=self._secret, digest_size=32).digest()


def _tenant(name: str, entry: Entry, cluster_key: bytes) -> Tenant:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError(
            f"tenant {name[:100]!r} is no name; use up to 64 letters, digits, dots, dashes and underscores"
        )
    return Tenant(name, entry.weight, entry.priority, entry.max_requests, _salt(name, entry.cache_salt, cluster_key))


def _salt(name: str, cache_salt: str | None, cluster_key: bytes) -> bytes:
    if cache_salt == "":
        return b""
    kind, text = ("tenant", name) if cache_salt is None else ("shared", cache_salt)
    key = hashlib.blake2b(cluster_key, digest_size=32, person=b"pdcluster.salts").digest() if cluster_key else b""
    return TENANT_MARK + hashlib.blake2b(text.encode(), digest_size=16, key=key, person=kind.encode()).digest()


def _parse_hash(name: str, text: str) -> bytes:
    match = re.fullmatch(r"sha256:([0-9a-fA-F]{64})", text)
    if match is None:
        raise ConfigError(
            f"tenant {name} has a key hash that is not sha256: and 64 hex digits; printf %s KEY | sha256sum makes one"
        )
    return bytes.fromhex(match[1])


def read_tenants(file: Path | None, num_workers: int = 1, cluster_keys: Sequence[bytes] = ()) -> Tenants:
    """Read the tenants. Without a file everyone is one tenant. Raises ConfigError, which never contains a key.

    num_workers: workers of this router, which share each tenant's bound.
    cluster_keys: the first keys the tenants' salts.
    """
    if file is None:
        return Tenants()
    body = read_secret_file("tenants file", file)
    decoder = msgspec.json.decode if file.suffix == ".json" else msgspec.toml.decode
    try:
        entries = decoder(body, type=dict[str, Entry])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"tenants file {file} is not a table of tenants: {error}") from error
    if not entries:
        raise ConfigError(
            f"tenants file {file} names no tenant; add one, or leave router.tenants out to serve everyone"
        )
    for entry in entries.values():
        if entry.max_requests is not None:
            entry.max_requests = max(entry.max_requests // num_workers, 1)
    return Tenants(entries, next(iter(cluster_keys), b""))
