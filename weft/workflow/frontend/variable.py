"""A variable: a value to come. It can stand in f-strings, messages and arguments; it has no value while the function of
a flow runs, and an operation that needs one raises at its line and names the operator to use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Protocol

from weft.workflow.criteria import Criterion, checked_criterion
from weft.workflow.frontend.marks import NeedsValueError, repr_mark, value_mark
from weft.workflow.graph.mistakes import nearest
from weft.workflow.graph.nodes import GraphNode, PickNode
from weft.workflow.graph.templates import Reference
from weft.workflow.graph.value_types import ANY, ValueType, follow


class Values(Protocol):
    """What knows the values of variables: a session."""

    def get(self, reference: Reference, criterion: Criterion | None, timeout_s: float | None) -> Any:
        """Wait for a value, as `Variable.get` says. Blocks the calling thread."""
        ...

    async def aget(self, reference: Reference, criterion: Criterion | None, timeout_s: float | None) -> Any:
        """Wait for a value, as `Variable.aget` says, on the caller's event loop."""
        ...

    def set(self, reference: Reference, value: Any) -> None:
        """Give a variable of `ops.external` its value. Raises `NotSettable`, `NoValue`."""
        ...


class NodeMaker(Protocol):
    """What makes the nodes of a graph while a function runs."""

    @property
    def values(self) -> Values | None:
        """The session that the graph grows in; None in a flow."""
        ...

    def current(self) -> NodeMaker:
        """The one that makes nodes now: this one, or that of a body within."""
        ...

    def add(self, kind: type[GraphNode], op: str, fields: Mapping[str, Any]) -> Variable:
        """Make a node; its value."""
        ...


class ChatSoFar:
    """The conversation that ended in an answer, as the first of the messages of a later call."""

    def __init__(self, answer: Variable):
        self.answer = answer

    def __repr__(self) -> str:
        return f"<Variable.chat of {self.answer!r}>"


class Variable:
    """A value to come. `str(variable)` and f-strings give a mark that `ops` replace by the value at run time. A field
    is an attribute, unless a method has its name: `value["split"]` is a field of any name."""

    def __init__(self, trace: NodeMaker, reference: Reference, kind: ValueType = ANY):
        self._trace = trace
        self._reference = reference
        self._kind = kind

    # ---- parts and forms

    @property
    def chat(self) -> ChatSoFar:
        """The conversation so far, this answer included: `ops.llm([answer.chat, ops.user("Go on.")])`."""
        if not self._kind.is_answer and self._kind.kind != "any":
            raise TypeError(f"{self._reference} is not the answer of a model, so there is no conversation to continue")
        return ChatSoFar(self)

    def field(self, name: str | int) -> Variable:
        """A field of an object, or an item of a list by its number. A text is parsed as JSON."""
        return self._pick(field=str(name))

    def regex(self, pattern: str) -> Variable:
        """The first match of a regular expression, or its first group. No match is an error of the row."""
        return self._pick(regex=pattern)

    def strip(self) -> Variable:
        """The text without white space at both ends."""
        return self._pick(strip=True)

    def split(self, separator: str) -> Variable:
        """The parts of the text between the separators, as a list."""
        return self._pick(split=separator)

    def matches(self, pattern: str) -> Variable:
        """Whether a regular expression is found in the text."""
        return self._pick(matches=pattern)

    def _pick(self, **way: Any) -> Variable:
        return self._trace.current().add(PickNode, "pick", {"of": str(self._reference), **way})

    def __getitem__(self, key: slice | int | str) -> Variable:
        """A slice of a text or list, an item of a list, or a field of an object."""
        if not isinstance(key, slice):
            return self.field(key)
        if key.step not in (None, 1):
            raise ValueError("slices of values have no step")
        return self._pick(slice=(key.start, key.stop))

    def __getattr__(self, name: str) -> Variable:
        if name.startswith("__"):
            raise AttributeError(name)
        fields = self._kind.fields or {}
        if name not in fields:
            known = f" It has {', '.join(fields)}.{nearest(name, fields)}" if fields else " Use .field(name) if it has."
            raise AttributeError(f"{self._reference} has no field {name!r} that is known before it runs.{known}")
        return output_of(self, name)

    # ---- the value, in a session

    def get(self, criterion: Criterion | None = None, timeout_s: float | None = None) -> Any:
        """Wait for the value, as JSON. `criterion` says what it is wanted for, of it and of all that it needs:
        `weft.LATENCY`, `weft.TTFT`, `weft.THROUGHPUT` or `weft.deadline(seconds)`. Raises `NodeFailed`, the same one
        for all that depends on the node that failed; `NoValue` where nothing can give a value any more; `TimeoutError`
        after `timeout_s` seconds; and in a flow `NeedsValueError`."""
        return self._values().get(self._reference, checked_criterion(criterion), timeout_s)

    async def aget(self, criterion: Criterion | None = None, timeout_s: float | None = None) -> Any:
        """Wait for the value without blocking the event loop; otherwise like `get`."""
        return await self._values().aget(self._reference, checked_criterion(criterion), timeout_s)

    def set(self, value: Any) -> None:
        """Give a variable of `ops.external` its value, any JSON. Raises `NotSettable` for other variables and for one
        that has a value, `InvalidRequest` for a value that is not JSON, is too large or does not follow its schema."""
        self._values().set(self._reference, value)

    def _values(self) -> Values:
        if self._trace.values is None:
            raise NeedsValueError(
                f"{self._reference} has a value only when its flow or body runs: return it, or make the call in "
                "weft.session() itself"
            )
        return self._trace.values

    # ---- text

    def __str__(self) -> str:
        if self._kind.kind == "list":
            raise NeedsValueError(f"{self._reference} is a list and cannot be part of a text: use ops.join")
        return value_mark(self._reference)

    def __format__(self, spec: str) -> str:
        if spec:
            raise NeedsValueError(f"a value to come cannot be formatted with {spec!r}: use ops.function")
        return str(self)

    def __repr__(self) -> str:
        return repr_mark(self._reference, self._kind.kind)

    def __add__(self, other: object) -> str:
        return f"{self}{other}" if isinstance(other, (str, Variable)) else _arithmetic()

    def __radd__(self, other: object) -> str:
        return f"{other}{self}" if isinstance(other, str) else _arithmetic()

    # ---- what needs a value now

    def __bool__(self) -> NoReturn:
        _needs("true or false", "ops.switch, or ops.loop with until")

    def __len__(self) -> NoReturn:
        _needs("a length", "ops.function(len, value)")

    def __iter__(self) -> Iterator[Any]:
        _needs("its items", "ops.map")

    def __contains__(self, item: object) -> bool:
        _needs("a search", "value.matches(regular expression)")

    def __eq__(self, other: object) -> bool:
        _needs("a comparison", "ops.switch, value.matches or ops.function")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__

    def __int__(self) -> NoReturn:
        _needs("a number", "ops.function(int, value)")

    def __float__(self) -> NoReturn:
        _needs("a number", "ops.function(float, value)")

    __index__ = __int__

    def __neg__(self) -> NoReturn:
        _arithmetic()

    __pos__ = __abs__ = __neg__

    def __mul__(self, other: object) -> NoReturn:
        _arithmetic()

    __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mul__
    __mod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = __mul__  # not __rmod__: `"%s" % value` is a text

    def __round__(self, digits: object = None) -> NoReturn:
        _arithmetic()

    def __reversed__(self) -> NoReturn:
        _needs("its items", "ops.function")

    __hash__ = object.__hash__


def _arithmetic() -> NoReturn:
    _needs("arithmetic", "ops.function(f, value); texts are joined by an f-string, those of a list by ops.join")


def _needs(what: str, instead: str) -> NoReturn:
    raise NeedsValueError(
        f"this needs {what} of a value that is there only when the workflow runs: use {instead}; in a session, "
        "value.get() waits for it"
    )


def reference_in(variable: Variable) -> Reference:
    """What a variable refers to."""
    return variable._reference


def output_of(variable: Variable, name: str) -> Variable:
    """A field or an output that is known, also where a method has its name."""
    kind = follow(variable._kind, (name,))
    assert not isinstance(kind, str)
    reference = variable._reference
    return Variable(variable._trace, reference._replace(path=(*reference.path, name)), kind)


def picked(variable: Variable, **way: Any) -> Variable:
    """A part or form of a value, by one of the ways of `PickNode`."""
    return variable._pick(**way)


def type_in(variable: Variable) -> ValueType:
    """What is known of a variable's value."""
    return variable._kind


def trace_in(variable: Variable) -> NodeMaker:
    """Where a variable was made."""
    return variable._trace
