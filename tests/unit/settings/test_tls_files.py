"""A certificate and its key: read as one, and refused with the file's name and the way out."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import DAY, NAME, Authority, pem, replace
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from pdcluster.core.errors import ConfigError
from pdcluster.settings.config import RouterConfig, UpConfig
from pdcluster.settings.tls_files import read_certificate
from pdcluster.settings.tls_trust import client_context, read_roots


class Pair:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.cert, self.key = folder / "tls.crt", folder / "tls.key"
        self.authority.write(self.cert, self.key)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.mark.parametrize("kind", ["ec", "p384", "rsa"])
def test_a_pair_is_read(pair: Pair, kind: str) -> None:
    private: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey = {
        "ec": lambda: ec.generate_private_key(ec.SECP256R1()),
        "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
    }[kind]()
    pair.authority.write(pair.cert, pair.key, NAME, "10.0.0.1", private=private)
    found = read_certificate(pair.cert, pair.key)
    assert found.name == NAME and found.chain == pair.cert.read_bytes() and not found.is_over
    assert found.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert "PRIVATE" not in repr(found)


@pytest.mark.parametrize(
    ("names", "name"), [(("*.example.com",), "any.example.com"), (("10.0.0.1",), "10.0.0.1"), (("a", "b"), "a")]
)
def test_clients_of_this_machine_learn_a_name(pair: Pair, names: tuple[str, ...], name: str) -> None:
    pair.authority.write(pair.cert, pair.key, *names)
    assert read_certificate(pair.cert, pair.key).name == name


def other_key(pair: Pair) -> None:
    replace(pair.key, pem(ec.generate_private_key(ec.SECP256R1())), 0o600)


def encrypted(pair: Pair) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    locked = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
    replace(pair.key, locked, 0o600)


def swapped(pair: Pair) -> None:
    cert, key = pair.cert.read_bytes(), pair.key.read_bytes()
    replace(pair.cert, key)
    replace(pair.key, cert, 0o600)


def sm2_key() -> bytes:
    """OpenSSL knows its curve, and the library does not."""
    made = subprocess.run(
        ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:SM2"], capture_output=True, check=True
    )
    return made.stdout


REFUSED: list[tuple[Callable[[Pair], object], str, str]] = [
    (other_key, "tls.key is not the key of the certificate", "made together"),
    (encrypted, "tls.key is encrypted", "openssl pkey"),
    (swapped, "tls.crt has no certificate in PEM", "BEGIN CERTIFICATE"),
    (lambda pair: replace(pair.key, b"", 0o600), "tls.key has no private key", "check the path"),
    (
        lambda pair: replace(pair.cert, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        "tls.crt",
        "PEM",
    ),
    (lambda pair: pair.key.unlink(), "tls.key cannot be read", "check the path"),
    (lambda pair: pair.cert.unlink(), "tls.crt cannot be read", "check the path"),
    (lambda pair: pair.key.chmod(0o604), "tls.key may be read or written by everybody", "chmod o-rw"),
    (lambda pair: pair.key.chmod(0o602), "tls.key may be read or written by everybody", "chmod o-rw"),
    (lambda pair: pair.cert.chmod(0o646), "tls.crt may be written by everybody", "chmod o-w"),
    (
        lambda pair: pair.authority.write(pair.cert, pair.key, private=ed25519.Ed25519PrivateKey.generate()),
        "tls.key is of a kind",
        "ECDSA with P-256",
    ),
    (
        lambda pair: pair.authority.write(pair.cert, pair.key, private=rsa.generate_private_key(65537, 1024)),
        "tls.key is of a kind",
        "RSA of at least 2048",
    ),
    (lambda pair: replace(pair.key, sm2_key(), 0o600), "is of a kind that is not known here", "ECDSA with P-256"),
    (
        lambda pair: pair.authority.write(pair.cert, pair.key, usage=ExtendedKeyUsageOID.CLIENT_AUTH),
        "tls.crt is not for servers",
        "serverAuth",
    ),
]


@pytest.mark.parametrize(("spoil", "what", "way_out"), REFUSED)
def test_what_cannot_be_shown_is_refused(pair: Pair, spoil: Callable[[Pair], object], what: str, way_out: str) -> None:
    secret = pair.key.read_text().splitlines()[1]
    spoil(pair)
    with pytest.raises(ConfigError) as refused:
        read_certificate(pair.cert, pair.key)
    assert what in str(refused.value) and way_out in str(refused.value) and secret not in str(refused.value)


def test_a_group_may_read_the_key(pair: Pair) -> None:
    pair.key.chmod(0o440)
    assert read_certificate(pair.cert, pair.key).name == NAME


def test_one_that_is_over_is_known_to_be(pair: Pair) -> None:
    pair.authority.write(pair.cert, pair.key, lasts=-DAY)
    assert read_certificate(pair.cert, pair.key).is_over


@pytest.mark.parametrize("section", [RouterConfig, UpConfig])
def test_half_a_pair_is_refused(pair: Pair, section: type[RouterConfig | UpConfig]) -> None:
    for given, lacks in (("tls_cert", "--tls-key"), ("tls_key", "--tls-cert")):
        with pytest.raises(ConfigError, match=f"neither is of use alone; set it, too, with {lacks} FILE"):
            section(**{given: pair.cert})
    assert RouterConfig().tls_files is None
    assert RouterConfig(tls_cert=pair.cert, tls_key=pair.key).tls_files == (pair.cert, pair.key)


def test_what_is_trusted_is_refused_where_it_is_none(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no certificate in PEM"):
        read_roots(pair.key)
    with pytest.raises(ConfigError, match="cannot be read"):
        client_context(tmp_path / "none")
    broken = tmp_path / "broken"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        client_context(broken)


def test_descriptors_are_given_back(pair: Pair) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        read_certificate(pair.cert, pair.key)
    assert len(os.listdir("/proc/self/fd")) == before
