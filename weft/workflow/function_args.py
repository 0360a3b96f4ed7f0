"""The arguments of Python functions that nodes call: by parameter in a graph, as the function takes them in a call.

Graphs name all arguments. Which of them a function takes by position alone is known where the function is: there
`call_args` undoes what `graph_args` did.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NUMBERED = "argument_"
"""Arguments of functions of C whose parameters are not known, in order."""


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called: a partial one like the one within, an object that can be called like its class."""
    while isinstance(function, functools.partial):
        function = function.func
    name: str = getattr(function, "__name__", type(function).__name__)
    return name


def graph_args(function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by parameter; those of `*args` are a list. Raises `TypeError` for arguments that the
    function does not take."""
    signature = _signature(function)
    if signature is None:
        return {f"{_NUMBERED}{number}": value for number, value in enumerate(args)} | dict(named)
    given = dict(signature.bind(*args, **named).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL and parameter.name in given:
            given[parameter.name] = list(given[parameter.name])
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    return given


def call_args(function: Callable[..., Any], given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position and by name, from those by parameter. All that the function takes by name are given by
    name, unless others of `*args` follow."""
    named = dict(given)
    signature = _signature(function)
    if signature is None:
        numbered = [name for name in named if name.startswith(_NUMBERED)]
        numbered.sort(key=lambda name: (len(name), name))
        return [named.pop(name) for name in numbered], named
    parameters = list(signature.parameters.values())
    rest = next((each.name for each in parameters if each.kind is each.VAR_POSITIONAL), None)
    more = named.pop(rest) if rest is not None and isinstance(named.get(rest), list) else []
    args = []
    for parameter in parameters:
        by_position = parameter.kind is parameter.POSITIONAL_ONLY
        by_position |= parameter.kind is parameter.POSITIONAL_OR_KEYWORD and bool(more)
        if by_position and parameter.name in named:
            args.append(named.pop(parameter.name))
    return [*args, *more], named


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # some functions of C have none
        return None
