"""`RunFeed`: what a run tells while it goes on: the texts of named outputs as they are generated, and starts of calls.

Owns the texts of rows in progress, each once for all who read. Readers hold positions, not texts: one that is slow gets
more at a time, costs nothing and delays no other reader. The final text is in the result of its row. It knows neither
time nor tasks; used from one event loop.
"""

from __future__ import annotations

import io
import itertools
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.workflow.run.calls import PromptFound

MAX_STARTS = 10_000
"""Starts of calls that are kept for readers; the oldest go first."""

TextKey = tuple[int, str]
"""(row, output)."""


class TextDelta(NamedTuple):
    """A further piece of the text of an output."""

    row: int
    output: str
    start: int
    """Characters before it. Fewer than were told: what follows them is replaced, because another try of the call gave
    another text from there on."""
    text: str


class CallStarted(NamedTuple):
    """A model has begun with a call. Tokens are None where its server does not say."""

    row: int
    node: str
    """Such as `notes[3].summary`."""
    at_s: float
    """Seconds since 1970."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, those whose KV was there."""
    continued_tokens: int | None = None
    """Of these, as in `CallUsage`."""


RunNews = TextDelta | CallStarted


class FeedNews(NamedTuple):
    """What a reader had not seen."""

    position: int
    """A reader that begins behind it misses nothing and sees nothing twice."""
    texts: list[TextDelta]
    starts: list[CallStarted]
    num_lost: int
    """Starts that went before this reader came to them."""


class _NumberedStart(NamedTuple):
    position: int
    number: int
    """Of all starts of the feed, from 0."""
    start: CallStarted


class _AnswerText:
    """The text of a call so far. Of equal calls in flight it is one."""

    def __init__(self) -> None:
        self.keys: dict[TextKey, None] = {}
        self.length = 0
        self._text = io.StringIO()
        self._checked = 0
        """Characters that the present try of the call has given."""
        self._positions = array("q")
        """Of the feed, after each piece."""
        self._ends = array("q")
        """Of the text, after each piece."""

    def restart(self) -> None:
        """The call is tried again."""
        self._checked = 0

    def add(self, piece: str, position: int) -> int | None:
        """Take the next piece of the present try. Returns the first position at which the text has changed; None: it
        only grew."""
        known = self.read(self._checked, self._checked + len(piece))
        same = len(known) if piece.startswith(known) else _common(known, piece)
        end, cut = self._checked + len(piece), None
        if same < len(known):
            cut = self._checked + same
            self._cut(cut)
        if end > self.length:
            self._text.seek(self.length)
            self._text.write(piece[self.length - self._checked :])
            self.length = end
            self._positions.append(position)
            self._ends.append(end)
        self._checked = end
        return cut

    def finish(self, text: str, position: int) -> int | None:
        """The whole text is known. Returns as `add`."""
        self.restart()
        cut = self.add(text, position)
        if len(text) < self.length:
            self._cut(len(text))
            return len(text)
        return cut

    def read(self, start: int, end: int | None = None) -> str:
        """The characters from `start` on."""
        self._text.seek(start)
        return self._text.read() if end is None else self._text.read(max(end - start, 0))

    def told_at(self, position: int) -> int:
        """Characters that were told at a position of the feed."""
        found = bisect_right(self._positions, position)
        return self._ends[found - 1] if found else 0

    def _cut(self, length: int) -> None:
        self._text.truncate(length)
        self.length = length
        while self._ends and self._ends[-1] > length:
            self._ends.pop()
            self._positions.pop()


class RunFeed:
    """What one execution of a run tells."""

    def __init__(
        self,
        outputs: Sequence[str] = (),
        calls: Mapping[str, tuple[str, ...]] | None = None,
        *,
        name: str = "",
        starts: bool = False,
        position: int = 0,
        num_ended: int = 0,
    ):
        """`outputs` are told; `calls`: path of a call -> those that its text is. `name`: of the run. `position`: where
        the feed begins, behind those of earlier executions of the run, in which `num_ended` rows have ended."""
        self.name = name
        self.outputs = tuple(outputs)
        self.num_ended = num_ended
        """Rows of the run that have ended."""
        self._calls = calls or {}
        self._tells_starts = starts
        self._first = self._position = position
        self._texts: dict[TextKey, _AnswerText] = {}
        self._starts: deque[_NumberedStart] = deque(maxlen=MAX_STARTS)
        self._num_starts = 0
        self._readers: set[FeedReader] = set()

    def has_text(self, path: str) -> bool:
        """Whether the text of a call is told."""
        return path in self._calls

    def reader(self, after: int = 0, on_news: Callable[[], None] = lambda: None) -> FeedReader:
        """Begin to read, behind position `after`; 0: at the start of all texts. `on_news` is told when there is
        something to read."""
        first = next((each.number for each in self._starts if each.position > after), self._num_starts)
        reader = FeedReader(self, on_news, first)
        self._readers.add(reader)
        for key, text in self._texts.items():
            reader.sent[key] = text.told_at(after) if after >= self._first else 0
            if reader.sent[key] < text.length:
                reader.touch(key)
        return reader

    def begin(self, row: int, path: str) -> None:
        """A call is sent, perhaps again."""
        for output in self._calls.get(path, ()):
            known = self._texts.get((row, output))
            if known is not None:
                known.restart()

    def started(self, row: int, path: str, start: PromptFound, at_s: float) -> None:
        """A model has begun with a call."""
        if self._tells_starts:
            self._position += 1
            begun = CallStarted(row, path, at_s, *start)
            self._starts.append(_NumberedStart(self._position, self._num_starts, begun))
            self._num_starts += 1
            for reader in self._readers:
                reader.wake()

    def piece(self, tasks: Iterable[tuple[int, str]], text: str) -> None:
        """A call has given a further piece of text; `tasks` are its (row, path) and those of equal calls."""
        if text:
            self._change(tasks, lambda answer: answer.add(text, self._position))

    def finish(self, tasks: Iterable[tuple[int, str]], text: str) -> None:
        """A call has given its whole text."""
        self._change(tasks, lambda answer: answer.finish(text, self._position))

    def end_row(self, row: int) -> None:
        """A row has ended: its result has the texts."""
        self.num_ended += 1
        for output in self.outputs:
            self._texts.pop((row, output), None)
            for reader in self._readers:
                reader.forget((row, output))

    def remove(self, reader: FeedReader) -> None:
        """A reader goes."""
        self._readers.discard(reader)

    @property
    def position(self) -> int:
        """Of the last thing that was told."""
        return self._position

    @property
    def num_starts(self) -> int:
        """Calls that have started."""
        return self._num_starts

    def text(self, key: TextKey) -> _AnswerText:
        """The text of an output of a row in progress."""
        return self._texts[key]

    def starts(self, number: int) -> list[CallStarted]:
        """The starts that are kept, from this number on."""
        new = itertools.takewhile(lambda each: each.number >= number, reversed(self._starts))
        return [each.start for each in new][::-1]

    def _change(self, tasks: Iterable[tuple[int, str]], change: Callable[[_AnswerText], int | None]) -> None:
        keys = [(row, output) for row, path in tasks for output in self._calls.get(path, ())]
        if not keys:
            return
        answer = self._texts.get(keys[0])
        if answer is None:
            answer = _AnswerText()
        for key in keys:
            # A text of an equal call that ran alone before it was tried again is replaced by the one of this call.
            self._texts[key] = answer
            answer.keys[key] = None
        self._position += 1
        cut = change(answer)
        for reader in self._readers:
            for key in answer.keys:
                if cut is not None and reader.sent.get(key, 0) > cut:
                    reader.sent[key] = cut
                reader.touch(key)


class FeedReader:
    """One who reads a feed. Holds how much of each text it has seen."""

    def __init__(self, feed: RunFeed, on_news: Callable[[], None], next_start: int):
        self.sent: dict[TextKey, int] = {}
        """Characters that were read, of rows that have not been taken."""
        self.num_ended_before = feed.num_ended
        """Rows that had ended when it began: of their texts it knows nothing."""
        self._feed = feed
        self._on_news = on_news
        self._changed: dict[TextKey, None] = {}
        self._next_start = next_start

    @property
    def has_news(self) -> bool:
        """Whether `read` would return something."""
        return bool(self._changed) or self._next_start < self._feed.num_starts

    def read(self) -> FeedNews:
        """What has not been read yet."""
        texts = []
        for key in self._changed:
            answer, start = self._feed.text(key), self.sent.get(key, 0)
            if start < answer.length:
                texts.append(TextDelta(*key, start, answer.read(start)))
                self.sent[key] = answer.length
        self._changed.clear()
        num_new = self._feed.num_starts - self._next_start
        starts = self._feed.starts(self._next_start) if num_new else []
        self._next_start = self._feed.num_starts
        return FeedNews(self._feed.position, texts, starts, num_new - len(starts))

    def rest(self, row: int, outputs: Mapping[str, Any]) -> list[TextDelta]:
        """What was not read of the texts of a row that has ended with these outputs, since the reader began; then the
        row is forgotten."""
        found = []
        for output in self._feed.outputs:
            start, text = self.sent.pop((row, output), 0), outputs.get(output)
            if isinstance(text, str) and start < len(text):
                found.append(TextDelta(row, output, start, text[start:]))
        return found

    def close(self) -> None:
        """Stop reading."""
        self._feed.remove(self)

    # ---- for the feed

    def touch(self, key: TextKey) -> None:
        """Mark a text as changed, so that readers see it."""
        self._changed[key] = None
        self._on_news()

    def wake(self) -> None:
        """Something is there to be read."""
        self._on_news()

    def forget(self, key: TextKey) -> None:
        """A text is gone. How much was read of it is known until the row is taken."""
        self._changed.pop(key, None)
        if not self.sent.get(key):
            self.sent.pop(key, None)


def _common(one: str, other: str) -> int:
    """Characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (here, there) in pairs if here != there), min(len(one), len(other)))
