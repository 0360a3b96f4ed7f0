"""Explicit pages as a program meets them on the wire. The space is a fake: what it does is tested with the engine."""

import struct
from typing import Any

import msgspec
import pytest

from tests.programs.help import settle
from tests.programs.sessions import Host, Program, obj, run
from weft.abi.errors import EngineDead, InvalidRequest, LimitExceeded, OutOfPages, UnknownHandle, WeftError
from weft.abi.frames import EventKind
from weft.abi.operations import Op
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams
from weft.core.waits import WaitKind
from weft.core.wire import (
    AllocEmbeds,
    AllocPages,
    AnsweredCommand,
    CloseQueue,
    CopyTokens,
    Dists,
    EmbedText,
    ExportPages,
    Finished,
    Forward,
    ForwardSample,
    FreeEmbeds,
    FreePages,
    ImportPages,
    MaskPage,
    NextDist,
    OpenQueue,
    QueueCommand,
    ReleaseExport,
    SetQueuePriority,
    Sync,
)
from weft.programs.operations import Report
from weft.programs.quota.limits import Limits
from weft.programs.space import OnFailure
from weft.programs.types import Caller
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine

INFO = msgspec.structs.replace(DEFAULT_INFO, explicit_pages=True, num_embeds=100, max_space_pages=50)


class FakeSpace:
    """Remembers what it was told; a test ends its reports."""

    def __init__(self, caller: Caller, reserve_pages: int, tenant_pages: int | None):
        self.caller, self.reserve_pages, self.tenant_pages = caller, reserve_pages, tenant_pages
        self.is_lost = False
        self.told: list[tuple[Any, ...]] = []
        self.calls: list[int] = []
        self.reports: list[Report] = []
        self.waits: list[tuple[WaitKind, float | None]] = []
        self.released = 0
        self.error: WeftError | None = None
        self.on_failure: OnFailure = lambda call, error: None
        self.told_on_failure: OnFailure | None = None
        """Of the last command."""

    def post(
        self,
        command: type[QueueCommand],
        queue: int,
        *values: Any,
        call: int = 0,
        on_failure: OnFailure | None = None,
    ) -> None:
        if self.error is not None:
            raise self.error
        self.told.append((command, queue, *values))
        self.calls.append(call)
        self.told_on_failure = on_failure
        command(0, queue, 0, *values)  # has these fields

    def ask(self, command: type[AnsweredCommand], queue: int, *values: Any) -> Report:
        self.post(command, queue, *values)
        self.reports.append(Report(len(self.reports), 0))
        return self.reports[-1]

    def begin_wait(self, kind: WaitKind, expected_in_s: float | None) -> None:
        self.waits.append((kind, expected_in_s))

    def end(self, index: int = -1, error: WeftError | None = None, **finished: Any) -> None:
        report = self.reports[index]
        if error is None:
            report.finish(Finished(op=0, **finished))
        else:
            report.fail(error)
        report.wake()

    def release(self) -> None:
        self.released += 1


def with_spaces(test: Any) -> None:
    """Run a test on a host whose runtime opens fakes."""

    async def body(host: Host) -> None:
        host.spaces = []  # type: ignore[attr-defined]

        def open_space(caller: Caller, reserve_pages: int = 0, tenant_pages: int | None = None) -> FakeSpace:
            if not host.engine.ready:
                raise EngineDead("down")
            host.spaces.append(FakeSpace(caller, reserve_pages, tenant_pages))  # type: ignore[attr-defined]
            return host.spaces[-1]  # type: ignore[attr-defined]

        host.rt.open_space = open_space  # type: ignore[method-assign,assignment]
        await test(host)
        for program in host.programs:
            program.close()
        assert all(space.released == 1 for space in host.spaces)  # type: ignore[attr-defined]

    run(body, engine=FakeEngine(INFO))


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def started(host: Host, **options: Any) -> tuple[Program, Any]:
    program = host.program(**options)
    program.say(Op.QUEUE_OPEN, 1, -5)
    return program, host.spaces[-1]  # type: ignore[attr-defined]


def test_a_space_is_opened_when_it_is_needed() -> None:
    async def test(host: Host) -> None:
        host.program().say(Op.LOG, 0, b"")
        assert host.spaces == []
        program, space = started(host, reserve_pages=7)
        assert space.reserve_pages == 7
        assert space.caller.tenant == "t"
        program.say(Op.QUEUE_PRIORITY, 1, 3)
        program.say(Op.QUEUE_CLOSE, 1)
        # Nobody's queue runs earlier than its caller's.
        assert space.told == [(OpenQueue, 1, 0), (SetQueuePriority, 1, 3), (CloseQueue, 1)]
        assert len(host.spaces) == 1

    with_spaces(test)


def test_a_model_without_explicit_pages_says_so() -> None:
    async def test(host: Host) -> None:
        program = host.program()
        program.say(Op.QUEUE_OPEN, 1, 0, call=1)
        assert program.errors(1) == ["unsupported"]
        assert await program.error(Op.QUEUE_SYNC, 1) == ("unsupported", "Allocate")

    run(test)


def test_models_say_that_they_have_pages() -> None:
    async def test(host: Host) -> None:
        [models] = await host.program().result(Op.MODELS)
        assert {"Allocate", "Forward", "InputText", "OutputText"} <= set(msgspec.json.decode(models)[0]["traits"])

    with_spaces(test)


def test_what_does_not_answer_goes_through_as_it_is() -> None:
    async def test(host: Host) -> None:
        program, space = started(host)
        space.told.clear()
        program.say(Op.EMBEDS_FREE, 1, u32(4))
        program.say(Op.TOKENS_COPY, 1, 2, 3, 4, 5, 6)
        program.say(Op.PAGE_MASK, 1, 2, 0xF0)
        program.say(Op.EMBED_TEXT, 1, b"tokens..", b"position", b"embeds..")
        program.say(Op.FORWARD, 1, b"read", b"inputs..", b"writ", b"outp", b"m")
        assert space.told == [
            (FreeEmbeds, 1, u32(4)),
            (CopyTokens, 1, 2, 3, 4, 5, 6),
            (MaskPage, 1, 2, 0xF0),
            (EmbedText, 1, b"tokens..", b"position", b"embeds.."),
            (Forward, 1, b"read", b"inputs..", b"writ", b"outp", b"m"),
        ]
        assert program.session.usage().prompt_tokens == 2
        space.on_failure(33, UnknownHandle("no page 9"))
        assert program.errors(33) == ["unknown_handle"]

    with_spaces(test)


def test_what_answers_answers_when_it_ends() -> None:
    async def test(host: Host) -> None:
        program, space = started(host)
        space.told.clear()
        asked = [
            (Op.QUEUE_SYNC, (1,), (Sync, 1), {}, []),
            (Op.PAGES_ALLOC, (1, 10, 4), (AllocPages, 1, 10, 4), {}, []),
            (Op.EMBEDS_ALLOC, (1, 0, 4), (AllocEmbeds, 1, 0, 4), {}, []),
            (Op.PAGES_EXPORT, (1, u32(10), b"n"), (ExportPages, 1, u32(10), "n"), {}, []),
            (Op.PAGES_IMPORT, (1, 50, b"n"), (ImportPages, 1, 50, "n"), {"count": 2}, [u32(2)]),
            (Op.PAGES_RELEASE, (1, b"n"), (ReleaseExport, 1, "n"), {}, []),
            (
                Op.FORWARD_SAMPLE,
                (
                    1,
                    b"read",
                    pack_tokens([5, 6]),
                    b"position",
                    b"writ",
                    b"",
                    obj({"sampling": {"seed": 4}, "index": 2}),
                ),
                (
                    ForwardSample,
                    1,
                    b"read",
                    pack_tokens([5, 6]),
                    b"position",
                    b"writ",
                    b"",
                    SamplingParams(seed=4),
                    2,
                ),
                {"tokens": pack_tokens([9])},
                [pack_tokens([9])],
            ),
            (
                Op.NEXT_DIST,
                (1, 5, u32(0), b""),
                (NextDist, 1, 5, u32(0), b""),
                {"dists": Dists(b"ids.", b"logp", b"targ")},
                [b"ids.", b"logp", b"targ"],
            ),
        ]
        calls = [program.ask(op, *values) for op, values, *_ in asked]
        assert space.told == [told for _, _, told, *_ in asked]
        await settle()
        assert all(program.kinds(call) == [] for call in calls)
        for index, (call, (*_, finished, blobs)) in enumerate(zip(calls, asked, strict=True)):
            space.end(index, **finished)
            event = await program.end_of(call)
            assert (event.kind, event.blobs) == (EventKind.RESULT, blobs)
        assert program.budget.used.pages == 6

    with_spaces(test)


def test_pages_count_until_they_are_freed_or_there_were_none() -> None:
    async def test(host: Host) -> None:
        program, space = started(host, limits=Limits(pages=5))
        call = program.ask(Op.PAGES_ALLOC, 1, 0, 4)
        assert program.budget.used.pages == 4
        assert await program.error(Op.PAGES_ALLOC, 1, 10, 2) == ("limit_exceeded", "pages")
        assert await program.error(Op.PAGES_ALLOC, 1, 3, 1) == ("invalid_request", "first")
        space.end(error=OutOfPages("none"))
        assert program.error_in(await program.end_of(call))[0] == "out_of_pages"
        assert program.budget.used.pages == 0
        program.ask(Op.PAGES_ALLOC, 1, 0, 4)
        program.say(Op.PAGES_FREE, 1, u32(0, 1))
        assert program.budget.used.pages == 2
        for wrong in (u32(0), u32(2, 2), u32(99), u32(2, 99), b"abc"):
            program.say(Op.PAGES_FREE, 1, wrong, call=9)
        assert program.errors(9) == ["unknown_handle"] * 4 + ["invalid_request"]
        assert program.budget.used.pages == 2
        call = program.ask(Op.PAGES_IMPORT, 1, 100, b"big")
        space.end(count=4)
        assert program.error_in(await program.end_of(call)) == ("limit_exceeded", "pages")
        assert space.told[-1] == (FreePages, 1, u32(100, 101, 102, 103))
        assert program.budget.used.pages == 2
        program.close()
        assert program.budget.used.pages == 0

    with_spaces(test)


def test_pages_that_a_queue_did_not_free_count_again() -> None:
    async def test(host: Host) -> None:
        program, space = started(host, limits=Limits(pages=5))
        program.ask(Op.PAGES_ALLOC, 1, 0, 4)
        space.end(0)
        program.say(Op.PAGES_FREE, 99, u32(0, 1, 2), call=9)
        free_failed = space.told_on_failure
        assert program.budget.used.pages == 1
        again = program.ask(Op.PAGES_ALLOC, 1, 1, 1)
        free_failed(9, UnknownHandle("there is no queue 99", "queue"))
        assert program.errors(9) == ["unknown_handle"]
        assert program.budget.used.pages == 4
        space.end(error=InvalidRequest("page 1 is in use", "first"))
        assert program.error_in(await program.end_of(again))[0] == "invalid_request"
        assert program.budget.used.pages == 4
        program.say(Op.PAGES_FREE, 1, u32(0, 1, 2, 3))
        assert program.budget.used.pages == 0
        assert space.told_on_failure is not None
        space.told_on_failure(0, UnknownHandle("there is no page 3", "pages"))
        assert program.budget.used.pages == 0

    with_spaces(test)


def test_numbers_that_cannot_be() -> None:
    async def test(host: Host) -> None:
        program, _ = started(host)
        assert (await program.error(Op.PAGES_ALLOC, 1, 0, 2**32 - 1))[0] == "out_of_pages"
        assert (await program.error(Op.PAGES_ALLOC, 1, 2**32 - 1, 2))[0] == "invalid_request"
        assert (await program.error(Op.EMBEDS_ALLOC, 1, 0, 101))[0] == "out_of_pages"
        assert (await program.error(Op.PAGES_EXPORT, 1, u32(0), b""))[0] == "invalid_request"
        assert (await program.error(Op.PAGES_IMPORT, 1, 0, b"\xff"))[0] == "invalid_request"
        assert (await program.error(Op.PAGES_EXPORT, 1, u32(0), b"x" * 300))[0] == "invalid_request"
        for about in (b"{", b'{"sampling": {"x": 1}}', b'{"x": 1}'):
            values = (1, b"", pack_tokens([1]), b"", b"", b"", about)
            assert (await program.error(Op.FORWARD_SAMPLE, *values))[0] == "invalid_request"
        assert (await program.error(Op.FORWARD_SAMPLE, 1, b"", b"abc", b"", b"", b"", b"{}"))[0] == "invalid_request"

    with_spaces(test)


def test_an_allocation_that_is_given_up_is_given_back() -> None:
    async def test(host: Host) -> None:
        program, space = started(host)
        call = program.ask(Op.PAGES_ALLOC, 1, 7, 2)
        program.say(Op.CANCEL, call)
        assert program.error_in(await program.end_of(call))[0] == "cancelled"
        assert space.told[-1] == (FreePages, 1, u32(7, 8))
        # There may have been none to free, which is nobody's business.
        space.on_failure(space.calls[-1], UnknownHandle("no page 7"))
        assert program.kinds(call) == [EventKind.ERROR]
        assert len(program.seen) == 1
        assert program.budget.used.pages == 0
        # The same numbers may be used at once: commands of a queue run in order.
        program.ask(Op.PAGES_ALLOC, 1, 7, 2)
        space.end(0)
        space.end(1)
        await settle()
        assert program.budget.used.pages == 2
        assert program.kinds(call) == [EventKind.ERROR]
        call = program.ask(Op.PAGES_IMPORT, 1, 20, b"n")
        program.say(Op.CANCEL, call)
        space.end(count=3)
        assert space.told[-1] == (FreePages, 1, u32(20, 21, 22))
        assert program.budget.used.pages == 2
        call = program.ask(Op.EMBEDS_ALLOC, 1, 0, 1)
        program.say(Op.CANCEL, call)
        assert space.told[-1] == (FreeEmbeds, 1, u32(0))

    with_spaces(test)


def test_what_was_freed_already_is_not_given_back_again() -> None:
    async def test(host: Host) -> None:
        program, _ = started(host)
        call = program.ask(Op.PAGES_ALLOC, 1, 7, 2)
        program.say(Op.PAGES_FREE, 1, u32(7, 8))
        program.say(Op.CANCEL, call)
        await program.end_of(call)
        assert program.budget.used.pages == 0

    with_spaces(test)


def test_tokens_of_forwards_count() -> None:
    async def test(host: Host) -> None:
        program, _ = started(host, limits=Limits(tokens=5))
        program.say(Op.FORWARD, 1, b"", u32(1, 2, 3), b"", b"", b"")
        with pytest.raises(LimitExceeded, match="tokens"):
            program.ask(Op.FORWARD_SAMPLE, 1, b"", pack_tokens([1, 2]), b"", b"", b"", b"{}")

    with_spaces(test)


def test_a_dead_engine_takes_the_space_and_a_new_one_is_opened() -> None:
    async def test(host: Host) -> None:
        dead = EngineDead("the engine died")
        for how in ("report", "failure", "raised"):
            program, space = started(host)
            call = program.ask(Op.PAGES_ALLOC, 1, 0, 2)
            if how == "report":
                space.end(error=dead)
                assert program.error_in(await program.end_of(call))[0] == "engine_dead"
            elif how == "failure":
                space.on_failure(3, dead)
                assert program.errors(3) == ["engine_dead"]
            else:
                space.error = dead
                program.say(Op.QUEUE_CLOSE, 1, call=4)
                assert program.errors(4) == ["engine_dead"]
            await settle()
            assert space.released == 1
            assert program.budget.used.pages == 0
            host.engine.die()
            assert (await program.error(Op.QUEUE_SYNC, 1))[0] == "engine_dead"
            host.engine.restart()
            program.say(Op.QUEUE_OPEN, 1, 0)
            assert host.spaces[-1] is not space
            call = program.ask(Op.PAGES_ALLOC, 1, 0, 2)
            host.spaces[-1].end()
            assert (await program.end_of(call)).kind == EventKind.RESULT
            assert program.outlet.ended == []

    with_spaces(test)


def test_closing_gives_the_space_back_whatever_is_under_way() -> None:
    async def test(host: Host) -> None:
        for _ in range(3):
            program, space = started(host)
            program.ask(Op.PAGES_ALLOC, 1, 0, 2)
            program.ask(Op.QUEUE_SYNC, 1)
            program.ask(Op.PAGES_IMPORT, 1, 9, b"n")
            program.close()
            space.end(0)
            space.end(1)
            space.end(2, count=4)
            await settle()
            assert program.session.take_events() == b""
            assert program.budget.used.pages == 0

    with_spaces(test)
