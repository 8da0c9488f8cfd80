# mypy: ignore-errors
# Runs with an xgrammar of its own, and beside another commit of this tree.
"""xgrammar behind the protocol of `grammar_worker`, which lies beside this file.

python rival_xgrammar.py converter       by its own converter of JSON schemas
python rival_xgrammar.py before          by the rules that the tree in PYTHONPATH writes for it
"""

import json
import sys
from importlib.metadata import version

import numpy as np
import xgrammar
from grammar_worker import Worker


class Rival:
    """One of two ways from a schema to a grammar."""

    version = version("xgrammar")

    def __init__(self, way):
        self._compile = {"converter": self._converted, "before": self._written}[way]

    def use(self, tokens, eos):
        info = xgrammar.TokenizerInfo(
            list(tokens), xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(eos)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema):
        try:
            return self._compile(schema)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def begin(self, compiled):
        return Matcher(compiled)

    def _converted(self, schema):
        """With names that are not declared, as the standard has it, and without blanks."""
        return self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(",", ":"), strict_mode=False
        )

    def _written(self, schema):
        from pdcluster.api.structured.constraints import grammar_of, json_form
        from pdcluster.core.errors import BadRequest

        try:
            source = grammar_of(json_form(schema, "schema"), "schema").source
        except BadRequest as error:
            raise ValueError(str(error)) from error
        return self._compiler.compile_structural_tag(f'{{"type":"structural_tag","format":{source}}}')


class Matcher:
    """A matcher with masks of its own."""

    def __init__(self, compiled):
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = -(-compiled.tokenizer_info.vocab_size // 32)

    def accept(self, token):
        return self._matcher.accept_token(token)

    def mask(self):
        words = np.full((1, self._words), -1, np.int32)
        self._matcher.fill_next_token_bitmask(words, 0)
        return words[0]


if __name__ == "__main__":
    Worker(Rival(sys.argv[1])).serve()
