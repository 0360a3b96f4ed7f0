"""How a call of the user's own Python ends: with JSON, or with an error that fails its row and nothing else."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

import weft
from tests.workflow.run.test_driver import InstantBackend, driver, run
from tests.workflow.shapes import Json, function, graph
from weft import ops
from weft.abi.errors import InvalidRequest
from weft.llm import LLM
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow.frontend.rows import Rows
from weft.workflow.graph import graph_from_dict
from weft.workflow.run.driver import RunServices
from weft.workflow.run.functions import value_from
from weft.workflow.run.instructions import AwaitExternal, RowDone

CALLING = graph(function("f", "f", x="{{q}}"))
TIMEOUT_S = 60.0
"""Guards against a call that never ends."""


def calling(called: Callable[..., Any]) -> RowDone:
    """Row 0, of two: the other one must not be touched."""

    def one(x: str) -> Any:
        return called(x) if x == "bad" else x

    async def of_coroutine(x: str) -> Any:
        return await called(x) if x == "bad" else x

    made = of_coroutine if asyncio.iscoroutinefunction(called) else one
    done = run(CALLING, [{"q": "bad"}, {"q": "good"}], RunServices(InstantBackend(), {"f": made}))
    assert done[1].outputs == {"out": "good"}
    return done[0]


def exits(x: str) -> None:
    sys.exit("no configuration")


def interrupts(x: str) -> None:
    raise KeyboardInterrupt


def closes(x: str) -> None:
    raise GeneratorExit


def stops(x: str) -> str:
    return next(iter(()))


def cancels(x: str) -> None:
    raise asyncio.CancelledError


def cancels_a_future(x: str) -> None:
    raise concurrent.futures.CancelledError


async def exits_on_the_loop(x: str) -> None:
    sys.exit(3)


async def interrupts_on_the_loop(x: str) -> None:
    raise KeyboardInterrupt


async def awaits_what_was_cancelled(x: str) -> None:
    inner = asyncio.get_running_loop().create_future()
    inner.cancel()
    await inner


async def cancels_itself(x: str) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


SIGNALS = [
    (exits, "SystemExit: no configuration"),
    (interrupts, "KeyboardInterrupt"),
    (closes, "GeneratorExit"),
    (stops, "StopIteration"),
    (cancels, "CancelledError"),
    (cancels_a_future, "CancelledError"),
    (exits_on_the_loop, "SystemExit: 3"),
    (interrupts_on_the_loop, "KeyboardInterrupt"),
    (awaits_what_was_cancelled, "CancelledError"),
    (cancels_itself, "cancelled"),
]


@pytest.mark.parametrize(("called", "named"), SIGNALS)
def test_what_an_event_loop_takes_for_itself_fails_the_row(called: Callable[..., Any], named: str) -> None:
    failure = calling(called).failure
    assert failure is not None
    assert failure.node == "f"
    assert named in f"{type(failure.error).__name__} {failure.error}"


def test_other_users_of_the_model_are_not_touched() -> None:
    async def leaves_a_task(x: str) -> None:
        async def inner() -> None:
            sys.exit(4)

        await asyncio.create_task(inner())

    with LLM.over(FakeEngine, byte_tokenizer()) as llm:
        for called in (exits, exits_on_the_loop, leaves_a_task):
            flow = weft.flow(lambda q, called=called: ops.function(called, q))
            (error,) = flow.run([{"q": "x"}], on=llm, function_timeout_s=TIMEOUT_S).errors
            assert "raised SystemExit" in error.message
            assert weft.flow(lambda q: ops.text(f"{q}!")).run([{"q": "x"}], on=llm)[0]["value"] == "x!"
            with weft.session(on=llm, function_timeout_s=TIMEOUT_S):
                native = weft.native_function(called)
                with pytest.raises(weft.workflow.run.value_errors.NodeFailed, match="raised SystemExit"):
                    native("x").get(timeout_s=TIMEOUT_S)
                assert ops.text("there").get(timeout_s=TIMEOUT_S) == "there"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_timeout_of_the_function_s_own_keeps_its_words(is_async: bool) -> None:
    def plain(x: str) -> None:
        raise TimeoutError("the database did not answer")

    async def coroutine(x: str) -> None:
        plain(x)

    failure = calling(coroutine if is_async else plain).failure
    assert failure is not None
    assert isinstance(failure.error, TimeoutError)
    assert str(failure.error) == "the database did not answer"


# ---- values


class Colour(enum.Enum):
    RED = "red"


class Struct(msgspec.Struct, rename="camel"):
    the_name: str


@dataclasses.dataclass
class Record:
    name: str
    scores: list[Any]


class Model:
    """As pydantic's."""

    def model_dump(self, mode: str) -> Json:
        assert mode == "json"
        return {"name": "Ada"}


VALUES = [
    (Record("Ada", [1, np.float32(0.5)]), {"name": "Ada", "scores": [1, 0.5]}),
    (Struct("Ada"), {"theName": "Ada"}),
    (Model(), {"name": "Ada"}),
    (Colour.RED, "red"),
    (np.int64(3), 3),
    (np.float64(0.5), 0.5),
    ((1, "two"), [1, "two"]),
    (10**30, 10**30),
]
REFUSED = [
    (math.nan, "nan is not a number of JSON: use None"),
    ([1.0, math.inf], r"[1]: inf is not a number of JSON"),
    (b"abc", "builtins.bytes is not JSON: decode it to text"),
    ({"a": {1: "x"}}, "a: 1 names a field"),
    (np.zeros(2), "by value.tolist()"),
    (Record("Ada", [b"x"]), "scores[0]: a value of builtins.bytes"),
]


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=lambda case: type(case).__name__)
def test_values_are_those_of_rows(value: Any, expected: Any) -> None:
    assert calling(lambda x: value).outputs == {"out": expected}
    (row,) = Rows([{"q": value}]).check(graph_from_dict(CALLING))
    assert row == {"q": expected}


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=lambda case: type(case).__name__)
def test_what_rows_refuse_functions_cannot_return(value: Any, message: str) -> None:
    failure = calling(lambda x: value).failure
    assert failure is not None
    assert message in str(failure.error)
    with pytest.raises(InvalidRequest) as refused:
        Rows([{"q": value}]).check(graph_from_dict(CALLING))
    assert message in refused.value.message


# ---- values from outside


@weft.flow
def decided(q: Any) -> Any:
    return ops.external(schema={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM.over(FakeEngine, byte_tokenizer()) as made:
        yield made


@pytest.mark.parametrize("is_async", [False, True])
def test_values_from_outside_follow_their_schema(is_async: bool, llm: LLM) -> None:
    values: list[Any] = [{"ok": True}, {"ok": "maybe"}, "yes", {"ok": math.nan}]

    def plain(asked: AwaitExternal) -> Any:
        return values[asked.task.row]

    async def coroutine(asked: AwaitExternal) -> Any:
        return plain(asked)

    rows = [{"q": str(number)} for number in range(len(values))]
    results = decided.run(rows, on=llm, external=coroutine if is_async else plain)
    assert results[0]["value"] == {"ok": True}
    assert [error.row for error in results.errors] == [1, 2, 3]
    assert "does not follow its schema: ok is not of type boolean" in results.errors[0].message
    assert "does not follow its schema: the value is not of type object" in results.errors[1].message
    assert "nan is not a number of JSON" in results.errors[2].message


def test_what_gives_values_from_outside_fails_its_row(llm: LLM) -> None:
    results = decided.run([{"q": "x"}], on=llm, external=exits, function_timeout_s=TIMEOUT_S)
    assert results.errors[0].message == "exits raised SystemExit: no configuration"


@pytest.mark.parametrize("is_external", [False, True])
def test_the_end_of_a_run_cancels_its_functions(is_external: bool) -> None:
    async def main() -> None:
        has_begun, ended = asyncio.Event(), list[str]()

        async def waits(x: Any) -> None:
            has_begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        raw = graph({"id": "e", "op": "external"}) if is_external else CALLING
        services = RunServices(InstantBackend(), {"f": waits}, external=partial(value_from, waits))
        results = driver(raw, [{"q": "x"}], services).results()
        first = asyncio.ensure_future(anext(results))
        await has_begun.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert ended == ["cancelled"]

    asyncio.run(main())
