"""What a mask and a compile take: random walks through grammars of schemas, this tree in turns with the one before."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bench.harness.report import Row
from bench.structured.columns import Column, Ended


def _object(**properties: object) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TEXT, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
PERSON = _object(name=TEXT, age=INTEGER, email={"type": "string", "format": "email"})
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": _object(value=INTEGER, children={"type": "array", "items": {"$ref": "#/$defs/node"}})},
}
SCHEMAS: dict[str, object] = {
    "an object of 100 properties": _object(**{f"field_{number}": (TEXT, INTEGER)[number % 2] for number in range(100)}),
    "100 optional properties": {
        "type": "object",
        "properties": {f"field_{number}": TEXT for number in range(100)},
        "additionalProperties": False,
    },
    "nested objects": _object(a=_object(b=_object(c=_object(d=PERSON, e=PERSON), f=PERSON), g=PERSON), h=PERSON),
    "arrays of objects": _object(people={"type": "array", "items": PERSON}),
    "an enum of 200 texts": _object(code={"enum": [f"code-{number:03}-{number % 7}" for number in range(200)]}),
    "patterns": _object(
        zip={"type": "string", "pattern": r"^\d{5}$"},
        phone={"type": "string", "pattern": r"^\+[1-9]\d{1,14}$"},
        slug={"type": "string", "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$"},
    ),
    "formats": _object(**{name: {"type": "string", "format": name} for name in ("date", "uuid", "ipv4", "date-time")}),
    "numbers": _object(share={"type": "number", "minimum": 0, "maximum": 1}, count=INTEGER, any=NUMBER),
    "free texts": _object(title=TEXT, body=TEXT, short={"type": "string", "maxLength": 200}),
    "a recursive tree": TREE,
    "any JSON": {},
    "a tool call": {
        "anyOf": [
            _object(name={"const": "search"}, arguments=_object(query=TEXT, limit=INTEGER)),
            _object(name={"const": "open"}, arguments=_object(url=TEXT)),
            _object(name={"const": "run"}, arguments={"type": "object"}),
        ]
    },
}


@dataclass(slots=True)
class Taken:
    """Seconds of one column, by schema."""

    compile_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    masks_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def all_of(self, found: Mapping[str, list[float]], case: str) -> list[float]:
        return found[case] if case else [each for samples in found.values() for each in samples]


def rows(model: Path, compared: Sequence[Column], walks: int, steps: int) -> list[Row]:
    """Of one model's tokens: of all schemas together, then of each."""
    vocabulary = vocabulary_of(model)
    for column in compared:
        column.close()
        column.vocabulary = vocabulary
    taken = [Taken() for _ in compared]
    for seed in range(walks):
        for name, schema in SCHEMAS.items():
            for column, found in zip(compared, taken, strict=True):
                _walk(column, found, name, {"kind": "walk", "schema": schema, "seed": seed, "steps": steps})
    label = f"{model.parent.name.removeprefix('tokenizer-')}, {vocabulary['size']} tokens"
    return [row for case in ("", *SCHEMAS) for row in _rows_of(label, case, compared, taken)]


def vocabulary_of(model: Path) -> dict[str, object]:
    """The line that gives a process the model's tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    named = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    eos = tokenizer.token_to_id(named["content"] if isinstance(named, dict) else named)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return {"kind": "load", "directory": str(model), "size": size, "eos": [eos]}


def _walk(column: Column, found: Taken, name: str, what: Mapping[str, object]) -> None:
    try:
        answer: dict[str, Any] = column.ask(what)
    except Ended as error:
        print(f"{name}: {error}")
        return
    if "refused" in answer:
        print(f"{name}: {column.name} refuses it: {answer['refused'][:100]}")
        return
    if answer["num_wrong"]:
        print(f"{name}: {answer['num_wrong']} tokens of {column.name}'s masks were not accepted")
    found.compile_s[name].append(answer["compile_s"])
    found.masks_s[name] += answer["masks_s"]


def _rows_of(label: str, case: str, compared: Sequence[Column], taken: Sequence[Taken]) -> list[Row]:
    """Medians and 99th percentiles of masks, and the median of compiles."""
    masks = [each.all_of(each.masks_s, case) for each in taken]
    compiles = [each.all_of(each.compile_s, case) for each in taken]
    if not all(masks):
        return []
    figures = {
        "mask, median": ([1e6 * statistics.median(each) for each in masks], "us"),
        "mask, p99": ([1e6 * float(np.percentile(each, 99)) for each in masks], "us"),
        "compile, median": ([1e3 * statistics.median(each) for each in compiles], "ms"),
    }
    if not case:
        figures["mask, longest"] = ([1e6 * max(each) for each in masks], "us")
    place = f"{case or 'all schemas'}, {label}"
    return [
        Row(metric, place, own, unit, against=column.name, against_value=other, better="less")
        for metric, ((own, *others), unit) in figures.items()
        for column, other in zip(compared[1:], others, strict=True)
    ]
