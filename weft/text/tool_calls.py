"""Incremental parsers of tool calls in generated text.

Owns the formats of calls. Text that looks like a call, but turns out not to be one before its name and the start of its
arguments are complete, is content, unchanged; so is text after a complete call that is not another call. White space
before and between calls belongs to the calls. The result does not depend on how the text is divided into pieces. A
parser holds back only text that may be the start of a call.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator

from weft.text.call_object import BLANK, ArgumentsScanner, CallObject, ScanState
from weft.text.deltas import CallArguments, CallStart, Content, Delta, joined
from weft.text.markers import num_blank, num_held

Reader = Generator[None, str, None]
"""A coroutine that receives the characters of calls one by one and returns after the last one."""
MAX_NAME_CHARS = 64
MAX_REREAD_CHARS = 1 << 16
"""Limit per answer, so that repeated starts of calls do not take quadratic time."""
_NAME_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")


class _NotACall(Exception):
    """The last character cannot belong to a call."""


class ToolCallParser(ABC):
    """Parses one answer.

    `names` are the tools that may be called (None: any); a call of another is content. With `hold`, a call is returned
    once it is complete; an incomplete call, or one whose arguments are not valid JSON, is content.
    """

    marker: str
    """The text that starts a call."""
    bare = False
    """Whether an answer may also begin with a call without the marker."""

    def __init__(self, names: Collection[str] | None = None, *, hold: bool = False) -> None:
        self._names = names
        self._hold = hold
        self._held: list[str] = []
        """Pieces of the arguments of the held-back call."""
        self._held_name = ""
        self._text = ""
        """Text without final deltas yet."""
        self._reader: Reader | None = None
        """Reader of the current calls; None: the current text is content."""
        self._scanned = 0
        """Characters of `_text` that the reader has received, including the marker."""
        self._marker_end = 0
        """End of the marker in `_text`; 0 once a delta of the calls was returned."""
        self._told = 0
        """Characters of `_text` that are in returned deltas."""
        self._is_told = False
        """Whether a delta of the current calls was returned."""
        self._at_start = True
        self._leading = True
        """Whether the next white space belongs to a call, if one follows."""
        self._num_calls = 0
        self._num_complete = 0
        self._num_reread = 0
        self._is_started = False
        """Whether the start of the current call was returned."""
        self._call_id = ""
        """The model's id of the current call, or empty."""
        self._deltas: list[Delta] = []

    @property
    def num_complete(self) -> int:
        """Calls whose arguments were read to their end; a call that is cut off is not one."""
        return self._num_complete

    def push(self, text: str) -> list[Delta]:
        """Process the next piece of text. Returns the deltas that are final."""
        self._text += text
        self._advance()
        return self._take()

    def finish(self, *, cut: bool = False) -> list[Delta]:
        """Process the end of the text. Returns the deltas that were held back; with `cut`, an incomplete call is among
        them."""
        if cut and self._held:
            self._tell(self._held_name, "".join(self._held))
        while self._reader is not None:
            if self._is_told and (cut or not self._text[self._told :].strip()):
                # Behind a whole call stands nothing but markup, which may be cut.
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
        """Read the text after the marker."""

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
        """Return content; whether a call begins after it."""
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
            # Kept with the marker: it is content if this is not a call.
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
        """Continue with content after the calls."""
        self._num_complete = self._num_calls
        self._text, self._reader, self._leading = self._text[end:], None, True

    def _give_back(self, end: int) -> None:
        """Return unreturned text up to `end` as content: certainly the marker. The text after it may start another call
        and is parsed again, within limits."""
        self._num_complete = self._num_calls
        begin = self._marker_end or self._told
        self._num_reread += end - begin
        if self._num_reread > MAX_REREAD_CHARS:
            begin = end
        self._deltas.append(Content(self._text[self._told : begin]))
        self._text, self._reader, self._leading = self._text[begin:], None, self._is_told

    def _read_calls(self, reader: Reader) -> bool:
        """Send the reader the remaining characters; whether it has ended, so that content follows."""
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
            # Keep only text that may still become content.
            self._text, self._scanned, self._told = text[self._told :], self._scanned - self._told, 0
        return False

    def _object(self, char: str, call: CallObject) -> Reader:
        """Read one call whose object begins with `char`, up to its last character."""
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
        """Like `_object`, for formats in which a call ends with its object."""
        yield from self._object(char, call)
        self._num_complete = self._num_calls

    def _arguments(self, name: str, char: str) -> Reader:
        """Read the arguments of a call whose name is known, up to their last character."""
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
        """Reset the state at the start of a call."""
        self._is_started = False
        self._held.clear()

    def _take_in(self, name: str, arguments: str, *, is_complete: bool = False) -> None:
        """Add text to a call's arguments: return it at once, or hold it until the call is complete."""
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
        """The last character that was sent."""
        return self._text[self._scanned - 1]

    def _skip_blank(self) -> Generator[None, str, str]:
        """The next character that is not white space."""
        char = yield
        while char in BLANK:
            char = yield
        return char

    def _literal(self, text: str, char: str) -> Reader:
        """Read a literal text that begins with `char`."""
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
            # Strict: an answer in JSON that the user requested is not a call.
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
        """Read a name or an id that begins with `char`; returns it and the next character."""
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
"""Parsers by the name of the format."""
