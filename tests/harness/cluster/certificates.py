"""Certificates for tests: an authority that signs them, as files that a listener reads."""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from pdcluster.settings.tls_trust import TlsTrust

NAME = "llm.example.com"
DAY = timedelta(days=1)


def pem(key: CertificateIssuerPrivateKeyTypes) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


class Authority:
    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._signed(self._name, self._key, (), 10 * DAY, is_authority=True))

    @property
    def trust(self) -> TlsTrust:
        return TlsTrust(self.file, NAME)

    def write(
        self,
        cert: Path,
        key: Path,
        *names: str,
        private: CertificateIssuerPrivateKeyTypes | None = None,
        lasts: timedelta = 10 * DAY,
        usage: x509.ObjectIdentifier | None = None,
    ) -> None:
        """A certificate for these names, and its key. Each file is replaced at once."""
        own = private or ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "router")])
        replace(cert, self._signed(subject, own, names or (NAME,), lasts, usage=usage))
        replace(key, pem(own), 0o600)

    def _signed(
        self,
        subject: x509.Name,
        key: CertificateIssuerPrivateKeyTypes,
        names: tuple[str, ...],
        lasts: timedelta,
        *,
        is_authority: bool = False,
        usage: x509.ObjectIdentifier | None = None,
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 20 * DAY)
            .not_valid_after(now + lasts)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if names:
            found = x509.SubjectAlternativeName([_general(name) for name in names])
            builder = builder.add_extension(found, critical=False)
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def replace(file: Path, content: bytes, mode: int = 0o644) -> None:
    new = file.with_name(file.name + ".new")
    new.write_bytes(content)
    new.chmod(mode)
    os.replace(new, file)
