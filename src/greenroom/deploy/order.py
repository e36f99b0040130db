"""Who must wait for whom: engines that measure a device while they start must not do so at the same time."""

from __future__ import annotations

from greenroom.deploy.intent import Intent, Workload

LONE_STARTERS = ("vllm", "sglang")


def before(intent: Intent, workload: Workload) -> tuple[str, ...]:
    """The workload that has to be up first: the nearest one before it that may share a device; () = nobody."""
    if workload.kind not in LONE_STARTERS or workload.share.vendor == "cpu":
        return ()
    earlier = intent.workloads[: intent.workloads.index(workload)]
    near = [other for other in earlier if other.kind in LONE_STARTERS and _meet(workload, other)]
    return (near[-1].name,) if near else ()


def _meet(one: Workload, other: Workload) -> bool:
    if other.share.vendor == "cpu":
        return False
    named = set(one.share.devices) & set(other.share.devices)
    return bool(named) or not (one.share.devices and other.share.devices)
