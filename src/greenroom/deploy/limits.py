"""What a container may use of the host beside memory and devices."""

from __future__ import annotations

from greenroom.deploy.intent import Intent, Workload

PIDS_PER_ENGINE = 4096  # threads count as well, and a server of PyTorch starts some for every core


def pids_max(intent: Intent, workload: Workload) -> int:
    """Of one engine, or of greenroom with all of its."""
    return PIDS_PER_ENGINE * (1 if workload.model else 1 + len(intent.config.models))
