"""The shape that a chat asks of its answer, and how the answer is split: structured output, tools and reasoning
together, for one model.
"""

from __future__ import annotations

import msgspec

from pdcluster.api.openai.answer_shape import AnswerShape
from pdcluster.api.openai.requests import ChatRequest
from pdcluster.api.structured import constraints
from pdcluster.api.text.model_text import TextModel
from pdcluster.api.tools import reasoning
from pdcluster.api.tools.formats import FORMATS, ToolFormat
from pdcluster.api.tools.markers import END_THINK
from pdcluster.api.tools.speech import Speech
from pdcluster.api.tools.tool_choice import Offer, offer_of
from pdcluster.core.errors import BadRequest


class Marking(msgspec.Struct, frozen=True):
    """How a model marks what is not its answer.
    tools: the name of a format; None when it takes none.
    reasons: whether it emits reasoning.
    """

    tools: str | None = None
    reasons: bool = False


NO_MARKS = Marking()


class Dialogue(msgspec.Struct, frozen=True):
    """shape: what is asked of the answer; None for any text."""

    offer: Offer | None
    format: ToolFormat | None
    reasons: bool
    is_open: bool
    shape: AnswerShape | None

    @property
    def has_marks(self) -> bool:
        return self.reasons or self.offer is not None

    def speech(self) -> Speech | None:
        """The parser of one choice; None where the text is the answer."""
        if not self.has_marks:
            return None
        splitter = reasoning.ReasoningSplitter(is_open=self.is_open) if self.reasons else None
        return Speech(
            splitter, self.format.parse(self.offer) if self.format is not None and self.offer is not None else None
        )


def offered(request: ChatRequest, marking: Marking) -> Offer | None:
    """The tools that the prompt shows; None for none. Raises BadRequest, also for a model that takes none."""
    offer = offer_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    if offer is not None and marking.tools is None:
        raise BadRequest(
            "tools are set, but this model's chat template takes none; leave tools out, or set router.tool_format",
            "tools",
        )
    return offer


def dialogue_of(request: ChatRequest, offer: Offer | None, marking: Marking, prompt: str) -> Dialogue:
    """prompt: as rendered."""
    tool_format = marking.tools if offer is not None else None
    has_form = constraints.asks(request)
    param = constraints.param_of(request.structured_outputs)
    reasons = marking.reasons and not request.continue_final_message
    is_open = reasons and reasoning.is_left_open(prompt)
    is_bound = offer is not None and (offer.must or offer.is_strict or offer.is_limited or has_form)
    has_calls = is_bound and tool_format is not None
    made = Dialogue(offer, FORMATS[tool_format] if tool_format is not None else None, reasons, is_open, None)
    if not has_form and not has_calls:
        return made
    if offer is not None and offer.must and has_form:
        raise BadRequest(
            f"{param} and a tool_choice that asks for a call contradict each other; send one of them", param
        )
    constraints.check_end(request)
    thinks_first = reasons and not prompt.rstrip().endswith(END_THINK)
    shape = AnswerShape(
        "tools" if has_calls else param, request.response_format, request.structured_outputs,
        thought=("open" if is_open else "may") if thinks_first else "none", reasons=reasons,
    )  # fmt: skip
    if has_calls and offer is not None:
        shape = msgspec.structs.replace(
            shape, tool_format=tool_format, tools=offer.tools, must=offer.must, parallel=offer.parallel
        )
    return msgspec.structs.replace(made, shape=shape)


def marking_of(text: TextModel) -> Marking:
    return Marking(text.tool_format, text.reasons)
