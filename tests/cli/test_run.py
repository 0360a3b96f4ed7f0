"""`weft run`: a program from a file on the model in the package, and on a server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Weft
from tests.server.conftest import running
from weft.abi.errors import WeftError
from weft.cli.run_values import Screen
from weft.client.values import Run, RunError, RunEvent

HELLO = """
from weft.sdk import run

async def main(args):
    run.log("noted")
    run.send("first")
    run.send({"got": args})
    return args if args == "nothing" else {"args": args}
"""
WRITE = """
from weft.sdk import Context

async def main(args):
    ctx = Context()
    ctx.user("Hello")
    reply = await ctx.generate(max_tokens=4)
    return len(reply.tokens)
"""
BAD = """def helper():
    raise ValueError("no luck")

async def main(args):
    helper()
"""
CHATS = "from weft.sdk import run\nasync def main():\n    return [await run.receive(), await run.receive()]\n"
PARENT = (
    "from weft.sdk import messaging\nasync def main(args):\n    return await messaging.launch('hello', args=1).join()\n"
)


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DATA", str(tmp_path / "data"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in {"hello": HELLO, "write": WRITE, "bad": BAD, "chats": CHATS, "parent": PARENT}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.mark.slow
def test_what_it_says_and_returns(weft: Weft, files: Path) -> None:
    result = weft("run", str(files / "hello.py"), "--arg", "a=1", "--arg", "b=two words", "--arg", 'c={"d": null}')
    assert result.exit_code == 0, result.output
    args = {"a": 1, "b": "two words", "c": {"d": None}}
    lines = result.stdout.splitlines()
    assert lines[0] == "first"
    assert [json.loads(line) for line in lines[1:]] == [{"got": args}, {"args": args}]
    assert "info: noted" in result.stderr

    result = weft("run", str(files / "hello.py"), "--json", "--", "1", "x")
    assert [json.loads(line) for line in result.stdout.splitlines()] == ["first", {"got": [1, "x"]}, {"args": [1, "x"]}]
    assert weft("run", str(files / "write.py"), "--model", "weft-tiny").stdout == "4\n"
    result = weft("run", str(files / "chats.py"), "--send", "1", "--send", "two")
    assert json.loads(result.stdout) == [1, "two"]
    result = weft("run", str(files / "parent.py"))
    assert json.loads(result.stdout) == {"args": 1}, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--sandbox",)])
def test_a_failure_shows_the_programs_own_lines(weft: Weft, files: Path, flags: tuple[str, ...]) -> None:
    result = weft("run", str(files / "bad.py"), *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(r'bad\.py", line 2, in helper', result.stderr)
    assert "no luck" in result.stderr
    assert "weft/programs" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--sandbox",)])
def test_a_program_that_misses_its_arguments_says_how_to_give_them(
    weft: Weft, files: Path, flags: tuple[str, ...]
) -> None:
    (files / "ask.py").write_text("def main(args):\n    return args['question']\n")
    result = weft("run", str(files / "ask.py"), *flags)
    assert "line 2, in main\n    return args['question']\n" in result.stderr
    assert result.stderr.endswith("no arguments were given; add --arg NAME=VALUE or -- VALUE\n")
    assert "no arguments" not in weft("run", str(files / "ask.py"), *flags, "--", "null", "null").stderr


FORGOTTEN = """from weft.sdk import Context

async def main(args):
    ctx = Context().user("Hello!")
    return {"reply": ctx.generate(max_tokens=4)FIELD}
"""
LONG = """from weft.sdk import Context

async def main(args):
    ctx = Context().user("and so on " * 5000)
    return (await ctx.generate()).text
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--sandbox",)])
def test_a_program_is_told_of_its_own_lines_alone(weft: Weft, files: Path, flags: tuple[str, ...]) -> None:
    (files / "value.py").write_text(FORGOTTEN.replace("FIELD", ""))
    (files / "text.py").write_text(FORGOTTEN.replace("FIELD", ".text"))
    (files / "long.py").write_text(LONG)
    value = weft("run", str(files / "value.py"), *flags).stderr
    assert "the result of main cannot be written as JSON: it holds a Generation that was not awaited" in value
    assert "Traceback" not in value
    text = weft("run", str(files / "text.py"), *flags).stderr
    assert 'line 5, in main\n    return {"reply": ctx.generate(max_tokens=4).text}\n' in text
    assert "the generation has not begun: `await` it" in text
    long = weft("run", str(files / "long.py"), *flags).stderr
    assert "line 5, in main\n    return (await ctx.generate()).text\nContextTooLong: " in long
    assert long.count("exceed the 2048 that a sequence may have") == 1
    for shown in (value, text, long):
        assert "weft/" not in shown


def test_a_syntax_error_is_told_with_its_line(weft: Weft, files: Path) -> None:
    file = files / "wrong.py"
    file.write_text("async def main(args)\n    return 1\n")
    result = weft("run", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    expected = f"weft: {file}, line 1, is not valid Python: expected ':'\n    async def main(args)\n"
    assert result.stderr == expected


def test_without_a_file_it_shows_its_help(weft: Weft) -> None:
    assert "async def main(args):" in weft("run").output


@pytest.mark.slow
def test_in_the_sandbox_limits_hold(weft: Weft, files: Path) -> None:
    (files / "spin.py").write_text("def main():\n    while True: pass\n")
    result = weft("run", str(files / "spin.py"), "--sandbox", "--limit", "cpu_s=0.1")
    assert result.exit_code == 1
    assert "limit_exceeded" in result.stderr
    assert "cpu_s" in result.stderr


def written(*events: RunEvent, as_json: bool = False) -> str:
    """What the terminal shows of these events of a run."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(WeftError):
        Screen(as_json=as_json).follow(events)
    return out.getvalue()


def said(*values: object) -> list[RunEvent]:
    return [RunEvent(type="message", message=value) for value in values]


def ended(result: object) -> RunEvent:
    names = {"program": "", "hash": "", "kind": "python", "trusted": False, "model": "", "created": 0.0}
    return RunEvent(type="end", run=Run(id="run-1", status="finished", result=result, **names))


def test_pieces_of_text_read_as_a_text() -> None:
    pieces = said("Once", " upon", "", " a time.\n", "The end")
    assert written(*pieces, ended(None)) == "Once upon a time.\nThe end\n"
    assert written(*pieces, ended("text")) == "Once upon a time.\nThe end\ntext\n"
    assert written(*pieces, *said({"a": 1}, "b", [2]), ended({"c": 3})) == (
        'Once upon a time.\nThe end\n{"a": 1}\nb\n[2]\n{"c": 3}\n'
    )
    assert written(*said("cut"), RunEvent(type="error")) == "cut\n"  # a stream without an end
    assert written(*said("line\n"), ended(None)) == "line\n"
    lines = written(*pieces, *said({"a": 1}), ended(None), as_json=True).splitlines()
    assert [json.loads(line) for line in lines] == ["Once", " upon", "", " a time.\n", "The end", {"a": 1}, None]


def test_a_failure_comes_after_the_end_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.message("half")
    screen.failure("failed", RunError(kind="engine_dead", message="it is back soon"))
    assert capsys.readouterr() == ("half\n", "weft: the program failed: engine_dead: it is back soon\n")


def test_what_cannot_be_run(weft: Weft, files: Path) -> None:
    (files / "none.py").write_text("x = 1\n")
    for arguments, message in [
        (["missing.py"], "cannot be read: No such file"),
        ([str(files / "none.py")], "no `main`"),
        ([str(files / "hello.py"), "--limit", "cpu=1"], "unknown field `cpu`; known limits are cpu_s"),
        ([str(files / "hello.py"), "--url", "127.0.0.1:1"], "it begins with http:// or https://"),
        ([str(files / "hello.py"), "--url", "http://127.0.0.1:1"], "is `weft serve` running there"),
    ]:
        result = weft("run", *arguments)
        assert result.exit_code == 1, result.output
        assert message in result.stderr
    for arguments in (["--arg", "novalue"], ["--limit", "=1"], ["--arg", "a=1", "--", "2"]):
        assert weft("run", str(files / "hello.py"), *arguments).exit_code == 2


def test_on_a_server(weft: Weft, files: Path) -> None:
    with running(api_keys=["alice=key"]) as server:
        there = ("--url", server.url, "--api-key", "key")
        result = weft("run", str(files / "hello.py"), *there, "--", '{"x": 1}')
        assert result.exit_code == 0, result.stderr
        assert result.stdout.splitlines()[-1] == '{"args": {"x": 1}}'
        assert "info: noted" in result.stderr
        result = weft("run", str(files / "hello.py"), *there, "--dtype", "float32")
        assert result.exit_code == 2
        assert "--dtype" in result.stderr
        result = weft("run", str(files / "bad.py"), *there)
        assert result.exit_code == 1
        assert "in helper" in result.stderr
        result = weft("run", str(files / "hello.py"), "--url", server.url)
        assert result.exit_code == 1
        assert "No valid API key" in result.stderr


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it(files: Path) -> None:
    (files / "talks.py").write_text(
        "from weft.sdk import run\nasync def main():\n    while True:\n"
        "        run.send('x' * 1000)\n        await run.sleep(0)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.cli.main", "run", str(files / "talks.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1000) == b"x" * 1000
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert b"Traceback" not in told


@pytest.mark.slow
def test_ctrl_c_cancels(files: Path) -> None:
    waits = """
from weft.sdk import run
async def main():
    run.send("wait")
    run.send("ing\\n")
    await run.receive()
"""
    (files / "waits.py").write_text(waits)
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.cli.main", "run", str(files / "waits.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"WEFT_DATA": str(files / "data")},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in errors
