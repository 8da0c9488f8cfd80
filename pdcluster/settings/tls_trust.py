"""What a client of ours trusts when it speaks TLS: certificates in a file, and the name that it looks for."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from pdcluster.core.errors import ConfigError
from pdcluster.settings.secret_file import read_secret_file


class TlsTrust(NamedTuple):
    """ca: PEM, of whoever signed the other's certificate, or that one itself. name: that it must be valid for, None for
    the host that is dialled."""

    ca: Path
    name: str | None = None


def read_roots(ca: Path) -> bytes:
    """Certificates to trust, in PEM. Raises ConfigError."""
    found = read_secret_file("--ca", ca)
    if b"BEGIN CERTIFICATE" not in found:
        raise ConfigError(f"--ca {ca} has no certificate in PEM; give the file of whoever signed the router's")
    return found


def client_context(ca: Path) -> ssl.SSLContext:
    """For clients of HTTP. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC does: the certificate itself may be trusted
    try:
        context.load_verify_locations(cadata=read_roots(ca).decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"the certificates of --ca {ca} cannot be read: {error}; check the path") from error
    return context
