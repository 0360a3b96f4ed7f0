"""The texts of a run's outputs on a terminal, while they are generated."""

from __future__ import annotations

from collections.abc import Callable

from weft.workflow.run.feed import RunNews, TextDelta, TextKey

LINE_CHARS = 80
"""Of several texts at once: a line is written when it has so many characters, at a space."""


class TextDisplay:
    """Writes one text as it comes; of several, whole lines with the row and the output before each."""

    def __init__(self, write: Callable[[str], None], *, alone: bool):
        """`alone`: there is one text."""
        self._write = write
        self._alone = alone
        self._lines: dict[TextKey, str] = {}
        """What is still to be written of each text."""
        self._told: dict[TextKey, int] = {}
        self._in_line = False
        """Whether the only text has no line break at its end so far."""

    def show(self, news: RunNews) -> None:
        """Take in what a run tells."""
        if not isinstance(news, TextDelta):
            return
        key = news.row, news.output
        if news.start < self._told.get(key, 0):
            self._flush(key)
            self._write(f"\n[row {news.row} {news.output}: another try gives another text from here on]\n")
        self._told[key] = news.start + len(news.text)
        # What a model writes must not reach the terminal as a command to it.
        text = "".join(char for char in news.text if char.isprintable() or char in "\n\t")
        if self._alone:
            self._write(text)
            self._in_line = not text.endswith("\n") if text else self._in_line
            return
        *lines, rest = (self._lines.get(key, "") + text).split("\n")
        for line in lines:
            self._line(key, line)
        while len(rest) > LINE_CHARS and (at := rest.rfind(" ", 0, LINE_CHARS)) > 0:
            self._line(key, rest[:at])
            rest = rest[at + 1 :]
        self._lines[key] = rest

    def note(self, line: str) -> None:
        """Write a line about the run itself."""
        self._end_line()
        self._write(f"{line}\n")

    def end(self) -> None:
        """Write what is left."""
        self._end_line()
        for key in list(self._lines):
            self._flush(key)

    def _end_line(self) -> None:
        if self._in_line:
            self._write("\n")
            self._in_line = False

    def _flush(self, key: TextKey) -> None:
        rest = self._lines.pop(key, "")
        if rest:
            self._line(key, rest)

    def _line(self, key: TextKey, line: str) -> None:
        self._write(f"[row {key[0]} {key[1]}] {line}\n")
