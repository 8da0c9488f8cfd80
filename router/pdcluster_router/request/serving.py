"""What dispatch needs of the models behind the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pdcluster_router.core.generation import Force, ModelInfo
from pdcluster_router.core.job import HashChain

if TYPE_CHECKING:
    from pdcluster.api.text.model_text import TextModel


class ServedModels(Protocol):
    def models(self) -> Sequence[ModelInfo]:
        """Of each name the newest version."""
        ...

    def versions(self, model: str) -> Sequence[ModelInfo]:
        """All versions of a model that nodes have, the newest first; empty for an unknown name."""
        ...

    def choose_version(self, model: str, request: str, mode: Force | None) -> ModelInfo:
        """The version for an API request that names none, by `cluster.versions`. Safe in any thread.

        Raises UnknownModel or Unavailable.
        """
        ...

    def successor(self, model: str, digest: str, mode: Force | None) -> ModelInfo | None:
        """The version that a request of this digest may go on with; None while its own has nodes, or none else has."""
        ...

    async def first(self) -> None:
        """Return once a model is served."""
        ...

    def text(self, model: str) -> TextModel: ...

    def refusal(self) -> str | None: ...

    def chain(self, model: str, salt: bytes, weights: str | None = None) -> HashChain:
        """How the model's nodes name KV for this salt, under weights of this digest; None: of the newest version.

        Raises UnknownModel or Unavailable.
        """
        ...
