"""Certificates for calls of the bootstrap, made from the cluster's keys. No file is handed out.

Each key gives a root: scrypt makes a private key of P-256 from it. A process makes a leaf at its start, signed by the
root of its first key. The leaf names the process in a URI: `pdcluster://KIND/NAME`. It trusts the roots of all its
keys, so keys change by rolling restarts. Leaves are valid from 2000 to 2100, so clocks play no part.

Whoever has a key can make any leaf. This keeps strangers out, and members from taking each other's names by mistake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, Literal
from urllib.parse import quote, unquote

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Kind = Literal["node", "router", "bootstrap"]

SCHEME: Final = "pdcluster"
# Every bootstrap's leaf has this name, whatever its address is.
BOOTSTRAP_HOST: Final = "bootstrap.pdcluster"
VALID_FROM: Final = datetime(2000, 1, 1, tzinfo=UTC)
VALID_UNTIL: Final = datetime(2100, 1, 1, tzinfo=UTC)
_SALT: Final = b"pdcluster bootstrap root"
_SCRYPT: Final[Mapping[str, int]] = {"n": 1 << 14, "r": 8, "p": 1}
_CURVE: Final = ec.SECP256R1()


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process of the cluster is."""

    kind: Kind
    name: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}://{self.kind}/{quote(self.name, safe='')}"


@dataclass(frozen=True, slots=True)
class Root:
    """What a cluster key signs with, and what others know of it."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


class BootstrapCredentials:
    """Of one process, for as long as it runs."""

    def __init__(self, keys: Sequence[bytes], identity: Identity) -> None:
        """keys: the cluster's, at least one. The first signs, all are trusted."""
        roots = [root_of(key) for key in keys]
        leaf_key = ec.generate_private_key(_CURVE)
        leaf = _leaf(roots[0], leaf_key, identity)
        self._key = leaf_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._leaf = leaf.public_bytes(Encoding.PEM)
        self._trusted = b"".join(root.certificate.public_bytes(Encoding.PEM) for root in roots)

    def of_server(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self._key, self._leaf)], root_certificates=self._trusted, require_client_auth=True
        )

    def of_client(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self._trusted, self._key, self._leaf)


def bootstrap_credentials(keys: Sequence[bytes], identity: Identity) -> BootstrapCredentials | None:
    """None without a key."""
    return BootstrapCredentials(keys, identity) if keys else None


# Of a channel with such credentials.
NAME_OPTIONS: Final = (("grpc.ssl_target_name_override", BOOTSTRAP_HOST),)


def caller_of(auth_context: Mapping[str, Sequence[bytes]]) -> Identity | None:
    """Who a call is from, by `ServicerContext.auth_context`. None where it carries no leaf of ours."""
    for name in auth_context.get("x509_subject_alternative_name", ()):
        scheme, _, rest = name.decode("ascii", "replace").partition("://")
        kind, _, quoted = rest.partition("/")
        if scheme == SCHEME and kind in ("node", "router", "bootstrap"):
            return Identity(kind, unquote(quoted))  # type: ignore[arg-type]
    return None


@lru_cache(maxsize=8)
def root_of(key: bytes) -> Root:
    """The same key pair wherever it is made. About 50 ms."""
    secret = int.from_bytes(hashlib.scrypt(key, salt=_SALT, dklen=48, maxmem=64 << 20, **_SCRYPT))
    # 48 bytes for an order of 32: no private value is likelier than another.
    private = ec.derive_private_key(secret % (_ORDER - 1) + 1, _CURVE)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pdcluster {_short(private)}")])
    builder = _builder(name, name, private.public_key(), x509.BasicConstraints(ca=True, path_length=0))
    return Root(private, builder.serial_number(1).sign(private, hashes.SHA256()))


# Of P-256 (FIPS 186-4, D.1.2.3).
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def _short(private: ec.EllipticCurvePrivateKey) -> str:
    """Names a root, so that roots of several keys are told apart."""
    return x509.SubjectKeyIdentifier.from_public_key(private.public_key()).digest.hex()[:16]


def _leaf(root: Root, key: ec.EllipticCurvePrivateKey, identity: Identity) -> x509.Certificate:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    usage = ExtendedKeyUsageOID.CLIENT_AUTH
    if identity.kind == "bootstrap":
        names.append(x509.DNSName(BOOTSTRAP_HOST))
        usage = ExtendedKeyUsageOID.SERVER_AUTH
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pdcluster {identity.kind}")])
    builder = _builder(
        subject, root.certificate.subject, key.public_key(), x509.BasicConstraints(ca=False, path_length=None)
    )
    return (
        builder.serial_number(x509.random_serial_number())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .sign(root.key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, constraints: x509.BasicConstraints
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
        .add_extension(constraints, critical=True)
    )
