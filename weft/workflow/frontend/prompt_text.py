"""Reads how a semantic function is declared: its parameters, their annotations, and the text in its docstring.

Everything that can be wrong is found when the function is decorated, and is reported at once.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from weft.workflow.frontend.json_values import NotJson, as_json
from weft.workflow.frontend.ops import call_fields
from weft.workflow.frontend.trace import FlowError, line_of
from weft.workflow.graph.mistakes import MAX_SHOWN, Mistake, listing, nearest
from weft.workflow.graph.node_checks import own_mistakes
from weft.workflow.graph.nodes import LlmNode, PromptMessage
from weft.workflow.graph.templates import Reference, is_name, parse_template
from weft.workflow.graph.value_types import ANY

Parts = tuple[str | Reference, ...]
_TEXT = "is the text of the docstring"
_NO_FIELDS = {"messages": _TEXT, "prompt": _TEXT, "raw": "stands in the decorator"}


class Input:
    """Annotation of a parameter of a semantic function whose value the caller gives."""


class Output:
    """Annotation of a parameter of a semantic function that the model writes: `weft.Output`, or
    `weft.Output(max_tokens=80, stop="END")` with any fields of a call of the model, `schema` included."""

    def __init__(self, **fields: Any):
        self.fields = fields


class PromptStep(NamedTuple):
    """A call of the model."""

    before: Parts
    """The text from the last output, or from the beginning, to this one. References are names of inputs."""
    output: str
    fields: Mapping[str, Any]
    """Of the `LlmNode`, beside its prompt."""


class PromptText(NamedTuple):
    """What a semantic function says."""

    inputs: tuple[inspect.Parameter, ...]
    steps: tuple[PromptStep, ...]
    """In order of appearance."""


def read_prompt_text(
    function: Callable[..., Any], raw: bool, fields: Mapping[str, Any], where: str | None = None
) -> PromptText:
    """Read a declaration. `raw`: the text is continued, without a chat; `fields` are defaults of all outputs. Raises
    `FlowError` with all mistakes and where they are: `where`, or the function's file and line. With `where` the text is
    not indented as the docstring of a file is."""
    if not inspect.isfunction(function):
        raise FlowError(f"a semantic function is a function with a docstring, not {function!r:.100}")
    reader = _Reader(function, raw)
    reader.read_parameters()
    text = function.__doc__ or ""
    steps = reader.read_steps(inspect.cleandoc(text) if where is None else text, fields)
    if reader.mistakes:
        raise FlowError(listing(f"{where or line_of(function)} has", reader.mistakes, MAX_SHOWN))
    return PromptText(tuple(reader.inputs.values()), steps)


class _Reader:
    """Collects parameters, and mistakes."""

    def __init__(self, function: Callable[..., Any], raw: bool):
        self._function = function
        self._raw = raw
        self._names: list[str] = []
        """Of the parameters, wrong ones too."""
        self.inputs: dict[str, inspect.Parameter] = {}
        self.outputs: dict[str, Output] = {}
        self.mistakes: list[Mistake] = []
        self._in_decorator: set[tuple[str, str]] = set()

    def read_parameters(self) -> None:
        """Find inputs and outputs."""
        for parameter in inspect.signature(self._function).parameters.values():
            name = parameter.name
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                self._add(name, f"{parameter} takes any number of values: name each parameter")
                continue
            self._names.append(name)
            if not is_name(name):
                self._add(name, "names in a text are letters, digits and _ of ASCII, 64 at most")
            role = self._role(parameter)
            if isinstance(role, Output):
                self.outputs[name] = role
                if parameter.default is not parameter.empty:
                    self._add(name, "is an output, which has no default value: the model writes it")
                if name.startswith("_"):
                    self._add(name, "is an output, whose name does not begin with _")
            elif isinstance(role, Input):
                self.inputs[name] = parameter
                self._check_default(parameter)
        if not self.outputs:
            self._add("", "there is no output: annotate a parameter with weft.Output")

    def _role(self, parameter: inspect.Parameter) -> Input | Output | None:
        """What a parameter is. The annotation may be a text, and may stand in `Annotated`."""
        annotation = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, self._function.__globals__)  # noqa: S307 - the function's own source
            except Exception as error:
                self._add(parameter.name, f"the annotation {annotation} cannot be evaluated in its module: {error}")
                return None
        options = get_args(annotation)[1:] if get_origin(annotation) is Annotated else (annotation,)
        for option in options:
            if isinstance(option, (Input, Output)):
                return option
            if option is Input or option is Output:
                role: Input | Output = option()
                return role
        shown = "no annotation" if annotation is parameter.empty else f"the annotation {annotation!r:.100}"
        self._add(parameter.name, f"has {shown}: annotate it with weft.Input or weft.Output")
        return None

    def _check_default(self, parameter: inspect.Parameter) -> None:
        if parameter.default is not parameter.empty:
            try:
                as_json(parameter.default)
            except NotJson as error:
                self._add(parameter.name, f"the default value: {error}")

    def read_steps(self, text: str, fields: Mapping[str, Any]) -> tuple[PromptStep, ...]:
        """Cut the text at the outputs. `fields` are those of the decorator."""
        if not text:
            self._add("", "there is no docstring, which is the text for the model")
            return ()
        parts = parse_template(text).parts
        self._check_names([part for part in parts if isinstance(part, Reference)])
        self._call("", fields)
        steps: list[PromptStep] = []
        before: list[str | Reference] = []
        for part in parts:
            if isinstance(part, str) or part.name not in self.outputs:
                before.append(part)
                continue
            turn = self._turn(tuple(before), part.name, steps)
            call = self._call(part.name, {**fields, **self.outputs[part.name].fields})
            steps.append(PromptStep(turn, part.name, call))
            before = []
        if steps and _stripped(tuple(before)):
            self._add(
                "", f"the text after the last output, {_mark(steps[-1].output)}, is never read: move or remove it"
            )
        return tuple(steps)

    def _check_names(self, references: list[Reference]) -> None:
        counts = Counter(reference.name for reference in references)
        for name in self._names:
            if not counts[name]:
                self._add(name, f"is not in the text: write {_mark(name)} where its value belongs")
        for name, count in counts.items():
            if name not in self._names:
                self._add(_mark(name), f"is not a parameter.{nearest(name, self._names)}")
            if name in self.outputs and count > 1:
                self._add(name, f"is an output and stands {count} times in the text: the model writes it once")
        for reference in references:
            if reference.path and reference.name in self.outputs:
                self._add(reference.name, f"is an output, of which no field can stand in the text: {_mark(reference)}")

    def _turn(self, before: Parts, output: str, steps: list[PromptStep]) -> Parts:
        """The text before an output. White space around a turn of a chat is the docstring's."""
        turn = _stripped(before)
        if not turn and not (self._raw and steps):
            where = f"between {_mark(steps[-1].output)} and {_mark(output)}" if steps else f"before {_mark(output)}"
            advice = "; with raw=True it goes on without one" if steps else ""
            self._add(output, f"there is no text {where} for the model to answer{advice}")
        return before if self._raw else turn

    def _call(self, output: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a node, after a check. `output` is empty for those of the decorator, whose mistakes are not
        reported again for each output."""
        found = [(name, where) for name, where in _NO_FIELDS.items() if name in fields]
        own: dict[str, Any] = {}
        try:
            own = call_fields({name: value for name, value in fields.items() if name not in _NO_FIELDS})
        except FlowError as error:
            found.append(("schema", str(error)))
        prompt = {"prompt": ""} if self._raw else {"messages": (PromptMessage(role="user", content=""),)}
        found += own_mistakes(LlmNode(id="output", **prompt, **own), lambda reference: ANY)
        for name, message in found:
            if (name, message) not in self._in_decorator:
                self._add(f"{output}.{name}".removeprefix("."), message)
        if not output:
            self._in_decorator.update(found)
        return own

    def _add(self, place: str, message: str) -> None:
        self.mistakes.append(Mistake(place, message))


def _mark(name: object) -> str:
    return f"{{{{{name}}}}}"


def _stripped(parts: Parts) -> Parts:
    """Without white space at both ends of the text; values keep theirs."""
    whole = list(parts)
    if whole and isinstance(whole[0], str):
        whole[0] = whole[0].lstrip()
    if whole and isinstance(whole[-1], str):
        whole[-1] = whole[-1].rstrip()
    return tuple(part for part in whole if part)
