"""Tools of `foreword chat --tools`: confined to a directory, bounded, and behind a question."""

import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreword.chat_formats.events import CallArguments, CallStart, ToolCall
from foreword.cli import chat_tools
from foreword.cli.chat_tools import REFUSED_RESULT, TOOLS, LocalTools, join_calls
from foreword.errors import ForewordError

SECRET = "what is outside"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with files, links of every kind, and a file outside beside it."""
    outside = tmp_path_factory.mktemp("box")
    root = outside / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "deep.txt").write_text("deep")
    (root / "a" / "file").write_text("inside")
    (root / "empty").touch()
    (root / "nothing").mkdir()
    (outside / "secret").write_text(SECRET)
    (outside / "root2").mkdir()
    (outside / "root2" / "secret").write_text(SECRET)
    (root / "up").symlink_to("..")
    (root / "out").symlink_to(outside / "secret")
    (root / "a" / "chain").symlink_to("../up/secret")
    (root / "in").symlink_to("a/b/../file")
    (root / "loop").symlink_to("loop")
    (root / "gone").symlink_to("nowhere")
    os.mkfifo(root / "fifo")
    return root


def local(root: Path, runs_all: bool = True) -> LocalTools:
    return LocalTools(root, None, runs_all)


def call(name: str, argument: str) -> ToolCall:
    parameter = "expression" if name == "calculate" else "path"
    return ToolCall("call_0", name, json.dumps({parameter: argument}))


def test_files_and_links_within_the_directory_are_read(root: Path) -> None:
    run = local(root).read_file
    assert run("a/./b/deep.txt") == "deep"
    for path in ("a/file", "in", "a/b/../../in", str(root / "in")):
        assert run(path) == "inside"
    assert run("empty") == "the file is empty"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("out", "the path leaves the directory"),
        ("up/secret", "the path leaves the directory"),
        ("../secret", "the path leaves the directory"),
        ("../root2/secret", "the path leaves the directory"),
        ("../missing", "the path leaves the directory"),  # whether it exists is not said
        ("/etc/hosts", "the path leaves the directory"),
        ("a\0b", "the path cannot be resolved"),
        ("\ud800", "the path cannot be resolved"),
        ("gone", "no such file"),
        ("a/file/x", "Not a directory"),
        ("a", "this is a directory"),
        ("", "this is a directory"),
        ("fifo", "this is no regular file"),
        ("x" * 300, "File name too long"),
    ],
)
def test_other_paths_are_refused(root: Path, path: str, error: str) -> None:
    assert local(root).run(call("read_file", path)) == f"error: {error}"


PARTS = (
    "..",
    ".",
    "a",
    "b",
    "up",
    "out",
    "in",
    "chain",
    "loop",
    "secret",
    "root",
    "root2",
    "file",
    "",
    "/",
    "gone",
)


@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=8), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_path_leaves_the_directory(root: Path, parts: list[str], absolute: bool) -> None:
    path = ("/" if absolute else "") + "/".join(parts)
    run = local(root)
    assert SECRET not in run.run(call("read_file", path))
    listed = run.run(call("list_files", path))
    assert "root2/" not in listed and "secret" not in listed.splitlines()


def test_loop_of_links_is_refused(root: Path) -> None:
    """Python 3.13 resolves it to itself."""
    result = local(root).run(call("read_file", "loop"))
    assert result in ("error: the path cannot be resolved", "error: Too many levels of symbolic links")


def test_a_directory_that_becomes_a_link_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path was within the directory when it was resolved."""
    resolve = Path.resolve

    def swap(self: Path, strict: bool = False) -> Path:
        return root / "up" / "secret" if self.name == "secret" else resolve(self, strict)

    reader = local(root)
    monkeypatch.setattr(Path, "resolve", swap)
    assert reader.run(call("read_file", "up/secret")) != SECRET


@pytest.mark.parametrize(
    ("data", "result"),
    [
        (b"x" * chat_tools.MAX_FILE_BYTES, "x" * chat_tools.MAX_FILE_BYTES),
        (
            b"x" * (chat_tools.MAX_FILE_BYTES + 1),
            f"error: the file has more than {chat_tools.MAX_FILE_BYTES} bytes",
        ),
        (b"a\0b", "error: this is a binary file"),
        (b"\xff\xfe", "error: this is a binary file"),
        ("a\nü\n\n".encode(), "a\nü"),
        (b"\n", "the file is empty"),
    ],
)
def test_files_are_bounded_texts(tmp_path: Path, data: bytes, result: str) -> None:
    (tmp_path / "file").write_bytes(data)
    assert local(tmp_path).run(call("read_file", "file")) == result


def test_list_files(root: Path, tmp_path: Path) -> None:
    listed = local(root).list_files
    assert listed(".").splitlines() == ["a/", "empty", "fifo", "gone", "in", "loop", "nothing/", "out", "up"]
    assert listed("") == listed(".") and listed("a") == "b/\nchain\nfile"
    assert listed("nothing") == "the directory is empty"
    assert local(root).run(call("list_files", "a/file")) == "error: Not a directory"
    for i in range(chat_tools.MAX_ENTRIES):
        (tmp_path / f"{i}\x1b\n").touch()
    assert len(local(tmp_path).list_files(".").splitlines()) == chat_tools.MAX_ENTRIES
    assert local(tmp_path).list_files(".").startswith("0??\n")
    (tmp_path / "more").touch()
    assert local(tmp_path).list_files(".").endswith(f"\nand more than {chat_tools.MAX_ENTRIES} in all")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("7 // 2 + 7 % 4", "6"),
        ("10/4", "2.5"),
        ("0.1 + 0.2", "0.3"),
        ("1e3 / 3", "333.333333333"),
        ("10**20 + 1", "100000000000000000001"),
        ("-(-(3))", "3"),
        ("10 ** (-10 ** 9)", "0"),
    ],
)
def test_calculate(expression: str, value: str) -> None:
    assert chat_tools.calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1/0", "division by zero"),
        ("9**9**9**9", "the number is too large"),
        ("1e308 * 10", "the number is too large"),
        ("1e999", "the number is too large"),
        ("10.0**400", "the number is too large"),
        ("10**900 / 1.5", "the number is too large"),
        ("(-8)**.5", "the result is no real number"),
        ("x", "only numbers"),
        ("1_000", "only numbers"),
        ("", "only numbers"),
        ("٣", "only numbers"),
        ("()", "this is no arithmetic expression"),
        ("1 2", "this is no arithmetic expression"),
        ("1\n2", "this is no arithmetic expression"),
        ("(" * 199 + "1", "this is no arithmetic expression"),
        ("1" * (chat_tools.MAX_EXPRESSION_CHARS + 1), "the expression has more than"),
    ],
)
def test_calculate_refuses(expression: str, error: str) -> None:
    with pytest.raises(ForewordError, match=error):
        chat_tools.calculate(expression)


@given(st.text(alphabet="0123456789eE.+-*/%() \n", max_size=40))
def test_any_expression_has_a_value_or_an_error(expression: str) -> None:
    try:
        value = chat_tools.calculate(expression)
    except ForewordError:
        return
    assert len(value) <= 1001 and (value[-1].isdigit())


@given(st.integers(), st.integers(), st.sampled_from("+-*"), st.integers(0, 9))
def test_integers_are_exact(a: int, b: int, sign: str, c: int) -> None:
    expression = f"({a}) {sign} ({b}) * {c}"
    if len(expression) <= chat_tools.MAX_EXPRESSION_CHARS:
        expected = {"+": a + b * c, "-": a - b * c, "*": a * b * c}[sign]
        assert chat_tools.calculate(expression) == str(expected)


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_quotients_are_rounded(a: int, b: int) -> None:
    assert (
        abs(Fraction(chat_tools.calculate(f"({a}) / {b}")) - Fraction(a, b)) <= abs(Fraction(a, b)) / 10**11
    )


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("rm", '{"path": "a"}', "no such tool, only read_file, list_files, calculate"),
        ("read_file", "{", "the arguments must be an object with the text 'path'"),
        ("read_file", "[]", "the arguments must be an object with the text 'path'"),
        ("read_file", '{"path": 1}', "the arguments must be an object with the text 'path'"),
        ("calculate", "", "the arguments must be an object with the text 'expression'"),
        ("read_file", "[" * 100_000, "the arguments must be an object with the text 'path'"),
        ("read_file", json.dumps({"path": "x" * 5000}), "path has more than 4096 characters"),
    ],
)
def test_invalid_calls_are_errors_for_the_model(root: Path, name: str, arguments: str, error: str) -> None:
    asked: list[str] = []
    answers = LocalTools(root, lambda question: asked.append(question) or "y")
    assert answers.run(ToolCall("0", name, arguments)) == f"error: {error}" and not asked


def asking(root: Path, *answers: str) -> tuple[LocalTools, list[str]]:
    asked: list[str] = []
    left = list(answers)

    def ask(question: str) -> str:
        asked.append(question)
        return left.pop(0)

    return LocalTools(root, ask), asked


def test_each_call_is_asked_for(root: Path) -> None:
    runner, asked = asking(root, "", "n", "what?", " Y ", "yes")
    results = [runner.run(call("read_file", "a/file")) for _ in range(5)]
    assert results == [REFUSED_RESULT] * 3 + ["inside"] * 2
    assert asked == ["Run read_file(path='a/file')? [y/N/a] "] * 5


def test_always_is_for_one_tool(root: Path) -> None:
    runner, asked = asking(root, "a", "n")
    assert [runner.run(call("read_file", "a/file")) for _ in range(3)] == ["inside"] * 3
    assert runner.run(call("list_files", "a")) == REFUSED_RESULT and len(asked) == 2


def test_question_shows_controls_as_escapes(root: Path) -> None:
    runner, asked = asking(root, "n")
    runner.run(call("read_file", "a\x1b[2J\u202e\n"))
    assert asked == [r"Run read_file(path='a\x1b[2J\u202e\n')? [y/N/a] "]


def test_nobody_to_ask_refuses(root: Path) -> None:
    assert local(root, runs_all=False).run(call("read_file", "a/file")) == REFUSED_RESULT


def test_definitions_name_every_tool(root: Path) -> None:
    assert [tool["function"]["name"] for tool in TOOLS] == list(local(root).names)
    for tool in TOOLS:
        (argument,) = tool["function"]["parameters"]["required"]
        answer = local(root).run(ToolCall("0", tool["function"]["name"], json.dumps({argument: "a"})))
        assert "the arguments must be" not in answer


def test_parts_of_calls_are_joined() -> None:
    parts = [
        CallStart(0, "x", "f"), CallArguments(0, '{"a'), CallStart(1, "y", "g"), CallArguments(0, '": 1}'),
        CallArguments(1, "{}"), CallArguments(7, "lost"),
    ]  # fmt: skip
    assert join_calls(parts) == (ToolCall("x", "f", '{"a": 1}'), ToolCall("y", "g", "{}"))
