"""What dispatch needs of the models behind the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pdcluster_router.core.generation import ModelInfo
from pdcluster_router.core.job import HashChain

if TYPE_CHECKING:
    from pdcluster.api.text.model_text import TextModel


class ServedModels(Protocol):
    def models(self) -> Sequence[ModelInfo]: ...

    async def first(self) -> None:
        """Return once a model is served."""
        ...

    def text(self, model: str) -> TextModel: ...

    def refusal(self) -> str | None: ...

    def chain(self, model: str, salt: bytes) -> HashChain:
        """How the model's nodes name KV for this salt. Raises UnknownModel or Unavailable."""
        ...
