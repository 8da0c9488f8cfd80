"""Our rules for rows as vLLM's logits processors, one for each of its model runners. They run in vLLM's workers.

vLLM has two runners with an interface each. The first runs on CPUs and where Triton is missing, the second on GPUs. It
takes the class by its name, from the same option, and refuses the other runner's class.

1. The first applies a processor between its biases and its penalties, the second behind both. Rows whose penalties
   are ours have none of vLLM's, so that both come to the same.
2. With asynchronous scheduling the output's last token is known only when the processor is applied: it is read there.
3. The first runner starts with no processor under speculation. Under the second ours refuses to start.
4. The second keeps tokens on the device. Reading those of rows with rules waits for it: rows with rules cost overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as FirstProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SecondProcessor

from pdcluster.checkpoint.end_tokens import eos_token_ids
from pdcluster.checkpoint.text_files import read_text_files
from pdcluster.node.vllm.sampling.rules import RULES_KEY, BatchRules, RowRules, RuledRow, decode_rules

FIRST_RUNNER = f"{__name__}:RuledRows"
SECOND_RUNNER = f"{__name__}:RuledSlots"


def rules_of(params: Any) -> RowRules | None:
    """Raises ValueError for what is no rules."""
    data = (params.extra_args or {}).get(RULES_KEY)
    return None if data is None else decode_rules(data)


def _batch_rules(vllm_config: Any) -> BatchRules:
    model = vllm_config.model_config
    directory = Path(model.tokenizer or model.model)
    ends = eos_token_ids(read_text_files(directory))
    parallel = vllm_config.parallel_config
    return BatchRules.for_model(directory, model.get_vocab_size(), ends, alone=parallel.tensor_parallel_size == 1)


class RuledRows(FirstProcessor):  # type: ignore[misc]
    """For vLLM's first runner: rows have places in a batch, and move."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        rules_of(sampling_params)

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._batch_rules = _batch_rules(vllm_config)
        # A row, and vLLM's own list of its output, which grows.
        self._rows: dict[int, tuple[RuledRow, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: Tensor) -> Tensor:
        for row, output in self._rows.values():
            row.take(output)
        return self._batch_rules.apply(logits, {place: row for place, (row, _) in self._rows.items()})

    def _row(self, params: Any, prompt: list[int] | None, output: list[int]) -> tuple[RuledRow, list[int]] | None:
        rules = rules_of(params)
        return None if rules is None else (self._batch_rules.row(rules, prompt or ()), output)


class RuledSlots(SecondProcessor):  # type: ignore[misc]
    """For vLLM's second runner: a request keeps its slot, and logits name it."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        rules_of(sampling_params)

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        if vllm_config.speculative_config is not None:
            raise ValueError("rows with rules of ours do not draft; start vLLM without speculative decoding")
        self._batch_rules = _batch_rules(vllm_config)
        self._states = req_states
        self._rules: dict[int, RowRules] = {}
        self._rows: dict[int, RuledRow] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._rows.pop(req_idx, None)
        rules = rules_of(sampling_params)
        if rules is None:
            self._rules.pop(req_idx, None)
            return False
        self._rules[req_idx] = rules
        return True

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        ruled = {place: slot for place, slot in enumerate(ctx.idx_mapping_np.tolist()) if slot in self._rules}
        return self._batch_rules.apply(logits, self._read(ruled)) if ruled else logits

    def _read(self, ruled: Mapping[int, int]) -> dict[int, RuledRow]:
        """The rows by their place, with the tokens that the device has for them."""
        slots = list(ruled.values())
        totals = self._states.total_len.gpu[slots].tolist()
        tokens = self._states.all_token_ids.gpu[slots, : max(totals)].tolist()
        found: dict[int, RuledRow] = {}
        for (place, slot), total, ids in zip(ruled.items(), totals, tokens, strict=True):
            num_prompt = int(self._states.prompt_len.np[slot])
            if (row := self._rows.get(slot)) is None:
                row = self._rows[slot] = self._batch_rules.row(self._rules[slot], ids[:num_prompt])
            row.take(ids[num_prompt:total])
            found[place] = row
        return found
