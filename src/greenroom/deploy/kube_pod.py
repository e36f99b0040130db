"""One workload as a Kubernetes pod: container, volumes, probes, rights.  Plain values; nothing is written here."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from greenroom.deploy.intent import Intent, Mount, Probe, Workload
from greenroom.deploy.names import label
from greenroom.deploy.unfit import Unfit

Value = dict[str, Any]

PREFIX = "dev.greenroom"  # of our annotations and labels
USER = 10001  # neither root nor anybody's login; owns what the pod writes
HOME, TMP, SHM = "/home/greenroom", "/tmp", "/dev/shm"
HOME_SIZE, TMP_SIZE = "20Gi", "10Gi"  # compile caches grow; a runaway file must not fill the node
PROBE_TIMEOUT_S = 5
STARTUP_PERIOD_S = 5
LIVE_FAILURES_MAX = 6  # a busy engine may answer late, and ending it costs everybody a load
READY_FAILURES_MAX = 3
ENGINE_CPU, GREENROOM_CPU = "1", "500m"  # asked for; no limit: a throttled engine answers late and nobody is helped
UNKNOWN_ENGINE_MIB, UNKNOWN_GREENROOM_MIB = 4096, 1024  # asked for where nobody measured or estimated
MEMORY_SLACK = 1.25  # limit over what was measured: the first long prompt is not the end
MODELS = ("pvc", "image", "hostpath")
CONTROLLERS = ("deployment", "statefulset")
VENDOR_RESOURCES: Mapping[str, str] = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/i915"}


@dataclass(frozen=True, slots=True)
class KubeOptions:
    """What is particular to Kubernetes."""

    models: str = "pvc"  # one of MODELS: what stands in the cluster for folders of this host
    models_image: str = ""  # the image that holds them, with `image`
    models_size: str = "100Gi"
    state_size: str = "10Gi"
    storage_class: str = ""
    controller: str = "deployment"  # of greenroom itself, one of CONTROLLERS
    accelerator: str = ""  # the resource to ask for in place of the vendor's, such as nvidia.com/gpu.shared
    claims: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # workload -> resource -> how many, where a partition says so

    @classmethod
    def of(cls, options: Mapping[str, str]) -> KubeOptions:
        """From the options of an intent; Unfit where they cannot be followed."""
        found = cls(**{name: options[name] for name in cls.__slots__ if name != "claims" and options.get(name)})
        for name, value, allowed in (("models", found.models, MODELS), ("controller", found.controller, CONTROLLERS)):
            if value not in allowed:
                raise Unfit(f"{name} cannot be {value!r}: it is one of {', '.join(allowed)}")
        if found.models == "image" and not found.models_image:
            raise Unfit("models from an image need its reference: give --models-image REGISTRY/REPOSITORY:TAG, or --models pvc")
        return found


# ------------------------------------------------------------------------------------------------------------------ names


def labels(workload: Workload, intent: Intent) -> dict[str, str]:
    kind = "greenroom" if not workload.model else (workload.source.engine if workload.source and workload.source.engine else "engine")
    return {
        "app.kubernetes.io/name": kind.replace("_", "-"),
        **selector(workload, intent),
        "app.kubernetes.io/component": component(workload),
    }


def component(workload: Workload) -> str:
    return "engine" if workload.model else "gateway"


def selector(workload: Workload, intent: Intent) -> dict[str, str]:
    """Matches the pods of this workload and no other's."""
    return {"app.kubernetes.io/instance": workload.name, "app.kubernetes.io/part-of": intent.name}


def annotations(workload: Workload) -> dict[str, str]:
    """The name that clients send, as it is: a label could not hold it."""
    return {f"{PREFIX}/model": workload.model} if workload.model else {}


def secret_name(intent: Intent) -> str:
    return f"{intent.name}-secrets"


def config_name(intent: Intent) -> str:
    return f"{intent.name}-config"


def models_claim(intent: Intent) -> str:
    return f"{intent.name}-models"


def volume_claim(intent: Intent, source: str) -> str:
    return label(f"{intent.name}-{source}")


def accelerators(workload: Workload, options: KubeOptions) -> dict[str, str]:
    """Resource name -> how many, as text."""
    share = workload.share
    if workload.name in options.claims:
        return dict(options.claims[workload.name])
    if not share.count or share.vendor not in VENDOR_RESOURCES:
        return {}
    if share.mig:
        return {f"nvidia.com/mig-{share.mig.replace('+', '.')}": str(share.count)}
    return {options.accelerator or VENDOR_RESOURCES[share.vendor]: str(share.count)}


# ---------------------------------------------------------------------------------------------------------------- pod


def literal(text: str) -> str:
    """Kubernetes fills in `$(NAME)` and takes `$$` for `$` in commands and variables: text that would be read so, escaped."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def pod(workload: Workload, intent: Intent, options: KubeOptions) -> Value:
    """The pod's spec, without any accelerator."""
    volumes = list(_volumes(workload, intent, options))
    return {
        "serviceAccountName": intent.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a service named vllm would set VLLM_PORT, which vLLM reads
        "terminationGracePeriodSeconds": math.ceil(workload.stop_s),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(workload, intent, [mount for mount, _ in volumes])],
        "volumes": list({volume["name"]: volume for _, volume in volumes}.values()),
    }


def _container(workload: Workload, intent: Intent, mounts: list[Value]) -> Value:
    return {
        "name": "greenroom" if not workload.model else "engine",
        "image": workload.image,
        "imagePullPolicy": "IfNotPresent",
        **_command(workload),
        "env": _env(workload, intent),
        "ports": [{"name": "http", "containerPort": workload.port, "protocol": "TCP"}],
        **_probes(workload),
        "resources": resources(workload),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _command(workload: Workload) -> Value:
    argv = [literal(word) for word in workload.argv]
    command, args = (argv[:1], argv[1:]) if workload.args_entrypoint else ([], argv)
    return {**({"command": command} if command else {}), **({"args": args} if args else {})}


def _env(workload: Workload, intent: Intent) -> list[Value]:
    given = dict(workload.env)
    # The user has no line in /etc/passwd: caches need a home, and Python's getpass a name.
    added = {name: value for name, value in (("HOME", HOME), ("USER", "greenroom")) if name not in given}
    plain: list[Value] = [{"name": name, "value": literal(value)} for name, value in {**given, **added}.items()]
    secret: list[Value] = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(intent), "key": name}}} for name, _ in workload.secret_env
    ]
    return plain + secret


def _probes(workload: Workload) -> Value:
    ready = workload.ready or workload.live
    live = workload.live or workload.ready
    start_s = max((probe.start_s for probe in (workload.live, workload.ready) if probe is not None), default=600.0)
    period_s = max(1, round(ready.period_s)) if ready is not None else 10
    return {
        "startupProbe": {
            **_check(ready, workload.port),
            "periodSeconds": STARTUP_PERIOD_S,
            "timeoutSeconds": PROBE_TIMEOUT_S,
            "failureThreshold": math.ceil(start_s / STARTUP_PERIOD_S) + 1,
        },
        "livenessProbe": {
            **_check(live, workload.port),
            "periodSeconds": period_s,
            "timeoutSeconds": PROBE_TIMEOUT_S,
            "failureThreshold": LIVE_FAILURES_MAX,
        },
        "readinessProbe": {
            **_check(ready, workload.port),
            "periodSeconds": period_s,
            "timeoutSeconds": PROBE_TIMEOUT_S,
            "failureThreshold": READY_FAILURES_MAX,
        },
    }


def _check(probe: Probe | None, port: int) -> Value:
    if probe is None:  # it has no page for this: an open port must do
        return {"tcpSocket": {"port": port}}
    return {"httpGet": {"path": probe.path, "port": probe.port, "scheme": "HTTP"}}


def resources(workload: Workload) -> Value:
    """CPU and memory; quantities are text."""
    shm = workload.shm_mib  # what lies in /dev/shm counts as the container's memory
    if not workload.memory_mib:
        unknown = UNKNOWN_ENGINE_MIB if workload.model else UNKNOWN_GREENROOM_MIB
        return {"requests": {"cpu": ENGINE_CPU if workload.model else GREENROOM_CPU, "memory": f"{unknown + shm}Mi"}}
    return {
        "requests": {"cpu": ENGINE_CPU if workload.model else GREENROOM_CPU, "memory": f"{workload.memory_mib + shm}Mi"},
        "limits": {"memory": f"{math.ceil(workload.memory_mib * MEMORY_SLACK) + shm}Mi"},
    }


# ------------------------------------------------------------------------------------------------------------ volumes


def _volumes(workload: Workload, intent: Intent, options: KubeOptions) -> Iterator[tuple[Value, Value]]:
    """(mount, volume) of all that the container sees; the root file system itself is read-only."""
    taken: list[str] = []
    for mount in workload.mounts:
        target = posixpath.normpath(mount.target)
        if target in taken:
            raise Unfit(f"{workload.name} mounts two things at {target}: leave one out, or give it another place")
        taken.append(target)
        yield _mounted(mount, target, intent, options)
    home = dict(workload.env).get("HOME", HOME)
    for path, name, volume in (
        (TMP, "tmp", {"emptyDir": {"sizeLimit": TMP_SIZE}}),
        (posixpath.normpath(home), "home", {"emptyDir": {"sizeLimit": HOME_SIZE}}),
        (SHM, "shm", {"emptyDir": {"medium": "Memory", "sizeLimit": f"{workload.shm_mib}Mi"}}),
    ):
        if path in taken or (path == SHM and not workload.shm_mib) or not path.startswith("/") or path == "/":
            continue
        taken.append(path)
        yield {"name": name, "mountPath": path}, {"name": name, **volume}


def _mounted(mount: Mount, target: str, intent: Intent, options: KubeOptions) -> tuple[Value, Value]:
    read_only = {"readOnly": True} if mount.read_only else {}
    sub_path = {"subPath": mount.sub_path} if mount.sub_path else {}
    if mount.kind == "config":
        volume = {"name": "config", "configMap": {"name": config_name(intent)}}
        return {"name": "config", "mountPath": target, "subPath": mount.sub_path or posixpath.basename(mount.source), **read_only}, volume
    if mount.kind == "volume":
        name = _volume_name(mount)
        claim: Value = {"claimName": volume_claim(intent, mount.source)}
        return {"name": name, "mountPath": target, **sub_path, **read_only}, {"name": name, "persistentVolumeClaim": claim}
    if mount.kind == "image":
        name = _volume_name(mount)
        return {"name": name, "mountPath": target, **sub_path, "readOnly": True}, {"name": name, "image": _image(mount.source)}
    if mount.kind != "bind":
        raise Unfit(f"a mount of kind {mount.kind!r} cannot be had in Kubernetes")
    return _bound(mount, target, intent, options)


def _bound(mount: Mount, target: str, intent: Intent, options: KubeOptions) -> tuple[Value, Value]:
    """What was a folder or file of this host."""
    read_only = {"readOnly": True} if mount.read_only else {}
    if options.models == "hostpath":
        name = _volume_name(mount)
        sub_path = {"subPath": mount.sub_path} if mount.sub_path else {}
        return {"name": name, "mountPath": target, **sub_path, **read_only}, {"name": name, "hostPath": {"path": mount.source}}
    within = posixpath.join(bound_path(mount.source, intent), mount.sub_path).strip("/")
    place = {"name": "models", "mountPath": target, **({"subPath": within} if within else {})}
    if options.models == "image":
        return {**place, "readOnly": True}, {"name": "models", "image": _image(options.models_image)}
    return {**place, **read_only}, {"name": "models", "persistentVolumeClaim": {"claimName": models_claim(intent)}}


def bound_path(source: str, intent: Intent) -> str:
    """Where in the volume of models a folder of this host stands: at its root when it is the only one, else at its own path."""
    sources = bound_sources(intent)
    return "" if len(sources) == 1 else posixpath.normpath(source).strip("/")


def bound_sources(intent: Intent) -> tuple[str, ...]:
    return tuple(sorted({posixpath.normpath(mount.source) for one in intent.workloads for mount in one.mounts if mount.kind == "bind"}))


def _volume_name(mount: Mount) -> str:
    return label(f"{mount.kind}-{mount.source}")


def _image(reference: str) -> Value:
    return {"reference": reference, "pullPolicy": "IfNotPresent"}
