"""Everything between text and token ids for one model: tokenizer, chat template, special tokens, sampling defaults.

Built from the bytes of the model's files, never from the network, and without torch or transformers.
"""

from __future__ import annotations

import json
import logging
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pdcluster.api.text.chat_template import ChatTemplate, Message
from pdcluster.api.text.control_tokens import ControlTokens
from pdcluster.api.text.detokenizer import ChainDetokenizer, Detokenizer, build_pieces, detokenize
from pdcluster.api.text.known_ids import check_known_ids
from pdcluster.api.text.segments import SHORT_CHARACTERS, SegmentedEncoder
from pdcluster.api.text.template_bounds import PATIENT, Bounds
from pdcluster.api.text.text_bound import TextBound
from pdcluster.api.tools.formats import detect
from pdcluster.api.tools.markers import MARKERS
from pdcluster.api.tools.reasoning import knows_reasoning
from pdcluster.checkpoint.chat_templates import DEFAULT_TEMPLATE, TEMPLATE_FILES, TOOL_TEMPLATE
from pdcluster.checkpoint.end_tokens import eos_token_ids
from pdcluster.checkpoint.text_files import read_text_files
from pdcluster.checkpoint.token_ids import content_of, json_object, special_config
from pdcluster.core.errors import BadRequest, ModelError
from pdcluster.core.sampling import LEAST_REPETITION, MOST_REPETITION

log = logging.getLogger(__name__)

# Special tokens of prompts and answers. A missing padding token is never needed.
ENDS = ("bos_token", "eos_token")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The model authors' recommendation (generation_config.json), for fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0


class TextModel:
    """Immutable after construction, except for the cached segments of chats. Several threads may use it.

    info: the tokenizer's configuration for clients, special tokens as text.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        tool_format: str = "auto",
        reasoning: str = "auto",
        user_control_tokens: str = "parse",
    ) -> None:
        """files: contents by name, of those in files.TEXT_FILES that the model has. Only tokenizer.json is required.
        tool_format, reasoning: how the model marks calls of tools (a name of api.tools.formats) and thoughts (think),
        or none. auto: as its chat template shows. user_control_tokens: parse, or refuse them in what users and tools
        say.

        Raises ModelError naming the missing or wrong file.
        """
        try:
            self._build(files)
            self._control = ControlTokens(self._tokenizer) if user_control_tokens == "refuse" else None
            source = "" if self.tool_template is None else self.tool_template.source
            self.tool_format = (
                detect(source) if tool_format == "auto" else None if tool_format == "none" else tool_format
            )
            sources = [template.source for template in (self.template, self.tool_template) if template is not None]
            self.reasons = any(map(knows_reasoning, sources)) if reasoning == "auto" else reasoning == "think"
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
        ) as error:  # JSON files of an unexpected shape
            raise ModelError(
                f"the model's text files are not as expected: {type(error).__name__}: {error}; take its original files"
            ) from error

    def _build(self, files: Mapping[str, bytes]) -> None:
        config = special_config(files)
        generation = json_object(files, "generation_config.json")
        special = _special_tokens(config)
        self._tokenizer = _load_tokenizer(files, config, special)
        content = json_object(files, "tokenizer.json")
        self.segments = SegmentedEncoder(self._tokenizer, content)
        self.bound = TextBound(self._tokenizer, content)
        self.pieces = build_pieces(self._tokenizer, content.get("decoder"))
        templates = templates_of(files)
        self.template = templates.get(DEFAULT_TEMPLATE)
        self.tool_template = templates.get(TOOL_TEMPLATE, self.template)
        source = None if self.template is None else self.template.source
        check_known_ids(files, templates.values)
        self.info = {"tokenizer_class": None, **config, **special, "chat_template": source}
        self._marks = frozenset(
            index for index in self.pieces.special if self.pieces.table[index].decode(errors="replace") in MARKERS
        )
        self.defaults = _sampling_defaults(generation)
        self.eos_token_ids = eos_token_ids(files)

    @classmethod
    def from_dir(cls, directory: Path) -> TextModel:
        return cls(read_text_files(directory))

    @property
    def vocab_size(self) -> int:
        """Highest token id of the tokenizer, plus one. The model's own vocabulary may be padded beyond it."""
        return len(self.pieces.table)

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """add_special_tokens: for plain prompts; a chat template writes its own. Long text does not hold the GIL."""
        if len(text) <= SHORT_CHARACTERS:
            return array("i", self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        return array("i", self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_chat(self, text: str, owner: bytes = b"") -> array[int]:
        """Ids of a text from `render_chat`, with its special tokens and none added. Segments that were encoded before
        for this owner, such as a tenant's salt, cost nothing.
        """
        return self.segments.encode(text, owner)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        bounds: Bounds = PATIENT,
    ) -> str:
        """The prompt's text with special tokens, for `encode_chat`. Raises TakesLong where bounds are BRIEF."""
        template = self.template if tools is None else self.tool_template
        if template is None:
            what = "no chat template" if self.tool_template is None else "a chat template only for prompts with tools"
            way_out = "use /v1/completions, or put a chat_template.jinja beside its tokenizer.json"
            raise BadRequest(f"this model has {what}; {way_out}", "messages")
        if self._control is not None:
            self._control.check(messages)
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
            tools=tools,
            bounds=bounds,
        )

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True, at_start: bool = True) -> str:
        return detokenize(self.pieces, token_ids, skip_special_tokens=skip_special_tokens, at_start=at_start)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, at_start: bool = True, shows_marks: bool = False
    ) -> Detokenizer | ChainDetokenizer:
        """shows_marks: tokens that mark parts of an answer are text, even if special."""
        detokenizer = self.pieces.stream(skip_special_tokens=skip_special_tokens, at_start=at_start)
        if shows_marks and self._marks:
            detokenizer.show(self._marks)
        return detokenizer


def templates_of(files: Mapping[str, bytes]) -> dict[str, ChatTemplate]:
    """The chat templates of a model that are used, by name. Raises ModelError where one does not compile."""
    config = special_config(files)
    special = _special_tokens(config)
    return {name: ChatTemplate(text, special) for name, text in _template_sources(files, config).items()}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = ((name, content_of(config.get(name))) for name in SPECIAL_NAMES)
    return {name: content for name, content in found if content is not None}


def _load_tokenizer(files: Mapping[str, bytes], config: Mapping[str, Any], special: Mapping[str, str]) -> Tokenizer:
    if "tokenizer.json" not in files:
        way_out = "make one with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        raise ModelError(f"the model has no tokenizer.json; {way_out}")
    try:
        tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(f"tokenizer.json cannot be read: {error}") from error
    # A file may carry truncation and padding of the training run, which would cut prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_missing_tokens(tokenizer, config, special)
    _tell_passed_over(tokenizer, config, special)
    return tokenizer


def _add_missing_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add tokens that tokenizer_config.json names and tokenizer.json lacks, under the next ids."""
    decoder: Mapping[str, Mapping[str, Any]] = config.get("added_tokens_decoder") or {}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token_id, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        if entry["content"] in known:
            continue
        tokenizer.add_tokens([AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})])
        got = tokenizer.token_to_id(entry["content"])
        if got != int(token_id):
            content = entry["content"]
            raise ModelError(
                f"tokenizer_config.json gives {content!r} the id {token_id}, tokenizer.json makes it {got}; use "
                "files of one model"
            )
    there = {name: token for name, token in special.items() if tokenizer.token_to_id(token) is not None}
    missing = [special[name] for name in ENDS if name in special and name not in there]
    if missing:
        raise ModelError(
            f"tokenizer_config.json names the special tokens {missing}, which tokenizer.json does not hold; use "
            "files of one model"
        )
    tokenizer.add_special_tokens([token for token in there.values() if token not in known])


def _tell_passed_over(tokenizer: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """tokenizer.json decides what plain prompts begin and end with. As in transformers 5, and so in vLLM, add_bos_token
    and add_eos_token of tokenizer_config.json count for nothing beside it.
    """
    added = tokenizer.encode("", add_special_tokens=True).ids
    for name in ENDS:
        flag, token = f"add_{name}", special.get(name)
        is_added = token is not None and tokenizer.token_to_id(token) in added
        if config.get(flag) is not None and bool(config[flag]) != is_added:
            log.warning(
                "tokenizer_config.json: %s %s is passed over, since the post_processor of tokenizer.json decides; it "
                "%s %s to prompts of completions, so change it there if that is wrong",
                flag,
                json.dumps(config[flag]),
                "adds" if is_added else "does not add",
                token,
            )


def _template_sources(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """The templates that are used, by name. As in transformers, those of files of their own are all there are; without
    any it is those of tokenizer_config.json, else of chat_template.json.
    """
    found: dict[str, Any] = {name: files[file].decode() for file, name in TEMPLATE_FILES.items() if file in files}
    if not found:
        source = config.get("chat_template") or json_object(files, "chat_template.json").get("chat_template") or {}
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}
        found = source if isinstance(source, dict) else {DEFAULT_TEMPLATE: source}
    used = {name: found[name] for name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE) if name in found}
    for source in used.values():
        if not isinstance(source, str):
            raise ModelError(
                f"chat_template is a {type(source).__name__}; it must be text, or a list of named templates"
            )
    return used


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    temperature, top_p = _number(generation, "temperature", 0.0, 100.0), _number(generation, "top_p", 1e-6, 1.0)
    top_k = _number(generation, "top_k", -1, math.inf)
    return SamplingDefaults(
        temperature=1.0 if temperature is None else temperature,
        top_p=None if top_p == 1.0 else top_p,
        top_k=None if top_k is None or top_k < 1 else int(top_k),
        min_p=_number(generation, "min_p", 0.0, 1.0) or None,
        repetition_penalty=_number(generation, "repetition_penalty", LEAST_REPETITION, MOST_REPETITION) or 1.0,
    )


def _number(generation: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    """None where the file does not set it."""
    given = generation.get(name)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not least <= given <= most:
        allowed = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
        raise ModelError(f"generation_config.json: {name} is {given!r}; it must be a number {allowed}")
    return float(given)
