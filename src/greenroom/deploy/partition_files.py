"""Plans as files: for the GPU operator (mig-manager, device plugin), and for a host without Kubernetes."""

from __future__ import annotations

import math
from typing import Any

from greenroom.config.errors import one_line
from greenroom.config.yaml_out import dump
from greenroom.deploy.files import commented, head
from greenroom.deploy.intent import Files
from greenroom.deploy.names import label
from greenroom.deploy.partition import MigPlan, Need, SharePlan

Value = dict[str, Any]

OPERATOR = "gpu-operator"  # its usual namespace
RESOURCE = "nvidia.com/gpu"
PIPES = "/run/nvidia-mps"
LOGS = "/var/log/nvidia-mps"
UTILIZATION_FLAG = "--gpu-memory-utilization"
UTILIZATION_MAX = 0.95  # vLLM and the driver keep some for themselves


def mig_files(plan: MigPlan, *, name: str, namespace: str, node: str, command: str = "") -> Files:
    """The operator's ConfigMap, the same for nvidia-mig-parted alone, and the commands of a bare host."""
    name = label(name)
    configs = {"version": "v1", "mig-configs": {"all-disabled": [{"devices": "all", "mig-enabled": False}], name: _mig_devices(plan)}}
    about = (*head(command, f"{plan.gpus} × {plan.gpu.name}:"), *_mig_places(plan))
    steps = (*about, "", *_mig_steps(name, namespace, node))
    alone = (*about, "", f"On a host without Kubernetes: nvidia-mig-parted apply -f mig-parted.yaml -c {name}")
    return {
        "mig-manager.yaml": _config_map(f"{name}-mig", namespace, {"config.yaml": dump(configs)}, steps),
        "mig-parted.yaml": dump(configs, comments=alone),
        "mig-host.sh": "#!/bin/sh\n" + commented((*about, "", *_mig_host(plan))),
    }


def _mig_devices(plan: MigPlan) -> list[Value]:
    cut = []
    for gpu in plan.cut:
        names = [one.profile.name for one in plan.slices if one.gpu == gpu]
        cut.append({"devices": [gpu], "mig-enabled": True, "mig-devices": {one: names.count(one) for one in sorted(set(names))}})
    uncut = sorted({*range(plan.gpus)} - {*plan.cut})
    return [*cut, *([{"devices": uncut, "mig-enabled": False}] if uncut else [])]


def _mig_places(plan: MigPlan) -> tuple[str, ...]:
    said = []
    for one in plan.slices:
        spare = one.profile.memory_mib - one.need.mib
        about = "" if one.profile.listed else ", reckoned from its name: compare nvidia-smi mig -lgip"
        said.append(
            f"  {one_line(one.need.model)}: {one.profile.name} on GPU {one.gpu}, needs {one.need.mib:,} MiB ({one.need.source}) of "
            f"{one.profile.memory_mib:,}{about}; {spare:,} spare. Its pod asks for {resource_of(one.profile.name)}: 1"
        )
        said += _utilization(one.need, one.profile.memory_mib, one.profile.name)
    for need, gpus in plan.whole:
        where = "GPU" if len(gpus) == 1 else "GPUs"
        said.append(f"  {one_line(need.model)}: {where} {', '.join(map(str, gpus))} uncut. Its pod asks for {RESOURCE}: {len(gpus)}")
    for gpu in plan.cut:
        if width := plan.free_width(gpu):
            said.append(f"  GPU {gpu}: {width} of {plan.gpu.width} memory slices are left over")
    if plan.unused:
        said.append(f"  GPUs {', '.join(map(str, plan.unused))}: left over, uncut")
    said.append("Slices are walls: memory, errors and bandwidth stay apart; no model runs over two, and NVLink does not reach them.")
    return tuple(said)


def resource_of(profile: str) -> str:
    """What a pod asks for, with the operator's strategy `mixed`."""
    return f"nvidia.com/mig-{profile.replace('+', '.')}"


def _utilization(need: Need, slice_mib: int, name: str) -> list[str]:
    if need.utilization is None:
        return []
    return [f"    its {UTILIZATION_FLAG} {need.utilization:g} is of a whole GPU: with {name} write {utilization_on(need, slice_mib):.2f}"]


def utilization_on(need: Need, slice_mib: int) -> float:
    """The share of a slice that is the same memory."""
    return min(UTILIZATION_MAX, math.floor(need.mib / slice_mib * 100) / 100)


def _mig_steps(name: str, namespace: str, node: str) -> tuple[str, ...]:
    return (
        "Changing slices ends what runs on these GPUs. In this order:",
        f"  kubectl apply -f mig-manager.yaml && kubectl drain {node} --ignore-daemonsets --delete-emptydir-data",
        "  kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge \\",
        f'    -p \'{{"spec": {{"mig": {{"strategy": "mixed"}}, "migManager": {{"config": {{"name": "{name}-mig"}}}}}}}}\'',
        f"  kubectl label node {node} nvidia.com/mig.config={name} --overwrite",
        f"  kubectl get node {node} -o jsonpath='{{.metadata.labels.nvidia\\.com/mig\\.config\\.state}}'    # until it says success",
        f"  kubectl uncordon {node}",
    )


def _mig_host(plan: MigPlan) -> tuple[str, ...]:
    said = ["By hand, as root, with nothing running on these GPUs; slices are gone after a restart of the host:"]
    for gpu in plan.cut:
        made = ",".join(f"{one.profile.name}:{one.start}" for one in plan.slices if one.gpu == gpu)
        said += [f"  nvidia-smi -i {gpu} -mig 1", f"  nvidia-smi mig -i {gpu} -cgi {made} -C"]
    return (*said, "  nvidia-smi -L    # the slices' UUIDs, for `devices` in greenroom.yaml")


# ------------------------------------------------------------------------------------------------------------ MPS, turns


def mps_files(plan: SharePlan, *, name: str, namespace: str, node: str, command: str = "") -> Files:
    """The device plugin's ConfigMap, and a daemon for a host without Kubernetes."""
    name = label(name)
    sharing = {"mps": {"renameByDefault": True, "failRequestsGreaterThanOne": True, "resources": [_replicated(plan)]}}
    about = (*_share_head(plan, command), *_mps_words(plan))
    return {
        "device-plugin.yaml": _plugin(name, namespace, sharing, (*about, "", *_plugin_steps(name, namespace, node, plan))),
        "nvidia-mps.service": commented(about) + _mps_unit(plan),
    }


def time_slicing_files(plan: SharePlan, *, name: str, namespace: str, node: str, command: str = "") -> Files:
    """The device plugin's ConfigMap; a host without Kubernetes needs nothing, processes take turns anyway."""
    name = label(name)
    sharing = {"timeSlicing": {"renameByDefault": True, "failRequestsGreaterThanOne": True, "resources": [_replicated(plan)]}}
    about = (*_share_head(plan, command), *_turn_words(plan))
    return {"device-plugin.yaml": _plugin(name, namespace, sharing, (*about, "", *_plugin_steps(name, namespace, node, plan)))}


def _replicated(plan: SharePlan) -> Value:
    return {"name": RESOURCE, "replicas": plan.replicas}


def _share_head(plan: SharePlan, command: str) -> tuple[str, ...]:
    needs = (f"  {one_line(need.model)}: needs {need.mib:,} MiB ({need.source})" for need in plan.needs)
    return (*head(command, f"{plan.gpus} × {plan.gpu.name}, each offered {plan.replicas} times, for:"), *needs, *map(one_line, plan.notes))


def _mps_words(plan: SharePlan) -> tuple[str, ...]:
    return (
        f"Each client process may take {plan.limit_mib:,} MiB ({plan.gpu.memory_mib:,} ÷ {plan.replicas}): the limit",
        "(CUDA_MPS_PINNED_DEVICE_MEM_LIMIT) is of a process, not of a container; two processes may take it twice.",
        f"Shares are equal, and so is compute: {100 // plan.replicas} % of the SMs each, also while the others rest.",
        "A pod takes one share: asking for more is refused. A fatal error of one client can end the others on the same GPU.",
        "MPS and MIG do not go together here; `flags` of the plugin are left as they are.",
    )


def _turn_words(plan: SharePlan) -> tuple[str, ...]:
    return (
        "Time-slicing gives turns, nothing else: there is NO MEMORY ISOLATION, no error isolation and no share of compute.",
        "Each pod sees all of the memory; the sum above is kept by the engines' own limits alone, the scheduler knows nothing of it.",
        "A pod takes one share: two would give it no more memory and no more turns, so they are refused.",
    )


def _plugin(name: str, namespace: str, sharing: Value, comments: tuple[str, ...]) -> str:
    # renameByDefault stands beside `resources`: one level up it would be ignored without a word.
    return _config_map(f"{name}-sharing", namespace, {name: dump({"version": "v1", "sharing": sharing})}, comments)


def _plugin_steps(name: str, namespace: str, node: str, plan: SharePlan) -> tuple[str, ...]:
    return (
        f"Pods ask for {shared_resource()}: 1 (greenroom generate kube --accelerator {shared_resource()}).",
        "  kubectl apply -f device-plugin.yaml",
        "  kubectl patch clusterpolicies.nvidia.com/cluster-policy --type merge \\",
        f'    -p \'{{"spec": {{"devicePlugin": {{"config": {{"name": "{name}-sharing"}}}}}}}}\'',
        f"  kubectl label node {node} nvidia.com/device-plugin.config={name} --overwrite",
        f"  kubectl get node {node} -o jsonpath='{{.status.allocatable}}'    # {shared_resource()}: {plan.replicas * plan.gpus}",
        "The operator does not see later changes of this ConfigMap; after one:",
        f"  kubectl --namespace {namespace} rollout restart daemonset/nvidia-device-plugin-daemonset",
    )


def shared_resource() -> str:
    """What renameByDefault makes of the GPU's name."""
    return f"{RESOURCE}.shared"


def _mps_unit(plan: SharePlan) -> str:
    limits = [
        f"ExecStartPost=/bin/sh -c 'echo set_default_device_pinned_mem_limit {gpu} {plan.limit_mib}M | nvidia-cuda-mps-control'"
        for gpu in range(plan.gpus)
    ]
    lines = [
        "[Unit]",
        "Description=CUDA MPS control daemon",
        "After=nvidia-persistenced.service",
        "",
        "[Service]",
        "Type=forking",
        f"Environment=CUDA_MPS_PIPE_DIRECTORY={PIPES}",
        f"Environment=CUDA_MPS_LOG_DIRECTORY={LOGS}",
        f"RuntimeDirectory={PIPES.rsplit('/', 1)[1]}",
        f"LogsDirectory={LOGS.rsplit('/', 1)[1]}",
        *(f"ExecStartPre=nvidia-smi -i {gpu} -c EXCLUSIVE_PROCESS" for gpu in range(plan.gpus)),
        "ExecStart=nvidia-cuda-mps-control -d",
        *limits,
        f"ExecStartPost=/bin/sh -c 'echo set_default_active_thread_percentage {100 // plan.replicas} | nvidia-cuda-mps-control'",
        "ExecStop=/bin/sh -c 'echo quit | nvidia-cuda-mps-control'",
        *(f"ExecStopPost=-nvidia-smi -i {gpu} -c DEFAULT" for gpu in range(plan.gpus)),
        "Restart=on-failure",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _config_map(name: str, namespace: str, data: dict[str, str], comments: tuple[str, ...]) -> str:
    meta = {"name": name, "namespace": namespace}
    return dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}, comments=comments)
