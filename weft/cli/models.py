"""`weft models`: lists models that can be served without a download, with what they need in memory."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.abi.errors import ModelLoadError, WeftError
from weft.config import EMBEDDED_MODEL
from weft.gguf.types import BY_NAME, PACKED_BYTES, PACKED_ROWS, block_type

if TYPE_CHECKING:
    from rich.text import Text

    from weft.gguf.file import GgufTensor
    from weft.models.checkpoint import TensorInfo

GIB = 1024**3
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PLAIN = frozenset({"F64", "F32", "BF16", "F16"})
"""Types of numbers that are not quantized."""
NOTE = (
    "memory: of the weights, in the checkpoint's dtype, or in quantized blocks as kernels for CPUs read them; more "
    "where the device has no kernels for it. `weft doctor MODEL` says what this machine would use, with KV."
)


def register(app: typer.Typer) -> None:
    """Add the command `models` to the application."""
    app.command("models")(models)


def models(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Directories and GGUF files to list instead.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    architectures: Annotated[
        bool, typer.Option("--architectures", help="Also list supported architectures (loads torch).")
    ] = False,
) -> None:
    """List the model in the package and the models in the local hub cache: format, bits per weight, memory of weights.

    A model can be served if its architecture is supported; --architectures shows this.
    """
    known = supported() if architectures else None
    found = [one for path in paths for one in local(path)] if paths else [embedded(), *cached()]
    if known is not None:
        for one in found:
            one["supported"] = one["architecture"] in known
    if as_json:
        typer.echo(json.dumps({"models": found} | ({} if known is None else {"architectures": known}), indent=2))
        return
    _print_table(found, known)


def embedded() -> dict[str, Any]:
    """Describe the model in the package."""
    import weft

    folder = Path(weft.__file__).parent / "assets" / EMBEDDED_MODEL
    return {"name": EMBEDDED_MODEL, "where": "package", "bytes": _folder_bytes(folder), **_of_folder(folder)}


def cached() -> list[dict[str, Any]]:
    """Describe the models in the hub cache that have a config.json or GGUF files, each revision separately."""
    # Slow to import, and only this command needs it.
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    found = []
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash):
            names = ", ".join(sorted(revision.refs)) or revision.commit_hash[:12]
            for one in _of_models(repo.repo_id, revision.snapshot_path):
                found.append({**one, "where": f"hub cache, {names}"})
    return found


def local(path: Path) -> list[dict[str, Any]]:
    """Describe the models in a directory, or a GGUF file. Raises `ModelLoadError` if there is none."""
    if path.is_file():
        return [{"name": str(path), "where": "file", **_of_file(path)}]
    found = [{**one, "where": "directory"} for one in _of_models(str(path), path)]
    if not found:
        raise ModelLoadError(f"{path} has neither a config.json nor GGUF files")
    return found


def supported() -> list[str]:
    """Return the names of all architectures that this release supports. Imports torch."""
    from weft.models.registry import FAMILIES

    return sorted(FAMILIES)


def _of_models(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The checkpoint in safetensors, then the GGUF files in the folder and below; of split ones the first."""
    from weft.gguf.file import SUFFIX, is_later_part

    if (folder / "config.json").is_file():
        yield {"name": name, "bytes": _folder_bytes(folder), **_of_folder(folder)}
    for file in sorted(folder.rglob(f"*{SUFFIX}")):
        if not is_later_part(file.name):
            yield {"name": f"{name}/{file.relative_to(folder)}", **_of_file(file)}


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*") if file.is_file() and file.suffix != ".gguf")


def _of_folder(folder: Path) -> dict[str, Any]:
    """What config.json and the headers of safetensors say; None for what they do not, or where they cannot be read;
    `error` if quantized weights cannot be served."""
    from weft.models.quantized.formats import checkpoint_tensors, quantized_format
    from weft.models.safetensors_files import list_tensors, read_json

    unknown = dict.fromkeys(("format", "bits", "memory_bytes"))
    try:
        raw = read_json(folder / "config.json")
    except WeftError as error:
        return {**dict.fromkeys(("architecture", "dtype", "max_context")), **unknown, "error": error.message}
    names = raw.get("architectures")
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    found = {
        "architecture": str(names[0]) if isinstance(names, list) and names else None,
        "dtype": dtype,
        "max_context": raw.get("max_position_embeddings"),
    }
    try:
        tensors = list_tensors(folder)
    except WeftError as error:
        return {**found, **unknown, "error": error.message}
    try:
        infos = checkpoint_tensors(tensors, quantized_format(raw)).infos.values()
    except WeftError as error:
        return {**found, "format": "safetensors", "bits": None, "memory_bytes": None, "error": error.message}
    stored = [(info.dtype, info.blocks, info) for info in infos]
    return {**found, **_of_tensors("safetensors", stored, dtype or "float32")}


def _of_file(path: Path) -> dict[str, Any]:
    """What the header of a GGUF file says; `error` if it cannot be served."""
    from weft.gguf.file import read_gguf
    from weft.models.gguf_config import config_of

    size = None
    empty = dict.fromkeys(("architecture", "dtype", "max_context", "format", "bits", "memory_bytes"))
    try:
        with suppress(OSError):  # the reader says why
            size = path.stat().st_size
        file = read_gguf(path)
        raw = config_of(file)
    except WeftError as error:
        return {**empty, "bytes": size, "format": "GGUF", "error": error.message}
    tensors = [(tensor.type.name, block_type(tensor.type.name), tensor) for tensor in file.tensors.values()]
    return {
        "bytes": sum(part.stat().st_size for part in {tensor.file for *_, tensor in tensors}),
        "architecture": raw["architectures"][0],
        "dtype": raw["dtype"],
        "max_context": raw["max_position_embeddings"],
        **_of_tensors("GGUF", tensors, raw["dtype"]),
    }


def _of_tensors(
    kind: str, tensors: Iterable[tuple[str, str | None, TensorInfo | GgufTensor]], dtype: Any
) -> dict[str, Any]:
    """Format, bits per weight, and bytes in memory, of tensors with the names of their types and of the types of blocks
    that kernels read."""
    stored: Counter[str] = Counter()
    numbers = in_blocks = block_bytes = 0
    for name, blocks, tensor in tensors:
        size = math.prod(tensor.shape)
        stored[name] += tensor.num_bytes
        numbers += size
        if blocks is not None and blocks in PACKED_BYTES:
            in_blocks += size
            block_bytes += size // BY_NAME[blocks].numbers * PACKED_BYTES[blocks] // PACKED_ROWS
    item_bytes = ITEM_BYTES.get(str(dtype).removeprefix("torch."))
    # The embedding of a small quantized model has more bytes than its matrices.
    quantized = Counter({name: size for name, size in stored.items() if name not in PLAIN})
    return {
        "format": " ".join([kind, *(name for name, _ in (quantized or stored).most_common(1))]),
        "bits": round(8 * stored.total() / numbers, 1) if numbers else None,
        "memory_bytes": None if item_bytes is None else block_bytes + (numbers - in_blocks) * item_bytes,
    }


def _print_table(found: list[dict[str, Any]], known: list[str] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("model", "where", "size", "format", "bits", "memory", "architecture", "context"):
        right = name in ("size", "bits", "memory", "context")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    if known is not None:
        table.add_column("supported")
    for one in found:
        shown = one | {"size": _size(one["bytes"]), "memory": _size(one["memory_bytes"])}
        shown["architecture"] = (one["architecture"] or "?").removesuffix("ForCausalLM")
        keys = ("name", "where", "size", "format", "bits", "memory", "architecture", "max_context")
        cells = [_printable(shown[key] or "?") for key in keys]
        table.add_row(*cells, *([] if known is None else ["yes" if one["supported"] else "no"]))
    console = Console()
    console.print(table)
    console.print(f"\n{NOTE}")
    for one in found:
        if "error" in one:
            console.print(_printable(f"{one['name']} cannot be served: {one['error']}"), soft_wrap=True)
    if known is not None:
        console.print(f"\nSupported architectures: {', '.join(known)}")


def _printable(value: object) -> Text:
    """Names and errors, which say what is in files, as they are: without markup, and what no terminal shows escaped."""
    from rich.text import Text

    return Text(str(value).encode("utf-8", "backslashreplace").decode())


def _size(num_bytes: int | None) -> str | None:
    if num_bytes is None:
        return None
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 1024**2:.1f} MiB"
