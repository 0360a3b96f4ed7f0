"""Incremental scanner of one call, the JSON object `{"name": …, "arguments": {…}}`.

Owns the condition under which text becomes a call: its name is known and its arguments have begun as an object. The
text around the object is the matter of `weft.text.tool_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

BLANK = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")


class ScanState(Enum):
    """State of the scan of an object."""

    OPEN = auto()
    """More must follow."""
    DONE = auto()
    BAD = auto()
    """The next character cannot belong to a call."""


class Extent:
    """Finds the end of a string, array or object, without validating its content."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def depth(self) -> int:
        """Open braces and brackets outside strings; 0 once the object is complete."""
        return self._depth

    def push(self, char: str) -> ScanState:
        """Process the next character, starting with the opening quote or bracket."""
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
    """Finds the end of the arguments of a call, an object."""

    def __init__(self) -> None:
        self.certain = False
        """Whether the text so far can only be an object."""
        self._extent = Extent()

    def push(self, char: str) -> ScanState:
        """Process the next character, starting with the opening brace."""
        if not self.certain and self._extent.depth and char not in BLANK:
            if char not in '"}':
                return ScanState.BAD
            self.certain = True
        return self._extent.push(char)


class CallObject:
    """Scanner of one call, character by character.

    `other_keys` are permitted besides the name and the arguments; None: any. With `needs_arguments`, an object without
    arguments is not a call.
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
        """Whether the object is certainly a call."""
        return self.name is not None and self._scanner.certain

    def take_arguments(self) -> str:
        """Return the text of the arguments since the last call of this method."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, char: str) -> ScanState:
        """Process the next character, starting with the opening brace. An invalid character is not consumed."""
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
        # A lone surrogate is not valid text.
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
        """Skip a string, array or object."""
        if self._extent.push(char) is ScanState.DONE:
            self._step = self._after_value
        return ScanState.OPEN

    def _in_scalar(self, char: str) -> ScanState:
        """Skip a number or a literal."""
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
        """The string that ends with this character; None if it continues, with an empty `_string` if it is invalid."""
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
