"""Files of secrets: read whole, never shown, and refused where anybody may change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster.core.errors import ConfigError
from pdcluster.settings import secret_file
from pdcluster.settings.config import RouterConfig
from pdcluster.settings.secret_file import read_secret_file
from pdcluster.settings.security import SecurityConfig
from pdcluster_router.core.tenants import read_tenants

SECRET = "correct horse battery"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "secret"
    found.write_text(SECRET)
    return found


def test_a_secret_file_that_the_world_may_write_is_refused(file: Path) -> None:
    file.chmod(0o602)
    for read in (
        SecurityConfig(cluster_key_file=file).cluster_keys,
        RouterConfig(admin_token_file=file).admin_token,
        lambda: read_tenants(file),
    ):
        with pytest.raises(ConfigError, match="chmod o-w") as refusal:
            read()
        assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o644])
def test_others_are_read(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert read_secret_file("key", file) == SECRET.encode()


def test_devices_have_no_mode_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_file, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        read_secret_file("key", Path("/dev/zero"))
