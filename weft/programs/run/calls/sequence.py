"""The Sequence trait: tokens with lineage, generated in the fused loop of the engine.

Owns the run's sequences by the numbers its program gave them. Operations report through mailboxes, so that a call costs
no task; tokens of one message of the engine are one PART. `weft.programs.run.context` calls it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from weft.abi.errors import ContextTooLong, InvalidRequest, Overloaded, UnknownHandle, WeftError
from weft.core.sampling import StopParams
from weft.core.waits import MAX_KIND_CHARS, PROGRAM_WAITS, WaitKind, check_wait
from weft.core.wire import Dists, Finished, PromptOutputs
from weft.programs.lasting import WaitingBytes
from weft.programs.operations import Report
from weft.programs.quota.page_quota import PageQuota
from weft.programs.run.calls.call_kinds import answer_by_operation
from weft.programs.run.calls.generation import GenerationCall, packed_logprobs
from weft.programs.run.calls.open_sequence import GenerateSpec, OpenSequence, RefusedAppend, SequenceUsage
from weft.programs.run.calls.sampling import MAX_REMEMBERED_BYTES, MAX_SPEC_BYTES, GrammarArgs, sampling_of
from weft.programs.run.calls.tokenize import check_tokens
from weft.programs.run.calls.view import UNREADABLE, RunView, check_size
from weft.programs.run.messages import reason
from weft.programs.wire_sizes import check_sizes

MAX_RANGES_BYTES = 8 << 10
MAX_SEQUENCES = 16384
"""Of one program, open at once."""
MAX_HOLD_S = 86400.0
_WARNING = 2
MAX_EXPECTED = 64
"""Sequences of one program for which the engine is told what they wait for. A program may sleep many times a second:
this bounds what each time costs."""


class _Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class _GenerateArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sampling: dict[str, Any] | None = None
    stop: _Stop | None = None
    grammar: GrammarArgs | None = None


class SequenceCalls:
    """Calls of the trait Sequence for one run."""

    def __init__(self, view: RunView):
        self._view = view
        self._calls = view.calls
        self._model = view.model
        self._open: dict[int, OpenSequence] = {}
        self._waiting = WaitingBytes()
        self.usage = SequenceUsage()

    def open(self, call: int, number: int, priority: int) -> None:
        """A new, empty sequence. No program runs earlier than its caller may: negative priorities count as 0."""
        self._check_new(number)
        caller = self._view.caller
        if priority > 0:
            caller = replace(caller, priority=caller.priority + priority)
        runtime = self._model.runtime
        sequence = runtime.open_lasting(caller, self._waiting)
        self._open[number] = OpenSequence(sequence, PageQuota(self._view.budget, runtime.engine.info.page_size))

    def append(self, call: int, number: int, tokens: bytes) -> None:
        """Known tokens. A failure in the engine surfaces at what follows on the sequence."""
        known = self._find_whole(number)
        count = check_tokens(tokens)
        if not count:
            return
        known.sequence.check_room(len(tokens))
        self._put(known, count)
        known.sequence.append(tokens)

    def generate(self, call: int, number: int, text: int, about: bytes) -> None:
        """Sample tokens. `text`: 0 none, 1 without special tokens, 2 with them."""
        known = self._find_whole(number)
        check_size(about, MAX_SPEC_BYTES, "generate")
        spec = _remembered(about) if len(about) <= MAX_REMEMBERED_BYTES else _generate_spec(about)
        held = len(about)
        self._calls.check_free(call, held)
        known.sequence.check_room()
        generation = known.sequence.generate(spec.sampling, spec.stop, spec.grammar)
        pending = GenerationCall(self._view, call, generation, spec, known, self.usage, text, held)
        self._calls.begin(call, pending, held)

    def dist(self, call: int, number: int, k: int, tokens: bytes) -> None:
        """Append tokens and answer with the `k` most probable ones that follow."""
        outputs = PromptOutputs(dist=min(k, self._model.info.vocab_size))
        self._report(call, number, tokens, outputs, lambda finished: _packed_dist(finished.dists))

    def score(self, call: int, number: int, k: int, tokens: bytes) -> None:
        """How probable given tokens are."""
        outputs = PromptOutputs(logprobs=k)
        self._report(call, number, tokens, outputs, lambda finished: packed_logprobs(finished.prompt_logprobs or (), k))

    def fork(self, call: int, number: int, child: int) -> None:
        """A copy that shares all pages."""
        known = self._find_whole(number)
        self._check_new(child)
        known.sequence.check_room()
        sequence = known.sequence.fork()
        self._open[child] = OpenSequence(sequence, known.quota.fork(), known.quota.num_tokens)

    def truncate(self, call: int, number: int, keep: int) -> None:
        """Forget tokens at the end."""
        known = self._find(number)
        known.sequence.truncate(keep)
        known.truncate(keep)
        known.refusal = None

    def mask(self, call: int, number: int, ranges: bytes) -> None:
        """Hide tokens from those that follow."""
        known = self._find_whole(number)
        check_size(ranges, MAX_RANGES_BYTES, "ranges")
        known.sequence.check_room(len(ranges))
        known.sequence.mask(ranges)

    def hold(self, call: int, number: int, seconds: float) -> None:
        """Give it up, its KV to be found again for a while."""
        known = self._find(number)
        if not 0 <= seconds <= MAX_HOLD_S:
            raise InvalidRequest(f"KV is held from 0 to {MAX_HOLD_S:.0f} seconds, got {seconds}", "seconds")
        del self._open[number]
        try:
            operation = known.sequence.hold(seconds)
            operation.report_to(_HoldOutcome(self._view, operation))
        finally:
            # Tokens may come to light while it ends, so the count is given back last. A lost one is only released.
            known.sequence.release()
            known.quota.release()

    def release(self, call: int, number: int) -> None:
        """Give it up. What runs on it ends as cancelled."""
        known = self._find(number)
        del self._open[number]
        # Tokens may come to light while it ends, so the count is given back last.
        known.sequence.release()
        known.quota.release()

    def cancel(self, call: int, number: int) -> None:
        """End what runs on it."""
        self._find(number).sequence.cancel()

    def set_priority(self, call: int, number: int, priority: int) -> None:
        """Run it later, or as early as its caller may."""
        self._find(number).sequence.set_priority(self._view.caller.priority + max(0, priority))

    def expect(self, call: int, number: int, seconds: float, kind: bytes) -> None:
        """The program says what it waits for when the sequence has nothing to do. Raises `InvalidRequest`."""
        known = self._find(number)
        name = kind[: MAX_KIND_CHARS + 1].decode(errors="replace")
        if name not in PROGRAM_WAITS:
            raise InvalidRequest(f"a program waits for one of {', '.join(sorted(PROGRAM_WAITS))}, not {name!r}", "kind")
        expected_in_s = None if math.isnan(seconds) else seconds
        check_wait(name, expected_in_s)
        known.sequence.expect(WaitKind(name), expected_in_s)

    def begin_wait(self, kind: WaitKind, expected_in_s: float | None) -> None:
        """The program waits for something other than the device: tell the engine of each sequence that nothing runs on.
        Of a program with many, of the newest."""
        for known in itertools.islice(reversed(self._open.values()), MAX_EXPECTED):
            known.sequence.begin_wait(kind, expected_in_s)

    def close(self) -> None:
        """Give all of them back."""
        known, self._open = self._open, {}
        for sequence in known.values():
            sequence.sequence.release()
            sequence.quota.release()

    # ---- inside

    def _put(self, known: OpenSequence, count: int) -> None:
        """Tokens are about to be appended. Those that cannot fit are refused here, before the engine has to keep them;
        it is asked all the same, because it alone knows what is being generated."""
        most = self._model.info.max_context
        try:
            if known.quota.num_tokens + count > most:
                raise ContextTooLong(
                    f"{count} more tokens after {known.quota.num_tokens} exceed the {most} that a sequence may have; "
                    "nothing was appended",
                    "tokens",
                )
            known.quota.grow(count)
        except WeftError as error:
            known.refusal = RefusedAppend(error, self._calls.num_takes)
            raise
        self._view.budget.spend("tokens", count)
        self.usage.prompt_tokens += count

    def _find(self, number: int) -> OpenSequence:
        known = self._open.get(number)
        if known is None:
            raise UnknownHandle(f"this program has no sequence {number}: it was never opened, or given up")
        return known

    def _find_whole(self, number: int) -> OpenSequence:
        """A sequence that something is put on. Raises the error of an append that was refused, if the program has not
        taken that error yet."""
        known = self._open.get(number) or self._find(number)
        refusal = known.refusal
        if refusal is not None:
            if refusal.num_takes == self._calls.num_takes:
                raise refusal.error
            known.refusal = None
        return known

    def _check_new(self, number: int) -> None:
        if number in self._open:
            raise InvalidRequest(f"sequence {number} is open; give every sequence a number of its own", "sequence")
        if len(self._open) >= MAX_SEQUENCES:
            raise Overloaded(f"this program has {MAX_SEQUENCES} sequences open; release some of them")

    def _report(
        self,
        call: int,
        number: int,
        tokens: bytes,
        outputs: PromptOutputs,
        pack: Callable[[Finished], tuple[bytes, ...]],
    ) -> None:
        known = self._find_whole(number)
        count = check_tokens(tokens)
        self._calls.check_free(call)
        known.sequence.check_room(len(tokens))
        self._put(known, count)
        report = known.sequence.append(tokens, outputs)

        def ended() -> tuple[bytes, ...]:
            self.usage.note(known, report.usage)
            if report.finished is None:
                raise RuntimeError("an operation that ended well has no result")
            return pack(report.finished)

        answer_by_operation(self._calls, call, report, ended).on_cancel = known.sequence.cancel


class _HoldOutcome:
    """The end of a hold. The program has given the sequence up, so its log tells what became of it."""

    def __init__(self, view: RunView, operation: Report):
        self._view, self._operation = view, operation

    def wake(self) -> None:
        """The engine holds the KV, or cannot."""
        error = self._operation.error
        if error is not None and not self._view.calls.closed:
            self._view.outlet.log(_WARNING, f"a sequence was released instead of held: {error}")


def _generate_spec(about: bytes) -> GenerateSpec:
    """Raises `InvalidRequest`."""
    try:
        args = msgspec.json.decode(about or b"{}", type=_GenerateArgs)
        grammar = None if args.grammar is None else args.grammar.grammar()
    except UNREADABLE as error:
        raise InvalidRequest(f"the generation cannot be used: {reason(error)}", "generate") from error
    asked = args.stop or _Stop()
    stop = StopParams(**msgspec.structs.asdict(asked) | {"stop": [text.encode() for text in asked.stop]})
    check_sizes(stop)
    return GenerateSpec(sampling_of(args.sampling), stop, grammar)


_remembered = functools.lru_cache(256)(_generate_spec)


def _packed_dist(dist: Dists | None) -> tuple[bytes, ...]:
    if dist is None:
        raise RuntimeError("the engine sent no distribution")
    return dist.packed_ids, dist.packed_logprobs
