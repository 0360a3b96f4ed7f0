"""What a core Wasm module imports, exports and declares, read from its bytes, and the rules of docs/wasm.md for it.

Owns the only check of kinds and types: the engine's own API ends the process for a function that takes a vector, so it
is not asked. Runs in a limited process (`check_worker` at an upload, `compile_worker` before code is compiled), never
where users' programs run. Nothing beyond the standard library. What is inside functions is the engine's to check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weft.abi.errors import InvalidRequest

MAX_FUNCTIONS = 65_536
MAX_BODY_BYTES = 1 << 20
"""Of one function: the compiler's time grows faster than its size."""
MAX_EXPORTS = 16_384
MAX_IMPORTS = 1024
ENTRIES = ("run", "_start")
"""Exports that may be the program; the first that is there is."""
INITIALIZE = "_initialize"
"""The export that is called before the program."""
_KINDS = ("function", "table", "memory", "global", "tag")
_TYPES = {0x7F: "i32", 0x7E: "i64", 0x7D: "f32", 0x7C: "f64", 0x7B: "v128", 0x70: "funcref", 0x6F: "externref"}
_TYPE, _IMPORT, _FUNCTION, _EXPORT, _CODE = 1, 2, 3, 7, 10


class Signature(NamedTuple):
    """Of a function: the names of its types."""

    params: tuple[str, ...]
    results: tuple[str, ...]


class Entry(NamedTuple):
    """How a module is started."""

    name: str
    """The function that is the program: one of `ENTRIES`."""
    num_results: int
    """0, or 1: an i32, the status."""
    has_initialize: bool
    """Whether `INITIALIZE` is called before it."""


class Imported(NamedTuple):
    """An imported function: module, name and type."""

    module: str
    name: str
    signature: Signature


class Shape(NamedTuple):
    """Imports in order; exports by name, with the signature of those that are functions."""

    imports: list[Imported]
    exports: dict[str, tuple[str, Signature | None]]


def shape_of(code: bytes) -> Shape:
    """Read a module. Raises `InvalidRequest` for bytes that are none, and for one that is too large to be compiled."""
    try:
        return _Reader(code).shape()
    except (IndexError, UnicodeDecodeError) as error:
        raise _bad(f"the module's sections cannot be read: {error}") from None


def entry_of(shape: Shape, known: dict[tuple[str, str], Signature]) -> Entry:
    """Check all that the host uses of a module; how it is started. `known` are the host's functions, by module and
    name. Raises `InvalidRequest` that names the import or export."""
    for imported in shape.imports:
        ours = known.get((imported.module, imported.name))
        if ours is not None and ours != imported.signature:
            name = f"{imported.module}.{imported.name}"
            raise _bad(f"the module imports {name} with another type than docs/wasm.md says")
    if shape.exports.get("memory", ("", None))[0] != "memory":
        raise _bad("the module exports no memory; export it as `memory`")
    has_initialize = INITIALIZE in shape.exports
    if has_initialize and _results_of(shape, INITIALIZE):
        raise _bad(f"{INITIALIZE} must take nothing and return nothing")
    for name in ENTRIES:
        if name in shape.exports:
            results = _results_of(shape, name)
            if results not in ((), ("i32",)):
                raise _bad(f"{name} must take nothing and return nothing or an i32")
            return Entry(name, len(results), has_initialize)
    raise _bad("the module exports neither `run` nor `_start`; export a function `run` that takes nothing")


def _results_of(shape: Shape, name: str) -> tuple[str, ...]:
    kind, signature = shape.exports[name]
    if signature is None:
        raise _bad(f"the module exports {name} as a {kind}; it must be a function")
    if signature.params:
        raise _bad(f"{name} must take nothing")
    return signature.results


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, "source")


class _Reader:
    """Goes through the sections once, in order. An index beyond what there is raises `IndexError`."""

    def __init__(self, code: bytes):
        self._code, self._at, self._end = code, 8, len(code)
        self._types: list[Signature] = []
        self._functions: list[int] = []
        """The type of each function, imported ones first."""
        self._imports: list[Imported] = []
        self._exports: dict[str, tuple[str, Signature | None]] = {}

    def shape(self) -> Shape:
        if self._code[:8] != b"\0asm\1\0\0\0":
            raise _bad("this is no core Wasm module (version 1); components are not taken")
        readers = {_TYPE: self._type, _IMPORT: self._import, _FUNCTION: self._function, _EXPORT: self._export}
        most = {_IMPORT: MAX_IMPORTS, _FUNCTION: MAX_FUNCTIONS, _EXPORT: MAX_EXPORTS}
        while self._at < self._end:
            section, size = self._byte(), self._number()
            after = self._at + size
            if after > self._end:
                raise _bad("a section of the module is longer than the module")
            if section in readers:
                self._each(readers[section], most.get(section, MAX_FUNCTIONS))
            elif section == _CODE:
                self._each(self._body, MAX_FUNCTIONS)
            self._at = after
        return Shape(self._imports, self._exports)

    def _each(self, read: Callable[[], None], most: int) -> None:
        count = self._number()
        if count > most:
            raise _bad(f"a section of the module has {count} entries; {most} is the most")
        for _ in range(count):
            read()

    def _type(self) -> None:
        if self._byte() != 0x60:
            raise _bad("the module defines types that are not of functions")
        self._types.append(Signature(self._value_types(), self._value_types()))

    def _value_types(self) -> tuple[str, ...]:
        count = self._number()
        if count > 1000:
            raise _bad("a function of the module has more than 1000 parameters or results")
        return tuple(_TYPES.get(self._byte(), "unknown") for _ in range(count))

    def _import(self) -> None:
        module, name, kind = self._text(), self._text(), self._kind()
        if kind != "function":
            raise _bad(f"the module imports {module}.{name}, a {kind}; only functions can be imported")
        self._functions.append(self._number())
        self._imports.append(Imported(module, name, self._types[self._functions[-1]]))

    def _function(self) -> None:
        self._functions.append(self._number())

    def _export(self) -> None:
        name, kind, index = self._text(), self._kind(), self._number()
        self._exports[name] = (kind, self._types[self._functions[index]] if kind == "function" else None)

    def _body(self) -> None:
        size = self._number()
        if size > MAX_BODY_BYTES:
            raise _bad(f"a function of the module has {size} bytes; {MAX_BODY_BYTES} is the most")
        self._at += size

    def _kind(self) -> str:
        number = self._byte()
        if number >= len(_KINDS):
            raise _bad("the module imports or exports something of an unknown kind")
        return _KINDS[number]

    def _text(self) -> str:
        size = self._number()
        if self._at + size > self._end:
            raise IndexError("a name is longer than the module")
        self._at += size
        return self._code[self._at - size : self._at].decode("utf-8")

    def _byte(self) -> int:
        self._at += 1
        return self._code[self._at - 1]

    def _number(self) -> int:
        """An unsigned number of 32 bits, in LEB128."""
        value, shift = 0, 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 35:
                raise _bad("a number in the module has more than 32 bits")
