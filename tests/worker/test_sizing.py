"""Numbers of pages from made-up memory, and the reading of made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.abi.errors import ConfigError
from weft.config import EngineConfig
from weft.worker import sizing
from weft.worker.memory import free_host_bytes, usable_cores
from weft.worker.sizing import FreeMemory, kernel_environment, kernel_threads, size_pools

GIB = 1 << 30
PAGE_BYTES = 1 << 20
FREE = FreeMemory(10 * GIB, 10 * GIB)


def sized(free: FreeMemory = FREE, *, gpu: bool = False, context: int = 2048, **config: object) -> sizing.Sizing:
    return size_pools(EngineConfig(**config), bytes_per_page=PAGE_BYTES, model_context=context, free=free, gpu=gpu)


def test_defaults_take_their_share():
    assert sized() == (3072, 0, 2048, None)
    assert sized(FreeMemory(10 * GIB, 20 * GIB), gpu=True) == (9216, 4096, 2048, None)


def test_what_is_configured_is_taken():
    assert sized(memory_fraction=0.5)[:2] == (5120, 0)
    assert sized(kv_cache_bytes=GIB, host_kv_bytes=GIB // 2)[:2] == (1024, 512)
    assert sized(num_pages=300, max_context=100) == (300, 0, 100, None)
    assert sized(FreeMemory(10 * GIB, 20 * GIB), gpu=True, host_kv_bytes=0).num_host_pages == 0


def test_a_context_that_does_not_fit_shrinks_unless_it_was_asked_for():
    found = sized(num_pages=100)
    assert (found.num_device_pages, found.max_context) == (100, 1600)
    assert "max_context is 1600 instead of 2048" in found.notice
    assert "num_pages" in found.notice
    with pytest.raises(ConfigError, match=r"one sequence of 2048 tokens needs 128 MiB .* at most 1600 .*num_pages"):
        sized(num_pages=100, max_context=2048)
    with pytest.raises(ConfigError, match="memory_fraction or kv_cache_bytes"):
        sized(FreeMemory(GIB // 1024, GIB), gpu=True)


def test_the_least_that_works_is_named_and_works():
    assert sized(num_pages=100).notice.endswith("or give num_pages of at least 128")
    assert sized(num_pages=128).max_context == 2048
    with pytest.raises(ConfigError, match=r"holds no page of 1 MiB; .* of at least 128 MiB, .* of at least 1 MiB$"):
        sized(kv_cache_bytes=10 * 1024)
    assert sized(kv_cache_bytes=1 << 20, max_context=16).num_device_pages == 1
    assert sizing.size_pools(
        EngineConfig(kv_cache_bytes=3 * 1024), bytes_per_page=1500, model_context=48, free=FREE, gpu=False
    ).notice.endswith("kv_cache_bytes of at least 5 KiB")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_pages": 20_000}, "num_pages 20000 needs 19.53 GiB and 10 GiB are free; at most 10240 fit"),
        ({"kv_cache_bytes": 11 * GIB}, "kv_cache_bytes .* lower it"),
        ({"host_kv_bytes": 11 * GIB}, "host_kv_bytes asks for 11 GiB and 10 GiB of memory are free; lower it, .* to 0"),
        ({"max_context": 4096}, "exceeds the 2048 tokens of the model"),
        (
            {"kv_cache_bytes": 6 * GIB, "host_kv_bytes": 6 * GIB},
            "12 GiB of KV pages exceed the 10 GiB .* 6 GiB of the device and 6 GiB .*host_kv_bytes",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_a_remedy(config: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        sized(**config)


def test_tiny_pages_do_not_become_countless():
    found = size_pools(EngineConfig(), bytes_per_page=64, model_context=2048, free=FREE, gpu=False)
    assert found.num_device_pages == sizing.MAX_AUTOMATIC_PAGES


def machine(root: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A fake /proc and /sys/fs/cgroup; MemAvailable is 8 GiB."""
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return proc, groups


V2 = "0::/outer/inner\n"
V1 = "9:name=systemd:/\n4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {}, 8 * GIB),
        (V2, {"outer/inner/memory.max": "max", "outer/inner/memory.current": "5"}, 8 * GIB),
        (V2, {"outer/inner/memory.max": str(2 * GIB), "outer/inner/memory.current": str(GIB)}, GIB),
        # An outer group may be tighter, and so may the root, which is all that a container sees.
        (V2, {"outer/memory.max": str(3 * GIB), "outer/memory.current": "0"}, 3 * GIB),
        (V2, {"memory.max": str(GIB), "memory.current": "0"}, GIB),
        # Cached file pages, such as a checkpoint just read, can be had back.
        (
            V2,
            {
                "memory.max": str(2 * GIB),
                "memory.current": str(2 * GIB),
                "memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file 1",
            },
            GIB,
        ),
        (V2, {"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
        (V1, {"memory/box/memory.limit_in_bytes": str(2**63 - 4096), "memory/box/memory.usage_in_bytes": "0"}, 8 * GIB),
        (
            V1,
            {
                "memory/box/memory.limit_in_bytes": str(4 * GIB),
                "memory/box/memory.usage_in_bytes": str(3 * GIB),
                "memory/box/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
            },
            2 * GIB,
        ),
        (V1, {"memory/memory.limit_in_bytes": str(GIB), "memory/memory.usage_in_bytes": "0"}, GIB),
        ("", {}, 8 * GIB),
    ],
)
def test_free_memory_respects_cgroups(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int):
    assert free_host_bytes(*machine(tmp_path, cgroup, files)) == expected


def test_this_machine_has_memory_and_cores():
    assert free_host_bytes() > 0
    assert usable_cores() >= 1


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (V2, {"outer/cpu.max": "90000 100000"}),
        (V1, {"cpu/box/cpu.cfs_quota_us": "100000", "cpu/box/cpu.cfs_period_us": "100000"}),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}),
    ],
)
def test_cores_respect_quotas(tmp_path: Path, cgroup: str, files: dict[str, str]):
    assert usable_cores(*machine(tmp_path, cgroup, files)) == 1


def test_no_quota_leaves_all_cores(tmp_path: Path):
    files = {"cpu.max": "max 100000", "cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}
    proc, groups = machine(tmp_path, V2 + V1, files)
    assert usable_cores(proc, groups) == usable_cores(tmp_path, tmp_path)


def test_threads_leave_room_for_the_other_processes():
    assert [kernel_threads(None, cores) for cores in (1, 2, 3, 4, 8, 64)] == [1, 2, 3, 3, 6, 62]
    assert kernel_threads(5, 2) == 5


def test_the_environment_makes_idle_threads_wait():
    environment = kernel_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
