"""Word wrap of streamed text on a terminal; text for a pipe or a file is written unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len


class WordWrap:
    """Writes pieces of a text to `out` and breaks the line before a word that would not fit.

    The last word is held back until its end is known, so call `finish` after the last piece.
    """

    def __init__(self, out: TextIO, columns: Callable[[], int] | None = None):
        """`columns` returns the width in cells; None: the terminal's width, and no wrapping elsewhere."""
        self._out = out
        self._columns = columns or (_terminal_columns if out.isatty() else lambda: 0)
        self._word = ""
        self._gap = ""
        self._column = 0

    def write(self, piece: str) -> None:
        """Take the next piece; write all words that are complete."""
        if not self._columns():
            self._out.write(piece)
            self._out.flush()
            return
        for letter in piece:
            if letter == "\n":
                self._put_word()
                self._gap, self._column = "", 0
                self._out.write("\n")
            elif letter.isspace():
                self._put_word()
                self._gap += letter
            else:
                self._word += letter
        self._out.flush()

    def finish(self) -> None:
        """Write the word that was held back."""
        self._put_word()
        self._gap, self._column = "", 0
        self._out.flush()

    def _put_word(self) -> None:
        if not self._word:
            return
        width = cell_len(self._word)
        if self._column and self._column + cell_len(self._gap) + width > self._columns():
            self._out.write("\n")
            self._column = 0
        else:
            self._out.write(self._gap)
            self._column += cell_len(self._gap)
        self._out.write(self._word)
        self._column += width
        self._word = self._gap = ""


def _terminal_columns() -> int:
    return shutil.get_terminal_size().columns
