"""The shape that a chat asks of its answer, and how the answer is split: structured output, tools and reasoning
together, for one model.
"""

from __future__ import annotations

import msgspec

from pdcluster.api.openai.requests import ChatRequest
from pdcluster.api.structured import constraints
from pdcluster.api.structured.constraints import Form
from pdcluster.api.text.model_text import TextModel
from pdcluster.api.tools import reasoning
from pdcluster.api.tools.formats import FORMATS, ToolFormat
from pdcluster.api.tools.markers import END_THINK, THINK
from pdcluster.api.tools.offered import Offer, offer_of
from pdcluster.api.tools.speech import Speech
from pdcluster.core.errors import BadRequest
from pdcluster.core.grammar import Grammar

SPACE_AFTER_THOUGHT: Form = {"type": "regex", "pattern": "[\\n ]{0,4}"}


class Marking(msgspec.Struct, frozen=True):
    """How a model marks what is not its answer.
    tools: the name of a format; None when it takes none.
    reasons: whether it emits reasoning.
    """

    tools: str | None = None
    reasons: bool = False


NO_MARKS = Marking()


class Dialogue(msgspec.Struct, frozen=True):
    """grammar: None for any text.
    param: the field of the request that the grammar comes from.
    """

    offer: Offer | None
    format: ToolFormat | None
    reasons: bool
    is_open: bool
    grammar: Grammar | None
    param: str = ""

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
    tool_format = FORMATS[marking.tools] if offer is not None and marking.tools is not None else None
    form = constraints.form_of(request.response_format, request.structured_outputs)
    param = constraints.param_of(request.structured_outputs)
    reasons = marking.reasons and not request.continue_final_message
    if offer is not None and tool_format is not None and (offer.must or offer.is_strict or form is not None):
        if offer.must and form is not None:
            raise BadRequest(
                f"{param} and a tool_choice that asks for a call contradict each other; send one of them", param
            )
        form = _with_calls(tool_format, offer, form, reasons=reasons)
        param = "tools"
    is_open = reasons and reasoning.is_left_open(prompt)
    if form is None:
        return Dialogue(offer, tool_format, reasons, is_open, None)
    constraints.check_end(request)
    if reasons and not prompt.rstrip().endswith(END_THINK):
        form = _after_thought(form, is_open=is_open)
    return Dialogue(offer, tool_format, reasons, is_open, constraints.grammar_of(form, param), param)


def _with_calls(tool_format: ToolFormat, offer: Offer, form: Form | None, *, reasons: bool) -> Form:
    """form: of an answer without calls; None for any text."""
    if form is not None:
        return {"type": "or", "elements": [tool_format.form(offer), form]}
    return tool_format.form(offer) if offer.must else tool_format.free_form(offer, reasons=reasons)


def marking_of(text: TextModel) -> Marking:
    return Marking(text.tool_format, text.reasons)


def _after_thought(form: Form, *, is_open: bool) -> Form:
    """The grammar covers the answer. The model may reason before it."""
    thought = {"type": "tag", "begin": "" if is_open else THINK, "content": {"type": "any_text"}, "end": END_THINK}
    whole: Form = {"type": "sequence", "elements": [thought, SPACE_AFTER_THOUGHT, form]}
    return whole if is_open else {"type": "or", "elements": [whole, form]}
