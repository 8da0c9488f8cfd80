"""What a step costs in seconds. Nodes fit these models to their own steps. The router and the replay predict with them.

A *pair* is one query attending to one key. A chunk of `new` tokens after `cached` ones makes new × (cached + new / 2)
of them. Chunks add up exactly, so a backlog can be reported as tokens and pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from pdcluster.core.messages import CostReport


def num_pairs(new: float, cached: float) -> float:
    """Attention pairs of `new` tokens computed behind `cached` ones."""
    return new * (cached + new / 2)


# What "lately" means for the gap between tokens: about one answer.
RECENT_STEPS = 256


def lately(itl_s: float, step_s: float, steps: int) -> float:
    """A node's recent gap between tokens after `steps` more steps of step_s each. itl_s 0: there were none before."""
    return step_s if not itl_s else itl_s + (1.0 - (1.0 - 1.0 / RECENT_STEPS) ** steps) * (step_s - itl_s)


Root = tuple[float, float, float, float, float, float]
Work = tuple[float, float, float]
CERTAIN: Root = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class CostError:
    """Error bars of one half of a cost model. 9 of 10 steps, or answers, are expected within them.

    spread: share of its prediction by which a step differs, however well the model is known.
    doubt: the model's own share, on such work as came lately.
    root: a triangle. Its product with a work's (1, tokens, pairs) or (1, rows, context) is as long as the model's error
    in seconds. Large where no such work was seen. Any six numbers are valid.
    """

    spread: float = 0.0
    doubt: float = 0.0
    root: Root = CERTAIN

    @property
    def share(self) -> float:
        """Of a prediction for usual work."""
        return sqrt(self.spread * self.spread + self.doubt * self.doubt)

    def model_s(self, work: Work) -> float:
        a, b, c, d, e, f = self.root
        x, y, z = work
        first, second, third = a * x + b * y + d * z, c * y + e * z, f * z
        return sqrt(first * first + second * second + third * third)

    def seconds(self, work: Work, predicted_s: float) -> float:
        """Half the width of the interval around a prediction. What makes a step slower lasts, so a prompt's steps do
        not even it out.
        """
        noise_s, model_s = self.spread * predicted_s, self.model_s(work)
        return sqrt(noise_s * noise_s + model_s * model_s)


EXACT = CostError()


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of prompt tokens alone in their steps.

    fixed_s: a step.
    token_s: a token.
    pair_s: an attention pair.
    chunk_tokens: most tokens of one step. 0: a prompt is one step.
    samples: steps it was fitted to. 0: the numbers are a guess.
    """

    fixed_s: float
    token_s: float
    pair_s: float = 0.0
    chunk_tokens: int = 0
    samples: int = 0
    error: CostError = EXACT

    def seconds(self, new: float, cached: float = 0.0) -> float:
        """T(new, cached). 0 when there is nothing to compute. It repeats `work_s`, since a router asks this for every
        request.
        """
        if new <= 0:
            return 0.0
        chunk = self.chunk_tokens
        return (
            self.fixed_s * (new / chunk if new > chunk > 0 else 1.0)
            + self.token_s * new
            + self.pair_s * (new * (cached + new / 2))
        )

    def work_s(self, tokens: float, pairs: float) -> float:
        """The same for a backlog of several prompts, which share steps."""
        if tokens <= 0:
            return 0.0
        return self.fixed_s * self._num_steps(tokens) + self.token_s * tokens + self.pair_s * pairs

    def error_s(self, new: float, cached: float = 0.0) -> float:
        """T(new, cached) is within `seconds` ± that, nine times of ten."""
        if new <= 0:
            return 0.0
        return self.error.seconds((self._num_steps(new), new, num_pairs(new, cached)), self.seconds(new, cached))

    def _num_steps(self, tokens: float) -> float:
        return max(tokens / self.chunk_tokens, 1.0) if self.chunk_tokens else 1.0


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step of decode rows.

    fixed_s: a step.
    row_s: a row.
    context_s: a token of KV that some row attends to.
    samples: steps it was fitted to.
    """

    fixed_s: float
    row_s: float
    context_s: float = 0.0
    samples: int = 0
    error: CostError = EXACT

    def seconds(self, rows: float, context_tokens: float) -> float:
        """TPOT of a batch."""
        return self.fixed_s + self.added_s(rows, context_tokens)

    def error_s(self, rows: float, context_tokens: float) -> float:
        """TPOT is within `seconds` ± that, nine times of ten."""
        return self.error.seconds((1.0, rows, context_tokens), self.seconds(rows, context_tokens))

    def added_s(self, rows: float, context_tokens: float) -> float:
        """What the rows add to a step that runs anyway."""
        return self.row_s * rows + self.context_s * context_tokens


# What takes less takes nothing. Dividing by less can make more seconds or rows than a float holds. One such node would
# leave the others without a choice.
SHORTEST_S = 1e-18


def _measured(seconds: float) -> float:
    return seconds if seconds >= SHORTEST_S else 0.0


@dataclass(frozen=True, slots=True)
class NodeCost:
    prefill: PrefillCost
    decode: DecodeCost

    @classmethod
    def of(cls, report: CostReport) -> NodeCost:
        r, told = report, _measured
        prefill_error = CostError(r.prefill_spread, r.prefill_doubt, r.prefill_root)
        decode_error = CostError(r.decode_spread, r.decode_doubt, r.decode_root)
        prefill = told(r.prefill_fixed_s), told(r.prefill_token_s), told(r.prefill_pair_s)
        decode = told(r.decode_fixed_s), told(r.decode_row_s), told(r.decode_context_s)
        return cls(
            PrefillCost(*prefill, r.chunk_tokens, r.prefill_samples, prefill_error),
            DecodeCost(*decode, r.decode_samples, decode_error),
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
            prefill.error.spread,
            prefill.error.doubt,
            prefill.error.root,
            decode.error.spread,
            decode.error.doubt,
            decode.error.root,
        )
