"""The benchmark of kernels on a GPU, as far as it goes without one: its checks, its cases, its refusal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import gpu
from weft.kernels import dispatch, reference
from weft.kernels.base import Kernels

torch_kernels = dispatch.select(prefer={"*": "torch"})


def test_kernels_that_are_right_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SMALL", gpu.SMALL[:1])
    assert gpu.check({"torch": torch_kernels, "reference": reference.KERNELS}, "cpu", (torch.float32,)) == []


@pytest.mark.parametrize(
    "operation", ["attention", "rms_norm", "rotate_and_store", "silu_mul", "copy_pages", "copy_slots"]
)
def test_a_kernel_that_is_wrong_is_named(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SMALL", gpu.SMALL[:1])
    right = getattr(torch_kernels, operation)

    def wrong(*args: torch.Tensor) -> object:
        if operation.startswith("copy"):
            return None  # copies nothing
        out = right(*args)
        out[0] += 0.1
        return out

    broken: Kernels = torch_kernels._replace(**{operation: wrong})
    said = gpu.check({"broken": broken}, "cpu", (torch.float32,))
    assert any(line.startswith(f"broken: {operation} (") for line in said)
    assert {line.split()[1] for line in said} <= {operation, "copy_pages", "copy_slots"}  # these go on from each other


def test_not_a_number_is_wrong() -> None:
    ones = torch.ones(3)
    assert gpu._close(ones, ones)
    assert not gpu._close(ones * float("nan"), ones)


def test_every_operation_is_measured_or_a_product() -> None:
    cases = list(gpu.other_cases(20, gpu.SMALL[0], torch.float32, "cpu"))
    products = {"linear", "gated_linear", "pack_weight"}
    assert {case.operation for case in cases} | {"attention"} | products == set(Kernels._fields)
    assert all(case.bytes > 0 for case in cases)


def test_work_of_attention() -> None:
    (case,) = gpu.attention_cases(((2, 3),), gpu.HeadShape(4, 2, 16), torch.bfloat16, "cpu", "", options=False)
    assert case.flops == 4 * (2 + 3) * 4 * 16  # the first query sees two entries, the second three
    assert case.bytes == (2 * 3 * 2 * 16 + 2 * 2 * 4 * 16) * 2


def test_a_line_has_the_ratio() -> None:
    text = gpu.line(gpu.Measured("attention", "a case", {"triton": 10.0, "torch": 25.0}, 4000, 1.5))
    assert text.split() == ["attention", "a", "case", "10.0", "25.0", "2.50x", "4000", "1.5"]


def test_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With another clock and other cases, where a device would be."""

    def two_ms(call: Callable[[], object], runs: int) -> float:
        assert runs == 7
        call()
        return 2.0

    cases = list(gpu.other_cases(20, gpu.SMALL[0], torch.float32, "cpu"))
    monkeypatch.setattr(sys, "argv", ["gpu", "--runs", "7", "--json", str(tmp_path / "out.json")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatch, "select", lambda device, dtype, prefer: torch_kernels)
    monkeypatch.setattr(gpu, "environment", lambda: {"device": "a device", "versions": {}})
    monkeypatch.setattr(gpu, "check", lambda variants, device: [])
    monkeypatch.setattr(gpu, "ceilings", lambda runs: {"copy_gigabytes_per_s": 4000.0, "product_teraflops": 700.0})
    monkeypatch.setattr(gpu, "large_cases", lambda: iter(cases))
    monkeypatch.setattr(gpu, "median_ms", two_ms)
    gpu.main()
    said = capsys.readouterr().out
    assert "copy 4000 GB/s, product 700 TFLOP/s" in said
    assert said.count("2000.0     2000.0   1.00x") == len(cases)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["command"].startswith("python -m bench.gpu --runs 7")
    assert [r["operation"] for r in written["results"]] == [c.operation for c in cases]
    assert written["results"][0]["gigabytes_per_s"] == pytest.approx(cases[0].bytes / 2e6)
    monkeypatch.setattr(gpu, "check", lambda variants, device: ["triton: attention (a case)"])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code == 1
    assert "triton: attention (a case)" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code == 2
    assert "finds none" in capsys.readouterr().err
