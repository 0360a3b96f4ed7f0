"""Programs on a server whose processes are killed: programs that handle the error continue, and no pages are kept."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cli.test_programs import chat, child_of
from tests.cli.test_run import HELLO
from tests.cli.test_serve import serving
from weft.client import Client, Run, RunEvent, RunFailedError

pytestmark = pytest.mark.slow

SERVER = ("--num-pages", "1024", "--max-running", "64", "--threads", "1", "--dtype", "float32")
ENGINE, HOST = "weft.engine.process", "weft.programs.host.process"
TOKENS = 800

STORY = """
from weft.sdk import Context, Sampler, Stop, run

async def main(count):
    async with Context(sampler=Sampler(temperature=0)) as ctx:
        ctx.user("Tell a story of a lamp.")
        await ctx.flush(add_generation_prompt=True)
        start = len(ctx.tokens)
        async for piece in ctx.generate(stop=Stop(max_tokens=count, ignore_eos=True)):
            run.send("begun") if len(ctx.tokens) == start + 1 else None
        return ctx.tokens
"""
PAGES = """
from weft.sdk import EngineDead, Queue, run

async def main():
    async with Queue() as queue:
        pages = queue.alloc_pages(3)
        await queue.synchronize()
        run.send("begun")
        await run.receive()
        try:
            await queue.synchronize()
        except EngineDead as error:
            return str(error)
"""
WAITING = """
from weft.sdk import Context, detokenize, run

async def main(number):
    ctx = Context().fill(f"Number {number} waits for its turn, and has pages of its")
    await ctx.flush()
    run.send("waiting")
    await run.receive()
    await ctx.generate_until(max_tokens=4)
    return await detokenize(ctx.tokens)
"""
WAITED = "Number {} waits for its turn, and has pages of its"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, httpx.Client]]:
    folder = tmp_path_factory.mktemp("survive")
    (folder / "trusted").mkdir()
    (folder / "trusted" / "story.py").write_text(STORY)
    settings = {"WEFT_DATA": str(folder), "WEFT_PROGRAMS_TRUSTED_DIR": str(folder / "trusted")}
    # What a killed program host held is given back when its lease ends.
    with serving(*SERVER, **settings, WEFT_ENGINE_LEASE_S="5") as (process, client):
        yield process.pid, client


@pytest.fixture
def client(served: tuple[int, httpx.Client]) -> Iterator[Client]:
    with Client(str(served[1].base_url)) as made:
        yield made


def metric(http: httpx.Client, name: str) -> float:
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    assert len(lines) == 1, (name, lines)
    return float(lines[0].split()[-1])


def pages_in_use(http: httpx.Client) -> float:
    """Share of the pages that are held."""
    return metric(http, "weft:kv_cache_usage_perc{")


def until_pages_are_back(http: httpx.Client) -> None:
    """Given back they are within a step, or a lease; the test's own limit ends a wait for nothing."""
    while pages_in_use(http) or metric(http, "weft:num_sequences{"):
        pass


def ended(client: Client, run: Run) -> Run:
    """The run as it is once it is over, whatever became of it."""
    try:
        return client.runs.wait(run.id)
    except RunFailedError as error:
        return error.run


def until_it_says(events: Iterator[RunEvent], *types: str) -> None:
    assert [next(events).type for _ in types] == list(types)


def test_programs_outlive_the_engine(served: tuple[int, httpx.Client], client: Client) -> None:
    """Those in the middle of an answer, and those that wait with their contexts. Explicit pages do not."""
    front, http = served
    undisturbed: list[int] = client.programs.run("story", TOKENS).result
    assert len(undisturbed) > TOKENS

    runs = [client.programs.start("story", TOKENS), client.programs.start(source=STORY, args=TOKENS)]
    waiting = [client.programs.start(source=WAITING, args=number) for number in range(20)]
    pages = client.programs.start(source=PAGES)
    for run in [*runs, *waiting, pages]:
        until_it_says(client.runs.messages(run.id), "run", "message")
    before = child_of(front, ENGINE)
    before.kill()
    with ThreadPoolExecutor() as pool:
        trusted, sandboxed = pool.map(lambda run: ended(client, run), runs)
    assert (trusted.trusted, sandboxed.trusted) == (True, False)
    for run in (trusted, sandboxed):
        assert (run.status, run.error, run.result) == ("finished", None, undisturbed)
    for run in [*waiting, pages]:
        client.runs.send(run.id, None)
    for number, run in enumerate(waiting):
        over = ended(client, run)
        assert (over.status, over.error) == ("finished", None)
        assert over.result.startswith(WAITED.format(number)), "its context is whole"
        assert len(over.result) > len(WAITED.format(number))
    assert re.search(r"explicit KV pages are lost with it: \d+-\d+\. Allocate", ended(client, pages).result)

    assert child_of(front, ENGINE).pid != before.pid
    assert client.programs.run(source=HELLO, args=2).result == {"args": 2}
    assert chat(http) == 200
    until_pages_are_back(http)


def test_fifty_that_wait_when_their_host_is_killed(served: tuple[int, httpx.Client], client: Client) -> None:
    front, http = served
    restarts = metric(http, "weft:program_host_restarts_total")
    runs = [client.programs.start(source=WAITING, args=number) for number in range(50)]
    for run in runs:
        until_it_says(client.runs.messages(run.id), "run", "message")
    assert pages_in_use(http) > 0
    before = child_of(front, HOST)
    before.send_signal(signal.SIGKILL)
    for run in runs:
        error = ended(client, run).error
        assert error is not None
        assert (error.kind, "the program host was killed by SIGKILL" in error.message) == ("host_dead", True)
    assert chat(http) == 200
    assert client.programs.run(source=HELLO, args=2).result == {"args": 2}
    assert child_of(front, HOST).pid != before.pid
    assert metric(http, "weft:program_host_restarts_total") == restarts + 1
    assert metric(http, "weft:program_runs_running") == 0
    until_pages_are_back(http)
