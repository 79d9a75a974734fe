"""A Jinja environment in which foreign templates can neither reach out nor take more than their share of time and memory.

Whatever a template can do in a short source that takes long or much is seen before it is done: loops, calls, operators and
filters, and every use of a value that may be many times as large as the memory it takes (`[x, x]` of `[y, y]` of ...):
writing it out, comparing it, hashing it. Signals or threads are not needed for that, nor would they stop a single operation.

What one rendering of a foreign template may use: steps, time, and characters that it makes.

How large a text can become by the filters and methods that make much of little: an upper bound, before they are called.

Every function takes what the filter or method takes, a method its owner first, and returns characters.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = [
    "FILTER_SIZES",
    "MAX_BITS",
    "METHOD_SIZES",
    "GuardedEnvironment",
    "MeteredIterable",
    "TemplateBudget",
    "TemplateBudgetExceeded",
    "check_int_size",
    "formatted_size",
    "mem_size",
    "repeat_size",
]

MAX_BITS = 16_384  # of a whole number
MAX_WIDTH = 9_999  # of a field of a format
MAX_STRIP_CHARACTERS = 1_000  # different characters that may be cut off an end
MAX_PRECISION = 300
MAX_SEARCH = 200_000_000  # comparisons of a search from behind
LINE_WIDTH, TAB_WIDTH, INDENT = 80, 8, 4  # the defaults of `center`, `expandtabs` and `indent`
NUMBERS = re.compile(r"\d+")
COMPUTED_WIDTH_PATTERNS = {
    "%": re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*\*"),
    "{": re.compile(r"\{[^{}]*:[^{}]*\{"),
}


def formatted_size(pattern: str | bytes, size: int, marker: str) -> int:
    """Of a pattern whose fields begin with `sign`, "%" or "{", filled in with values of `size` characters in all."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    text = text.replace("{{", "").replace("}}", "") if marker == "{" else text.replace("%%", "")
    widths = [int(number[:9]) for number in NUMBERS.findall(text)]
    if max(widths, default=0) > MAX_WIDTH or COMPUTED_WIDTH_PATTERNS[marker].search(text):
        raise jinja2.TemplateRuntimeError("it writes values in fields that are too wide")
    return len(text) + text.count(marker) * size + sum(widths)


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sized) else 1


def _padded_size(text: object, width: int = LINE_WIDTH, *_: Any) -> int:
    return _length(text) + width


def _expandtabs_size(text: str | bytes, tabsize: int = TAB_WIDTH) -> int:
    return len(text) * tabsize


def _replaced_size(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old = (text, old) if isinstance(text, bytes) else (str(text), str(old))
    return len(text) + int(text.count(old)) * _length(new)


def _str_join_size(separator: Any, values: Any) -> int:
    """Beside the values, which were measured."""
    return _length(separator) * _length(values)


def _join_filter_size(values: Any, d: Any = "", *_: Any, **__: Any) -> int:
    return _str_join_size(d, values)


def _translated_size(text: str | bytes, table: Any, *_: Any, **__: Any) -> int:
    longest = (
        max((_length(value) for value in table.values()), default=1) if isinstance(table, Mapping) else 1
    )
    return len(text) * longest


def _check_strip(text: Any, chars: Any = None) -> int:
    if _length(chars) > MAX_STRIP_CHARACTERS:
        raise jinja2.TemplateRuntimeError(
            f"it cuts off more than {MAX_STRIP_CHARACTERS} different characters"
        )
    return 0


def _check_search(text: Any, part: Any = None, *_: Any, **__: Any) -> int:
    if len(text) * _length(part) > MAX_SEARCH:
        raise jinja2.TemplateRuntimeError("it searches a long text from behind")
    return 0


def _to_bytes_size(_: Any, length: int = 1, *__: Any, **___: Any) -> int:
    return length


def _indented_size(text: Any, width: Any = INDENT, *_: Any, **__: Any) -> int:
    text = str(text)
    return len(text) + (int(text.count("\n")) + 1) * (len(width) if isinstance(width, str) else int(width))


def _json_size(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> int:
    """What stands between the values, which were measured: at most so much in front of each, by its depth."""
    space = (len(indent) if isinstance(indent, str) else int(indent)) if indent else 0
    between = sum(map(_length, separators)) if separators else 0
    size, waiting = 0, [(value, 1)] if space or between else []
    while waiting:
        one, depth = waiting.pop()
        size += between + 2 * depth * space
        if isinstance(one, Mapping | list | tuple):
            waiting += [(part, depth + 1) for part in (one.values() if isinstance(one, Mapping) else one)]
    return size


def _format_filter_size(pattern: Any, *args: Any, **kwargs: Any) -> int:
    return formatted_size(str(pattern), len(str(args)) + len(str(kwargs)), "%")


def _no_growth(*_: Any, **__: Any) -> int:
    """Looks at each item, all of which were measured."""
    return 0


def _batches_size(_: Any, count: int, *__: Any) -> int:
    return 16 * count


def _check_round(_: Any, precision: int = 0, *__: Any) -> int:
    if abs(precision) > MAX_PRECISION:
        raise jinja2.TemplateRuntimeError(f"it rounds to more than {MAX_PRECISION} digits")
    return 0


def _check_sum(_: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise jinja2.TemplateRuntimeError("it adds up what are no numbers")
    return 0


METHOD_SIZES: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded_size),
        **dict.fromkeys(("count", "index"), _no_growth),
        **dict.fromkeys(("lstrip", "rstrip", "strip"), _check_strip),
        **dict.fromkeys(("rfind", "rindex", "rpartition", "rsplit"), _check_search),
        "expandtabs": _expandtabs_size,
        "join": _str_join_size,
        "replace": _replaced_size,
        "to_bytes": _to_bytes_size,
        "translate": _translated_size,
    }
)
FILTER_SIZES: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "batch": _batches_size,
        "center": _padded_size,
        "format": _format_filter_size,
        "indent": _indented_size,
        "join": _join_filter_size,
        "replace": _replaced_size,
        "round": _check_round,
        "slice": _batches_size,
        "sum": _check_sum,
        "tojson": _json_size,
        "trim": _check_strip,
    }
)


MAX_STEPS = 2_000_000
MAX_SECONDS = 2.0  # of this thread's processor time: a busy machine makes no template worse
MAX_CHARACTERS = 4_000_000  # made in all, beside what the input allows
CHARACTERS_PER_INPUT_CHARACTER = 32
MAX_INPUT_ALLOWANCE = 128_000_000
VALUES_PER_TIME_CHECK = 4096  # values
STEPS_PER_TIME_CHECK = 16  # steps between looks at the clock, which cost more than a step
ITEM_CHARACTERS = 16  # characters' worth of memory of an item of a list
OPAQUE_CHARACTERS = 100  # characters of what is written as its type's name


class TemplateBudgetExceeded(jinja2.TemplateRuntimeError):
    """The template takes more than it may."""


class TemplateBudget:
    """What one rendering may still use.

    characters  that it may still make, in all texts and lists together
    """

    __slots__ = ("_end_s", "_steps", "characters")

    def __init__(self, characters: int) -> None:
        self._steps = MAX_STEPS
        self._end_s = time.thread_time() + MAX_SECONDS
        self.characters = characters

    @classmethod
    def from_input(cls, value: object) -> TemplateBudget:
        """For a rendering of these messages and options: the more they are, the more it may do."""
        allowed = cls(MAX_INPUT_ALLOWANCE // CHARACTERS_PER_INPUT_CHARACTER)
        try:
            size = allowed.measure(value)
        except TemplateBudgetExceeded:
            size = allowed.characters
        return cls(MAX_CHARACTERS + CHARACTERS_PER_INPUT_CHARACTER * size)

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise TemplateBudgetExceeded(f"it takes more than {MAX_STEPS} steps")
        if self._steps % STEPS_PER_TIME_CHECK == 0:
            self.check_time()

    def check_time(self) -> None:
        """At the clock."""
        if time.thread_time() > self._end_s:
            raise TemplateBudgetExceeded(f"it takes more than {MAX_SECONDS:g} s")

    def check_size(self, characters: int) -> None:
        """Raises if so many are too many."""
        if characters > self.characters:
            raise TemplateBudgetExceeded("it makes too much text")

    def charge(self, value: object) -> None:
        """A value was made."""
        self.spend(mem_size(value))

    def spend(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise TemplateBudgetExceeded("it makes too much text")

    def measure(self, value: Any) -> int:
        """Characters of a value that is written out. Raises if they are too many."""
        if isinstance(value, str):
            return len(value)
        size, waiting = 0, [value]
        for count in itertools.count(1):
            if not waiting:
                break
            one = waiting.pop()
            kind = type(one)
            if kind is str:
                size += len(one) + 2
            elif kind is dict:
                size += 2 * len(one) + 2
                waiting += one
                waiting += one.values()
            else:
                size += _repr_size(one)
                waiting += _children(one)
            if size > self.characters:
                raise TemplateBudgetExceeded("it uses a value that is too large")
            if count % VALUES_PER_TIME_CHECK == 0:
                self.check_time()
        return size


class MeteredIterable:
    """What a loop runs over: each turn is a step."""

    __slots__ = ("_budget", "_values")

    def __init__(self, values: Any, budget: TemplateBudget) -> None:
        self._values = values
        self._budget = budget

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        step = self._budget.step
        for value in self._values:
            step()
            yield value


def check_int_size(operator: str, left: int, right: int) -> None:
    """Whole numbers of any size are a way to compute for hours."""
    bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
    if bits > MAX_BITS:
        raise TemplateBudgetExceeded("it computes with numbers that are too large")


def repeat_size(left: Any, right: Any) -> int:
    """Weight of a text or a list repeated so many times; 0 for what is none."""
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
            return mem_size(value) * max(count, 0)
    return 0


def mem_size(value: object) -> int:
    """Memory of a value itself, in characters; what its items take was counted when they were made."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    return ITEM_CHARACTERS * len(value) if isinstance(value, list | tuple | dict | set) else 0


def _repr_size(value: object) -> int:
    """Characters of one value, without those of its parts."""
    if isinstance(value, list | tuple | str | bytes):
        return 2 * len(value) + 2
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, jinja2.Undefined):
        return 0
    if isinstance(value, Namespace):
        raise TemplateBudgetExceeded("it uses a namespace as a value")
    return (
        2 * len(value) + 2
        if isinstance(value, Collection) and not isinstance(value, range)
        else OPAQUE_CHARACTERS
    )


def _children(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return itertools.chain.from_iterable(value.items())
    if isinstance(value, str | bytes | int | range | jinja2.Undefined) or not isinstance(value, Collection):
        return ()
    return value


# Filters that nobody needs in a prompt and that take long on small inputs, or are not the same each time.
REMOVED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# Filters that neither write nor compare what they are given.
UNMETERED_FILTERS = frozenset(
    {
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "list",
        "map",
        "reject",
        "rejectattr",
    }
    | {"reverse", "select", "selectattr", "slice"}
)
# Tests that compare or compute; the others only look at a type.
METERED_TESTS = (
    *(
        "==",
        "eq",
        "equalto",
        "!=",
        "ne",
        "<",
        "lt",
        "lessthan",
        "<=",
        "le",
        ">",
        "gt",
        "greaterthan",
        ">=",
        "ge",
    ),
    *("in", "divisibleby"),
)
GUARD_LOOP, GUARD_USE, GUARD_SLICE, GUARD_CONCAT = (
    f"foreword {name}" for name in ("watched", "used", "sliced", "joined")
)


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders within a Budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._charge_output, **options)
        self._budget: ContextVar[TemplateBudget] = ContextVar("budget")
        self.concat = self._concat_output  # type: ignore[method-assign]
        del self.globals["lipsum"]
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters |= {name: self._guard_filter(name, function) for name, function in self.filters.items()}
        self.tests |= {name: self._guard_test(self.tests[name]) for name in METERED_TESTS}
        self.filters |= {
            GUARD_LOOP: self._meter_loop,
            GUARD_USE: self._charge_use_filter,
            GUARD_SLICE: self._charge_slice,
            GUARD_CONCAT: self._concat_filter,
        }

    def set_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add or replace a filter."""
        self.filters[name] = self._guard_filter(name, function)

    @contextmanager
    def use_budget(self, budget: TemplateBudget) -> Iterator[None]:
        """Whatever is compiled or rendered inside draws on this budget."""
        token = self._budget.set(budget)
        try:
            yield
        finally:
            self._budget.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        guarded: nodes.Template = _GuardInserter().visit(super()._parse(source, name, filename))
        return guarded

    # What templates do

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self._budget.get()
        budget.step()
        if isinstance(__obj, LoopContext) and args:
            args = (MeteredIterable(args[0], budget), *args[1:])
        elif not isinstance(__obj, Macro):
            args = tuple(__self._materialize(arg) for arg in args)
            __self._check_method(__obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self._budget.get()
        budget.step()
        if operator == "+" and type(left) is str and type(right) is str:  # by far the most frequent
            budget.spend(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            check_int_size(operator, left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            budget.check_size(formatted_size(left, budget.measure(right), "%"))
        elif operator == "*":
            budget.check_size(repeat_size(left, right))
        elif operator == "+":
            budget.check_size(mem_size(left) + mem_size(right))
        result = super().call_binop(context, operator, left, right)
        budget.charge(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        pattern: str = value.__self__

        @wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            budget = self._budget.get()
            budget.check_size(formatted_size(pattern, budget.measure((args, kwargs)), "{"))
            return wrapped(*args, **kwargs)

        return bounded

    def _check_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a built-in function or method of a text, a number or a list is called."""
        budget, owner = self._budget.get(), getattr(method, "__self__", None)
        for arg in (*args, *kwargs.values()):
            budget.measure(arg)
        growth = METHOD_SIZES.get(getattr(method, "__name__", ""))
        if growth is None or not isinstance(owner, str | bytes | int | list | tuple):
            return
        budget.measure(owner)
        budget.check_size(growth(owner, *args, **kwargs))

    def _guard_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        growth, light = FILTER_SIZES.get(name), name in UNMETERED_FILTERS
        hidden = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget.get()
            budget.step()
            if not light:
                args = (*args[:hidden], *(self._materialize(arg) for arg in args[hidden:]))
                for arg in (*args[hidden:], *kwargs.values()):
                    budget.measure(arg)
            if growth is not None:
                budget.check_size(growth(*args[hidden:], **kwargs))
            result = function(*args, **kwargs)
            budget.charge(result)
            return result

        return guarded

    def _guard_test(self, function: Any) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any) -> Any:
            return function(*(self._charge_use(arg) for arg in args))

        return guarded

    def _materialize(self, value: Any) -> Any:
        """What is still to be computed becomes a list, within the budget."""
        return list(MeteredIterable(value, self._budget.get())) if isinstance(value, Iterator) else value

    def _charge_use(self, value: Any) -> Any:
        """A value that is compared, hashed or divided."""
        if isinstance(value, int):
            check_int_size("+", value, 0)
        else:
            self._budget.get().measure(value)
        return value

    def _charge_output(self, value: Any) -> Any:
        """A value that `{{ }}` writes."""
        budget = self._budget.get()
        budget.step()
        if not isinstance(value, str):
            budget.spend(budget.measure(value))
        return value

    def _concat_output(self, parts: Iterable[str]) -> str:
        """All that a template, a macro or a block has written."""
        budget, kept, size = self._budget.get(), [], 0
        for part in parts:
            size += len(part)
            budget.check_size(size)
            kept.append(part)
        budget.spend(size)
        return "".join(kept)

    # What the marks of _Guards call. With the context, none is called while constants are folded.

    @jinja2.pass_context
    def _meter_loop(self, _: Context, values: Any) -> MeteredIterable:
        return MeteredIterable(values, self._budget.get())

    @jinja2.pass_context
    def _charge_use_filter(self, _: Context, value: Any) -> Any:
        return self._charge_use(value)

    @jinja2.pass_context
    def _concat_filter(self, _: Context, parts: list[Any]) -> str:
        """The operator `~`."""
        budget = self._budget.get()
        budget.step()
        size = sum(budget.measure(part) for part in parts)
        budget.check_size(size)
        text = "".join(map(str, parts))
        budget.charge(text)
        return text

    @jinja2.pass_context
    def _charge_slice(self, _: Context, value: Any) -> Any:
        """A slice of a text costs its length, of a list less: it holds only what is there."""
        budget = self._budget.get()
        budget.step()
        budget.spend(len(value) if isinstance(value, str) else len(value) // 2)
        return value


class _GuardInserter(NodeTransformer):
    """Marks the places of a template at which nothing of Jinja's asks the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _wrap_filter(GUARD_LOOP, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _wrap_filter(GUARD_CONCAT, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """With a constant on one side of one comparison, nothing deep is compared."""
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) == 2 and any(_is_constant(side) for side in sides):
            return node
        node.expr = _wrap_filter(GUARD_USE, node.expr)
        for operand in node.ops:
            operand.expr = _wrap_filter(GUARD_USE, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _wrap_filter(GUARD_SLICE, node)
        if not _is_constant(node.arg):
            node.arg = _wrap_filter(GUARD_USE, node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not _is_constant(node.key):
            node.key = _wrap_filter(GUARD_USE, node.key)
        return node


def _wrap_filter(name: str, node: Any) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const)
    )
