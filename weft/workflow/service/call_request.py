"""A call as clients submit it: a text with named placeholders, which are inputs and outputs (Parrot, section 7)."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.abi.errors import InvalidRequest
from weft.endpoints.schemas.common import Json
from weft.workflow.frontend import ops
from weft.workflow.frontend.prompt_text import Input, Output
from weft.workflow.frontend.semantic import SemanticFunction
from weft.workflow.frontend.trace import FlowError, tracing
from weft.workflow.frontend.variable import Variable, picked
from weft.workflow.graph.nodes import PickNode
from weft.workflow.session.trace import SessionTrace


class CallPlaceholder(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A name in a prompt: an input, with a value or a variable; or an output, which the model writes."""

    name: Annotated[str, Meta(description="Stands as `{{name}}` in the prompt.")]
    in_out: Annotated[Literal["in", "out"], Meta(description="Whether it is read or written.")]
    variable_id: Annotated[str, Meta(description="Of an input: a variable of the same session.")] | None = None
    value: Annotated[Any, Meta(description="Of an input: any JSON, instead of `variable_id`.")] = msgspec.UNSET
    sampling: Annotated[
        Json, Meta(description="Of an output: fields of a chat completion, such as `max_tokens` and `stop`.")
    ] = {}
    schema: Annotated[Json, Meta(description="Of an output: the JSON schema of the answer.")] | None = None
    transforms: Annotated[
        list[Json],
        Meta(
            description="What is taken of the value, one after the other: each has one of `field`, `regex`, `strip`, "
            "`split`, `slice`, `matches`, as the operator `pick`."
        ),
    ] = []


def submit_template(
    trace: SessionTrace,
    prompt: str,
    placeholders: Sequence[CallPlaceholder],
    fields: Mapping[str, Any],
    variable_of: Callable[[str], Variable],
    *,
    raw: bool,
) -> dict[str, Variable]:
    """Make the calls of a template, a conversation unless it is `raw`. `fields` hold for every output; `variable_of`
    gives a variable of the session by its id. Returns the variables of the outputs. Raises `InvalidRequest` and
    `InvalidGraph`."""
    names = [each.name for each in placeholders]
    if len(set(names)) != len(names):
        raise InvalidRequest("Placeholders must have different names.", "placeholders")
    try:
        function = SemanticFunction(_declaration(prompt, placeholders), raw, fields, "The call")
        with tracing(trace):
            given = {each.name: _input(each, variable_of) for each in placeholders if each.in_out == "in"}
            made = function(**given)
            values = made if isinstance(made, tuple) else (made,)
            outputs = dict(zip(function.outputs, values, strict=True))
            transforms = {each.name: each.transforms for each in placeholders}
            return {name: _transformed(value, transforms[name], name) for name, value in outputs.items()}
    except (FlowError, TypeError) as error:
        raise InvalidRequest(str(error), "placeholders") from None


def _declaration(prompt: str, placeholders: Sequence[CallPlaceholder]) -> Callable[..., Any]:
    def call() -> None:
        raise NotImplementedError

    parameters = []
    for each in placeholders:
        if each.in_out == "out":
            if each.variable_id is not None or each.value is not msgspec.UNSET:
                raise InvalidRequest(
                    f"{each.name} is an output, which takes neither variable_id nor value.", "placeholders"
                )
            schema = {} if each.schema is None else {"schema": each.schema}
            role: Input | Output = Output(**{**each.sampling, **schema})
        else:
            if each.sampling or each.schema is not None:
                raise InvalidRequest(
                    f"{each.name} is an input, which takes neither sampling nor schema.", "placeholders"
                )
            role = Input()
        if not each.name.isidentifier() or keyword.iskeyword(each.name):
            raise InvalidRequest(f"{each.name[:80]!r} is not a name.", "placeholders")
        parameters.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, annotation=role))
    call.__doc__ = prompt
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _input(placeholder: CallPlaceholder, variable_of: Callable[[str], Variable]) -> Variable:
    name = placeholder.name
    if (placeholder.variable_id is None) == (placeholder.value is msgspec.UNSET):
        raise InvalidRequest(f"Give {name} one of value and variable_id.", "placeholders")
    if placeholder.variable_id is not None:
        value = variable_of(placeholder.variable_id)
    else:
        value = ops.data(placeholder.value)
    return _transformed(value, placeholder.transforms, name)


def _transformed(value: Variable, transforms: Sequence[Json], name: str) -> Variable:
    for way in transforms:
        if len(way) != 1 or not set(way) <= set(PickNode.ONE_OF):
            raise InvalidRequest(
                f"A transform of {name} has one of {', '.join(PickNode.ONE_OF)}; given: {', '.join(way) or 'none'}.",
                "placeholders",
            )
        value = picked(value, **way)
    return value
