"""All settings, as frozen structs with defaults.

`weft.cli.settings` merges them with a TOML file, `WEFT_…` environment variables and flags; this module does not read
the environment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_type_hints

import msgspec

from weft.abi.errors import ConfigError
from weft.core.objectives import Objective
from weft.core.step import MAX_PAGE_SIZE

EMBEDDED_MODEL = "weft-tiny"
"""The model that ships in the package."""
PINNED_PART = 0.25
"""Part of each engine's pages that pins of plans may hold, unless a user says another."""
MAX_PINNED_PART = 0.5
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s?#@]+")
_HOST = re.compile(r"\*|\[?(?:[0-9A-Fa-f]*:){2}[0-9A-Fa-f:.%]*\]?|(?:\*\.)?[^\[\]:/?#@\\\s*]+")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4"]
QuantizedBlocks = Literal["auto", "expand"]


def is_hub_id(model: str) -> bool:
    """Whether a model has the form of a Hugging Face hub id, `org/name`. Its existence is not checked. A name with a
    leading '.', '~' or '/', or a second '/', is a path."""
    return _HUB_ID.fullmatch(model) is not None


def hub_file(model: str) -> tuple[str, str] | None:
    """Hub id and file of a model that has the form `org/name/file.gguf`, where folders may precede the file."""
    org, _, rest = model.partition("/")
    name, _, file = rest.partition("/")
    repository = f"{org}/{name}"
    if not is_hub_id(repository) or not file.endswith(".gguf") or {"", ".", ".."} & set(file.split("/")):
        return None
    return repository, file


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Directory of files that Weft can recreate: `WEFT_CACHE`, else `weft` under `XDG_CACHE_HOME` or `~/.cache`."""
    own = environment.get("WEFT_CACHE")
    return Path(own) if own else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def data_directory(environment: Mapping[str, str]) -> Path:
    """Directory of users' data: `WEFT_DATA`, else `weft` under `XDG_DATA_HOME` or `~/.local/share`."""
    own = environment.get("WEFT_DATA")
    return Path(own) if own else Path(environment.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "weft"


InterceptPolicyName = Literal["min_waste", "lru", "discard", "improved_discard", "preserve", "swap", "heuristic"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: one model on one device."""

    model: str = EMBEDDED_MODEL
    """`weft-tiny`, a local directory or GGUF file, a hub id, or a GGUF file of a hub id (`org/name/file.gguf`)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    offline: bool = False
    """Use only models in the hub cache."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: sampling parameters that a request omits take the values of the checkpoint's generation_config.json; none:
    those of the API."""
    dtype: DType = "auto"
    """auto: the checkpoint's, or float32 where the device is slow or inexact in it."""
    quantization: Quantization | None = None
    """Quantize the weights of the layers' projections at load, in blocks of 32 or 256 inputs; on CPUs products round
    activations to 8 bits. KV, embeddings and the output head keep `dtype`."""
    quantized_blocks: QuantizedBlocks = "auto"
    """auto: matrices in quantized blocks of a GGUF file, and those of 4 bits of a safetensors checkpoint, stay so where
    kernels multiply with them, with activations rounded to 8 bits; expand: they become `dtype` when they are loaded."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    page_size: int = 16
    kv_cache_bytes: int | None = None
    """Device memory for KV pages. None: `memory_fraction` of what is free."""
    num_pages: int | None = None
    """Number of device pages, instead of bytes."""
    memory_fraction: float | None = None
    """Share of the device memory that is free after loading, for KV pages. None: 0.9 on a GPU, 0.3 on a CPU."""
    host_kv_bytes: int | None = None
    """Host memory for KV pages evicted from the device. None: none on a CPU, 0.2 of free memory with a GPU."""
    host_link_gbs: float | None = None
    """On a CPU, copy between device and host pages no faster than this many GB/s (1e9 bytes), both directions together,
    as over the link of an accelerator. None: as fast as memory. Not for CUDA."""
    max_context: int | None = None
    """Longest sequence in tokens, prompt and output. None: the model's limit."""
    max_running: int = 256
    """Maximum number of sequences in one step."""
    max_waiting: int = 4096
    """Maximum number of waiting operations; beyond it a tenant is refused with 429 if its equal share of it waits."""
    max_step_tokens: int | None = None
    """Maximum number of query tokens in one step. None: 512 on a CPU (2048 for throughput), 8192 on a GPU."""
    performance_mode: Literal["interactivity", "throughput"] = "interactivity"
    """Short steps for even token intervals, or longer ones, which complete a batch sooner. `weft.LLM` uses
    `throughput`."""
    aging_s: float = 30.0
    """The priority of a waiting request improves by one after this many seconds, so every wait is bounded."""
    latency_factor: float = 1.5
    """Beside requests with objective `latency` or `ttft`, the work of others makes a step at most so many times as long
    as without, by the cost profile. Without a profile nothing is held back."""
    min_share: float = 0.1
    """Share of the device's time that the others get nevertheless, over 10 seconds of it."""
    prefix_cache: bool = True
    prefix_wait_steps: int = 64
    """Maximum number of steps that a request waits for a prefix that another request is computing."""
    intercept_policy: InterceptPolicyName = "min_waste"
    """Whose KV goes first when pages are needed, of all that does not run: sequences whose programs wait, finished
    turns that a client may continue, cached prefixes. All but the first and `lru` are for comparisons."""
    wait_estimator: Literal["learned", "elapsed"] = "learned"
    """How `min_waste` estimates how long a wait will still take: from earlier waits of its kind, or as long again as it
    has taken."""
    return_order: Literal["fair", "arrival", "last"] = "fair"
    """Place in the queue of a sequence that waited for something other than the device: before newcomers of its tenant,
    which pass after a bounded wait; by its first arrival, without a bound; last."""
    program_pages_fraction: float = 0.5
    """Share of the device pages that programs may hold explicitly, reservations and exports included."""
    program_pages_wait_s: float = 5.0
    """Time that a program waits for a page or an embedding before `OutOfPages`."""
    batching: Literal["adaptive", "eager", "k", "t"] = "adaptive"
    """When a step starts that has only programs' single commands: when no other command is worth waiting for; at once,
    one command per step; with `batching_k` commands; after `batching_wait_s`. All but the first are for comparisons."""
    batching_k: int = 32
    batching_wait_s: float = 0.01
    json_string_chars: int = 4096
    """Longest string or name in JSON that a grammar writes where the schema sets no length, in characters, and most
    digits in a row of a number; 0: no limit. Not for arguments of tools."""
    overlap: bool = True
    """Schedule the next step while the device runs this one."""
    cuda_graphs: bool = True
    """On CUDA devices, launch steps as captured graphs. If a capture fails, the log says so once and steps run without
    graphs."""
    graph_batch_sizes: list[int] | None = None
    """Batch sizes to which decode steps are padded for graphs; larger batches run without. None: about thirty sizes up
    to `max_running`, at most 512."""
    graph_step_tokens: int | None = None
    """Most tokens of a step with prompts that is launched as a graph; 0: none is. None: as many as a device computes
    faster than a processor launches them, up to 2,048 for a model of 0.6B and about 860 for one of 8B."""
    threads: int | None = None
    """CPU threads of kernels. None: one per core, minus one or two for front and program host from four cores on."""
    progress_deadline_s: float = 60.0
    """An engine whose loop makes no progress for this many seconds is killed and restarted; one that uses the processor
    meanwhile, after ten times as long."""
    lease_s: float = 30.0
    """A client that sends nothing for this many seconds loses its sequences."""
    seed: int = 0
    """Of generations of users' programs that have none. Built-in programs draw a random seed for each request."""

    def __post_init__(self) -> None:
        if not 8 <= self.page_size <= MAX_PAGE_SIZE:
            raise ConfigError(f"page_size must be between 8 and {MAX_PAGE_SIZE} tokens, got {self.page_size}")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")
        for name in ("num_pages", "kv_cache_bytes", "max_context", "max_step_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.host_link_gbs is not None and not 0 < self.host_link_gbs < math.inf:
            raise ConfigError(f"host_link_gbs must be positive, got {self.host_link_gbs}")
        if self.graph_batch_sizes is not None and not (self.graph_batch_sizes and min(self.graph_batch_sizes) >= 1):
            raise ConfigError(f"graph_batch_sizes must be sizes of at least 1, got {self.graph_batch_sizes}")
        if self.graph_step_tokens is not None and self.graph_step_tokens < 0:
            raise ConfigError(f"graph_step_tokens must be at least 0, got {self.graph_step_tokens}")
        for name in ("max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.program_pages_fraction <= 1:
            raise ConfigError(f"program_pages_fraction must be in [0, 1], got {self.program_pages_fraction}")
        if self.program_pages_wait_s < 0:
            raise ConfigError(f"program_pages_wait_s must not be negative, got {self.program_pages_wait_s}")
        if not 1 <= self.latency_factor < math.inf:
            raise ConfigError(f"latency_factor must be at least 1, got {self.latency_factor}")
        if not 0 <= self.min_share < 1:
            raise ConfigError(f"min_share must be in [0, 1), got {self.min_share}")
        if self.aging_s <= 0:
            raise ConfigError(f"aging_s must be positive, got {self.aging_s}")


ToolCallParserName = Literal["auto", "hermes", "llama3_json", "mistral", "none"]
ReasoningParserName = Literal["auto", "think", "none"]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP front."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: list[str] = []
    """Names that clients use. Empty: the model as given."""
    api_keys: list[str] = []
    """`name=key` or `key`; each name is a tenant with a separate cache namespace. Empty: no key is required."""
    max_body_bytes: int = 32 * 1024 * 1024
    max_bodies_bytes: int = 256 * 1024 * 1024
    """Maximum size of all request bodies in memory; half of it per tenant if keys name several."""
    max_text_chars: int | None = None
    """Maximum length of a text to tokenize. None: what the model's context can hold, with room for Unicode
    normalisation."""
    max_response_logprobs: int = 1_000_000
    """Maximum number of log-probabilities of one response. Each takes some 300 bytes until the response is sent."""
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
    """Permitted values of `Host`, without the port, besides local ones; `*`: any. Empty: only local ones if the server
    listens on loopback without keys, otherwise any."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    drain_s: float = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
    engine_wait_s: float = 60.0
    """Seconds that requests and operations of programs wait for the restart of an engine that died, to be continued
    there. 0: they fail with it."""
    stream_keep_alive_s: float = 15.0
    """Seconds without events after which a stream gets a comment line. 0: never."""
    tool_call_parser: ToolCallParserName = "auto"
    """Format of the model's tool calls. auto: detected from the chat template."""
    reasoning_parser: ReasoningParserName = "auto"
    """Format of the model's reasoning. auto: `think` if the chat template has `<think>`."""
    replicas: int = 1
    """Engines of each model, among which requests are routed. More than one not on CUDA devices."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    trace: bool = False
    """Record the events of each request, for /v1/traces/{request id}."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:  # event loops silently truncate larger numbers to sixteen bits
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        counts = ("max_response_logprobs", "max_concurrent_requests", "max_connections", "replicas")
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
        for origin in self.cors_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins has {origin!r}; an origin is a scheme and a host, such as https://app.example or "
                    "http://localhost:3000, without a path; *: any"
                )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"allowed_hosts has {host!r}; a host is a name or an address without a port, such as app.example; "
                    "*.app.example: all names in it; *: any"
                )


MAX_RUNS = 8192
"""Maximum number of concurrent runs of a program host. Each may need about 8 GiB of address space and 6 memory
mappings; a process has 128 TiB and, by default, 65,530 mappings."""


class ProgramsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the program host and of the programs that users upload or run."""

    start: Literal["lazy", "eager", "off"] = "lazy"
    """When the program host starts: with the first run, with the server, or never."""
    data_dir: str | None = None
    """Directory of uploaded programs, their stored values, records of runs, and workflows. None: `data_directory`."""
    trusted_dir: str | None = None
    """Directory of Python programs that every client may run, without a sandbox. Write access to it is control of the
    server."""
    network: list[str] = []
    """Hosts that programs may reach if their run asks for them too; `*` is every public host, and `NAME=HOST` applies
    to one tenant. Empty: none."""
    max_connections_per_tenant: int = 64
    """Maximum number of concurrent HTTP requests of a tenant's programs; more wait."""
    max_runs: int = 1024
    """Maximum number of concurrent runs, children included; more wait. At most `MAX_RUNS`."""
    max_runs_per_tenant: int = 256
    max_waiting: int = 4096
    """Maximum number of waiting runs; more are refused with 429."""
    max_pages: int | None = None
    """Maximum number of KV pages that all programs hold. None: the engine's."""
    max_pages_per_tenant: int | None = None
    tenant_pages_fraction: float | None = None
    """Share of one tenant's programs and exports in an engine's pages for programs. None: 1, or 0.5 with several
    tenants."""
    max_sandbox_bytes: int | None = None
    """Maximum of the sum of all sandboxes' memory limits; runs beyond it wait. None: four times the machine's memory,
    because most sandboxes use a few MiB of their limit."""
    max_sandbox_bytes_per_tenant: int | None = None
    """None: no separate limit; with several tenants, half of `max_sandbox_bytes` or of the machine's memory, whichever
    is less."""
    tenant_cpu_s_per_minute: float | None = None
    """CPU seconds per minute of a tenant's programs; beyond it they wait. None: no limit. The next two are likewise."""
    tenant_host_calls_per_minute: float | None = None
    tenant_tokens_per_minute: float | None = None
    """Tokens put in and generated."""
    tenants: list[str] = []
    """Exceptions for single tenants: `NAME.SETTING=VALUE`, with a setting of `TENANT_SETTINGS`."""
    max_cpu_s: float = 300.0
    """Maximum CPU seconds that a run may ask for. The next four are maxima too."""
    max_memory_bytes: int = 512 << 20
    max_wall_s: float = 86400.0
    max_message_bytes: int = 16 << 20
    max_log_bytes: int = 64 << 20
    max_uploads: int = 1000
    """Maximum number of program versions of a tenant."""
    max_upload_bytes: int = 256 << 20
    """Maximum total size of a tenant's versions."""
    max_store_bytes: int = 64 << 20
    """Maximum total size of a tenant's stored values."""
    max_kept_runs: int = 200
    """Ended runs of each tenant that are kept, across restarts too."""
    max_kept_s: float = 30 * 86400.0
    """Seconds for which they are kept."""
    progress_deadline_s: float = 30.0
    """A program host that makes no progress for this many seconds is killed and restarted; one that uses the processor
    meanwhile, after ten times as long."""

    def __post_init__(self) -> None:
        counts = ("max_runs", "max_runs_per_tenant", "max_waiting", "max_kept_runs", "max_memory_bytes")
        sizes = ("max_message_bytes", "max_log_bytes")
        for name in (
            *counts,
            *sizes,
            "max_connections_per_tenant",
            "max_sandbox_bytes",
            "max_sandbox_bytes_per_tenant",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_runs > MAX_RUNS:
            raise ConfigError(
                f"max_runs must be at most {MAX_RUNS}, got {self.max_runs}: each sandboxed run takes address "
                "space and memory mappings of the program host"
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
        """The configuration for this tenant. Raises `ConfigError`."""
        asked = [setting for setting in map(_tenant_setting, self.tenants) if setting.tenant == tenant]
        own = {setting.name: setting.value for setting in asked}
        return msgspec.structs.replace(self, tenants=[], **own) if own else self


TENANT_SETTINGS = tuple(
    name for name in ProgramsConfig.__struct_fields__ if name.startswith("tenant_") or name.endswith("_per_tenant")
)
"""Settings that `ProgramsConfig.tenants` may override: those with `tenant` in their name."""


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
        raise ConfigError(f"tenants has {entry!r}, whose value is invalid: {error}") from None
    return _TenantSetting(tenant, name, value)


class WorkflowsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of workflows that run on the server. Their data is in `programs.data_dir`."""

    max_workflows: int = 1000
    """Maximum number of graphs of a tenant."""
    max_workflow_bytes: int = 256 << 20
    """Maximum total size of a tenant's graphs, as JSON."""
    max_rows: int = 1_000_000
    """Maximum number of rows of a run."""
    max_runs: int = 64
    """Maximum number of runs in progress; more wait."""
    max_runs_per_tenant: int = 16
    max_waiting: int = 1000
    """Maximum number of waiting runs of a tenant; more are refused with 429."""
    max_run_bytes: int = 1 << 30
    """Maximum total size of rows and results of a tenant's runs. Beyond it no run starts, and one that grows past it
    fails."""
    max_value_bytes: int = 512 << 20
    """Maximum total size of the values that nodes of a tenant's runs have made, of rows in progress. Beyond it, nodes
    fail; rows wait from half of it on."""
    max_cache_bytes: int = 1 << 30
    """Maximum total size of a tenant's answers in the prompt cache; the least recently used ones go first."""
    max_kept_runs: int = 200
    """Ended runs of each tenant that are kept, with their results."""
    max_kept_s: float = 30 * 86400.0
    """Seconds for which they are kept."""
    max_sessions: int = 100
    """Maximum number of sessions of a tenant (`/v1/calls`)."""
    max_session_bytes: int = 256 << 20
    """Maximum total size of what a tenant submits to its sessions and of their values, as JSON. Beyond it, submissions
    are refused and nodes fail."""
    session_idle_s: float = 600.0
    """A session without requests for this time ends."""
    planning: bool = True
    """Whether a run makes plans, where its request does not say."""
    pinned_part: float = PINNED_PART
    """Part of each engine's pages that pins of one user may hold, where the request of a run does not say."""
    objective: Objective = "throughput"
    """What outputs of a run are wanted for, where its request does not say; not `deadline`."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name in ("planning", "pinned_part", "objective"):
                continue
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.pinned_part <= MAX_PINNED_PART:
            raise ConfigError(f"pinned_part must be from 0 to {MAX_PINNED_PART}, got {self.pinned_part}")
        if self.objective == "deadline":
            raise ConfigError("objective cannot be deadline, whose deadline_s only a request can say")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of `weft serve`."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    programs: ProgramsConfig = ProgramsConfig()
    workflows: WorkflowsConfig = WorkflowsConfig()
