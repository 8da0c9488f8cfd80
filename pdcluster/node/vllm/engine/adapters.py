"""LoRA adapters inside vLLM: checked, loaded, and unloaded once no request uses them. Owned by the engine's thread.

vLLM reads an adapter's files again when it lacks one that a request names, and dies if they are gone. So it never gets
more than it keeps, and an adapter leaves it only after its last request.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdcluster.core.errors import BadRequest
from pdcluster.core.messages import MODEL_PARAM
from pdcluster.processes.tasks import watched

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

LOAD_S: Final = 120.0
# A digest covers these, in this order. Pickled weights are not read.
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
_PIECE_BYTES: Final = 1 << 20


class EngineAdapters:
    """limit: how many vLLM keeps; 0 without its --enable-lora."""

    def __init__(self, llm: Any, limit: int) -> None:
        self._llm = llm
        self._limit = limit
        self._held: dict[int, LoRARequest] = {}
        self._uses: Counter[int] = Counter()
        self._leaving: set[int] = set()

    async def load(self, number: int, name: str, path: str, known_digest: str = "") -> str:
        """Load an adapter and return the digest of its files. Raises BadRequest, also after LOAD_S.

        known_digest: of the adapter that has this name. Then the files are only compared.
        """
        if not self._limit:
            raise BadRequest(
                "this node runs vLLM without --enable-lora; start it with that, or with --vllm-adapters NAME=DIRECTORY"
            )
        try:
            async with asyncio.timeout(LOAD_S):
                return await self._load(number, name, path, known_digest)
        except TimeoutError:
            raise BadRequest(f"the adapter {name} was not read and loaded within {LOAD_S:g} s") from None

    async def _load(self, number: int, name: str, path: str, known_digest: str) -> str:
        digest = await asyncio.to_thread(adapter_files_digest, path)
        if known_digest:
            if digest != known_digest:
                raise BadRequest(f"the adapter {name} is loaded with other files; unload it first")
            return digest
        if len(self._held) >= self._limit:
            raise BadRequest(
                f"this node has {len(self._held)} adapters, as many as vLLM keeps here; unload one, or start it with a "
                "larger --max-cpu-loras"
            )
        await self._add(number, name, path)
        if await asyncio.to_thread(adapter_files_digest, path) != digest:
            await self._remove(number)
            raise BadRequest(f"the files of the adapter {name} changed while they were loaded; load it again")
        return digest

    async def _add(self, number: int, name: str, path: str) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        self._held[number] = request = LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
        try:
            if not await self._llm.add_lora(request):
                raise BadRequest("vLLM did not take it")
        except EngineDeadError:
            raise
        except BaseException as error:
            # vLLM may have loaded a part of it, or does so later; its calls go in order.
            watched(self._remove(number), f"removal of adapter {name}")
            if not isinstance(error, Exception):
                raise  # the time is over
            raise BadRequest(f"the adapter {name} cannot be loaded: vLLM: {error}") from error

    def unload(self, number: int) -> None:
        """Requests that use it go on; none may begin."""
        if number in self._held:
            self._leaving.add(number)
            self._remove_unused(number)

    def begin(self, number: int) -> LoRARequest | None:
        """Of a request that begins; None without an adapter. Raises BadRequest where the adapter is gone."""
        if not number:
            return None
        if number not in self._held or number in self._leaving:
            raise BadRequest("the adapter of the request was unloaded before the request began", MODEL_PARAM)
        self._uses[number] += 1
        return self._held[number]

    def end(self, number: int) -> None:
        """Of a request that has begun."""
        self._uses[number] -= 1
        self._remove_unused(number)

    def _remove_unused(self, number: int) -> None:
        if number in self._leaving and self._uses[number] <= 0:
            self._leaving.discard(number)
            watched(self._remove(number), f"removal of adapter {self._held[number].lora_name}")

    async def _remove(self, number: int) -> None:
        self._uses.pop(number, None)
        try:
            await self._llm.remove_lora(number)
        finally:
            self._held.pop(number, None)


def adapter_files_digest(path: str) -> str:
    """A digest of an adapter's files. Raises BadRequest for a directory that is none of an adapter."""
    folder = Path(path)
    try:
        is_folder = folder.is_absolute() and folder.is_dir()
    except OSError as error:
        raise BadRequest(f"{path[:200]!r} cannot be read: {error.strerror}", "path") from error
    if not is_folder:
        raise BadRequest(f"{path[:200]!r} is no absolute path of a directory on the node's machine", "path")
    digest = hashlib.blake2b(digest_size=16, person=b"pdcluster.lora")
    for name in FILES:
        try:
            _add_file(digest, folder / name)
        except OSError as error:
            why = error.strerror or error
            raise BadRequest(f"{folder} is no LoRA adapter: {name} cannot be read: {why}", "path") from error
    return digest.hexdigest()


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError("it is no file")  # a pipe would wait for a writer
    digest.update(path.stat().st_size.to_bytes(8, "little"))
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
