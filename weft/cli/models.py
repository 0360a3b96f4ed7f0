"""`weft models`: lists models that can be served without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.config import EMBEDDED_MODEL

GIB = 1024**3


def register(app: typer.Typer) -> None:
    """Add the command `models` to the application."""
    app.command("models")(models)


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    architectures: Annotated[
        bool, typer.Option("--architectures", help="Also list supported architectures (loads torch).")
    ] = False,
) -> None:
    """List the model in the package and the models in the local hub cache.

    A cached model can be served if its architecture is supported; --architectures shows this.
    """
    known = supported() if architectures else None
    found = [embedded(), *cached()]
    if known is not None:
        for one in found:
            one["supported"] = one["architecture"] in known
    if as_json:
        typer.echo(json.dumps({"models": found} | ({} if known is None else {"architectures": known}), indent=2))
        return
    _print_table(found, known)


def embedded() -> dict[str, Any]:
    """Describe the model in the package by its config.json."""
    import weft

    folder = Path(weft.__file__).parent / "assets" / EMBEDDED_MODEL
    size = sum(file.stat().st_size for file in folder.glob("*") if file.is_file()) if folder.is_dir() else 0
    return {"name": EMBEDDED_MODEL, "where": "package", "bytes": size, **_from_config(folder)}


def cached() -> list[dict[str, Any]]:
    """Describe the models in the hub cache that have a config.json, each revision separately."""
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
            if (revision.snapshot_path / "config.json").is_file():
                names = ", ".join(sorted(revision.refs)) or revision.commit_hash[:12]
                where = {"name": repo.repo_id, "where": f"hub cache, {names}", "bytes": revision.size_on_disk}
                found.append({**where, **_from_config(revision.snapshot_path)})
    return found


def supported() -> list[str]:
    """Return the names of all architectures that this release supports. Imports torch."""
    from weft.models.registry import FAMILIES

    return sorted(FAMILIES)


def _from_config(folder: Path) -> dict[str, Any]:
    """The content of config.json; None if it is empty or cannot be read."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raw = {}
    if not isinstance(raw, dict):
        raw = {}
    names = raw.get("architectures")
    return {
        "architecture": names[0] if isinstance(names, list) and names else None,
        "dtype": raw.get("dtype") or raw.get("torch_dtype"),
        "max_context": raw.get("max_position_embeddings"),
    }


def _print_table(found: list[dict[str, Any]], known: list[str] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("model", "where", "size", "architecture", "dtype", "context"):
        table.add_column(name, justify="right" if name in ("size", "context") else "left")
    if known is not None:
        table.add_column("supported")
    for one in found:
        cells = [one["name"], one["where"], _size(one["bytes"])]
        cells += [str(one[key] or "?") for key in ("architecture", "dtype", "max_context")]
        table.add_row(*cells, *([] if known is None else ["yes" if one["supported"] else "no"]))
    console = Console()
    console.print(table)
    if known is not None:
        console.print(f"\nSupported architectures: {', '.join(known)}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 1024**2:.1f} MiB"
