"""A Jinja environment in which foreign templates can neither reach out nor take more than their share of time and memory.

Whatever a template can do in a short source that takes long or much is seen before it is done: loops, calls, operators and
filters, and every use of a value that may be many times as large as the memory it takes (`[x, x]` of `[y, y]` of ...):
writing it out, comparing it, hashing it. Signals or threads are not needed for that, nor would they stop a single operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from foreword.text.budget import TemplateBudget, MeteredIterable, check_int_size, repeat_size, mem_size
from foreword.text.growth import FILTER_SIZES, METHOD_SIZES, formatted_size

__all__ = ["GuardedEnvironment"]

# Filters that nobody needs in a prompt and that take long on small inputs, or are not the same each time.
REMOVED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# Filters that neither write nor compare what they are given.
UNMETERED_FILTERS = frozenset(
    {"attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr"}
    | {"reverse", "select", "selectattr", "slice"}
)
# Tests that compare or compute; the others only look at a type.
METERED_TESTS = (
    *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge"),
    *("in", "divisibleby"),
)
GUARD_LOOP, GUARD_USE, GUARD_SLICE, GUARD_CONCAT = (f"foreword {name}" for name in ("watched", "used", "sliced", "joined"))


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
    return isinstance(node, nodes.Const) or (isinstance(node, nodes.Neg) and isinstance(node.node, nodes.Const))
