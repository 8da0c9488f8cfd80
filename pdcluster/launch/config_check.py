"""What `config check` finds beyond the keys: policies, and files that settings name, read as processes read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pdcluster.api.text.model_text import TextModel
from pdcluster.checkpoint.hub import is_repository
from pdcluster.checkpoint.inspection import check_model_files
from pdcluster.core.errors import PdclusterError
from pdcluster.settings.config import (
    BootstrapConfig,
    LoadedSection,
    NodeConfig,
    RouterConfig,
    UpConfig,
    check_folder,
    whole_pair,
)
from pdcluster.settings.tls_files import read_certificate
from pdcluster_router.core.tenants import read_tenants
from pdcluster_router.policy.registry import make_policy


def problems(loaded: LoadedSection[Any]) -> Iterator[str]:
    """All that a process with this section would refuse when it starts, without the network."""
    for check in _checks(loaded.config):
        try:
            check()
        except PdclusterError as error:
            yield str(error)


def _checks(config: object) -> Iterator[Callable[[], object]]:
    if isinstance(config, BootstrapConfig):
        yield config.security.cluster_keys
    elif isinstance(config, NodeConfig):
        yield config.security.cluster_keys
        yield lambda: _check_model(config.model)
    elif isinstance(config, RouterConfig):
        yield config.security.cluster_keys
        yield config.admin_token
        yield config.scaler_token
        if (files := config.tls_files) is not None:
            yield lambda: read_certificate(*files)
        yield lambda: read_tenants(config.tenants, config.workers)
        yield lambda: make_policy(config.policy)
        if config.shadow_policy is not None:
            shadow = config.shadow_policy
            yield lambda: make_policy(shadow)
        if config.tokenizer is not None:
            tokenizer = config.tokenizer
            yield lambda: TextModel.from_dir(tokenizer)
    elif isinstance(config, UpConfig):
        yield lambda: _check_model(config.model)
        if (pair := whole_pair("up", config.tls_cert, config.tls_key)) is not None:
            yield lambda: read_certificate(*pair)
        yield lambda: check_folder("up.targets", config.targets)


def _check_model(model: Path | None) -> None:
    """A hub's name is not looked up."""
    if model is not None and not is_repository(model):
        check_model_files(model, needs_tokenizer=False)
