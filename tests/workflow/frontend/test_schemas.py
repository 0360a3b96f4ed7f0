"""The JSON schemas of Python types."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any, Optional, TypedDict

import pydantic
import pytest

from weft.workflow.frontend.schemas import schema_of
from weft.workflow.frontend.trace import FlowError


@dataclasses.dataclass
class Address:
    city: str
    since: datetime.datetime


@dataclasses.dataclass
class Person:
    name: str
    address: Address
    born: Optional[datetime.datetime]  # noqa: UP045
    at: list[datetime.time]
    scores: dict[str, int]
    friends: list[Person]


class Model(pydantic.BaseModel):
    name: str
    age: int = 3


class Open(pydantic.BaseModel, extra="allow"):
    name: str


@dataclasses.dataclass
class Holder:
    model: Model


class Typed(TypedDict):
    name: str


NAME = {"type": "string"}
ADDRESS = {
    "type": "object",
    "properties": {"city": NAME, "since": {"type": "string", "format": "date-time"}},
    "required": ["city", "since"],
    "additionalProperties": False,
}
MODEL = {
    "type": "object",
    "properties": {"name": NAME, "age": {"type": "integer", "default": 3}},
    "required": ["name"],
    "additionalProperties": False,
}


def test_an_answer_has_no_keys_that_the_class_does_not_take() -> None:
    assert schema_of(Address) == ADDRESS
    assert schema_of(Model) == MODEL
    assert schema_of(Open)["additionalProperties"] is True
    typed = {"type": "object", "properties": {"name": NAME}, "required": ["name"], "additionalProperties": False}
    assert schema_of(Typed) == typed
    assert schema_of({"type": "object", "properties": {"name": NAME}}) == {
        "type": "object",
        "properties": {"name": NAME},
    }


def test_times_have_their_formats_wherever_they_stand() -> None:
    fields = schema_of(Person)["$defs"]["Person"]["properties"]
    assert fields["address"] == ADDRESS
    assert fields["born"] == {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]}
    assert fields["at"] == {"type": "array", "items": {"type": "string", "format": "time"}}
    assert fields["scores"] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert fields["friends"] == {"type": "array", "items": {"$ref": "#/$defs/Person"}}
    assert schema_of(datetime.datetime) == {"type": "string", "format": "date-time"}


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        (list[Model], {"type": "array", "items": MODEL}),
        (pydantic.TypeAdapter(list[Model]), {"type": "array", "items": MODEL}),
        (Optional[Model], {"anyOf": [MODEL, {"type": "null"}]}),  # noqa: UP045
        (
            Holder,
            {
                "type": "object",
                "properties": {"model": MODEL},
                "required": ["model"],
                "additionalProperties": False,
            },
        ),
    ],
)
def test_types_with_pydantic_models_within(form: Any, schema: dict[str, Any]) -> None:
    assert schema_of(form) == schema


@pytest.mark.parametrize("form", [object(), "json", lambda: 1, Address("x", datetime.datetime(2024, 1, 1))])
def test_other_values_have_no_schema(form: Any) -> None:
    with pytest.raises(FlowError, match=r"has no JSON schema: give a JSON schema, a dataclass, .* or a pydantic model"):
        schema_of(form)
