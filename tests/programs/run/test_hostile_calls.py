"""Calls that mean harm: whatever a program writes is its own error, and stays bounded."""

from __future__ import annotations

import gc
import json
import struct
import weakref
from typing import Any

import pytest

from tests.programs.help import settle
from tests.programs.host.help import TENANT, Bench, spec, with_host
from weft.abi.errors import InvalidRequest, LimitExceeded, Overloaded
from weft.core.sampling import SamplingParams, StopParams
from weft.programs.history import History
from weft.programs.host.program_host import HostOptions, ProgramHost
from weft.programs.quota.limits import Limits
from weft.programs.run.messages import MAX_WAITING_BYTES, MESSAGE_COST_BYTES, MessageQueue, UnreadBytes, one_line
from weft.programs.run.runs import KEPT_LOG_BYTES, LINE_COST_BYTES, Run, log_line
from weft.programs.wire_sizes import check_sizes

ASK = """
    from weft.sdk.channel import current
    from weft.sdk.errors import ProgramError
    from weft.abi.operations import Op

    async def kind_of(op, *values):
        try:
            await current().ask(op, *values)
        except ProgramError as error:
            return error.kind
"""
DEEP = "(b'[' * 100000 + b']' * 100000)"


def asked(*calls: str) -> str:
    return (
        ASK
        + "\n    async def main():\n        return ["
        + ", ".join(f"await kind_of({call})" for call in calls)
        + "]\n"
    )


def test_json_nested_too_deeply_is_the_programs_own_error(caplog: pytest.LogCaptureFixture) -> None:
    source = asked(
        f"Op.HTTP, b'{{\"url\":' + {DEEP}[:60000], b''",
        f'Op.LAUNCH, 1, b\'{{"source":"def main(): pass","args":\' + {DEEP} + b\'}}\'',
        f'Op.LAUNCH, 2, b\'{{"source":"def main(): pass","limits":{{"cpu_s":\' + {DEEP} + b\'}}}}\'',
        f"Op.RENDER, 1, b'[{{\"role\":\"user\",\"content\":' + {DEEP} + b'}}]', b'{{}}'",
        f"Op.MATCHER_OPEN, 1, b'{{\"kind\":' + {DEEP} + b'}}'",
    )

    async def body(bench: Bench) -> None:
        assert json.loads(await bench.launch(source).answer()) == ["invalid_request"] * 5

    with_host(body)
    assert not caplog.records


def test_numbers_that_no_message_can_carry_are_refused_where_they_are_asked() -> None:
    about = [{"sampling": {"top_k": 2**70}}, {"sampling": {"top_k": 2**63}}, {"sampling": {"seed": 2**70}},
             {"stop": {"max_tokens": 2**63}}, {"stop": {"min_tokens": 2**70}}, {"stop": {"stop_token_ids": [2**70]}},
             {"sampling": {"logit_bias": {str(2**70): 1}}}]  # fmt: skip
    calls = [f"Op.SEQ_GENERATE, 1, 0, {json.dumps(one).encode()!r}" for one in about]
    source = asked(*calls).replace("        return [", "        current().post(Op.SEQ_OPEN, 1, 0)\n        return [")

    async def body(bench: Bench) -> None:
        assert json.loads(await bench.launch(source).answer()) == ["invalid_request"] * len(about)

    with_host(body)


@pytest.mark.parametrize("index", [-1, 1 << 31, 1 << 63])
def test_the_number_of_a_draw_is_bounded(index: int) -> None:
    empty, token = b"", struct.pack("<I", 5)
    about = json.dumps({"index": index}).encode()
    call = f"Op.FORWARD_SAMPLE, 1, {empty!r}, {token!r}, {token!r}, {empty!r}, {empty!r}, {about!r}"

    async def body(bench: Bench) -> None:
        assert json.loads(await bench.launch(asked(call)).answer()) == ["invalid_request"]

    with_host(body)


def test_check_sizes_names_the_field() -> None:
    check_sizes(SamplingParams(top_k=5, seed=-(2**63), logit_bias={1: 2.0}))
    check_sizes(StopParams(max_tokens=2**31 - 1))
    for params, name in [
        (SamplingParams(logit_bias={2**65: 1.0}), "logit_bias"),
        (StopParams(stop_token_ids=[-(2**65)]), "stop_token_ids"),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            check_sizes(params)
        assert refused.value.param == name


def test_empty_lines_of_a_log_are_bounded() -> None:
    run = Run(spec("def main(): pass"), "t")
    most = KEPT_LOG_BYTES // LINE_COST_BYTES
    for _ in range(most + 10):
        run.log(log_line(1, ""))
    assert len(run.logs()) == most
    assert run.lost_log_lines == 10

    source = ASK + "\n    async def main():\n        for _ in range(100):\n            current().post(Op.LOG, 1, b'')\n"

    async def body(bench: Bench) -> None:
        ended = bench.launch(source, limits=Limits(log_bytes=50 * LINE_COST_BYTES))
        with pytest.raises(LimitExceeded, match="log_bytes"):
            await ended.answer()

    with_host(body)


def test_empty_messages_that_wait_are_bounded() -> None:
    waiting = UnreadBytes()
    queue = MessageQueue(1 << 62, waiting)
    most = MAX_WAITING_BYTES // (MESSAGE_COST_BYTES + 1)
    assert all(queue.put(b"0") for _ in range(most))
    assert not queue.put(b"0")
    assert queue.pop() == b"0"
    assert queue.put(b"0")
    queue.clear()
    assert waiting.num_bytes == 0


def test_one_line_means_the_same() -> None:
    assert json.loads(one_line(b'{"a":\r\n\n["\\n"]}')) == {"a": ["\n"]}
    assert b"\n" not in one_line(b"[\n1\r]")


def test_the_tenant_with_most_content_loses_its_oldest() -> None:
    history = History(max_bytes=1000)

    def ended(tenant: str, size: int) -> Run:
        run = Run(spec("def main(): pass"), tenant)
        history.add(run)
        run.start()
        run.finish(b"x" * size)
        history.ended(run)
        return run

    small = ended("small", 100)
    large = [ended("large", 400) for _ in range(4)]
    assert (small.result, small.forgotten) == (b"x" * 100, False)
    assert [run.forgotten for run in large] == [True, True, False, False]
    for run in (small, *large):
        history.forget(run.tenant, run.id)
    assert ended("other", 900).result is not None


def test_arguments_of_runs_that_wait_are_bounded() -> None:
    async def body(bench: Bench) -> None:
        host = ProgramHost(bench.parts, HostOptions(allow_trusted=True, tenant_max_input_bytes=1000))
        waits = "\n    from weft.sdk import run\n    async def main(args): await run.receive()\n"
        first = host.launch(spec(waits, b'"' + b"x" * 800 + b'"'), TENANT)
        with pytest.raises(Overloaded, match="1000 bytes"):
            host.launch(spec(waits, b'"' + b"x" * 800 + b'"'), TENANT)
        first.send(b"1")
        await first.wait()
        await settle()
        last = host.launch(spec(waits, b'"' + b"x" * 800 + b'"'), TENANT)
        last.cancel()
        await last.wait()
        await host.close()

    with_host(body)


def test_what_a_run_was_given_is_freed_with_its_end() -> None:
    async def body(bench: Bench) -> None:
        guests: list[weakref.ref[object]] = []
        make = bench.parts.guests.make

        def noting(*args: Any) -> Any:
            guest = make(*args)
            guests.append(weakref.ref(guest))
            return guest

        bench.parts.guests.make = noting  # type: ignore[method-assign]
        gc.disable()
        try:
            run = bench.launch("async def main(args): return len(args)", b'"' + b"x" * 100 + b'"', trusted=False)
            assert await run.answer() == b"100"
            await settle()
            assert [guest() for guest in guests] == [None]
        finally:
            gc.enable()

    with_host(body)
