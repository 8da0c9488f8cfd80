"""How a chaos cluster is reached and guarded: open, or with a key between its processes, TLS and a tenant's key at its
edges."""

from __future__ import annotations

import secrets
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

API_KEY = "sk-chaos-0123456789"


class Edges:
    """Without any of it."""

    scheme = "http"

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def flags(self, who: str) -> tuple[str, ...]:
        """Of a command: bootstrap, node or router."""
        return ()

    def client(self, **settings: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(trust_env=False, headers=self.headers, **settings)

    def channel(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of calls by gRPC."""
        return tuple(self.headers.items())


OPEN = Edges()


class GuardedEdges(Edges):
    """With all of it. Files lie in `folder`."""

    scheme = "https"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.key_file = _secret(folder / "cluster.key", secrets.token_hex(32))
        self._tenants = _secret(folder / "tenants.toml", f'[chaos]\nkeys = ["{API_KEY}"]\n')
        self.certificate, self._private_key = write_certificate(folder)
        self.headers = {"authorization": f"Bearer {API_KEY}"}

    def flags(self, who: str) -> tuple[str, ...]:
        shared = (f"--set={who}.security.cluster_key_file={self.key_file}",)
        if who != "router":
            return shared
        return (
            *shared, "--tenants", str(self._tenants), "--tls-cert", str(self.certificate), "--tls-key",
            str(self._private_key),
        )  # fmt: skip

    def client(self, **settings: Any) -> httpx.AsyncClient:
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        return httpx.AsyncClient(trust_env=False, headers=self.headers, verify=trusted, **settings)

    def channel(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.certificate.read_bytes()))


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that signs itself, of 127.0.0.1 and localhost, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pdcluster tests")])
    hosts = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(hosts, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key_text = key.private_bytes(pem, pkcs8, serialization.NoEncryption()).decode()
    cert_file = folder / "tls.crt"
    cert_file.write_bytes(certificate.public_bytes(pem))
    return cert_file, _secret(folder / "tls.key", key_text)


def _secret(path: Path, text: str) -> Path:
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path
