"""Calls of tools in generated text, told apart from the answer while the text arrives in any pieces.

Owns the forms in which families of models write calls. What looks like a call and turns out not to be one, before its
name and the beginning of its arguments were seen, is content again, to the letter; what follows a finished call and is
none is content too. White space before and between calls belongs to them. A parser tells the same however its text is
cut; it holds back only what may still be the beginning of a call.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator

from weft.text.call_object import BLANK, ArgumentsScanner, CallObject, ScanState
from weft.text.deltas import CallArguments, CallStart, Content, Delta, joined
from weft.text.markers import num_blank, num_held

Reader = Generator[None, str, None]
"""Is sent the characters of calls one by one; ends with the last one."""
MAX_NAME_CHARS = 64
MAX_REREAD_CHARS = 1 << 16
"""Of an answer: a model that repeats beginnings of calls must not cost the square of their number."""
_NAME_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")


class _NotACall(Exception):
    """The character that was sent cannot belong to a call."""


class ToolCallParser(ABC):
    """Reads one answer.

    `names` are the tools that may be called (None: any): a call of another is content. With `hold`, a call is returned
    once it is complete; one that is never complete, or whose arguments are not valid JSON, is content too.
    """

    marker: str
    """What a call begins with."""
    bare = False
    """Whether an answer may also begin with a call's object, without the marker."""

    def __init__(self, names: Collection[str] | None = None, *, hold: bool = False) -> None:
        self._names = names
        self._hold = hold
        self._held: list[str] = []
        """Pieces of the arguments of the call that is held back."""
        self._held_name = ""
        self._text = ""
        """Not yet told."""
        self._reader: Reader | None = None
        """Of the calls that are arriving; None: content is."""
        self._scanned = 0
        """Characters of `_text` that the reader was sent, and those of the marker."""
        self._marker_end = 0
        """Of `_text`: where the marker ends; 0 once something of the calls was told."""
        self._told = 0
        """Characters of `_text` that are told."""
        self._is_told = False
        """Whether something of the calls that are arriving was told."""
        self._at_start = True
        self._leading = True
        """Whether white space that comes next belongs to a call, if one follows."""
        self._num_calls = 0
        self._num_complete = 0
        self._num_reread = 0
        self._is_started = False
        """Whether the start of the call that is arriving was told."""
        self._call_id = ""
        """Of the call that is arriving, where the model gave it one."""
        self._deltas: list[Delta] = []

    @property
    def num_complete(self) -> int:
        """Calls to which nothing is added any more, whatever comes."""
        return self._num_complete

    def push(self, text: str) -> list[Delta]:
        """What is certain after the next piece of text."""
        self._text += text
        self._advance()
        return self._take()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """What was held back, once the text has ended. `cut`: a call that is not complete is told as far as it came."""
        if cut and self._held:
            self._tell(self._held_name, "".join(self._held))
        while self._reader is not None:
            if self._is_told and not self._text[self._told :].strip():
                self._leave(len(self._text))
            else:
                self._give_back(self._scanned)
            self._advance()
        if not (self._num_calls and self._leading and not self._text.strip()):
            self._deltas.append(Content(self._text))
        self._text = ""
        return self._take()

    @abstractmethod
    def _calls(self) -> Reader:
        """Reads what follows the marker."""

    def _take(self) -> list[Delta]:
        deltas, self._deltas = joined(self._deltas), []
        return deltas

    # ---- content

    def _advance(self) -> None:
        while self._text:
            goes_on = self._read_content() if self._reader is None else self._read_calls(self._reader)
            if not goes_on:
                return

    def _read_content(self) -> bool:
        """Tell what is content; whether a call begins behind it."""
        text = self._text
        if self._at_start:
            blank = num_blank(text)
            if blank == len(text):
                return False
            self._at_start = False
            if self.bare and text[blank] == "{":
                self._enter(blank, blank)
                return True
        begin = text.find(self.marker)
        end = begin if begin >= 0 else len(text) - num_held(text, self.marker)
        if self._leading and not text[:end].strip():
            if begin < 0:
                return False
            # Kept with the marker: should this be no call, then it is content.
            end = 0
        if end:
            self._deltas.append(Content(text[:end]))
            self._leading = False
        self._text = text[end:]
        if begin < 0:
            return False
        marker_end = begin - end + len(self.marker)
        self._enter(marker_end, marker_end)
        return True

    # ---- calls

    def _enter(self, marker_end: int, scanned: int) -> None:
        self._marker_end, self._scanned, self._told = marker_end, scanned, 0
        self._is_told = False
        self._reader = self._calls()
        next(self._reader)

    def _leave(self, end: int) -> None:
        """Go on with content behind the calls."""
        self._num_complete = self._num_calls
        self._text, self._reader, self._leading = self._text[end:], None, True

    def _give_back(self, end: int) -> None:
        """What was not told, up to `end`, is content after all: the marker for certain; what follows may begin another
        call, so it is looked at again, within limits."""
        self._num_complete = self._num_calls
        begin = self._marker_end or self._told
        self._num_reread += end - begin
        if self._num_reread > MAX_REREAD_CHARS:
            begin = end
        self._deltas.append(Content(self._text[self._told : begin]))
        self._text, self._reader, self._leading = self._text[begin:], None, self._is_told

    def _read_calls(self, reader: Reader) -> bool:
        """Send the reader what it has not seen; whether it ended, so that content follows."""
        text = self._text
        while self._scanned < len(text):
            char = text[self._scanned]
            self._scanned += 1
            try:
                reader.send(char)
            except StopIteration:
                self._leave(self._scanned)
                return True
            except _NotACall:
                self._give_back(self._scanned - 1)
                return True
        if self._told:
            # Only what may still become content is kept.
            self._text, self._scanned, self._told = text[self._told :], self._scanned - self._told, 0
        return False

    def _object(self, char: str, call: CallObject) -> Reader:
        """One call whose object begins with the character. Leaves with its last one."""
        self._begin()
        while (state := call.push(char)) is ScanState.OPEN:
            if call.is_call:
                self._take_in(call.name or "", call.take_arguments())
            yield
            char = self._char()
        if state is ScanState.BAD:
            raise _NotACall
        self._take_in(call.name or "", call.take_arguments(), is_complete=True)

    def _object_in_a_row(self, char: str, call: CallObject) -> Reader:
        """`_object`, where nothing of a call comes behind its object."""
        yield from self._object(char, call)
        self._num_complete = self._num_calls

    def _arguments(self, name: str, char: str) -> Reader:
        """The arguments of a call whose name is known. Leaves with their last character."""
        self._begin()
        scanner, held = ArgumentsScanner(), ""
        while (state := scanner.push(char)) is not ScanState.BAD:
            held += char
            if scanner.certain:
                self._take_in(name, held, is_complete=state is ScanState.DONE)
                held = ""
            if state is ScanState.DONE:
                return
            yield
            char = self._char()
        raise _NotACall

    def _begin(self) -> None:
        """A call begins."""
        self._is_started = False
        self._held.clear()

    def _take_in(self, name: str, arguments: str, *, is_complete: bool = False) -> None:
        """More of a call's arguments: told at once, or held until the call is complete."""
        if self._names is not None and name not in self._names:
            raise _NotACall
        if self._hold:
            self._held_name = name
            self._held.append(arguments)
            if not is_complete:
                return
            arguments = "".join(self._held)
            self._held.clear()
            if not _is_object(arguments):
                raise _NotACall
        self._tell(name, arguments)

    def _tell(self, name: str, arguments: str) -> None:
        if not self._is_started:
            self._deltas.append(CallStart(self._num_calls, name, self._call_id))
            self._num_calls += 1
            self._is_started = True
        self._deltas.append(CallArguments(self._num_calls - 1, arguments))
        self._told, self._is_told, self._marker_end = self._scanned, True, 0

    def _char(self) -> str:
        """The character that was sent last."""
        return self._text[self._scanned - 1]

    def _skip_blank(self) -> Generator[None, str, str]:
        """The next character that is not white space."""
        char = yield
        while char in BLANK:
            char = yield
        return char

    def _literal(self, text: str, char: str) -> Reader:
        """The text, of which the first character has come. Leaves with its last one."""
        for number, expected in enumerate(text):
            if number:
                char = yield
            if char != expected:
                raise _NotACall


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class HermesParser(ToolCallParser):
    """Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, with or without line breaks."""

    marker = "<tool_call>"

    def _calls(self) -> Reader:
        char = yield from self._skip_blank()
        yield from self._object(char, CallObject())
        char = yield from self._skip_blank()
        yield from self._literal("</tool_call>", char)


class Llama3JsonParser(ToolCallParser):
    """Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, or several with semicolons between them."""

    marker = "<|python_tag|>"
    bare = True

    def _calls(self) -> Reader:
        while True:
            char = yield from self._skip_blank()
            # Strict: an answer in JSON that was asked for is no call.
            yield from self._object_in_a_row(char, CallObject(other_keys=("type",), needs_arguments=True))
            char = yield from self._skip_blank()
            if char != ";":
                raise _NotACall


class MistralParser(ToolCallParser):
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; newer models `[TOOL_CALLS]name[ARGS]{…}`, or
    `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`."""

    marker = "[TOOL_CALLS]"

    def _calls(self) -> Reader:
        self._call_id = ""
        char = yield from self._skip_blank()
        if char != "[":
            yield from self._named(char)
            return
        while char != "]":
            char = yield from self._skip_blank()
            yield from self._object_in_a_row(char, CallObject())
            char = yield from self._skip_blank()
            if char not in ",]":
                raise _NotACall

    def _named(self, char: str) -> Reader:
        name, char = yield from self._word(char)
        yield from self._literal("[", char)
        char = yield
        if char == "C":
            yield from self._literal("CALL_ID]", char)
            self._call_id, char = yield from self._word((yield))
            yield from self._literal("[", char)
            char = yield
        yield from self._literal("ARGS]", char)
        char = yield from self._skip_blank()
        if char != "{":
            raise _NotACall
        yield from self._arguments(name, char)

    def _word(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """A name or an id that begins with the character, and the character behind it."""
        word = ""
        while char in _NAME_CHARS and len(word) < MAX_NAME_CHARS:
            word += char
            char = yield
        if not word:
            raise _NotACall
        return word, char


PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}
"""By the name of the form."""
