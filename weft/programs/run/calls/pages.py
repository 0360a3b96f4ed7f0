"""The traits Allocate, Forward, InputText and OutputText: pages and embeddings that the program names and fills itself.

Owns the run's space on the engine (opened at first use, and again after the engine came back) and the count of its
pages. What the numbers of pages, embeddings and queues mean is the space's. An operation becomes the command that the
table of operations names (`Op.command`), by the method that it names. `weft.programs.run.context` calls it.
"""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from weft.abi.errors import (
    EngineDead,
    InvalidRequest,
    OutOfPages,
    Overloaded,
    UnknownHandle,
    Unsupported,
    WeftError,
)
from weft.core.sampling import SamplingParams
from weft.core.waits import WaitKind
from weft.core.wire import AnsweredCommand, Finished, QueueCommand
from weft.programs.operations import Report
from weft.programs.run.calls.call_kinds import OperationCall, answer_by_operation
from weft.programs.run.calls.sampling import MAX_REMEMBERED_BYTES, MAX_SPEC_BYTES, sampling_of
from weft.programs.run.calls.tokenize import check_tokens
from weft.programs.run.calls.view import UNREADABLE, RunView, check_size, text_of
from weft.programs.run.messages import reason
from weft.programs.space import SpaceHandle

MAX_NUMBER = 1 << 32
MAX_INDEX = 1 << 31
"""Of a draw: there is one for each token that is sampled."""
MAX_NAME_BYTES = 256
MAX_RANGES_SHOWN = 16
"""Of the pages that were lost with an engine."""
UNHEARD = -1
"""The call of commands on the program's behalf, such as giving back pages of an allocation that it gave up. Their
failures are dropped: there were no pages to give back."""
_COUNT = struct.Struct("<I")

Pack = Callable[[Finished], tuple[bytes, ...]]
"""What a result carries of how an operation ended."""


class CommandForm:
    """How the numbers and blobs of an operation become the fields of its command, and its end the operation's result.

    Made from the command's own definition, once for each operation.
    """

    def __init__(self, command: type[QueueCommand]):
        self.command = command
        self.answers = issubclass(command, AnsweredCommand)
        fields = msgspec.structs.fields(command)[len(QueueCommand.__struct_fields__) :]
        self._readers: list[tuple[int, Callable[[Any], Any]]] = []
        for at, field in enumerate(fields):
            if field.type is str:
                self._readers.append((at, _name))
            elif field.name == "priority":
                self._readers.append((at, _priority))

    @property
    def answered(self) -> type[AnsweredCommand]:
        """The command, of an operation that answers."""
        if not issubclass(self.command, AnsweredCommand):
            raise TypeError(f"{self.command.__name__} does not answer")
        return self.command

    def fields(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Numbers and blobs as fields. Raises `InvalidRequest` for a name that cannot be."""
        if not self._readers:
            return values
        read = list(values)
        for at, reader in self._readers:
            read[at] = reader(read[at])
        return tuple(read)

    def pack(self, finished: Finished) -> tuple[bytes, ...]:
        """What the result of the operation carries."""
        return _PACKED[self.answered.answer](finished)

    @property
    def returned_by(self) -> type[QueueCommand]:
        """The command that frees what this one has taken."""
        returned_by = self.answered.returned_by
        if returned_by is None:
            raise TypeError(f"{self.command.__name__} takes nothing")
        return returned_by

    def give_back(self, space: SpaceHandle, queue: int, numbers: Iterable[int]) -> None:
        """Free what the command has taken. A failure is dropped: the command had taken nothing."""
        space.post(self.returned_by, queue, _packed(numbers), call=UNHEARD)


class _SampleArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sampling: dict[str, Any] | None = None
    index: int = 0


class PageCalls:
    """Calls of the traits Allocate, Forward, InputText and OutputText for one run."""

    def __init__(self, view: RunView, reserve_pages: int):
        self._view = view
        self._calls = view.calls
        self._budget = view.budget
        self._reserve_pages = reserve_pages
        self._space: SpaceHandle | None = None
        self._pages: dict[int, int] = {}
        """Numbers of the pages that are allocated, or are about to be, with the call that asked for them."""
        self.prompt_tokens = 0
        """Tokens that forward passes have computed."""
        self.generated_tokens = 0
        """Tokens that forward passes have sampled."""

    # ---- operations

    def put(self, call: int, queue: int, *values: Any, form: CommandForm) -> None:
        """Put a command on a queue as it is. Raises `InvalidRequest` for a name that cannot be."""
        if not form.answers:
            self._opened().post(form.command, queue, *form.fields(values), call=call)
            return
        self._calls.check_free(call)
        self._listen(call, self._opened().ask(form.answered, queue, *form.fields(values)), form.pack)

    def take_pages(self, call: int, queue: int, first: int, count: int, *, form: CommandForm) -> None:
        """Take pages; they count from now on, until they are freed or it turns out that there are none."""
        self._calls.check_free(call)
        numbers = self._new_numbers(first, count)
        space = self._opened()
        self._budget.take_pages(count)
        self._pages.update(dict.fromkeys(numbers, call))
        given_up = False

        def over(well: bool) -> None:
            if not well and not given_up:
                self._forget(numbers, call)

        def cancel() -> None:
            # On the same queue, so this comes after them, whenever that is.
            nonlocal given_up
            given_up = True
            self._calls.cancelled(call)
            self._forget(numbers)
            self._post_free(space, form.returned_by, queue, numbers, UNHEARD)

        try:
            self._listen(call, space.ask(form.answered, queue, first, count), over=over).on_cancel = cancel
        except WeftError:
            self._forget(numbers)
            raise

    def give_pages(self, call: int, queue: int, pages: bytes, *, form: CommandForm) -> None:
        """Free pages. Raises `UnknownHandle` for one that is not allocated, having freed none."""
        numbers = _unpacked(pages)
        missing = next((number for number in numbers if number not in self._pages), None)
        if missing is not None or len(set(numbers)) != len(numbers):
            what = "a page is named twice" if missing is None else f"this program has no page {missing}"
            raise UnknownHandle(f"{what}; nothing was freed")
        self._post_free(self._opened(), form.command, queue, numbers, call)
        self._forget(numbers)

    def take_embeds(self, call: int, queue: int, first: int, count: int, *, form: CommandForm) -> None:
        """Allocate embeddings, numbered `first` and on. Raises `OutOfPages` for more than the engine has."""
        self._calls.check_free(call)
        self._check_range(first, count, "embeddings", self._view.model.info.num_embeds)
        space = self._opened()
        pending = self._listen(call, space.ask(form.answered, queue, first, count))

        def cancel() -> None:
            self._calls.cancelled(call)
            form.give_back(space, queue, range(first, first + count))

        pending.on_cancel = cancel

    def take_named_pages(self, call: int, queue: int, first: int, name: bytes, *, form: CommandForm) -> None:
        """Take the pages that are kept under a name; how many there are is known at the end, and counted then."""
        self._calls.check_free(call)
        space = self._opened()
        report = space.ask(form.answered, queue, *form.fields((first, name)))
        given_up = False

        def ended(finished: Finished) -> tuple[bytes, ...]:
            numbers = range(first, first + finished.count)
            try:
                self._budget.take_pages(len(numbers))
            except WeftError:
                self._post_free(space, form.returned_by, queue, numbers, UNHEARD)
                raise
            self._pages.update(dict.fromkeys(numbers, call))
            return form.pack(finished)

        def over(well: bool) -> None:
            if well and given_up and report.finished is not None:
                numbers = range(first, first + report.finished.count)
                self._post_free(space, form.returned_by, queue, numbers, UNHEARD)

        def cancel() -> None:
            nonlocal given_up
            given_up = True
            self._calls.cancelled(call)

        self._listen(call, report, ended, over).on_cancel = cancel

    def compute(self, call: int, queue: int, read: bytes, inputs: bytes, *rest: bytes, form: CommandForm) -> None:
        """Put inputs through the model. Raises `LimitExceeded` for `tokens`."""
        self._spend(check_tokens(inputs))
        (self._space or self._opened()).post(form.command, queue, read, inputs, *rest, call=call)

    def compute_sampled(
        self, call: int, queue: int, read: bytes, tokens: bytes, *rest: bytes, form: CommandForm
    ) -> None:
        """Put tokens through the model, and sample as the last blob says. Raises `LimitExceeded` for `tokens`."""
        self._calls.check_free(call)
        *values, about = rest
        check_size(about, MAX_SPEC_BYTES, "sampling")
        sampling = _remembered(about) if len(about) <= MAX_REMEMBERED_BYTES else _sampling(about)
        self._spend(check_tokens(tokens), 1)
        report = self._opened().ask(form.answered, queue, read, tokens, *values, *sampling)
        self._listen(call, report, form.pack)

    def begin_wait(self, kind: WaitKind, expected_in_s: float | None) -> None:
        """The program waits for something other than the device: others may use the memory of its pages."""
        if self._space is not None:
            self._space.begin_wait(kind, expected_in_s)

    def close(self) -> None:
        """Release the space and everything in it, exports excepted."""
        space, self._space = self._space, None
        if space is not None:
            space.release()
        self._forget(list(self._pages))

    # ---- inside

    def _opened(self) -> SpaceHandle:
        if self._space is None:
            runtime = self._view.model.runtime
            if not runtime.engine.info.explicit_pages:
                raise Unsupported(
                    f"the model {self._view.model.name} has no trait Allocate: programs cannot place its KV; "
                    "use sequences",
                    "Allocate",
                )
            self._budget.check_pages(self._reserve_pages)
            share = self._budget.explicit_pages(runtime.engine.info.max_space_pages)
            self._space = runtime.open_space(self._view.caller, self._reserve_pages, share)
            self._space.on_failure = self._failed
            self._space.contents = self._contents
        return self._space

    def lost(self, error: WeftError, space: SpaceHandle | None = None) -> None:
        """A call of this trait failed; where it failed because the space is gone, a new one takes its place."""
        space = space or self._space
        if space is not None and (isinstance(error, EngineDead) or space.is_lost):
            # Not now: the operations of an engine that has died fail one by one.
            self._calls.loop.call_soon(self._drop, space)

    def _contents(self) -> str:
        if not self._pages:
            return ""
        return f"; explicit KV pages are lost with it: {_as_ranges(self._pages)}. Allocate and fill them again"

    def _drop(self, space: SpaceHandle) -> None:
        """A new one is opened when the program asks for something, which fails until the engine is back."""
        if self._space is space:
            self.close()

    def _failed(self, call: int, error: WeftError) -> None:
        """A command that does not answer went wrong."""
        if not self._calls.closed:
            if call != UNHEARD:
                self._calls.refuse(call, error)
            self.lost(error)

    def _listen(
        self, call: int, report: Report, pack: Pack | None = None, over: Callable[[bool], None] | None = None
    ) -> OperationCall:
        """`over` is called once with whether the operation finished, also where the program had given it up."""
        space = self._space

        def ended() -> tuple[bytes, ...]:
            if report.finished is None:
                raise RuntimeError("an operation that ended well has no result")
            return () if pack is None else pack(report.finished)

        def on_end(well: bool) -> None:
            if over is not None:
                over(well)
            if report.error is not None:
                self.lost(report.error, space)

        pending = answer_by_operation(self._calls, call, report, ended)
        pending.on_end = on_end
        return pending

    def _spend(self, prompt_tokens: int, generated_tokens: int = 0) -> None:
        self._budget.spend("tokens", prompt_tokens + generated_tokens)
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens

    def _new_numbers(self, first: int, count: int) -> range:
        """Of pages to allocate. Raises what is wrong with them."""
        self._check_range(first, count, "KV pages", self._view.model.info.max_space_pages)
        numbers = range(first, first + count)
        taken = next((number for number in numbers if number in self._pages), None)
        if taken is not None:
            raise InvalidRequest(f"page {taken} is allocated already; give every page a number of its own", "first")
        return numbers

    @staticmethod
    def _check_range(first: int, count: int, what: str, most: int) -> None:
        if first + count > MAX_NUMBER:
            raise InvalidRequest(f"numbers of {what} are below {MAX_NUMBER}, got {first} and {count - 1} more", "first")
        if count > most:
            raise OutOfPages(f"{count} {what} were asked for; the engine has {most} for all programs together")

    def _post_free(
        self, space: SpaceHandle, command: type[QueueCommand], queue: int, numbers: Sequence[int], call: int
    ) -> None:
        """Free pages that are no longer counted. Where the queue does not take the command, they stay allocated, and
        count again."""

        def on_failure(call: int, error: WeftError) -> None:
            if space is self._space and (isinstance(error, Overloaded) or error.param == "queue"):
                kept = [number for number in numbers if number not in self._pages]
                self._budget.count_pages(len(kept))
                # Not as pages of a later allocation of the same numbers, which fails.
                self._pages.update(dict.fromkeys(numbers, UNHEARD))
            self._failed(call, error)

        space.post(command, queue, _packed(numbers), call=call, on_failure=on_failure)

    def _forget(self, numbers: Iterable[int], call: int | None = None) -> None:
        """They are not held any more, those that were; with `call`, those alone that it has asked for."""
        held = [n for n in numbers if n in self._pages and (call is None or self._pages[n] == call)]
        for number in held:
            self._pages.pop(number, None)
        self._budget.give_pages(len(held))


def _as_ranges(numbers: Iterable[int]) -> str:
    """Numbers in order, with those that follow each other as first-last; of many, the first."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:MAX_RANGES_SHOWN]]
    more = len(ranges) - len(shown)
    return ", ".join(shown) + (f" and {more} more ranges" if more else "")


def _packed(numbers: Iterable[int]) -> bytes:
    return array("I", numbers).tobytes()


def _unpacked(pages: bytes) -> array[int]:
    if len(pages) % 4:
        raise InvalidRequest(f"{len(pages)} bytes are not a whole number of uint32 handles", "pages")
    numbers = array("I")
    numbers.frombytes(pages)
    return numbers


def _priority(priority: int) -> int:
    """No queue runs earlier than its program's caller."""
    return max(0, priority)


def _packed_dists(finished: Finished) -> tuple[bytes, ...]:
    if finished.dists is None:
        raise RuntimeError("the engine sent no distributions")
    dists = finished.dists
    return dists.packed_ids, dists.packed_logprobs, dists.packed_targets


_PACKED: dict[str, Pack] = {
    "": lambda finished: (),
    "count": lambda finished: (_COUNT.pack(finished.count),),
    "tokens": lambda finished: (finished.tokens,),
    "dists": _packed_dists,
}
"""By the field of `Finished` that holds the answer of a command."""


def _sampling(about: bytes) -> tuple[SamplingParams, int]:
    """Raises `InvalidRequest`."""
    try:
        args = msgspec.json.decode(about or b"{}", type=_SampleArgs)
    except UNREADABLE as error:
        raise InvalidRequest(f"the sampling cannot be used: {reason(error)}", "sampling") from error
    if not 0 <= args.index < MAX_INDEX:
        raise InvalidRequest(f"index is from 0 to {MAX_INDEX - 1}, got {args.index}", "index")
    return sampling_of(args.sampling), args.index


_remembered = functools.lru_cache(256)(_sampling)


def _name(name: bytes) -> str:
    text = text_of(name, "name")
    if not 0 < len(name) <= MAX_NAME_BYTES:
        raise InvalidRequest(f"the name of an export has 1 to {MAX_NAME_BYTES} bytes, got {len(name)}", "name")
    return text
