"""Whether the model has an embedding for the ids that its text files use. Those that end an answer, or that a prompt or
a call of a tool is written with, are refused where it has none.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from pdcluster.api.text.chat_template import ChatTemplate
from pdcluster.api.tools.markers import MARKERS
from pdcluster.checkpoint.end_tokens import SOURCES
from pdcluster.checkpoint.token_ids import (
    content_of,
    json_object,
    processed_tokens,
    special_config,
    tokens_beyond,
    vocab_size,
)
from pdcluster.core.errors import BadRequest, ModelError

log = logging.getLogger(__name__)

# Of config.json and generation_config.json.
NEEDED = ("bos_token_id", "eos_token_id")
NAMED = ("bos_token", "eos_token")
MOST_SHOWN = 5
CHAT = (
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
)
TOOLS = ({"type": "function", "function": {"name": "e", "description": "f", "parameters": {"type": "object"}}},)


def check_known_ids(files: Mapping[str, bytes], templates: Callable[[], Iterable[ChatTemplate]]) -> None:
    """Raises ModelError for an id that is needed; warns once of others. Without a config.json that says how many ids
    there are, nothing is known.

    files: a model's text files by name.
    templates: those of the model, asked for where they matter.
    """
    size = vocab_size(files)
    if size is None:
        return
    added, others = tokens_beyond(files, size)
    beyond = {**others, **added, **{content: index for content, index in processed_tokens(files) if index >= size}}
    numbers: dict[str, int] = {}
    for source, name, index in _numbers_beyond(files, size):
        if name in NEEDED:
            raise _refusal(f"{source}: {name}", index, size)
        numbers[f"{source}: {name}"] = index
    if not beyond and not numbers:
        return
    for where, content in _needed(files, added, templates):
        if content in beyond:
            raise _refusal(f"{where} {content!r}", beyond[content], size)
    shown = [f"{content!r} {index}" for content, index in (*beyond.items(), *numbers.items())]
    log.warning(
        "ids from %d on are none of the model (config.json: vocab_size), but the text files have %d: %s%s; a prompt "
        "with one is refused",
        size,
        len(shown),
        ", ".join(shown[:MOST_SHOWN]),
        ", …" if len(shown) > MOST_SHOWN else "",
    )


def _numbers_beyond(files: Mapping[str, bytes], size: int) -> Iterator[tuple[str, str, int]]:
    for source in SOURCES:
        for name, value in json_object(files, source).items():
            for index in value if isinstance(value, list) else [value]:
                if name.endswith("_token_id") and isinstance(index, int) and index >= size:
                    yield source, name, index


def _needed(
    files: Mapping[str, bytes], added: Mapping[str, int], templates: Callable[[], Iterable[ChatTemplate]]
) -> Iterator[tuple[str, str]]:
    """Where a token is named, and its content."""
    special = special_config(files)
    for name in NAMED:
        if (content := content_of(special.get(name))) is not None:
            yield f"tokenizer_config.json: the {name}", content
    for content, _ in processed_tokens(files):
        yield "tokenizer.json: the post_processor's token", content
    for content in sorted(MARKERS):
        yield "tokenizer.json: the marker of tool calls or thoughts", content
    if added:
        written = "\n".join(line for template in templates() for line in _written(template))
        for content in added:
            if content in written:
                yield "the chat template's token", content


def _written(template: ChatTemplate) -> Iterator[str]:
    """What a template holds, and what it writes: it may put tokens together."""
    yield template.source
    for chat in (CHAT, CHAT[1:], CHAT[1:2]):
        for tools in (None, TOOLS):
            with contextlib.suppress(BadRequest):  # it takes no such chat, and so writes nothing
                yield template.render(chat, tools=tools)


def _refusal(what: str, index: int, size: int) -> ModelError:
    return ModelError(
        f"{what} has the id {index}, but the model only has 0 to {size - 1} (config.json: vocab_size); take files of "
        "one model, correct them, or enlarge its embeddings (transformers: resize_token_embeddings)"
    )
