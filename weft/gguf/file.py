"""Reads the header of a GGUF file (versions 2 and 3), or of all files of a split one. Nothing in it is trusted.

Counts, lengths and offsets are compared with the file's size before anything is made of them; the errors name the key
or the tensor, and its offset. Arrays stay in the mapped file (`metadata.py`): reading takes memory for other values, 8
bytes for each string of an array, and at most `MAX_COUNT` entries and tensors.
"""

from __future__ import annotations

import glob
import itertools
import math
import mmap
import re
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.abi.errors import ModelLoadError, Unsupported
from weft.gguf.metadata import GgufStrings, Metadata
from weft.gguf.types import REFUSED, REMOVED, TYPE_NAMES, TYPES, TensorType

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 128 * 1024 * 1024
"""Bytes before the tensors' data. Tokenizers of 256,000 tokens take about a tenth."""
MAX_NAME_BYTES = 1024
"""Of a key and of a tensor's name. The format allows keys of 65,535; ggml allows names of 63."""
MAX_DIMENSIONS = 4
MAX_COUNT = 1 << 16
"""Of entries of metadata, and of tensors: what is made of them takes more memory than they do in the file."""
MIN_ENTRY_BYTES, MIN_TENSOR_BYTES = 13, 32
"""The shortest entry of metadata, and the shortest description of a tensor."""
ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
"""Types of metadata that are one number or boolean, as `struct` and numpy write them."""
FLOAT, FLAG, STRING, ARRAY = 6, 7, 8, 9

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class GgufTensor(NamedTuple):
    """One tensor of a file."""

    name: str
    file: Path
    type: TensorType
    shape: tuple[int, ...]
    """Rows first, so that a row is contiguous; the file has it in the other order."""
    offset: int
    """Of its first byte in the file."""
    num_bytes: int


class GgufFile(NamedTuple):
    """The checked header of a file, or of all files of a split one."""

    path: Path
    """The first file."""
    metadata: Metadata
    """Of the first file."""
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header, and of a split one those of all its files, whichever of them `path` is.

    Raises `ModelLoadError` for a file that is missing, truncated or inconsistent, `Unsupported` for other versions and
    types of tensors.
    """
    one = _read_one(path)
    count = one.metadata.integer("split.count", 0, least=0)
    if count <= 1:  # llama.cpp's merging of files leaves 0
        return one
    name = _SPLIT.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise ModelLoadError(
            f"{path} is one of {count} files, as its split.count says; their names must end in -00001-of-{count:05d}"
            f"{SUFFIX} and so on: give the file the name it came with"
        )
    paths = [path.with_name(f"{name[1]}-{i:05d}-of-{name[3]}{SUFFIX}") for i in range(1, count + 1)]
    absent = [part.name for part in paths if not part.is_file()]
    if absent:
        raise ModelLoadError(f"{path} is one of {count} files, and {absent[0]} is missing; download it too")
    parts = [_read_one(part) for part in paths]
    tensors: dict[str, GgufTensor] = {}
    for i, part in enumerate(parts):
        number, of = (part.metadata.integer(key, -1, least=-1) for key in ("split.no", "split.count"))
        if (number, of) != (i, count):
            raise ModelLoadError(f"{part.path} says that it is file {number} of {of}, its name says {i} of {count}")
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise ModelLoadError(f"{part.path} has tensor {twice[0]}, which {tensors[twice[0]].file} has too")
        tensors.update(part.tensors)
    total = parts[0].metadata.integer("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelLoadError(f"{path}: the {count} files have {len(tensors)} tensors, split.tensors.count is {total}")
    return GgufFile(paths[0], parts[0].metadata, tensors)


def split_pattern(name: str) -> str:
    """A pattern (of `fnmatch`) for the names of all files that belong to the file of this name."""
    found = _SPLIT.fullmatch(name)
    return glob.escape(name) if found is None else f"{glob.escape(found[1])}-*-of-{found[3]}{SUFFIX}"


def is_later_part(name: str) -> bool:
    """Whether this is the name of a file of a split model, but not of the first."""
    found = _SPLIT.fullmatch(name)
    return found is not None and int(found[2]) != 1


def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            # An empty file cannot be mapped.
            data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    cursor = _Cursor(path, data)
    if size < 4 or bytes(data[:4]) != MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}, not {MAGIC!r}")
    cursor.at = 4
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        kind = "a big-endian file" if int(version).to_bytes(4, "little")[::-1][0] in VERSIONS else f"version {version}"
        raise Unsupported(f"{path} is {kind} of GGUF, which is not supported; convert the model again")
    num_tensors = cursor.count(MIN_TENSOR_BYTES, "tensors", MAX_COUNT)
    num_entries = cursor.count(MIN_ENTRY_BYTES, "entries of metadata", MAX_COUNT)
    values: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string("a key of the metadata", MAX_NAME_BYTES)
        if key in values:
            raise ModelLoadError(f"{path} has {key!r} twice in its metadata")
        values[key] = cursor.value(cursor.number("<I", f"the type of {key!r}"), key)
    metadata = Metadata(path, values)
    alignment = metadata.integer("general.alignment", ALIGNMENT)
    if alignment & (alignment - 1) or not 8 <= alignment <= MAX_ALIGNMENT:
        raise ModelLoadError(f"{path}: general.alignment must be a power of two, 8 to {MAX_ALIGNMENT}, got {alignment}")
    described = [_describe(cursor) for _ in range(num_tensors)]
    begin = -(-cursor.at // alignment) * alignment
    return GgufFile(path, metadata, _place(path, described, begin, alignment, size))


class _Cursor:
    """A place in the header. Its methods read what stands there, or raise where the file does not have it."""

    def __init__(self, path: Path, data: memoryview):
        self.path = path
        self.at = 0
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)

    def take(self, num_bytes: int, what: str) -> int:
        """Where the next `num_bytes` begin; they are there."""
        start = self.at
        if num_bytes > self._end - start:
            cut = "is truncated" if self._end == len(self._data) else f"has a header of more than {self._end} bytes"
            raise ModelLoadError(
                f"{self.path} {cut}: {what} at byte {start} would take {num_bytes} bytes, the file has "
                f"{len(self._data)}. Download it again"
            )
        self.at += num_bytes
        return start

    def number(self, layout: str, what: str) -> Any:
        """A number of this `struct` layout."""
        return struct.unpack_from(layout, self._data, self.take(struct.calcsize(layout), what))[0]

    def count(self, least_bytes: int, what: str, most: int = MAX_HEADER_BYTES) -> int:
        """A count of things that each take `least_bytes` or more of what is left."""
        count: int = self.number("<Q", f"the number of {what}")
        if count > most:
            raise ModelLoadError(f"{self.path} states {count} {what}; there may be {most}")
        if count > (self._end - self.at) // least_bytes:
            raise ModelLoadError(
                f"{self.path} is truncated or damaged: it has {len(self._data)} bytes and states {count} {what}"
            )
        return count

    def string(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        """A string of UTF-8, of 1 to `most` bytes for a name."""
        length = self.number("<Q", f"the length of {what}")
        if length > most:
            raise ModelLoadError(f"{self.path}: {what} at byte {self.at} would have {length} bytes, at most {most}")
        start = self.take(length, what)
        try:
            return str(self._data[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError(f"{self.path}: {what} at byte {start} is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        """A value of the metadata: a number, boolean or string, or an array of them."""
        if kind in SCALARS:
            number = self.number(SCALARS[kind], repr(key))
            if kind == FLAG and number > 1:
                raise ModelLoadError(f"{self.path}: {key!r} is a boolean with the value {number}")
            if kind == FLOAT:
                # The decimal number that was written, rather than the one that is nearest in float32.
                return float(str(np.float32(number)))
            return bool(number) if kind == FLAG else number
        if kind == STRING:
            return self.string(f"the value of {key!r}")
        if kind != ARRAY:
            raise ModelLoadError(f"{self.path}: {key!r} has a value of type {kind}, which the format does not have")
        return self._array(key)

    def _array(self, key: str) -> np.ndarray[Any, Any] | GgufStrings:
        of = self.number("<I", f"the type of the array {key!r}")
        if of not in SCALARS and of != STRING:
            # Arrays in arrays are in the format's description, but ggml does not read them either.
            raise ModelLoadError(f"{self.path}: the array {key!r} has entries of type {of}, which is not supported")
        least = struct.calcsize(SCALARS[of]) if of in SCALARS else 8
        count = self.count(least, f"entries of the array {key!r}")
        if of in SCALARS:
            start = self.take(count * least, f"the array {key!r}")
            return np.frombuffer(self._data, SCALARS[of], count, start)
        return GgufStrings(self._data, self._string_starts(count, key), self.path, key)

    def _string_starts(self, count: int, key: str) -> array[int]:
        """Where the lengths of the next `count` strings stand. A vocabulary has hundreds of thousands, so this does in
        one loop what `number` and `take` do."""
        starts, at, end, data = array("Q"), self.at, self._end, self._data
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            starts.append(at)
            following = at + 8
            if following <= end:
                following += length(data, at)[0]
            if following > end:
                self.at, what = at, f"a string of the array {key!r}"
                self.take(self.number("<Q", what), what)  # raises
            at = following
        self.at = at
        return starts


def _describe(cursor: _Cursor) -> tuple[str, TensorType, tuple[int, ...], int]:
    """A tensor as the header describes it: name, type, shape, offset in the data."""
    path = cursor.path
    name = cursor.string("the name of a tensor", MAX_NAME_BYTES)
    dimensions = cursor.number("<I", f"the number of dimensions of tensor {name!r}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ModelLoadError(f"{path}: tensor {name!r} has {dimensions} dimensions; there may be 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.number("<Q", f"the shape of tensor {name!r}") for _ in range(dimensions))
    number = cursor.number("<I", f"the type of tensor {name!r}")
    offset = cursor.number("<Q", f"the offset of tensor {name!r}")
    if number not in TYPES:
        kind = {**REFUSED, **REMOVED}.get(number, "unknown")
        other = "the quantization Q4_0, of the same numbers" if kind.startswith("Q4_0_") else "another quantization"
        why = "ggml has removed" if number in REMOVED else "is not supported"
        raise Unsupported(
            f"{path}: tensor {name!r} at offset {offset} has the type {kind} ({number}), which {why}; there are "
            f"{', '.join(TYPE_NAMES)}. Choose a file of {other}"
        )
    if 0 in shape:
        raise ModelLoadError(f"{path}: tensor {name!r} at offset {offset} is empty: its shape is {list(shape)}")
    return name, TYPES[number], shape[::-1], offset


def _place(
    path: Path, described: list[tuple[str, TensorType, tuple[int, ...], int]], begin: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """The tensors by name, checked against the file's size and against each other."""
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in described:
        what = f"tensor {name!r} of {kind.name} {list(shape)} at offset {offset}"
        if name in tensors:
            raise ModelLoadError(f"{path} has tensor {name!r} twice, the second time at offset {offset}")
        if shape[-1] % kind.numbers:
            raise ModelLoadError(f"{path}: {what} has rows that are no whole number of blocks of {kind.numbers}")
        if offset % alignment:
            raise ModelLoadError(f"{path}: {what} is not aligned to {alignment} bytes, as the file says")
        num_bytes = math.prod(shape) // kind.numbers * kind.num_bytes
        if begin + offset + num_bytes > size:
            raise ModelLoadError(
                f"{path} is truncated: {what} takes {num_bytes} bytes and the data have {max(0, size - begin)}. "
                "Download it again"
            )
        tensors[name] = GgufTensor(name, path, kind, shape, begin + offset, num_bytes)
    placed = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for one, other in itertools.pairwise(placed):
        if one.offset + one.num_bytes > other.offset:
            raise ModelLoadError(
                f"{path}: tensor {one.name!r} at byte {one.offset} overlaps tensor {other.name!r} at byte "
                f"{other.offset}; the file is damaged"
            )
    return tensors
