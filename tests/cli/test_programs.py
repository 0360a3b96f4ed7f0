"""`weft programs` against a server as its users start it, with its processes; and their deaths."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import Result

from tests.cli.conftest import Weft
from tests.cli.test_run import BAD, CHATS, HELLO
from tests.cli.test_serve import SMALL, serving
from tests.server.test_programs import SMALLEST_MODULE
from weft.client import Client, RunFailedError

pytestmark = pytest.mark.slow

WAITS = "from weft.sdk import run\nasync def main():\n    run.send('waiting')\n    await run.receive()\n"
Programs = Callable[..., Result]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, httpx.Client]]:
    data = tmp_path_factory.mktemp("data")
    with serving("--api-key", "alice=secret", "--api-key", "bob=other", *SMALL, WEFT_DATA=str(data)) as (
        process,
        client,
    ):
        yield process.pid, client


@pytest.fixture
def programs(weft: Weft, served: tuple[int, httpx.Client]) -> Programs:
    url = str(served[1].base_url)

    def run(command: str, *arguments: str, input: str | None = None, key: str = "secret") -> Result:
        return weft("programs", command, "--url", url, "--api-key", key, *arguments, input=input)

    return run


def test_a_module_that_is_run_from_its_file_replaces_no_program(
    programs: Programs, weft: Weft, served: tuple[int, httpx.Client], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(HELLO)
    (tmp_path / "agent.wasm").write_bytes(SMALLEST_MODULE)
    assert programs("upload", str(tmp_path / "agent.py")).exit_code == 0
    address = ("--url", str(served[1].base_url), "--api-key", "secret")
    result = weft("run", str(tmp_path / "agent.wasm"), *address)
    assert result.exit_code == 0, result.output
    kept = [json.loads(line)["name"] for line in programs("list", "--json").stdout.splitlines()]
    assert kept == ["agent"]
    assert programs("run", "agent", "--", "5").stdout.splitlines()[-1] == '{"args": 5}'
    assert programs("remove", "agent").exit_code == 0


def test_from_upload_to_remove(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    uploaded = programs("upload", str(tmp_path / "hello.py"))
    assert uploaded.exit_code == 0, uploaded.output
    assert uploaded.stdout.startswith("hello@")
    assert "hello" in programs("list").stdout
    assert json.loads(programs("list", "--json").stdout)["name"] == "hello"
    assert "hello" not in programs("list", key="other").stdout

    result = programs("run", "hello", "--", "5")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == '{"args": 5}'
    assert "finished" in programs("runs").stdout
    run_id = json.loads(programs("runs", "--json").stdout.splitlines()[0])["id"]
    assert "info: noted" in programs("logs", run_id).stdout

    assert programs("remove", "hello").exit_code == 0
    gone = programs("run", "hello")
    assert gone.exit_code == 1
    assert "There is no program" in gone.stderr


def test_background_attach_cancel(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "chats.py").write_text(CHATS)
    (tmp_path / "bad.py").write_text(BAD)
    for name in ("chats", "bad"):
        programs("upload", str(tmp_path / f"{name}.py"))
    run_id = programs("run", "chats", "--background").stdout.strip()
    attached = programs("attach", run_id, input='1\n\n"two"\n')
    assert json.loads(attached.stdout) == [1, "two"]
    waiting = programs("run", "chats", "-b").stdout.strip()
    assert programs("cancel", waiting).stdout == f"{waiting} cancelled\n"
    assert programs("attach", waiting).exit_code == 1
    failed = programs("run", "bad")
    assert failed.exit_code == 1
    assert "in helper" in failed.stderr
    assert programs("attach", "run-0").exit_code == 1


def chat(client: httpx.Client) -> int:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    return client.post("/v1/chat/completions", json=body).status_code


def child_of(front: int, module: str) -> psutil.Process:
    [found] = [child for child in psutil.Process(front).children() if module in " ".join(child.cmdline())]
    return found


def test_a_killed_program_host_does_not_break_chat(served: tuple[int, httpx.Client]) -> None:
    front, http = served
    with Client(str(http.base_url), api_key="secret") as client:
        run = client.programs.start(source=WAITS)
        stream = client.runs.messages(run.id)
        assert [next(stream).type for _ in range(2)] == ["run", "message"]
        os.kill(child_of(front, "weft.programs.host.process").pid, signal.SIGKILL)
        assert chat(http) == 200
        with pytest.raises(RunFailedError, match="killed by SIGKILL") as error:
            client.runs.wait(run.id)
        assert error.value.run.error is not None
        assert error.value.run.error.kind == "host_dead"
        assert client.programs.run(source=HELLO, args=2).result == {"args": 2}


def test_a_generation_goes_on_when_the_engine_is_killed_under_it(served: tuple[int, httpx.Client]) -> None:
    source = """
from weft.sdk import run
from weft.sdk.sampling import Stop
from weft.sdk.sequence import Sequence

async def main(args):
    seq = Sequence()
    seq.append([5, 6, 7])
    count = 0
    async for part in seq.generate(stop=Stop(max_tokens=100000, ignore_eos=True)):
        if not count:
            run.send("begun")
        count += len(part.tokens)
    return count
"""
    front, http = served
    with Client(str(http.base_url), api_key="secret") as client:
        undisturbed = client.runs.wait(client.programs.start(source=source).id).result
        run = client.programs.start(source=source)
        stream = client.runs.messages(run.id)
        assert [next(stream).type for _ in range(2)] == ["run", "message"]
        os.kill(child_of(front, "weft.engine.process").pid, signal.SIGKILL)
        assert client.runs.wait(run.id).result == undisturbed, "as many tokens as the context has room for, each once"
        while http.get("/ready").status_code != 200:
            pass
        assert chat(http) == 200


def test_uploads_survive_a_restart_and_plain_servers_start_no_host(tmp_path: Path) -> None:
    for first in (True, False):
        with serving("--api-key", "secret", *SMALL, WEFT_DATA=str(tmp_path / "data")) as (process, http):
            assert chat(http) == 200
            children = psutil.Process(process.pid).children()
            assert not [child for child in children if "weft.programs.host.process" in " ".join(child.cmdline())]
            assert (tmp_path / "data").exists() is not first
            with Client(str(http.base_url), api_key="secret") as client:
                if first:
                    client.programs.upload("hello", HELLO)
                assert [program.name for program in client.programs.list()] == ["hello"]
                process.send_signal(signal.SIGTERM)
                process.wait(60)
