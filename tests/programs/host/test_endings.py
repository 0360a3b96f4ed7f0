"""However a program ends, and whatever its result is: its run ends once, in words that can be sent and kept."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import wasmtime

from tests.programs.help import settle
from tests.programs.host.help import TENANT, Bench, spec, with_host
from weft.abi.errors import InvalidRequest
from weft.core.wire.errors import MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS, shortened
from weft.programs.host import wire
from weft.programs.quota.limits import MAX_NETWORK, MAX_NETWORK_CHARS, Limits
from weft.programs.registry import Quota, checked_code
from weft.programs.run.runs import Run, RunChange, RunRecord, RunSpec

ENDINGS = {
    "a lone surrogate": "raise ValueError('\\ud800')",
    "lone surrogates in the result": "return '\\ud800'",
    "a huge text": "raise ValueError('x' * 20_000_000)",
    "a huge name": "raise type('X' * 1_000_000, (Exception,), {})('no')",
    "a text that raises": "raise type('Bad', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "a text that exits": "raise type('Bad', (Exception,), {'__str__': lambda self: exit_now()})()",
    "a text that is none": "raise type('Bad', (Exception,), {'__str__': lambda self: 5})()",
    "an exit code that raises": "raise SystemExit(type('Bad', (), {'__repr__': lambda self: 1 / 0})())",
    "an exit": "raise SystemExit('\\ud800')",
    "an interruption": "raise KeyboardInterrupt('\\ud800')",
    "a cancellation": "import asyncio\n        raise asyncio.CancelledError('\\ud800')",
    "a generator's exit": "raise GeneratorExit",
    "a base exception": "raise type('Base', (BaseException,), {})('\\ud800')",
    "recursion": "f = lambda: f()\n        f()",
    "an error of Weft": "from weft.sdk import ProgramFailed\n        raise ProgramFailed('\\ud800')",
    "an error of Weft whose text raises": (
        "from weft.sdk import ProgramFailed\n"
        "        raise type('Bad', (ProgramFailed,), {'__str__': lambda self: 1 / 0})('no')"
    ),
    "a chain of errors": (
        "error = None\n        for n in range(3000):\n"
        "            error, before = ValueError(n), error\n            error.__cause__ = before\n        raise error"
    ),
    "no JSON": "return object()",
    "not a number": "return float('nan')",
    "a result that holds itself": "a = []\n        a.append(a)\n        return a",
    "a result nested deeply": "a = []\n        for _ in range(100_000): a = [a]\n        return a",
    "a result whose items raise": "return type('Bad', (dict,), {'items': lambda self: 1 / 0})(a=1)",
}


def source_of(body: str) -> str:
    return f"""
    def exit_now():
        raise SystemExit(3)

    async def main(args):
        {body}
    """


def checked(record: RunRecord, result: bytes | None) -> None:
    """It can be sent to the front, written down, and read again."""
    sent = wire.decode_from_host(wire.encode(wire.RunOver(record, result)))
    assert isinstance(sent, wire.RunOver)
    assert msgspec.json.decode(msgspec.json.encode(record), type=RunRecord) == sent.record
    assert len(msgspec.json.encode(record)) < 128 << 10


async def ends_once(bench: Bench, what: RunSpec) -> Run:
    told: list[RunChange] = []
    bench.host.on_run = lambda run: setattr(run, "watcher", lambda run, news: told.append(news))
    run = bench.host.launch(what, TENANT)
    await run.wait()
    await settle()
    statuses = [news.status for news in told if news.status is not None]
    assert statuses == ["running", run.status]
    assert not bench.host._active
    checked(run.record(), run.result)
    return run


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "sandboxed"])
def test_however_it_ends_it_ends_once(trusted: bool) -> None:
    async def test(bench: Bench) -> None:
        for name, body in ENDINGS.items():
            run = await ends_once(bench, spec(source_of(body), trusted=trusted))
            assert run.status == "failed", name
            assert run.record().error is not None, name
            assert run.record().error.kind in ("program_failed", "limit_exceeded"), (name, run.record().error)

    with_host(test)


SURROGATES = {
    "the request cannot be used": [
        "await http.get('http://\\ud800/')",
        "await http.get('http://a.example/', headers={'a': '\\ud800'})",
    ],
    "the grammar cannot be used": ["await Matcher(choice(['\\ud800'])).push()"],
    "the generation cannot be used": ["x = Context(); x.user('a'); await x.generate(grammar=choice(['\\ud800']))"],
}


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "sandboxed"])
def test_what_has_lone_surrogates_is_named(trusted: bool, caplog: pytest.LogCaptureFixture) -> None:
    imports = "from weft.sdk import Context, Matcher, choice, http"

    async def test(bench: Bench) -> None:
        for message, bodies in SURROGATES.items():
            for body in bodies:
                run = await ends_once(bench, spec(source_of(f"{imports}; {body}"), trusted=trusted))
                error = run.record().error
                assert error is not None
                assert f"{message}: it has text with lone surrogates" in error.message, body

    with_host(test)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


FORGED = "import weft.sdk.main as program\nprogram.encode = lambda value, what: {!r}\nasync def main(args): pass\n"
RESULTS = {
    "fields of its own": b'1,"status":"finished","usage":{}',
    "two values": b"1 2",
    "none": b"",
    "not a number": b"[NaN]",
    "an infinity": b"-Infinity",
    "an open string": b'"a',
    "an integer that Python does not read": b'{"a": ["' + b"1" * 9000 + b'", -' + b"1" * 5000 + b"]}",
    "another encoding": '{"a":1}'.encode("utf-16"),
    "no UTF-8": b'"\xff"',
    "a lone surrogate": b'"\\ud800"',
    "a lone surrogate in UTF-8": b'"\xed\xa0\x80"',
    "depth without end": b"[" * 100_000 + b"]" * 100_000,
}


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "sandboxed"])
def test_a_result_is_one_json_value(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program replaces what writes its result."""
    from weft.sdk import main as program

    monkeypatch.setattr(program, "encode", program.encode)  # put back afterwards

    async def test(bench: Bench) -> None:
        for name, result in RESULTS.items():
            run = await ends_once(bench, spec(FORGED.format(result), trusted=trusted))
            assert run.status == "failed", name
            assert run.result is None
        for digits in (b'["%b\\"", {"%b": "1"}]', b"%b.5", b"-0.%b", b"1e-%b"):
            run = await ends_once(bench, spec(FORGED.format(digits.replace(b"%b", b"9" * 5000)), trusted=trusted))
            assert run.status == "finished", digits
        run = await ends_once(bench, spec(FORGED.format(b' {"a":\n[1]} '), trusted=trusted))
        assert run.result == b' {"a": [1]} '  # on one line

    with_host(test)


def module(result: bytes) -> RunSpec:
    data = "".join(f"\\{byte:02x}" for byte in result)
    text = f"""(module (import "weft" "result" (func $result (param i32 i32))) (memory (export "memory") 4)
      (data (i32.const 0) "{data}") (func (export "run") (call $result (i32.const 0) (i32.const {len(result)}))))"""
    code = checked_code(bytes(wasmtime.wat2wasm(text)), "wasm", Quota(), "module")
    return RunSpec(code=code, args=b"null")


def test_a_module_s_result_is_one_json_value() -> None:
    async def test(bench: Bench) -> None:
        for name, result in RESULTS.items():
            run = await ends_once(bench, module(result))
            assert (run.status, run.result) == ("failed", None), name
        assert json.loads(await (await ends_once(bench, module(b'{"a":[1]}'))).answer()) == {"a": [1]}

    with_host(test)


def test_a_forged_failure_is_bounded() -> None:
    forged = "import json\njson.dumps = lambda *args, **options: {}\nasync def main(args): raise ValueError('no')\n"
    texts = ("'x' * 14_000_000", '\'{"kind": "failed", "message": [1]}\'', "'[' * 900_000", "'\\ud800'")

    async def test(bench: Bench) -> None:
        for text in texts:
            run = await ends_once(bench, spec(forged.format(text), trusted=False))
            assert run.status == "failed"

    with_host(test)


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "sandboxed"])
def test_texts_of_errors_are_kept_in_part_and_say_so(trusted: bool) -> None:
    body = "raise ValueError('begin' + 'x' * 5_000_000 + 'end')"

    async def test(bench: Bench) -> None:
        error = (await ends_once(bench, spec(source_of(body), trusted=trusted))).record().error
        assert error is not None
        assert error.message.startswith("ValueError: begin")
        assert error.message.endswith("end")
        assert "characters are left out" in error.message
        assert len(error.message) < MAX_MESSAGE_CHARS + 100
        assert len(error.traceback) < MAX_TRACEBACK_CHARS + 100

    with_host(test)


def test_text_that_is_kept() -> None:
    assert shortened("short", 10) == "short"
    assert shortened("a\ud800b", 10) == "a\\ud800b"
    assert shortened("a" * 50 + "b" * 50, 10) == "aaaaa … (90 characters are left out) … bbbbb"


@pytest.mark.parametrize("network", [["a.example"] * (MAX_NETWORK + 1), ["a" * (MAX_NETWORK_CHARS + 1)]])
def test_a_list_of_hosts_is_bounded(network: Any) -> None:
    with pytest.raises(InvalidRequest, match="at most") as refused:
        Limits(network=network)
    assert refused.value.param == "limits.network"
