"""The benchmark on a GPU, as far as it goes without one: its checks, its cases, its sections, its refusal."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_kernels, gpu_link, gpu_models
from weft.kernels import dispatch, reference
from weft.kernels.base import Kernels
from weft.models.registry import family_of
from weft.worker import host_link

torch_kernels = dispatch.select(prefer={"*": "torch"})


def test_kernels_that_are_right_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "SMALL", gpu_kernels.SMALL[:1])
    assert gpu_kernels.check({"torch": torch_kernels, "reference": reference.KERNELS}, "cpu", (torch.float32,)) == []


@pytest.mark.parametrize(
    "operation", ["attention", "rms_norm", "rotate_and_store", "silu_mul", "copy_pages", "copy_slots"]
)
def test_a_kernel_that_is_wrong_is_named(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "SMALL", gpu_kernels.SMALL[:1])
    right = getattr(torch_kernels, operation)

    def wrong(*args: torch.Tensor) -> object:
        if operation.startswith("copy"):
            return None  # copies nothing
        out = right(*args)
        out[0] += 0.1
        return out

    broken: Kernels = torch_kernels._replace(**{operation: wrong})
    said = gpu_kernels.check({"broken": broken}, "cpu", (torch.float32,))
    assert any(line.startswith(f"broken: {operation} (") for line in said)
    assert {line.split()[1] for line in said} <= {operation, "copy_pages", "copy_slots"}  # these go on from each other


def test_not_a_number_is_wrong() -> None:
    ones = torch.ones(3)
    assert gpu_kernels._close(ones, ones)
    assert not gpu_kernels._close(ones * float("nan"), ones)


def test_pages_that_come_back_wrong_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_kernels.check_tiers("cpu", 20) == []
    monkeypatch.setattr(host_link.CpuLink, "swap_in", lambda self, host_pages, device_pages: None)
    assert gpu_kernels.check_tiers("cpu", 20) == ["pages moved to the host and back: layers [0, 1, 2] are wrong"]


def test_the_link_is_measured_beside_forwards() -> None:
    saved: list[dict[str, Any]] = []
    found = gpu_link.measure("tiny", gpu_link.TINY, "cpu", saved.append)
    assert saved[-1] == found
    assert len(found["alone"]) == 2 * 2 * 3
    for beside in found["beside"].values():
        for direction in ("out", "in", "both"):
            assert [point["pages"] for point in beside[direction]["points"]] == [2, 4]


def test_free_pages_lie_between_the_measured_ones() -> None:
    def points(*steps: tuple[int, float]) -> list[gpu_link.Point]:
        return [gpu_link.Point(pages, 10.0, step_ms, 1.0) for pages, step_ms in steps]

    assert gpu_link.free_pages(points((8, 10.1), (16, 10.5))) == pytest.approx(8 + 8 * 0.5)
    assert gpu_link.free_pages(points((8, 10.6))) == pytest.approx(4)
    assert gpu_link.free_pages(points((8, 9.9), (16, 10.2))) is None


def test_every_operation_is_measured_or_a_product() -> None:
    cases = list(gpu_kernels.other_cases(20, gpu_kernels.SMALL[0], torch.float32, "cpu"))
    products = {"linear", "gated_linear", "linear_rms_norm", "pack_weight", "take_rows"}
    absent = {"prepare_block"}  # Triton has none
    assert {case.operation for case in cases} | {"attention"} | products | absent == set(Kernels._fields)
    assert all(case.bytes > 0 for case in cases)


def test_work_of_attention() -> None:
    (case,) = gpu_kernels.attention_cases(
        ((2, 3),), gpu_kernels.HeadShape(4, 2, 16), torch.bfloat16, "cpu", "", options=False
    )
    assert case.flops == 4 * (2 + 3) * 4 * 16  # the first query sees two entries, the second three
    assert case.bytes == (2 * 3 * 2 * 16 + 2 * 2 * 4 * 16) * 2


def test_a_line_has_the_ratio() -> None:
    measured = gpu_kernels.Measured("attention", "a case", {"triton": 10.0, "torch": 25.0}, 4000, 1.5, 0.93)
    words = ["attention", "a", "case", "10.0", "25.0", "2.50x", "4000", "1.5", "93.0%"]
    assert gpu_kernels.line(measured).split() == words


def test_a_share_is_that_of_the_nearer_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = gpu_kernels.TINY_SCALE
    monkeypatch.setattr(gpu_kernels, "median_ms", lambda call, scale: 2.0)
    (case, *_) = gpu_kernels.large_cases(scale)
    gigabytes, teraflops = case.bytes / 2e6, case.flops / 2e9
    compared = {"a": torch_kernels, "b": torch_kernels}
    for most, share in (
        (gpu_kernels.Ceilings(2 * gigabytes, 1e9), 0.5),
        (gpu_kernels.Ceilings(1e9, 4 * teraflops), 0.25),
    ):
        first = next(gpu_kernels.measure(compared, scale, most))
        assert first.share == pytest.approx(share)
        assert (first.gigabytes_per_s, first.teraflops) == (gigabytes, teraflops)
        assert first.microseconds == {"a": 2000.0, "b": 2000.0}


def test_the_shapes_are_those_of_the_models() -> None:
    sizes = {}
    for name in ("qwen3-0.6b", "llama-3-8b"):
        family = family_of(gpu_models.SHAPES[name])
        spec = family.spec(gpu_models.SHAPES[name])
        targets = [target for index in range(spec.num_layers) for target in family.layer_weights(spec, index)]
        sizes[name] = sum(math.prod(target.shape) for target in [*family.shared_weights(spec), *targets])
    # As published: 8.03 billion parameters, and 0.6, of which 0.44 are not the embedding.
    assert sizes["llama-3-8b"] == 8_030_261_248
    assert sizes["qwen3-0.6b"] == 596_049_920


def small(**changes: Any) -> gpu_models.Load:
    return gpu_models.TINY._replace(**changes)


def test_a_shape_is_measured() -> None:
    saved: list[dict[str, Any]] = []
    found = gpu_models.measure("tiny", small(), lambda result: saved.append(json.loads(json.dumps(result))))
    mode = found["no_graphs"]
    assert set(mode) == {"tpot_1", "tpot_3", "beside_prompts", "prefill_tokens_per_s", "requests", "graphs"}
    assert mode["tpot_3"]["steps"] == small().output_tokens - 1
    assert mode["tpot_3"]["tokens_per_s"] == pytest.approx(3000 / mode["tpot_3"]["median_ms"])
    assert mode["beside_prompts"]["batch"] == 3
    assert mode["beside_prompts"]["steps"] > 0
    assert mode["prefill_tokens_per_s"] > 0
    assert mode["requests"]["shape"] == "2 x (9 -> 3)"
    assert len(mode["requests"]["runs_s"]) == 1
    # What is known is saved while the rest is measured.
    assert [set(part["no_graphs"]) for part in saved[:2]] == [{"tpot_1"}, {"tpot_1", "tpot_3"}]


def test_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    load = small(requests=4, options={**small().options, "max_running": 4})
    found = gpu_models.same_tokens(load, lambda result: None)
    assert (found["sequences"], found["same"], found["largest_difference_of_logprobs"]) == (5, 5, 0.0)
    right = gpu_models.Client.run

    def wrong(self: gpu_models.Client, *args: Any) -> gpu_models.Run:
        run = right(self, *args)
        if self is first[0]:
            run.tokens[0][-1] += 1
        return run

    first: list[gpu_models.Client] = []
    made = gpu_models.Client.__init__

    def make(self: gpu_models.Client, *args: Any) -> None:
        first.append(self)
        made(self, *args)

    monkeypatch.setattr(gpu_models.Client, "__init__", make)
    monkeypatch.setattr(gpu_models.Client, "run", wrong)
    with pytest.raises(RuntimeError, match="graphs change what is generated"):
        gpu_models.same_tokens(load, lambda result: None)


def run_gpu(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--tiny", "--json", str(path), *options]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    return done.returncode, json.loads(path.read_text())


@pytest.mark.slow
def test_sections_run_apart_and_are_written(tmp_path: Path) -> None:
    code, written = run_gpu(tmp_path / "out.json", "--sections", "kernels,graphs")
    assert code == gpu.DONE, written
    assert list(written["sections"]) == ["kernels", "graphs"]
    kernels = written["sections"]["kernels"]["result"]
    assert {case["operation"] for case in kernels["results"]} > {"attention", "rms_norm"}
    assert set(kernels["ceilings"]) == {"copy_gigabytes_per_s", "product_teraflops"}
    assert written["sections"]["graphs"]["result"]["same"] == 3
    assert written["versions"]["torch"] == torch.__version__
    assert written["command"].startswith("python -m bench.gpu")


WITHOUT = """
import sys

ABSENT = {absent}


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent())
sys.argv = ["gpu", "--device", "cpu", "--tiny", "--only", "graphs", "--json", {path!r}]
from bench import gpu

sys.exit(gpu.main())
"""
ABSENT = (
    *("starlette", "uvicorn", "uvloop", "httptools", "websockets", "httpx", "httpcore", "jinja2", "zmq", "wasmtime"),
    *("prometheus_client", "rich", "typer", "click", "psutil", "huggingface_hub", "transformers"),
)


@pytest.mark.slow
def test_it_needs_no_web_server_and_no_terminal(tmp_path: Path) -> None:
    """An engine that answers, where nothing but what computes is installed."""
    path = tmp_path / "out.json"
    code = WITHOUT.format(absent=set(ABSENT), path=str(path))
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == gpu.DONE, done.stderr
    assert json.loads(path.read_text())["result"]["same"] == 3


def test_a_section_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other programs in place of the sections."""
    programs = {
        "check": "import os; os._exit(7)",
        "kernels": "import threading; threading.Event().wait()",
        "graphs": "from pathlib import Path; import sys; Path(sys.argv[1]).write_text('{\"result\": 5}')",
    }
    run = subprocess.run

    def instead(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        name, path = command[command.index("--only") + 1], command[command.index("--json") + 1]
        return run([sys.executable, "-c", programs[name], path], **options)

    monkeypatch.setattr(gpu.subprocess, "run", instead)
    monkeypatch.setitem(gpu.LIMITS_S, "kernels", 0.5)
    saved: list[int] = []
    found = gpu.run_all(list(programs), [], 100, lambda sections: saved.append(len(sections)))
    assert found["check"]["error"] == "it ended with status 7"
    assert found["kernels"]["error"].startswith("it was stopped after")
    assert found["graphs"]["result"] == 5
    assert "error" not in found["graphs"]
    assert saved == [1, 2, 3]
    assert gpu.run_all(["graphs"], [], 0, lambda sections: None)["graphs"] == {"error": "not begun: the time was up"}


def test_an_error_inside_a_section_is_kept_with_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_kernels, "check", lambda compared, device, dtypes: ["triton: attention (a case)"])
    assert gpu._only("check", "cpu", True, tmp_path / "out.json") == gpu.FAILED
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["result"] == {"wrong": ["triton: attention (a case)"]}
    assert "triton: attention (a case)" in written["error"]
    assert "do not agree" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert end.value.code == gpu.NO_DEVICE
    assert "finds none" in capsys.readouterr().err
