"""The training text: which files are read, and that chats say what the sources say."""

import ast
import asyncio
import inspect
from pathlib import Path
from random import Random

import pytest

from scripts import bundled_corpus as corpus

MODULE = '''"""Tools for shelves.

More about shelves.
"""

class Shelf:
    """A shelf of things."""

    def put(self, thing, *, at=0):
        """Put the thing on the shelf, at the place given."""
        self.things.insert(at, thing)
        return self


def tidy(shelf):
    for thing in sorted(shelf.things):
        shelf.put(thing)
    return shelf
'''
SHELF = corpus.Source("shelf", MODULE)


def write(root: Path, name: str, text: str = "x = None\n") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def modules(root: Path, *, held_out: bool = False) -> list[str]:
    return [source.module for source in corpus.read_sources(root, held_out=held_out)]


def test_tests_and_installed_packages_are_not_read(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py", "test/t.py", "ctypes/test/t.py", "site-packages/p.py", "encodings/cp1.py"):
        write(tmp_path, name)
    assert modules(tmp_path) == ["a", "b.c"]


def test_held_out_files_are_read_only_when_asked_for(tmp_path: Path) -> None:
    for name in ("a.py", "sched.py", "asyncio/queues.py"):
        write(tmp_path, name)
    assert modules(tmp_path) == ["a"]
    assert modules(tmp_path, held_out=True) == ["asyncio.queues", "sched"]


def test_tables_of_numbers_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, "table.py", "codes = [" + "123456, " * 100 + "]\n")
    write(tmp_path, "code.py", MODULE)
    assert modules(tmp_path) == ["code"]


def test_modules_have_the_names_people_use(tmp_path: Path) -> None:
    for name in ("posixpath.py", "json/__init__.py", "json/decoder.py"):
        write(tmp_path, name)
    assert modules(tmp_path) == ["json", "json.decoder", "os.path"]


def test_every_held_out_file_has_its_own_module_in_this_library() -> None:
    found = corpus.read_sources(corpus.stdlib_root(), held_out=True)
    assert (
        len(found) == len({source.module for source in found}) >= len(corpus.HELD_OUT) - 2
    )  # newer Pythons may drop one


def test_definitions_are_functions_classes_and_their_methods() -> None:
    found = {definition.name: definition for definition in corpus.find_definitions(ast.parse(MODULE), MODULE)}
    assert list(found) == ["Shelf", "Shelf.put", "tidy"]
    assert found["Shelf"].signature is None
    assert found["Shelf.put"].signature == "put(self, thing, *, at=0)"
    assert found["Shelf.put"].text.startswith("def put(self"), "a method's text stands at the margin"


@pytest.mark.parametrize("seed", range(20))
def test_a_continuation_is_the_rest_of_the_code(seed: int) -> None:
    code = corpus.find_definitions(ast.parse(MODULE), MODULE)
    text = next(definition.text for definition in code if definition.name == "tidy")
    chat = corpus.continuation(text, Random(seed))
    head = chat.question.split("```python\n")[1].removesuffix("\n```")
    tail = chat.answer.removeprefix("```python\n").removesuffix("\n```")
    assert f"{head}\n{tail}" == text


def test_a_module_is_asked_about_with_its_docstring_as_the_answer() -> None:
    chats = list(corpus.chats_of_module(SHELF, Random(0)))
    assert "`shelf`" in chats[0].question
    assert chats[0].answer == "Tools for shelves.\n\nMore about shelves."
    assert any(chat.answer == "Put the thing on the shelf, at the place given." for chat in chats)


def test_code_in_questions_about_code_is_the_source() -> None:
    answers = {chat.answer for seed in range(40) for chat in corpus.chats_of_module(SHELF, Random(seed))}
    assert corpus.fenced(MODULE[MODULE.index("def tidy") :].rstrip()) in answers
    assert "`put(self, thing, *, at=0)`" in answers


def test_answers_are_whole_paragraphs_and_bounded() -> None:
    doc = "\n\n".join(f"Paragraph {number} " + "word " * 30 for number in range(20))
    answer = corpus.opening_paragraphs(doc)
    assert len(answer) <= corpus.MAX_ANSWER_CHARS
    assert answer.endswith("word") and doc.startswith(answer)
    assert len(corpus.opening_paragraphs("x" * 5000)) == corpus.MAX_ANSWER_CHARS


def test_builtins_are_explained_from_the_running_interpreter() -> None:
    chats = list(corpus.chats_of_builtins("builtins", Random(0)))
    (answer,) = [
        chat.answer
        for chat in chats
        if chat.question.replace("`", "") in {"What does len do?", "Explain len.", "What is len for?"}
    ]
    assert answer == len.__doc__
    assert any("str.join" in chat.question for chat in chats)


def test_what_a_package_re_exports_from_a_held_out_file_stays_out() -> None:
    assert asyncio.Queue.__module__ == "asyncio.queues"
    answers = {chat.answer for chat in corpus.chats_of_builtins("asyncio", Random(0))}
    assert corpus.opening_paragraphs(inspect.getdoc(asyncio.Queue) or "") not in answers
    assert corpus.opening_paragraphs(inspect.getdoc(asyncio.Event) or "") in answers


def test_the_same_seed_gives_the_same_chats() -> None:
    first, second = (corpus.build_chats([SHELF], {}, Random(3)) for _ in range(2))
    assert first == second
    assert (
        sum(chat.answer == corpus.IDENTITY for chat in first)
        == len(corpus.IDENTITY_QUESTIONS) * corpus.IDENTITY_REPEATS
    )
