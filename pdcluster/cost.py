"""What a step costs in seconds: nodes fit these models to their own steps (`fit`), the router and the replay predict with them.

Pure values and arithmetic; no clock, no I/O. A *pair* is one query attending to one key: a chunk of `new` tokens after `cached` ones makes
new × (cached + new / 2) of them, and chunks add up exactly, which is why a backlog can be reported as tokens and pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdcluster.messages import CostReport


def num_pairs(new: float, cached: float) -> float:
    """Attention pairs of `new` tokens computed behind `cached` ones."""
    return new * (cached + new / 2)


RECENT_STEPS = 256
"""What "lately" means for the gap between tokens: about one answer."""


def lately(itl_s: float, step_s: float, steps: int) -> float:
    """A node's recent gap between tokens after `steps` more steps of step_s each; itl_s 0: there were none before."""
    return step_s if not itl_s else itl_s + (1.0 - (1.0 - 1.0 / RECENT_STEPS) ** steps) * (step_s - itl_s)


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of prompt tokens alone in their steps: fixed_s a step, token_s a token, pair_s an attention pair. chunk_tokens: most tokens of one
    step; 0: a prompt is one step. samples: steps it was fitted to; 0: nothing was measured, the numbers are a guess."""

    fixed_s: float
    token_s: float
    pair_s: float = 0.0
    chunk_tokens: int = 0
    samples: int = 0

    def seconds(self, new: float, cached: float = 0.0) -> float:
        """T(new, cached); 0 when there is nothing to compute."""
        return self.work_s(new, num_pairs(new, cached))

    def work_s(self, tokens: float, pairs: float) -> float:
        """The same for a backlog of several prompts, which share steps."""
        if tokens <= 0:
            return 0.0
        num_steps = max(tokens / self.chunk_tokens, 1.0) if self.chunk_tokens else 1.0
        return self.fixed_s * num_steps + self.token_s * tokens + self.pair_s * pairs


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step of decode rows: fixed_s, row_s a row, context_s a token of KV that some row attends to.
    samples: as in PrefillCost."""

    fixed_s: float
    row_s: float
    context_s: float = 0.0
    samples: int = 0

    def seconds(self, rows: float, context_tokens: float) -> float:
        """TPOT of a batch."""
        return self.fixed_s + self.added_s(rows, context_tokens)

    def added_s(self, rows: float, context_tokens: float) -> float:
        """What the rows add to a step that runs anyway."""
        return self.row_s * rows + self.context_s * context_tokens


@dataclass(frozen=True, slots=True)
class NodeCost:
    prefill: PrefillCost
    decode: DecodeCost

    @classmethod
    def of(cls, report: CostReport) -> NodeCost:
        return cls(
            PrefillCost(report.prefill_fixed_s, report.prefill_token_s, report.prefill_pair_s, report.chunk_tokens, report.prefill_samples),
            DecodeCost(report.decode_fixed_s, report.decode_row_s, report.decode_context_s, report.decode_samples),
        )

    def report(self) -> CostReport:
        prefill, decode = self.prefill, self.decode
        return CostReport(
            prefill.fixed_s,
            prefill.token_s,
            prefill.pair_s,
            decode.fixed_s,
            decode.row_s,
            decode.context_s,
            prefill.chunk_tokens,
            prefill.samples,
            decode.samples,
        )
