import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from foreword.errors import CheckpointError, InvalidRequest, Unsupported
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.fakes import CHATML, byte_backend
from tests.support.tokenizer_builders import write_checkpoint

NAMES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
STRICT = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] -%}
    {%- set rest = messages[1:] -%}
{% else %}
    {%- set rest = messages -%}
{% endif %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {% if loop.first and system is defined %}{{ '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{% endif %}
[INST] {{ message['content'] | trim }} [/INST]
    {% else %}
        {% generation %}{{ message['content'] | trim + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""
TOOLS = """{%- set ns = namespace(found=false, last=0) -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}{%- continue -%}{%- endif -%}
{%- if loop.index > 6 -%}{%- break -%}{%- endif -%}
{%- set ns.last = loop.index -%}
<|im_start|>{{ message.role }}{% if message.name is defined %} ({{ message.name }}){% endif %}
{{ message | tojson }} {{ message | tojson(indent=2) }} <&>
{% endfor -%}
{%- if tools is not none -%}TOOLS{%- endif -%}
{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}
{{ ns.last }}{{ strftime_now('%Y')[:2] }}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
MODERN = """{%- macro show(content) -%}
    {%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=messages|length - 1, multi=true) -%}
{%- for message in messages[::-1] -%}
    {%- set index = (messages|length - 1) - loop.index0 -%}
    {%- if ns.multi and message.role == 'user' and not (message.content.startswith('<tool>') and message.content is string) -%}
        {%- set ns.multi = false -%}{%- set ns.last = index -%}
    {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- if messages[0].role in ['system', 'developer'] -%}
    {{- '<|sys|>' ~ messages[0].content.strip() ~ '\n' -}}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- set content = show(message.content) -%}
    {%- if message.role == 'assistant' and '</think>' in content -%}
        {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|' + message.role + '|>' + content + ('<|last|>' if loop.last else '') -}}
    {%- if loop.previtem is defined and loop.previtem.role != message.role -%}{{- loop.index0 }}/{{ loop.revindex -}}{%- endif -%}
{%- endfor -%}
{{- messages | map(attribute='role') | unique | join('+') -}}
{{- (messages | selectattr('role', 'equalto', 'user') | list)[-1].content | upper -}}
{{- {'name': 'f', 'n': [1, 2.5, none, true]} | tojson -}}
{{- '%s has %d' % ('it', messages|length) -}}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"""
TRIMS = "{% for message in messages %}{{ message['role'] + ':' + message['content'] | trim + eos_token }}{% endfor %}"
PLAIN = [{"role": "system", "content": 'Be <brief> & "exact".'}, {"role": "user", "content": " Hi there \n"}]
LONG = [*PLAIN, {"role": "assistant", "content": "Hello, ü 👍 "}, {"role": "user", "content": "And?\n\n"}]
OPEN = [*PLAIN, {"role": "assistant", "content": "The answer is "}]


def both(tmp_path: Path, template: str) -> tuple[ChatTemplate, Any]:
    write_checkpoint(tmp_path, byte_backend(), {**NAMES, "chat_template": template})
    return ChatTemplate.from_tokenizer(Tokenizer.from_directory(tmp_path)), AutoTokenizer.from_pretrained(
        tmp_path
    )


@pytest.mark.parametrize(
    "template", [CHATML, STRICT, TOOLS, MODERN], ids=["chatml", "strict", "tools", "modern"]
)
@pytest.mark.parametrize("messages", [PLAIN, LONG, OPEN], ids=["plain", "long", "open"])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}], ids=["bare", "options"])
def test_renders_as_transformers(tmp_path: Path, template: str, messages: Any, options: Any) -> None:
    ours, theirs = both(tmp_path, template)
    for generation in (True, False):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation, **options
        )
        assert ours.render(messages, add_generation_prompt=generation, options=options) == expected


@pytest.mark.parametrize(
    "template", [CHATML, STRICT, TRIMS], ids=["keeps spaces", "trims and adds one", "trims"]
)
def test_continues_the_final_message_as_transformers(tmp_path: Path, template: str) -> None:
    ours, theirs = both(tmp_path, template)
    expected = theirs.apply_chat_template(OPEN, tokenize=False, continue_final_message=True)
    assert ours.render(OPEN, add_generation_prompt=False, continue_final_message=True) == expected
    assert expected.rstrip().endswith("The answer is")


def test_text_parts_are_joined() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (3, "messages[0].content"),
        (None, "messages[0].content"),
        ([3], "messages[0].content[0]"),
        ([{"type": "text"}], "messages[0].content[0].text"),
    ],
)
def test_malformed_content_is_named(content: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML, {}).render([{"role": "user", "content": content}])
    assert caught.value.param == param


def test_a_model_that_sees_nothing_says_so() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(
        Unsupported, match=r"messages\[0\].content\[0\] is a picture, and this model takes none"
    ):
        ChatTemplate(CHATML, {}).render([{"role": "user", "content": [part]}])


def test_what_the_template_refuses_is_a_bad_request() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequest, match="must alternate") as caught:
        ChatTemplate(STRICT, {"bos_token": ""}).render(twice)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])


def test_reserved_options_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'messages'"):
        ChatTemplate(CHATML, {}).render(PLAIN, options={"messages": []})


def test_no_template_is_a_clear_error() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None, {}).render(PLAIN)


def test_no_messages_is_a_clear_error() -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        ChatTemplate(CHATML, {}).render([])


def test_a_syntax_error_is_found_at_load() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("\n{% for %}", {})


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_where_templates_stand(tmp_path: Path, name: str) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    write_checkpoint(
        tmp_path,
        byte_backend(),
        {**NAMES, "chat_template": named if name == "tokenizer_config.json" else "no"},
    )
    if name == "chat_template.json":
        (tmp_path / name).write_text(json.dumps({"chat_template": "yes"}))
    elif name == "chat_template.jinja":
        (tmp_path / name).write_text("yes")
    assert ChatTemplate.from_tokenizer(Tokenizer.from_directory(tmp_path)).render(PLAIN) == "yes"


BUSY = "{% for i in range(messages[0]['content'] | length * 100000) %}{{ 'a' if i % 7 == 8 }}{% endfor %}"


def test_a_template_is_slow_until_it_is_known_and_for_a_while_after_it_was() -> None:
    template = ChatTemplate(BUSY, {})
    quick, heavy = ({"role": "user", "content": content} for content in ("", "a"))
    assert template.is_slow
    template.render([quick])
    assert not template.is_slow
    template.render([heavy])
    template.render([quick])
    assert template.is_slow
    for _ in range(3000):
        template.render([quick])
    assert not template.is_slow


def test_what_fails_late_is_slow_too() -> None:
    template = ChatTemplate(
        "{% if messages | length > 1 %}" + BUSY + "{{ raise_exception('no') }}{% endif %}", {}
    )
    template.render([{"role": "user", "content": "a"}])
    assert not template.is_slow
    with pytest.raises(InvalidRequest, match="no"):
        template.render([{"role": "user", "content": "a"}] * 2)
    assert template.is_slow
