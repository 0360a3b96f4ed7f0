"""Core Wasm modules: the ABI of docs/wasm.md, what is refused, and the examples in C and Rust."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import wasmtime

from tests.programs.sandbox.help import EXAMPLES, SHORT, FakeHost, execute
from weft.abi.errors import InvalidRequest, LimitExceeded, ProgramFailed, WeftError
from weft.abi.frames import WireError, pack
from weft.abi.operations import Op
from weft.programs.sandbox.compiled import MODULE_BYTES
from weft.programs.sandbox.machine import GuestLimits
from weft.programs.sandbox.sandbox import Sandbox

IMPORTS = """
(import "weft" "exchange" (func $exchange (param i32 i32 f64) (result i32)))
(import "weft" "read" (func $read (param i32 i32) (result i32)))
(import "weft" "args" (func $args (param i32 i32) (result i32)))
(import "weft" "result" (func $result (param i32 i32)))
(import "weft" "fail" (func $fail (param i32 i32)))
(import "weft" "now" (func $now (result f64)))
(import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
(import "wasi_snapshot_preview1" "random_get" (func $random_get (param i32 i32) (result i32)))
(import "wasi_snapshot_preview1" "clock_time_get" (func $clock (param i32 i64 i32) (result i32)))
(import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
(import "wasi_snapshot_preview1" "path_open"
  (func $path_open (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
(import "other" "thing" (func $thing))
"""


def wat(body: str, data: str = "", *, memory: str = '(memory (export "memory") 2)') -> bytes:
    text = f'(module {IMPORTS} {memory} {data} (func (export "run") {body}))'
    return bytes(wasmtime.wat2wasm(text))


def escaped(data: bytes) -> str:
    return "".join(f"\\{byte:02x}" for byte in data)


def module(
    sandbox: Sandbox,
    code: bytes,
    args: bytes = b"null",
    *,
    limits: GuestLimits = SHORT,
    host: FakeHost | None = None,
    seed: bytes = b"seed",
) -> bytes:
    compiled = sandbox.compile(code)

    async def run() -> bytes:
        return await sandbox.module(compiled, args, host or FakeHost(), limits, seed=seed).run()

    return execute(run())


@pytest.mark.parametrize("language", ["c", "rust"])
def test_the_examples(sandbox: Sandbox, language: str) -> None:
    host = FakeHost()
    code = (EXAMPLES / language / "complete.wasm").read_bytes()
    prompt = 'line "one"\nand \\ tab\tüé' if language == "rust" else 'line "one"\nand \\ tab\t'
    result = module(sandbox, code, json.dumps(prompt, ensure_ascii=False).encode(), host=host)
    assert json.loads(result) == prompt
    assert host.logs == ["tokenizing"]
    assert [command.op for command in host.said] == [
        *(Op.LOG, Op.TOKENIZE, Op.SEQ_OPEN, Op.SEQ_APPEND, Op.SEQ_GENERATE, Op.SEQ_RELEASE)
    ]
    assert json.loads(host.said[4].blobs[0])["stop"] == {"max_tokens": 16}
    assert host.sequences == {}


@pytest.mark.parametrize("language", ["c", "rust"])
def test_the_examples_fail_with_their_own_message(sandbox: Sandbox, language: str) -> None:
    code = (EXAMPLES / language / "complete.wasm").read_bytes()
    with pytest.raises(ProgramFailed, match="must be a JSON string"):
        module(sandbox, code, b"7")


def test_arguments_and_result(sandbox: Sandbox) -> None:
    code = wat("(drop (call $args (i32.const 0) (i32.const 100))) (call $result (i32.const 0) (i32.const 8))")
    assert module(sandbox, code, b'{"a": 1}') == b'{"a": 1}'


def test_without_a_result_it_is_null(sandbox: Sandbox) -> None:
    assert module(sandbox, wat("")) == b"null"


def test_an_exchange_that_waits(sandbox: Sandbox) -> None:
    sleep = pack(Op.SLEEP, 9, 0.01)
    body = f"""(drop (call $exchange (i32.const 0) (i32.const {len(sleep)}) (f64.const -1)))
      (drop (call $read (i32.const 100) (i32.const 100)))
      (if (i32.ne (i32.load (i32.const 105)) (i32.const 9)) (then unreachable))"""
    host = FakeHost()
    assert module(sandbox, wat(body, f'(data (i32.const 0) "{escaped(sleep)}")'), host=host) == b"null"
    assert host.waits == 1


def test_output_clocks_and_random_numbers(sandbox: Sandbox) -> None:
    data = '(data (i32.const 16) "\\20\\00\\00\\00\\05\\00\\00\\00") (data (i32.const 32) "hello")'
    body = """(drop (call $fd_write (i32.const 1) (i32.const 16) (i32.const 1) (i32.const 64)))
      (if (i32.ne (i32.load (i32.const 64)) (i32.const 5)) (then unreachable))
      (drop (call $clock (i32.const 0) (i64.const 1) (i32.const 72)))
      (if (f64.lt (call $now) (f64.const 1e9)) (then unreachable))
      (if (i64.lt_u (i64.load (i32.const 72)) (i64.const 1000000000000000000)) (then unreachable))
      (drop (call $random_get (i32.const 128) (i32.const 4)))
      (i32.store8 (i32.const 128) (i32.add (i32.const 48) (i32.and (i32.load8_u (i32.const 128)) (i32.const 7))))
      (call $result (i32.const 128) (i32.const 1))"""
    code = wat(body, data)
    host = FakeHost()
    first = module(sandbox, code, host=host)
    assert host.logs == ["hello"]
    assert module(sandbox, code) == first
    assert len({module(sandbox, code, seed=b"%d" % n) for n in range(20)}) > 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("(call $exit (i32.const 3))", "exited with status 3"),
        ("unreachable", "unreachable"),
        ("(drop (i32.load (i32.const 9000000)))", "out of bounds"),
        ("(drop (i32.div_u (i32.const 1) (i32.const 0)))", "divide by zero"),
        ("(call $thing)", "unknown import"),
        (
            f"(drop (call $path_open {'(i32.const 0)' * 5} (i64.const 0) (i64.const 0) (i32.const 0) (i32.const 0)))",
            "path_open",
        ),
        ("(call $result (i32.const 131000) (i32.const 1000))", "not in its memory"),
        ("(drop (call $exchange (i32.const -1) (i32.const 9) (f64.const 0)))", "not in its memory"),
        (f"(drop (call $exchange (i32.const 0) (i32.const {(32 << 20) + 1}) (f64.const 0)))", "33554432 is the most"),
        ("(drop (call $args (i32.const 131071) (i32.const 100)))", "not in its memory"),
        ("(call $fail (i32.const 0) (i32.const 4))", "text"),
    ],
)
def test_failures(sandbox: Sandbox, body: str, message: str) -> None:
    with pytest.raises(ProgramFailed, match=message):
        module(sandbox, wat(body, '(data (i32.const 0) "text")'))


def test_exiting_with_status_0_is_fine(sandbox: Sandbox) -> None:
    assert module(sandbox, wat("(call $exit (i32.const 0)) unreachable")) == b"null"


def test_garbage_ends_the_run(sandbox: Sandbox) -> None:
    with pytest.raises(WireError):
        module(sandbox, wat("(drop (call $exchange (i32.const 0) (i32.const 10) (f64.const 0)))"))


def test_a_run_that_returns_a_status(sandbox: Sandbox) -> None:
    text = '(module (memory (export "memory") 1) (func (export "run") (result i32) (i32.const 4)))'
    with pytest.raises(ProgramFailed, match="run returned 4"):
        module(sandbox, bytes(wasmtime.wat2wasm(text)))


def test_limits(sandbox: Sandbox) -> None:
    with pytest.raises(LimitExceeded) as caught:
        module(sandbox, wat("(loop $on (br $on))"), limits=GuestLimits(cpu_s=0.05))
    assert caught.value.param == "cpu_s"
    with pytest.raises(LimitExceeded) as caught:
        module(
            sandbox,
            wat("(loop $on (drop (call $args (i32.const 0) (i32.const 0))) (br $on))"),
            limits=GuestLimits(host_calls=100),
        )
    assert caught.value.param == "host_calls"
    grow = "(loop $on (br_if $on (i32.ne (memory.grow (i32.const 1)) (i32.const -1)))) unreachable"
    with pytest.raises(LimitExceeded) as caught:
        module(sandbox, wat(grow), limits=GuestLimits(memory_bytes=1 << 20))
    assert caught.value.param == "memory_bytes"
    with pytest.raises(LimitExceeded) as caught:
        module(sandbox, wat("(call $result (i32.const 0) (i32.const 100))"), limits=GuestLimits(result_bytes=10))
    assert caught.value.param == "result_bytes"


def test_usage_and_deep_recursion(sandbox: Sandbox) -> None:
    text = """(module (memory (export "memory") 3)
      (func $f (param i32) (result i32) (i32.add (i32.const 1) (call $f (local.get 0))))
      (func (export "run") (drop (call $f (i32.const 0)))))"""
    compiled = sandbox.compile(bytes(wasmtime.wat2wasm(text)))

    async def run() -> int:
        guest = sandbox.module(compiled, b"null", FakeHost(), SHORT)
        with pytest.raises(ProgramFailed, match="stack"):
            await guest.run()
        return guest.usage().memory_bytes

    assert execute(run()) == 3 << 16


def test_killed_while_it_waits_and_while_it_computes(sandbox: Sandbox) -> None:
    class Stopped(WeftError):
        pass

    async def run() -> None:
        waiting = sandbox.compile(wat("(drop (call $exchange (i32.const 0) (i32.const 0) (f64.const -1)))"))
        spinning = sandbox.compile(wat("(loop $on (br $on))"))
        for compiled in (waiting, spinning):
            guest = sandbox.module(compiled, b"null", FakeHost())
            running = asyncio.ensure_future(guest.run())
            await asyncio.sleep(0)
            # Whether it has begun or not: it ends.
            guest.kill(Stopped("enough"))
            with pytest.raises(Stopped):
                await running

    execute(run())


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (b"", "no core Wasm module"),
        (b"\0asm\x0d\0\1\0", "components are not taken"),
        (b"\0asm\1\0\0\0garbage", "refused"),
        (b"\0asm\1\0\0\0" + bytes(MODULE_BYTES), "may have"),
        (b'(module (memory (export "memory") 1))', "neither `run` nor `_start`"),
        (b'(module (func (export "run")))', "no memory"),
        (b'(module (memory (export "memory") 1) (func (export "run") (param i32)))', "must take nothing"),
        (
            b'(module (import "a" "b" (global i32)) (memory (export "memory") 1) (func (export "run")))',
            "only functions",
        ),
        (
            b'(module (import "weft" "now" (func (result i32))) (memory (export "memory") 1) (func (export "run")))',
            "another type",
        ),
        (b'(module (memory (export "memory") 1 1 shared) (func (export "run")))', "refused"),
        (b'(module (memory (export "memory") i64 1) (func (export "run")))', "refused"),
    ],
)
def test_what_is_refused_when_it_is_compiled(sandbox: Sandbox, code: bytes, message: str) -> None:
    if code.startswith(b"("):
        code = bytes(wasmtime.wat2wasm(code))
    with pytest.raises(InvalidRequest, match=message):
        sandbox.compile(code)


def test_more_memory_than_there_is_at_the_start(sandbox: Sandbox) -> None:
    code = wat("", memory='(memory (export "memory") 1000)')
    with pytest.raises(LimitExceeded, match="to start"):
        module(sandbox, code, limits=GuestLimits(memory_bytes=1 << 20))


@pytest.mark.parametrize("table", ["(table 1000000 funcref)", "(table 1 funcref)"])
def test_tables_are_limited(sandbox: Sandbox, table: str) -> None:
    text = f"""(module (memory (export "memory") 1) {table} (func (export "run") (result i32)
      (i32.ne (table.grow 0 (ref.null func) (i32.const 1000000)) (i32.const -1))))"""
    code = bytes(wasmtime.wat2wasm(text))
    if "1000000 f" in table:
        with pytest.raises((InvalidRequest, ProgramFailed), match=r"exceeds|table"):
            module(sandbox, code)
    else:
        assert module(sandbox, code) == b"null"


def test_a_start_function_that_never_ends(sandbox: Sandbox) -> None:
    text = """(module (memory (export "memory") 1) (func $start (loop $on (br $on))) (start $start)
      (func (export "run")))"""
    with pytest.raises(LimitExceeded):
        module(sandbox, bytes(wasmtime.wat2wasm(text)), limits=GuestLimits(cpu_s=0.05))


def test_a_start_function_may_not_touch_memory_through_its_host(sandbox: Sandbox) -> None:
    text = """(module (import "weft" "args" (func $args (param i32 i32) (result i32))) (memory (export "memory") 1)
      (func $start (drop (call $args (i32.const 0) (i32.const 4)))) (start $start) (func (export "run")))"""
    with pytest.raises(ProgramFailed, match="not in its memory"):
        module(sandbox, bytes(wasmtime.wat2wasm(text)))


def test_events_are_read_piece_by_piece(sandbox: Sandbox) -> None:
    sleep = pack(Op.SLEEP, 9, 0.0)
    body = f"""(local $n i32)
      (drop (call $exchange (i32.const 0) (i32.const {len(sleep)}) (f64.const -1)))
      (loop $on (br_if $on (call $read (i32.add (i32.const 100) (local.get $n)) (i32.const 1))
        (local.set $n (i32.add (local.get $n) (i32.const 1)))))
      (if (i32.ne (local.get $n) (i32.const 11)) (then unreachable))
      (if (i32.ne (i32.load (i32.const 105)) (i32.const 9)) (then unreachable))"""
    assert module(sandbox, wat(body, f'(data (i32.const 0) "{escaped(sleep)}")')) == b"null"


def test_compiling_twice_gives_the_same(sandbox: Sandbox) -> None:
    code = wat("")
    assert sandbox.compile(code) is sandbox.compile(code)


def test_the_header_and_the_bindings_agree_with_the_wire() -> None:
    header = (EXAMPLES / "c" / "weft.h").read_text()
    bindings = (EXAMPLES / "rust" / "weft.rs").read_text()
    for op in (Op.LOG, Op.SLEEP, Op.TOKENIZE, Op.SEQ_OPEN, Op.SEQ_APPEND, Op.SEQ_GENERATE, Op.SEQ_RELEASE):
        assert f"WEFT_{op.name} = {op.value}" in header
        assert f"pub const {op.name}: u8 = {op.value};" in bindings


def test_the_document_names_every_import() -> None:
    from weft.programs.sandbox.imports import CLOCKS, IMPORTS

    text = (Path(__file__).resolve().parents[3] / "docs" / "wasm.md").read_text()
    assert all(f"`{function.name}" in text for function in (*IMPORTS, *CLOCKS))
