"""Builds the component that runs Python programs in the sandbox, and says whether the one in the package is current.

    python -m weft.programs.sandbox.build_runner --tool /path/to/componentize-py      build (about a minute)
    python -m weft.programs.sandbox.build_runner --check                              exit status 1: it is stale

It bakes in the guest (`runner/*.py`), `weft/version.py` and the whole of `weft/abi`, `weft/text` and `weft/sdk`: build
again whenever one of them changes. componentize-py is needed here alone, in an environment of its own:

    python -m venv ../componentize && ../componentize/bin/pip install componentize-py==0.25.1

Owns the list of what is baked in and its hash. Knows nothing of how the component is compiled or run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1]
COMPONENT = HERE / "runner" / "runner.wasm.xz"
METADATA = HERE / "runner" / "runner.json"
TOOL_VERSION = "0.25.1"
ROOMS = ("abi", "text", "sdk")
"""Packages of Weft that programs may import."""
PACKAGE_INIT = "from weft.version import __version__\n"
"""`weft/__init__.py` of the guest, which has nothing of what the package's own exports."""


def sources() -> list[Path]:
    """The files that are baked in."""
    guest = [*sorted((HERE / "runner").glob("*.py")), HERE / "runner" / "runner.wit"]
    library = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
    return [*guest, PACKAGE / "version.py", *library]


def source_hash() -> str:
    """Identifies the contents of all sources."""
    digest = hashlib.sha256(PACKAGE_INIT.encode())
    for path in sources():
        name = path.relative_to(PACKAGE).as_posix().encode()
        content = path.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(content)) + content)
    return digest.hexdigest()


def metadata() -> dict[str, str]:
    """What the component in the package was built from: `sources`, `componentize_py`, `sha256` of its bytes."""
    read: dict[str, str] = json.loads(METADATA.read_text())
    return read


def build(tool: str) -> None:
    """Build the component and replace the one in the package. Raises `subprocess.CalledProcessError`."""
    hashed = source_hash()
    with tempfile.TemporaryDirectory() as scratch:
        code = Path(scratch, "code")
        for room in ROOMS:
            shutil.copytree(PACKAGE / room, code / "weft" / room, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(PACKAGE / "version.py", code / "weft")
        Path(code, "weft", "__init__.py").write_text(PACKAGE_INIT)
        guest = code / HERE.relative_to(PACKAGE.parent) / "runner"
        guest.mkdir(parents=True)
        for path in (HERE / "runner").glob("*.py"):
            shutil.copy(path, code if path.name == "app.py" else guest)
        wit, target = Path(scratch, "wit"), Path(scratch, "runner.wasm")
        wit.mkdir()
        shutil.copy(HERE / "runner" / "runner.wit", wit)
        command = [tool, "-d", str(wit), "-w", "runner", "componentize", "--stub-wasi", "-p", str(code), "app"]
        # Hashes of strings are baked in, so they are the same in every build.
        environment = {"PATH": os.environ.get("PATH", ""), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([*command, "-o", str(target)], check=True, env=environment)  # noqa: S603
        component = target.read_bytes()
    COMPONENT.write_bytes(lzma.compress(component, preset=9))
    described = {
        "sources": hashed,
        "componentize_py": TOOL_VERSION,
        "sha256": hashlib.sha256(component).hexdigest(),
        "bytes": len(component),
    }
    METADATA.write_text(json.dumps(described, indent=2) + "\n")


def main() -> int:
    """Build or check, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", default="componentize-py", help=f"componentize-py {TOOL_VERSION}")
    parser.add_argument("--check", action="store_true", help="only say whether the component fits the sources")
    options = parser.parse_args()
    if options.check:
        current = METADATA.exists() and metadata()["sources"] == source_hash()
        print("the runner is current" if current else "the runner is stale: build it again (--help says how)")
        return 0 if current else 1
    version = subprocess.run([options.tool, "--version"], check=True, capture_output=True, text=True).stdout  # noqa: S603
    if version.split()[-1] != TOOL_VERSION:
        print(f"{options.tool} is {version.strip()}; this needs {TOOL_VERSION}", file=sys.stderr)
        return 1
    build(options.tool)
    print(f"built {COMPONENT} ({COMPONENT.stat().st_size >> 10} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
