"""Triton's interpreter has to be asked for before anything imports Triton; it runs kernels where there is no GPU."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
