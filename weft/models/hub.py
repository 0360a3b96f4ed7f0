"""From the name of a model to a local directory: the embedded model, a path, or an id on the Hugging Face hub.

The only importer of huggingface_hub, and only when a hub id is asked for.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from weft.config import EMBEDDED_MODEL, is_hub_id
from weft.core.errors import ModelLoadError

WANTED_FILES = ["*.json", "*.safetensors", "*.jinja"]
"""Weights, configuration, tokenizer, chat template; never pickles or code."""


def resolve_model(model: str, revision: str | None = None, offline: bool = False) -> Path:
    """The directory that holds `model`, downloaded first if it is a hub id that is not in the cache.

    A directory of that name wins over a hub id. `offline` uses only what the hub cache has. Raises `ModelLoadError`.
    """
    if model == EMBEDDED_MODEL:
        return _embedded()
    path = Path(model).expanduser()
    # An empty name would be the current directory.
    if model and path.is_dir():
        return path
    if model and path.exists():
        raise ModelLoadError(f"{model} is a file; give the directory that holds config.json")
    if not is_hub_id(model):
        raise ModelLoadError(
            f"model directory {model!r} does not exist; give a directory, a hub id (org/name), or {EMBEDDED_MODEL}"
        )
    return _download(model, revision, offline)


def _embedded() -> Path:
    with resources.as_file(resources.files("weft") / "assets" / EMBEDDED_MODEL) as path:
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"the embedded model {EMBEDDED_MODEL} is not part of this installation; reinstall weft"
            )
        return path


def _download(model: str, revision: str | None, offline: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise ModelLoadError(f"{model} is a hub id, which needs the package huggingface_hub: {error}") from error
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=offline, allow_patterns=WANTED_FILES))
    except GatedRepoError as error:
        raise ModelLoadError(f"{model} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"{model} is neither a directory here nor a model on the hub that you may read") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{model} has no revision {revision!r} on the hub") from error
    except LocalEntryNotFoundError as error:
        reason = "offline is set" if offline else "the hub cannot be reached"
        raise ModelLoadError(f"{model} is not in the hub cache and {reason}; give a local directory instead") from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelLoadError(f"{model} could not be downloaded: {error}") from error
