"""Arguments of benchmarks that compare engines, and files of results that a later run continues."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bench.peers.vllm_cpu import PYTHON_VARIABLE


def continued(file: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record in `file`, to be continued by a run that would begin with `record`; that one where there is no file.

    Ends the process if the file is of another processor, other versions or other settings (`asked`).
    """
    if not file.exists():
        return dict(record)
    before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    same = before.get("asked") == record["asked"] and before["machine"]["cpu"] == record["machine"]["cpu"]
    if not same or before["versions"] != record["versions"]:
        sys.exit(f"{file} is of another machine, other versions or other settings: {before.get('asked')}")
    return before


def add_arguments(parser: argparse.ArgumentParser, *, record: str, kept: str) -> None:
    """Add what benchmarks of engines have in common: the file of results, which `record` describes and of which a later
    run keeps what `kept` names, and the interpreter of vLLM."""
    parser.add_argument("--vllm-python", help=f"the interpreter of an environment with vLLM ({PYTHON_VARIABLE})")
    parser.add_argument("--json", type=Path, help=f"write {record} to this file")
    parser.add_argument("--resume", action="store_true", help=f"keep the {kept} that the file has")


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check the values of `add_arguments`, which end the process if they contradict each other, and set the
    environment variable of vLLM's interpreter."""
    if args.resume and not args.json:
        parser.error("--resume needs --json, the file to continue")
    if args.vllm_python:
        os.environ[PYTHON_VARIABLE] = args.vllm_python


def chosen(parser: argparse.ArgumentParser, names: str, known: Collection[str], noun: str) -> list[str]:
    """The names of a comma-separated list. Ends the process if one is not `known`."""
    found = [name for name in names.split(",") if name]
    if unknown := [name for name in found if name not in known]:
        parser.error(f"no such {noun}: {', '.join(unknown)}; there are {', '.join(known)}")
    return found
