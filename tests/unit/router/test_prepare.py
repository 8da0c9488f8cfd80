"""Preparing a request holds up nobody else: what may take long is done beside the event loop."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence

import pytest

from pdcluster.api import openai
from pdcluster.api.template import Message
from pdcluster.api.text import TextModel
from pdcluster_router.prepare import MANY_MESSAGES, encode_chat
from tests.unit.api.tiny_tokenizers import byte_level_files


class WatchedText(TextModel):
    """rendered_in: threads that a template ran in, and that messages were checked in."""

    def __init__(self) -> None:
        super().__init__(byte_level_files())
        self.rendered_in: list[threading.Thread] = []

    def render_chat(self, messages: Sequence[Message], **options: object) -> str:
        self.rendered_in.append(threading.current_thread())
        return super().render_chat(messages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_messages", "is_beside"), [(2, False), (MANY_MESSAGES + 1, True)])
async def test_many_messages_are_checked_and_rendered_beside_the_event_loop(
    num_messages: int, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, messages_of = WatchedText(), openai.messages_of

    def watched(messages: list[openai.ChatMessage]) -> list[dict[str, object]]:
        text.rendered_in.append(threading.current_thread())
        return messages_of(messages)

    monkeypatch.setattr(openai, "messages_of", watched)
    request = openai.ChatRequest(model="tiny", messages=[openai.ChatMessage(role="user", content="a")] * num_messages)
    ids = await encode_chat(text, request, add_special_tokens=False)
    assert ids == array("i", text.encode_chat(TextModel.render_chat(text, messages_of(request.messages or []))))
    assert [thread is not threading.current_thread() for thread in text.rendered_in] == [is_beside] * 2
