"""A compose.yaml for docker compose (2.20 and newer) and podman's.  `Intent -> Files`."""

from __future__ import annotations

import math
from typing import Any

from greenroom.config.yaml_out import dump
from greenroom.deploy import containerfile, health
from greenroom.deploy.files import commented, head
from greenroom.deploy.intent import Files, Intent, Mount, Share, Workload
from greenroom.deploy.limits import memory_max_mib, pids_max, rights, sysctls
from greenroom.deploy.order import before
from greenroom.deploy.unfit import Unfit

FILE = "compose.yaml"

Value = dict[str, Any]


def files(intent: Intent) -> Files:
    """compose.yaml, the configuration, and an example of `.env` where there are secrets."""
    document: Value = {"name": intent.name, "services": {one.name: _service(intent, one) for one in intent.workloads}}
    volumes = sorted({mount.source for one in intent.workloads for mount in one.mounts if mount.kind == "volume"})
    if volumes:
        document["volumes"] = {name: {} for name in volumes}
    secrets = sorted({key for one in intent.workloads for _, key in one.secret_env})
    steps = ["First: cp .env.example .env, chmod 600, fill it in."] if secrets else []
    offered = sorted({name for one in intent.workloads for name in one.offered_env})
    steps += [f"{', '.join(offered)} is handed on where .env has it: gated models ask for it."] if offered else []
    steps += [containerfile.FIRST] if intent.builds else []
    steps += [f"docker compose -f {FILE} up -d", *rights(intent.workloads), *intent.notes]
    out = {FILE: dump(document, comments=head(intent.options.get("command", ""), *steps))}
    if secrets:
        out[".env.example"] = _secrets(intent, secrets)
    if any(mount.kind == "config" for one in intent.workloads for mount in one.mounts):
        out["greenroom.yaml"] = intent.config_text
    if intent.builds:
        out[containerfile.FILE] = intent.builds
    return out


def _service(intent: Intent, workload: Workload) -> Value:
    service: Value = {"image": workload.image}
    if intent.builds:
        service["build"] = {"context": ".", "dockerfile": containerfile.FILE}
    if workload.args_entrypoint:
        service["entrypoint"] = [workload.argv[0]]
        service["command"] = list(workload.argv[1:])
    else:
        service["command"] = list(workload.argv)
    if workload.env or workload.secret_env or workload.offered_env:
        # What has no value here is taken from .env or the shell where it is set, and left out where it is not.
        service["environment"] = {**dict(workload.env), **dict.fromkeys(workload.offered_env)}
    if workload.model:
        service["labels"] = {"dev.greenroom.model": workload.model}
    if workload.host_port:
        # `::` is all addresses of both families, as greenroom itself takes it; docker would take it for IPv6 alone.
        host = {} if intent.listen_host == "::" else {"host_ip": intent.listen_host}
        published = {"target": workload.port, "published": str(workload.host_port), **host, "protocol": "tcp"}
        service["ports"] = [published]
    if workload.mounts:
        service["volumes"] = [_mount(mount) for mount in workload.mounts]
    service |= _devices(workload.share)
    service.setdefault("deploy", {}).setdefault("resources", {})["limits"] = _limits(intent, workload)
    if workload.shm_mib:
        service["shm_size"] = f"{workload.shm_mib}m"
    service["healthcheck"] = _health(workload)
    if allowed := sysctls(workload):
        service["sysctls"] = allowed
    if others := before(intent, workload):
        service["depends_on"] = {name: {"condition": "service_healthy"} for name in others}
    service |= {
        "restart": "unless-stopped",
        "init": True,
        "stop_grace_period": f"{math.ceil(workload.stop_s)}s",
        "read_only": True,
        "tmpfs": ["/tmp:exec"],  # docker forbids it, and compilers on the fly load what they have made there
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }
    service = _as_text(service)
    for name, key in workload.secret_env:
        service["environment"][name] = f"${{{key}:?write it into .env}}"
    return service


def _mount(mount: Mount) -> Value:
    if mount.kind == "volume":
        return {"type": "volume", "source": mount.source, "target": mount.target, **({"read_only": True} if mount.read_only else {})}
    if mount.kind == "image":
        raise Unfit(
            f"compose cannot mount the image {mount.source} as a model; let greenroom fetch it (--mode greenroom), "
            "or pull it with `greenroom pull` and name its file in the configuration"
        )
    source = f"./{mount.source}" if mount.kind == "config" else mount.source
    # Without it docker makes an empty folder where a model is missing, and the engine's message misleads.
    bind = {"create_host_path": False}
    return {"type": "bind", "source": source, "target": mount.target, "read_only": mount.read_only, "bind": bind}


def _devices(share: Share) -> Value:
    if share.vendor == "nvidia":
        if share.mig and not share.devices:
            raise Unfit(f"docker hands out a slice by its UUID: name a {share.mig} with --gpu MIG-… (nvidia-smi -L lists them)")
        which: Value = {"device_ids": list(share.devices)} if share.devices else {"count": "all" if share.every else share.count}
        return {"deploy": {"resources": {"reservations": {"devices": [{"driver": "nvidia", **which, "capabilities": ["gpu"]}]}}}}
    nodes = {"amd": ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"], "intel": ["/dev/dri:/dev/dri"]}.get(share.vendor, [])
    return {"devices": nodes, "group_add": ["video"]} if nodes else {}


def _limits(intent: Intent, workload: Workload) -> Value:
    memory_mib = memory_max_mib(workload)
    return {"pids": pids_max(intent, workload), **({"memory": f"{memory_mib}M"} if memory_mib else {})}


def _health(workload: Workload) -> Value:
    probe = workload.ready
    if probe is None:
        return {"disable": True}
    return {
        "test": ["CMD", *health.command(workload)],
        "interval": f"{math.ceil(probe.period_s)}s",
        "timeout": f"{health.TIMEOUT_S + 1}s",
        "retries": health.RETRIES,
        "start_period": f"{math.ceil(probe.start_s)}s",
    }


def _secrets(intent: Intent, keys: list[str]) -> str:
    lines = head(intent.options.get("command", ""), "Copy it to .env (chmod 600) and write each value between its quotes.")
    return commented(lines) + "".join(f"{key}=''\n" for key in keys)


def _as_text(value: Any) -> Any:
    """`$` begins a variable for compose; here it is one character of a text."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {key: _as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value
