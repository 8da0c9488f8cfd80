"""Which surfaces may listen beyond this machine: the one rule for every process.

1. On loopback a surface needs nothing.
2. Beyond loopback a surface needs its secret: a cluster key or a token.
3. Without the secret it may still be open when `insecure` names it.
4. The API needs no secret, since most clusters stand behind a gateway. It gets a warning when it has no tenants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pdcluster.core.address import is_loopback, parse_address
from pdcluster.core.errors import ConfigError
from pdcluster.settings.keys import joined

SurfaceName = Literal["bootstrap", "links", "kv", "admin", "console", "control", "scaler"]

MAKE_SECRET: Final = "openssl rand -hex 32 makes one"
_CLUSTER_KEY: Final = "cluster key"
# What a surface is protected by, as errors call it.
SECRET_OF: Final[Mapping[SurfaceName, str]] = {
    "bootstrap": _CLUSTER_KEY,
    "links": _CLUSTER_KEY,
    "kv": _CLUSTER_KEY,
    "admin": "admin token",
    "console": "admin token",
    "control": "admin token",
    "scaler": "scaler token",
}
# The flag that gives a process the secret.
FLAG_OF: Final[Mapping[str, str]] = {
    _CLUSTER_KEY: "--security-cluster-key-file",
    "admin token": "--admin-token-file",
    "scaler token": "--scaler-token-file",
}


@dataclass(frozen=True, slots=True)
class Exposure:
    """A surface of one process and where it listens.

    setting: what says where.
    address: HOST:PORT, or a host.
    has_secret: whether strangers are kept out.
    """

    surface: SurfaceName
    setting: str
    address: str
    has_secret: bool

    @property
    def is_open(self) -> bool:
        """Whether strangers on other machines get in."""
        return not self.has_secret and is_beyond_loopback(self.address)

    def __str__(self) -> str:
        return f"{self.surface} at {self.address} ({self.setting})"


def surface_names(raw: object) -> tuple[str, ...]:
    """A kind of setting: comma-separated text or a list of surfaces."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    found = [str(part).strip() for part in parts] if isinstance(parts, list | tuple) else [""]
    unknown = [each for each in found if each not in SECRET_OF]
    if unknown:
        raise ValueError(f"there is no surface {unknown[0][:80]!r}; it takes {', '.join(SECRET_OF)}")
    return tuple(dict.fromkeys(found))


def is_beyond_loopback(address: str) -> bool:
    """Whether other machines may get to HOST:PORT, or to a host. A name counts as one that others know."""
    try:
        host, _ = parse_address(address)
    except ValueError:
        host = address
    return not is_loopback(host)


def check_exposures(
    exposures: Iterable[Exposure], insecure: Collection[str], flag_of: Mapping[str, str] = FLAG_OF
) -> None:
    """Raises ConfigError where strangers would get in, with a line for each secret that is missing.

    flag_of: of the process that is checked.
    """
    missing: dict[str, list[Exposure]] = {}
    for exposure in exposures:
        if exposure.is_open and exposure.surface not in insecure:
            missing.setdefault(SECRET_OF[exposure.surface], []).append(exposure)
    if missing:
        raise ConfigError(joined(_refusal(secret, found, flag_of[secret]) for secret, found in missing.items()))


def _refusal(secret: str, found: list[Exposure], flag: str) -> str:
    several = len(found) > 1
    shared = ", the same for the whole cluster" if secret == _CLUSTER_KEY else ""
    return (
        f"{' and '.join(map(str, found))} can be reached from other machines, and there is no {secret}; pass "
        f"{flag} FILE with one ({MAKE_SECRET}{shared}), or listen on loopback, or leave "
        f"{'them' if several else 'it'} open to everybody by --insecure {','.join(each.surface for each in found)}"
    )


def exposure_warnings(exposures: Iterable[Exposure]) -> Iterator[str]:
    """What `insecure` lets strangers reach, a line each."""
    for exposure in exposures:
        if exposure.is_open:
            yield f"{exposure} is open to everybody who gets there: there is no {SECRET_OF[exposure.surface]}"


def bootstrap_warning(section: str, bootstraps: Iterable[str], *, has_key: bool) -> Iterator[str]:
    """Of bootstraps on other machines, which nothing shows to be ours."""
    found = [] if has_key else list(filter(is_beyond_loopback, bootstraps))
    if found:
        yield (
            f"{section}.bootstrap {','.join(found)} is believed without proof, and all is sent in clear text, since "
            f"there is no cluster key; set {section}.security.cluster_key_file"
        )


def api_warning(addresses: Mapping[str, str | None], *, has_tenants: bool) -> str | None:
    """Of an API that everybody may use. addresses: where it listens, by setting."""
    found = [
        f"{setting} {address}"
        for setting, address in addresses.items()
        if address is not None and is_beyond_loopback(address)
    ]
    if has_tenants or not found:
        return None
    return (
        f"{' and '.join(found)} can be reached from other machines without an API key, since there are no tenants; set "
        "router.tenants, or let only a gateway get there"
    )
