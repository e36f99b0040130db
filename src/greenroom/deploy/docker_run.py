"""A `docker run …` that somebody wrote as a model's command, taken apart: what it says can stand in any format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from greenroom.engines.flags import CONTAINER_CLIENTS, basename, size_bytes

FLAGS = frozenset(
    [
        *("--rm", "-d", "--detach", "-i", "--interactive", "-t", "--tty", "-it", "-ti", "-P", "--publish-all", "-q", "--quiet"),
        *("--init", "--no-healthcheck", "--oom-kill-disable", "--privileged", "--read-only", "--replace", "--sig-proxy", "--tls-verify"),
    ]
)  # every other option takes a value
SILENT = frozenset(
    [
        *("--rm", "-d", "--detach", "-i", "--interactive", "-t", "--tty", "-it", "-ti", "--init", "--replace", "--name", "-q", "--quiet"),
        *("--pull", "--read-only", "--cap-drop", "--security-opt", "--restart", "--stop-timeout", "--label", "-l", "--ipc"),
    ]
)  # what generated files say for themselves, or what means nothing there
SHORT = re.compile(r"-([pveum])(.+)")  # -p8080:80
SHARED_IPC_MIB = 8192  # `--ipc host` was written for a large /dev/shm


@dataclass(slots=True)
class Run:
    """What the command says."""

    runtime: str
    image: str = ""
    args: tuple[str, ...] = ()
    entrypoint: str = ""
    env: dict[str, str | None] = field(default_factory=dict)  # None: from the environment of who calls
    volumes: list[str] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    gpus: tuple[str, ...] = ()  # UUIDs or indices
    gpu_count: int = 0
    shm_mib: int = 0
    host_network: bool = False
    left: list[str] = field(default_factory=list)  # options that are not carried over

    def port_inside(self, outside: str) -> int:
        """The container's port that is published as `outside`; 0 = none is."""
        for text in self.published:
            host, _, inside = text.partition("/")[0].rpartition(":")
            if host.rpartition(":")[2] == outside and inside.isdigit():
                return int(inside)
        return 0


def parse(argv: Sequence[str]) -> Run | None:
    """None when it is no plain `docker run OPTIONS IMAGE ARGS` (options before `run`, a wrapper, a script)."""
    if len(argv) < 3 or basename(argv[0]) not in CONTAINER_CLIENTS or argv[1] not in ("run", "container"):
        return None
    at = 3 if argv[1] == "container" else 2
    run = Run(basename(argv[0]))
    while at < len(argv) and argv[at].startswith("-"):
        name, equals, value = argv[at].partition("=")
        at += 1
        if name == "--":
            break
        if (short := SHORT.fullmatch(name)) and name not in FLAGS:
            name, value, equals = f"-{short[1]}", short[2] + (f"={value}" if equals else ""), "="
        if not equals and name not in FLAGS:
            if at >= len(argv):
                return None
            value, at = argv[at], at + 1
        _take(run, name, value)
    if at >= len(argv):
        return None
    run.image, run.args = argv[at], tuple(argv[at + 1 :])
    return run


def _take(run: Run, name: str, value: str) -> None:
    if name in ("-e", "--env"):
        variable, equals, text = value.partition("=")
        run.env[variable] = text if equals else None
    elif name in ("-v", "--volume"):
        run.volumes.append(value if value.count(":") > 1 else f"{value}:rw")  # docker's default
    elif name == "--mount":
        _mount(run, value)
    elif name in ("-p", "--publish"):
        run.published.append(value)
    elif name == "--entrypoint":
        run.entrypoint = value
    elif name == "--gpus" or (name == "--device" and value.startswith("nvidia.com/gpu=")):
        _gpus(run, value.removeprefix("nvidia.com/gpu="))
    elif name == "--shm-size":
        run.shm_mib = (size_bytes(value.upper()) or 0) >> 20
    elif name == "--ipc" and value == "host":
        run.shm_mib = run.shm_mib or SHARED_IPC_MIB
    elif name in ("--network", "--net"):
        run.host_network = value == "host"
    elif name == "--device" and value.startswith(("/dev/kfd", "/dev/dri")):
        pass  # the target says so
    elif name not in SILENT:
        run.left.append(name)


def _mount(run: Run, value: str) -> None:
    pairs = dict(part.partition("=")[::2] for part in value.split(","))
    source = pairs.get("source") or pairs.get("src")
    target = pairs.get("target") or pairs.get("destination") or pairs.get("dst")
    if source and target and pairs.get("type", "volume") in ("bind", "volume"):
        run.volumes.append(f"{source}:{target}:{'ro' if 'readonly' in pairs or 'ro' in pairs else 'rw'}")
    else:
        run.left.append("--mount")


def _gpus(run: Run, value: str) -> None:
    text = value.strip("\"'")
    if text.startswith("device="):
        run.gpus += tuple(text.removeprefix("device=").split(","))
    elif text.isdigit() and value == text:
        run.gpu_count = max(run.gpu_count, int(text))
    elif text != "all":
        run.gpus += (text,)
