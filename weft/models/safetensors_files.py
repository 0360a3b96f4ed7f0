"""The safetensors files of a checkpoint directory: names and locations of tensors.

Owns the validation of headers, so that a truncated or forged file is refused by name before a weight is read. Knows no
models. Tensors are views of memory-mapped files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from weft.abi.errors import ModelLoadError, Unsupported
from weft.models.checkpoint import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 16 * 1024 * 1024
"""The format allows 100 MiB, of which JSON makes gigabytes. A description of a tensor takes some 120 bytes."""
MAX_JSON_BYTES = 64 * 1024 * 1024
"""Of a file that names tensors, or of a header."""
MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Of a config.json: those of large quantized models, which name modules, have some hundred thousand. What JSON says may
take thirty times as much in memory."""
MAX_TENSORS = 1 << 16
MAX_NAME_CHARS, MAX_DIMENSIONS = 1024, 8
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights may be stored in."""
UNREAD = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64")
"""The format's other dtypes."""


def read_json(path: Path, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelLoadError` when it is missing, too large, malformed, or not an object."""
    try:
        if (size := path.stat().st_size) > most:
            raise ModelLoadError(f"{path} has {size} bytes; there may be {most}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist; the directory is not a complete checkpoint") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def list_tensors(directory: Path) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint by name, with every header checked against its file.

    Raises `ModelLoadError` for missing shards, tensors that are not in the shard that the index names or are in two,
    and damaged files; `Unsupported` for dtypes that are not read.
    """
    if (directory / INDEX_FILE).exists():
        weight_map = read_json(directory / INDEX_FILE, MAX_JSON_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_file_name(f) for f in weight_map.values()):
            raise ModelLoadError(f"{directory / INDEX_FILE} has no usable 'weight_map' of tensor names to file names")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    elif (directory / SINGLE_FILE).exists():
        weight_map, files = {}, [directory / SINGLE_FILE]
    else:
        raise _no_weights(directory)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        found = read_header(file)
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            raise ModelLoadError(f"{file} has tensor {twice[0]}, which {tensors[twice[0]].file} has too")
        tensors.update(found)
    absent = sorted(
        f"{name:.100} in {file}"
        for name, file in weight_map.items()
        if name not in tensors or tensors[name].file.name != file
    )
    if absent:
        raise ModelLoadError(f"{directory / INDEX_FILE} promises {some(absent)}, which these files do not have")
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file. Raises `ModelLoadError` when the file is missing, truncated or inconsistent,
    `Unsupported` for dtypes that are not read."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelLoadError(
                    f"{file} is truncated or not a safetensors file: its header would be {length} bytes "
                    f"(at most {MAX_HEADER_BYTES}), the file has {size}. Download it again"
                )
            content = stream.read(length)
            # Small lists and objects take 20 times the memory of their text. A tensor has three of them.
            if content.count(b"[") + content.count(b"{") > 3 * MAX_TENSORS:
                raise ModelLoadError(f"{file} has a malformed safetensors header, or more than {MAX_TENSORS} tensors")
            header = json.loads(content)
    except FileNotFoundError:
        raise ModelLoadError(f"shard {file} is missing; download the checkpoint again") from None
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} has a malformed safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{file} has a malformed safetensors header: not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor_info(file, name, entry, 8 + length, size) for name, entry in header.items()}
    _check_places(file, tensors, 8 + length, size)
    return tensors


@contextmanager
def open_tensors(file: Path) -> Iterator[Mapping[str, Tensor]]:
    """Lazy, memory-mapped access to the tensors of one checked file."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield _LazyTensors(handle)
    except SafetensorError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}. Download it again") from error


class _LazyTensors(Mapping[str, "Tensor"]):
    def __init__(self, handle: Any):
        self._handle = handle

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._handle.keys())

    def __len__(self) -> int:
        return len(self._handle.keys())


def _tensor_info(file: Path, name: str, entry: Any, data_begin: int, file_bytes: int) -> TensorInfo:
    data_bytes = file_bytes - data_begin
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        known = dtype in ITEM_BYTES or dtype in UNREAD
        well_formed = known and len(name) <= MAX_NAME_CHARS and len(shape) <= MAX_DIMENSIONS
        well_formed = well_formed and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise ModelLoadError(
            f"{file}: the header entry of tensor {name!r:.100} is malformed, or it has more than {MAX_DIMENSIONS} "
            f"dimensions: {entry!r:.100}"
        )
    if dtype in UNREAD:
        raise Unsupported(
            f"{file}: tensor {name!r} is {dtype}, which is not supported; there are {', '.join(ITEM_BYTES)}"
        )
    if end > data_bytes or begin > end:
        raise ModelLoadError(
            f"{file} is truncated: tensor {name!r} ends at byte {end} of the data, which has {data_bytes}. "
            "Download it again"
        )
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ModelLoadError(
            f"{file}: tensor {name!r} of {dtype} {list(shape)!r:.100} cannot occupy {end - begin} bytes; the file is "
            "damaged"
        )
    return TensorInfo(file, dtype, shape, end - begin, data_begin + begin)


def _check_places(file: Path, tensors: Mapping[str, TensorInfo], data_begin: int, file_bytes: int) -> None:
    """Refuse tensors that overlap, and bytes of no tensor: the library does too, after memory for the weights is taken,
    and without a name."""
    at, last = data_begin, "the header"
    for name, info in sorted(tensors.items(), key=lambda one: (one[1].offset, one[1].num_bytes)):
        if info.offset != at:
            fault = "overlaps" if info.offset < at else "leaves a hole after"
            raise ModelLoadError(
                f"{file}: tensor {name!r} at byte {info.offset} {fault} {last}, which ends at byte {at}; the file is "
                "damaged"
            )
        at, last = at + info.num_bytes, f"tensor {name!r} at byte {info.offset}"
    if at != file_bytes:
        raise ModelLoadError(
            f"{file} has {file_bytes} bytes and {last} is the last and ends at byte {at}; the file is damaged"
        )


def _is_file_name(value: Any) -> bool:
    # An index is untrusted: it must not reach outside its directory.
    return isinstance(value, str) and value not in ("", "..") and Path(value).name == value


def _no_weights(directory: Path) -> ModelLoadError:
    pickles = sorted(p.name for pattern in PICKLES for p in directory.glob(pattern))
    if pickles:
        return ModelLoadError(
            f"{directory} has only pickled weights ({some(pickles)}), which can run code when they are opened and "
            "are refused. Convert the checkpoint to safetensors: load it with transformers and call save_pretrained"
        )
    return ModelLoadError(f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} exists")


def some(names: list[str], limit: int = 3) -> str:
    """The first `limit` names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
