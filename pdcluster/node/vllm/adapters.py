"""The LoRA adapters of a node: what operators load and unload, and which of them a request uses.

Owned by the node loop's thread. Every load has a number of its own. So an adapter that is loaded again under its name
is another one to the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pdcluster.bootstrap.card import Adapter, NodeCard, check_adapters
from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import MODEL_PARAM, AdapterManaged, ManageAdapter, Work
from pdcluster.node.control import NodeLinks
from pdcluster.node.vllm.engine.interface import AdapterLoaded, ServingEngine
from pdcluster.transfer.backends.base import Peer

logger = logging.getLogger(__name__)

# The number of no adapter that the engine has.
GONE = -1


@dataclass(frozen=True, slots=True)
class NumberedAdapter:
    """An adapter that the engine has. model: digest of what its name means (NodeCard.model_digest)."""

    adapter: Adapter
    number: int
    model: str


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A load that the engine has not answered."""

    router: Peer
    message: ManageAdapter


class AdapterBook:
    def __init__(self, engine: ServingEngine, links: NodeLinks) -> None:
        self._engine, self._links = engine, links
        self._card: NodeCard | None = None
        self._by_name: dict[str, NumberedAdapter] = {}
        self._loads: dict[int, AdapterLoad] = {}
        self._number = 0

    def introduce(self, card: NodeCard, numbers: Mapping[str, int]) -> None:
        """The node's card as it registers. numbers: of its adapters, which the engine loaded at its start."""
        self._card = card
        self._number = max(numbers.values(), default=0)
        for adapter in card.adapters:
            self._by_name[adapter.name] = NumberedAdapter(
                adapter, numbers[adapter.name], card.model_digest(adapter.name)
            )

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def refusal_of_weights(self) -> str:
        """Why the node's weights cannot change now; "": they can. An adapter is made for the weights below it, and vLLM
        unloads all with them.
        """
        # Also called by the thread that checks files.
        names = sorted({*list(self._by_name), *(load.message.name for load in list(self._loads.values()))})
        if not names:
            return ""
        return (
            f"node {self._links.me.node} has the LoRA adapters {', '.join(names)}, made for the weights that serve; "
            "unload them with pdctl adapter unload, and load them again afterwards"
        )

    # ------------------------------------------------------------ requests

    def check(self, work: Work) -> None:
        """Raises BadRequest where the work's adapter is not what its model's digest names."""
        known = self._by_name.get(work.adapter)
        if work.adapter and (known is None or work.model != known.model):
            raise BadRequest(f"this node does not have the adapter {work.adapter} of the request", MODEL_PARAM)
        if not work.adapter and any(work.model == each.model for each in self._by_name.values()):
            raise BadRequest("the request names no adapter, but the model of one", MODEL_PARAM)

    def number_of(self, work: Work) -> int:
        """Of the work's adapter, for the engine: 0 for none, GONE where it was unloaded meanwhile."""
        known = self._by_name.get(work.adapter)
        if not work.adapter:
            return 0
        return known.number if known is not None and known.model == work.model else GONE

    # ------------------------------------------------------------ operators

    def manage(self, router: Peer, message: ManageAdapter) -> None:
        if message.path is None:
            self._answer(router, message, error=self._unload(message.name))
        elif (why := self._refusal(message.name)) is not None:
            self._answer(router, message, error=why)
        else:
            self._load(router, message, message.path)

    def _refusal(self, name: str) -> str | None:
        """Why an adapter of this name cannot be loaded, whatever its files."""
        assert self._card is not None
        if self._links.standing.is_switching:
            return f"node {self._links.me.node} goes over to other weights; load the adapter {name} afterwards"
        if any(load.message.name == name for load in self._loads.values()):
            return f"the adapter {name} is being loaded; ask again"
        names = {name, *self._by_name, *(load.message.name for load in self._loads.values())}
        models = self._card.model, *self._card.model_aliases
        try:
            check_adapters([Adapter(each, "-") for each in names], models)
        except BadRequest as error:
            return str(error)
        return None

    def _load(self, router: Peer, message: ManageAdapter, path: str) -> None:
        known = self._by_name.get(message.name)
        self._number += 1
        self._loads[self._number] = AdapterLoad(router, message)
        self._engine.load_adapter(self._number, message.name, path, "" if known is None else known.adapter.digest)

    def _unload(self, name: str) -> str:
        """Returns why not, "" where the node does not have it any more."""
        if any(load.message.name == name for load in self._loads.values()):
            return f"the adapter {name} is being loaded; unload it afterwards"
        known = self._by_name.pop(name, None)
        if known is not None:
            logger.info("adapter %s is unloaded", name)
            self._publish()
            self._engine.unload_adapter(known.number)
        return ""

    def on_loaded(self, news: AdapterLoaded) -> None:
        """The engine answered a load."""
        load = self._loads.pop(news.number)
        name = load.message.name
        if not news.error and name not in self._by_name:
            assert self._card is not None
            adapter = Adapter(name, news.digest)
            model = replace(self._card, adapters=(adapter,)).model_digest(name)
            self._by_name[name] = NumberedAdapter(adapter, news.number, model)
            logger.info("adapter %s (%s) is loaded from %s", name, news.digest, load.message.path)
            self._publish()
        self._answer(load.router, load.message, error=news.error, digest=news.digest)

    def _answer(self, router: Peer, message: ManageAdapter, *, error: str, digest: str = "") -> None:
        if error:
            logger.warning("adapter %s: %s", message.name, error)
        self._links.outbox.message(router, AdapterManaged(message.number, error[:1000], digest))

    def _publish(self) -> None:
        """Change the card, for routers, and what the node takes."""
        assert self._card is not None
        self._card = replace(self._card, adapters=_sorted(each.adapter for each in self._by_name.values()))
        self._links.acceptance.models = frozenset(self._card.model_digests)
        self._links.neighbours.set_adapters(self._card.adapters)


def _sorted(adapters: Iterable[Adapter]) -> tuple[Adapter, ...]:
    return tuple(sorted(adapters, key=lambda adapter: adapter.name))
