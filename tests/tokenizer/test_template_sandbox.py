"""Templates that want all time and memory there is get a refusal, for a reason that tells what they tried."""

import threading
from typing import Any

import pytest

from foreword.errors import CheckpointError, InvalidRequest
from foreword.tokenizer import template_sandbox as budget
from foreword.tokenizer.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplate

USER = [{"role": "user", "content": "a"}]
TOWER = "{% set x = (1,) %}{% set y = (1,) %}" + "{% set x = (x, x) %}{% set y = (y, y) %}" * 60
LARGE = "too much text|value that is too large"

HOSTILE = {
    "loops": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "steps|takes more",
    ),
    "loops with a condition": (
        "{% for a in range(9999) %}{% for b in range(9999) if 0 %}{% endfor %}{% endfor %}",
        "takes more",
    ),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "takes more",
    ),
    "a block that calls itself": ("{% block a %}{{ self.a() }}{% endblock %}", "recursion"),
    "a recursive loop": (
        "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "recursion|takes more",
    ),
    "a text times": ("{{ 'x' * 10**9 }}", LARGE),
    "times a text": ("{{ 10**9 * 'x' }}", LARGE),
    "a list times": ("{% set x = [1] * 10**9 %}", LARGE),
    "doubling by replace": ("{% set x = 'a' %}" + "{% set x = x.replace('a', 'aa') %}" * 60, LARGE),
    "doubling by the filter": ("{% set x = 'a' %}" + "{% set x = x|replace('a', 'aa') %}" * 60, LARGE),
    "doubling by +": ("{% set x = 'a' %}" + "{% set x = x + x %}" * 60, LARGE),
    "doubling by ~": ("{% set x = 'a' %}" + "{% set x = x ~ x %}" * 60, LARGE),
    "doubling by %": ("{% set x = 'a' %}" + "{% set x = '%s%s' % (x, x) %}" * 60, LARGE),
    "doubling by format": ("{% set x = 'a' %}" + "{% set x = '{0}{0}'.format(x) %}" * 60, LARGE),
    "doubling a list": ("{% set x = [1] %}" + "{% set x = x + x %}" * 60, LARGE),
    "doubling by a block": ("{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60, LARGE),
    "doubling by a filter block": (
        "{% filter replace('a', 'aaaaaaaaaa') %}" * 12 + "a" + "{% endfilter %}" * 12,
        LARGE,
    ),
    "doubling by caller": (
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call m() %}" * 40
        + "x"
        + "{% endcall %}" * 40,
        LARGE + "|takes more",
    ),
    "growth in a namespace": (
        "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        LARGE,
    ),
    "keeping all": (
        "{% set ns = namespace(l=0) %}{% for i in range(9999) %}{% set ns.l = [ns.l, 'x' * 99999] %}{% endfor %}",
        LARGE,
    ),
    "keeping slices": (
        "{% set ns = namespace(l=0) %}{% set x = 'x' * 999999 %}"
        "{% for i in range(9999) %}{% set ns.l = [ns.l, x[i:]] %}{% endfor %}",
        LARGE,
    ),
    "writing": ("{% set x = 'a' * 999999 %}{% for i in range(9999) %}{{ x }}{% endfor %}", LARGE),
    "a tower written": (TOWER + "{{ x }}", LARGE),
    "a tower as text": (TOWER + "{{ x|string }}", LARGE),
    "a tower as JSON": (TOWER + "{{ x|tojson }}", LARGE),
    "a tower joined": (TOWER + "{{ 'a' ~ x }}", LARGE),
    "a tower formatted": (TOWER + "{{ '%s' % (x,) }}", LARGE),
    "a tower in format": (TOWER + "{{ '{}'.format(x) }}", LARGE),
    "towers compared": (TOWER + "{{ x == y }}", LARGE),
    "towers tested": (TOWER + "{{ x is eq y }}", LARGE),
    "towers sorted": (TOWER + "{{ [x, y]|sort }}", LARGE),
    "towers counted": (TOWER + "{{ [x].count(y) }}", LARGE),
    "towers that change": (TOWER + "{% for i in [x, y] %}{{ loop.changed(i) }}{% endfor %}", LARGE),
    "a tower as key": (TOWER + "{{ {x: 1} }}", LARGE),
    "a tower looked up": (TOWER + "{{ {}[x] }}", LARGE),
    "a tower got": (TOWER + "{{ {}.get(x) }}", LARGE),
    "a tower searched": (TOWER + "{{ x in {} }}", LARGE),
    "a tower of arguments": (
        "{% set ns = namespace(t=(1,)) %}{% macro m() %}{% set ns.t = varargs %}{% endmacro %}"
        + "{{ m(ns.t, ns.t) }}" * 60
        + "{{ ns.t }}",
        LARGE,
    ),
    "a namespace in itself": ("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}", "namespace"),
    "a width": ("{{ '%1000000000d' % 1 }}", "too wide"),
    "a computed width": ("{{ '%*d' % (10**9, 1) }}", "too wide"),
    "a precision": ("{{ '%.1000000000f' % 1.5 }}", "too wide"),
    "a width in format": ("{{ '{:>1000000000}'.format(1) }}", "too wide"),
    "a computed width in format": ("{{ '{:>{}}'.format(1, 10**9) }}", "too wide"),
    "a width in format_map": ("{{ '{a:>1000000000}'.format_map({'a': 1}) }}", "too wide"),
    "a width in a filter": ("{{ '%1000000000d'|format(1) }}", "too wide"),
    "a date": ("{{ strftime_now('%1000000000Y') }}", "a date"),
    "center": ("{{ 'x'|center(10**9) }}", LARGE),
    "center of constants": ("{{ 'x'|center(1000000000) }}", LARGE),
    "ljust": ("{{ 'x'.ljust(10**9) }}", LARGE),
    "zfill": ("{{ '1'.zfill(10**9) }}", LARGE),
    "expandtabs": ("{{ '\\t'.expandtabs(10**9) }}", LARGE),
    "bytes": ("{{ (1).to_bytes(10**9, 'big') }}", LARGE),
    "indent": ("{{ ('\\n' * 9999)|indent(99999, true) }}", LARGE),
    "batch": ("{{ [1]|batch(10**9, 'x')|list }}", LARGE),
    "slice": ("{{ [1]|slice(10**9)|list }}", LARGE),
    "lists": ("{% for i in range(9999) %}{% set x = range(99999)|list %}{% endfor %}", LARGE),
    "join": ("{{ range(99999)|join('x' * 99999) }}", LARGE),
    "join of what is computed": ("{{ ('x' * 99999).join(range(9999)|map('string')) }}", LARGE),
    "join of attributes": ("{{ ([{'a': 'x' * 99999}] * 9999)|map(attribute='a')|join }}", LARGE),
    "JSON, indented": ("{{ [[1]]|tojson(indent=10**9) }}", LARGE),
    "JSON, separated": ("{{ (range(999)|list)|tojson(separators=('x' * 999999, ':')) }}", LARGE),
    "translate": ("{{ ('a' * 99999).translate({97: 'x' * 99999}) }}", LARGE),
    "a power": ("{{ 10**(10**8) }}", "numbers"),
    "a power of a power": ("{{ (10**4000) ** 4000 }}", "numbers"),
    "products": ("{% set x = 10**1000 %}" + "{% set x = x * x %}" * 30, "numbers"),
    "division": ("{% set x = ('f' * 99999)|int(0, 16) %}{{ x // 3 }}", "numbers"),
    "divisibility": ("{% set x = ('f' * 99999)|int(0, 16) %}{{ x is divisibleby(3) }}", "numbers"),
    "rounding": ("{{ 1.5|round(10**9, 'ceil') }}", "digits"),
    "a sum of lists": ("{{ [[1]]|sum(start=[]) }}", "no numbers"),
    "cutting": ("{{ 'a'.strip('b' * 9999) }}", "cuts off"),
    "searching from behind": ("{{ ('a' * 99999).rfind('b' ~ 'a' * 9999) }}", "from behind"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_too_much_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(budget, "MAX_CHARACTERS", 1_000_000)
    source, reason = HOSTILE[name]
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ChatTemplate(source, {}).render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{{ " + "not " * 30_000 + "1 }}",
        "{% for x in [1] %}" * 200 + "{% endfor %}" * 200,
        "{" * 100_000,
        "{# " * 40_000,
        "x" * (MAX_SOURCE_CHARACTERS + 1),
        "{{ 'x'|striptags }}",
        "{{ 'x'|random }}",
    ],
    ids=["parentheses", "nots", "loops", "braces", "comments", "length", "a slow filter", "chance"],
)
def test_what_cannot_be_compiled_is_found_at_load(source: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(source, {})
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ ''.__class__ }}", ""),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ ''['__class__'].__mro__ }}", "unsafe"),
        ("{{ '{0.__class__}'.format(1) }}", ""),
        ("{{ raise_exception.__globals__ }}", ""),
        ("{{ namespace.__init__ }}", ""),
        ("{{ ['']|map(attribute='__class__')|list|string }}", "Undefined"),
        ("{% include 'x' %}", "loader"),
    ],
)
def test_nothing_leads_out(source: str, said: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(USER)
    except InvalidRequest as error:
        text = error.message
    assert said in text and "class" not in text.replace("__class__", "") and "function" not in text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for x in range(2000) %}{{ x % 10 }}{% endfor %}", "0123456789" * 200),
        (
            "{% for x in 'ab' %}{{ loop.length }}{{ loop.revindex }}{{ loop.last }}{% endfor %}",
            "22False21True",
        ),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none }}{% endfor %}", "a1None"),
        ("{{ '%-5s|%05.1f' % ('a', 1.5) }}{{ '{:>3}{{x}}'.format(7) }}", "a    |001.5  7{x}"),
        ("{{ messages[0].content.rjust(3)|upper|trim|indent(2, true) }}", "  A"),
        ("{{ ['b', 'a']|sort|join(', ') }}{{ [1, 2]|sum }}{{ 7 // 2 }}{{ 2 ** 10 }}", "a, b331024"),
        (
            "{{ missing }}{{ missing ~ 'x' }}{{ messages|length == 1 }}{{ messages[:1] == messages }}",
            "xTrueTrue",
        ),
        (
            "{% for m in messages recursive %}{{ m.content }}{{ loop([{'content': 'b'}]) if loop.depth < 2 }}{% endfor %}",
            "ab",
        ),
        ("{{ {'a': [1]}|tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
    ],
)
def test_what_is_ordinary_goes_on(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(USER) == text


def test_long_conversations_have_room() -> None:
    """The more there is to render, the more a template may do."""
    source = (
        "{% set ns = namespace(all=[], text='') %}{% for m in messages %}{% set ns.all = ns.all + [m] %}"
        "{% if loop.index0 == messages|length - 1 %}{{ ns.all|length }}{% endif %}{{ (m.content|trim ~ '\n')[:5] }}{% endfor %}"
    )
    messages = [{"role": "user", "content": f"message {i} " * 50} for i in range(400)]
    assert ChatTemplate(source, {}).render(messages).endswith("400messa")


def test_a_long_text_is_no_reason() -> None:
    text = "ä" * 6_000_000
    assert (
        ChatTemplate("{{ messages[0].content|trim + '.' }}", {}).render([{"role": "user", "content": text}])
        == text + "."
    )


def test_threads_have_budgets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_STEPS", 3000)
    template = ChatTemplate("{% for i in range(2000) %}{% endfor %}done", {})
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(template.render(USER))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["done"] * 4


def test_the_clock_ends_what_has_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", -1.0)
    with pytest.raises(InvalidRequest, match="takes more than -1 s"):
        ChatTemplate("{% for i in range(99) %}{% endfor %}", {}).render(USER)
