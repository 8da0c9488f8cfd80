"""Models behind the router: their cards, tokenizers and chat templates.

A model is served once its text files are loaded, from a directory or from a node. Fetched files must have the digest
that the node's card names.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from pdcluster.api.text.model_text import TextModel
from pdcluster.bootstrap.card import NodeCard
from pdcluster.checkpoint.text_files import TEXT_FILES, files_digest, read_text_files
from pdcluster.core.errors import ModelError, NodeLost, Unavailable, UnknownModel
from pdcluster.core.messages import FileChunk
from pdcluster.kv.hashing import chain_root
from pdcluster_router.core.generation import ModelInfo
from pdcluster_router.core.job import HashChain

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 10.0
MAX_FILE_BYTES = 256 << 20
RETRY_S = 0.5
# Hash chains in the cache, until the nodes change. A bound, because clients may name any number of salts.
MOST_CHAINS = 1024


class CardSource(Protocol):
    """What this module needs of the cluster."""

    def cards(self) -> Iterable[NodeCard]: ...

    def refusal(self) -> str | None: ...

    version: int

    async def wait_for_change(self, seen: int) -> None: ...

    async def fetch_file(self, incarnation: str, name: str, offset: int, timeout_s: float) -> FileChunk: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    info: ModelInfo
    text: TextModel


class ModelRegistry:
    """The models that nodes serve. Implements `serving.ServedModels`. Owned by the router's event loop."""

    def __init__(
        self, nodes: CardSource, tokenizer: Path | None, tool_format: str = "auto", reasoning: str = "auto"
    ) -> None:
        """tool_format, reasoning: see TextModel."""
        self._nodes = nodes
        self._tokenizer = tokenizer
        self._marks = tool_format, reasoning
        self._loaded: dict[str, LoadedModel] = {}
        # Why the text files of a model can never be read, by name and digest.
        self._refused: dict[tuple[str, str], str] = {}
        self._infos: tuple[ModelInfo, ...] = ()
        self._has_one = asyncio.Event()
        # Valid as long as the nodes have the same version.
        self._chains: dict[tuple[str, bytes], HashChain] = {}
        self._seen = -1
        # Tokens of a hash block and the weights, of the last node that served a model.
        self._last_chain: dict[str, tuple[int, str]] = {}

    # ------------------------------------------------------------ what dispatch and HTTP ask

    def models(self) -> Sequence[ModelInfo]:
        return self._infos

    async def first(self) -> None:
        await self._has_one.wait()

    def text(self, model: str) -> TextModel:
        return self._find(model).text

    def chain(self, model: str, salt: bytes) -> HashChain:
        if self._nodes.version != self._seen or len(self._chains) >= MOST_CHAINS:
            self._seen = self._nodes.version
            self._chains.clear()
        found = self._chains.get((model, salt))
        if found is None:
            found = self._chains[model, salt] = self._chain_of(model, salt)
        return found

    def _chain_of(self, model: str, salt: bytes) -> HashChain:
        """Without a node, the chain of the last one: its requests may wait for the node to return."""
        self._find(model)
        for card in self._nodes.cards():
            if model in card.models:
                self._last_chain[model] = card.hash_block_tokens, card.weights
                break
        if model not in self._last_chain:
            raise Unavailable(f"no node that serves {model} is connected now; retry later")
        block_tokens, weights = self._last_chain[model]
        return _chain(block_tokens, salt, weights)

    def _find(self, model: str) -> LoadedModel:
        if model in self._loaded:
            return self._loaded[model]
        if not self._loaded:
            raise Unavailable("no model is served yet; wait until /ready answers 200")
        raise UnknownModel(f"the model {model!r} does not exist here; use one of: {', '.join(self._loaded)}", "model")

    def refusal(self) -> str | None:
        """Why no model can be served while the nodes stay the same; None where one is or may be."""
        cards = [(card.model, card.tokenizer_hash) for card in self._nodes.cards()]
        if not cards and (refusal := self._nodes.refusal()) is not None:
            return refusal
        if self._loaded or not cards or not all(card in self._refused for card in cards):
            return None
        return self._refused[cards[0]]

    # ------------------------------------------------------------ loading

    async def keep_loaded(self) -> None:
        """Load the text of every new model, until cancelled.

        A node that leaves meanwhile is no error: the next round tries another node.
        """
        while True:
            seen = self._nodes.version
            is_settled = True
            for card in list(self._nodes.cards()):
                if (
                    not self._loaded.keys() >= set(card.models)
                    and (card.model, card.tokenizer_hash) not in self._refused
                ):
                    is_settled &= await self._try_load(card)
            if is_settled:
                await self._nodes.wait_for_change(seen)

    async def _try_load(self, card: NodeCard) -> bool:
        """Load a model's text. False where a retry may help; True also where the files themselves are wrong."""
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
            return False
        try:
            text = await asyncio.to_thread(self._read, files)
        except ModelError as error:  # the files themselves are wrong, on every node
            self._refused[card.model, card.tokenizer_hash] = f"the model {card.model} cannot be served: {error}"
            logger.error(self._refused[card.model, card.tokenizer_hash])
            return True
        for name in card.models:
            self._loaded[name] = LoadedModel(
                ModelInfo(name, int(time.time()), card.max_len, card.vocab_size, card.eos_ids), text
            )
        self._has_one.set()
        self._infos = tuple(loaded.info for loaded in self._loaded.values())
        logger.info("serving model %s", ", ".join(card.models))
        return True

    def _read(self, files: dict[str, bytes]) -> TextModel:
        """The model's text. Without `--tokenizer DIR` it comes from `files`, fetched from a node."""
        return TextModel(files if self._tokenizer is None else read_text_files(self._tokenizer), *self._marks)

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


@lru_cache(maxsize=1024)
def _chain(block_tokens: int, salt: bytes, weights: str) -> HashChain:
    """The hash chain for a salt. Every request needs one, mostly the same."""
    return HashChain(chain_root(block_tokens=block_tokens, salt=salt, weights=weights), block_tokens)
