"""Options of runs, explanations and sessions, as their caller gives them: checked by name and type before anything
runs. What each one means is `weft.workflow.targets.RunOptions`'."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from weft.abi.errors import InvalidRequest
from weft.workflow.graph.mistakes import nearest
from weft.workflow.graph.schema_check import is_number
from weft.workflow.run.driver import Concurrency
from weft.workflow.run.instructions import RunLimits
from weft.workflow.run.settings import PlanSettings


class _Form(NamedTuple):
    has_form: Callable[[Any], bool]
    takes: str
    """In a message, behind "takes"."""


def _counts(least: int, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_limits(value: RunLimits) -> bool:
    seconds = value.seconds
    return all(each is None or _counts(0, each) for each in (value.calls, value.tokens)) and (
        seconds is None or (is_number(seconds) and 0 < seconds <= sys.float_info.max)
    )


def _named_functions(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and callable(each) for name, each in value.items())


_TEXT = _Form(lambda value: isinstance(value, str), "a text")
_SIZE = _Form(lambda value: _counts(0, value), "a number of bytes")
_SWITCH = _Form(lambda value: isinstance(value, bool), "True or False")
_FOLDER = _Form(lambda value: isinstance(value, (str, os.PathLike)) and value != "", "the path of a folder")
_SECONDS = _Form(lambda value: is_number(value) and value > 0, "seconds, a number above 0")
_FORMS: Mapping[str, _Form] = {
    "api_key": _TEXT,
    "cache": _FOLDER,
    "cache_salt": _TEXT,
    "concurrency": _Form(
        lambda value: isinstance(value, Concurrency) and all(_counts(1, each) for each in value),
        "a weft.Concurrency of numbers of 1 or more, such as Concurrency(calls=8)",
    ),
    "deadline_s": _SECONDS,
    "external": _Form(callable, "a function"),
    "function_timeout_s": _SECONDS,
    "functions": _Form(_named_functions, "a mapping of names to functions"),
    "limits": _Form(
        lambda value: isinstance(value, RunLimits) and _are_limits(value),
        "a weft.RunLimits of numbers, such as RunLimits(calls=100), with seconds above 0",
    ),
    "max_run_bytes": _SIZE,
    "max_value_bytes": _SIZE,
    "model": _TEXT,
    "objective": _Form(
        lambda value: isinstance(value, (str, Mapping)), "the name of an objective, or a mapping of outputs to names"
    ),
    "optimise": _SWITCH,
    "pinned_part": _Form(is_number, "a number from 0 to 1"),
    "planning": _Form(
        lambda value: isinstance(value, (bool, PlanSettings, Mapping)), "True, False, or a mapping of settings"
    ),
    "priority": _Form(lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "session_id": _TEXT,
    "starts": _SWITCH,
    "statistics": _Form(lambda value: isinstance(value, Mapping), "a mapping of nodes to figures"),
    "stream": _Form(
        lambda value: isinstance(value, Collection) and not isinstance(value, (str, bytes)), "a list of outputs"
    ),
}
OptionForms = Mapping[str, _Form]
"""The options of one operation, by name."""
_RUN_CACHE = _Form(lambda value: _FOLDER.has_form(value) or value is False, "the path of a folder, or False for none")
RUN_OPTIONS: OptionForms = {
    name: form for name, form in _FORMS.items() if name not in ("session_id", "pinned_part")
} | {"cache": _RUN_CACHE}
EXPLAIN_OPTIONS: OptionForms = {
    name: _FORMS[name]
    for name in ("api_key", "cache", "deadline_s", "model", "objective", "optimise", "pinned_part", "statistics")
}
SESSION_OPTIONS: OptionForms = {
    name: _FORMS[name]
    for name in (
        "api_key",
        "cache",
        "concurrency",
        "function_timeout_s",
        "functions",
        "limits",
        "max_value_bytes",
        "model",
        "session_id",
    )
}


def checked_options(options: Mapping[str, Any], forms: OptionForms, of: str) -> dict[str, Any]:
    """The options that are given, without those that are None. Raises `InvalidRequest` for one that is not among
    these, or is of another type; `of` says in a message what has them."""
    for name, value in options.items():
        if name not in forms:
            near = nearest(name, forms) or f" There are {', '.join(sorted(forms))}."
            raise InvalidRequest(f"{name!r} is not an option of {of}.{near}", name)
        form = forms[name]
        if value is not None and not form.has_form(value):
            raise InvalidRequest(f"{name} takes {form.takes}, not {value!r:.60}", name)
    return {name: value for name, value in options.items() if value is not None}
