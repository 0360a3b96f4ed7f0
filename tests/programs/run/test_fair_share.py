"""What programs make their host do is bounded, charged to them, and gives way to others: turns and commands counted."""

import asyncio
import itertools
import threading

import msgspec
import pytest

from tests.programs.help import settle
from tests.programs.host.help import TENANT, spec
from tests.programs.sessions import Host, obj, run
from weft.abi.frames import pack
from weft.abi.operations import Op
from weft.config import ProgramsConfig
from weft.programs.host.guest_factory import GuestFactory
from weft.programs.host.process import host_parts
from weft.programs.host.program_host import HostOptions, ProgramHost
from weft.programs.quota.limits import Limits
from weft.programs.quota.loop_share import LoopShare
from weft.programs.run.calls import tokenize as module
from weft.programs.run.command_queue import CommandQueue
from weft.programs.run.model import ProgramModel
from weft.programs.runtime import Runtime
from weft.programs.types import Caller
from weft.store.values import MemoryValueStore
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine
from weft.tokenizers.chats import ChatPrompt
from weft.tokenizers.tokenizer import Tokenizer

MESSAGES = obj([{"role": "user", "content": "hi"}])
WAIT = """
    from weft.sdk import run
    async def main():
        await run.receive()
"""
OWN = obj({"chat_template": "{% for i in range(1000) %}{{ i }}{% endfor %}"})


def test_a_template_of_the_programs_own_is_rendered_off_the_loop_and_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    render = module.render

    def rendered(args: ChatPrompt, tokenizer: Tokenizer) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return render(args, tokenizer)

    monkeypatch.setattr(module, "render", rendered)

    async def test(host: Host) -> None:
        program = host.program()
        await program.result(Op.RENDER, 1, MESSAGES, OWN)
        assert threads == [False]
        assert program.outlet.cpu_s > 0
        await program.result(Op.RENDER, 1, MESSAGES, b"")
        assert threads == [False, True]

    run(test)


def test_what_answers_a_call_is_charged() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        await program.result(Op.STORE_PUT, b"name", b"value")
        after_a_call = program.outlet.cpu_s
        assert after_a_call > 0
        await program.result(Op.TOKENIZE, 0, b"word " * 4000)
        long_text = program.outlet.cpu_s - after_a_call
        assert long_text > 0
        await program.result(Op.MATCHER_OPEN, 1, obj({"kind": "regex", "text": "a+"}))
        assert program.outlet.cpu_s > after_a_call + long_text

    run(test)


def test_a_tenant_that_floods_the_tokenizer_waits_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, started = threading.Event(), threading.Semaphore(0)
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> bytes:
        if text.startswith("slow"):
            started.release()
            gate.wait()
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def test(host: Host) -> None:
        flood = host.program()
        other = host.program(caller=Caller(request_id="r", tenant="u", namespace="u"))
        calls = [flood.ask(Op.TOKENIZE, 0, b"slow" * 4000) for _ in range(20)]
        await asyncio.to_thread(started.acquire)
        try:
            await other.result(Op.TOKENIZE, 0, b"fast" * 4000)
            assert not any(flood.kinds(call) for call in calls)
        finally:
            gate.set()
        for call in calls:
            await flood.end_of(call)

    run(test)


def test_many_commands_of_a_run_are_charged_and_give_way() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(host_calls=10**6))
        readings = itertools.count()
        share = LoopShare(pass_s=50, turn_s=50, clock=lambda: float(next(readings)))
        queue = CommandQueue(program.session, program.budget, share, tenant="t", end=program.outlet.end)
        queue.commands(b"".join(pack(Op.CANCEL, 0, number) for number in range(5000)))
        seen = []
        while queue.behind() is not None:
            seen.append(program.session.usage().host_calls)
            await asyncio.sleep(0)
        assert program.session.usage().host_calls == 5000
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 52
        assert program.outlet.cpu_s > 0

    run(test)


@pytest.mark.parametrize("trusted", [True, False])
def test_what_its_host_does_for_a_run_counts_as_its_processor_time(trusted: bool) -> None:
    async def body() -> None:
        runtime = Runtime(FakeEngine(), byte_tokenizer())
        parts = host_parts([ProgramModel("fake", runtime)], ProgramsConfig(), MemoryValueStore(), GuestFactory())
        host = ProgramHost(parts, HostOptions(allow_trusted=True))
        one = host.launch(spec(WAIT, trusted=True, limits=Limits(cpu_s=5)), TENANT)
        [task] = host._active
        task.run.spec = msgspec.structs.replace(task.run.spec, trusted=trusted)
        await settle()
        task.charge(4.0)
        assert one.record().usage.cpu_s >= 4
        task.charge(4.0)
        await settle()
        if trusted:
            assert one.status == "running"
            one.cancel()
        record = await one.wait()
        assert record.usage.cpu_s >= 8
        assert (record.error.kind, record.error.param) == (
            ("run_cancelled", None) if trusted else ("limit_exceeded", "cpu_s")
        )
        await host.close()
        await parts.close()

    asyncio.run(body())
