"""`weft version`: versions of Weft, Python and the main dependencies."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from typing import Annotated

import typer

from weft.version import __version__

PACKAGES = ("torch", "tokenizers", "safetensors", "huggingface-hub", "starlette", "uvicorn", "pyzmq")


def register(app: typer.Typer) -> None:
    """Add the command `version` to the application."""
    app.command("version")(version)


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Print the versions of Weft, Python and the main dependencies, without importing them."""
    found = versions()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        typer.echo(f"{name} {value}")


def versions() -> dict[str, str]:
    """Return versions by package; a package that is missing has `not installed`."""
    found = {"weft": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
