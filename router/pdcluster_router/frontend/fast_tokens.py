"""The fast token path of a stream: a token's text goes between prepared bytes, straight to its connection.

It serves choices whose events hold only text that goes on. All else (logprobs, stop strings, tool calls, a client that
must read first) goes through `response`. Both send the same bytes and leave the choice in the same state, but for text
offsets, which only logprobs use.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from pdcluster_router.core.generation import TakeTokens
from pdcluster_router.frontend.choices import OutputChoice
from pdcluster_router.http.exchange import ClientConnection


def fast_token_path(
    choice: OutputChoice, line: ClientConnection, before: Mapping[int, bytes], after: bytes
) -> TakeTokens:
    """The fast path of a choice whose first two tokens were sent.

    before, after: what stands around an event's text, as JSON; `before` by the text's size.
    line: the connection.
    """
    text, clock, write_coalescer, parts = choice.text, choice.clock, line.write_coalescer, line.write_coalescer.parts
    texts = text.known(choice.vocab_size)

    def take(position: int, token_ids: tuple[int, ...]) -> bool:
        """Implements generation.TakeTokens: False where the client must read first, or a token is wrong. Most of a
        router's output comes here, so it calls as little as possible.
        """
        said = texts.known.get(token_ids)
        if said is None or line.is_paused or text.num_tokens != position:
            return take_unknown(position, token_ids)
        text.num_tokens = position + 1
        clock.last = monotonic()
        data = before[len(said)] + said + after
        if line in parts:
            line.post(data)
        else:
            parts[line] = data
            if not write_coalescer.is_due:
                write_coalescer.flush_soon()
        return True

    def take_unknown(position: int, token_ids: tuple[int, ...]) -> bool:
        if (
            line.is_paused
            or text.num_tokens != position
            or len(token_ids) != 1
            or not 0 <= token_ids[0] < choice.vocab_size
        ):
            return False
        said = text.say(token_ids[0])
        clock.last = monotonic()
        line.post(before[len(said)] + said + after)
        return True

    return take
