"""What the cluster asks of llguidance: the options of its JSON, what it takes no part in, its bounds, and its words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from pdcluster.core.errors import BadRequest

# Unknown before llguidance 1.9. Without it a string has no \\uXXXX but for control characters.
UNICODE_ESCAPES = "json_allow_general_unicode_escapes"
# Blanks only behind commas and colons, one at most. A model that likes line breaks would never end.
JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    UNICODE_ESCAPES: True,
}
OLD_OPTIONS = {name: value for name, value in JSON_OPTIONS.items() if name != UNICODE_ESCAPES}
# Models choose their tokens: nothing is forced by a tokenizer.
HEAD = '%llguidance {"no_forcing": true}\n'

# Ways that a grammar may be followed at a time. A thousand optional properties need so many; JSON takes 15 ms a token
# with them. With a client's own rules the time grows with their square.
MAX_ITEMS, MAX_ITEMS_OF_OWN = 5000, 500
# The automaton of a grammar's rows has up to 2 KB for each.
MAX_STATES = 50_000

# Bytes by which a grammar is tried, those first that end something.
TRIAL_BYTES = 24
NEAREST = b'"}],:'

# Where the library says at which place of its own input something is, or shows it.
PLACE = re.compile(
    r"^at \d+\(\d+\): |^failed to compile JSON schema: |\n\s+\d+ \|.*|\n\s*\^.*|\s*\n?<state>.*|:\s+\(And .*", re.DOTALL
)
REGEX_ERROR = re.compile(r"invalid regex .*error: ([^\n]*)|regex parse error:.*error: ([^\n]*)", re.DOTALL)

MISSING = "structured output needs llguidance, which this process does not have; install pdcluster[grammar] there"


def is_missing() -> bool:
    return find_spec("llguidance") is None


@cache
def byte_tokenizer() -> Any:
    """A vocabulary of single bytes, by which a grammar is tried."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def json_text(schema: Mapping[str, Any]) -> str:
    """A schema as Lark takes it. It may have options of its own."""
    made = {**schema, "x-guidance": {**JSON_OPTIONS, **schema.get("x-guidance", {})}}
    return json.dumps(made, ensure_ascii=False, separators=(",", ":"))


def fault_of(source: str) -> str | None:
    """Why the library does not take a grammar, or can not go on with it after some bytes."""
    tokenizer = byte_tokenizer()
    matcher = matcher_of(tokenizer, source)
    for _ in range(TRIAL_BYTES):
        allowed = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return words(matcher.get_error())
        nearest = next((each for each in (*NEAREST, *range(256)) if allowed[each >> 3] >> (each & 7) & 1), None)
        if nearest is None:
            return None  # it is complete
        matcher.consume_token(nearest)
    return None


def matcher_of(tokenizer: Any, source: str) -> Any:
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError as error:
        raise BadRequest(MISSING) from error
    most = MAX_ITEMS if source.startswith("%") else MAX_ITEMS_OF_OWN
    limits = LLParserLimits(max_items_in_row=most, max_lexer_states=MAX_STATES, verbose_errors=False)
    return LLMatcher(tokenizer, understood(source), log_level=0, limits=limits)


def understood(source: str) -> str:
    """A grammar as the installed library takes it. The one that vLLM pins is older than the routers'."""
    return source if knows_unicode_escapes() else source.replace(_options(JSON_OPTIONS), _options(OLD_OPTIONS))


@cache
def knows_unicode_escapes() -> bool:
    from llguidance import LLMatcher

    trial = HEAD + 'start: %json {"x-guidance":{"' + UNICODE_ESCAPES + '":true}}'
    return not LLMatcher(byte_tokenizer(), trial, log_level=0).is_error()


def _options(options: Mapping[str, Any]) -> str:
    """As they stand within a schema."""
    return json.dumps(options, separators=(",", ":"))[1:-1]


def fault_of_schema(schema: Mapping[str, Any]) -> str | None:
    return _fault_of(HEAD + "start: %json " + json_text(schema))


@lru_cache(maxsize=1024)
def _fault_of(source: str) -> str | None:
    return fault_of(source)


def words(error: str) -> str:
    """What the library says, without its own input, and not endlessly."""
    if (found := REGEX_ERROR.search(error)) is not None:
        error = found[1] or found[2]
    text = PLACE.sub("", PLACE.sub("", error.strip())) or "it allows nothing"
    return text if len(text) <= 500 else text[:500] + "…"


def regex_of(expression: str) -> str:
    """A regular expression as Lark takes it. Its classes are ASCII."""
    from llguidance import regex_to_lark

    return str(regex_to_lark(expression, "dw"))
