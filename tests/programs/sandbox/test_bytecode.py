"""Cached bytecode: compiled once, and never by a program."""

from __future__ import annotations

import pytest

from tests.programs.sandbox.help import FakeHost, failure, python
from weft.programs.sandbox import bytecode
from weft.programs.sandbox.bytecode import Bytecode, CallInstruction
from weft.programs.sandbox.sandbox import Sandbox

FORGING = """
import marshal, sys

forged = marshal.dumps(compile("def main(): return 'forged'", "program.py", "exec")).decode("latin-1")
app = sys.modules["app"]
app.WitWorld.compile = lambda self, source, name: forged
app.marshal.dumps = lambda code: forged.encode("latin-1")
app.program.compiled = lambda source, name: compile("def main(): return 'forged'", name, "exec")

def main():
    return forged
"""


def launch(codes: Bytecode, source: bytes, code: bytes, name: bytes = b"program.py") -> list[str]:
    """The functions that are called for a program, where compiling gives this."""
    calls = codes.calls(source, name, b"null", b"seed")
    called = [next(calls)]
    if called[0] == CallInstruction("compile", (source, name)):
        called.append(calls.send(code))
    assert called[-1] == CallInstruction("run", (source, name, code, b"null", b"seed"))
    with pytest.raises(StopIteration) as over:
        calls.send(b"R1")
    assert over.value.value == b"R1"
    return [call.export for call in called]


def test_a_source_is_compiled_once_for_each_name() -> None:
    codes = Bytecode()
    assert launch(codes, b"source", b"code") == ["compile", "run"]
    assert launch(codes, b"source", b"code") == ["run"]
    assert launch(codes, b"source", b"other", b"other.py") == ["compile", "run"]
    # Neither can be taken for the other by moving the border between them.
    assert launch(codes, b"ysource", b"moved", b"program.p") == ["compile", "run"]


def test_a_source_that_is_wrong_is_looked_at_each_time() -> None:
    codes = Bytecode()
    assert launch(codes, b"wrong", b"") == launch(codes, b"wrong", b"") == ["compile", "run"]


def test_what_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytecode, "MAX_CODES", 2)
    monkeypatch.setattr(bytecode, "MAX_BYTES", 10)
    monkeypatch.setattr(bytecode, "MAX_CODE_BYTES", 9)
    codes = Bytecode()
    for source in (b"a", b"b", b"a", b"c"):
        launch(codes, source, b"1234")
    assert launch(codes, b"a", b"1234") == ["run"]
    assert launch(codes, b"b", b"1234") == ["compile", "run"]
    launch(codes, b"d", b"12345678")
    assert launch(codes, b"b", b"1234") == ["compile", "run"]
    assert launch(codes, b"e", b"1234567890") == launch(codes, b"e", b"1234567890") == ["compile", "run"]


def test_two_that_compile_at_once_leave_one() -> None:
    codes = Bytecode()
    both = [codes.calls(b"source", b"name", b"", b"") for _ in range(2)]
    assert [next(calls).export for calls in both] == ["compile", "compile"]
    assert [calls.send(b"code").export for calls in both] == ["run", "run"]
    assert (len(codes._codes), codes._num_bytes) == (1, 4)


def test_a_program_cannot_plant_code(sandbox: Sandbox) -> None:
    results = {python(sandbox, FORGING) for _ in range(3)}
    assert len(results) == 1
    assert b"forged" in results.pop()  # what it returned, which is no code to anybody
    assert python(sandbox, "def main(): return 'mine'") == b'"mine"'


def test_a_known_source_runs_as_the_first_time(sandbox: Sandbox) -> None:
    source = "def inner(args):\n    return 1 / args\n\ndef main(args):\n    return inner(args)\n"
    assert python(sandbox, source, b"1") == b"1.0"
    errors = [failure(sandbox, source, b"0") for _ in range(2)]
    for error in errors:
        assert "line 2, in inner\n    return 1 / args" in error.traceback
    assert errors[0].traceback == errors[1].traceback


def test_what_the_compiler_remarks_is_in_the_log_of_every_run(sandbox: Sandbox) -> None:
    logs = []
    for _ in range(2):
        host = FakeHost()
        assert python(sandbox, "def main(args): return args is 1\n", host=host) == b"false"
        logs.append(host.logs)
    assert logs[0] == logs[1]
    assert "SyntaxWarning" in "".join(logs[0])


def test_a_source_that_ends_the_compiler_ends_its_own_run(sandbox: Sandbox) -> None:
    failure(sandbox, "x = " + "(" * 5000)
    assert python(sandbox, "def main(): return 1") == b"1"
