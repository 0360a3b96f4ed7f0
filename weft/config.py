"""Every knob, frozen and composed. `resolve` returns a new config that fits a machine; nothing mutates one.

Precedence, lowest first: defaults here, a TOML file, `WEFT_…` environment variables, command-line flags
(`weft.cli.settings` merges them; this file does not read the environment).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_type_hints

import msgspec

from weft.abi.errors import ConfigError
from weft.core.step import MAX_PAGE_SIZE

EMBEDDED_MODEL = "weft-tiny"
"""The model that ships in the package."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Quantization = Literal["int8"]


def is_hub_id(model: str) -> bool:
    """Whether a model is named as on the Hugging Face hub, `org/name`. Whether there is one is not looked up; with a
    leading '.', '~' or '/', or a second '/', it can only have been meant as a path."""
    return _HUB_ID.fullmatch(model) is not None


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where Weft keeps files that it can make again: `WEFT_CACHE`, else `weft` under `XDG_CACHE_HOME` or `~/.cache`."""
    own = environment.get("WEFT_CACHE")
    return Path(own) if own else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def data_directory(environment: Mapping[str, str]) -> Path:
    """Where Weft keeps what its users gave it: `WEFT_DATA`, else `weft` under `XDG_DATA_HOME` or `~/.local/share`."""
    own = environment.get("WEFT_DATA")
    return Path(own) if own else Path(environment.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "weft"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: one model on one device."""

    model: str = EMBEDDED_MODEL
    """`weft-tiny`, a local directory, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    offline: bool = False
    """Use only what the hub cache already has."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: sampling parameters that a request leaves out take the values of the checkpoint's generation_config.json;
    none: those of the API."""
    dtype: DType = "auto"
    """auto: the checkpoint's, except bfloat16 and float16 where the device computes neither well: then float32."""
    quantization: Quantization | None = None
    """int8: the weights of the layers' products are quantized when they are loaded, with a scale for each output;
    activations, KV, embeddings and the output head keep `dtype`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    page_size: int = 16
    kv_cache_bytes: int | None = None
    """Device memory for KV pages. None: `memory_fraction` of what is free."""
    num_pages: int | None = None
    """Device pages, instead of bytes."""
    memory_fraction: float | None = None
    """Of the free device memory after loading. None: 0.9 on a GPU, 0.3 on a CPU (which other programs share)."""
    host_kv_bytes: int | None = None
    """Host memory for KV pages evicted from the device. None: none on a CPU, 0.2 of free memory with a GPU."""
    max_context: int | None = None
    """Longest sequence in tokens, prompt and output. None: what the model allows."""
    max_running: int = 256
    """Sequences that may be in one step."""
    max_waiting: int = 4096
    """Operations waiting before new ones are refused with 429."""
    max_step_tokens: int | None = None
    """Query tokens of one step. None: 512 on a CPU (2048 for throughput), 8192 on a GPU."""
    performance_mode: Literal["interactivity", "throughput"] = "interactivity"
    """Short steps, so that tokens come evenly, or longer ones, which finish a whole batch sooner. `weft.LLM` takes
    the latter."""
    aging_s: float = 30.0
    """A waiting request's priority improves by one every so many seconds: every wait is bounded."""
    prefix_cache: bool = True
    prefix_wait_steps: int = 64
    """How many steps a request waits for a prefix that another is computing before it computes it itself."""
    program_pages_fraction: float = 0.5
    """Of the device pages, what programs may hold explicitly, reservations and exports included."""
    program_pages_wait_s: float = 5.0
    """How long a program waits for a page or an embedding before it is told that there is none."""
    batching: Literal["adaptive", "eager", "k", "t"] = "adaptive"
    """When a step begins that has nothing but single commands of programs: when nobody is worth waiting for; at once,
    each command alone; with so many; or after so long. All but the first are for comparisons."""
    batching_k: int = 32
    batching_wait_s: float = 0.01
    json_string_chars: int = 4096
    """Longest string or name in JSON that a grammar writes where the schema sets no length, in characters; 0: no limit.
    Not for arguments of tools."""
    overlap: bool = True
    """Schedule the next step while the device runs this one."""
    cuda_graphs: bool = True
    """On CUDA devices, launch decode steps as captured graphs. Not yet run on a device; a capture that fails is told
    once, and steps then run without."""
    graph_batch_sizes: list[int] | None = None
    """Batch sizes that decode steps are padded to for graphs; larger ones run without. None: about thirty sizes up to
    `max_running`, at most 512."""
    threads: int | None = None
    """CPU threads of kernels. None: one per core, less what front and host need on four cores and more."""
    progress_deadline_s: float = 60.0
    """An engine whose loop makes no turn for so long is killed and restarted; ten times as long if it uses the
    processor meanwhile."""
    lease_s: float = 30.0
    """A client that says nothing for so long loses its sequences."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 8 <= self.page_size <= MAX_PAGE_SIZE:
            raise ConfigError(f"page_size must be between 8 and {MAX_PAGE_SIZE} tokens, got {self.page_size}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")
        for name in ("num_pages", "kv_cache_bytes", "max_context", "max_step_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.graph_batch_sizes is not None and not (self.graph_batch_sizes and min(self.graph_batch_sizes) >= 1):
            raise ConfigError(f"graph_batch_sizes must be sizes of at least 1, got {self.graph_batch_sizes}")
        for name in ("max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.program_pages_fraction <= 1:
            raise ConfigError(f"program_pages_fraction must be in [0, 1], got {self.program_pages_fraction}")
        if self.program_pages_wait_s < 0:
            raise ConfigError(f"program_pages_wait_s must not be negative, got {self.program_pages_wait_s}")
        if self.aging_s <= 0:
            raise ConfigError(f"aging_s must be positive, got {self.aging_s}")


ToolCallParserName = Literal["auto", "hermes", "llama3_json", "mistral", "none"]
ReasoningParserName = Literal["auto", "think", "none"]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP front."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: list[str] = []
    """Names clients may use. Empty: the model as given."""
    api_keys: list[str] = []
    """`name=key` or `key`; each is a tenant with a cache namespace of its own. Empty: no key is asked for."""
    max_body_bytes: int = 32 * 1024 * 1024
    max_bodies_bytes: int = 256 * 1024 * 1024
    """Of all request bodies that are being received or decoded; of one tenant, half where keys name several."""
    max_text_chars: int | None = None
    """Of a text to tokenize. None: what the model's context can hold, with room for Unicode normalisation."""
    max_concurrent_requests: int = 4096
    """More are refused with 429; of one tenant, half where keys name several."""
    max_connections: int = 10_000
    """At once; less where the process may open fewer files. For one more, the one that waits longest for a request is
    closed."""
    header_timeout_s: float = 30.0
    """From the opening of a connection, or the first byte of a request, to the end of its headers."""
    body_timeout_s: float = 30.0
    """Between two parts of a request's body. A body that comes with less than 512 bytes a second has as long in all."""
    send_timeout_s: float = 60.0
    """A connection whose client takes no byte of its answer for so long is closed. 0: never."""
    keep_alive_s: int = 75
    """How long a connection may wait for its next request. The default is longer than what proxies keep theirs for, so
    that none is closed while they reuse it."""
    cors_origins: list[str] = []
    allowed_hosts: list[str] = []
    """Names that requests may have as `Host`, beside local ones; `*`: any. Empty: local ones alone where the server
    listens on loopback and asks for no key, else any."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    drain_s: float = 30.0
    """How long running requests may finish after SIGTERM."""
    engine_wait_s: float = 60.0
    """How long requests wait for the restart of an engine that died, to be continued there. 0: they fail with it."""
    stream_keep_alive_s: float = 15.0
    """A stream that has nothing to say for so long gets a comment line. 0: never."""
    tool_call_parser: ToolCallParserName = "auto"
    """How the model writes calls of tools. auto: as its chat template shows."""
    reasoning_parser: ReasoningParserName = "auto"
    """How the model writes reasoning. auto: `<think>`, where its chat template has that."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    trace: bool = False
    """Record each request's life; readable at /v1/traces/{request id}."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:  # event loops take the last sixteen bits of a larger number without a word
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        counts = ("max_concurrent_requests", "max_connections")
        for name in ("max_body_bytes", "max_bodies_bytes", "max_text_chars", *counts):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in ("drain_s", "engine_wait_s", "stream_keep_alive_s", "send_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


MAX_RUNS = 8192
"""Runs at once of one program host. Each may need some 8 GiB of address space and 6 mappings of memory. A process has
128 TiB, and 65,530 mappings as Linux is set up."""


class ProgramsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Programs that users upload and run."""

    start: Literal["lazy", "eager", "off"] = "lazy"
    """When the process that runs programs starts: with the first run, with the server, or never."""
    data_dir: str | None = None
    """Where uploaded programs and what programs store are kept. None: `data_directory`."""
    trusted_dir: str | None = None
    """Python files here are programs that every client may run, without a sandbox. Whoever can write here owns the
    server."""
    network: list[str] = []
    """Hosts that programs may talk to where their run asks for it too; `*` is every public one, and `NAME=HOST` is for
    one tenant. Empty: none."""
    max_connections_per_tenant: int = 64
    """Requests of a tenant's programs to the web at once; more wait."""
    max_runs: int = 1024
    """Runs at once, children included; more wait. At most `MAX_RUNS`."""
    max_runs_per_tenant: int = 256
    max_waiting: int = 4096
    """Runs that wait before new ones are refused with 429."""
    max_pages: int | None = None
    """KV pages that all programs hold together. None: what the engine has."""
    max_pages_per_tenant: int | None = None
    tenant_pages_fraction: float | None = None
    """Of an engine's pages for programs, the share that the programs and exports of one tenant may hold. None: all, or
    half where there are several tenants."""
    max_sandbox_bytes: int | None = None
    """Memory that all sandboxes may grow to, the sum of their limits; more runs wait. None: four times the
    machine's, because one that waits holds a few MiB of the many it may grow to."""
    max_sandbox_bytes_per_tenant: int | None = None
    """None: all of that; where there are several tenants, half of the machine's memory at most."""
    tenant_cpu_s_per_minute: float | None = None
    """Processor time that the programs of a tenant may use; then they wait, as with the following. None: no limit."""
    tenant_host_calls_per_minute: float | None = None
    tenant_tokens_per_minute: float | None = None
    """Put in and generated."""
    tenants: list[str] = []
    """What single tenants have instead of the above: `NAME.SETTING=VALUE`, of `TENANT_SETTINGS`."""
    max_cpu_s: float = 300.0
    """What a run may ask for at most, as the following."""
    max_memory_bytes: int = 512 << 20
    max_wall_s: float = 86400.0
    max_uploads: int = 1000
    """Versions of programs that a tenant may keep."""
    max_upload_bytes: int = 256 << 20
    """Of all of them together."""
    max_store_bytes: int = 64 << 20
    """What a tenant's programs may store."""
    max_kept_runs: int = 200
    """Runs of each tenant that are remembered after their end, across restarts too."""
    max_kept_s: float = 30 * 86400.0
    """And for how long."""
    progress_deadline_s: float = 30.0
    """A process that runs programs and makes no progress for so long is killed and restarted; ten times as long if it
    uses the processor meanwhile."""

    def __post_init__(self) -> None:
        counts = ("max_runs", "max_runs_per_tenant", "max_waiting", "max_kept_runs", "max_memory_bytes")
        for name in (*counts, "max_connections_per_tenant", "max_sandbox_bytes", "max_sandbox_bytes_per_tenant"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_runs > MAX_RUNS:
            raise ConfigError(
                f"max_runs must be at most {MAX_RUNS}, got {self.max_runs}: each run in the sandbox takes address "
                "space and mappings of the one process that carries programs out"
            )
        rates = ("tenant_cpu_s_per_minute", "tenant_host_calls_per_minute", "tenant_tokens_per_minute")
        for name in ("max_cpu_s", "max_wall_s", "max_kept_s", "progress_deadline_s", *rates):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive, got {value}")
        if self.tenant_pages_fraction is not None and not 0 <= self.tenant_pages_fraction <= 1:
            raise ConfigError(f"tenant_pages_fraction must be in [0, 1], got {self.tenant_pages_fraction}")
        for entry in self.tenants:
            self.of(_tenant_setting(entry).tenant)

    def of(self, tenant: str) -> ProgramsConfig:
        """What holds for this tenant. Raises `ConfigError`."""
        asked = [setting for setting in map(_tenant_setting, self.tenants) if setting.tenant == tenant]
        own = {setting.name: setting.value for setting in asked}
        return msgspec.structs.replace(self, tenants=[], **own) if own else self


TENANT_SETTINGS = tuple(
    name for name in ProgramsConfig.__struct_fields__ if name.startswith("tenant_") or name.endswith("_per_tenant")
)
"""The settings that `ProgramsConfig.tenants` may have: those of a tenant, which their names say."""


class _TenantSetting(NamedTuple):
    tenant: str
    name: str
    value: int | float | None


def _tenant_setting(entry: str) -> _TenantSetting:
    """An entry of `ProgramsConfig.tenants`. Raises `ConfigError`."""
    key, equals, text = entry.partition("=")
    tenant, dot, name = key.strip().rpartition(".")
    if not equals or not dot or not tenant or name not in TENANT_SETTINGS:
        raise ConfigError(
            f"tenants has {entry!r}; write NAME.SETTING=VALUE, where SETTING is one of {', '.join(TENANT_SETTINGS)}"
        )
    try:
        value = msgspec.convert(text.strip(), get_type_hints(ProgramsConfig)[name], strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"tenants has {entry!r}, whose value cannot be used: {error}") from None
    return _TenantSetting(tenant, name, value)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of `weft serve`."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    programs: ProgramsConfig = ProgramsConfig()
