"""What configuration says once it is read: plain frozen values, no pydantic beyond this line.

Sizes are MiB, durations seconds; macros are expanded, except `${PORT}` (known only when an engine is
started) and `${PID}` in `stop_argv` (known only when it is stopped).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SizeSpec:
    """How much a device may be used; None = found out by measuring."""

    memory_mib: int | None = None
    headroom_mib: int | None = None
    probe: str = "auto"  # auto | none


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    id: str  # gpu0, gpu1, ram, or any name with probe: none
    size: SizeSpec = field(default_factory=SizeSpec)
    uuid: str | None = None  # GPU or MIG UUID when the operator names it


@dataclass(frozen=True, slots=True)
class FiltersConfig:
    strip_params: tuple[str, ...] = ()
    set_params: Mapping[str, Any] = field(default_factory=dict)
    set_params_by_id: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.strip_params or self.set_params or self.set_params_by_id)


@dataclass(frozen=True, slots=True)
class WarmupConfig:
    """One request sent after a start and after a wake, before the model is called ready."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallConfig:
    """One HTTP request to an engine, declared by the operator."""

    path: str
    method: str = "POST"
    body: Mapping[str, Any] | None = None  # sent as JSON


@dataclass(frozen=True, slots=True)
class AsleepConfig:
    """How to ask an engine whether it sleeps: a GET whose JSON answer holds `value` at `field` (dots go deeper)."""

    path: str
    field: str = "is_sleeping"
    value: Any = True


@dataclass(frozen=True, slots=True)
class SleepConfig:
    """How an engine whose sleep routes greenroom does not know is put to sleep and woken."""

    sleep: tuple[CallConfig, ...]
    wake: tuple[CallConfig, ...]
    level: int = 1
    asleep: AsleepConfig | None = None
    residue_mib: int = 1024  # on each device, until it was measured
    host_mib: int | None = None  # host RAM while asleep, until it was measured; None = what it books on its device
    sleep_s: float = 2.0  # until measured
    wake_s: float = 2.0


@dataclass(frozen=True, slots=True)
class ContainerConfig:
    """Run the engine inside a container instead of on the host."""

    runtime: str  # podman | docker
    image: str
    args: tuple[str, ...] = ()  # extra arguments of `run`
    volumes: tuple[str, ...] = ()
    pull: str = "missing"  # missing | always | never
    pull_s_max: float = 1800.0  # one pull of the image; it does not count as start
    gpus: str = "auto"  # how GPUs are handed in: cdi | flag (--gpus) | none; auto: flag for docker, else cdi
    shm_mib: int | None = None  # size of /dev/shm; None = what the engine is known to need


@dataclass(frozen=True, slots=True)
class PullConfig:
    """How a model's files are fetched; the names are those of `greenroom pull`."""

    plain_http: bool = False  # the registry has no TLS
    tls_ca: str | None = None  # certificates that are believed besides the system's
    tls_verify: bool = True
    allow_host: tuple[str, ...] = ()  # HOST[:PORT] inside the network that a registry may redirect to
    platform: str = "linux/amd64"
    verify_key: str | None = None  # what this key has not signed is not served
    size_max_bytes: int | None = None
    offline: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    id: str
    argv: tuple[str, ...]  # command, already split; may hold ${PORT} inside any item
    line: int = 0  # where its entry starts in the file
    reference: str = ""  # `model`: where it comes from; then argv, env and container may hold ${MODEL_PATH} and ${MODEL_DIR}
    pull: str = "missing"  # missing: the first request fetches it | never
    pull_options: PullConfig = field(default_factory=PullConfig)
    model_folder: str = ""  # of a reference: where its files lie on this host; "" = not known
    aliases: tuple[str, ...] = ()
    name: str = ""
    description: str = ""
    unlisted: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    engine: str | None = None  # llama_server | vllm | sglang | tei | generic; None = told from the command
    stop_argv: tuple[str, ...] = ()  # cmdStop; may hold ${PID}
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    proxy: str = "http://127.0.0.1:${PORT}"
    check_path: str | None = "/health"  # None: `none`, ready as soon as the port is open
    check_explicit: bool = False  # written in the config, not the default
    start_s_max: float = 120.0  # healthCheckTimeout
    stop_s_max: float = 10.0  # unloadTimeout: grace between TERM and KILL
    ttl_s: float | None = None  # None = never
    ttl_auto: bool = False  # found from its own idle gaps
    sleep_after_s: float | None = None
    sleep: str = "auto"  # off | 1 | 2 | auto
    sleep_calls: SleepConfig | None = None
    sleep_s_max: float = 120.0  # one sleep; then the engine is ended
    wake_s_max: float = 120.0  # one wake, all its calls together
    canary: str = "auto"  # auto: compared after level-2 wakes | always: after every wake | off
    memory_mib: int | None = None  # declared need per device
    host_memory_mib: int | None = None
    devices: tuple[str, ...] = ()  # () = any
    devices_count: int = 1
    parallel: int | None = None  # None = read from the flags
    queue_limit: int = 256
    pin: bool = False
    on_conflict: str = "refuse"
    priority: str = "interactive"
    use_model_name: str | None = None  # written over `model` before forwarding
    filters: FiltersConfig = field(default_factory=FiltersConfig)
    warmup: WarmupConfig | None = None
    container: ContainerConfig | None = None
    stall_s_max: float | None = None  # no byte from the engine and no answer to probes: it is ended
    busy_s_max: float | None = None  # no byte from the engine on a request: it is ended whatever its health says
    progress_counts: bool = False  # a log line during start restarts the start clock
    keepalive: bool = True  # SSE comments to streaming clients while the model loads
    misconfigured: str = ""  # set when lenient loading kept a bad entry: what is wrong, one sentence


@dataclass(frozen=True, slots=True)
class GroupConfig:
    id: str
    members: tuple[str, ...]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


SCOPES = ("inference", "view", "admin")
"""What a key may be good for: asking models; looking at the server; changing what it does."""


def is_pattern(name: str) -> bool:
    """Whether a name in `models` of a key stands for several models."""
    return any(char in name for char in "*?[")


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """One key that opens the server, and for what.  `name` may be shown, the key never."""

    key: str = field(repr=False)
    name: str
    scopes: tuple[str, ...] = SCOPES
    models: tuple[str, ...] | None = None  # ids, aliases and patterns (`*`, `?`) it may ask; None: all
    limit: int | None = None  # its requests in flight and waiting at once; None: any number


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """Another server that speaks OpenAI's API.  Its key is sent to it and never shown."""

    id: str
    url: str  # http(s)://host[:port][/base], no slash at its end
    models: tuple[tuple[str, str], ...]  # (name here, name there)
    key: str | None = field(default=None, repr=False)
    line: int = 0  # where its entry starts in the file
    tls_ca: str | None = None  # path of a PEM file; None: the system's certificates
    filters: FiltersConfig = field(default_factory=FiltersConfig)
    connect_s: float = 5.0  # longest opening of a connection, TLS included
    response_s: float | None = 300.0  # longest wait for the head of an answer; None: no end
    stall_s: float | None = 300.0  # longest silence within an answer; None: no end
    priority: int = 0  # higher ones are asked first
    weight: float = 1.0  # share of the requests in flight among those of one priority
    overflow: bool = False  # also serves models of this machine, when that refuses a request
    prefer: bool = False  # is asked before this machine for models that both have
    probe: str | None = "/health"  # None: never probed


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Where OpenTelemetry traces are sent."""

    endpoint: str = "http://127.0.0.1:4318"
    service_name: str = "greenroom"
    sample: float = 1.0  # share of the requests


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """How much of the past is kept."""

    keep_s: float = 30 * 86400.0
    size_max_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Config:
    path: str
    models: tuple[ModelConfig, ...]
    devices: tuple[DeviceConfig, ...] = ()
    groups: tuple[GroupConfig, ...] = ()
    preload: tuple[str, ...] = ()  # hooks.on_startup.preload
    keys: tuple[KeyConfig, ...] = ()
    start_port: int = 5800
    log_level: str = "info"
    log_to_stdout: str = "proxy"  # proxy | upstream | both | none
    include_aliases_in_list: bool = False
    upstream_ignore_paths: tuple[str, ...] = ()  # regular expressions
    default_model: str | None = None  # for requests without `model`
    allowed_hosts: tuple[str, ...] = ()  # extra Host names accepted besides loopback names and the listen address
    cors_origins: tuple[str, ...] = ("*",)  # origins allowed to read the inference API
    policy: Mapping[str, float] = field(default_factory=dict)  # scheduling constants by name (core.facts.Policy)
    limits: Mapping[str, int | float] = field(default_factory=dict)  # data-plane limits by name (proxy.limits)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    tracing: TracingConfig | None = None  # None: nothing is sent
    peers: tuple[PeerConfig, ...] = ()
    warnings: tuple[str, ...] = ()  # `file:line: sentence`, shown by check and at start

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys themselves: never shown, never passed on."""
        return tuple(each.key for each in self.keys)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Those, and what we show to peers: in no log, no message and no engine's environment."""
        return (*self.api_keys, *(peer.key for peer in self.peers if peer.key))
