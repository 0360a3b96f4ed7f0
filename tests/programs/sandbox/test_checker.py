"""Uploads are looked at in a limited process, once each, and by no other."""

from __future__ import annotations

import ast
import asyncio
import builtins
import hashlib
import signal
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import wasmtime

from weft.abi.errors import InvalidRequest, WeftError
from weft.programs.registry import Code
from weft.programs.sandbox import checker as module
from weft.programs.sandbox.checker import CodeChecker, check_now
from weft.programs.sandbox.workers import _PACKAGES, WorkerEnded, WorkerProcess

MAIN = b"async def main(args): pass\n"
FIELDS = b"x = f'" + b"{a}" * 300_000 + b"'\n" + MAIN
"""900 KB that take minutes to parse: the time grows with the square of the fields."""


def code(content: bytes, kind: Any = "python") -> Code:
    return Code(kind=kind, content=content, hash=hashlib.sha256(content).hexdigest())


def wasm(text: str) -> bytes:
    return bytes(wasmtime.wat2wasm(text))


def verdicts(*contents: bytes, kind: str = "python") -> list[str | None]:
    """What is said of each, one after the other."""

    async def all_of_them() -> list[str | None]:
        checker = CodeChecker()
        said: list[str | None] = []
        for content in contents:
            try:
                await checker.check("t", code(content, kind))
                said.append(None)
            except InvalidRequest as error:
                said.append(error.message if error.param == "source" else None)
        await checker.close()
        return said

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no `main`"),
        (b"def other(): pass", "has no `main`"),
        (b"def main(:", "The program, line 1, is not valid Python: invalid syntax\n    def main(:"),
        (MAIN + b"\0", "null bytes"),
        (b"x = " + b"(" * 5000 + b")" * 5000 + b"\n" + MAIN, "too many nested parentheses"),
        (b"x = " + b"-" * 100_000 + b"1\n" + MAIN, "nested too deeply"),
    ],
)
def test_what_is_refused(content: bytes, message: str) -> None:
    [said] = verdicts(content)
    assert said is not None
    assert message in said


def test_what_counts_as_main() -> None:
    sources = ["from x import run as main", "main = 3", "def main(): pass", "async def main(): ..."]
    assert verdicts(*(source.encode() for source in sources)) == [None] * 4


def test_modules_are_checked_too() -> None:
    good = wasm('(module (memory (export "memory") 1) (func (export "run")))')
    bad = wasm('(module (memory (export "memory") 1) (global (export "run") i32 (i32.const 1)))')
    assert verdicts(good, bad, good[:-3], kind="wasm") == [
        None,
        "The module was refused: the module exports run as a global; it must be a function.",
        "The module was refused: a section of the module is longer than the module.",
    ]


def test_no_server_process_parses_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((ast, "parse"), (builtins, "compile")):
        monkeypatch.setattr(owner, name, None)
    refusal = "The program, line 1, is not valid Python: '(' was never closed\n    def main("
    assert verdicts(MAIN, b"def main(") == [None, refusal]


def test_parsing_ends_at_a_bound_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_CPU_S", 1)
    [said] = verdicts(FIELDS)
    assert said == "The program takes more than 1 s of processor time to be parsed; make it smaller."


def test_parsing_ends_at_a_bound_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_BYTES", 64 << 20)
    [said] = verdicts(b"a=1\n" * 100_000 + MAIN)
    assert said is not None
    assert "64 MiB of memory" in said


def test_the_same_content_is_checked_once_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    problem = module._problem
    monkeypatch.setattr(module, "_problem", lambda code, worker: checked.append(code.hash) or problem(code, worker))

    async def check() -> None:
        checker = CodeChecker()
        await asyncio.gather(*(checker.check(tenant, code(MAIN)) for tenant in ("a", "a")))
        assert len(checked) == 1
        await checker.check("b", code(MAIN))
        assert len(checked) == 2, "whether another tenant has the program does not show by the time"
        await checker.check("a", code(MAIN))
        await checker.close()

    asyncio.run(check())
    assert len(checked) == 2


def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANT_VERDICTS", 2)
    monkeypatch.setattr(module, "MAX_VERDICTS", 3)
    monkeypatch.setattr(module, "_problem", lambda code, worker: None)

    async def check() -> int:
        checker = CodeChecker()
        for number in range(10):
            await checker.check("t" if number < 5 else f"t{number}", code(MAIN + b"#%d" % number))
            assert len(checker._verdicts) == min(number + 1, 2 if number < 5 else 3)
        await checker.close()
        return len(checker._verdicts)

    assert asyncio.run(check()) == 3


def test_a_check_that_is_cancelled_kills_its_process_and_is_charged() -> None:
    async def check() -> tuple[int, list[float]]:
        checker, charged = CodeChecker(), list[float]()
        task = asyncio.ensure_future(checker.check("t", code(FIELDS), charged.append))
        while not any(worker._pid for worker in checker._pool._workers):  # noqa: ASYNC110 (a thread starts it)
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left = checker._pool.num_running
        await checker.close()
        return left, charged

    left, charged = asyncio.run(check())
    assert left == 0
    assert len(charged) == 1


def test_the_operator_s_own_programs_are_checked_at_once() -> None:
    check_now(code(MAIN))
    with pytest.raises(InvalidRequest, match=r"^agent, line 1, is not valid Python: "):
        check_now(msgspec.structs.replace(code(b"def main(:"), name="agent"))
    with pytest.raises(InvalidRequest, match="no `main`"):
        check_now(code(b"x = 1"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_that_was_killed_says_nothing_of_the_program(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system kills it first where memory is short, and a terminal signals its whole process group."""
    ends = [WorkerEnded(-number, "", ""), WorkerEnded(0, "", "")]
    monkeypatch.setattr(WorkerProcess, "run", lambda *args, **options: ends.pop(0))

    async def check_twice() -> None:
        checker = CodeChecker()
        with pytest.raises(WeftError, match="was killed; try again later"):
            await checker.check("t", code(MAIN))
        await checker.check("t", code(MAIN))
        await checker.close()

    asyncio.run(check_twice())
    assert not ends


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE])
def test_a_crash_of_the_parser_refuses_the_program(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerProcess, "run", lambda *args, **options: WorkerEnded(-number, "", ""))
    [said] = verdicts(MAIN)
    assert said is not None
    assert "makes the parser crash" in said


def test_the_process_outlives_signals_to_its_group() -> None:
    command = [sys.executable, "-S", "-m", module._MODULE, "python", "5", str(module.CHECK_BYTES)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={"PYTHONPATH": _PACKAGES})
    assert worker.stdin is not None
    # More than a pipe has room for: the worker reads, so it ignores the signals by now.
    worker.stdin.write(b"#" * (2 << 20) + b"\n" + MAIN)
    for number in (signal.SIGTERM, signal.SIGINT):
        worker.send_signal(number)
    assert worker.communicate(timeout=60)[1] == b""
    assert worker.returncode == 0
