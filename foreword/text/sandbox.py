"""A Jinja environment in which foreign templates can neither reach out nor take more than their share of time and memory.

Whatever a template can do in a short source that takes long or much is seen before it is done: loops, calls, operators and
filters, and every use of a value that may be many times as large as the memory it takes (`[x, x]` of `[y, y]` of ...):
writing it out, comparing it, hashing it. Signals or threads are not needed for that, nor would they stop a single operation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from foreword.text.growth import FILTERS, MAX_BITS, METHODS, formatted

__all__ = ["Budget", "GuardedEnvironment"]

MAX_STEPS = 2_000_000
MAX_SECONDS = 2.0  # of this thread's processor time: a busy machine makes no template worse
MAX_CHARACTERS = 4_000_000  # made in all, beside what the input allows
PER_INPUT_CHARACTER = 32
MAX_BY_INPUT = 128_000_000
MEASURED_BETWEEN_LOOKS = 4096  # values
LOOK_EVERY = 16  # steps between looks at the clock, which cost more than a step
ITEM = 16  # characters' worth of memory of an item of a list
OPAQUE = 100  # characters of what is written as its type's name

# Filters that nobody needs in a prompt and that take long on small inputs, or are not the same each time.
REFUSED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# Filters that neither write nor compare what they are given.
LIGHT_FILTERS = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr"}
    | {"reverse", "select", "selectattr", "slice"}
)
# Tests that compare or compute; the others only look at a type.
HEAVY_TESTS = (
    *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge"),
    *("in", "divisibleby"),
)
WATCHED, USED, SLICED, JOINED = (f"foreword {name}" for name in ("watched", "used", "sliced", "joined"))


class TooMuch(jinja2.TemplateRuntimeError):
    """The template takes more than it may."""


class Budget:
    """What one rendering may still use.

    characters  that it may still make, in all texts and lists together
    """

    __slots__ = ("_end_s", "_steps", "characters")

    def __init__(self, characters: int) -> None:
        self._steps = MAX_STEPS
        self._end_s = time.thread_time() + MAX_SECONDS
        self.characters = characters

    @classmethod
    def of(cls, given: object) -> Budget:
        """For a rendering of these messages and options: the more they are, the more it may do."""
        allowed = cls(MAX_BY_INPUT // PER_INPUT_CHARACTER)
        try:
            size = allowed.measure(given)
        except TooMuch:
            size = allowed.characters
        return cls(MAX_CHARACTERS + PER_INPUT_CHARACTER * size)

    def step(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise TooMuch(f"it takes more than {MAX_STEPS} steps")
        if self._steps % LOOK_EVERY == 0:
            self.look()

    def look(self) -> None:
        """At the clock."""
        if time.thread_time() > self._end_s:
            raise TooMuch(f"it takes more than {MAX_SECONDS:g} s")

    def check(self, characters: int) -> None:
        """Raises if so many are too many."""
        if characters > self.characters:
            raise TooMuch("it makes too much text")

    def charge(self, value: object) -> None:
        """A value was made."""
        self.spend(_weight(value))

    def spend(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise TooMuch("it makes too much text")

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
                size += _written_size(one)
                waiting += _parts(one)
            if size > self.characters:
                raise TooMuch("it uses a value that is too large")
            if count % MEASURED_BETWEEN_LOOKS == 0:
                self.look()
        return size


class Watched:
    """What a loop runs over: each turn is a step."""

    __slots__ = ("_budget", "_values")

    def __init__(self, values: Any, budget: Budget) -> None:
        self._values = values
        self._budget = budget

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        step = self._budget.step
        for value in self._values:
            step()
            yield value


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders within a Budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._written, **options)
        self._budget: ContextVar[Budget] = ContextVar("budget")
        self.concat = self._concat  # type: ignore[method-assign]
        del self.globals["lipsum"]
        for name in REFUSED_FILTERS:
            del self.filters[name]
        self.filters |= {name: self._guarded_filter(name, function) for name, function in self.filters.items()}
        self.tests |= {name: self._guarded_test(self.tests[name]) for name in HEAVY_TESTS}
        self.filters |= {
            WATCHED: self._watched,
            USED: self._used_in,
            SLICED: self._sliced,
            JOINED: self._joined,
        }

    def set_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add or replace a filter."""
        self.filters[name] = self._guarded_filter(name, function)

    @contextmanager
    def within(self, budget: Budget) -> Iterator[None]:
        """Whatever is compiled or rendered inside draws on this budget."""
        token = self._budget.set(budget)
        try:
            yield
        finally:
            self._budget.reset(token)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        guarded: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        return guarded

    # What templates do

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = __self._budget.get()
        budget.step()
        if isinstance(__obj, LoopContext) and args:
            args = (Watched(args[0], budget), *args[1:])
        elif not isinstance(__obj, Macro):
            args = tuple(__self._settled(arg) for arg in args)
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
            _check_numbers(operator, left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            budget.check(formatted(left, budget.measure(right), "%"))
        elif operator == "*":
            budget.check(_product(left, right))
        elif operator == "+":
            budget.check(_weight(left) + _weight(right))
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
            budget.check(formatted(pattern, budget.measure((args, kwargs)), "{"))
            return wrapped(*args, **kwargs)

        return bounded

    def _check_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a built-in function or method of a text, a number or a list is called."""
        budget, owner = self._budget.get(), getattr(method, "__self__", None)
        for arg in (*args, *kwargs.values()):
            budget.measure(arg)
        growth = METHODS.get(getattr(method, "__name__", ""))
        if growth is None or not isinstance(owner, str | bytes | int | list | tuple):
            return
        budget.measure(owner)
        budget.check(growth(owner, *args, **kwargs))

    def _guarded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        growth, light = FILTERS.get(name), name in LIGHT_FILTERS
        hidden = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget.get()
            budget.step()
            if not light:
                args = (*args[:hidden], *(self._settled(arg) for arg in args[hidden:]))
                for arg in (*args[hidden:], *kwargs.values()):
                    budget.measure(arg)
            if growth is not None:
                budget.check(growth(*args[hidden:], **kwargs))
            result = function(*args, **kwargs)
            budget.charge(result)
            return result

        return guarded

    def _guarded_test(self, function: Any) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any) -> Any:
            return function(*(self._used(arg) for arg in args))

        return guarded

    def _settled(self, value: Any) -> Any:
        """What is still to be computed becomes a list, within the budget."""
        return list(Watched(value, self._budget.get())) if isinstance(value, Iterator) else value

    def _used(self, value: Any) -> Any:
        """A value that is compared, hashed or divided."""
        if isinstance(value, int):
            _check_numbers("+", value, 0)
        else:
            self._budget.get().measure(value)
        return value

    def _written(self, value: Any) -> Any:
        """A value that `{{ }}` writes."""
        budget = self._budget.get()
        budget.step()
        if not isinstance(value, str):
            budget.spend(budget.measure(value))
        return value

    def _concat(self, parts: Iterable[str]) -> str:
        """All that a template, a macro or a block has written."""
        budget, kept, size = self._budget.get(), [], 0
        for part in parts:
            size += len(part)
            budget.check(size)
            kept.append(part)
        budget.spend(size)
        return "".join(kept)

    # What the marks of _Guards call. With the context, none is called while constants are folded.

    @jinja2.pass_context
    def _watched(self, _: Context, values: Any) -> Watched:
        return Watched(values, self._budget.get())

    @jinja2.pass_context
    def _used_in(self, _: Context, value: Any) -> Any:
        return self._used(value)

    @jinja2.pass_context
    def _joined(self, _: Context, parts: list[Any]) -> str:
        """The operator `~`."""
        budget = self._budget.get()
        budget.step()
        size = sum(budget.measure(part) for part in parts)
        budget.check(size)
        text = "".join(map(str, parts))
        budget.charge(text)
        return text

    @jinja2.pass_context
    def _sliced(self, _: Context, value: Any) -> Any:
        """A slice of a text costs its length, of a list less: it holds only what is there."""
        budget = self._budget.get()
        budget.step()
        budget.spend(len(value) if isinstance(value, str) else len(value) // 2)
        return value


class _Guards(NodeTransformer):
    """Marks the places of a template at which nothing of Jinja's asks the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through(WATCHED, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """With a constant on one side of one comparison, nothing deep is compared."""
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) == 2 and any(_is_constant(side) for side in sides):
            return node
        node.expr = _through(USED, node.expr)
        for operand in node.ops:
            operand.expr = _through(USED, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _through(SLICED, node)
        if not _is_constant(node.arg):
            node.arg = _through(USED, node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not _is_constant(node.key):
            node.key = _through(USED, node.key)
        return node


def _through(name: str, node: Any) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const) or (isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const))


def _check_numbers(operator: str, left: int, right: int) -> None:
    """Whole numbers of any size are a way to compute for hours."""
    bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
    if bits > MAX_BITS:
        raise TooMuch("it computes with numbers that are too large")


def _product(left: Any, right: Any) -> int:
    """Weight of a text or a list repeated so many times; 0 for what is none."""
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
            return _weight(value) * max(count, 0)
    return 0


def _weight(value: object) -> int:
    """Memory of a value itself, in characters; what its items take was counted when they were made."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    return ITEM * len(value) if isinstance(value, list | tuple | dict | set) else 0


def _written_size(value: object) -> int:
    """Characters of one value, without those of its parts."""
    if isinstance(value, list | tuple | str | bytes):
        return 2 * len(value) + 2
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, jinja2.Undefined):
        return 0
    if isinstance(value, Namespace):
        raise TooMuch("it uses a namespace as a value")
    return 2 * len(value) + 2 if isinstance(value, Collection) and not isinstance(value, range) else OPAQUE


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return itertools.chain.from_iterable(value.items())
    if isinstance(value, str | bytes | int | range | jinja2.Undefined) or not isinstance(value, Collection):
        return ()
    return value
