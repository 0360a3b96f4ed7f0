"""Explicit pages: exports, wrong commands, and how many pages and queues a space may have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.spaces import Run, dist_of, embed, i32, likely, numbers, opened, pages_for, u32
from weft.abi.errors import InvalidRequest, OutOfPages, Overloaded, UnknownHandle, Unsupported, WeftError
from weft.core.sampling import SamplingParams
from weft.core.wire import (
    AllocEmbeds,
    AllocPages,
    CloseQueue,
    CopyTokens,
    EmbedText,
    ExportPages,
    Forward,
    ForwardSample,
    FreeEmbeds,
    FreePages,
    ImportPages,
    NextDist,
    OpenQueue,
    QueueCommand,
    ReleaseExport,
    SetQueuePriority,
    Sync,
)
from weft.programs.runtime import Runtime
from weft.programs.types import Caller
from weft.sched.spaces import resources, spaces
from weft.sched.spaces.immediate import ImmediateCommands
from weft.sched.spaces.resources import Space


def test_exported_pages_outlive_their_space_and_are_copied_before_they_are_written(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        expected = await likely(rt, [*prompt, 9])
        count = pages_for(rt, len(prompt))
        space = await opened(rt, count, len(prompt))
        pages = numbers(count)
        space.post(Forward, 1, pages, embed(space, prompt, list(range(len(prompt)))), pages)
        await space.ask(ExportPages, 1, pages, "preamble")
        space.release()
        for _ in range(2):
            other = await opened(rt, 1, 1)
            report = await other.ask(ImportPages, 1, 10, "preamble")
            assert report.count == count
            read = numbers(count, 10)
            # The last page is partly filled and shared: writing to it must not be seen by the next importer.
            other.post(Forward, 1, read, embed(other, [9], [len(prompt)]), u32(10 + count - 1, 1), u32(1))
            assert (await dist_of(other, u32(1)))[0] == expected.ids
            other.release()
        last = await opened(rt, 0, 1)
        await last.ask(ReleaseExport, 1, "preamble")
        with pytest.raises(UnknownHandle, match="nothing is exported under 'preamble'"):
            await last.ask(ImportPages, 1, 10, "preamble")
        last.release()

    run(program)


def test_exports_are_found_within_their_namespace_alone(run: Run) -> None:
    async def program(rt: Runtime) -> None:
        mine = rt.open_space(Caller(namespace="mine"))
        mine.post(OpenQueue, 1)
        await mine.ask(AllocPages, 1, 1, 1)
        await mine.ask(ExportPages, 1, u32(1), "secret")
        other = rt.open_space(Caller(namespace="other"))
        other.post(OpenQueue, 1)
        with pytest.raises(UnknownHandle):
            await other.ask(ImportPages, 1, 1, "secret")
        await mine.ask(ReleaseExport, 1, "secret")
        mine.release()
        other.release()

    run(program)


def test_what_is_wrong_fails_alone(run: Run, prompt: list[int]) -> None:
    """Every bad command is an error of its own; the queue goes on."""

    async def program(rt: Runtime) -> None:
        size = rt.engine.info.page_size
        space = rt.open_space(Caller())
        failures: dict[int, WeftError] = {}
        space.on_failure = failures.__setitem__
        space.post(OpenQueue, 1)
        await space.ask(AllocPages, 1, 1, 2)
        await space.ask(AllocEmbeds, 1, 1, 4)
        space.post(EmbedText, 1, i32(prompt[:2]), i32([0, 1]), u32(1, 2))
        bad: list[tuple[type[WeftError], str, Callable[[int], None]]] = [
            (UnknownHandle, "no page 77", lambda c: space.post(Forward, 1, u32(77), u32(1), u32(1), call=c)),
            (UnknownHandle, "no embedding 99", lambda c: space.post(Forward, 1, b"", u32(99), u32(1), call=c)),
            (UnknownHandle, "no queue 5", lambda c: space.post(FreePages, 5, u32(1), call=c)),
            (UnknownHandle, "no page 3", lambda c: space.post(FreePages, 1, u32(3), call=c)),
            (InvalidRequest, "listed twice", lambda c: space.post(FreePages, 1, u32(1, 1), call=c)),
            (
                InvalidRequest,
                "before anything was written",
                lambda c: space.post(Forward, 1, b"", u32(3), u32(1), call=c),
            ),
            (InvalidRequest, "has no effect", lambda c: space.post(Forward, 1, u32(1), u32(1), call=c)),
            (InvalidRequest, "at least one input", lambda c: space.post(Forward, 1, u32(1), b"", u32(1), call=c)),
            (InvalidRequest, "whole number", lambda c: space.post(Forward, 1, b"xyz", u32(1), u32(1), call=c)),
            (InvalidRequest, "token ids", lambda c: space.post(EmbedText, 1, i32([-1]), i32([0]), u32(4), call=c)),
            (InvalidRequest, "positions", lambda c: space.post(EmbedText, 1, i32([1]), i32([10**6]), u32(4), call=c)),
            (InvalidRequest, "go together", lambda c: space.post(EmbedText, 1, i32([1]), i32([0, 1]), u32(4), call=c)),
            (
                InvalidRequest,
                "mask has 3 bytes",
                lambda c: space.post(Forward, 1, b"", u32(1), u32(1), b"", b"abc", call=c),
            ),
            (
                InvalidRequest,
                "sees no token",
                lambda c: space.post(Forward, 1, b"", u32(1), u32(1), b"", b"\0", call=c),
            ),
            (InvalidRequest, "without a token", lambda c: space.post(CopyTokens, 1, 1, 0, 2, 0, 1, call=c)),
            (InvalidRequest, "not within a page", lambda c: space.post(CopyTokens, 1, 1, 0, 2, size, 1, call=c)),
            (InvalidRequest, "no 2 outputs", lambda c: space.post(Forward, 1, b"", u32(1), u32(1), u32(3, 4), call=c)),
        ]
        for number, (_, _, act) in enumerate(bad):
            act(number)
        space.post(Forward, 1, b"", u32(1, 2), u32(1), u32(1))
        await dist_of(space, u32(1))
        for number, (kind, text, _) in enumerate(bad):
            assert isinstance(failures[number], kind), (number, failures.get(number))
            assert text in str(failures[number])
        for report, text in [
            (space.ask(AllocPages, 1, 2, 1), "page 2 is in use"),
            (space.ask(AllocPages, 1, 9, 0), "cannot be allocated"),
            (space.ask(NextDist, 1, 10**6, u32(1)), "between 1 and"),
            (
                space.ask(ForwardSample, 1, b"", i32([1]), i32([0]), u32(2), b"", SamplingParams(temperature=99)),
                "temperature",
            ),
        ]:
            with pytest.raises(InvalidRequest, match=text):
                await report
        with pytest.raises(Unsupported, match="penalties"):
            await space.ask(ForwardSample, 1, b"", i32([1]), i32([0]), u32(2), b"", SamplingParams(presence_penalty=1))
        space.release()
        with pytest.raises(UnknownHandle):
            space.ask(Sync, 1)

    run(program)


def test_who_reads_what_a_failed_forward_was_to_write_hears_of_it(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        space = await opened(rt, 1, 4)
        space.on_failure = lambda call, error: None
        space.post(Forward, 1, b"", embed(space, prompt[:2], [0, 1]), u32(1), u32(3))
        space.post(Forward, 1, u32(77), u32(1), u32(1), u32(3))
        with pytest.raises(UnknownHandle, match="no page 77"):
            await space.ask(NextDist, 1, 1, u32(3))
        space.post(Forward, 1, b"", u32(1), u32(1), u32(3))
        await space.ask(NextDist, 1, 1, u32(3))
        space.release()

    run(program)


def test_a_full_page_takes_no_more_tokens(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        size = rt.engine.info.page_size
        space = await opened(rt, 1, size + 1)
        failures: dict[int, WeftError] = {}
        space.on_failure = failures.__setitem__
        embeds = embed(space, (prompt * 2)[: size + 1], list(range(size + 1)))
        space.post(Forward, 1, b"", embeds, u32(1), call=3)
        space.post(Forward, 1, b"", embeds[:-4], u32(1), call=4)
        await space.ask(Sync, 1)
        assert list(failures) == [3]
        assert f"room for {size} tokens, {size + 1} are given" in str(failures[3])
        space.release()

    run(program)


def test_a_space_of_another_client_cannot_be_reached(run: Run) -> None:
    """Numbers mean something in their own space alone."""

    async def program(rt: Runtime) -> None:
        first, second = await opened(rt, 1, 1), await opened(rt, 1, 1)
        second.on_failure = lambda call, error: failures.append(error)
        failures: list[WeftError] = []
        first.post(FreePages, 1, u32(1))
        await first.ask(Sync, 1)
        second.post(FreePages, 1, u32(1))
        await second.ask(Sync, 1)
        second.post(FreePages, 1, u32(1))
        await second.ask(Sync, 1)
        assert [type(error) for error in failures] == [UnknownHandle]
        first.release()
        second.release()

    run(program)


def test_no_more_pages_than_spaces_may_hold(run: Run) -> None:
    async def program(rt: Runtime) -> None:
        most = rt.engine.info.max_space_pages
        space = await opened(rt, most, 1)
        with pytest.raises(OutOfPages, match="more than programs may hold"):
            await space.ask(AllocPages, 1, 10_000, most + 1)
        other = rt.open_space(Caller(), reserve_pages=1)
        other.post(OpenQueue, 1)
        with pytest.raises(OutOfPages, match="cannot be reserved"):
            await other.ask(Sync, 1)
        other.release()
        waiting = rt.open_space(Caller())
        waiting.post(OpenQueue, 1)
        report = waiting.ask(AllocPages, 1, 1, 1)
        await space.ask(Sync, 1)
        assert not report.ended  # it waits
        space.post(FreePages, 1, u32(1))
        await report
        waiting.release()
        space.release()

    run(program)


def test_a_reservation_is_there_whatever_others_take(run: Run) -> None:
    async def program(rt: Runtime) -> None:
        most = rt.engine.info.max_space_pages
        mine = rt.open_space(Caller(), reserve_pages=4)
        mine.post(OpenQueue, 1)
        await mine.ask(Sync, 1)
        greedy = await opened(rt, most - 4, 1)
        await mine.ask(AllocPages, 1, 1, 4)
        mine.post(FreePages, 1, u32(1, 2, 3, 4))
        blocked = greedy.ask(AllocPages, 1, 50_000, 1)
        await mine.ask(AllocPages, 1, 10, 4)
        assert not blocked.ended
        mine.release()
        await blocked
        greedy.release()

    run(program)


def test_exports_count_and_give_way(run: Run) -> None:
    """No name is a way around the bound: the oldest exports of the same namespace go, before those of others."""

    async def program(rt: Runtime) -> None:
        most = rt.engine.info.max_space_pages
        other = rt.open_space(Caller(namespace="other"))
        other.post(OpenQueue, 1)
        await other.ask(AllocPages, 1, 1, 1)
        await other.ask(ExportPages, 1, u32(1), "theirs")
        space = rt.open_space(Caller(namespace="mine"))
        space.post(OpenQueue, 1)
        await space.ask(AllocPages, 1, 1, 1)
        for number in range(most + 5):
            await space.ask(ExportPages, 1, u32(1), f"copy {number}")
        assert (await rt.engine.stats()).space_pages <= most
        with pytest.raises(UnknownHandle):
            await space.ask(ImportPages, 1, 10, "copy 0")
        await space.ask(ImportPages, 1, 10, f"copy {most + 4}")
        await other.ask(ImportPages, 1, 10, "theirs")
        for bad in ("", "x" * 257):
            with pytest.raises(InvalidRequest, match="a name of 1 to 256"):
                await space.ask(ExportPages, 1, u32(1), bad)
        # All that is left is taken by imports of one export: then there is no more, and nobody else's is touched.
        reports = [space.ask(ImportPages, 1, 1000 + number, f"copy {most + 4}") for number in range(most + 1)]
        await reports[0]
        space.release()
        other.release()

    run(program)


def test_a_space_takes_only_so_many_queues(run: Run) -> None:
    async def program(rt: Runtime) -> None:
        space = rt.open_space(Caller())
        failures: dict[int, WeftError] = {}
        space.on_failure = failures.__setitem__
        for queue in range(1100):
            space.post(OpenQueue, queue, call=queue)
        await space.ask(Sync, 0)
        assert set(failures) == set(range(1024, 1100))
        assert isinstance(failures[1024], Overloaded)
        space.release()

    run(program)


def test_nothing_is_remembered_of_closed_queues_and_refused_commands(run: Run) -> None:
    async def program(rt: Runtime) -> None:
        space = rt.open_space(Caller())
        failures: dict[int, WeftError] = {}
        space.on_failure = failures.__setitem__
        space.post(OpenQueue, 1)
        await space.ask(AllocPages, 1, 1, 1)
        remembered = rt.num_operations
        for queue in range(2, 50):
            space.post(OpenQueue, queue, call=queue)
            space.post(CloseQueue, queue, call=queue)
        space.post(CloseQueue, 60, call=100)
        space.post(SetQueuePriority, 60, 3, call=101)
        await space.ask(Sync, 1)
        assert failures.keys() == {100, 101}
        assert all(isinstance(error, UnknownHandle) for error in failures.values())
        assert rt.num_operations == remembered
        space.release()

    run(program)


def test_lists_and_masks_that_wait_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "MAX_PENDING_BYTES", 100)

    async def program(rt: Runtime) -> None:
        space = rt.open_space(Caller())
        failures: dict[int, WeftError] = {}
        space.on_failure = failures.__setitem__
        space.post(OpenQueue, 1)
        await space.ask(AllocPages, 1, 1, rt.engine.info.max_space_pages)
        other = rt.open_space(Caller())
        other.post(OpenQueue, 1)
        blocked = other.ask(AllocPages, 1, 1, 1)
        other.on_failure = failures.__setitem__
        for call in (1, 2, 3):
            other.post(FreeEmbeds, 1, u32(*range(10)), call=call)
        await space.ask(Sync, 1)
        assert failures.keys() == {3}
        assert isinstance(failures[3], Overloaded)
        space.release()
        await blocked
        await other.ask(Sync, 1)
        other.post(FreeEmbeds, 1, u32(*range(10)), call=4)
        await other.ask(Sync, 1)
        assert [type(failures[call]) for call in (1, 2, 4)] == [UnknownHandle] * 3
        monkeypatch.setattr(resources, "MAX_LISTED", 9)
        other.post(FreeEmbeds, 1, u32(*range(10)), call=5)
        await other.ask(Sync, 1)
        assert isinstance(failures[5], InvalidRequest)
        other.release()

    run(program)


def test_a_fault_with_one_command_fails_it_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out = ImmediateCommands.carry_out

    def faulty(self: ImmediateCommands, space: Space, command: QueueCommand, now: float) -> int | None:
        if isinstance(command, FreeEmbeds):
            raise KeyError("a bug")
        return carry_out(self, space, command, now)

    monkeypatch.setattr(ImmediateCommands, "carry_out", faulty)

    async def program(rt: Runtime) -> None:
        space = await opened(rt, 0, 1)
        failures: dict[int, WeftError] = {}
        space.on_failure = failures.__setitem__
        space.post(FreeEmbeds, 1, u32(1), call=7)
        await space.ask(AllocPages, 1, 1, 1)
        assert "KeyError" in failures[7].message
        space.release()

    run(program)
