"""A certificate and its key as files, checked as one: a listener shows no certificate that it cannot prove."""

from __future__ import annotations

import os
import ssl
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdcluster.core.errors import ConfigError
from pdcluster.settings.secret_file import read_private_file, read_secret_file

CERT, KEY = "TLS certificate", "TLS key"
MIN_RSA_BITS = 2048
# gRPC's library takes no others.
CURVES = ("secp256r1", "secp384r1")
# What the library raises beside ValueError, for kinds of keys and parts of certificates.
UNREADABLE = (UnsupportedAlgorithm, x509.DuplicateExtension, x509.UnsupportedGeneralNameType)
# In place of a certificate's *, where one name is needed.
ANY_LABEL = "any"


@dataclass(frozen=True, slots=True)
class TlsCertificate:
    """A certificate with its key, ready to be shown.

    chain, key: PEM; the certificate itself is the chain's first.
    name: one that it is valid for.
    context: for listeners of HTTP.
    """

    chain: bytes
    key: bytes = field(repr=False)
    name: str
    not_after: datetime
    context: ssl.SSLContext = field(repr=False)

    @property
    def is_over(self) -> bool:
        return self.not_after < datetime.now(UTC)


def read_certificate(cert: Path, key: Path) -> TlsCertificate:
    """Read both. Raises ConfigError that names the file and the way out, and never shows the key."""
    try:
        return _read_certificate(cert, key)
    except UNREADABLE as error:
        raise ConfigError(
            f"{CERT} {cert} or {KEY} {key} is of a kind that is not known here: {error}; use ECDSA with P-256 or "
            "P-384, or RSA"
        ) from error


def _read_certificate(cert: Path, key: Path) -> TlsCertificate:
    chain, leaf = read_chain(cert)
    _check_usage(cert, leaf)
    found = read_private_file(KEY, key)
    _check_key(cert, leaf, key, found)
    try:
        context = _server_context(chain, found)
    except ssl.SSLError as error:
        raise ConfigError(f"{CERT} {cert} cannot be used: {error.reason or error}; issue another one") from error
    except OSError as error:  # such as out of descriptors
        raise ConfigError(f"{CERT} {cert} cannot be used now: {error.strerror or error}") from error
    return TlsCertificate(chain, found, name_of(leaf), leaf.not_valid_after_utc, context)


def read_chain(cert: Path) -> tuple[bytes, x509.Certificate]:
    """(PEM, the certificate itself). Raises ConfigError."""
    chain = read_secret_file(CERT, cert)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about oddities of certificates that serve all the same
            return chain, x509.load_pem_x509_certificates(chain)[0]
    except ValueError as error:
        raise ConfigError(
            f"{CERT} {cert} has no certificate in PEM that can be read; it begins with BEGIN CERTIFICATE, and the key "
            "is a file of its own"
        ) from error


def _check_usage(cert: Path, leaf: x509.Certificate) -> None:
    """Clients refuse a certificate that says what else it is for."""
    try:
        usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, ValueError):  # it does not say, or not so that it can be read
        return
    if ExtendedKeyUsageOID.SERVER_AUTH not in usages and ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in usages:
        raise ConfigError(f"{CERT} {cert} is not for servers, so clients would refuse it; issue one with serverAuth")


def _check_key(cert: Path, leaf: x509.Certificate, file: Path, pem: bytes) -> None:
    try:
        key = load_pem_private_key(pem, None)
    except TypeError as error:
        raise ConfigError(
            f"{KEY} {file} is encrypted, and nobody types its password here; write one without: openssl pkey -in "
            f"{file} -out NEW"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{KEY} {file} has no private key in PEM that can be read; check the path") from error
    if not _is_usable(key):
        raise ConfigError(
            f"{KEY} {file} is of a kind that not every client takes; use ECDSA with P-256 or P-384, or RSA of at least "
            f"{MIN_RSA_BITS} bits"
        )
    if _public(key.public_key()) != _public(leaf.public_key()):
        raise ConfigError(
            f"{KEY} {file} is not the key of the certificate {cert}, whose first certificate must be its own; give the "
            "two that were made together"
        )


def _is_usable(key: object) -> bool:
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.curve.name in CURVES
    return isinstance(key, rsa.RSAPrivateKey) and key.key_size >= MIN_RSA_BITS


def _public(key: CertificatePublicKeyTypes | PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _server_context(chain: bytes, key: bytes) -> ssl.SSLContext:
    """At least TLS 1.2, HTTP/1.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    with _in_memory(chain + b"\n" + key) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _in_memory(found: bytes) -> Iterator[str]:
    """A path of these bytes: the library reads files only, and the files may be others by now."""
    descriptor = os.memfd_create("pdcluster-tls", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as opened:
            opened.write(found)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def name_of(leaf: x509.Certificate) -> str:
    """A name or address that it is valid for; "" where it has none."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        common = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(common[0].value) if common else ""
    found: Sequence[object] = [*names.get_values_for_type(x509.DNSName), *names.get_values_for_type(x509.IPAddress)]
    return str(found[0]).replace("*", ANY_LABEL, 1) if found else ""
