"""Selection of kernels, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from weft.abi.errors import ConfigError
from weft.kernels import dispatch, reference, torch_ops
from weft.kernels.base import Kernels
from weft.kernels.cpu import library
from weft.kernels.cpu import ops as cpu_ops
from weft.kernels.triton import support


def test_reference_is_the_last_resort_everywhere():
    for operation, variants in dispatch.REGISTRY.items():
        assert variants[-1].function is getattr(reference.KERNELS, operation)
        assert variants[-1].supports(torch.device("cuda"), torch.float16)
    assert tuple(dispatch.REGISTRY) == Kernels._fields


def test_prefer_one_operation_or_all():
    assert dispatch.select(prefer={"*": "reference"}) == reference.KERNELS
    mixed = dispatch.select(prefer={"linear": "reference"})
    assert mixed.linear is reference.linear
    assert mixed.pack_weight is reference.pack_weight
    assert mixed.attention is not reference.attention


@pytest.mark.parametrize(
    ("prefer", "named"), [({"linear": "magic"}, "magic"), ({"lineer": "torch"}, "lineer"), ({"*": "magic"}, "magic")]
)
def test_unknown_names_are_refused(prefer, named):
    with pytest.raises(ConfigError, match=named):
        dispatch.select(prefer=prefer)


def test_describe_names_what_select_takes():
    for choice in dispatch.describe("cpu", torch.bfloat16):
        if choice.chosen == "none":
            continue
        chosen = dispatch.select("cpu", torch.bfloat16, prefer={choice.operation: choice.chosen})
        assert chosen == dispatch.select("cpu", torch.bfloat16)
        assert choice.operation == "prepare_block" or choice.available[-1] == "reference"


def test_computes_well():
    assert dispatch.computes_well("cpu", torch.float32)
    assert dispatch.computes_well("cpu", torch.float64)
    assert not dispatch.computes_well("cpu", torch.float16)


def test_bfloat16_is_computed_well_where_a_level_packs_it(monkeypatch):
    monkeypatch.setattr(dispatch, "_torch_has_bfloat16", lambda: False)
    compiled = cpu_ops.best()
    if isinstance(compiled, Exception):
        pytest.skip(f"the library is {compiled}")
    for level in library.levels(library.load()):
        monkeypatch.setattr(dispatch.cpu_ops, "best", lambda level=level: cpu_ops.CpuKernels(library.load(), level))
        assert dispatch.computes_well("cpu", torch.bfloat16) == (level > library.Level.PORTABLE)
    monkeypatch.setattr(dispatch.cpu_ops, "best", lambda: library.KernelsUnavailable("not built"))
    assert not dispatch.computes_well("cpu", torch.bfloat16)


@pytest.fixture
def installed(monkeypatch):
    """Makes Triton installed, or not."""

    def make(answer):
        monkeypatch.setattr(support, "find_spec", lambda name: name if answer else None)
        monkeypatch.setenv("CC", "cc")
        support._missing_here.cache_clear()

    yield make
    monkeypatch.undo()
    support._missing_here.cache_clear()


def test_cuda_devices_have_triton(installed):
    installed(True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        choices = dispatch.describe("cuda", dtype)
        having = [c for c in choices if c.operation != "prepare_block"]  # neither has one: test_block.py
        assert {c.chosen for c in having} == {"triton"}
        assert {c.available for c in having} == {("triton", "torch", "reference")}
    assert choices[0].note.startswith("Triton: ")


def test_what_triton_does_not_have_stays_with_torch(installed):
    installed(True)
    (choice, *_) = dispatch.describe("cuda", torch.float64)
    assert (choice.chosen, choice.note) == ("torch", "Triton: no kernels for float64")
    with pytest.raises(ConfigError, match="does not support"):
        dispatch.select("cpu", prefer={"attention": "triton"})
    installed(False)
    (choice, *_) = dispatch.describe("cuda", torch.bfloat16)
    assert choice.chosen == "torch"
    assert choice.note == "Triton: not installed; torch's builds for CUDA bring it"
    with pytest.raises(ConfigError, match="does not support"):
        dispatch.select("cuda", torch.bfloat16, prefer={"attention": "triton"})


def test_what_triton_needs_is_named(installed, monkeypatch):
    installed(True)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(support.shutil, "which", lambda name: None)
    support._missing_here.cache_clear()
    assert dispatch.describe("cuda", torch.float32)[0].note == "Triton: needs a C compiler; install gcc"
    installed(True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    support._missing_on.cache_clear()
    (choice, *_) = dispatch.describe("cuda", torch.float16)
    support._missing_on.cache_clear()
    assert (choice.chosen, choice.note) == ("torch", "Triton: needs a device of compute capability 8.0")


def test_triton_is_imported_for_cuda_devices_alone():
    code = """
import sys
sys.modules["triton"] = None  # importing it would fail
import weft
from weft.kernels import dispatch
import torch
dispatch.select("cpu", torch.bfloat16)
print(dispatch.describe("cuda", torch.bfloat16)[0].operation)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["pack_weight"]


def test_selecting_triton_loads_it(installed):
    pytest.importorskip("triton")
    installed(True)
    from weft.kernels.triton import ops

    assert dispatch.select("cuda", torch.bfloat16) == ops.KERNELS
    mixed = dispatch.select("cuda", torch.bfloat16, prefer={"*": "torch", "attention": "triton"})
    assert mixed.attention is ops.attention
    assert mixed.rms_norm is torch_ops.rms_norm
