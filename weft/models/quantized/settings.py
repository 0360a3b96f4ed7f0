"""Typed reading of `quantization_config` in config.json, none of which is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from weft.abi.errors import ModelLoadError, Unsupported

T = TypeVar("T")
MAX_SIZE = 2**31 - 1
"""Of integers in config.json: KV slots are int32, so no sequence is longer, and no matrix has more rows."""
REMEDY = "use a GGUF file of the model, or an unquantized checkpoint with --quantization int8 or int4"


def refusal(what: str) -> Unsupported:
    """The error for a format that is not implemented."""
    return Unsupported(f"quantized weights: {what} is not supported; {REMEDY}")


class QuantizationSettings:
    """An object of config.json; `path` is its place there. Methods raise `ModelLoadError` for values of other types;
    null counts as absent."""

    def __init__(self, raw: Any, path: str = "quantization_config"):
        if not isinstance(raw, Mapping):
            raise ModelLoadError(f"config.json: {path} must be an object, got {raw!r:.100}")
        self._raw = raw
        self.path = path

    def has(self, key: str) -> bool:
        """Whether there is a value that is neither null, false nor empty."""
        return bool(self._raw.get(key))

    def text(self, *keys: str, default: str = "") -> str:
        """The string under the first of `keys` that there is, in lower case."""
        for key in keys:
            if self._raw.get(key) is not None:
                return self._typed(key, str).lower()
        return default

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The integer under the first of `keys` that there is. Without a default there must be one."""
        for key in keys:
            if self._raw.get(key) is not None:
                return self._typed(key, int)
        if default is None:
            raise ModelLoadError(f"config.json: {self.path} has no {keys[0]!r}, which its method needs")
        return default

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean."""
        return default if self._raw.get(key) is None else self._typed(key, bool)

    def group_size(self, *keys: str, default: int | None = None) -> int | None:
        """Inputs that share a scale; None: all of a row, which is written as -1."""
        size = self.integer(*keys, default=default)
        if size == -1:
            return None
        if size < 1:
            raise ModelLoadError(f"config.json: {self.path}.{keys[0]} must be -1 or at least 1, got {size}")
        return size

    def block(self, key: str) -> tuple[int, int] | None:
        """Rows and columns of a block of a matrix, or None."""
        if self._raw.get(key) is None:
            return None
        sizes = self._raw[key]
        is_pair = isinstance(sizes, list) and len(sizes) == 2
        if not is_pair or not all(type(n) is int and 0 < n <= MAX_SIZE for n in sizes):
            raise ModelLoadError(
                f"config.json: {self.path}.{key} must be two positive integers up to {MAX_SIZE}, got {sizes!r:.100}"
            )
        return sizes[0], sizes[1]

    def names(self, *keys: str) -> tuple[str, ...]:
        """The strings of the lists under `keys`."""
        found: list[str] = []
        for key in keys:
            values = self._raw.get(key) or []
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise ModelLoadError(f"config.json: {self.path}.{key} must be a list of names, got {values!r:.100}")
            found += values
        return tuple(found)

    def inner(self, key: str) -> QuantizationSettings | None:
        """The object under `key`, or None."""
        value = self._raw.get(key)
        return None if value is None else QuantizationSettings(value, f"{self.path}.{key}")

    def fields(self) -> tuple[str, ...]:
        """Names of all values."""
        return tuple(map(str, self._raw))

    def _typed(self, key: str, kind: type[T]) -> T:
        value = self._raw[key]
        # In Python bool is an int, but JSON's true is not a number.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelLoadError(f"config.json: {self.path}.{key} must be of type {kind.__name__}, got {value!r:.100}")
        if isinstance(value, int) and abs(value) > MAX_SIZE:
            raise ModelLoadError(f"config.json: {self.path}.{key} must be at most {MAX_SIZE}, got {value!r:.100}")
        return value
