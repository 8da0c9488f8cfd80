"""The chat template of a model: messages in, the prompt's text out, as `transformers` would render it.

The template comes with the model's files and runs in Jinja's sandbox, within bounds (`template_bounds.py`); messages
are data. Nothing here tokenizes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser

from pdcluster.api.text.template_bounds import (
    BRIEF,
    PATIENT,
    BoundedEnvironment,
    Bounds,
    Ended,
    Starved,
    bounded,
    bounded_dict,
    check_indent,
    check_pattern,
)
from pdcluster.core.errors import BadRequest, Crowded, ModelError, PdclusterError

Message = Mapping[str, object]

# The server sets these; a request's chat_template_kwargs may not.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

# Marks the end of the message to continue during rendering. Its last space shows whether the template trims messages.
CONTINUE_MARK = "\ue000pdcluster-continue\ue000 "


# So often may a template meet the bounds of the event loop before it renders in threads only.
MOST_OVERRUNS = 3
# Characters of an error's text that a template or its values decide.
MOST_REASON = 2000


class TakesLong(PdclusterError):
    """The template does not render these messages within BRIEF. It needs a thread."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training masks. Rendering keeps only its
    content.
    """

    tags: set[str] = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace() without underscore names, which reach into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = bounded_dict(*args[1:], **kwargs)
        for name in values:
            _check_public(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a chat template may not set {name!r}: names with a leading underscore are reserved"
        )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message)[:MOST_REASON])


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, keys in order."""
    check_indent(indent)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    check_pattern(pattern)
    return datetime.now().strftime(pattern)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: bos_token, eos_token, … as the template names them. Raises ModelError when the template does
        not compile.
        """
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
        }
        environment.bound()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the model's chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except (SyntaxError, RecursionError) as error:  # Python's limits of nested blocks and expressions
            raise ModelError(f"the model's chat template does not compile: it nests too deep: {error}") from error
        self._num_overruns = 0
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        bounds: Bounds = PATIENT,
    ) -> str:
        """Raises BadRequest when the template refuses these messages, e.g. because roles must alternate, or takes more
        than PATIENT; Crowded when others took its time; TakesLong when it takes more than BRIEF.
        """
        chat = [self._prepare(message) for message in messages]
        if continue_final_message:
            chat[-1] = _marked(chat[-1])
        text = self._guarded(
            lambda: self._template.render(
                self._special_tokens | dict(kwargs or {}),
                messages=chat,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ),
            bounds,
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _prepare(self, message: Message) -> dict[str, object]:
        """Templates expect absent keys, not null. For templates that do not know `developer` it becomes `system`."""
        plain = {name: value for name, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"
        return plain

    def _guarded(self, render: Callable[[], str], bounds: Bounds) -> str:
        try:
            return self._bounded(render, bounds)
        except jinja2.TemplateError as error:
            reason = str(error)[:MOST_REASON]
            raise BadRequest(f"the model's chat template refuses this conversation: {reason}", "messages") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            # A template is a program over the caller's messages. When it fails on them, they must change.
            reason = f"{type(error).__name__}: {str(error)[:MOST_REASON]}"
            message = (
                f"the model's chat template cannot render these messages ({reason}); check their roles and contents"
            )
            raise BadRequest(message, "messages") from error

    def _bounded(self, render: Callable[[], str], bounds: Bounds) -> str:
        """A template that met the bounds of the event loop again and again renders in threads, until it is fast there
        as often.
        """
        if bounds is BRIEF and self._num_overruns >= MOST_OVERRUNS:
            raise TakesLong("the model's chat template is known to take long")
        began = time.monotonic()
        try:
            text = bounded(render, bounds)
        except Ended as error:
            if bounds is BRIEF:
                self._num_overruns += 1
                raise TakesLong(f"the model's chat template renders in a thread: {error}") from None
            if isinstance(error, Starved):
                raise Crowded(
                    f"the model's chat template was ended: {error}; retry later", reason="preparing"
                ) from None
            raise BadRequest(
                f"the model's chat template was ended on these messages: {error}; send fewer or shorter messages, or "
                "have the template corrected",
                "messages",
            ) from None
        if self._num_overruns and bounds is not BRIEF and time.monotonic() - began < BRIEF.seconds / 2:
            self._num_overruns -= 1
        return text


def _marked(message: dict[str, object]) -> dict[str, object]:
    content = message.get("content")
    if not isinstance(content, str):
        raise BadRequest("continue_final_message needs a last message with content to continue", "messages")
    return message | {"content": content + CONTINUE_MARK}


def _cut_at_mark(text: str) -> str:
    at = text.rfind(CONTINUE_MARK.strip())
    if at < 0:
        raise BadRequest(
            "the model's chat template leaves out the last message, so it cannot be continued; set "
            "continue_final_message to false",
            "continue_final_message",
        )
    return text[:at] if text.startswith(CONTINUE_MARK, at) else text[:at].rstrip()
