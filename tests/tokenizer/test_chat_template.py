"""Chat templates render as in transformers, and a hostile template cannot stall the server."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from transformers import AutoTokenizer

from foreword.errors import CheckpointError, InvalidRequest, Unsupported
from foreword.tokenizer import chat_template
from foreword.tokenizer.chat_template import MAX_INPUT_BYTES, MAX_SOURCE_CHARACTERS, ChatTemplate
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.workers.pool import WorkerPool
from tests.support.fakes import CHATML, byte_backend
from tests.support.tokenizer_builders import write_checkpoint
from tests.support.waiting import wait_until

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
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"""  # noqa: E501
TRIMS = (
    "{% for message in messages %}"
    "{{ message['role'] + ':' + message['content'] | trim + eos_token }}"
    "{% endfor %}"
)
PLAIN = [{"role": "system", "content": 'Be <brief> & "exact".'}, {"role": "user", "content": " Hi there \n"}]
LONG = [*PLAIN, {"role": "assistant", "content": "Hello, ü 👍 "}, {"role": "user", "content": "And?\n\n"}]
OPEN = [*PLAIN, {"role": "assistant", "content": "The answer is "}]


def load_both(tmp_path: Path, template: str) -> tuple[ChatTemplate, Any]:
    write_checkpoint(tmp_path, byte_backend(), {**NAMES, "chat_template": template})
    return ChatTemplate.from_tokenizer(Tokenizer.from_directory(tmp_path)), AutoTokenizer.from_pretrained(
        tmp_path
    )


@pytest.mark.parametrize(
    "template", [CHATML, STRICT, TOOLS, MODERN], ids=["chatml", "strict", "tools", "modern"]
)
@pytest.mark.parametrize("messages", [PLAIN, LONG, OPEN], ids=["plain", "long", "open"])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}], ids=["bare", "options"])
def test_render_equals_transformers(tmp_path: Path, template: str, messages: Any, options: Any) -> None:
    ours, theirs = load_both(tmp_path, template)
    for generation in (True, False):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation, **options
        )
        assert ours.render(messages, add_generation_prompt=generation, options=options) == expected


@pytest.mark.parametrize(
    "template", [CHATML, STRICT, TRIMS], ids=["keeps spaces", "trims and adds one", "trims"]
)
def test_continue_final_message_equals_transformers(tmp_path: Path, template: str) -> None:
    ours, theirs = load_both(tmp_path, template)
    expected = theirs.apply_chat_template(OPEN, tokenize=False, continue_final_message=True)
    assert ours.render(OPEN, add_generation_prompt=False, continue_final_message=True) == expected
    assert expected.rstrip().endswith("The answer is")


def test_text_parts_are_joined() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
NO_IMAGE = r"messages\[0\].content\[0\] is an image, and this model takes none"
# Template, messages, options, reason and field of the error.
REFUSED: dict[str, tuple[str | None, list[dict[str, Any]], dict[str, Any], str, str]] = {
    "number": (CHATML, user(3), {}, "must be a text", "messages[0].content"),
    "null": (CHATML, user(None), {}, "must be a text", "messages[0].content"),
    "part that is a number": (CHATML, user([3]), {}, ".", "messages[0].content[0]"),
    "part without its text": (CHATML, user([{"type": "text"}]), {}, ".", "messages[0].content[0].text"),
    "image": (CHATML, user([IMAGE]), {}, NO_IMAGE, "messages[0].content[0]"),
    "template's own error": (STRICT, [*user("a"), *user("b")], {}, "must alternate", "messages"),
    "reserved option": (CHATML, PLAIN, {"messages": []}, "'messages'", "chat_template_kwargs"),
    "no template": (None, PLAIN, {}, "no chat template", "messages"),
    "no messages": (CHATML, [], {}, "at least one message", "messages"),
    "large input": (
        *(CHATML, user("x" * MAX_INPUT_BYTES), {}),
        *(f"takes at most {MAX_INPUT_BYTES}", "messages"),
    ),
}


@pytest.mark.parametrize(("source", "messages", "options", "reason", "param"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_the_reason_and_the_field(
    source: str | None, messages: list[dict[str, Any]], options: dict[str, Any], reason: str, param: str
) -> None:
    with pytest.raises((InvalidRequest, Unsupported), match=reason) as caught:
        ChatTemplate(source, {"bos_token": ""}).render(messages, options=options)
    assert caught.value.param == param
    assert isinstance(caught.value, Unsupported) == (reason == NO_IMAGE)


def test_syntax_error_fails_at_load() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("\n{% for %}", {})


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_template_file_precedence(tmp_path: Path, name: str) -> None:
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


NESTED_LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "nested loops": (NESTED_LOOPS, "CPU time"),
    "long range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "exponential macro": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "CPU time",
    ),
    "endless recursion": ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "huge power": ("{{ 10**(10**8) }}", "CPU time"),
    "long text": ("{{ messages[0].content * 10**8 }}", "renders more than 32000000 characters"),
    "text beyond memory": ("{{ ('x' * 10**12)|length }}", "MemoryError"),
    "doubled text": ("{% set x = 'a' %}" + "{% set x = x ~ x %}" * 60, "MemoryError"),
    "wide padding": ("{{ 'x'|center(100000000000) }}", "MemoryError"),
    "exponential tuple": ("{% set x = (1,) %}" + "{% set x = (x, x) %}" * 60 + "{{ x }}", "CPU|MemoryError"),
    "namespace in itself": ("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x|tojson }}", "JSON"),
    "wide date": ("{{ strftime_now('%1000000000Y') }}", "writes a date"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_refused_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(chat_template.LIMITS, cpu_s=0.5, num_bytes=256 << 20)
    pool = WorkerPool(chat_template.WORKER, "render", lambda: None, limits, 1)
    monkeypatch.setattr(chat_template, "_pool", pool)
    source, reason = HOSTILE[name]
    try:
        template = ChatTemplate(source, {})
        with pytest.raises(
            InvalidRequest, match=f"chat template refuses these messages: .*({reason})"
        ) as caught:
            template.render([{"role": "user", "content": "a"}])
        assert caught.value.param == "messages"
        assert ChatTemplate("ok", {}).render([{"role": "user", "content": "a"}]) == "ok"
    finally:
        pool.close()


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{{ " + "not " * 30_000 + "1 }}",
        "{% for x in [1] %}" * 200 + "{% endfor %}" * 200,
        "{" * 100_000,
        "{# " * 40_000,
        "x" * (MAX_SOURCE_CHARACTERS + 1),
    ],
    ids=["parentheses", "nots", "loops", "braces", "comments", "length"],
)
def test_template_that_does_not_compile_fails_at_load(source: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(source, {})
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ ''.__class__ }}", ""),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ ''['__class__'].__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ '{0.__class__}'.format(1) }}", ""),
        ("{{ raise_exception.__globals__ }}", ""),
        ("{{ namespace.__init__ }}", ""),
        ("{{ ['']|map(attribute='__class__')|list|string }}", "Undefined"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_sandbox_hides_internals(source: str, expected: str) -> None:
    try:
        text = ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])
    except InvalidRequest as error:
        text = error.message
    assert expected in text
    assert "class" not in text.replace("__class__", "") and "function" not in text


def test_long_message_is_rendered() -> None:
    text = "ä" * 6_000_000
    rendered = ChatTemplate("{{ messages[0].content|trim + '.' }}", {}).render(
        [{"role": "user", "content": text}]
    )
    assert rendered == text + "."


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'ab cd'|wordwrap(3) }}", "ab\ncd"),
        ("{{ '<b>x</b>&amp;'|striptags }}", "x&"),
        ("{{ lipsum(1)|length > 0 }}", "True"),
        (r"{{ '\N{EM DASH}' }}", "\u2014"),
    ],
)
def test_filters_with_lazy_imports_work_in_the_worker(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "a"}]) == expected


class Role(StrEnum):
    USER = "user"


def test_texts_and_mappings_of_any_class_are_rendered_as_plain_ones() -> None:
    message = {"role": Role.USER, "content": "a", "more": MappingProxyType({"n": Role.USER})}
    text = ChatTemplate("{{ messages[0].role }} {{ messages[0].more|tojson }}", {}).render([message])
    assert text == 'user {"n": "user"}'


def test_value_that_the_worker_cannot_import_is_a_bad_request() -> None:
    code = (
        "from foreword.tokenizer.chat_template import ChatTemplate\n"
        "from foreword.errors import InvalidRequest\n"
        "class Local: pass\n"
        "message = {'role': 'user', 'content': 'a', 'more': Local()}\n"
        "try: ChatTemplate('{{ messages }}', {}).render([message])\n"
        "except InvalidRequest as error: print(error)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "must be plain values" in output


def test_workers_exit_with_a_killed_parent() -> None:
    code = (
        "from foreword.tokenizer import chat_template\n"
        "chat_template.ChatTemplate('a', {})\n"
        "print([w.process.pid for w in chat_template._pool.workers if w.process], flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    (pid,) = json.loads(output)
    cmdline = Path(f"/proc/{pid}/cmdline")
    wait_until(lambda: not cmdline.exists() or not cmdline.read_bytes())


def test_threads_render_side_by_side() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda n: template.render([{"role": "user", "content": str(n)}]), range(40)))
    assert texts == [str(n) for n in range(40)]
