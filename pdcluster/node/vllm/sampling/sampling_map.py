"""The engine's view of our sampling: what `sampling` needs to know of a started vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdcluster.core.sampling import Sampling, TokenLogprobs
from pdcluster.node.vllm.engine.interface import Finish
from pdcluster.node.vllm.sampling.parameters import (
    SamplerFacts,
    check,
    ending_of,
    for_prefill,
    from_vllm_logprobs,
    to_vllm,
)

if TYPE_CHECKING:
    from vllm import SamplingParams


class VllmSampling:
    """directory: of the model's files. eos_token_ids: as our checkpoint code finds them."""

    def __init__(self, directory: Path, eos_token_ids: Sequence[int]) -> None:
        self._directory, self._eos = directory, tuple(eos_token_ids)
        self._facts: SamplerFacts | None = None

    @property
    def facts(self) -> SamplerFacts:
        assert self._facts is not None, "vLLM has not started"
        return self._facts

    def processors(self, config: Any) -> list[str]:
        """The logits processor of ours that this vLLM can run, by its name."""
        from pdcluster.node.vllm.sampling.logits import FIRST_RUNNER, SECOND_RUNNER

        if config.model_config.runner_type == "pooling" or config.speculative_config is not None:
            return []
        return [SECOND_RUNNER if config.use_v2_model_runner else FIRST_RUNNER]

    def learn(self, config: Any) -> None:
        """Before any request, from vLLM's configuration."""
        from pdcluster.engine.sampling.grammar import vocabulary_of
        from pdcluster.node.vllm.sampling.rules import dead_token_of

        model, has_rules = config.model_config, bool(self.processors(config))
        size = model.get_vocab_size()
        dead = dead_token_of(vocabulary_of(self._directory, size, self._eos)) if has_rules else None
        self._facts = SamplerFacts(size, self._eos, model.max_logprobs, has_rules, dead)

    def to_vllm(self, sampling: Sampling, num_emitted: int) -> SamplingParams:
        return to_vllm(sampling, num_emitted, self.facts)

    def check(self, sampling: Sampling, num_emitted: int) -> None:
        """Raises BadRequest for what vLLM cannot do."""
        check(sampling, num_emitted, self.facts)

    def for_prefill(self, sampling: Sampling) -> SamplingParams:
        return for_prefill(sampling)

    def ending_of(self, sampling: Sampling, stop_token: int) -> Finish:
        return ending_of(sampling, self.facts, stop_token)

    def from_vllm(self, logprobs: Mapping[int, Any], token: int, count: int, *, ranked: bool = False) -> TokenLogprobs:
        return from_vllm_logprobs(logprobs, token, count, ranked=ranked)
