"""Grammars on the engine: whatever a model prefers to say, what comes is of the asked shape; and the state follows from
the output alone."""

import json
import math
import re
import threading
import time
import traceback

import jsonschema
import numpy as np
import pytest
import torch
from random_schemas import random_schema
from scheduled import run

from pdcluster.api.structured import forms, library
from pdcluster.api.structured.forms import Form
from pdcluster.api.text.model_text import TextModel
from pdcluster.api.tools.formats import FORMATS
from pdcluster.api.tools.tool_choice import Function, Offer, ToolDefinition
from pdcluster.checkpoint.bundled import path
from pdcluster.core.errors import BadRequest, Overloaded
from pdcluster.core.grammar import MAX_DEPTH, Grammar
from pdcluster.core.sampling import Sampling
from pdcluster.core.step import Row
from pdcluster.engine.engine import Engine, EngineConfig
from pdcluster.engine.sampling.constraint import Constraint, Constraints, masked, without
from pdcluster.engine.sampling.deadline_pool import MAX_LEFT
from pdcluster.engine.sampling.grammar import LARGE_CHARS, Compiled, GrammarLimits, Grammars, Vocabulary, vocabulary_of

TEXT = TextModel.from_dir(path())
EOS = TEXT.eos_token_ids


def grammar(form: Form) -> Grammar:
    return forms.grammar_of(form, "test")


def regex(pattern: str) -> Grammar:
    return grammar(forms.regex_form(pattern, "test"))


def compile_now(grammars: Grammars, wanted: Grammar, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not grammars.want(wanted):
        assert time.monotonic() < until, "it did not compile"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(
        EngineConfig(path(), tmp_path_factory.mktemp("cache"), dtype="float32", num_pages=256, max_len=1024)
    )
    yield engine
    engine.close()


@pytest.fixture
def grammars():
    made = Grammars(lambda: vocabulary_of(path(), TEXT.vocab_size, EOS))
    yield made
    made.close()


def ask(engine: Engine, wanted: Grammar | None, *, max_tokens: int = 120, seed: int = 1, **fields) -> Sampling:
    if wanted is not None:
        compile_now(engine.grammars, wanted)
    return Sampling(max_tokens=max_tokens, seed=seed, grammar=wanted, **fields)


def say(engine: Engine, *samplings: Sampling, prompt: str = "The answer is", **options) -> list[str]:
    """Of each the text, without the token that ended it."""
    outputs, _ = run(engine, TEXT.encode(prompt, add_special_tokens=False), samplings, **options)
    return [TEXT.decode([token for token in tokens if token not in EOS]) for tokens in outputs]


def test_a_regular_expression_is_kept_greedy_and_drawn_beside_rows_that_have_none(engine):
    wanted = regex(r"[a-f]{3}-\d{2,4}")
    texts = say(
        engine,
        ask(engine, wanted, temperature=0.0),
        ask(engine, None, max_tokens=20),
        ask(engine, wanted),
        ask(engine, wanted, seed=7),
    )
    assert all(re.fullmatch(r"[a-f]{3}-\d{2,4}", text) for text in (texts[0], *texts[2:]))
    assert texts[1] == say(engine, ask(engine, None, max_tokens=20))[0]


def test_a_choice_is_one_of_them(engine):
    form = forms.choice_form(["yes", "no", "maybe"], "choice")
    assert set(say(engine, *(ask(engine, grammar(form), seed=seed, temperature=2.0) for seed in range(12)))) <= {
        "yes",
        "no",
        "maybe",
    }


def test_an_ebnf_grammar_is_kept(engine):
    form = forms.own_form('root ::= "(" root ")" | [a-z]+', "grammar")
    for text in say(engine, *(ask(engine, grammar(form), seed=seed) for seed in range(4))):
        assert re.fullmatch(r"(\(*)[a-z]+(\)*)", text) or len(text) > 50


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(20, 1000))]
)
def test_output_is_valid_for_a_random_schema(engine, seed):
    """Cut off by max_tokens it may be, wrong never: what was said is then the beginning of something valid."""
    schema = random_schema(seed)
    wanted = grammar(forms.json_form(schema, "schema"))
    sampling = ask(engine, wanted, max_tokens=600, seed=seed, temperature=0.3)
    ((*tokens, last),), _ = run(engine, TEXT.encode("{", add_special_tokens=False), [sampling])
    assert last in EOS, "a random schema of ours is short"
    jsonschema.validate(json.loads(TEXT.decode(tokens)), schema)


def test_a_preempted_row_and_one_that_moved_go_on_as_if_nothing_had_happened(engine):
    wanted = grammar(
        forms.json_form({"type": "array", "items": {"type": "integer"}, "minItems": 30, "maxItems": 60}, "s")
    )
    samplings = [ask(engine, wanted, seed=seed, max_tokens=150) for seed in range(3)]
    prompt = TEXT.encode("numbers: " * 20, add_special_tokens=False)
    whole, _ = run(engine, prompt, samplings)
    preempted, scheduler = run(engine, prompt, samplings, num_pages=10, name="p")
    assert scheduler.num_preemptions > 0 and preempted == whole
    for index, sampling in enumerate(samplings):
        moved, _ = run(engine, prompt, [sampling], emitted=whole[index][:41], token_budget=64, name=f"m{index}")
        assert moved == [whole[index]]


@pytest.mark.parametrize(
    ("name", "begun"), [("hermes", "Let me see.\n<tool_call>"), ("mistral", "hm [TOOL_CALLS]fi"), ("llama", " {")]
)
def test_a_row_that_moved_within_the_mark_of_a_strict_call_goes_on_with_that_call(engine, name, begun):
    schema = {
        "type": "object",
        "properties": {"x": {"enum": ["a", "b"]}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tool = Function("find", parameters=schema, strict=True)
    form = FORMATS[name].free_form(offer := Offer([tool], [ToolDefinition(tool)], False, False), reasons=False)
    emitted = list(TEXT.encode(begun, add_special_tokens=False))
    sampling = ask(engine, grammar(form), max_tokens=120, temperature=1.5)
    (output,), _ = run(engine, TEXT.encode("find it", add_special_tokens=False), [sampling], emitted=emitted, name=name)
    assert output[: len(emitted)] == emitted
    parser = FORMATS[name].parse(offer)
    (call, *more) = [
        part
        for part in parser.feed(TEXT.decode([token for token in output if token not in EOS]))
        if not isinstance(part, str)
    ]
    assert call.name == "find"
    jsonschema.validate(json.loads("".join(part.arguments for part in (call, *more))), schema)


def test_max_tokens_cuts_and_min_tokens_yields_to_the_grammar(engine):
    wanted = regex(r"a+|bcd")
    (cut,) = say(engine, ask(engine, wanted, max_tokens=2, min_tokens=2))
    assert re.fullmatch(r"a+|b|bc|bcd", cut)
    (only,) = say(engine, ask(engine, regex("yes"), min_tokens=20, max_tokens=40))
    assert only == "yes"
    (long,) = say(engine, ask(engine, regex("a+"), min_tokens=10, max_tokens=40))
    assert len(TEXT.encode(long, add_special_tokens=False)) <= 40 and len(long) >= 10


def test_state_made_anew_allows_the_same_as_state_that_was_kept(grammars):
    wanted = grammar(
        forms.json_form({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "s")
    )
    compile_now(grammars, wanted)
    kept, output = Constraint(grammars.find(wanted)), []
    generator = np.random.default_rng(5)
    while len(output) < 30:
        mask = kept.mask()
        fresh = Constraint(grammars.find(wanted))
        assert all(fresh.accept(token) for token in output)
        assert np.array_equal(fresh.mask(), mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(generator.choice(allowed))
        assert kept.accept(token)
        output.append(token)
        if token in EOS:
            return


def test_a_lost_state_and_a_foreign_token_end_one_row_only(engine):
    wanted = regex("[ab]{30}")
    sampling = ask(engine, wanted, max_tokens=4, temperature=0.0)
    bad = np.array(TEXT.encode("zzz", add_special_tokens=False), np.int32)
    fresh = np.empty(0, np.int32)
    masks, dead = engine._constraints.of_step([row_of("a", bad, sampling), row_of("b", fresh, sampling)])
    assert list(masks) == [1] and "does not fit" in dead[0].reason and not dead[0].retryable
    unknown = Sampling(max_tokens=4, seed=1, grammar=regex("never compiled"))
    _, dead = engine._constraints.of_step([row_of("b", fresh, unknown)])
    assert dead[0].retryable


# What may follow takes longer to find with every token.
AMBIGUOUS = "start: e\ne: e e | e e e | e e e e | /[a-z]/"


@pytest.fixture
def busy_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a late mask did, it counts as computing."""
    monkeypatch.setattr("pdcluster.engine.sampling.deadline_pool._cpu_s", lambda thread: math.inf)


@pytest.mark.usefixtures("busy_masks")
def test_a_row_whose_mask_takes_too_long_ends_alone_and_its_grammar_is_refused(grammars, monkeypatch):
    slow, quick, may_end, mask = regex("[a-c]{9}"), regex("[ab]{30}"), threading.Event(), Constraint.mask
    for wanted in (slow, quick):
        compile_now(grammars, wanted)
    monkeypatch.setattr(Constraint, "mask", lambda self: (self.grammar == slow and may_end.wait(60), mask(self))[1])
    constraints, fresh = Constraints(grammars, EOS, mask_s=0.5), np.empty(0, np.int32)
    try:
        rows = [
            row_of(key, fresh, Sampling(max_tokens=50, seed=1, grammar=wanted))
            for key, wanted in (("s", slow), ("q", quick))
        ]
        masks, dead = constraints.of_step(rows)
        assert list(masks) == [1] and list(dead) == [0] and len(constraints) == 1
        assert "takes too long" in dead[0].reason and not dead[0].retryable
        with pytest.raises(BadRequest, match="ambiguous"):
            grammars.want(slow)
    finally:
        may_end.set()
        constraints.close()


def test_a_mask_that_gets_no_cpu_says_nothing_against_its_grammar(grammars, monkeypatch):
    wanted, may_end, mask = regex("[a-c]{9}"), threading.Event(), Constraint.mask
    compile_now(grammars, wanted)
    monkeypatch.setattr(Constraint, "mask", lambda self: (may_end.wait(60), mask(self))[1])
    constraints = Constraints(grammars, EOS, mask_s=0.2)
    try:
        _, dead = constraints.of_step(
            [row_of("a", np.empty(0, np.int32), Sampling(max_tokens=50, seed=1, grammar=wanted))]
        )
        assert dead[0].retryable and "too little time on its CPUs" in dead[0].reason
        assert grammars.want(wanted)
    finally:
        may_end.set()
        constraints.close()


@pytest.mark.usefixtures("busy_masks")
def test_all_rows_of_a_grammar_that_hangs_end_with_its_error_and_take_one_thread(grammars, monkeypatch):
    """Rows of others go on, in that step and in later ones; so does not one of the grammar that had stood well until
    then."""
    slow, quick, may_end, hangs, mask = (
        regex("[a-c]{9}"),
        regex("[ab]{30}"),
        threading.Event(),
        threading.Event(),
        Constraint.mask,
    )
    for wanted in (slow, quick):
        compile_now(grammars, wanted)
    monkeypatch.setattr(
        Constraint, "mask", lambda self: (hangs.is_set() and self.grammar == slow and may_end.wait(60), mask(self))[1]
    )
    constraints, fresh = Constraints(grammars, EOS, mask_s=0.2), np.empty(0, np.int32)

    def rows(*asked: tuple[str, Grammar]) -> list[Row]:
        return [row_of(key, fresh, Sampling(max_tokens=50, seed=1, grammar=wanted)) for key, wanted in asked]

    try:
        assert list(constraints.of_step(rows(("early", slow)))[0]) == [0]
        hangs.set()
        masks, dead = constraints.of_step(rows(*((str(number), slow) for number in range(MAX_LEFT + 2)), ("q", quick)))
        assert list(masks) == [MAX_LEFT + 2] and len(dead) == MAX_LEFT + 2
        assert all("less ambiguous" in error.reason and not error.retryable for error in dead.values())
        masks, dead = constraints.of_step(rows(("early", slow), ("q", quick)))
        assert list(masks) == [1] and "less ambiguous" in dead[0].reason and not dead[0].retryable
        assert constraints.num_late == 1
    finally:
        may_end.set()
        constraints.close()


def test_a_grammar_whose_mask_takes_half_of_what_one_may_is_refused_before_the_next_one_hangs(grammars, monkeypatch):
    slow, mask = regex("[a-c]{9}"), Constraint.mask
    compile_now(grammars, slow)

    def computes(self: Constraint) -> np.ndarray:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            sum(range(100))
        return mask(self)

    monkeypatch.setattr(Constraint, "mask", computes)
    constraints = Constraints(grammars, EOS, mask_s=30.0)
    constraints._slow_s = 0.2
    try:
        masks, dead = constraints.of_step(
            [row_of("s", np.empty(0, np.int32), Sampling(max_tokens=50, seed=1, grammar=slow))]
        )
        assert not masks and "takes too long" in dead[0].reason and not dead[0].retryable and constraints.num_late == 0
        with pytest.raises(BadRequest, match="ambiguous"):
            grammars.want(slow)
    finally:
        constraints.close()


@pytest.mark.usefixtures("busy_masks")
def test_rows_are_sent_elsewhere_while_too_many_masks_are_late(grammars, monkeypatch):
    wanted, may_end, mask = (
        [regex(f"[a-c]{{{number + 2}}}") for number in range(MAX_LEFT + 2)],
        threading.Event(),
        Constraint.mask,
    )
    for each in wanted:
        compile_now(grammars, each)
    monkeypatch.setattr(Constraint, "mask", lambda self: (may_end.wait(60), mask(self))[1])
    constraints = Constraints(grammars, EOS, mask_s=0.05)
    try:
        rows = [
            row_of(str(index), np.empty(0, np.int32), Sampling(max_tokens=50, seed=1, grammar=each))
            for index, each in enumerate(wanted)
        ]
        _, dead = constraints.of_step(rows)
        assert [dead[place].retryable for place in range(len(rows))] == [False] * MAX_LEFT + [True] * 2
        assert "retry later" in dead[MAX_LEFT].reason
    finally:
        may_end.set()
        constraints.close()


def test_a_grammar_that_takes_more_than_the_library_allows_ends_its_row_with_the_reason(grammars):
    """Its mask would end the output, as if it were complete."""
    wanted = grammar(forms.own_form(AMBIGUOUS, "grammar"))
    compile_now(grammars, wanted)
    constraint, letters = Constraint(grammars.find(wanted)), TEXT.encode("a", add_special_tokens=False)
    while constraint.accept(letters[0]) and constraint.mask().any():
        assert constraint.num_tokens < 500
    assert constraint.fault


def row_of(key: str, output: np.ndarray, sampling: Sampling) -> Row:
    return Row(key, np.zeros(1, np.int32), 0, np.zeros(1, np.int32), sampling, len(output), output=output)


def test_masks_change_only_their_rows():
    logits = torch.arange(12.0).reshape(3, 4)
    mask = np.array([0b0101], np.int32)
    out = masked(logits, {1: mask})
    assert out[1].tolist() == [4.0, float("-inf"), 6.0, float("-inf")]
    assert torch.equal(out[0], logits[0]) and torch.equal(out[2], logits[2]) and logits[1, 1] == 5.0
    assert masked(logits, {}) is logits
    assert without(mask, [2, 99]).tolist() == [1] and mask.tolist() == [5]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("start: /(abc/", "unclosed group"),
        ("start: nothing", "nothing"),
        ('other: "a"', "start"),
        ('start: %json {"type": "strnig"}', "strnig"),
        ('start: %json {"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ('start: %json {"$ref": "#"}', "no output at all"),
        ('{"grammars": 5}', "invalid type"),
    ],
)
def test_what_does_not_compile_is_refused_in_the_librarys_words_and_remembered(grammars, source, words):
    for _ in range(2):
        with pytest.raises(BadRequest, match=words) as caught:
            compile_now(grammars, Grammar(source))
        assert "%json" not in str(caught.value)


def test_a_grammar_nested_too_deeply_never_reaches_the_compiler(grammars):
    with pytest.raises(BadRequest, match="nested"):
        grammars.want(Grammar("start: /" + "(" * (MAX_DEPTH + 1) + ")" * (MAX_DEPTH + 1) + "/"))


def test_grammars_in_use_are_kept_whatever_they_take_and_others_only_while_there_is_room():
    small = Grammars(lambda: vocabulary_of(path(), TEXT.vocab_size, EOS), GrammarLimits(cache_bytes=1))
    try:
        for pattern in ("a", "b", "c"):
            compile_now(small, regex(pattern))
        assert small.is_full
        small.trim({regex("a"), regex("b")})
        assert len(small) == 2 and small.find(regex("a")) is not None and small.find(regex("c")) is None
        assert small.want(regex("a"))
        with pytest.raises(Overloaded, match="grammars of running requests take"):
            small.want(regex("d"))
        small.trim(set())
        assert len(small) == 0 and small.num_bytes == 0 and not small.is_full
        compile_now(small, regex("d"))
    finally:
        small.close()


def test_those_that_were_not_asked_for_longest_go_first():
    one = Grammars(lambda: vocabulary_of(path(), TEXT.vocab_size, EOS))
    try:
        compile_now(one, regex("a"))
        size = one.num_bytes
    finally:
        one.close()
    grammars = Grammars(lambda: vocabulary_of(path(), TEXT.vocab_size, EOS), GrammarLimits(cache_bytes=size * 5 // 2))
    try:
        for pattern in ("a", "b", "c"):
            compile_now(grammars, regex(pattern))
        assert grammars.want(regex("a"))
        grammars.trim(set())
        assert [grammars.find(regex(pattern)) is not None for pattern in "abc"] == [True, False, True]
    finally:
        grammars.close()


class SlowCompiler:
    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def __call__(self, wanted: Grammar) -> Compiled:
        self.is_asked.set()
        self.may_answer.wait(60)
        raise BadRequest("the grammar does not compile: too late")


def test_compiles_wait_in_a_bounded_queue_and_not_for_ever():
    slow, now = SlowCompiler(), [0.0]
    limits = GrammarLimits(max_queued=2, threads=1, compile_s=5.0)
    grammars = Grammars(lambda: Vocabulary([b"a"], 1, (0,)), limits, clock=lambda: now[0], make=lambda _: slow)
    try:
        assert grammars.want(regex("a0")) is False and slow.is_asked.wait(60)
        with pytest.raises(Overloaded, match="wait to be compiled"):
            for index in range(8):
                assert grammars.want(regex(f"a{index}")) is False
        now[0] = 6.0
        assert grammars.want(regex("a1")) is False, "only what is being compiled takes too long"
        with pytest.raises(BadRequest, match="did not compile within 5 s"):
            grammars.want(regex("a0"))
        slow.may_answer.set()
        with pytest.raises(BadRequest, match="does not compile: too late"):
            compile_now(grammars, regex("a1"))
    finally:
        slow.may_answer.set()
        grammars.close()


class HangingCompiler(SlowCompiler):
    """Never done with what has "hang" in it."""

    def __call__(self, wanted: Grammar) -> Compiled:
        if "hang" in wanted.source:
            return super().__call__(wanted)
        raise BadRequest("is compiled")


def test_compiles_that_never_end_keep_no_other_from_being_compiled_and_there_are_few_of_them():
    hanging, now = HangingCompiler(), [0.0]
    limits = GrammarLimits(threads=1, compile_s=5.0, max_late=2)
    grammars = Grammars(lambda: Vocabulary([b"a"], 1, (0,)), limits, clock=lambda: now[0], make=lambda _: hanging)
    try:
        assert grammars.want(regex("hang 0")) is False and hanging.is_asked.wait(60)
        assert grammars.want(regex("a")) is False
        now[0] = 6.0
        with pytest.raises(BadRequest, match="is compiled"):
            compile_now(grammars, regex("a"))
        hanging.is_asked.clear()
        assert grammars.want(regex("hang 1")) is False and hanging.is_asked.wait(60)
        now[0] = 12.0
        with pytest.raises(Overloaded, match="2 grammars take too long"):
            grammars.want(regex("b"))
        with pytest.raises(BadRequest, match="did not compile"):
            grammars.want(regex("hang 1"))
        hanging.may_answer.set()
        until = time.monotonic() + 60
        while grammars._late and time.monotonic() < until:
            time.sleep(0.005)
        with pytest.raises(BadRequest, match="is compiled"):
            compile_now(grammars, regex("b"))
    finally:
        hanging.may_answer.set()
        grammars.close()


def test_small_grammars_are_compiled_while_a_large_one_is():
    """However many large ones wait."""
    hanging = HangingCompiler()
    grammars = Grammars(lambda: Vocabulary([b"a"], 1, (0,)), GrammarLimits(threads=2), make=lambda _: hanging)
    large = [Grammar(f"start: /hang {number} {'a' * LARGE_CHARS}/") for number in range(3)]
    try:
        for each in large:
            assert grammars.want(each) is False
        assert hanging.is_asked.wait(60)
        for number in range(3):
            with pytest.raises(BadRequest, match="is compiled"):
                compile_now(grammars, regex(f"a{number}"))
        assert grammars.num_computing == 1
        hanging.may_answer.set()
        for each in large:
            with pytest.raises(BadRequest, match="too late"):
                compile_now(grammars, each)
    finally:
        hanging.may_answer.set()
        grammars.close()


def test_a_model_without_an_end_takes_no_grammar():
    endless = Grammars(lambda: Vocabulary([b"a", b"b"], 2, ()))
    try:
        with pytest.raises(BadRequest, match="end-of-sequence"):
            compile_now(endless, regex("a"))
    finally:
        endless.close()


def refusing(wanted: Grammar) -> Compiled:
    raise BadRequest("no such rule")


def test_a_refusal_takes_no_more_memory_however_often_its_grammar_comes_again():
    """An exception that is raised again keeps the frames of each time."""
    grammars = Grammars(lambda: Vocabulary([b"a"], 1, (0,)), make=lambda _: refusing)
    wanted = regex("a")
    with pytest.raises(BadRequest):
        compile_now(grammars, wanted)
    raised = []
    for _ in range(20):
        with pytest.raises(BadRequest, match="no such rule") as caught:
            grammars.want(wanted)
        raised.append(caught.value)
    grammars.close()
    assert [len(list(traceback.walk_tb(error.__traceback__))) for error in raised] == [2] * 20


def test_a_grammar_that_got_no_thread_is_compiled_once_there_are_some(monkeypatch):
    grammars = Grammars(lambda: Vocabulary([b"a"], 1, (0,)), make=lambda _: refusing)
    with monkeypatch.context() as short:
        short.setattr("pdcluster.engine.sampling.grammar.STACK_BYTES", 1 << 47)  # more than there are addresses
        assert not grammars.want(regex("a"))
        assert not grammars.want(regex("a")), "its request waits"
    with pytest.raises(BadRequest, match="no such rule"):
        compile_now(grammars, regex("a"))
    grammars.close()


def test_a_grammar_whose_rows_used_up_its_states_is_compiled_anew(grammars, monkeypatch):
    """All rows share one automaton, so the last of many fails whatever it says itself."""
    monkeypatch.setattr(library, "MAX_STATES", 300)
    wanted = grammar(forms.either(*(forms.pattern(f"{first}[a-z]{{0,1000}}") for first in "ABCDEFGHIJ")))
    compile_now(grammars, wanted)
    constraints, worn = Constraints(grammars, EOS), []
    try:
        for number in range(10):
            text = chr(ord("A") + number) + "abcdefghijklmnopqrstuvwxyz" * 4
            output = np.array(TEXT.encode(text, add_special_tokens=False), np.int32)
            row = row_of(str(number), output, Sampling(max_tokens=500, seed=1, grammar=wanted))
            worn += constraints.of_step([row])[1].values()
        assert worn and all(error.retryable for error in worn)
        compile_now(grammars, wanted)
        assert not constraints.of_step([row])[1], "it has what it needs alone"
    finally:
        constraints.close()


def test_a_vocabulary_that_the_library_does_not_take_ends_no_thread():
    grammars = Grammars(lambda: Vocabulary([b"a"], 1, (400,)))
    try:
        for number in range(4):
            with pytest.raises(BadRequest, match="does not compile here"):
                compile_now(grammars, regex(f"a{number}"), 10.0)
    finally:
        grammars.close()


def test_a_large_grammar_goes_on_beside_a_large_one_that_is_late():
    hanging, now = HangingCompiler(), [0.0]
    limits = GrammarLimits(threads=2, compile_s=5.0)
    grammars = Grammars(lambda: Vocabulary([b"a"], 1, (0,)), limits, clock=lambda: now[0], make=lambda _: hanging)
    try:
        assert grammars.want(Grammar(f"start: /hang {'a' * LARGE_CHARS}/")) is False and hanging.is_asked.wait(60)
        other = Grammar(f"start: /{'b' * LARGE_CHARS}/")
        assert grammars.want(other) is False
        now[0] = 6.0
        with pytest.raises(BadRequest, match="is compiled"):
            compile_now(grammars, other, 10.0)
    finally:
        hanging.may_answer.set()
        grammars.close()
