"""Tools of `foreword chat --tools`: read_file, list_files and calculate, each call behind a question."""

from __future__ import annotations

import ast
import json
import math
import operator
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from foreword.chat_formats.events import CallArguments, CallStart, ToolCall
from foreword.errors import ForewordError

MAX_FILE_BYTES: Final = 65_536
MAX_ENTRIES: Final = 200  # listed entries of a directory
MAX_ARGUMENT_CHARS: Final = 4096
MAX_EXPRESSION_CHARS: Final = 200
MAX_NUMBER_BITS: Final = 3300  # about 1000 digits
EXPRESSION = re.compile(r"[0-9eE.+\-*/%()\s]+")
Number = int | float
_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _define(name: str, description: str, argument: str, meaning: str) -> Mapping[str, Any]:
    """A tool with one text argument, in OpenAI's form."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


_PATH: Final = "relative to the current directory"
TOOLS: Final[Sequence[Mapping[str, Any]]] = (
    _define("read_file", "Read a text file.", "path", _PATH),
    _define("list_files", "List the files of a directory; names of directories end with /.", "path", _PATH),
    _define("calculate", "Calculate an arithmetic expression.", "expression", "with + - * / // % ** ( )"),
)


def join_calls(parts: Iterable[CallStart | CallArguments]) -> tuple[ToolCall, ...]:
    """The calls of a whole answer."""
    starts: dict[int, CallStart] = {}
    arguments: dict[int, list[str]] = defaultdict(list)
    for part in parts:
        if isinstance(part, CallStart):
            starts[part.index] = part
        else:
            arguments[part.index].append(part.text)
    return tuple(ToolCall(start.id, start.name, "".join(arguments[index])) for index, start in starts.items())


def error_result(message: object) -> str:
    """The result of a call that failed."""
    return f"error: {message}"


REFUSED_RESULT: Final = error_result("the user refused this call")


class _ToolError(ForewordError):
    """The error message that replaces a result."""


class LocalTools:
    """Runs calls in one directory.

    root       files outside are refused, also behind links
    ask        shows a question and returns the answer; None: no terminal, so calls are refused
    runs_all   calls run without a question
    """

    def __init__(self, root: Path, ask: Callable[[str], str] | None, runs_all: bool = False) -> None:
        self.root = root.resolve()
        self._ask = ask
        self._runs_all = runs_all
        self._always: set[str] = set()  # tools whose calls run without a question
        self._functions: Mapping[str, tuple[str, Callable[[str], str]]] = {
            "read_file": ("path", self.read_file),
            "list_files": ("path", self.list_files),
            "calculate": ("expression", calculate),
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    def run(self, call: ToolCall) -> str:
        """The result of a call, or an error for the model.

        Raises KeyboardInterrupt and EOFError if the user answers the question with it.
        """
        try:
            argument = self._read_argument(call)
            if not self._may_run(call.name, argument):
                return REFUSED_RESULT
            return self._functions[call.name][1](argument)
        except ForewordError as error:
            return error_result(error)

    def read_file(self, path: str) -> str:
        """The text of a file, without line ends at its end. Raises ForewordError."""
        with self._open(path, 0) as descriptor:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise _ToolError("this is a directory" if stat.S_ISDIR(mode) else "this is no regular file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise _ToolError(f"the file has more than {MAX_FILE_BYTES} bytes")
        if b"\0" in data:
            raise _ToolError("this is a binary file")
        with suppress(UnicodeDecodeError):
            return data.decode("utf-8").rstrip("\n") or "the file is empty"
        raise _ToolError("this is a binary file")

    def list_files(self, path: str) -> str:
        """Names in a directory, one a line. Raises ForewordError."""
        with self._open(path or ".", os.O_DIRECTORY) as descriptor, os.scandir(descriptor) as entries:
            some = list(islice(entries, MAX_ENTRIES + 1))
            names = sorted(
                _printable(entry.name) + "/" * entry.is_dir(follow_symlinks=False)
                for entry in some[:MAX_ENTRIES]
            )
        more = [f"and more than {MAX_ENTRIES} in all"] if len(some) > MAX_ENTRIES else []
        return "\n".join([*names, *more]) or "the directory is empty"

    @contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        """A descriptor of a path within the root.

        Links are resolved first, and none is followed afterwards: a path that changes in between fails.
        """
        try:
            resolved = (self.root / path).resolve()
        except (OSError, RuntimeError, ValueError):
            raise _ToolError("the path cannot be resolved") from None  # a loop of links, or a NUL
        if not resolved.is_relative_to(self.root):  # whether it exists is not said
            raise _ToolError("the path leaves the directory")
        parts = resolved.relative_to(self.root).parts
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for i, part in enumerate(parts):
                wanted = flags if i == len(parts) - 1 else os.O_DIRECTORY
                child = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | wanted, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = child
            yield descriptor
        except FileNotFoundError:
            raise _ToolError("no such file") from None
        except OSError as error:
            raise _ToolError(error.strerror or "the path cannot be opened") from None
        finally:
            os.close(descriptor)

    def _read_argument(self, call: ToolCall) -> str:
        if call.name not in self._functions:
            raise _ToolError(f"no such tool, only {', '.join(self._functions)}")
        name = self._functions[call.name][0]
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict) or not isinstance(arguments.get(name), str):
            raise _ToolError(f"the arguments must be an object with the text {name!r}")
        if len(arguments[name]) > MAX_ARGUMENT_CHARS:
            raise _ToolError(f"{name} has more than {MAX_ARGUMENT_CHARS} characters")
        return str(arguments[name])

    def _may_run(self, name: str, argument: str) -> bool:
        if self._runs_all or name in self._always:
            return True
        if self._ask is None:
            return False
        parameter = self._functions[name][0]
        # repr() shows characters that a terminal would obey or hide as escapes.
        answer = self._ask(f"Run {name}({parameter}={argument!r})? [y/N/a] ").strip().lower()
        if answer in ("a", "always"):
            self._always.add(name)
        return answer in ("y", "yes", "a", "always")


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, with at most 12 significant digits unless it is an integer.

    Raises ForewordError for anything else than numbers, + - * / // % ** and parentheses, and for values
    beyond the range of a float or MAX_NUMBER_BITS.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise _ToolError(f"the expression has more than {MAX_EXPRESSION_CHARS} characters")
    if not EXPRESSION.fullmatch(expression):
        raise _ToolError("only numbers, + - * / // % ** and parentheses are calculated")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _ToolError("this is no arithmetic expression") from None
    except ZeroDivisionError:
        raise _ToolError("division by zero") from None
    except OverflowError:
        raise _ToolError("the number is too large") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate(node: ast.expr) -> Number:
    """Raises ArithmeticError and ForewordError."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return _check(value)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            value = _evaluate(operand)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(op, ast.Pow) and isinstance(a, int) and isinstance(b, int):
                _check_bits(a.bit_length() * max(b, 0))  # checked before the work
            return _check(_BINARY[type(op)](a, b))
    raise _ToolError("this is no arithmetic expression")


def _check(value: object) -> Number:
    if isinstance(value, int):
        _check_bits(value.bit_length())
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, complex):
        raise _ToolError("the result is no real number")
    raise _ToolError("the number is too large")


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_NUMBER_BITS:
        raise _ToolError("the number is too large")


def _printable(name: str) -> str:
    """A file name whose other characters, which a terminal would obey or no text can hold, are marked."""
    return "".join(char if char.isprintable() else "?" for char in name)
