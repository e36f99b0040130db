"""One workload as a Kubernetes pod: container, volumes, probes, rights.  Plain values; nothing is written here."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from greenroom.deploy.intent import Intent, Mount, Probe, Workload
from greenroom.deploy.limits import memory_max_mib, sysctls
from greenroom.deploy.names import label
from greenroom.deploy.places import ROOT
from greenroom.deploy.unfit import Unfit

Value = dict[str, Any]

PREFIX = "dev.greenroom"  # of our annotations and labels
USER = 10001  # neither root nor anybody's login; owns what the pod writes
MODELS_ROOT = ROOT
HOME, TMP, SHM = "/home/greenroom", "/tmp", "/dev/shm"
HOME_SIZE, TMP_SIZE = "20Gi", "10Gi"  # compile caches grow; a runaway file must not fill the node
PROBE_TIMEOUT_S = 5
STARTUP_PERIOD_S = 5
PERIOD_S = 10  # where nobody said
UNKNOWN_START_S = 600.0
READY_PATH = "/ready"  # of greenroom
LIVE_FAILURES_MAX = 6  # a busy engine may answer late, and ending it costs everybody a load
READY_FAILURES_MAX = 3
ENGINE_CPU, GREENROOM_CPU = "1", "500m"  # asked for; no limit: a throttled engine answers late and nobody is helped
UNKNOWN_ENGINE_MIB, UNKNOWN_GREENROOM_MIB = 4096, 1024  # asked for where nobody measured or estimated
MODELS = ("pvc", "image", "hostpath")
CONTROLLERS = ("deployment", "statefulset")
DNS_NAME = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
# option, how it must be written, an example
WRITTEN = (
    ("models_size", r"[1-9][0-9]*([KMGTPE]i|[kMGTPE])?", "100Gi"),
    ("state_size", r"[1-9][0-9]*([KMGTPE]i|[kMGTPE])?", "10Gi"),
    ("storage_class", DNS_NAME, "fast-ssd"),
    ("accelerator", rf"{DNS_NAME}/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", "nvidia.com/gpu.shared"),
    ("models_image", r"[A-Za-z0-9][^\s\x00-\x1f]*", "registry.example/models:1"),
    ("models_image_path", r"(?!.*\.\.)[^/\x00-\x1f][^\x00-\x1f]*", "models"),
)
VENDOR_RESOURCES: Mapping[str, str] = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/i915"}


@dataclass(frozen=True, slots=True)
class KubeOptions:
    """What is particular to Kubernetes."""

    models: str = "pvc"  # one of MODELS: what stands in the cluster for folders of this host
    models_image: str = ""  # the image that holds them, with `image`
    models_image_path: str = "models"  # the folder in it; "" = its root
    models_size: str = "100Gi"  # also of caches, which hold what engines download
    state_size: str = "10Gi"
    storage_class: str = ""
    controller: str = "deployment"  # of greenroom itself, one of CONTROLLERS
    accelerator: str = ""  # the resource to ask for in place of the vendor's, such as nvidia.com/gpu.shared
    claims: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # workload -> resource -> how many, where a partition says so
    pods: Mapping[str, int] = field(default_factory=dict)  # workload -> how many there can be; 1 where not named

    @classmethod
    def of(cls, options: Mapping[str, str]) -> KubeOptions:
        """From the options of an intent; Unfit where they cannot be followed."""
        given: dict[str, Any] = {name: options[name] for name in cls.__slots__ if name not in ("claims", "pods") and options.get(name)}
        found = cls(**given)
        for name, value, allowed in (("models", found.models, MODELS), ("controller", found.controller, CONTROLLERS)):
            if value not in allowed:
                raise Unfit(f"{name} cannot be {value!r}: it is one of {', '.join(allowed)}")
        for name, pattern, example in WRITTEN:
            if getattr(found, name) and not re.fullmatch(pattern, getattr(found, name)):
                raise Unfit(f"{name.replace('_', ' ')} cannot be {getattr(found, name)!r}: write one such as {example}")
        if found.models == "image" and not found.models_image:
            raise Unfit("models from an image need its reference: give --models-image REGISTRY/REPOSITORY:TAG, or --models pvc")
        return found


# ------------------------------------------------------------------------------------------------------------------ names


def labels(workload: Workload, intent: Intent) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": workload.kind.replace("_", "-"),
        **selector(workload, intent),
        "app.kubernetes.io/component": component(workload),
    }


def component(workload: Workload) -> str:
    return "engine" if workload.model else "gateway"


def selector(workload: Workload, intent: Intent) -> dict[str, str]:
    """Matches the pods of this workload and no other's."""
    return {"app.kubernetes.io/instance": workload.name, "app.kubernetes.io/part-of": intent.name}


def model_note(workload: Workload) -> dict[str, str]:
    """The name that clients send, as it is: a label could not hold it."""
    return {f"{PREFIX}/model": workload.model} if workload.model else {}


def secret_name(intent: Intent) -> str:
    return f"{intent.name}-secrets"


def config_name(intent: Intent) -> str:
    return f"{intent.name}-config"


def models_claim(intent: Intent) -> str:
    return f"{intent.name}-models"


def claim_name(mount: Mount, intent: Intent) -> str:
    """Of a volume, or of a folder of the host that is written to."""
    prefix = f"{intent.name}-"
    name = label(mount.source if mount.source.startswith(prefix) else f"{prefix}{mount.source.strip('/')}")
    return label(f"{prefix}{mount.source}") if name == models_claim(intent) else name  # /models itself, to be written to


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
            **({"sysctls": [{"name": name, "value": value} for name, value in allowed.items()]} if (allowed := sysctls(workload)) else {}),
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
        "resources": resources(workload, intent),
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
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(intent), "key": key}}} for name, key in workload.secret_env
    ]
    secret += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(intent), "key": name, "optional": True}}}
        for name in workload.offered_env
    ]
    return plain + secret


def _probes(workload: Workload) -> Value:
    live, ready = workload.live or workload.ready, workload.ready or workload.live
    if not workload.model and ready is not None:
        ready = replace(ready, path=READY_PATH)  # also false while it shuts down: nobody new is sent to it
    start_s = start_s_max(workload)
    period_s = max(1, round(ready.period_s)) if ready is not None else PERIOD_S
    return {
        "startupProbe": {**_check(ready, workload), **_pace(STARTUP_PERIOD_S, math.ceil(start_s / STARTUP_PERIOD_S) + 1)},
        "livenessProbe": {**_check(live, workload), **_pace(period_s, LIVE_FAILURES_MAX)},
        "readinessProbe": {**_check(ready, workload), **_pace(period_s, READY_FAILURES_MAX)},
    }


def _pace(period_s: int, failures_max: int) -> Value:
    return {"periodSeconds": period_s, "timeoutSeconds": PROBE_TIMEOUT_S, "failureThreshold": failures_max}


def start_s_max(workload: Workload) -> float:
    return max((probe.start_s for probe in (workload.live, workload.ready) if probe is not None), default=UNKNOWN_START_S)


def _check(probe: Probe | None, workload: Workload) -> Value:
    if probe is None or not probe.path or workload.tcp_only:  # it has no page for this: an open port must do
        return {"tcpSocket": {"port": workload.port if probe is None else probe.port}}
    return {"httpGet": {"path": probe.path, "port": probe.port, "scheme": "HTTP"}}


def resources(workload: Workload, intent: Intent) -> Value:
    """CPU and memory; quantities are text."""
    shm = workload.shm_mib
    cpu = ENGINE_CPU if workload.model else GREENROOM_CPU
    if limit := memory_max_mib(workload):
        return {"requests": {"cpu": cpu, "memory": f"{workload.memory_mib + shm}Mi"}, "limits": {"memory": f"{limit}Mi"}}
    unknown = UNKNOWN_ENGINE_MIB if workload.model else UNKNOWN_GREENROOM_MIB + _ram_mib(intent)
    return {"requests": {"cpu": cpu, "memory": f"{unknown + shm}Mi"}}


def _ram_mib(intent: Intent) -> int:
    """What the configuration gives to models in host RAM."""
    return sum(device.size.memory_mib or 0 for device in intent.config.devices if device.id == "ram")


# ------------------------------------------------------------------------------------------------------------ volumes


def _volumes(workload: Workload, intent: Intent, options: KubeOptions) -> Iterator[tuple[Value, Value]]:
    """(mount, volume) of all that the container sees; the root file system itself is read-only."""
    taken: list[str] = []
    for mount in workload.mounts:
        target = posixpath.normpath(mount.target)
        if target in taken:
            raise Unfit(f"{workload.name} mounts two things at {target}: leave one out, or give it another place")
        taken.append(target)
        if not is_model_file(mount, options):
            yield _mounted(mount, target, intent, options)
    files = [mount for mount in workload.mounts if is_model_file(mount, options)]
    folder = models_folder(workload, intent, options)
    if files and any(target.startswith(f"{MODELS_ROOT}/") for target in set(taken) - {posixpath.normpath(mount.target) for mount in files}):
        # Something else is mounted below: no place for it could be made in a volume that is read-only.
        yield from (_models(posixpath.join(folder, within(mount)), posixpath.normpath(mount.target), intent, options) for mount in files)
    elif files:
        taken.append(MODELS_ROOT)
        yield _models(folder, MODELS_ROOT, intent, options)
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


def is_model_file(mount: Mount, options: KubeOptions) -> bool:
    """A file or folder of this host that stands in the one volume of models, at its place below MODELS_ROOT."""
    within = mount.target == MODELS_ROOT or mount.target.startswith(f"{MODELS_ROOT}/")
    return mount.kind == "bind" and mount.read_only and within and options.models != "hostpath"


def models_folder(workload: Workload, intent: Intent, options: KubeOptions) -> str:
    """Where in the volume of models its files stand: at the root, unless another workload has another file at a place of theirs."""
    taken: dict[str, str] = {}
    for one in intent.workloads:
        wanted = {mount.target: mount.source for mount in one.mounts if is_model_file(mount, options)}
        clash = any(taken.get(target, source) != source for target, source in wanted.items())
        if one.name == workload.name:
            return one.name if clash else ""
        if not clash:
            taken |= wanted
    return ""


def within(mount: Mount) -> str:
    """The place of a model file in the volume of models."""
    return posixpath.normpath(mount.target).removeprefix(MODELS_ROOT).lstrip("/")


def _models(place: str, target: str, intent: Intent, options: KubeOptions) -> tuple[Value, Value]:
    of_image = options.models_image_path if options.models == "image" else ""
    sub_path = posixpath.join(of_image, place).strip("/")
    mount = {"name": "models", "mountPath": target, **({"subPath": sub_path} if sub_path else {}), "readOnly": True}
    if options.models == "image":
        return mount, {"name": "models", "image": _image(options.models_image)}
    return mount, {"name": "models", "persistentVolumeClaim": {"claimName": models_claim(intent)}}


def is_claim(mount: Mount, options: KubeOptions) -> bool:
    """It has a claim of its own."""
    return mount.kind == "volume" or (mount.kind == "bind" and options.models != "hostpath" and not is_model_file(mount, options))


def _mounted(mount: Mount, target: str, intent: Intent, options: KubeOptions) -> tuple[Value, Value]:
    read_only = {"readOnly": True} if mount.read_only else {}
    place: Value = {"mountPath": target, **({"subPath": mount.sub_path} if mount.sub_path else {}), **read_only}
    name = label(f"{mount.kind}-{mount.source}")
    if mount.kind == "config":
        sub_path = mount.sub_path or posixpath.basename(mount.source)
        return {"name": "config", **place, "subPath": sub_path}, {"name": "config", "configMap": {"name": config_name(intent)}}
    if is_claim(mount, options):
        return {"name": name, **place}, {"name": name, "persistentVolumeClaim": {"claimName": claim_name(mount, intent)}}
    if mount.kind == "image":
        return {"name": name, **place, "readOnly": True}, {"name": name, "image": _image(mount.source)}
    if mount.kind == "bind":
        return {"name": name, **place}, {"name": name, "hostPath": {"path": mount.source}}
    raise Unfit(f"a mount of kind {mount.kind!r} cannot be had in Kubernetes")


def _image(reference: str) -> Value:
    return {"reference": reference, "pullPolicy": "IfNotPresent"}
