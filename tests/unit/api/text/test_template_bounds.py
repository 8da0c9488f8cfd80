"""A template that computes, makes or holds too much is ended, whatever it is made of."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from pdcluster.api.text.chat_template import ChatTemplate, TakesLong
from pdcluster.api.text.template_bounds import BRIEF, MOST_BITS, PATIENT
from pdcluster.core.errors import BadRequest, ModelError, Overloaded

CHAT = [{"role": "user", "content": "hello"}]
SOON = PATIENT._replace(seconds=0.3)

DOUBLED = "{% set ns = namespace(x=['x'], y=['x']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
LONG = "{% set ns = namespace(x='ab<!--c-->') %}{% for i in range(18) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "a loop that skips all": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
}
SHARED = "{% set n = namespace(x=(1,)) %}{% for i in range(40) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
GROWING = {
    "an error of shared tuples": SHARED + "{{ raise_exception(n.x) }}",
    "a hash of shared tuples": SHARED + "{{ dict([(n.x, 1)]) }}",
    "a loop that compares shared tuples": SHARED + "{% for a in [1, 2] %}{{ loop.changed(n.x) }}{% endfor %}",
    "shared tuples in a dict of generators": SHARED + "{{ dict([[n.x, 1] | select] | select) }}",
    "shared tuples in a namespace": SHARED + "{{ namespace([[n.x, 1] | select] | select) }}",
    "shared tuples beside keys": SHARED + "{{ {}.keys().isdisjoint([n.x] | select) }}",
    "shared tuples taken from keys": SHARED + "{{ {1: 1}.keys() - [n.x] }}",
    "shared tuples in a view": SHARED + "{{ {1: n.x}.values() }}",
    "text that becomes wider": "{{ ('x' * 10**7 + '\U0001f600') | length }}",
    "repetition": "{{ 'x' * 10**9 }}",
    "repetition from the left": "{{ 10**9 * 'x' }}",
    "a list": "{{ ([0] * 10**9) | length }}",
    "a power": "{{ (9 ** (9 ** 9)) % 10 }}",
    "a product": "{% set ns = namespace(n=9) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "doubled text": "{% set ns = namespace(x='xx') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "added text": "{% set ns = namespace(x='xx') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "added lists": "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "width": "{{ 'x'.center(10**9) }}",
    "width of a filter": "{{ 'x' | center(10**9) }}",
    "zeros": "{{ 'x'.zfill(10**9) }}",
    "tabs": "{{ '\t'.expandtabs(10**9) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent and a star": "{{ '%*d' % (999999999, 1) }}",
    "the filter format": "{{ '%999999999d' | format(1) }}",
    "many widths": "{{ ('%9999d' * 100000) | format(1) }}",
    "str.format": "{{ '{:>999999999}'.format(1) }}",
    "str.format, nested": "{{ '{:>{}}'.format(1, 999999999) }}",
    "str.format, precision": "{{ '{:.999999999f}'.format(1.5) }}",
    "join": "{{ range(99999) | join('x' * 100000) }}",
    "join of text": "{{ ('x' * 100000).join('x' * 100000) }}",
    "replace": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "replace by method": "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "translate": "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') | length }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**8, 'ceil') }}",
    "indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "json": "{{ [[[1]]] | tojson(indent=10**9) }}",
    "a date": "{{ strftime_now('%c' * 100000) }}",
    "items of text": "{{ ('x' * 10**7) | list | length }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "output of a macro": "{% macro f() %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endmacro %}{% set x = f() %}",
    "kept text": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, 'x' * 100000] %}{% endfor %}",
    "text of shared lists": DOUBLED + "{{ ns.x }}",
    "shared lists, joined": DOUBLED + "{{ '' ~ ns.x }}",
    "shared lists, as JSON": DOUBLED + "{{ ns.x | tojson }}",
    "shared lists, compared": DOUBLED + "{{ ns.x == ns.y }}",
    "shared lists, tested": DOUBLED + "{{ ns.x is eq(ns.y) }}",
    "shared lists, sought": DOUBLED + "{{ [ns.y].index(ns.x) }}",
    "shared lists, formatted": DOUBLED + "{{ '%s' % [ns.x] }}",
    "shared tuples as a key": DOUBLED.replace("[ns.x, ns.x]", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "shared tuples, looked up": DOUBLED.replace("[ns.x, ns.x]", "(ns.x, ns.x)") + "{{ {}[ns.x] }}",
    "tags": LONG + "{{ ns.x | striptags }}",
    "words": LONG + "{{ ns.x | wordwrap(3, wrapstring='x' * 1000) }}",
    "sums of lists": "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_ended(name: str) -> None:
    template = ChatTemplate(ENDLESS[name], {})
    with pytest.raises(BadRequest, match=r"template was ended on these messages: it took longer than 0.3 s") as caught:
        template.render(CHAT, bounds=SOON)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_is_ended_before_it_is_there(name: str) -> None:
    with pytest.raises(BadRequest, match=r"was ended on these messages: it"):
        ChatTemplate(GROWING[name], {}).render(CHAT, bounds=PATIENT._replace(seconds=60.0))


def test_the_bounds_of_a_thread_are_five_seconds_and_the_event_loop_s_are_short() -> None:
    assert PATIENT.seconds == 5.0
    assert BRIEF.seconds <= 0.01


def test_what_takes_long_in_the_event_loop_is_no_error_of_the_client() -> None:
    template = ChatTemplate("{% for i in range(50000) %}{{ i }}{% endfor %}", {})
    with pytest.raises(TakesLong):
        template.render(CHAT, bounds=BRIEF)
    assert template.render(CHAT).endswith("49999")


def test_a_template_that_takes_long_again_and_again_is_not_tried_in_the_event_loop_until_it_is_fast() -> None:
    template = ChatTemplate("{% for i in range(messages[0].content | int) %}{% endfor %}fast", {})
    slow, fast = [{"role": "user", "content": "90000"}], [{"role": "user", "content": "1"}]
    for _ in range(3):
        with pytest.raises(TakesLong):
            template.render(slow, bounds=BRIEF)
    with pytest.raises(TakesLong, match="is known to take long"):
        template.render(fast, bounds=BRIEF)
    assert template.render(fast) == "fast"
    assert template.render(fast, bounds=BRIEF) == "fast"


async def test_the_event_loop_goes_on_beside_a_thread_that_renders() -> None:
    template = ChatTemplate(ENDLESS["nested loops"], {})
    rendering = asyncio.create_task(asyncio.to_thread(template.render, CHAT, bounds=PATIENT._replace(seconds=1.0)))
    turns = 0
    while not rendering.done():
        await asyncio.sleep(0)
        turns += 1
    with pytest.raises(BadRequest):
        rendering.result()
    assert turns > 100  # each would wait 5 ms for a thread that gives way to nobody


def test_threads_render_with_bounds_of_their_own() -> None:
    template = ChatTemplate(GROWING["doubled text"], {})
    refused: list[BadRequest] = []

    def render() -> None:
        try:
            template.render(CHAT)
        except BadRequest as error:
            refused.append(error)

    threads = [threading.Thread(target=render) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(refused) == 4


def test_a_constant_is_not_computed_while_the_template_compiles() -> None:
    began = time.monotonic()
    for source in ("{{ 9 ** (9 ** 9) }}", "{{ 'x' | center(10**9) }}", "{{ 'x' * 10**9 }}"):
        ChatTemplate("{% if false %}" + source + "{% endif %}", {})
    assert time.monotonic() - began < 20  # each would take minutes, or gigabytes


def test_numbers_as_templates_use_them() -> None:
    assert ChatTemplate("{{ 2 ** 10 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 * 3 }} {{ 1.55 | round(1) }}", {}).render([]) == (
        "1024 3 3 6 1.6"
    )
    assert ChatTemplate("{{ (2 ** 1000) // (2 ** 990) }}", {}).render([]) == "1024"
    assert MOST_BITS >= 1000


def test_usual_text_is_made_as_ever() -> None:
    source = (
        "{{ '%05d|%-6s|%%' % (7, 'ab') }}{{ '%s %s' | format('a', 'b') }}{{ '{:>5}|{a}|{{}}'.format(1, a='x') }}"
        "{{ 'a\nb' | indent }}{{ 'abc' | replace('b', 'x') }}{{ 'a-b'.replace('-', '+') }}{{ ['a', 1] | join(', ') }}"
        "{{ ','.join(['a', 'b']) }}{{ 'a b'.split() | length }}{{ 'a,b'.split(',')[1] }}{{ 'x'.center(5) }}"
        "{{ [1, 2] | sum }}{{ ('a' ~ 1 ~ none) }}{{ [1, [2, 'x']] }}{{ [3, 1] | sort | list }}{{ 'aXb' | title }}"
        "{{ (1, 2) in [(1, 2)] }}{{ [1, 2, 3] | select('gt', 1) | list }}{{ 'a\tb'.expandtabs(4) }}"
    )
    assert ChatTemplate(source, {}).render([]) == (
        "00007|ab    |%a b    1|x|{}a\n    baxca+ba, 1a,b2b  x  3a1None[1, [2, 'x']][1, 3]AxbTrue[2, 3]a   b"
    )


def test_a_template_that_nests_too_deep_is_refused_at_load() -> None:
    with pytest.raises(ModelError, match="nests too deep"):
        ChatTemplate("{% for a in messages %}" * 30 + "{% endfor %}" * 30, {})


@pytest.mark.parametrize("character", ["x", "\u00e9", "\u4e2d", "\U0001f600"])
def test_a_template_that_collects_its_prompt_has_room(character: str) -> None:
    """Added text by text, as some models do: each step copies all that is there."""
    collects = (
        "{% set ns = namespace(out='') %}"
        "{% for m in messages %}{% set ns.out = ns.out + m.role + ': ' + m.content %}{% endfor %}{{ ns.out }}"
    )
    chat = [{"role": "user", "content": character * 1000}] * 400
    assert ChatTemplate(collects, {}).render(chat) == ("user: " + character * 1000) * 400


def test_calls_that_are_weighed_do_what_they_did() -> None:
    source = (
        "{{ dict(a=1) }}{{ dict([('a', 1)], b=2) }}{{ dict({'a': 1}) }}{{ dict() }}"
        "{% set ns = namespace({'x': 1}, y=[2]) %}{{ ns.x }}{{ ns.y }}{{ 3 - 1.5 }}{{ {1: 2, 3: 4}.keys() - [1] }}"
        "{% for a in [1, 1, 2] %}{{ loop.changed(a) }}{{ loop.cycle('a', 'b') }}{% endfor %}{{ {1: [2]}.values() }}"
        "{% macro f(x) %}{{ x }}{{ caller(x) }}{% endmacro %}{% call(y) f([1]) %}{{ y }}{% endcall %}"
        "{% for a in [[[]], []] recursive %}<{{ loop(a) }}>{% endfor %}"
    )
    assert ChatTemplate(source, {}).render([]) == (
        "{'a': 1}{'a': 1, 'b': 2}{'a': 1}{}1[2]1.5{3}TrueaFalsebTrueadict_values([[2]])[1][1]<<>><>"
    )


def test_what_others_compute_is_not_the_templates_fault() -> None:
    """Its own seconds count; where it waits for too long, the client may ask again."""
    slow = "{% for a in range(3000) %}{% for b in range(300) %}{% endfor %}{% endfor %}done"
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    others = [threading.Thread(target=spin, daemon=True) for _ in range(4)]
    for each in others:
        each.start()
    try:
        template = ChatTemplate(slow, {})
        assert template.render(CHAT, bounds=PATIENT._replace(seconds=5.0, wall_s=60.0)) == "done"
        with pytest.raises(Overloaded, match="beside others") as caught:
            template.render(CHAT, bounds=PATIENT._replace(seconds=5.0, wall_s=0.1))
        assert (caught.value.http_status, caught.value.retryable) == (503, True)
    finally:
        stop.set()
        for each in others:
            each.join()


def test_the_text_of_a_refusal_is_short() -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate("{{ raise_exception('x' * 900000) }}", {}).render(CHAT)
    assert len(str(caught.value)) < 3000
