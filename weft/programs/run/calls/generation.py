"""One generation on its way to its program: each message of the engine is one PART, with text where that was asked for.

Owns the order of what the program hears: all tokens that the sequence now has, then how it ended. Called by the
Sequence trait and, as its mailbox, by the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from weft.abi.errors import LimitExceeded, WeftError
from weft.core.ids import pack_tokens
from weft.core.wire import Finished, Token, TokenLogprobs
from weft.programs.builtin.choice import ChoiceText
from weft.programs.operations import TokenStream
from weft.programs.quota.limits import REFUSED
from weft.programs.run.calls.open_sequence import GenerateSpec, OpenSequence, SequenceUsage
from weft.programs.run.calls.view import RunView
from weft.programs.types import CompletionArgs

WHOLE = 4
"""Bit of `text`: one part, at the end."""

_encode = msgspec.json.encode


class GenerationCall:
    """A generation as a call. It is the generation's mailbox: no task waits."""

    def __init__(
        self,
        view: RunView,
        call: int,
        generation: TokenStream,
        spec: GenerateSpec,
        known: OpenSequence,
        usage: SequenceUsage,
        text: int,
        held: int,
    ):
        """`held`: bytes that `calls` counts until the generation has ended."""
        self._held = held
        self._calls, self._budget, self._call = view.calls, view.budget, call
        self._generation, self._known, self._usage = generation, known, usage
        self._num_logprobs = spec.sampling.logprobs
        self._choice: ChoiceText | None = None
        self._kept: list[Token] | None = [] if text & WHOLE else None
        """What a program that does not read along will be given at the end."""
        form = text & ~WHOLE
        if form:
            args = CompletionArgs(prompt=b"", skip_special_tokens=form == 1)
            self._choice = ChoiceText(0, args, view.model.runtime)
        generation.report_to(self)

    def wake(self) -> None:
        """Tokens have come, or the end, or both."""
        generation, calls = self._generation, self._calls
        if generation.ended:
            calls.let_go(self._held)
            self._held = 0
        if calls.closed or not calls.is_pending(self._call, self):
            return
        tokens = generation.take()
        finished = generation.finished
        ended = generation.ended
        if ended and finished is None and self._choice is not None:
            # Nothing follows that could complete a stop string: what was held back is text.
            shown: Finished | None = Finished(op=0, reason="length")
        else:
            shown = finished
        if self._kept is not None:
            self._kept += tokens
            if ended:
                self._part(self._kept, shown)
        elif tokens or shown is not None:
            self._part(tokens, shown)
        if tokens and not self._count(len(tokens)):
            return
        if ended:
            self._end(finished)

    def cancel(self) -> None:
        """The program gives it up. It hears of the tokens that came before, and then that it ended."""
        try:
            self._known.sequence.cancel()
        except WeftError:
            # The sequence was lost or released, which ended the call already, or is about to.
            if self._calls.is_pending(self._call, self):
                self._calls.cancelled(self._call)

    def drop(self) -> None:
        """The owner of the sequence releases it."""

    def _part(self, tokens: Sequence[Token], finished: Finished | None) -> None:
        ids = pack_tokens([token.token for token in tokens])
        text = "" if self._choice is None else self._choice.chunk(tokens, finished).text
        if not ids and not text:
            return
        if self._num_logprobs is None:
            self._calls.part(self._call, ids, text.encode())
        else:
            packed = packed_logprobs([token.logprobs for token in tokens], self._num_logprobs)
            self._calls.part(self._call, ids, text.encode(), *packed)

    def _count(self, num_tokens: int) -> bool:
        """Whether the program may go on."""
        self._usage.generated_tokens += num_tokens
        try:
            self._budget.spend("tokens", num_tokens)
            self._known.quota.grow(num_tokens)
        except WeftError as error:
            if isinstance(error, LimitExceeded) and error.param not in REFUSED:
                self._calls.break_run(error)
                return False
            if self._kept and not self._generation.ended:  # at its end it was told
                self._part(self._kept, None)
            # Too many pages: this generation ends, and with it what else runs on the sequence.
            self._calls.error(self._call, error)
            if not self._generation.ended:
                self._known.sequence.cancel()
            return False
        return True

    def _end(self, finished: Finished | None) -> None:
        generation = self._generation
        self._usage.note(self._known, generation.usage)
        if generation.error is not None:
            self._calls.error(self._call, generation.error)
        elif finished is None:
            self._calls.cancelled(self._call)
        else:
            about = {
                "reason": finished.reason,
                "stop": finished.stop,
                "usage": msgspec.structs.asdict(finished.usage),
            }
            self._calls.result(self._call, _encode(about))


def packed_logprobs(rows: Sequence[TokenLogprobs | None], k: int) -> tuple[bytes, bytes, bytes]:
    """Log-probabilities [n] float32; the most probable ids [n, k] int32; their log-probabilities [n, k] float32."""
    chosen = np.full(len(rows), np.nan, np.float32)
    ids = np.full((len(rows), k), -1, np.int32)
    tops = np.full((len(rows), k), np.nan, np.float32)
    for row, logprobs in enumerate(rows):
        if logprobs is not None:
            top = min(k, len(logprobs.top_ids))
            chosen[row] = logprobs.logprob
            ids[row, :top] = logprobs.top_ids[:top]
            tops[row, :top] = logprobs.top_logprobs[:top]
    return chosen.tobytes(), ids.tobytes(), tops.tobytes()
