"""Values of the user's as plain JSON: what a row, a constant of a flow and the result of a function may be.

Libraries of tables are recognised by the names of their modules, so that none has to be installed or imported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

_Place = tuple[Any, str | int]
"""A field or an item within the value, behind the place of what has it; empty for the value itself. Made for every
value and read for a mistake alone, so it is not a text."""


class NotJson(ValueError):
    """A value that JSON does not have. The message says where in the value it stands and what to give instead."""


def as_json(value: Any) -> Any:
    """The value as plain JSON. Scalars of NumPy become Python's, missing values of pandas become None, members of an
    enumeration their values, and objects of pydantic, msgspec and dataclasses become mappings. Raises `NotJson`."""
    try:
        return _convert(value, ())
    except RecursionError:
        raise NotJson("it is nested too deeply") from None


def is_missing(value: Any) -> bool:
    """Whether a table of pandas says with this value that there is none."""
    if isinstance(value, float):
        return math.isnan(value)
    kind = type(value)
    return kind.__name__ in ("NAType", "NaTType") and kind.__module__.partition(".")[0] == "pandas"


def _convert(value: Any, place: _Place | tuple[()]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _convert(value.value, place)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _not_json("the text has half of a surrogate pair, which no encoding has", place) from None
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _not_json(f"{value} is not a number of JSON: use None where there is no value", place)
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise _not_json(f"{key!r:.60} names a field, and names are texts", place)
        return {str(key): _convert(inner, (place, key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_convert(inner, (place, number)) for number, inner in enumerate(value)]
    fields = _fields(value)
    if fields is not None:
        return _convert(fields, place)
    if _module(value) == "numpy" and getattr(value, "shape", None) == ():
        return _convert(value.item(), place)
    if is_missing(value):
        return None
    raise _not_json(
        f"a value of {type(value).__module__}.{type(value).__qualname__} is not JSON{_advice(value)}", place
    )


def _fields(value: Any) -> Mapping[str, Any] | None:
    """The fields of an object that is a record; None for another."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "__struct_fields__"):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return {encoded: getattr(value, name) for encoded, name in names}
    if hasattr(value, "model_dump"):
        fields: Mapping[str, Any] = value.model_dump(mode="json")
        return fields
    return None


def _advice(value: Any) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ": decode it to text"
    if hasattr(value, "isoformat"):
        return ": give it as text, such as value.isoformat()"
    if hasattr(value, "tolist"):
        return ": give it as a list, by value.tolist()"
    return ": give a text, a number, true, false, None, a list or an object"


def _module(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _not_json(message: str, place: _Place | tuple[()]) -> NotJson:
    where = ""
    while place:
        place, step = place
        where = f"[{step}]{where}" if isinstance(step, int) else f".{step}{where}"
    where = where.removeprefix(".")
    return NotJson(f"{where}: {message}" if where else message)
