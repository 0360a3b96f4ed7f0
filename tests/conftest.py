"""What libraries read from the environment once: this is loaded before any test imports them."""

from __future__ import annotations

import os
import tempfile

import torch

_data = tempfile.TemporaryDirectory(prefix="weft-tests-")
os.environ["XDG_DATA_HOME"] = _data.name
"""Servers that tests start keep their data apart from that of the user who runs the tests."""
os.environ.pop("WEFT_DATA", None)

if torch.cuda.is_available():
    # Tests of kernels ask torch for deterministic algorithms, which cuBLAS has with a workspace of fixed size.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    # Without a GPU, Triton interprets its kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes run tests at once; more threads than cores would only make them wait for each other.
    torch.set_num_threads(1)
