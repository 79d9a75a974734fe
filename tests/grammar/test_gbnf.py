"""GBNF of llama.cpp and EBNF of vLLM."""

from __future__ import annotations

import re

import pytest

from foreword.core.structured_output import StructuredOutput
from foreword.grammar.gbnf import gbnf_to_lark
from foreword.grammar.json_schema import GrammarError
from foreword.grammar.manager import GrammarManager
from tests.support.grammar_walks import is_legal

# As llama.cpp ships it.
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = """
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t]*
"""
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
CASES = [
    (
        JSON,
        ['{"a": [1, -2.5e3, true, null], "b": {"c": "x\\n\\u00e9 é"}}', "{}", '{\n  "a":\n  1 }'],
        ["[1]", '{"a" 1}', '{"a": "\n"}'],
    ),
    (ARITHMETIC, ["(a+b)*c_1= 5\n", "1=2\nx= y\n"], ["1=2", "a+=2\n", "(a=2\n"]),
    (
        SQL,
        ["SELECT col_1  from table_2  where col_2 = 1 "],
        ["SELECT col_1 from table_2 where col_2 = 1", ""],
    ),
    ('root ::= "a"{2} [b-c]{1,} "d"{0,2} "e"? .', ["aabc!", "aabdde\n"], ["abc!", "aabddd!!"]),
    (
        r'root ::= [^\]\\^-] [-a] [a-] [\x41-\u005A] "\U0001F600\t\"\\" ',
        ['x-aQ😀\t"\\'],
        ['x-aq😀\t"\\', '^-aQ😀\t"\\'],
    ),
    ('root ::= a-b\n  | a_b # two names\n\na-b ::= "1"\na_b ::= "2"', ["1", "2"], ["3"]),
    ('root ::= ("a" # first\n | "b"\n)+', ["abba"], ["c"]),
    ('root ::= x "c" | x "d"\nx ::= x "a" | "b"', ["baad", "bc"], ["ad", "b"]),
    ('root ::= [a-z]+ "x" | "(" root ")"', ["abx", "((xx))"], ["ab", "(abx"]),
    ('root ::= "" | "a" root', ["", "aaa"], ["b"]),
    ('Root ::= "b"\nroot ::= "a" Root start\nstart ::= "s"', ["abs"], ["ab"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES)
def test_grammar_accepts_good_and_rejects_bad_texts(
    grammars: GrammarManager, grammar: str, good: list[str], bad: list[str]
) -> None:
    structured = StructuredOutput("gbnf", grammar)
    assert [text for text in good if not is_legal(grammars, structured, text)] == []
    assert [text for text in bad if is_legal(grammars, structured, text)] == []


def test_greedy_terminals_hide_some_recursive_texts(grammars: GrammarManager) -> None:
    """Known limit: a terminal takes a character that a recursive rule needs next.

    All accepted texts conform. Without recursion the grammar is one terminal, and accepts all its texts.
    """
    recursive = 'root ::= "(" root ")" | term "\\n"\nterm ::= [a-z] term | [0-9]+ [ \\n]*'
    assert not is_legal(grammars, StructuredOutput("gbnf", recursive), "a5\n")
    assert is_legal(grammars, StructuredOutput("gbnf", recursive.replace("term |", "|")), "5\n")


def test_non_recursive_grammar_is_one_terminal() -> None:
    assert gbnf_to_lark(SQL).startswith("start: START_T0\n")
    lines = gbnf_to_lark(ARITHMETIC).splitlines()
    assert not [line for line in lines if re.search(r"_r\d+:.*/", line)], "rules must not hold characters"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root ::= a", "'a' is not defined; 'root' refers"),
        ('a ::= "x"', "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ('root ::= ("a"', r"expected '\)' after"),
        ('root = "a"', "syntax error at"),
        ('root "a"', "expected ::= after 'root'"),
        ("root ::= \"a\" 'b'", "line 1"),
        ('root ::= "a"\n\nroot2 ::= "b', "line 3"),
        ("root ::= [", "line 1"),
        ('root ::= "a" [^]', "class \\[\\^\\] is empty"),
        ('root ::= "a"{2,99999}', "at most 10000"),
        pytest.param('root ::= "a"{' + "9" * 5000 + "}", "at most 10000", id="5000 digits"),
        ('root ::= "\\uD800"', "D800 is not a Unicode code point"),
        ("root ::= )", "expected a rule name"),
        ("", "no rule 'root'"),
    ],
)
def test_error_names_the_defect(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        gbnf_to_lark(grammar)
