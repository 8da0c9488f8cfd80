"""Rollouts by the OpenAI API: token ids in, token ids and logprobs out, and which weights made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from pdcluster.core.weights import WeightsVersion

REQUEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One choice: the tokens that follow a prompt, each with the logprob that the cluster gave it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class RolloutClient:
    """Samples groups of one prompt each. All prompts of a call are asked at the same time."""

    def __init__(self, url: str, model: str, *, group_size: int, max_tokens: int) -> None:
        """group_size: samples of each prompt; max_tokens: of each sample."""
        self._model, self._group_size, self._max_tokens = model, group_size, max_tokens
        self._http = httpx.Client(base_url=url, timeout=REQUEST_S, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def sample(self, prompts: Sequence[Sequence[int]], version: WeightsVersion, seed: int) -> list[list[Sample]]:
        """A group of samples for each prompt, in order.

        Raises RuntimeError where a request fails, or where any token was not made by the weights of `version`.
        """
        with ThreadPoolExecutor(len(prompts)) as threads:
            seeds = range(seed, seed + len(prompts))
            return list(threads.map(lambda prompt, own: self._group(prompt, version, own), prompts, seeds))

    def _group(self, prompt: Sequence[int], version: WeightsVersion, seed: int) -> list[Sample]:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "n": self._group_size,
            "max_tokens": self._max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        reply = self._http.post("/v1/completions", json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"a rollout was answered with {reply.status_code}: {reply.text}")
        answer = reply.json()
        made_by = weights_of(answer)
        samples = []
        for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"])):
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            check_weights(made_by[choice["index"]], version, len(tokens))
            if len(logprobs) != len(tokens):
                raise RuntimeError(f"a sample of {len(tokens)} tokens has {len(logprobs)} logprobs")
            samples.append(Sample(tuple(prompt), tuple(tokens), tuple(logprobs)))
        return samples


def weights_of(answer: Mapping[str, Any]) -> list[Any]:
    """Of each choice, by index, which weights made which of its tokens."""
    usage = answer["usage"]["pdcluster"]
    return [choice["weights"] for choice in usage.get("choices", [usage])]


def check_weights(ranges: Sequence[Mapping[str, Any]], version: WeightsVersion, num_tokens: int) -> None:
    """Raises RuntimeError unless `version` made all tokens of a sample."""
    wanted = {"from": 0, "to": num_tokens, "label": version.label, "digest": version.digest, "epoch": version.epoch}
    if list(ranges) != [wanted]:
        raise RuntimeError(f"a sample of {num_tokens} tokens was made by {ranges}, and not by {version}")
