"""What is to be deployed, before any format is chosen: one set of workloads made from a configuration or from references.

Every writer (quadlet, compose, kube, systemd, llm-d, …) is a pure function `Intent -> Files`: it reads no disk, starts
nothing, asks no host, and gives the same bytes for the same intent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from greenroom.config.model import Config, ModelConfig

TARGETS = ("nvidia", "amd", "intel", "cpu")


@dataclass(frozen=True, slots=True)
class Share:
    """What accelerator a workload asks for."""

    vendor: str = "cpu"  # one of TARGETS
    count: int = 0  # whole GPUs
    devices: tuple[str, ...] = ()  # UUIDs or indices where the operator named them
    mig: str = ""  # profile, such as 3g.40gb, when it is a slice; then `count` slices
    every: bool = False  # all that the host has: nobody has named some; `count` is the least that makes sense


@dataclass(frozen=True, slots=True)
class Probe:
    """How to see that it lives and that it can serve, without waking anybody."""

    path: str  # "" = any HTTP answer will do
    port: int
    start_s: float  # it may take this long to get ready
    period_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Mount:
    """Something that a container sees at `target`."""

    kind: str  # bind | volume | image | config
    source: str  # host path, volume name, image reference, or config file name
    target: str
    read_only: bool = True
    sub_path: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """One container, or one process on a bare host."""

    name: str  # unique, a DNS label of at most 63 characters, valid in every format
    model: str  # the name that clients send; "" = greenroom itself
    image: str
    argv: tuple[str, ...]  # whole command, ports filled in
    port: int
    env: tuple[tuple[str, str], ...] = ()
    secret_env: tuple[tuple[str, str], ...] = ()  # name of a variable -> the key it has in the set's secrets (never a value)
    offered_env: tuple[str, ...] = ()  # secrets that it takes where they are set, and starts without; also their keys
    mounts: tuple[Mount, ...] = ()
    share: Share = field(default_factory=Share)
    memory_mib: int = 0  # host RAM it may use; 0 = not said
    shm_mib: int = 0
    live: Probe | None = None
    ready: Probe | None = None
    stop_s: float = 30.0
    args_entrypoint: bool = True  # argv[0] replaces the image's entry point
    aliases: tuple[str, ...] = ()
    source: ModelConfig | None = None
    gpu_mib: int | None = None  # measured, else declared need on each device
    host_port: int = 0  # where a single host publishes `port`; 0 = nowhere
    kind: str = "greenroom"  # or the engine: llama_server | vllm | sglang | tei | generic
    tcp_only: bool = False  # it speaks no HTTP that could be asked: an open port is enough
    key: str = ""  # the variable that whoever asks it has to have its key in; "" = it asks for none


@dataclass(frozen=True, slots=True)
class Intent:
    """Everything that a writer needs."""

    name: str  # of the whole set
    mode: str  # greenroom: greenroom runs the engines itself · engines: one workload per model
    workloads: tuple[Workload, ...]
    config: Config
    config_text: str  # greenroom.yaml as it is to be mounted, with paths as inside the container
    target: str  # one of TARGETS
    namespace: str = "default"
    listen_host: str = "127.0.0.1"  # address that a single host publishes on
    builds: str = ""  # the Containerfile that makes greenroom's image; "" = the image was named, or none is needed
    notes: tuple[str, ...] = ()  # what a reader of the files must know; written as comments
    options: Mapping[str, str] = field(default_factory=dict)


Files = Mapping[str, str]
"""Relative path -> text."""
