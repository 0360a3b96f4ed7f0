"""The benchmarks of programs, with the least of everything: that they run, and that both sides do the same work."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from bench.programs import functions, launch
from bench.programs.applications import APPLICATIONS, SHAPES, Mailbox, Text, Tokens, words
from bench.programs.apps import as_client, as_program, compare, show, source_of_application
from bench.programs.attention import Lengths, once
from bench.programs.calling import STEPS, Prompt
from bench.programs.packing import source_of
from bench.programs.served import Peer, Served, Tools, served
from bench.programs.windows import KINDS

T = TypeVar("T")

SMALL = {
    "react": {"prompt": 20, "rounds": 2, "action": 3, "result": 4, "answer": 2},
    "codeact": {"prompt": 20, "rounds": 1, "action": 3, "result": 4, "answer": 2},
    "swarm": {"agents": 2, "messages": 4, "prompt": 20, "message": 3},
    "tree": {"prompt": 20, "depth": 2, "breadth": 2, "proposals": 2, "thought": 3},
    "recursion": {"prompt": 20, "problem": 4, "depth": 1, "divide": 2, "answer": 2},
    "graph": {"prompt": 20, "parts": 2, "part": 8, "drafts": 2, "summary": 3},
    "skeleton": {"prompt": 20, "skeleton": 3, "points": 2, "cue": 2, "point": 3},
    "prefix": {"document": 40, "questions": 2, "question": 4, "answer": 2},
    "lookup": {"prompt": 24, "period": 6, "answer": 12},
}
CALLING = {"own": 16, "often": 1, "once": 1, "spec": 32, "request": 8, "calls": 2, "call": 4, "reply": 3}
PROGRAMS = {
    **{name: source_of_application(name) for name in APPLICATIONS},
    "calling": source_of("applications", "calling"),
    "windows": source_of("applications", "windows"),
}


@asynccontextmanager
async def small_server(trusted: bool = True) -> AsyncIterator[Served]:
    engine = ("--num-pages", "256")
    async with served("weft-tiny", PROGRAMS, trusted=trusted, distance_ms=0.0, threads=1, engine=engine) as server:
        yield server


class Runner:
    """One event loop for all tests of the module, because their server's connections belong to it."""

    def __init__(self, runner: asyncio.Runner):
        self._runner = runner

    def __call__(self, body: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(body, 60))


@pytest.fixture(scope="module")
def run() -> Iterator[Runner]:
    with asyncio.Runner() as runner:
        yield Runner(runner)


@pytest.fixture(scope="module")
def server(run: Runner) -> Iterator[Served]:
    context = small_server()
    yield run(context.__aenter__())
    run(context.__aexit__(None, None, None))


class CountingText:
    """A model that says what it is told to count."""

    def __init__(self, world: CountingWorld):
        self.world = world
        self.is_open = True
        world.texts.append(self)

    def fill(self, tokens: Tokens) -> None:
        assert self.is_open
        self.world.filled += len(tokens)

    async def generate(self, count: int) -> Tokens:
        assert self.is_open
        self.world.generated += count
        return words(count, self.world.generated)

    def fork(self) -> Text:
        return CountingText(self.world)

    def drop(self) -> None:
        self.is_open = False


class CountingWorld:
    def __init__(self) -> None:
        self.filled = self.generated = self.inputs_and_outputs = 0
        self.texts: list[CountingText] = []

    def text(self) -> Text:
        return CountingText(self)

    async def tool(self, tokens: Tokens) -> None:
        self.inputs_and_outputs += 1

    async def execute(self, number: int) -> int:
        self.inputs_and_outputs += 1
        return number

    def mailbox(self, name: str) -> Mailbox:
        return CountingMailbox(self)

    async def repeat(self, prompt: Tokens, count: int) -> Tokens:
        self.generated += count
        return words(count, 1)


class CountingMailbox:
    def __init__(self, world: CountingWorld):
        self.world = world
        self.queue: asyncio.Queue[Tokens] = asyncio.Queue()

    def send(self, tokens: Tokens) -> None:
        self.queue.put_nowait(tokens)

    async def get(self) -> Tokens:
        self.world.inputs_and_outputs += 1
        return await self.queue.get()


@pytest.mark.parametrize(("name", "count"), [("react", 8), ("codeact", 8), ("swarm", 32)])
def test_agents_have_the_inputs_and_outputs_of_the_paper(name: str, count: int) -> None:
    world = CountingWorld()
    asyncio.run(APPLICATIONS[name](world, SHAPES[name], 1))  # type: ignore[arg-type]
    assert world.inputs_and_outputs == count


@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications_give_every_text_back(name: str) -> None:
    world = CountingWorld()
    asyncio.run(APPLICATIONS[name](world, SHAPES[name], 1))  # type: ignore[arg-type]
    assert world.generated > 0
    assert not [text for text in world.texts if text.is_open]


def test_words_are_those_of_their_seed() -> None:
    assert words(50, 3) == words(50, 3) != words(50, 4)
    assert all(33 <= token < 123 for token in words(500, 9))


def test_programs_do_not_import_the_benchmark() -> None:
    for source in PROGRAMS.values():
        ast.parse(source)
        assert "from bench" not in source


def test_both_sides_compute_the_same_numbers_of_tokens(run: Runner, server: Served) -> None:
    before = server.tools.num_requests

    async def body() -> None:
        for name in APPLICATIONS:
            count, notes = await as_program(server, name, SMALL[name], 1)
            assert count == await as_client(server, name, SMALL[name], 1), name
            assert count.generated > 0
            assert ("passes" in notes) == (name == "lookup")
        assert server.tools.num_requests == before + 2 * SMALL["react"]["rounds"]

    run(body())


def test_applications_are_compared_in_the_sandbox(run: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        async with small_server(trusted=False) as server:
            result = await compare(server, "prefix", SMALL["prefix"], 2, 1)
            assert len(result.program_s) == len(result.client_s) == 1
            data = json.loads(json.dumps(show("prefix", 2, result)))
            assert data["tokens"] == {"filled": 48, "generated": 4}
            assert data["gain"] == pytest.approx(result.client_s[0] / result.program_s[0])

    run(body())
    assert "48+4" in capsys.readouterr().out


def test_sides_that_differ_are_not_compared(run: Runner, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def more(server: Served, name: str, shape: dict[str, int], seed: int) -> tuple[Any, dict[str, Any]]:
        count, notes = await as_program(server, name, {**shape, "answer": shape["answer"] + 1}, seed)
        return count, notes

    async def body() -> None:
        monkeypatch.setattr("bench.programs.apps.as_program", more)
        with pytest.raises(RuntimeError, match="different numbers of tokens"):
            await compare(server, "react", SMALL["react"], 1, 1)

    run(body())


def test_every_step_of_the_function_calling_agent_makes_all_its_calls(run: Runner, server: Served) -> None:
    async def body() -> None:
        times, notes = await functions.measure(server, CALLING, 2, 1)
        assert list(times) == [functions.CLIENT, *STEPS]
        assert all(note["generated"] == 8 for note in notes.values())
        # 16 + 32 + 32 + 8 + 2 * (4 + 3) tokens; the specification that is used once has two pages.
        assert notes["+fire"]["most_pages"] == notes["+fire"]["last_pages"] == 1 + 2 + 2 + 2
        assert notes["+drop"]["last_pages"] == notes["+drop"]["most_pages"] - 2

    run(body())


def test_a_prompt_has_what_all_agents_share_and_what_they_do_not() -> None:
    one, other = Prompt(CALLING, 1), Prompt(CALLING, 2)
    assert one.often == other.often
    assert one.own != other.own
    assert one.once != other.once
    assert len(one.tokens()) == 16 + 32 + 32 + 8


def test_windows_hold_fewer_pages(run: Runner, server: Served) -> None:
    lengths = Lengths(prompt=8, tokens=120, window=32, sinks=4)

    async def body() -> None:
        pages = {kind: (await once(server, kind, lengths, 1, 1))[1] for kind in KINDS}
        assert pages == {"generate": 8, "full": 8, "window": 3, "sink": 4}

    run(body())


def test_launches_are_acknowledged_and_leave_nothing(run: Runner) -> None:
    async def body() -> None:
        for kind in launch.kinds():
            seconds, singles = await launch.bursts(kind, launch.Sizes(burst=3, singles=2), 1)
            assert len(seconds) == 1
            assert len(singles) == 2
            before, during, after = await launch.memory(kind, launch.Sizes(paused=3))
            assert during.programs == before.programs + 3
            assert all(left <= had for left, had in zip(after[1:], before[1:], strict=True))

    run(body())


def test_a_section_that_nobody_knows_is_refused() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bench.programs", "lunch"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert "no such section: lunch; there are costs" in ran.stderr


def test_clients_can_ask_another_server(run: Runner) -> None:
    asked: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n", 1)[0]))
                asked.append(json.loads(body))
                said = json.dumps({"choices": [{"token_ids": [5] * asked[-1]["max_tokens"]}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
        writer.close()

    async def body() -> None:
        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        peer = Peer(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}", "the same weights")
        tools = Tools()
        nobody = "http://127.0.0.1:1"
        server = Served(nobody, tools, await tools.start(), 0.0, peer)
        tally = await as_client(server, "react", SMALL["react"], 1)
        server.close()
        other.close()
        assert tally.generated == sum(request["max_tokens"] for request in asked) > 0
        assert {request["model"] for request in asked} == {"the same weights"}

    run(body())
