"""From the name of a model to a local directory or file: the model in the package, a path, or one of the Hugging Face
hub.

The only importer of huggingface_hub for downloads, and only when a hub id is asked for. Loaders of weights and of
tokenizers call it, each for its own files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from weft.abi.errors import ModelLoadError
from weft.config import EMBEDDED_MODEL, hub_file, is_hub_id
from weft.gguf.file import SUFFIX, split_pattern

OFFLINE_IS_SET = "offline is set"
WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx")
"""Suffixes of weight files; an argument that names such a file is a model, not a prompt."""


def find_model(
    model: str,
    revision: str | None = None,
    *,
    files: Sequence[str],
    offline: bool = False,
    offline_because: str = OFFLINE_IS_SET,
) -> Path:
    """The directory that holds `model`, or the GGUF file that it is. Of a hub id that is not in the cache, `files`
    (patterns) are downloaded first; of a file of a hub id, the file with those that it is split into.

    A path takes precedence over a hub id of the same name. `offline` uses only what the hub cache has, and
    `offline_because` is the reason that the error gives. Raises `ModelLoadError`.
    """
    if model == EMBEDDED_MODEL:
        return _embedded()
    try:
        path = Path(model).expanduser()
        # An empty name would mean the current directory.
        is_directory, is_there = bool(model) and path.is_dir(), bool(model) and path.exists()
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"{model!r:.100} cannot be looked up: {error}") from error
    if is_directory:
        files = sorted(file.name for file in path.glob(f"*{SUFFIX}"))
        if files and not (path / "config.json").exists():
            raise ModelLoadError(f"{path} has GGUF files; give one of them by name: {', '.join(files)}")
        return path
    if is_there:
        if path.name.lower().endswith(SUFFIX):
            return path
        raise ModelLoadError(
            f"{model} is a file; give a GGUF file, or the directory that holds config.json, safetensors and "
            "tokenizer.json"
        )
    because = offline_because if offline else None
    named = hub_file(model)
    if named is not None:
        repository, name = named
        file = _download(repository, revision, [split_pattern(name)], because) / name
        if not file.exists():
            raise ModelLoadError(f"{repository} has no file {name}; check the spelling on the hub")
        return file
    if not is_hub_id(model):
        raise ModelLoadError(
            f"there is no directory or GGUF file {model!r}; give one, a hub id (org/name or org/name/file.gguf), or "
            "weft-tiny"
        )
    return _download(model, revision, files, because)


def file_stamp(path: Path) -> str:
    """Changes when a file of a model does: 16 hexadecimal digits of the names, sizes and times of the files in a
    directory, or of one file. Reads no content."""
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    stats = [(each.name, each.stat()) for each in files]
    text = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _embedded() -> Path:
    with resources.as_file(resources.files("weft") / "assets" / EMBEDDED_MODEL) as path:
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"the embedded model {EMBEDDED_MODEL} is not part of this installation; reinstall weft"
            )
        return path


def _download(model: str, revision: str | None, files: Sequence[str], offline_because: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise ModelLoadError(f"{model} is a hub id, which needs the package huggingface_hub: {error}") from error
    offline = offline_because is not None
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, local_files_only=offline, allow_patterns=list(files)
            )
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{model} is gated: accept its terms on the hub, then log in (`hf auth login`) or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{model} has no revision {revision!r} on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{model} is neither a directory here nor a model on the hub; check the spelling, or log in if it is "
            "private"
        ) from error
    except errors.HFValidationError as error:
        raise ModelLoadError(f"{model!r} is neither a directory nor a valid hub id: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        reason = offline_because or "the hub cannot be reached"
        raise ModelLoadError(f"{model} is not in the hub cache and {reason}; give a local directory instead") from error
    except Exception as error:  # network and file system errors come from several libraries
        raise ModelLoadError(f"{model} could not be downloaded: {error}") from error
