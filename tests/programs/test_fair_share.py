"""What programs make their host do is bounded, charged to them, and gives way to others: turns and commands counted."""

import asyncio
import threading

import pytest

from tests.programs.sessions import Host, obj, run
from weft.abi.operations import Op
from weft.programs.calls import tokenize as module
from weft.programs.types import Caller, ChatArgs
from weft.tokenizers.tokenizer import Tokenizer

MESSAGES = obj([{"role": "user", "content": "hi"}])
OWN = obj({"chat_template": "{% for i in range(1000) %}{{ i }}{% endfor %}"})


def test_a_template_of_the_programs_own_is_rendered_off_the_loop_and_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    render_text = module.render_text

    def rendered(args: ChatArgs, tokenizer: Tokenizer) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return render_text(args, tokenizer)

    monkeypatch.setattr(module, "render_text", rendered)

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
