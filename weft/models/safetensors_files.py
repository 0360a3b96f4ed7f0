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

from weft.abi.errors import ModelLoadError
from weft.models.checkpoint import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The format's own limit."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights may be stored in."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelLoadError` when it is missing, malformed, or not an object."""
    try:
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

    Raises `ModelLoadError` for missing shards, tensors that the index promises and no shard has, and damaged files.
    """
    if (directory / INDEX_FILE).exists():
        weight_map = read_json(directory / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_file_name(f) for f in weight_map.values()):
            raise ModelLoadError(f"{directory / INDEX_FILE} has no usable 'weight_map' of tensor names to file names")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    elif (directory / SINGLE_FILE).exists():
        weight_map, files = {}, [directory / SINGLE_FILE]
    else:
        raise _no_weights(directory)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_header(file))
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise ModelLoadError(f"{directory / INDEX_FILE} promises {some(absent)}, which no shard has")
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file. Raises `ModelLoadError` when the file is missing, truncated or inconsistent."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelLoadError(
                    f"{file} is truncated or not a safetensors file: its header would be {length} bytes, "
                    f"the file has {size}. Download it again"
                )
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise ModelLoadError(f"shard {file} is missing; download the checkpoint again") from None
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} has a malformed safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise ModelLoadError(f"{file} has a malformed safetensors header: not a JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor_info(file, name, entry, 8 + length, size) for name, entry in header.items()}


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
        well_formed = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and dtype in ITEM_BYTES
    except (TypeError, KeyError, ValueError):
        raise ModelLoadError(f"{file}: the header entry of tensor {name!r} is malformed: {entry!r}") from None
    if not well_formed:
        raise ModelLoadError(f"{file}: the header entry of tensor {name!r} is malformed: {entry!r}")
    if end > data_bytes or begin > end:
        raise ModelLoadError(
            f"{file} is truncated: tensor {name!r} ends at byte {end} of the data, which has {data_bytes}. "
            "Download it again"
        )
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ModelLoadError(
            f"{file}: tensor {name!r} of {dtype} {list(shape)} cannot occupy {end - begin} bytes; the file is damaged"
        )
    return TensorInfo(file, dtype, shape, end - begin, data_begin + begin)


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
