"""Checks and measures Weft on a CUDA device: correctness first, then speed.

    python -m bench.gpu [--sections check,kernels,…] [--json FILE] [--limit-s 540]

Sections, in this order, each in a separate process with a time limit, so that a failure does not affect the others. The
file is written after each section; it has the partial results of a section that fails or is stopped:

    check        every kernel against the reference, in three dtypes; pages that go to the host and come back
    kernels      the device's ceilings (a copy, a product of matrices), and each kernel against them
    link         pages to the host and back: the link's rate, and how many move beside a forward, of --link-model
    graphs       steps as graphs against the same without
    qwen3-0.6b   that shape, random weights: time per token at batches of 1, 16, 64 and 256, and beside prompts; prompts
                 alone; 32 requests
    llama-3-8b   the same
    peer         32 requests on the shape of Qwen3-0.6B by transformers' continuous batching

`--device cpu --tiny` runs everything at tiny sizes, as a smoke test. `python -m pytest -m gpu` runs the tests that need
a device: whole engines, whose tokens must be those of a CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench import gpu_kernels
from weft.kernels import dispatch
from weft.kernels.base import Kernels
from weft.version import __version__

Save = Callable[[dict[str, Any]], None]
LIMITS_S = {"check": 150, "kernels": 120, "link": 90, "graphs": 90, "qwen3-0.6b": 150, "llama-3-8b": 200, "peer": 150}
"""Section -> time limit in seconds, in the order in which the sections run."""
LINK_MODEL = "llama-3-8b"
DONE, FAILED, NO_DEVICE = 0, 1, 2


def variants(device: str) -> dict[str, Kernels]:
    """The kernel variants that are compared: the ratio is the first to the second."""
    names = ("triton", "torch") if device == "cuda" else ("torch", "reference")
    return {name: dispatch.select(device, torch.bfloat16, {"*": name}) for name in names}


def check(device: str, tiny: bool, save: Save) -> None:
    """Compare every kernel with the reference. Raises `RuntimeError`, naming every wrong case."""
    dtypes = (torch.float32,) if tiny else gpu_kernels.DTYPES
    wrong = gpu_kernels.check(variants(device), device, dtypes) + gpu_kernels.check_tiers(device, 20 if tiny else 200)
    save({"wrong": wrong})
    if wrong:
        raise RuntimeError("\n".join(["these do not agree with the reference:", *wrong]))
    print("every operation agrees with the reference, and pages come back from the host as they went")


def kernels(device: str, tiny: bool, save: Save) -> None:
    """Measure the device's ceilings and each kernel against them."""
    scale = (gpu_kernels.TINY_SCALE if tiny else gpu_kernels.LARGE_SCALE)._replace(device=device)
    compared = variants(device)
    most = gpu_kernels.ceilings(scale)
    print(f"copy {most.copy_gigabytes_per_s:.0f} GB/s, product {most.product_teraflops:.0f} TFLOP/s\n")
    print(gpu_kernels.header(list(compared)))
    results: list[dict[str, Any]] = []
    for measured in gpu_kernels.measure(compared, scale, most):
        print(gpu_kernels.line(measured), flush=True)
        results.append(measured._asdict())
        save({"ceilings": most._asdict(), "results": results})


def link(model: str, device: str, tiny: bool, save: Save) -> None:
    """Measure the link to the host, alone and beside forwards."""
    from bench import gpu_link

    load = gpu_link.TINY if tiny else gpu_link.LARGE
    gpu_link.measure("tiny" if tiny else model, load, device, save)


def models(name: str, device: str, tiny: bool, save: Save) -> None:
    """Measure the sections of models; the module's docstring lists them."""
    # Not at the top: kernels are checked also where what the engine depends on is not installed.
    from bench import gpu_models

    load = gpu_models.TINY if tiny else gpu_models.LARGE
    load = load._replace(options={**load.options, "device": device})
    if name == "graphs":
        found = gpu_models.same_tokens(load, save)
    elif name == "peer":
        found = gpu_models.transformers_requests("tiny" if tiny else "qwen3-0.6b", load, save)
    else:
        found = gpu_models.measure("tiny" if tiny else name, load, save)
    print(json.dumps(found, indent=1))


def run_section(name: str, device: str, tiny: bool, save: Save, link_model: str = LINK_MODEL) -> None:
    """Run one section in this process."""
    if name == "link":
        link(link_model, device, tiny, save)
        return
    if name in ("check", "kernels"):
        {"check": check, "kernels": kernels}[name](device, tiny, save)
    else:
        models(name, device, tiny, save)


def environment(device: str) -> dict[str, object]:
    """The device, and the versions of the software."""
    versions: dict[str, str | None] = {"weft": __version__, "python": platform.python_version()}
    versions |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    found: dict[str, object] = {"device": device, "system": platform.platform(), "versions": versions}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
    return found


def run_all(names: list[str], options: list[str], limit_s: float, save: Save) -> dict[str, Any]:
    """Run every section in a separate process with `options`. Returns the result of each, also of those that failed."""
    began = time.monotonic()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            part = Path(folder) / f"{name}.json"
            left = limit_s - (time.monotonic() - began)
            print(f"\n== {name}", flush=True)
            found[name] = _run_apart(name, options, min(left, LIMITS_S[name]), part)
            if "error" in found[name]:
                print(f"{name} FAILED: {found[name]['error']}", flush=True)
            save(found)
    return found


def _run_apart(name: str, options: list[str], limit_s: float, part: Path) -> dict[str, Any]:
    if limit_s <= 0:
        return {"error": "not begun: the time was up"}
    command = [sys.executable, "-m", "bench.gpu", "--only", name, "--json", str(part), *options]
    began = time.monotonic()
    try:
        code = subprocess.run(command, timeout=limit_s, check=False).returncode
        error = None if code == DONE else f"it ended with status {code}"
    except subprocess.TimeoutExpired:
        error = f"it was stopped after {limit_s:.0f} s"
    said: dict[str, Any] = json.loads(part.read_text()) if part.exists() else {}
    if error is not None:
        said.setdefault("error", error)
    return {"seconds": round(time.monotonic() - began, 1), **said}


def _only(name: str, device: str, tiny: bool, path: Path, link_model: str = LINK_MODEL) -> int:
    """Run one section in this process. The file always has its results so far, and its error if it fails."""
    found: dict[str, Any] = {}

    def save(result: dict[str, Any]) -> None:
        found["result"] = result
        _write(path, found)

    try:
        run_section(name, device, tiny, save, link_model)
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"
        _write(path, found)
        return FAILED
    return DONE


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write the file atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sections", default="all", help=f"comma-separated, of {', '.join(LIMITS_S)}")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where results are written")
    parser.add_argument("--limit-s", type=float, default=540, help="seconds, for everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--link-model", default=LINK_MODEL, help=f"shape of the section link ({LINK_MODEL})")
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing")
    parser.add_argument("--only", choices=tuple(LIMITS_S), help="this section, in this process")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.exit(NO_DEVICE, f"This needs a CUDA device, and torch {torch.__version__} finds none.\n")
    if args.only:
        return _only(args.only, args.device, args.tiny, args.json, args.link_model)
    names = list(LIMITS_S) if args.sections == "all" else args.sections.split(",")
    if unknown := set(names) - set(LIMITS_S):
        parser.error(f"no sections named {sorted(unknown)}; there are {', '.join(LIMITS_S)}")
    options = ["--device", args.device, "--link-model", args.link_model, *(["--tiny"] if args.tiny else [])]
    where = environment(args.device)
    print(f"{where['device']}, {where['versions']}", flush=True)
    whole = {**where, "command": shlex.join(["python", "-m", "bench.gpu", *sys.argv[1:]])}
    found = run_all(names, options, args.limit_s, lambda sections: _write(args.json, {**whole, "sections": sections}))
    return FAILED if any("error" in section for section in found.values()) else DONE


if __name__ == "__main__":
    sys.exit(main())
