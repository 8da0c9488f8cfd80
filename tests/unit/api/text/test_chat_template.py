"""Rendering is compared with transformers itself, on templates that use what real ones use."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from tiny_tokenizers import CHAT_TEMPLATE, byte_level_files
from transformers import PreTrainedTokenizerFast

from pdcluster.api.text.chat_template import ChatTemplate
from pdcluster.core.errors import BadRequest, ModelError

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}

TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "blocks": """
{% set names = namespace(last='') %}
{% for message in messages %}
    {# a comment that takes its line #}
    {% if message['role'] == 'system' %}
[SYS]{{ message['content'] }}[/SYS]
        {% continue %}
    {% endif %}
    {% set names.last = message.name | default('nobody') %}
<{{ message['role'] }} {{ loop.index }} by {{ names.last }}>{{ message['content'] }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}""",
    "json": "{% for m in messages %}{{ m | tojson }}|{{ m | tojson(indent=2) }}|{{ m.content | upper }}{% endfor %}{{ tools is none }}",
    "date": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% if m.content is string %}s{% endif %}{% endfor %}",
    "training": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}",
    "macro": "{% macro turn(m) -%} <<{{ m.role }}: {{ m.content | trim }}>> {%- endmacro %}{% for m in messages[::-1] %}{{ turn(m) }}{% endfor %}",
    "break": "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ m.content.split('<')[0] }}{% endfor %}",
    "kwargs": "{% if enable_thinking is defined and enable_thinking is false %}fast{% else %}slow{% endif %}{{ messages[-1].content }}",
}

CHATS: dict[str, list[dict[str, object]]] = {
    "one": [{"role": "user", "content": "hello"}],
    "talk": [
        {"role": "system", "content": "Be brief & <kind>."},
        {"role": "user", "content": "  spaces kept? é 日本 \n", "name": "ann"},
        {"role": "assistant", "content": "yes 'quotes' \"double\""},
        {"role": "user", "content": "{{ not a template }}"},
    ],
    "nulls": [{"role": "user", "content": "x", "name": None}],
}


def reference(source: str, tmp_path: Path) -> PreTrainedTokenizerFast:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_files()["tokenizer.json"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **SPECIAL)
    tokenizer.chat_template = source
    return tokenizer


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(name: str, chat: str, tmp_path: Path) -> None:
    expected = reference(TEMPLATES[name], tmp_path)
    ours = ChatTemplate(TEMPLATES[name], SPECIAL)
    for prompt in (True, False):
        theirs = expected.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=prompt)
        assert ours.render(CHATS[chat], add_generation_prompt=prompt) == theirs
    with_kwargs = expected.apply_chat_template(CHATS[chat], tokenize=False, enable_thinking=False)
    assert ours.render(CHATS[chat], add_generation_prompt=False, kwargs={"enable_thinking": False}) == with_kwargs


@pytest.mark.parametrize("name", ["plain", "blocks", "training", "macro"])
@pytest.mark.parametrize("content", ["Once upon a", "trailing space ", "two\nlines\n"])
def test_continuing_the_final_message_equals_transformers(name: str, content: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "tell"}, {"role": "assistant", "content": content}]
    if name == "macro":
        chat = chat[::-1][:1]
    theirs = reference(TEMPLATES[name], tmp_path).apply_chat_template(chat, tokenize=False, continue_final_message=True)
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert ours == theirs


def test_a_final_message_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", SPECIAL)
    with pytest.raises(BadRequest, match="leaves out the last message"):
        template.render(CHATS["talk"], continue_final_message=True)


def test_a_developer_message_is_a_system_message_to_templates_that_do_not_know_it() -> None:
    chat = [{"role": "developer", "content": "rules"}]
    assert ChatTemplate("{{ messages[0].role }}", SPECIAL).render(chat) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}", SPECIAL).render(chat) == "developer"


def test_what_the_template_raises_is_the_caller_s_to_fix() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, SPECIAL)
    with pytest.raises(BadRequest, match="refuses this conversation: a system message must come first") as caught:
        template.render([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    assert caught.value.param == "messages"


def test_a_template_that_trips_over_the_messages_is_a_bad_request_too() -> None:
    with pytest.raises(BadRequest, match=r"cannot render these messages .TypeError"):
        ChatTemplate("{{ messages[0].content + 1 }}", SPECIAL).render(CHATS["one"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ range(10000000) | list }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    template = ChatTemplate(source, SPECIAL)
    try:
        rendered = template.render(CHATS["one"])
    except BadRequest:
        return
    assert rendered == ""  # Jinja renders a forbidden attribute as undefined


def test_a_template_that_does_not_compile_is_refused_with_its_line() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("fine\n{% endfor %}", SPECIAL)


def test_the_date_is_today_s() -> None:
    assert ChatTemplate("{{ strftime_now('%Y-%m') }}", {}).render([]) == datetime.now().strftime("%Y-%m")
