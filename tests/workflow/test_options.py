"""What may be given to runs, explanations and sessions; everything else is refused by name before anything runs."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import weft
from tests.server.conftest import RunningServer, running
from weft import ops
from weft.abi.errors import InvalidRequest, UnknownModel, Unsupported
from weft.client import Client
from weft.llm import LLM
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.workflow.options import EXPLAIN_OPTIONS, RUN_OPTIONS, SESSION_OPTIONS
from weft.workflow.session.api import SessionOptions
from weft.workflow.targets import RunOptions

ROWS = [{"q": "one"}, {"q": "two"}]


@weft.flow
def tell(q: Any) -> Any:
    return ops.llm(f"Tell me about {q}.", max_tokens=3, temperature=0)


@pytest.fixture(scope="module")
def model() -> Iterator[LLM]:
    with LLM.over(FakeEngine, byte_tokenizer()) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as made:
        yield made


async def streamed_here(on: Any, **options: Any) -> None:
    async for _ in tell.stream_async(ROWS, on, **options):
        pass


USES: dict[str, Callable[..., Any]] = {
    "run": lambda on, **options: tell.run(ROWS, on=on, **options),
    "stream": lambda on, **options: list(tell.stream(ROWS, on=on, **options)),
    "stream_async": lambda on, **options: asyncio.run(streamed_here(on, **options)),
    "run_async": lambda on, **options: asyncio.run(tell.run_async(ROWS, on=on, **options)),
    "explain_async": lambda on, **options: asyncio.run(tell.explain_async(ROWS, on=on, **options)),
    "explain": lambda on, **options: tell.explain(ROWS, on=on, **options),
    "session": lambda on, **options: weft.session(on=on, **options),
}


@pytest.mark.parametrize("use", USES)
def test_unknown_options_are_refused(use: str, model: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"'modle' is not an option of .*\. Did you mean model\?"):
        USES[use](model, modle="x")
    with pytest.raises(InvalidRequest, match=r"'temperature' is not an option of .*\. There are api_key, cache, "):
        USES[use](model, temperature=0)


WRONG = [
    ("optimise", "no", "True or False"),
    ("limits", {"calls": 1}, "a weft.RunLimits"),
    ("limits", weft.RunLimits(calls="2"), "a weft.RunLimits"),
    ("limits", weft.RunLimits(calls=1.5), "a weft.RunLimits"),
    *(
        ("limits", weft.RunLimits(seconds=seconds), "with seconds above 0")
        for seconds in (0, -1.0, True, "5", float("nan"), float("inf"), 10**400)
    ),
    ("concurrency", 4, "a weft.Concurrency"),
    ("concurrency", weft.Concurrency(rows=0), "numbers of 1 or more"),
    ("function_timeout_s", "5", "seconds"),
    ("function_timeout_s", 0, "seconds"),
    ("external", "person", "a function"),
    ("functions", {"f": 3}, "a mapping of names to functions"),
    ("functions", [len], "a mapping of names to functions"),
    ("max_run_bytes", "1GiB", "a number of bytes"),
    ("max_value_bytes", True, "a number of bytes"),
    ("cache", 3, "the path of a folder"),
    ("cache", True, "the path of a folder"),
    ("cache", "", "the path of a folder"),
    ("priority", "high", "a whole number"),
    ("cache_salt", 3, "a text"),
    ("planning", "no", "True, False, or a mapping of settings"),
    ("objective", 3, "the name of an objective"),
    ("deadline_s", "soon", "seconds"),
    ("statistics", [], "a mapping of nodes to figures"),
    ("starts", 1, "True or False"),
    ("stream", "value", "a list of outputs"),
    ("model", 3, "a text"),
    ("api_key", b"k", "a text"),
]


@pytest.mark.parametrize(("name", "value", "takes"), WRONG)
def test_options_of_a_wrong_type_are_refused_by_name(name: str, value: Any, takes: str, model: LLM) -> None:
    known = {"run": RUN_OPTIONS, "explain": EXPLAIN_OPTIONS, "session": SESSION_OPTIONS}
    for use, names in known.items():
        if name in names:
            with pytest.raises(InvalidRequest) as caught:
                USES[use](model, **{name: value})
            assert caught.value.param == name
            assert caught.value.message.startswith(f"{name} takes ")
            assert takes in caught.value.message


def test_none_is_as_not_given(model: LLM) -> None:
    nothing = dict.fromkeys(RUN_OPTIONS)
    assert not tell.run(ROWS, on=model, **nothing).errors


def test_names_are_those_of_the_types() -> None:
    assert set(inspect.get_annotations(RunOptions)) == set(RUN_OPTIONS)
    assert set(inspect.get_annotations(SessionOptions)) == set(SESSION_OPTIONS)


@pytest.mark.parametrize(("name", "value"), [("priority", 1), ("cache_salt", "s")])
def test_options_of_runs_on_a_server_are_refused_elsewhere(name: str, value: Any, model: LLM) -> None:
    for use in ("run", "run_async", "stream", "stream_async"):
        with pytest.raises(Unsupported, match=f"{name} is for a run on a server of Weft"):
            USES[use](model, **{name: value})


def test_a_run_can_do_without_a_cache(model: LLM) -> None:
    assert not tell.run(ROWS, on=model, cache=False).errors
    for use in ("explain", "explain_async", "session"):
        with pytest.raises(InvalidRequest, match="cache takes the path of a folder, not False"):
            USES[use](model, cache=False)


# ---- on


class OpenAI:
    """A client of somebody else's."""


NOT_ON = [
    (None, "this is None"),
    (OpenAI(), f"this is of the type {__name__}.OpenAI"),
    ("weft-tiny", "this is the text 'weft-tiny', which is no address"),
    ("127.0.0.1:8000", "which is no address"),
    ("http://", "which is no address"),
    ("http://[", "which is no address"),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("on", "says"), NOT_ON)
def test_what_nothing_can_run_on_is_refused(use: str, on: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        USES[use](on)
    assert caught.value.param == "on"
    assert caught.value.message.startswith("`on` is a weft.LLM")
    assert says in caught.value.message


def test_a_session_takes_no_client(server: RunningServer) -> None:
    with (
        Client(server.url) as client,
        pytest.raises(InvalidRequest, match=r"this is of the type weft\.client") as caught,
    ):
        weft.session(on=client)  # type: ignore[arg-type]
    assert "weft.client.Client of" not in caught.value.message


def test_a_server_explains_what_would_run_there(server: RunningServer) -> None:
    with Client(server.url) as client:
        made = tell.explain(ROWS, on=client)
        assert made.to_dict()["predicted"]["calls"] == 2
        assert "llm_1" in str(made)
        assert made.mermaid().startswith("flowchart TD")
        assert made.svg().startswith("<svg ")
        figures = {"q": {"output_tokens": 4}}
        assert tell.explain(9, on=client, statistics=figures).to_dict()["predicted"]["calls"] == 9
        with pytest.raises(Unsupported, match="cache is not for an explanation by a server"):
            tell.explain(ROWS, on=client, cache="folder")


# ---- the event loop of functions


def test_coroutines_of_later_runs_on_addresses_share_an_event_loop(server: RunningServer) -> None:
    lock = asyncio.Lock()
    loops: set[Any] = set()

    async def locked(x: str) -> str:
        async with lock:  # it belongs to the loop on which a second one waits for it
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
            return x

    flow = weft.flow(lambda q: ops.function(locked, q))
    with Client(server.url) as client:
        for on in (server.url, f"{server.url}/v1", client, server.url):
            assert flow.run(ROWS, on=on).column("value") == ["one", "two"]
    native = weft.native_function(locked)
    with weft.session(on=server.url):
        assert [native(text).get() for text in ("a", "b")] == ["a", "b"]
    assert len(loops) == 1


def test_a_blocking_call_on_the_loop_of_its_run_is_an_error_of_the_row(model: LLM, server: RunningServer) -> None:
    for on in (model, server.url):

        async def blocks(x: str, on: Any = on) -> Any:
            return tell.run(ROWS, on=on).column("value")

        def waits(x: str, on: Any = on) -> Any:
            return tell.run(ROWS, on=on).column("value")

        blocked = weft.flow(lambda q, blocks=blocks: ops.function(blocks, q))
        (error,) = blocked.run(ROWS[:1], on=on, function_timeout_s=60).errors
        assert "make it in a plain def" in error.message
        waited = weft.flow(lambda q, waits=waits: ops.function(waits, q))
        assert len(waited.run(ROWS[:1], on=on, function_timeout_s=60)[0]["value"]) == 2


# ---- results


def test_outputs_that_do_not_exist_are_named(model: LLM) -> None:
    results = tell.run(ROWS, on=model)
    with pytest.raises(KeyError, match="there is no output 'valu'; there are value"):
        results.column("valu")
    with pytest.raises(KeyError, match="there is no output 'valu'; there are value"):
        results[0]["valu"]
    failed = tell.run(ROWS, on=model, limits=weft.RunLimits(calls=0))
    assert failed.column("value") == [None, None]
    with pytest.raises(KeyError, match="row 0 failed at llm_1"):
        failed[0]["value"]


def test_what_users_need_is_exported() -> None:
    from weft.workflow import CallStarted, RowResult, TextDelta, plan

    assert all(map(callable, (CallStarted, RowResult, TextDelta, plan, weft.RunLimits, weft.Concurrency)))


def test_calls_may_name_the_model_of_an_llm() -> None:
    named = weft.flow(lambda q: ops.llm(f"Tell me about {q}.", model="weft-tiny", max_tokens=3, temperature=0))
    with LLM("weft-tiny", dtype="float32", num_pages=64) as llm:
        expected = tell.run(ROWS, on=llm).column("value")
        assert named.run(ROWS, on=llm).column("value") == expected
        assert tell.run(ROWS, on=llm, model="weft-tiny").column("value") == expected
        assert named.explain(ROWS, on=llm).to_dict()["predicted"]["calls"] == len(ROWS)
        with pytest.raises(UnknownModel, match="no model 'nope' here; there is weft-tiny"):
            tell.run(ROWS, on=llm, model="nope")
