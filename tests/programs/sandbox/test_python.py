"""Programs in Python in the sandbox: what they can do, and how they fail."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
from contextlib import suppress

import pytest

from tests.programs.sandbox.help import CALL, SHORT, FakeHost, execute, failure, opened_with, python
from weft.abi.errors import InvalidRequest, ProgramFailed
from weft.abi.frames import EventKind, pack_event
from weft.programs.sandbox import build_runner
from weft.programs.sandbox.sandbox import Sandbox


@pytest.mark.parametrize(
    ("source", "args", "result"),
    [
        ("async def main(args): return args['a'] + 1", b'{"a": 2}', 3),
        ("def main(args): return [args, 'ü']", '"é"'.encode(), ["é", "ü"]),
        ("async def main(): return None", b"7", None),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\ndef main(): return A(1)",
            b"null",
            {"x": 1},
        ),
    ],
)
def test_main_may_be_async_or_plain_and_takes_args_or_nothing(
    sandbox: Sandbox, source: str, args: bytes, result: object
) -> None:
    assert json.loads(python(sandbox, source, args)) == result


def test_calls_are_answered_and_print_becomes_logs(sandbox: Sandbox) -> None:
    host = FakeHost()
    source = CALL + (
        "async def main(args):\n"
        "    print('one', 'two')\n"
        "    ids = await ask(Op.TOKENIZE, 0, args.encode())\n"
        "    print('three')\n"
        "    return list(struct.unpack('<3i', ids[0]))\n"
    )
    assert python(sandbox, source, b'"abc"', host=host) == b"[97,98,99]"
    assert host.logs == ["one two", "three"]


FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class HeapUse(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def heap_bytes() -> int:
    """Bytes that this process has from `malloc`, without what errors refer to in cycles."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = HeapUse
    found = mallinfo()
    return int(found.hblkhd + found.uordblks)


def test_runs_leave_no_arguments_and_results_behind() -> None:
    sandbox = opened_with("fibers", slots=8)
    args = b'"' + b"x" * (4 << 20) + b'"'
    odd = "import json\njson.dumps = lambda *args, **more: '\\u20ac' * 2_000_000\ndef main(args): raise ValueError"
    before = 0
    for number in range(12):
        if number == 2:
            before = heap_bytes()
        assert python(sandbox, "def main(args): return args", args) == args
        with suppress(ProgramFailed):
            python(sandbox, odd, b"null")
    assert heap_bytes() - before < 12 << 20
    sandbox.close()


def test_bytes_pass_unchanged_both_ways(sandbox: Sandbox) -> None:
    every = bytes(range(256)) * 300

    class Echo(FakeHost):
        def commands(self, data: bytes) -> None:
            super().commands(data)
            for command in self.said[-1:]:
                self.emit(pack_event(EventKind.RESULT, command.call, every, command.blobs[1]))

    source = CALL + (
        "async def main():\n"
        "    every = bytes(range(256)) * 300\n"
        "    there, back = await ask(Op.HTTP, b'{}', every)\n"
        "    return [there == every, back == every]\n"
    )

    async def run() -> bytes:
        return await sandbox.python(source, b"null", Echo(), SHORT).run()

    assert execute(run()) == b"[true,true]"


def test_asyncio_works(sandbox: Sandbox) -> None:
    source = CALL + (
        "async def answer(n):\n"
        "    return struct.unpack('<i', (await ask(Op.TOKENIZE, 0, bytes([n])))[0])[0]\n"
        "async def main():\n"
        "    out = [await asyncio.gather(*map(answer, range(20)))]\n"
        "    async with asyncio.TaskGroup() as group:\n"
        "        tasks = [group.create_task(answer(n)) for n in (1, 2)]\n"
        "    out.append([task.result() for task in tasks])\n"
        "    try:\n"
        "        async with asyncio.timeout(0.01):\n"
        "            await ask(Op.RECEIVE)\n"
        "    except TimeoutError:\n"
        "        out.append('late')\n"
        "    queue, event = asyncio.Queue(), asyncio.Event()\n"
        "    async def feed():\n"
        "        await queue.put(1)\n"
        "        event.set()\n"
        "    feeding = asyncio.create_task(feed())\n"
        "    await event.wait()\n"
        "    await feeding\n"
        "    out.append(await asyncio.wait_for(queue.get(), 1))\n"
        "    await asyncio.gather(asyncio.sleep(0.01), ask(Op.SLEEP, 0.01))\n"
        "    return out\n"
    )
    assert json.loads(python(sandbox, source)) == [list(range(20)), [1, 2], "late", 1]


def test_calls_that_need_no_answer_share_an_exchange(sandbox: Sandbox) -> None:
    async def run() -> tuple[int, int]:
        host = FakeHost()
        source = CALL + (
            "async def main():\n"
            "    for n in range(100):\n"
            "        current().post(Op.STORE_PUT, b'name', b'value')\n"
            "    await ask(Op.TOKENIZE, 0, b'')\n"
        )
        guest = sandbox.python(source, b"null", host, SHORT)
        await guest.run()
        return len(host.said), guest.usage().host_calls

    said, exchanges = execute(run())
    assert said == 101
    assert exchanges < 5


def test_an_error_of_the_host_can_be_caught(sandbox: Sandbox) -> None:
    source = CALL + (
        "async def main():\n"
        "    try:\n"
        "        await ask(Op.STORE_GET, b'x')\n"
        "    except Exception as error:\n"
        "        return str(error)\n"
    )
    assert python(sandbox, source) == b'"no store here"'


def test_a_traceback_shows_the_program_s_own_lines(sandbox: Sandbox) -> None:
    error = failure(sandbox, "def deeper():\n    raise ValueError('bad')\n\ndef main():\n    deeper()\n")
    assert str(error) == "ValueError: bad"
    assert error.traceback.splitlines() == [
        "Traceback (most recent call last):",
        '  File "program.py", line 5, in main',
        "    deeper()",
        '  File "program.py", line 2, in deeper',
        "    raise ValueError('bad')",
        "ValueError: bad",
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def main(:\n", "line 1"),
        ("def main(): pass\nreturn 1\n", "'return' outside function"),
        ("x = 1\n", "no function main"),
        ("def main(): return {1}\n", "set"),
        ("def main(): return float('nan')\n", "JSON"),
        ("import numpy\ndef main(): pass\n", "No module named 'numpy'"),
        ("def main(): raise SystemExit(3)\n", "SystemExit: 3"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\ndef main(): raise E\n", "E, and ValueError"),
    ],
)
def test_what_is_wrong_is_said(sandbox: Sandbox, source: str, message: str) -> None:
    assert message in str(failure(sandbox, source))


def test_arguments_that_are_no_json(sandbox: Sandbox) -> None:
    assert "not JSON" in str(failure(sandbox, "def main(): pass", b"{"))


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("open('/etc/passwd')", "open"),
        ("__import__('os').listdir('/')", "os.listdir"),
        ("__import__('os').mkdir('x')", "os.mkdir"),
        ("__import__('pathlib').Path('/etc/passwd').read_text()", "open"),
        ("__import__('socket').socket()", "socket.socket"),
        ("__import__('socket').create_connection(('127.0.0.1', 80))", "socket.create_connection"),
        ("input()", "input"),
    ],
)
def test_the_outside_is_refused_by_name(sandbox: Sandbox, statement: str, name: str) -> None:
    assert f"PermissionError: {name} is not available" in str(failure(sandbox, f"def main(): {statement}"))


@pytest.mark.parametrize(
    "call", ["open_connection('127.0.0.1', 80)", "to_thread(print)", "create_subprocess_exec('ls')"]
)
def test_asyncio_s_ways_out_are_refused(sandbox: Sandbox, call: str) -> None:
    error = failure(sandbox, f"import asyncio\nasync def main(): await asyncio.{call}")
    assert "PermissionError" in str(error) or "NotImplementedError" in str(error)


def test_a_system_call_that_was_forgotten_ends_its_program_only(sandbox: Sandbox) -> None:
    # The C function below os.stat, which is replaced, is still there: it traps.
    error = failure(sandbox, "import posix\ndef main(): posix.stat('/')")
    assert "sandbox ended the program" in str(error) or "Error" in str(error)
    assert python(sandbox, "def main(): return 1") == b"1"


def test_clocks_and_random_numbers_work(sandbox: Sandbox) -> None:
    source = (
        "import datetime, os, random, secrets, time, uuid\n"
        "def main():\n"
        "    start = time.monotonic()\n"
        "    time.sleep(0.01)\n"
        "    waited = time.monotonic() - start\n"
        "    year = datetime.datetime.now(datetime.timezone.utc).year\n"
        "    same = time.strftime('%Y') == str(time.localtime().tm_year) == str(year)\n"
        "    return [0.01 <= waited < 5, year > 2024, same, len(os.urandom(40)), random.random(),\n"
        "            secrets.token_hex(8), str(uuid.uuid4())]\n"
    )
    first, second = (json.loads(python(sandbox, source)) for _ in range(2))
    assert first[:4] == [True, True, True, 40]
    assert all(a != b for a, b in zip(first[4:], second[4:], strict=True))


def test_the_same_seed_gives_the_same_random_numbers(sandbox: Sandbox) -> None:
    source = "import os, random\ndef main(): return [random.random(), os.urandom(8).hex()]"

    async def run(seed: bytes) -> bytes:
        return await sandbox.python(source, b"null", FakeHost(), SHORT, seed=seed).run()

    assert execute(run(b"one")) == execute(run(b"one")) != execute(run(b"two"))


def test_code_that_programs_compile_themselves(sandbox: Sandbox) -> None:
    source = (
        "def main():\n"
        "    space = {}\n"
        "    exec('def f(x): return x * 2', space)\n"
        "    out = [space['f'](4), eval('1 + 1')]\n"
        "    try:\n"
        "        exec('1 +')\n"
        "    except SyntaxError as error:\n"
        "        out.append([error.filename, error.text])\n"
        "    return out\n"
    )
    assert json.loads(python(sandbox, source)) == [8, 2, ["<string>", "1 +\n"]]


def test_what_the_host_raises_ends_the_run_and_is_raised(sandbox: Sandbox) -> None:
    class Refusing(FakeHost):
        def commands(self, data: bytes) -> None:
            raise InvalidRequest("not like that")

    async def run() -> None:
        source = "try:\n    print('x')\nexcept BaseException: pass\ndef main(): print('y')"
        await sandbox.python(source, b"null", Refusing(), SHORT).run()

    with pytest.raises(InvalidRequest, match="not like that"):
        execute(run())


def test_nothing_of_one_run_is_seen_by_the_next(sandbox: Sandbox) -> None:
    source = (
        "import builtins\ndef main():\n    seen = hasattr(builtins, 'mark')\n    builtins.mark = 1\n    return seen"
    )
    assert python(sandbox, source) == python(sandbox, source) == b"false"


def test_many_at_once(sandbox: Sandbox) -> None:
    source = CALL + (
        "async def main(n):\n"
        "    await ask(Op.SLEEP, 0.01)\n"
        "    return struct.unpack('<i', (await ask(Op.TOKENIZE, 0, bytes([n])))[0])[0]\n"
    )

    async def run() -> list[bytes]:
        return await asyncio.gather(*(sandbox.python(source, b"%d" % n, FakeHost(), SHORT).run() for n in range(200)))

    assert execute(run()) == [b"%d" % n for n in range(200)]


def test_a_guest_runs_once(sandbox: Sandbox) -> None:
    async def run() -> None:
        guest = sandbox.python("def main(): pass", b"null", FakeHost(), SHORT)
        await guest.run()
        with pytest.raises(RuntimeError, match="once"):
            await guest.run()

    execute(run())


def test_a_large_result_within_its_limit(sandbox: Sandbox) -> None:
    assert len(python(sandbox, "def main(): return 'x' * (4 << 20)")) == (4 << 20) + 2


def test_events_that_come_while_a_plain_function_sleeps(sandbox: Sandbox) -> None:
    source = CALL + (
        "import time\n"
        "async def main():\n"
        "    call = asyncio.ensure_future(wait())\n"
        "    await asyncio.sleep(0)\n"
        "    time.sleep(0.02)\n"
        "    return await call\n"
        "async def wait():\n"
        "    return len(await ask(Op.SLEEP, 0.001))\n"
    )
    assert python(sandbox, source) == b"0"


def test_the_whole_of_the_library_is_there(sandbox: Sandbox) -> None:
    source = (
        "import pkgutil, sys, weft.sdk\n"
        "def main():\n"
        "    return sorted(name for name in sys.modules if name.startswith('weft.sdk.'))\n"
    )
    names = json.loads(python(sandbox, source))
    sources = [path.relative_to(build_runner.PACKAGE) for path in build_runner.sources()]
    modules = {".".join(("weft", *path.with_suffix("").parts)) for path in sources if path.parts[0] == "sdk"}
    assert set(names) == {name for name in modules if not name.endswith("__init__")}


def test_failures_carry_the_seam_s_types(sandbox: Sandbox) -> None:
    error = failure(sandbox, "def main(): 1 / 0")
    assert isinstance(error, ProgramFailed)
    assert error.kind == "program_failed"
