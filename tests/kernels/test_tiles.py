"""Matrix tiles (AMX): other libraries' configuration of them survives our products."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.kernels.blocks import all_kernels
from weft import native
from weft.kernels.cpu import library

SOURCE = """
void get(char *to) { __asm__ volatile("sttilecfg %0" : "=m"(*(char(*)[64])to)); }
void set(const char *from) { __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])from)); }
"""
NONE = bytes(64)
TILES = bytes([1, *[0] * 15, *[32, 0] * 8, *[0] * 16, *[7] * 8, *[0] * 8])
"""Eight tiles of 7 rows of 32 bytes."""


@pytest.mark.parametrize("before", [NONE, TILES], ids=["none", "some"])
def test_tiles_are_configured_as_before(tmp_path, before):
    found = [kernels for kernels in all_kernels() if kernels.level == library.Level.AMX]
    if not found:
        pytest.skip("needs a processor with AMX")
    (tmp_path / "tiles.c").write_text(SOURCE)
    compiler = native.find_compiler("C", "CC", ("gcc", "clang", "cc"))
    native.run([[*compiler, "-O1", "-shared", "-fPIC", str(tmp_path / "tiles.c"), "-o", str(tmp_path / "tiles.so")]])
    tiles = ctypes.CDLL(str(tmp_path / "tiles.so"))
    after = ctypes.create_string_buffer(64)
    x, weight = torch.randn(40, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tiles.set(before)
        for kernels in found:
            kernels.linear(x, kernels.pack_weight(weight))
        tiles.get(after)
    finally:
        tiles.set(NONE)
        torch.set_num_threads(threads)
    assert after.raw == before
