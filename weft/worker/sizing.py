"""From free memory to numbers of pages. Pure: every quantity is an argument.

The rules are those of `EngineConfig`. A pool must hold at least one sequence of `max_context` tokens, or requests that
the server accepts could never run.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.abi.errors import ConfigError
from weft.config import EngineConfig

GPU_FRACTION, CPU_FRACTION = 0.9, 0.3
HOST_FRACTION = 0.2
"""Of free host memory, for pages evicted from a GPU."""
MAX_AUTOMATIC_HOST_BYTES = 64 << 30
"""Of the host tier where no size is given: to pin hundreds of gigabytes takes minutes at each start."""
MAX_AUTOMATIC_PAGES = 1 << 20
"""A tiny model on a large machine would get so many pages that their bookkeeping outweighs them."""
MAX_KV_SLOTS = 2**31 - 1
"""KV slots are int32."""


class FreeMemory(NamedTuple):
    """What is free once the model is loaded, in bytes."""

    device: int
    """On a CPU the same memory as `host`."""
    host: int


class Sizing(NamedTuple):
    """Pages and bytes that the memory allows."""

    num_device_pages: int
    num_host_pages: int
    max_context: int
    """Tokens; may be less than the model allows."""
    notice: str | None
    """What a user should know about it, or None."""


def size_pools(config: EngineConfig, *, bytes_per_page: int, model_context: int, free: FreeMemory, gpu: bool) -> Sizing:
    """How many pages fit, and how long a sequence may be.

    `model_context` is the longest sequence, in tokens, that the model allows. Raises `ConfigError`, saying what to
    change, when what the configuration asks for does not fit.
    """
    wanted = config.max_context or model_context
    if wanted > model_context:
        raise ConfigError(f"max_context {wanted} exceeds the {model_context} tokens of the model; lower it")
    device_pages = _device_pages(config, bytes_per_page, free, gpu)
    host_pages = _host_pages(config, bytes_per_page, free, gpu)
    if not gpu and (device_pages + host_pages) * bytes_per_page > free.host:
        raise ConfigError(
            f"{_size((device_pages + host_pages) * bytes_per_page)} of KV pages exceed the {_size(free.host)} of free "
            f"memory: {_size(device_pages * bytes_per_page)} of the device and {_size(host_pages * bytes_per_page)} of "
            "the host tier; lower num_pages, kv_cache_bytes or memory_fraction, or host_kv_bytes (0: no host tier)"
        )
    room = device_pages * config.page_size
    if wanted <= room:
        return Sizing(device_pages, host_pages, wanted, None)
    least = _pages_of(wanted, config.page_size)
    if room == 0:
        raise ConfigError(
            f"the memory for KV holds no page of {_size(bytes_per_page)}; one sequence of {wanted} tokens needs "
            f"{_least(config, least, bytes_per_page)}, one of {config.page_size} tokens (max_context) "
            f"{_least(config, 1, bytes_per_page)}"
        )
    remedy = (
        f"one sequence of {wanted} tokens needs {_size(least * bytes_per_page)} of KV pages and there are "
        f"{_size(device_pages * bytes_per_page)}; set max_context to at most {room} or give "
        f"{_least(config, least, bytes_per_page)}"
    )
    if config.max_context is not None:
        raise ConfigError(remedy)
    return Sizing(device_pages, host_pages, room, f"max_context is {room} instead of {wanted}: {remedy}")


def _device_pages(config: EngineConfig, bytes_per_page: int, free: FreeMemory, gpu: bool) -> int:
    most = MAX_KV_SLOTS // config.page_size
    if config.num_pages is not None:
        if config.num_pages * bytes_per_page > free.device or config.num_pages > most:
            raise ConfigError(
                f"num_pages {config.num_pages} needs {_size(config.num_pages * bytes_per_page)} and "
                f"{_size(free.device)} are free; at most {min(most, free.device // bytes_per_page)} fit"
            )
        return config.num_pages
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes > free.device:
            raise ConfigError(
                f"kv_cache_bytes {config.kv_cache_bytes} exceeds the {free.device} bytes that are free; lower it"
            )
        return min(most, config.kv_cache_bytes // bytes_per_page)
    fraction = config.memory_fraction or (GPU_FRACTION if gpu else CPU_FRACTION)
    return min(most, MAX_AUTOMATIC_PAGES, int(free.device * fraction) // bytes_per_page)


def _host_pages(config: EngineConfig, bytes_per_page: int, free: FreeMemory, gpu: bool) -> int:
    if config.host_kv_bytes is None:
        most_bytes = min(int(free.host * HOST_FRACTION), MAX_AUTOMATIC_HOST_BYTES)
        return min(MAX_AUTOMATIC_PAGES, most_bytes // bytes_per_page) if gpu else 0
    if config.host_kv_bytes > free.host:
        raise ConfigError(
            f"host_kv_bytes asks for {_size(config.host_kv_bytes)} and {_size(free.host)} of memory are free; "
            "lower it, or set it to 0 to do without a host tier"
        )
    return max(0, config.host_kv_bytes) // bytes_per_page


def kernel_threads(configured: int | None, cores: int) -> int:
    """CPU threads of kernels: as configured, or one per core less those that front and host need (none below four)."""
    if configured is not None:
        return configured
    return cores if cores < 4 else cores - 1 if cores < 8 else cores - 2


def kernel_environment(threads: int) -> dict[str, str]:
    """Variables that a process must have before it imports torch, so that its idle kernel threads leave their cores.

    The defaults of the OpenMP runtimes spin for up to 200 ms after each parallel region, on cores that the front and
    the program host share.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "10000",
        "KMP_BLOCKTIME": "0",
    }


def _least(config: EngineConfig, pages: int, bytes_per_page: int) -> str:
    """The setting that gives so many pages, with the least value that does."""
    if config.num_pages is not None:
        return f"num_pages of at least {pages}"
    size = _size_up(pages * bytes_per_page)
    if config.kv_cache_bytes is not None:
        return f"kv_cache_bytes of at least {size}"
    return f"a larger memory_fraction or kv_cache_bytes of at least {size}"


def _pages_of(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _size_up(num_bytes: int) -> str:
    """The size, rounded up, as a number and a unit: a form that settings take."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    return f"{-(-num_bytes // 1024)} KiB"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
