"""The Jinja environment of chat templates: transformers' functions, in the sandbox, with costs charged to a budget.

Owns the interception of operations that cost more than a step: loops, calls, operators, filters, comparisons, output.
`weft.tokenizers.limits` defines their costs. Knows no chats.

Differences from transformers, all for safety: `lipsum` and the filters `urlize`, `striptags` and `wordwrap`, which take
more than linear time, are missing; `sum` adds numbers only.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
from jinja2.runtime import Context, Macro

from weft.tokenizers import limits

_REMOVED_FILTERS = ("urlize", "striptags", "wordwrap")
_CONSTANT_TIME = frozenset({"length", "count", "first", "last", "default", "d", "safe", "attr", "items"})
_SHALLOW = frozenset({"list", "map", "select", "reject", "selectattr", "rejectattr", "sort", "unique", "groupby"})
_SHALLOW |= {"reverse", "batch", "slice", "sum", "min", "max", "random", "dictsort", "int", "float", "abs", "round"}
"""Filters that read entries without writing them; all others may write them."""
_PADDING = frozenset({"center", "indent", "tojson", "batch", "slice", "truncate"})
"""Filters whose integer arguments multiply the size of the result."""
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_COMPARING_TESTS = frozenset({"in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<="})
_COMPARING_TESTS |= {"gt", "greaterthan", ">", "ge", ">=", "lower", "upper"}


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Finalizer of every `{{ … }}`. It takes the context so that Jinja does not call it at compile time."""
    if isinstance(value, str):
        return limits.made(value)
    if not isinstance(value, jinja2.Undefined | None):
        limits.check_size(limits.weigh(value))
    return value


def _concat(*parts: Any) -> str:
    """The operator `~`."""
    total = sum(len(part) if isinstance(part, str) else limits.weigh(part) for part in parts)
    limits.check_size(total)
    limits.spend(total)
    return "".join(map(str, parts))


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles chat templates. Its limits apply to rendering inside `limits.budget(...)`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    # Reached from compiled templates as `environment.…`.
    weft_step = staticmethod(limits.spend)
    weft_paid = staticmethod(limits.paid)
    weft_concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            # Constant folding would run filters at compile time, outside the budget.
            optimized=False,
            finalize=_finalize,
        )
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters["sum"] = _sum(self.filters["sum"])
        self.filters = {name: _paid_filter(name, filter_) for name, filter_ in self.filters.items()}
        for name in _COMPARING_TESTS:
            inner: Any = self.tests[name]
            self.tests[name] = _paid_test(inner)
        self.globals = {
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "dict": _TemplateDict(),
            "namespace": _TemplateNamespace,
            "range": _range,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function from a template; charges one step and the cost of its arguments."""
        if __obj is limits.spend:
            limits.spend(*args)
            return True
        if __obj is limits.paid or __obj is _concat:
            return __obj(*args)
        limits.spend(steps=limits.STEPS_PER_CALL)
        if not isinstance(__obj, Macro):
            _pay_call(__obj, args, kwargs)
        return limits.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator that can create large values, after checking the size of the result."""
        if operator == "%" and isinstance(left, str):
            limits.check_format(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right * max(1, left.bit_length()) > limits.MAX_INT_BITS:
                limits.check_number(1 << (limits.MAX_INT_BITS + 1))
        elif operator == "+":
            limits.check_size(limits.size(left) + limits.size(right))
        return limits.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, charged before it runs."""
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def paid_format(*args: Any, **kwargs: Any) -> str:
            limits.check_format(value.__self__, [*args, kwargs], may_nest=True)
            return limits.made(inner(*args, **kwargs))

        return paid_format

    # Jinja's hook between parsing and code generation.
    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Meter().visit(source), name, filename, defer_init)


class _Meter(jinja2.visitor.NodeTransformer):
    """Rewrites a template so that each iteration is a step, and comparisons, slices and `~` are charged for their
    input."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        literal = sum(len(data.data) for data in node.find_all(jinja2.nodes.TemplateData))
        self.generic_visit(node)
        step = self._call("weft_step", [jinja2.nodes.Const(literal)], node)
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            # Rejected entries never reach the body.
            test = self._call("weft_step", [jinja2.nodes.Const(0)], node)
            node.test = jinja2.nodes.And(test, node.test, lineno=node.lineno)
        return node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.expr = self._paid(node.expr)
        for operand in node.ops:
            operand.expr = self._paid(operand.expr)
        return node

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            node.node = self._paid(node.node)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return self._call("weft_concat", node.nodes, node)

    def _paid(self, node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
        return node if isinstance(node, jinja2.nodes.Const) else self._call("weft_paid", [node], node)

    @staticmethod
    def _call(name: str, args: list[jinja2.nodes.Expr], node: jinja2.nodes.Node) -> jinja2.nodes.Expr:
        function = jinja2.nodes.EnvironmentAttribute(name, lineno=node.lineno)
        return jinja2.nodes.Call(function, args, [], None, None, lineno=node.lineno)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training. Here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (as in Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


class _TemplateDict:
    """`dict(...)` in templates; a function, so that templates cannot reach the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace(...)` without names that have a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` is taken from `args`, so that a template may have an attribute of that name.
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}; rename it")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    limits.check_size(len(pattern) * 64)
    return datetime.datetime.now().strftime(pattern)


def _range(*args: int) -> range:
    values = range(*args)
    # By comparison, because `len` fails for ranges beyond the machine's integers.
    if values[limits.MAX_RANGE :]:
        raise limits.TemplateLimit(f"the template asks for a range of more than {limits.MAX_RANGE:,} numbers")
    return values


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sum(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def numbers(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise limits.TemplateLimit("the template sums values that are not numbers")
        return inner(environment, iterable, attribute, start)

    return numbers


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > limits.MAX_INT_BITS:
            limits.check_number(1 << (limits.MAX_INT_BITS + 1))
    elif isinstance(left, int):
        limits.check_size(limits.size(right) * left)
    elif isinstance(right, int):
        limits.check_size(limits.size(left) * right)


def _pay_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Charge a call's cost beyond its step, before the call."""
    chars = sum(map(limits.size, args)) + sum(map(limits.size, kwargs.values()))
    receiver = getattr(function, "__self__", None)
    chars += limits.size(receiver)
    if isinstance(receiver, str | bytes):
        name, count = getattr(function, "__name__", ""), len(receiver)
        if name in _PADDING_METHODS:
            chars = count * (1 + limits.largest_int((*args, *kwargs.values())))
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], type(receiver)):
            chars += receiver.count(args[0]) * limits.size(args[1])  # type: ignore[arg-type]
        elif name == "join" and args:
            chars += limits.weigh(args[0]) + count * limits.size(args[0])
        limits.check_size(chars)
    if chars > limits.CHARS_PER_STEP:
        limits.spend(chars)


def _paid_filter(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its cost charged before it runs and its result checked."""
    if name in _CONSTANT_TIME:
        return inner
    first = 1 if hasattr(inner, "jinja_pass_arg") else 0
    price = limits.size if name in _SHALLOW else limits.weigh

    @functools.wraps(inner)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        values = (*args[first:], *kwargs.values())
        chars = sum(map(price, values))
        if name in _PADDING:
            chars *= 1 + limits.largest_int(values[1:])
        elif name == "replace" and len(values) >= 3:
            chars += str(values[0]).count(str(values[1])) * len(str(values[2]))
        elif name == "join" and len(values) >= 2:
            chars *= 1 + limits.size(values[1])
        elif name == "format" and isinstance(values[0], str):
            limits.check_format(values[0], values[1:])
        limits.check_size(chars)
        limits.spend(chars, limits.STEPS_PER_CALL)
        result = inner(*args, **kwargs)
        return limits.count_iterations(result) if isinstance(result, Iterator) else limits.made(result)

    return filter_


def _paid_test(inner: Callable[..., Any]) -> Callable[..., bool]:
    @functools.wraps(inner)
    def test(*args: Any) -> bool:
        return bool(inner(*map(limits.paid, args)))

    return test
