"""Models behind the router: their cards, tokenizers and chat templates.

A model is served once its text files are loaded, from a directory or from a node. Fetched files must have the digest
that the node's card names. What a name means follows the cards:

1. A name keeps its model while a node of it is there to stay. Otherwise nodes under that name that stay decide.
2. While no node is known, all names keep their models: requests wait for nodes to return.
3. A name that no card carries is gone once other cards are there.
4. Nodes that differ in weights alone have versions of one model. Each version that a known card has is kept, the newest
   epoch first; of equal epochs the one that was known first.
5. The longest request of a version is that of its largest node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec

from pdcluster.api.text.model_text import TextModel
from pdcluster.bootstrap.card import NodeCard
from pdcluster.checkpoint.text_files import TEXT_FILES, files_digest, read_text_files
from pdcluster.core.errors import ModelError, NodeLost, Unavailable, UnknownModel
from pdcluster.core.messages import FileChunk
from pdcluster.kv.hashing import chain_root
from pdcluster_router.cluster.versions import RolesByDigest, Version, VersionPlan, plan_of
from pdcluster_router.core.generation import Force, ModelInfo
from pdcluster_router.core.job import HashChain

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 10.0
MAX_FILE_BYTES = 256 << 20
RETRY_S = 0.5


class CardSource(Protocol):
    """What this module needs of the cluster."""

    def cards(self) -> Iterable[NodeCard]: ...

    def known_cards(self) -> Sequence[tuple[NodeCard, bool]]:
        """Also of nodes without a link; with each, whether it is there to stay."""
        ...

    def refusal(self) -> str | None: ...

    @property
    def version(self) -> int: ...

    @property
    def cards_version(self) -> int: ...

    @property
    def roles_version(self) -> int:
        """Counts changes of what `roles_taking` says."""
        ...

    def roles_taking(self) -> RolesByDigest: ...

    async def wait_for_change(self, seen: int) -> None: ...

    async def fetch_file(self, incarnation: str, name: str, offset: int, timeout_s: float) -> FileChunk: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a name means. card: of a node of the model. versions: of its weights, the newest first; never empty."""

    text: TextModel
    card: NodeCard
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """roles_version: of the nodes that it was made from."""

    plan: VersionPlan
    roles_version: int


class ModelRegistry:
    """The models that nodes serve. Implements `serving.ServedModels`. Owned by the router's event loop."""

    def __init__(
        self,
        nodes: CardSource,
        tokenizer: Path | None,
        tool_format: str = "auto",
        reasoning: str = "auto",
        user_control_tokens: str = "parse",
    ) -> None:
        """tool_format, reasoning, user_control_tokens: see TextModel."""
        self._nodes = nodes
        self._tokenizer = tokenizer
        self._marks = tool_format, reasoning, user_control_tokens
        self._loaded: dict[str, LoadedModel] = {}
        # Why the text files of known cards can never be read, by name and digest.
        self._refused: dict[tuple[str, str], str] = {}
        self._infos: tuple[ModelInfo, ...] = ()
        # All versions by name. Replaced as a whole: threads that prepare requests read it, and the plans.
        self._versions: dict[str, tuple[ModelInfo, ...]] = {}
        # By name, and whether the mode is local.
        self._plans: dict[tuple[str, bool], KeptPlan] = {}
        self._has_one = asyncio.Event()
        # The version of the cards that was followed.
        self._followed = -1

    # ------------------------------------------------------------ what dispatch and HTTP ask

    def models(self) -> Sequence[ModelInfo]:
        return self._infos

    async def first(self) -> None:
        await self._has_one.wait()

    def text(self, model: str) -> TextModel:
        return self._find(model).text

    def versions(self, model: str) -> Sequence[ModelInfo]:
        return self._versions.get(model, ())

    def choose_version(self, model: str, request: str, mode: Force | None) -> ModelInfo:
        versions = self._versions.get(model)
        if versions is not None and len(versions) == 1:
            return versions[0]
        return self._plan(model, mode).choose(request)

    def successor(self, model: str, digest: str, mode: Force | None) -> ModelInfo | None:
        return self._plan(model, mode).successor(digest) if model in self._loaded else None

    def _plan(self, model: str, mode: Force | None) -> VersionPlan:
        key, plans, roles_version = (model, mode == "local"), self._plans, self._nodes.roles_version
        kept = plans.get(key)
        if kept is None or kept.roles_version != roles_version:
            found = plan_of(self._find(model).versions, self._nodes.roles_taking(), is_local=key[1])
            kept = plans[key] = KeptPlan(found, roles_version)
        return kept.plan

    def chain(self, model: str, salt: bytes, weights: str | None = None) -> HashChain:
        """Without a node, the chain of the last one: its requests may wait for the node to return."""
        found = self._find(model)
        card, adapter = found.card, found.card.adapter(model)
        identity = "" if adapter is None else adapter.identity
        weights = found.versions[0].info.weights.digest if weights is None else weights
        return _chain(card.hash_block_tokens, salt, weights, identity)

    def _find(self, model: str) -> LoadedModel:
        if model in self._loaded:
            return self._loaded[model]
        if not self._loaded:
            raise Unavailable("no model is served yet; wait until /ready answers 200")
        raise UnknownModel(f"the model {model!r} does not exist here; use one of: {', '.join(self._loaded)}", "model")

    def refusal(self) -> str | None:
        """Why no model can be served while the nodes stay the same; None where one is or may be."""
        cards = list(map(_text_of, self._nodes.cards()))
        if not cards and (refusal := self._nodes.refusal()) is not None:
            return refusal
        if self._loaded or not cards or not all(card in self._refused for card in cards):
            return None
        return self._refused[cards[0]]

    # ------------------------------------------------------------ following the cards

    async def keep_loaded(self) -> None:
        """Load the text of every new model and forget old ones, until cancelled.

        A node that leaves meanwhile is no error: the next round tries another node.
        """
        while True:
            seen = self._nodes.version
            if await self._follow():
                await self._nodes.wait_for_change(seen)

    async def _follow(self) -> bool:
        """Bring all names up to the cards. False where a retry may help."""
        version = self._nodes.cards_version
        if version == self._followed:
            return True
        named, is_settled = self._named(), True
        for name, cards in named.items():
            loaded = self._loaded.get(name)
            if loaded is None or not _is_same_model(loaded.card, cards[0], name):
                is_settled &= await self._load(name, cards)
        self._settle(named)
        if is_settled:
            self._followed = version
        return is_settled

    def _named(self) -> dict[str, list[NodeCard]]:
        """The cards of the model that each name now means, by rule 1."""
        found: dict[str, dict[str, list[tuple[NodeCard, bool]]]] = {}
        for card, stays in self._nodes.known_cards():
            for name in card.models:
                found.setdefault(name, {}).setdefault(card.text_digest(name), []).append((card, stays))
        return {name: [card for card, _ in self._meant(name, models)] for name, models in found.items()}

    def _meant(self, name: str, models: Mapping[str, list[tuple[NodeCard, bool]]]) -> list[tuple[NodeCard, bool]]:
        loaded = self._loaded.get(name)
        own = "" if loaded is None else loaded.card.text_digest(name)
        return min(models.items(), key=lambda model: (not any(stays for _, stays in model[1]), model[0] != own))[1]

    def _settle(self, named: Mapping[str, Sequence[NodeCard]]) -> None:
        """Rules 2 to 5. A model whose text can never be read is not served."""
        if named:
            for name in [
                name for name in self._loaded if name not in named or _text_of(named[name][0]) in self._refused
            ]:
                logger.info("model %s is not served any more", name)
                del self._loaded[name]
            known = {_text_of(card) for card, _ in self._nodes.known_cards()}
            self._refused = {text: why for text, why in self._refused.items() if text in known}
        for name, loaded in self._loaded.items():
            cards = named.get(name, ())
            if cards and _is_same_model(loaded.card, cards[0], name):
                self._loaded[name] = LoadedModel(loaded.text, loaded.card, _versions(name, cards, loaded.versions))
        self._publish()

    def _publish(self) -> None:
        versions = {name: tuple(each.info for each in loaded.versions) for name, loaded in self._loaded.items()}
        for name, infos in versions.items():
            for info in infos:
                if len(infos) > 1 and info not in self._versions.get(name, ()):
                    logger.info("model %s is served with weights %s, too", name, info.weights)
        self._infos = tuple(infos[0] for infos in versions.values())
        self._versions, self._plans = versions, {}
        if self._infos:
            self._has_one.set()
        else:
            self._has_one.clear()

    # ------------------------------------------------------------ loading

    async def _load(self, name: str, cards: Sequence[NodeCard]) -> bool:
        """Load the text of a name from one of these nodes. False where a retry may help; True also where none is
        linked, or the files themselves are wrong.
        """
        linked = {card.incarnation for card in self._nodes.cards()}
        for card in [card for card in cards if card.incarnation in linked]:
            text = self._same_text(card)
            if text is None and _text_of(card) not in self._refused:
                text = await self._fetched_text(card)
            if _text_of(card) in self._refused:
                return True
            if text is not None:
                self._loaded[name] = LoadedModel(text, card, _versions(name, cards, ()))
                self._publish()
                logger.info("serving model %s", name)
                return True
        return not linked.intersection(card.incarnation for card in cards)

    def _same_text(self, card: NodeCard) -> TextModel | None:
        return next(
            (each.text for each in self._loaded.values() if each.card.tokenizer_hash == card.tokenizer_hash), None
        )

    async def _fetched_text(self, card: NodeCard) -> TextModel | None:
        """The text of a card; None where it could not be had, now or ever."""
        try:
            files = {} if self._tokenizer is not None else await self._files(card)
            if files and files_digest(files) != card.tokenizer_hash:
                raise ModelError(
                    f"the files of node {card.node} have digest {files_digest(files)}, its card says "
                    f"{card.tokenizer_hash}"
                )
        except (NodeLost, TimeoutError, ModelError, OSError) as error:
            logger.warning("the tokenizer of %s cannot be loaded from %s: %s", card.model, card.node, error)
            await asyncio.sleep(RETRY_S)
            return None
        try:
            return await asyncio.to_thread(self._read, files, card.vocab_size)
        except ModelError as error:  # the files themselves are wrong, on every node
            self._refused[_text_of(card)] = f"the model {card.model} cannot be served: {error}"
            logger.error(self._refused[_text_of(card)])
            return None

    def _read(self, files: dict[str, bytes], vocab_size: int) -> TextModel:
        """The model's text. Without `--tokenizer DIR` it comes from `files`, fetched from a node.

        vocab_size: of the node's model. A directory without a config.json does not say it.
        """
        if self._tokenizer is not None:
            said = msgspec.json.encode({"vocab_size": vocab_size})
            files = {"config.json": said, **read_text_files(self._tokenizer)}
        return TextModel(files, *self._marks)

    async def _files(self, card: NodeCard) -> dict[str, bytes]:
        files = {name: await self._fetch(card.incarnation, name) for name in TEXT_FILES}
        return {name: data for name, data in files.items() if data}

    async def _fetch(self, incarnation: str, name: str) -> bytes:
        """Fetch a whole file in pieces; b"" when the node has none. Sizes are checked before a piece is added."""
        data = bytearray()
        while True:
            chunk = await self._nodes.fetch_file(incarnation, name, len(data), FETCH_TIMEOUT_S)
            if (
                chunk.total_bytes > MAX_FILE_BYTES
                or chunk.offset != len(data)
                or len(data) + len(chunk.data) > chunk.total_bytes
            ):
                raise ModelError(
                    f"{name}: the node sent {len(chunk.data)} bytes at {chunk.offset} of {chunk.total_bytes}; pass "
                    "--tokenizer DIR instead"
                )
            data += chunk.data
            if len(data) == chunk.total_bytes:
                return bytes(data)
            if not chunk.data:
                raise ModelError(
                    f"{name}: the node stopped at {len(data)} of {chunk.total_bytes} bytes; pass --tokenizer DIR "
                    "instead"
                )


def _is_same_model(one: NodeCard, other: NodeCard, name: str) -> bool:
    """Whether a name means the same on both nodes, but for weights."""
    return one.text_digest(name) == other.text_digest(name)


def _versions(name: str, cards: Sequence[NodeCard], former: Sequence[Version]) -> tuple[Version, ...]:
    """The versions of a model that these cards have, by rule 4. former: those known before, for their order and age."""
    known = {each.info.digest: each.info for each in former}
    by_digest: dict[str, list[NodeCard]] = {digest: [] for digest in known}
    for card in cards:
        by_digest.setdefault(card.model_digest(name), []).append(card)
    found = [_version(name, of, known.get(digest)) for digest, of in by_digest.items() if of]
    return tuple(sorted(found, key=lambda version: -version.info.weights.epoch))


def _version(name: str, cards: Sequence[NodeCard], former: ModelInfo | None) -> Version:
    """cards: of one digest. Its label, epoch and share are those of its newest card, and of these the least share."""
    newest = max(cards, key=lambda card: card.weights_epoch)
    info = ModelInfo(
        name,
        int(time.time()) if former is None else former.created,
        max(card.max_len for card in cards),
        newest.vocab_size,
        newest.eos_ids,
        newest.model_digest(name),
        embeds=newest.capabilities.embeds,
        parent="" if newest.adapter(name) is None else newest.model,
        weights=newest.weights_version,
        text=newest.text_digest(name),
    )
    return Version(info, min(card.weights_share for card in cards if card.weights_epoch == newest.weights_epoch))


def _text_of(card: NodeCard) -> tuple[str, str]:
    """What is refused of a card whose text cannot be read."""
    return card.model, card.tokenizer_hash


@lru_cache(maxsize=1024)
def _chain(block_tokens: int, salt: bytes, weights: str, adapter: str) -> HashChain:
    """The hash chain for a salt. Every request needs one, mostly the same."""
    root = chain_root(block_tokens=block_tokens, salt=salt, adapter=adapter, weights=weights)
    return HashChain(root, block_tokens)
