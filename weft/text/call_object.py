"""One call as a JSON object, `{"name": …, "arguments": {…}}`, read while it arrives.

Owns the question from when on a text is a call: once its name is known and its arguments have begun as an object.
It does not know what stands around the object; `weft.text.tool_calls` does.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

BLANK = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")


class ScanState(Enum):
    """How far an object is."""

    OPEN = auto()
    """More must follow."""
    DONE = auto()
    BAD = auto()
    """The next character cannot belong to a call."""


class Extent:
    """Where a string, an array or an object ends, without a look at whether all in it is valid."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def depth(self) -> int:
        """Number of brackets that are open."""
        return self._depth

    def push(self, char: str) -> ScanState:
        """Take in the next character, from the opening quote or bracket on."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return ScanState.OPEN if self._depth or self._in_string else ScanState.DONE


class ArgumentsScanner:
    """The extent of an object that is the arguments of a call."""

    def __init__(self) -> None:
        self.certain = False
        """Whether it begins as an object must."""
        self._extent = Extent()

    def push(self, char: str) -> ScanState:
        """Take in the next character, from the opening brace on."""
        if not self.certain and self._extent.depth and char not in BLANK:
            if char not in '"}':
                return ScanState.BAD
            self.certain = True
        return self._extent.push(char)


class CallObject:
    """A call while it arrives, character by character.

    `other_keys` are those that may stand beside the name and the arguments; None: any. `needs_arguments`: an object
    without them is no call.
    """

    def __init__(self, *, other_keys: Collection[str] | None = None, needs_arguments: bool = False):
        self.name: str | None = None
        self._other_keys = other_keys
        self._needs_arguments = needs_arguments
        self._step = self._at_start
        self._string = ""
        self._escaped = False
        self._key = ""
        self._has_arguments = False
        self._scanner = ArgumentsScanner()
        self._arguments: list[str] = []
        self._extent = Extent()

    @property
    def is_call(self) -> bool:
        """Whether it is a call, however it goes on."""
        return self.name is not None and self._scanner.certain

    def take_arguments(self) -> str:
        """Text of the arguments that was not taken before."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, char: str) -> ScanState:
        """Take in the next character, from the opening brace on. A bad one is not taken in."""
        return self._step(char)

    def _at_start(self, char: str) -> ScanState:
        if char == "{":
            self._step = self._before_first_key
            return ScanState.OPEN
        return ScanState.BAD

    def _before_first_key(self, char: str) -> ScanState:
        return self._end() if char == "}" else self._before_key(char)

    def _before_key(self, char: str) -> ScanState:
        if char in BLANK:
            return ScanState.OPEN
        self._string, self._step = "", self._in_key
        return ScanState.OPEN if char == '"' else ScanState.BAD

    def _in_key(self, char: str) -> ScanState:
        key = self._read_string(char)
        if key is None:
            return ScanState.OPEN if self._string else ScanState.BAD
        if key == "name":
            fits = self.name is None
        elif key in ARGUMENTS:
            fits = not self._has_arguments
        else:
            fits = self._other_keys is None or key in self._other_keys
        if not fits:
            return ScanState.BAD
        self._key, self._step = key, self._before_colon
        return ScanState.OPEN

    def _before_colon(self, char: str) -> ScanState:
        if char == ":":
            self._step = self._before_value
            return ScanState.OPEN
        return ScanState.OPEN if char in BLANK else ScanState.BAD

    def _before_value(self, char: str) -> ScanState:
        if char in BLANK:
            return ScanState.OPEN
        if self._key == "name":
            self._string, self._step = "", self._in_name
            return ScanState.OPEN if char == '"' else ScanState.BAD
        if self._key in ARGUMENTS:
            self._has_arguments, self._step = True, self._in_arguments
            return self._in_arguments(char) if char == "{" else ScanState.BAD
        if char in '"[{':
            self._extent, self._step = Extent(), self._in_other
            return self._in_other(char)
        self._step = self._in_scalar
        return ScanState.OPEN if char.isalnum() or char == "-" else ScanState.BAD

    def _in_name(self, char: str) -> ScanState:
        name = self._read_string(char)
        if name is None:
            return ScanState.OPEN if self._string else ScanState.BAD
        self.name, self._step = name, self._after_value
        # Half of a surrogate pair is no text that could be told.
        return ScanState.OPEN if name and name.isprintable() else ScanState.BAD

    def _in_arguments(self, char: str) -> ScanState:
        state = self._scanner.push(char)
        if state is ScanState.BAD:
            return state
        self._arguments.append(char)
        if state is ScanState.DONE:
            self._step = self._after_value
        return ScanState.OPEN

    def _in_other(self, char: str) -> ScanState:
        """A string, an array or an object that is not looked at."""
        if self._extent.push(char) is ScanState.DONE:
            self._step = self._after_value
        return ScanState.OPEN

    def _in_scalar(self, char: str) -> ScanState:
        """A number, or a word of JSON."""
        if char.isalnum() or char in "+-.":
            return ScanState.OPEN
        self._step = self._after_value
        return self._after_value(char)

    def _after_value(self, char: str) -> ScanState:
        if char == ",":
            self._step = self._before_key
            return ScanState.OPEN
        if char == "}":
            return self._end()
        return ScanState.OPEN if char in BLANK else ScanState.BAD

    def _end(self) -> ScanState:
        if self.name is None:
            return ScanState.BAD
        if not self._has_arguments:
            if self._needs_arguments:
                return ScanState.BAD
            self._arguments.append("{}")
        return ScanState.DONE

    def _read_string(self, char: str) -> str | None:
        """The string that ends with this character; None while it goes on, with nothing in `_string` if it cannot."""
        if char == '"' and not self._escaped:
            try:
                return str(json.loads(f'"{self._string}"'))
            except ValueError:
                self._string = ""
                return None
        if char < " ":
            self._string = ""
            return None
        self._escaped = char == "\\" and not self._escaped
        self._string += char
        return None
