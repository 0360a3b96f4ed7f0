"""Every typed class of parameters has the names and defaults of the one table."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft import sdk
from weft.abi.errors import InvalidRequest
from weft.abi.parameters import SAMPLING, STOP, USAGE, Parameter
from weft.core import wire
from weft.core.sampling import SamplingParams, StopParams
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.completion import CompletionRequest
from weft.llm.options import Options
from weft.sdk.sequence import Usage

ROOT = Path(__file__).parents[2]
OWN_NAMES = {"strings": "stop", "token_ids": "stop_token_ids"}
"""Names that `weft.sdk.Stop` shortens."""


def defaults(cls: type) -> dict[str, Any]:
    """Names and defaults of a struct's or a dataclass's fields, in order."""
    if dataclasses.is_dataclass(cls):
        instance = cls()
        return {OWN_NAMES.get(f.name, f.name): _plain(getattr(instance, f.name)) for f in dataclasses.fields(cls)}
    return {f.encode_name: _plain(_default(f)) for f in msgspec.structs.fields(cls)}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("cls", "table"),
    [
        (SamplingParams, SAMPLING),
        (sdk.Sampler, SAMPLING),
        (StopParams, STOP),
        (sdk.Stop, STOP),
        (wire.OperationUsage, USAGE),
        (Usage, USAGE),
    ],
    ids=lambda item: f"{item.__module__}.{item.__name__}" if isinstance(item, type) else "",
)
def test_a_class_is_its_table(cls: type, table: dict[str, Parameter]) -> None:
    found = defaults(cls)
    assert found.keys() == table.keys()
    for name, value in found.items():
        assert value == table[name].default, name


@pytest.mark.parametrize("cls", [ChatRequest, CompletionRequest])
def test_requests_have_every_parameter_with_its_description(cls: type[msgspec.Struct]) -> None:
    found = {f.encode_name: f for f in msgspec.structs.fields(cls)}
    schema = msgspec.json.schema(cls)["$defs"][cls.__name__]["properties"]
    own = {"logprobs", "max_tokens"}  # OpenAI gives these two meanings of their own.
    for name, parameter in (SAMPLING | STOP).items():
        assert name in found, name
        if name not in own:
            assert _plain(_default(found[name])) == parameter.default, name
            assert parameter.description in str(schema[name]), name


def test_the_offline_api_takes_every_parameter() -> None:
    assert (SAMPLING | STOP).keys() - Options.__annotations__.keys() == {"bad_words"}


def test_the_library_documents_every_parameter() -> None:
    page = (ROOT / "docs/sdk.md").read_text()
    sampler = page[page.index("`Sampler(") :].split(")", 1)[0]
    assert [name.strip("` \n") for name in sampler.removeprefix("`Sampler(").split(",")] == list(SAMPLING)


@pytest.mark.parametrize("parameter", [p for p in SAMPLING.values() if p.low is not None and p.name != "logit_bias"])
def test_the_engine_refuses_what_is_out_of_range(parameter: Parameter) -> None:
    assert parameter.low is not None
    assert parameter.high is not None
    inside = parameter.high if parameter.low_open else parameter.low
    assert parameter.default is None or parameter.contains(parameter.default), "defaults are not looked at"
    SamplingParams(**{parameter.name: inside}).validate(100)
    outside = [parameter.low - 1, parameter.high + 1, *([parameter.low] if parameter.low_open else [])]
    if isinstance(parameter.default, float):
        outside += [math.nan, math.inf]
    for value in outside:
        with pytest.raises(InvalidRequest) as refused:
            SamplingParams(**{parameter.name: value}).validate(100)
        assert refused.value.param == parameter.name
