"""The short way of a stream's next tokens to its client: text in an event whose rest was written once, posted to the
connection.

For a choice whose events carry nothing but text, and whose text goes on as it comes; what else an event may need
(logprobs, stop strings, calls of tools, a client that has to read first) takes the general way, `answer`. Both say the
same bytes and leave the choice the same, but for offsets of tokens in the text, which only logprobs tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from pdcluster_router.core.generation import Take
from pdcluster_router.frontend.choices import OutputChoice
from pdcluster_router.http.exchange import ClientConnection


def through(choice: OutputChoice, line: ClientConnection, before: Mapping[int, bytes], after: bytes) -> Take:
    """before, after: what stands around an event's text, as JSON, the former by the text's size; line: where it goes.
    Two tokens came before."""
    text, clock, write_coalescer, parts = choice.text, choice.clock, line.write_coalescer, line.write_coalescer.parts
    texts = text.known(choice.vocab_size)

    def take(position: int, token_ids: tuple[int, ...]) -> bool:
        """Implements generation.Take: False where the client has to read first, or a token is wrong. Nearly all that a
        router says is said here, so it calls nothing that it need not."""
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
