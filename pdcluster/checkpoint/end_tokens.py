"""Which tokens end an answer: all that generation_config.json, config.json or the tokenizer name.

Fine-tuned models often name their new end in one of them only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdcluster.checkpoint.token_ids import content_of, json_object, special_config, token_id
from pdcluster.core.errors import ModelError

SOURCES = ("generation_config.json", "config.json")


def eos_token_ids(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """In the order of sources, each once. files: a model's text files by name. Raises ModelError for a value that is no
    id.
    """
    return tuple(dict.fromkeys(_named(files)))


def _named(files: Mapping[str, bytes]) -> Iterator[int]:
    for source in SOURCES:
        value = json_object(files, source).get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ModelError(f"{source}: eos_token_id {token!r} is no token id; correct it")
            yield token
    content = content_of(special_config(files).get("eos_token"))
    if content is not None and "tokenizer.json" in files and (found := token_id(files, content)) is not None:
        yield found
