"""The metadata of a GGUF file: values by key, with typed access whose errors name the key.

Numeric arrays are views of the mapped file, and strings of an array are decoded when they are read, so that arrays take
no memory but 8 bytes for each string.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from weft.abi.errors import ModelLoadError, Unsupported

T = TypeVar("T")


class GgufStrings(Sequence[str]):
    """An array of strings in the file."""

    def __init__(self, data: memoryview, starts: Sequence[int], path: Path, key: str):
        """`starts`: where the length of each string stands; all of them lie within `data`."""
        self._data = data
        self._starts = starts
        self._where = (path, key)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return next(self._decoded(index, (self._starts[index],)))

    def __iter__(self) -> Iterator[str]:
        return self._decoded(0, self._starts)

    def _decoded(self, first: int, starts: Sequence[int]) -> Iterator[str]:
        """The strings whose lengths stand at `starts`; `first` is the index of the first."""
        data, length = self._data, struct.Struct("<Q").unpack_from
        for index, at in enumerate(starts, first):
            try:
                yield str(data[at + 8 : at + 8 + length(data, at)[0]], "utf-8")
            except UnicodeDecodeError:
                path, key = self._where
                raise ModelLoadError(f"{path}: string {index} of {key}, at byte {at + 8}, is not UTF-8") from None


class Metadata(Mapping[str, Any]):
    """Metadata of one file. Getters raise `ModelLoadError` for a missing key and for a value of another type."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`. An array with the same value for every layer counts as that value."""
        value = self._values.get(key)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value):
            if (value != value[0]).any():
                raise Unsupported(f"{self.path}: {key} differs from layer to layer, which is not supported")
            value = int(value[0])
        found = self._typed(key, value, default, type(value) is int, "an integer")
        if found < least:
            raise ModelLoadError(f"{self.path}: {key} must be at least {least}, got {found}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises `ModelLoadError` for a value of another type, and for a missing key without
        default."""
        value = self._values.get(key)
        found = self._typed(key, value, default, type(value) in (int, float), "a number")
        if not math.isfinite(found):
            raise ModelLoadError(f"{self.path}: {key} is {found}")
        return float(found)

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises `ModelLoadError` for a value of another type, and for a missing key without default."""
        value = self._values.get(key)
        return self._typed(key, value, default, isinstance(value, str), "a string")

    def flag(self, key: str, default: bool) -> bool:
        """A boolean. Raises `ModelLoadError` for a value of another type."""
        value = self._values.get(key)
        return self._typed(key, value, default, isinstance(value, bool), "a boolean")

    def strings(self, key: str, default: Sequence[str] | None = None) -> Sequence[str]:
        """An array of strings, decoded when read. Raises `ModelLoadError` for a value of another type, and for a
        missing key without default."""
        value = self._values.get(key)
        return self._typed(key, value, default, isinstance(value, GgufStrings), "an array of strings")

    def numbers(self, key: str, length: int) -> np.ndarray[Any, Any]:
        """An array of `length` numbers."""
        value = self._values.get(key)
        found: np.ndarray[Any, Any] = self._typed(
            key, value, None, isinstance(value, np.ndarray), "an array of numbers"
        )
        if len(found) != length:
            raise ModelLoadError(f"{self.path}: {key} has {len(found)} entries, there should be {length}")
        return found

    def _typed(self, key: str, value: Any, default: T | None, fits: bool, kind: str) -> T:
        if value is None:
            if default is None:
                raise ModelLoadError(f"{self.path} has no {key}, which its architecture or tokenizer needs")
            return default
        if not fits:
            raise ModelLoadError(f"{self.path}: {key} must be {kind}, it is {_described(value)}")
        found: T = value
        return found


def _described(value: Any) -> str:
    return "an array" if isinstance(value, np.ndarray | Sequence) and not isinstance(value, str) else f"{value!r:.100}"
