"""Units for podman under systemd: what quadlet turns into services.  `Intent -> Files`."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable

from greenroom.deploy import containerfile, escape, health
from greenroom.deploy.files import commented, head
from greenroom.deploy.intent import Files, Intent, Mount, Share, Workload
from greenroom.deploy.limits import memory_max_mib, pids_max, rights, sysctls
from greenroom.deploy.names import beside
from greenroom.deploy.order import before
from greenroom.deploy.unfit import Unfit

PULL_S = 1800  # an image, or its build, may take this long before the start itself
STOP_SLACK_S = 15
RESTART_S = 5
STARTS_MAX, STARTS_WINDOW_S = 10, 3600  # a unit that keeps failing is left alone; an operator's restarts count as well
HOME = "%E/containers/systemd"  # of these files, for either manager
INSTALL = {"user": "default.target", "system": "multi-user.target"}

Lines = list[str]


def files(intent: Intent, *, rootful: bool = False) -> Files:
    """`.container`, `.volume`, `.build` and `.network` units, the configuration, and examples of the secrets' files.

    `rootful`: for /etc/containers/systemd instead of ~/.config/containers/systemd.
    """
    out: dict[str, str] = {}
    for workload in intent.workloads:
        out[f"{workload.name}.container"] = _container(intent, workload, rootful)
        if workload.secret_env:
            out[f"{workload.name}.env.example"] = _secrets(intent, workload)
    for volume in sorted({mount.source for workload in intent.workloads for mount in workload.mounts if mount.kind == "volume"}):
        out[f"{volume}.volume"] = _unit(intent, [("Volume", [f"VolumeName={volume}"])])
    if intent.builds:
        build = [f"ImageTag={_whole(intent.workloads[0].image)}", f"File=./{containerfile.FILE}", "SetWorkingDirectory=unit"]
        out[f"{intent.name}.build"] = _unit(intent, [("Build", build), ("Service", [f"TimeoutStartSec={PULL_S}"])])
        out[containerfile.FILE] = intent.builds
    if _has_network(intent, rootful):
        # podman's own network has no IPv6: a port that is published there would lead nowhere.
        ipv6 = ["IPv6=true"] if ":" in intent.listen_host else []
        out[f"{intent.name}.network"] = _unit(intent, [("Network", [f"NetworkName={intent.name}", *ipv6])])
    if any(mount.kind == "config" for workload in intent.workloads for mount in workload.mounts):
        out["greenroom.yaml"] = intent.config_text
    return out


def _container(intent: Intent, workload: Workload, rootful: bool) -> str:
    title = f"greenroom serving {len(intent.config.models)} models" if not workload.model else f"{workload.model} ({workload.kind})"
    unit = [f"Description={escape.line(title)}", "Wants=network-online.target", "After=network-online.target"]
    unit += [f"After={name}.service" for name in before(intent, workload)]
    unit += [f"RequiresMountsFor={escape.value_word(mount.source)}" for mount in workload.mounts if _is_odd(mount)]
    unit += [f"StartLimitIntervalSec={STARTS_WINDOW_S}", f"StartLimitBurst={STARTS_MAX}"]
    # Not by an .image unit: that would ask the registry at every boot, and fail without it.
    image = [f"Image={intent.name}.build"] if intent.builds else [f"Image={_whole(workload.image)}", "Pull=missing"]
    container = [*image, f"ContainerName={workload.name}"]
    container += [f"Label={escape.word(f'dev.greenroom.model={workload.model}')}"] if workload.model else []
    container += _command(workload)
    container += [f"Environment={escape.word(f'{name}={value}')}" for name, value in workload.env]
    container += [f"EnvironmentFile=./{workload.name}.env"] if workload.secret_env else []
    container += [f"PodmanArgs=--env={name}" for name in workload.offered_env]  # from the service, where it is set
    container += [_port(intent, workload)] if workload.host_port else []
    container += [f"Network={intent.name}.network"] if _has_network(intent, rootful) else []
    container += [_mount(mount, moves=_is_apart(workload, rootful)) for mount in workload.mounts]
    container += _devices(workload.share, rootful)
    container += _health(workload)
    container += _confinement(intent, workload, rootful)
    start_s = workload.ready.start_s if workload.ready else 0.0
    service = [
        *([f"EnvironmentFile=-{HOME}/{_offered_file(intent)}"] if workload.offered_env else []),
        *(f"ExecStartPre={_fetch(mount.source)}" for mount in workload.mounts if mount.kind == "image"),
        "Restart=always",
        f"RestartSec={RESTART_S}",
        f"TimeoutStartSec={math.ceil(start_s) + PULL_S}",
        f"TimeoutStopSec={math.ceil(workload.stop_s) + STOP_SLACK_S}",
    ]
    sections = [("Unit", unit), ("Container", container), ("Service", service), ("Install", [f"WantedBy={INSTALL[_manager(rootful)]}"])]
    return _unit(intent, sections, notes=(*_steps(intent, workload, rootful), *intent.notes))


def _offered_file(intent: Intent) -> str:
    """What may be there and need not; one for all."""
    return beside(intent.name, "hub.env")


def _fetch(image: str) -> str:
    """Models that are images are not fetched with their container; one that is there is not asked for."""
    script = f"podman image exists {shlex.quote(image)} || exec podman image pull {shlex.quote(image)}"
    return escape.words(["/bin/sh", "-c", script])


def _manager(rootful: bool) -> str:
    return "system" if rootful else "user"


def _steps(intent: Intent, workload: Workload, rootful: bool) -> tuple[str, ...]:
    folder = "/etc/containers/systemd" if rootful else "~/.config/containers/systemd"
    systemctl = "systemctl" if rootful else "systemctl --user"
    secrets = (f"First: cp {workload.name}.env.example {workload.name}.env, chmod 600, fill it in.",) if workload.secret_env else ()
    where = f"{folder}/{_offered_file(intent)} (chmod 600)"
    offered = tuple(f"{name} is handed on where {where} has it: gated models ask for it." for name in workload.offered_env)
    on_files = rights((workload,)) if rootful else ()
    if _is_apart(workload, rootful):
        on_files = (
            "Its users are none of the host's: /etc/subuid and /etc/subgid need a line such as containers:2147483647:2147483648,",
            "and the files it reads must be readable for everybody.  Without UserNS=auto the line is not needed.",
        )
    is_nvidia = workload.share.vendor == "nvidia"
    cdi = ("podman finds the GPUs by /etc/cdi/nvidia.yaml: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",) if is_nvidia else ()
    is_configured = any(mount.kind == "config" for mount in workload.mounts)
    changed = (f"After a change of greenroom.yaml: {systemctl} restart {workload.name}",) if is_configured else ()
    linger = () if rootful else ("It runs without anybody logged in after: loginctl enable-linger",)
    return (
        *secrets,
        *offered,
        *((containerfile.FIRST,) if intent.builds else ()),
        f"To {folder}, then: {systemctl} daemon-reload && {systemctl} start {workload.name}",
        *changed,
        *cdi,
        *on_files,
        *linger,
    )


def _command(workload: Workload) -> Lines:
    argv = workload.argv
    if not workload.args_entrypoint:
        return [f"Exec={escape.words(argv)}"]
    if "" in argv:  # quadlet drops an empty word and all that follow it, without a complaint
        argv = ("/bin/sh", "-c", f"exec {shlex.join(argv)}")
    rest = [f"Exec={escape.words(argv[1:])}"] if len(argv) > 1 else []
    return [f"Entrypoint={_whole(argv[0])}", *rest]


def _has_network(intent: Intent, rootful: bool) -> bool:
    """Engines find each other by name; without root, ports are published in another way, which knows IPv6."""
    return intent.mode == "engines" or (rootful and ":" in intent.listen_host)


def _port(intent: Intent, workload: Workload) -> str:
    if intent.listen_host == "::":  # all addresses of both families, as greenroom itself takes it; podman would take it for IPv6 alone
        return f"PublishPort={workload.host_port}:{workload.port}"
    host = f"[{intent.listen_host}]" if ":" in intent.listen_host else intent.listen_host
    return f"PublishPort={host}:{workload.host_port}:{workload.port}"


def _mount(mount: Mount, *, moves: bool = False) -> str:
    """`moves`: the container's users may be others at each start, so a volume is made theirs anew."""
    if mount.kind == "volume":
        options = ",".join(["ro"] * mount.read_only + ["U"] * (moves and not mount.read_only))
        return f"Volume={mount.source}.volume:{mount.target}{f':{options}' if options else ''}"
    source = f"./{mount.source}" if mount.kind == "config" else mount.source
    pairs = [("type", "image" if mount.kind == "image" else "bind"), ("source", source), ("destination", mount.target)]
    if mount.kind == "image":
        pairs += [("subpath", mount.sub_path)] if mount.sub_path else []
    else:
        pairs += [("ro", "true" if mount.read_only else "false")]
    if _is_odd(mount):
        return f"PodmanArgs={escape.word(f'--mount={escape.fields(pairs)}')}"
    return f"Mount={escape.word(escape.fields(pairs))}"


def _is_odd(mount: Mount) -> bool:
    """A path that quadlet would write into RequiresMountsFor= as it is, where it means something else."""
    return mount.kind == "bind" and re.fullmatch(r"[\w@+=:,./-]+", mount.source) is None


def _devices(share: Share, rootful: bool) -> Lines:
    if share.vendor == "nvidia":
        if share.mig and not share.devices:
            raise Unfit(f"podman hands out a slice by its UUID: name a {share.mig} with --gpu MIG-… (nvidia-smi -L lists them)")
        names = share.devices or (("all",) if share.every else tuple(str(index) for index in range(share.count)))
        return [f"AddDevice=nvidia.com/gpu={_whole(name)}" for name in names]
    groups = ["GroupAdd=video"] if rootful else ["GroupAdd=keep-groups"]
    if share.vendor == "amd":
        return ["AddDevice=/dev/kfd", "AddDevice=/dev/dri", *groups]
    return ["AddDevice=/dev/dri", *groups] if share.vendor == "intel" else []


def _health(workload: Workload) -> Lines:
    """It overrides what the image brings, which asks the port of the image's author."""
    probe = workload.ready
    if probe is None:
        return ["HealthCmd=none"]
    return [
        f"HealthCmd={_whole(json.dumps(health.command(workload)))}",
        f"HealthInterval={math.ceil(probe.period_s)}s",
        f"HealthTimeout={health.TIMEOUT_S + 1}s",
        f"HealthRetries={health.RETRIES}",
        f"HealthStartPeriod={math.ceil(probe.start_s)}s",
        "HealthOnFailure=kill",
        "Notify=healthy",
    ]


def _confinement(intent: Intent, workload: Workload, rootful: bool) -> Lines:
    lines = ["RunInit=true", "DropCapability=all", "NoNewPrivileges=true", "ReadOnly=true", "ReadOnlyTmpfs=true"]
    lines += [f"Sysctl={name}={value}" for name, value in sysctls(workload).items()]
    lines += [f"PidsLimit={pids_max(intent, workload)}"]
    # Labels would have to be changed on the models' own files, and devices are closed to labelled containers.
    lines += ["SecurityLabelDisable=true"]
    # Nodes of AMD and Intel cards are open to root and a group of the host; users of another namespace are neither.
    lines += ["UserNS=auto"] if _is_apart(workload, rootful) else []
    lines += [f"ShmSize={workload.shm_mib}m"] if workload.shm_mib else []
    lines += [f"PodmanArgs=--memory={limit}m"] if (limit := memory_max_mib(workload)) else []
    return [*lines, f"StopTimeout={math.ceil(workload.stop_s)}"]


def _is_apart(workload: Workload, rootful: bool) -> bool:
    """Its users are none of the host's.  Not where it writes into a folder of the host, which they could not."""
    writes = any(mount.kind == "bind" and not mount.read_only for mount in workload.mounts)
    return rootful and workload.share.vendor in ("nvidia", "cpu") and not writes


def _secrets(intent: Intent, workload: Workload) -> str:
    lines = head(
        intent.options.get("command", ""),
        f"Copy it to {workload.name}.env (chmod 600) and write each value behind its `=`, as it is, without quotes.",
    )
    return commented(lines) + "".join(f"{name}=\n" for name, _ in workload.secret_env)


def _unit(intent: Intent, sections: Iterable[tuple[str, Lines]], *, notes: tuple[str, ...] = ()) -> str:
    text = commented(head(intent.options.get("command", ""), *notes))
    return text + "".join(f"\n[{name}]\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections)


def _whole(text: str) -> str:
    """A value that quadlet takes whole and puts on podman's command line by itself."""
    return text.replace("%", "%%").replace("$", "$$")
