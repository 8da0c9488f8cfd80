"""The part of fakes of models that chooses a version of the weights: the first one that `models` has of a name."""

from __future__ import annotations

from collections.abc import Sequence

from pdcluster.core.errors import UnknownModel
from pdcluster_router.core.generation import Force, ModelInfo


class FirstVersion:
    """Base of what implements `models`."""

    def models(self) -> Sequence[ModelInfo]:
        raise NotImplementedError

    def versions(self, model: str) -> Sequence[ModelInfo]:
        return tuple(info for info in self.models() if info.id == model)

    def choose_version(self, model: str, request: str, mode: Force | None) -> ModelInfo:
        versions = self.versions(model)
        if not versions:
            raise UnknownModel(model)
        return versions[0]

    def successor(self, model: str, digest: str, mode: Force | None) -> ModelInfo | None:
        return None
