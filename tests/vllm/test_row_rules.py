"""Grammars, penalties, bad words and min_tokens in vLLM's worker: as our own sampler draws, and a replay goes on exactly.

The reference is transformers' forward with our engine's own code of sampling. Greedy, float32.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Shape, build_model, save
from msgspec.structs import replace
from tiny_tokenizers import byte_level_files, with_config

from pdcluster.core.grammar import Grammar
from pdcluster.core.history import history_of
from pdcluster.core.sampling import Sampling, Shaping
from pdcluster.core.step import Row
from pdcluster.engine.sampling.constraint import Constraints, unbound
from pdcluster.engine.sampling.grammar import Grammars, vocabulary_of
from pdcluster.engine.sampling.penalties import SamplingRow
from pdcluster.engine.sampling.sampler import sample
from pdcluster.node.vllm.sampling.parameters import SamplerFacts, ending_of, to_vllm
from pdcluster.node.vllm.sampling.rules import dead_token_of

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed in this environment", allow_module_level=True)

# torch and vLLM warn of what they themselves still use.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

VOCAB, EOS = 448, 1
PROMPT = [5, 100, 200, 300, 77, 78, 79, 80, 81]
PLAIN = Sampling(max_tokens=40, seed=1, temperature=0.0, ignore_eos=True)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "cd"]},
        "age": {"type": "integer", "maximum": 120},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    shape = Shape("qwen3", head_dim=64, vocab_size=VOCAB, config={"eos_token_id": EOS, "bos_token_id": 0})
    save(build_model(shape, seed=3), path)
    for name, data in with_config(byte_level_files(), eos_token="<|eos|>").items():
        (path / name).write_bytes(data)
    return path


@pytest.fixture(scope="module")
def facts(directory: Path) -> SamplerFacts:
    return SamplerFacts(VOCAB, (EOS,), 20, dead_token=dead_token_of(vocabulary_of(directory, VOCAB, (EOS,))))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Any]:
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    from vllm import LLM

    from pdcluster.node.vllm.sampling.logits import FIRST_RUNNER

    llm = LLM(
        str(directory),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        enable_prefix_caching=False,
        logits_processors=[FIRST_RUNNER],
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


class Reference:
    """One answer by transformers and our own sampler."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.grammars = Grammars(lambda: vocabulary_of(directory, VOCAB, (EOS,)))

    @torch.no_grad()
    def answer(self, prompt: list[int], sampling: Sampling) -> list[int]:
        constraints = Constraints(self.grammars, (EOS,))
        while sampling.grammar is not None and not self.grammars.want(sampling.grammar):
            pass
        output: list[int] = []
        while len(output) < sampling.max_tokens:
            logits = self.model(torch.tensor([prompt + output])).logits[0, -1:]
            ids = np.array(output, np.int32)
            history = history_of(sampling.shaping, np.array(prompt, np.int32), ids)
            row = Row("r", ids, 0, ids, sampling, output_index=len(output), output=ids)
            masks, dead = constraints.of_step([row])
            assert not dead
            free = unbound(sampling) if masks else sampling
            token = sample(logits, [SamplingRow(free, len(output), len(output), history)], (EOS,), masks)[0]
            assert token is not None
            output.append(token)
            if (not sampling.ignore_eos and token == EOS) or token in sampling.stop_token_ids:
                break
        return output


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


def run(engine: Any, facts: SamplerFacts, prompt: list[int], *asked: tuple[Sampling, list[int]]) -> list[list[int]]:
    """Answers of rows in one batch, each (sampling, tokens emitted before)."""
    prompts = [{"prompt_token_ids": prompt + emitted} for _, emitted in asked]
    params = [to_vllm(sampling, len(emitted), facts) for sampling, emitted in asked]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def text_of(directory: Path, tokens: list[int]) -> str:
    pieces = vocabulary_of(directory, VOCAB, (EOS,)).tokens
    return b"".join(pieces[token] for token in tokens).decode()


WAYS = {
    "plain": PLAIN,
    "penalties": replace(PLAIN, shaping=Shaping(presence=1.5, frequency=0.7, repetition=1.3)),
    "biased": replace(PLAIN, shaping=Shaping(repetition=1.5, biases=tuple((token, 4.0) for token in range(50, 60)))),
    "min_tokens": replace(PLAIN, ignore_eos=False, min_tokens=12, stop_token_ids=tuple(range(100, 160))),
    "min_tokens beside ignore_eos": replace(PLAIN, min_tokens=12, stop_token_ids=tuple(range(100, 160))),
    "schema": replace(PLAIN, ignore_eos=False, grammar=None),
}


@pytest.mark.parametrize("name", WAYS)
def test_answers_are_our_sampler_s_and_replays_go_on_exactly(
    name: str, engine: Any, facts: SamplerFacts, reference: Reference, directory: Path
) -> None:
    sampling = WAYS[name]
    if name == "schema":
        sampling = replace(sampling, grammar=schema_grammar(SCHEMA))
    whole = run(engine, facts, PROMPT, (sampling, []))[0]
    assert whole == reference.answer(PROMPT, sampling)
    if name == "schema":
        assert set(json.loads(text_of(directory, whole[:-1]))) == {"name", "age", "ok"}
        assert whole[-1] == EOS
    cuts = [cut for cut in (1, 2, 5, 9, 17) if cut < len(whole)]
    assert cuts
    assert run(engine, facts, PROMPT, *((sampling, whole[:cut]) for cut in cuts)) == [whole[cut:] for cut in cuts]


def test_bad_words_by_id_are_never_completed_also_across_a_replay(
    engine: Any, facts: SamplerFacts, reference: Reference
) -> None:
    plain = run(engine, facts, PROMPT, (PLAIN, []))[0]
    words = ((plain[3],), tuple(plain[9:11]), tuple(plain[14:18]))
    sampling = replace(PLAIN, shaping=Shaping(bad_words=words))
    whole = run(engine, facts, PROMPT, (sampling, []))[0]
    assert whole != plain and whole == reference.answer(PROMPT, sampling)
    for word in words:
        assert not any(tuple(whole[at : at + len(word)]) == word for at in range(len(whole)))
    replays = run(engine, facts, PROMPT, *((sampling, whole[:cut]) for cut in range(1, 20)))
    assert replays == [whole[cut:] for cut in range(1, 20)]
    # A word that the replay's border cuts in two.
    emitted = plain[:3]
    border = replace(PLAIN, shaping=Shaping(bad_words=((emitted[-1], plain[3]),)))
    assert run(engine, facts, PROMPT, (border, emitted))[0][0] != plain[3]


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    from pdcluster.api.structured.library import HEAD, json_text

    return Grammar(HEAD + "start: %json " + json_text(schema))


@pytest.mark.parametrize(
    ("source", "pattern"),
    [('start: "yes" | "no" | "maybe"', "yes|no|maybe"), ("start: /[0-9]{3}-[a-f]+z/", r"[0-9]{3}-[a-f]+z")],
)
def test_choices_and_expressions_end_where_they_are_complete(
    source: str, pattern: str, engine: Any, facts: SamplerFacts, reference: Reference, directory: Path
) -> None:
    import re

    from pdcluster.api.structured.library import HEAD

    sampling = Sampling(max_tokens=60, seed=1, temperature=0.0, min_tokens=30, grammar=Grammar(HEAD + source))
    whole = run(engine, facts, PROMPT, (sampling, []))[0]
    assert whole == reference.answer(PROMPT, sampling)
    if whole[-1] == EOS:
        assert re.fullmatch(pattern, text_of(directory, whole[:-1]))
    else:
        assert len(whole) == 60
    assert run(engine, facts, PROMPT, (sampling, whole[:2]))[0] == whole[2:]


def test_rows_of_a_batch_keep_to_themselves(engine: Any, facts: SamplerFacts) -> None:
    """More rows than fit, of unequal lengths: they enter, leave and move."""
    kinds = [*WAYS.values(), replace(PLAIN, ignore_eos=False, grammar=schema_grammar(SCHEMA))]
    asked = [
        (replace(kind, max_tokens=5 + 3 * (number % 9)), list(range(20, 20 + number % 4)))
        for number, kind in enumerate(kinds * 4)
        if kind.grammar is None or number % 4 == 0
    ]
    asked = [(kind, emitted if kind.grammar is None else []) for kind, emitted in asked]
    together = run(engine, facts, PROMPT, *asked)
    assert together == [run(engine, facts, PROMPT, each)[0] for each in asked]


def test_a_row_whose_output_does_not_fit_its_grammar_ends_as_an_error(engine: Any, facts: SamplerFacts) -> None:
    sampling = Sampling(max_tokens=20, seed=1, temperature=0.0, grammar=schema_grammar(SCHEMA))
    other = replace(sampling, grammar=None, ignore_eos=True)
    broken, fine = run(engine, facts, PROMPT, (sampling, [7, 8, 9]), (other, []))
    assert facts.dead_token is not None and broken == [facts.dead_token]
    assert ending_of(sampling, facts, broken[-1]) == "error"
    assert fine == run(engine, facts, PROMPT, (other, []))[0]


def test_rules_that_cannot_be_read_are_refused_at_the_front(engine: Any, facts: SamplerFacts) -> None:
    params = to_vllm(PLAIN, 0, facts)
    params.extra_args = {"pdcluster_rules": b"\x93"}
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="cannot be read"):
        engine.generate([{"prompt_token_ids": PROMPT}], [params], use_tqdm=False)


def test_logprobs_are_those_of_the_raw_logits(engine: Any, facts: SamplerFacts, reference: Reference) -> None:
    from pdcluster.engine.sampling.sampler import token_logprobs
    from pdcluster.node.vllm.sampling.parameters import from_vllm_logprobs

    sampling = replace(PLAIN, max_tokens=4, logprobs=3, shaping=Shaping(bad_words=((9,),)))
    output = engine.generate([{"prompt_token_ids": PROMPT}], [to_vllm(sampling, 0, facts)], use_tqdm=False)[0].outputs[
        0
    ]
    with torch.no_grad():
        logits = reference.model(torch.tensor([PROMPT + list(output.token_ids)])).logits[0, len(PROMPT) - 1 : -1]
    expected = token_logprobs(logits, list(output.token_ids), [3] * 4, ranked=True)
    for entry, token, want in zip(output.logprobs, output.token_ids, expected, strict=True):
        found = from_vllm_logprobs(entry, token, 3, ranked=True)
        assert found.top_ids == want.top_ids and found.rank == want.rank
        assert found.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert found.top_logprobs == pytest.approx(want.top_logprobs, abs=1e-4)
