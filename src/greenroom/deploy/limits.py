"""What a container may use of the host beside memory and devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from greenroom.config.errors import one_line
from greenroom.deploy.intent import Intent, Workload

MEMORY_SLACK = 1.25  # limit over what was measured: the first long prompt is not the end
PRIVILEGED_PORTS_END = 1024
PIDS_PER_ENGINE = 4096  # threads count as well, and a server of PyTorch starts some for every core


def memory_max_mib(workload: Workload) -> int:
    """Host RAM it may use at most; 0 = no limit.  What lies in /dev/shm counts as the container's memory."""
    return math.ceil(workload.memory_mib * MEMORY_SLACK) + workload.shm_mib if workload.memory_mib else 0


def pids_max(intent: Intent, workload: Workload) -> int:
    """Of one engine, or of greenroom with all of its."""
    return PIDS_PER_ENGINE * (1 if workload.model else 1 + len(intent.config.models))


def rights(workloads: Sequence[Workload]) -> tuple[str, ...]:
    """What files of the host must allow root in a container, which has none of root's privileges there; () where none are mounted."""
    mounts = [mount for one in workloads for mount in one.mounts if mount.kind == "bind"]
    written = sorted({one_line(mount.source) for mount in mounts if not mount.read_only})
    said = []
    if any(mount.read_only for mount in mounts):
        said.append("Root in a container has no privileges: the files it reads must be readable for everybody.")
    if written:
        said.append(f"It writes to {', '.join(written)}: make it first, and give it to root.")
    return tuple(said)


def sysctls(workload: Workload) -> dict[str, str]:
    """Of its own network: without privileges nobody listens below 1024, where images such as TEI's do, unless that is allowed."""
    return {"net.ipv4.ip_unprivileged_port_start": str(workload.port)} if workload.port < PRIVILEGED_PORTS_END else {}
