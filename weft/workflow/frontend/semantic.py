"""Semantic functions: a prompt with named inputs and outputs, as the docstring of a function (Parrot, section 4.1); and
native functions, which are Python's. Called in a flow, they make the nodes that operators make.

    @weft.semantic_function(max_tokens=200)
    def write(task: weft.Input, plan: weft.Output, code: weft.Output(stop="END")):
        '''You are an engineer. Task: {{task}}. Your plan: {{plan}} Now the code: {{code}}'''
"""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

from weft.workflow.frontend import ops
from weft.workflow.frontend.json_values import NotJson, as_json
from weft.workflow.frontend.marks import NeedsValueError, templated
from weft.workflow.frontend.prompt_text import Parts, read_prompt_text
from weft.workflow.frontend.trace import FlowError, FlowTrace, caller_line, current_trace, is_tracing
from weft.workflow.frontend.variable import Variable, reference_in, type_in
from weft.workflow.graph.nodes import LlmNode, PromptMessage
from weft.workflow.graph.templates import Reference, join_parts, parse_template


class SemanticFunction:
    """A function that models compute. A call in a flow makes a call of the model for each output, in order of
    appearance, each of which goes on with the one before."""

    def __init__(self, function: Callable[..., Any], raw: bool, fields: Mapping[str, Any], where: str | None = None):
        """Raises `FlowError` for a wrong declaration, which is at `where` (None: at the function's file and line)."""
        functools.update_wrapper(self, function)
        self.name = function.__name__
        text = read_prompt_text(function, raw, fields, where)
        self._raw = raw
        self._steps = text.steps
        self._results = namedtuple(self.name, [step.output for step in text.steps])  # type: ignore[misc]
        self.__signature__ = inspect.Signature(text.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what a call returns, in this order."""
        return tuple(step.output for step in self._steps)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Make the calls. Returns the variable of the one output, or a named tuple of them. A text with a variable of
        the flow in it is a template; in other texts braces mean nothing. Raises `FlowError` outside a flow and for
        wrong arguments."""
        if not is_tracing():
            raise FlowError(
                f"{self.name} is a semantic function, whose calls make nodes of a flow: call it in a function with "
                "@weft.flow, or in weft.session()"
            )
        trace = current_trace()
        values = self._bind(args, named, trace)
        made: dict[str, Variable] = {}
        prompt: list[str | Reference] = []
        last: Variable | None = None
        for step in self._steps:
            text = [part for each in step.before for part in self._filled(each, values)]
            if self._raw:
                prompt += text
                asked: dict[str, Any] = {"prompt": str(join_parts(prompt))}
            else:
                before = () if last is None else (PromptMessage(chat=str(reference_in(last))),)
                asked = {"messages": (*before, ops.user(str(join_parts(text))))}
            label = self.name if len(self._steps) == 1 else f"{self.name}_{step.output}"
            last = made[step.output] = trace.add(LlmNode, label, {**step.fields, **asked})
            prompt.append(reference_in(last))
        return last if len(made) == 1 else self._results(*made.values())

    def _bind(self, args: tuple[Any, ...], named: Mapping[str, Any], trace: FlowTrace) -> dict[str, Parts | Variable]:
        """The values of the inputs: texts, and variables for everything else."""
        for step in self._steps:
            if step.output in named:
                raise FlowError(f"{self.name}: {step.output} is an output: the call returns it")
        try:
            bound = self.__signature__.bind(*args, **named)
        except TypeError as error:
            raise FlowError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        return {name: self._value(name, value, trace) for name, value in bound.arguments.items()}

    def _value(self, name: str, value: Any, trace: FlowTrace) -> Parts | Variable:
        if isinstance(value, str):
            try:
                template = parse_template(templated(value))
            except NeedsValueError as error:
                raise NeedsValueError(f"{caller_line()}: {self.name}: {name}: {error}") from None
            is_template = any(reference.name in trace.names.used for reference in template.references)
            return template.parts if is_template else (value,)
        if not isinstance(value, Variable):
            try:
                value = as_json(value)
            except NotJson as error:
                raise FlowError(f"{self.name}: {name}: {error}") from None
        return trace.lift(value)

    def _filled(self, part: str | Reference, values: Mapping[str, Parts | Variable]) -> Parts:
        """A part of the docstring, with the value of the input in place of its name."""
        if isinstance(part, str):
            return (part,)
        value = values[part.name]
        if isinstance(value, tuple):
            if part.path:
                raise FlowError(f"{self.name}: {part.name} is a text, so there is no {part}")
            return value
        if type_in(value).kind == "list":
            raise NeedsValueError(f"{self.name}: {part.name} is a list and cannot be part of a text: use ops.join")
        reference = reference_in(value)
        return (reference._replace(path=(*reference.path, *part.path)),)

    def __repr__(self) -> str:
        return f"<semantic function {self.name}>"


class NativeFunction:
    """A Python function that is a node where it is called in a flow, and a function elsewhere."""

    def __init__(self, function: Callable[..., Any], pure: bool, retries: int):
        functools.update_wrapper(self, function)
        self._function = function
        self._pure = pure
        self._retries = retries

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The variable of a node in a flow; what the function returns elsewhere."""
        if not is_tracing():
            return self._function(*args, **named)
        return ops.call_function(self, args, named, pure=self._pure, retries=self._retries)

    def __repr__(self) -> str:
        return f"<native function {self._function.__name__}>"


def semantic_function(function: Callable[..., Any] | None = None, *, raw: bool = False, **fields: Any) -> Any:
    """Make a semantic function of a function with a docstring, as a decorator with or without arguments. The docstring
    has `{{name}}` of each parameter, which `weft.Input` and `weft.Output` annotate. The text before an output is a
    user's turn, and the output is the answer; with `raw` the text is continued as it is, without a chat. `fields` of
    the call, such as `model` and `max_tokens`, hold for every output that has no other. Raises `FlowError` with all
    mistakes of the declaration."""
    if function is None:
        return functools.partial(semantic_function, raw=raw, **fields)
    return SemanticFunction(function, raw, fields)


def native_function(function: Callable[..., Any] | None = None, *, pure: bool = False, retries: int = 0) -> Any:
    """Make a Python function a node of the flows that call it, as a decorator with or without arguments. It runs where
    the workflow is started from. `pure`: equal arguments give equal results and nothing else happens; `retries`: tries
    after it raised."""
    if function is None:
        return functools.partial(native_function, pure=pure, retries=retries)
    return NativeFunction(function, pure, retries)
