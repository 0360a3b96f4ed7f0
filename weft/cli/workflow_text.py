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
            return
        *lines, rest = (self._lines.get(key, "") + text).split("\n")
        for line in lines:
            self._line(key, line)
        while len(rest) > LINE_CHARS and (at := rest.rfind(" ", 0, LINE_CHARS)) > 0:
            self._line(key, rest[:at])
            rest = rest[at + 1 :]
        self._lines[key] = rest

    def end(self) -> None:
        """Write what is left."""
        if self._alone and self._told:
            self._write("\n")
        for key in list(self._lines):
            self._flush(key)

    def _flush(self, key: TextKey) -> None:
        rest = self._lines.pop(key, "")
        if rest:
            self._line(key, rest)

    def _line(self, key: TextKey, line: str) -> None:
        self._write(f"[row {key[0]} {key[1]}] {line}\n")
