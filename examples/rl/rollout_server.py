"""How a trainer with a server for rollouts, such as verl's or slime's, would call a cluster. Not run: no trainer of
theirs was started with it.

Such trainers hand over token ids and want token ids, their logprobs and the version of the weights back. They end
rollouts before they change weights, and free memory on machines that they share with the nodes. The calls are those of
the router's HTTP API, and of its surface for trainers (`router.control`), under vLLM's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import torch

from pdcluster.weights.publisher import Publisher

# A sample of thousands of tokens, behind others.
ANSWER_S, CHANGE_S = 1800.0, 1800.0


@dataclass(frozen=True, slots=True)
class ServedSample:
    """finish: stop, length, or abort where a pause ended it. versions: labels of the weights that made its tokens."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    versions: list[str]


class RolloutServer:
    """One cluster. api, control: URLs of the router; admin: HOST:PORT of its Admin."""

    def __init__(self, api: str, control: str, admin: str, model: str, token: str | None = None) -> None:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._api = httpx.AsyncClient(base_url=api, timeout=ANSWER_S, trust_env=False)
        self._control = httpx.AsyncClient(base_url=control, timeout=CHANGE_S, headers=headers, trust_env=False)
        self._admin, self._token, self._model = admin, token, model

    async def generate(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> ServedSample:
        """sampling: temperature, top_p, max_tokens and others, as /v1/completions has them."""
        body = {"model": self._model, "prompt": list(prompt), "logprobs": 0, "return_token_ids": True, **sampling}
        reply = await self._api.post("/v1/completions", json=body)
        reply.raise_for_status()
        answer = reply.json()
        choice = answer["choices"][0]
        versions = [part["label"] for part in answer["usage"]["pdcluster"]["weights"]]
        return ServedSample(
            choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"], versions
        )

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        await self._call("/pause", mode=mode)

    async def resume(self) -> None:
        await self._call("/resume")

    async def sleep(self) -> None:
        """Nodes give the memory of weights and KV back."""
        await self._call("/sleep", level="1")

    async def wake_up(self) -> None:
        await self._call("/wake_up")

    def push(self, named_tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Blocks until all nodes serve the weights. Wakes nodes that sleep."""
        with Publisher(self._admin, self._token) as publisher:
            publisher.push(named_tensors, f"step-{step}", finish_s=0.0)

    async def _call(self, path: str, **parameters: str) -> None:
        (await self._control.post(path, params=parameters)).raise_for_status()

    async def close(self) -> None:
        await self._api.aclose()
        await self._control.aclose()
