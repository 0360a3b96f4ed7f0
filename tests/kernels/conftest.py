"""Kernels are tested with poisoned memory: what they allocate and do not write is NaN."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
