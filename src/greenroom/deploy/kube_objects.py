"""The Kubernetes objects of an intent, as plain values: what kustomize files and the Helm chart are both made of."""

from __future__ import annotations

import copy
import hashlib
import math
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from greenroom.config.errors import one_line
from greenroom.deploy import figures
from greenroom.deploy.files import head
from greenroom.deploy.intent import Intent, Workload
from greenroom.deploy.kube_pod import (
    PREFIX,
    VENDOR_RESOURCES,
    KubeOptions,
    Value,
    accelerators,
    claim_name,
    config_name,
    is_claim,
    is_model_file,
    labels,
    model_note,
    models_claim,
    models_folder,
    pod,
    secret_name,
    selector,
    start_s_max,
    within,
)
from greenroom.deploy.names import beside, label
from greenroom.deploy.unfit import Unfit

STATEFUL_CHARS_MAX = 52  # a label of its pods is the name and a digest
NAMESPACE = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
VARIABLE = r"[-._A-Za-z][-._A-Za-z0-9]*"
CONFIG_BYTES_MAX = 1 << 20  # of a ConfigMap
PULL_S = 1800  # an image of an inference engine may take this long to arrive before a rollout counts as stuck
PORT_NAME = "http"
SCRAPE_S = 15
OFFERED = "Engines that fetch their weights read"
CLIENT_LABEL = f"{PREFIX}/client"  # pods that may talk to engines directly
MONITORING_NAMESPACE = "monitoring"


@dataclass(frozen=True, slots=True)
class Object:
    """One object, what turns it on in the chart ("" = always), and whose it is ("" = the whole set's)."""

    value: Value
    switch: str = ""  # networkPolicy | podDisruptionBudget | serviceMonitor | persistence
    workload: str = ""

    @property
    def kind(self) -> str:
        return str(self.value["kind"])

    @property
    def name(self) -> str:
        return str(self.value["metadata"]["name"])

    @property
    def file(self) -> str:
        return f"{self.kind.lower()}-{self.name}.yaml"


def settled(intent: Intent) -> Intent:
    """The intent with a name for the set that Kubernetes takes; Unfit where something cannot be written at all."""
    if not intent.workloads:
        raise Unfit("there is no model to deploy: the configuration is empty")
    ports = [one for one in intent.workloads if not 0 < one.port < 65536]
    if ports:
        raise Unfit(f"{ports[0].name} has port {ports[0].port}, which is none: ports go from 1 to 65535")
    if not re.fullmatch(NAMESPACE, intent.namespace):
        raise Unfit(f"{intent.namespace!r} cannot be a namespace: write up to 63 lower-case letters, digits and hyphens")
    names = [name for one in intent.workloads for name, _ in (*one.env, *one.secret_env)]
    if odd := [name for name in names if not re.fullmatch(VARIABLE, name)]:
        raise Unfit(f"Kubernetes takes no variable called {odd[0]!r}: letters, digits, `_`, `-` and `.`, not beginning with a digit")
    size = len(intent.config_text.encode("utf-8"))
    if size > CONFIG_BYTES_MAX:
        raise Unfit(f"the configuration has {size:,} bytes and a ConfigMap holds {CONFIG_BYTES_MAX:,}: make it smaller")
    workloads = tuple(figures.switched_on(_with_own_cache(one, intent)) for one in intent.workloads)
    return replace(intent, name=label(intent.name, chars_max=40), workloads=workloads)


def _with_own_cache(workload: Workload, intent: Intent) -> Workload:
    """On one host a set shares its cache; in a cluster a claim that is shared can be had by all nodes only, and cannot change that."""
    shared = ("volume", f"{intent.name}-cache")
    own = f"{workload.name}-cache"
    return replace(workload, mounts=tuple(replace(one, source=own) if (one.kind, one.source) == shared else one for one in workload.mounts))


def objects(intent: Intent, options: KubeOptions) -> tuple[Object, ...]:
    """All of them, in an order in which they can be made.  Accelerators are not in them: see `target_patch`."""
    found = (*_shared(intent, options), *(one for workload in intent.workloads for one in _own(workload, intent, options)))
    places = [(one.kind, one.name) for one in found]
    twice = sorted(place for place in set(places) if places.count(place) > 1)
    if twice:
        raise Unfit(f"two objects would be the {twice[0][0]} {twice[0][1]}: name the set otherwise")
    return found


def _shared(intent: Intent, options: KubeOptions) -> Iterator[Object]:
    whole = {"app.kubernetes.io/part-of": intent.name}
    yield Object(
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": intent.name, "labels": whole},
            "automountServiceAccountToken": False,  # nothing in here asks the cluster anything
        }
    )
    if files := config_files(intent):
        data = dict.fromkeys(files, intent.config_text)
        yield Object({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": config_name(intent), "labels": whole}, "data": data})
    for name, (size, users) in _claims(intent, options).items():
        mode = "ReadWriteOnce" if _pods(users, options) == 1 else "ReadWriteMany"  # several pods may stand on several nodes
        yield Object(_claim(name, whole, mode, size, options), switch="persistence")


def _claims(intent: Intent, options: KubeOptions) -> dict[str, tuple[str, set[str]]]:
    """Claim -> its size and who mounts it."""
    found: dict[str, tuple[str, set[str]]] = {}
    held: dict[str, str] = {}  # what a claim holds
    for workload in intent.workloads:
        for mount in workload.mounts:
            if is_claim(mount, options):
                name, what = claim_name(mount, intent), mount.source
                size = options.models_size if mount.source.endswith("cache") else options.state_size
            elif is_model_file(mount, options) and options.models == "pvc":
                name, what, size = models_claim(intent), "the model files", options.models_size
            else:
                continue
            if held.setdefault(name, what) != what:
                raise Unfit(f"the claim {name} would hold both {held[name]} and {what}: name the volume, or the folder, otherwise")
            found.setdefault(name, (size, set()))[1].add(workload.name)
    return dict(sorted(found.items()))


def _pods(users: set[str], options: KubeOptions) -> int:
    return sum(options.pods.get(name, 1) for name in users)


def _claim(name: str, whole: dict[str, str], mode: str, size: str, options: KubeOptions) -> Value:
    storage = {"storageClassName": options.storage_class} if options.storage_class else {}
    spec = {"accessModes": [mode], **storage, "resources": {"requests": {"storage": size}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "labels": whole}, "spec": spec}


def _own(workload: Workload, intent: Intent, options: KubeOptions) -> Iterator[Object]:
    meta: Value = {"name": workload.name, "labels": labels(workload, intent)}
    if model_note(workload):
        meta = {**meta, "annotations": model_note(workload)}
    match = {"matchLabels": selector(workload, intent)}
    yield Object({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": _service(workload, intent)}, workload=workload.name)
    yield Object(_controller(workload, intent, options, meta), workload=workload.name)
    yield Object(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": meta,
            # There is one pod: a drain waits for you instead of cutting answers.  A pod that serves nobody holds up nothing.
            "spec": {"minAvailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": match},
        },
        switch="podDisruptionBudget",
        workload=workload.name,
    )
    policy: Value = {"podSelector": match, "policyTypes": ["Ingress"], "ingress": [_ingress(workload, intent)]}
    yield Object(
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": policy},
        switch="networkPolicy",
        workload=workload.name,
    )


def _service(workload: Workload, intent: Intent) -> Value:
    port = {"name": PORT_NAME, "port": workload.port, "targetPort": PORT_NAME, "protocol": "TCP"}
    return {"type": "ClusterIP", "selector": selector(workload, intent), "ports": [port]}


def _ingress(workload: Workload, intent: Intent) -> Value:
    """Who may connect: anybody to greenroom's own port, to an engine only gateways and pods that say they may.

    An engine's sleep and reload routes stand on the port that serves requests: whoever reaches the one reaches the other.
    """
    ports = [{"protocol": "TCP", "port": workload.port}]
    if not workload.model:
        return {"ports": ports}
    gateways = {"app.kubernetes.io/part-of": intent.name, "app.kubernetes.io/component": "gateway"}
    peers = [{"podSelector": {"matchLabels": gateways}}, {"podSelector": {"matchLabels": {CLIENT_LABEL: "true"}}}]
    return {"from": peers, "ports": ports}


def _controller(workload: Workload, intent: Intent, options: KubeOptions, meta: Value) -> Value:
    stateful = not workload.model and options.controller == "statefulset"
    if stateful and len(workload.name) > STATEFUL_CHARS_MAX:
        raise Unfit(f"{workload.name} is too long for a StatefulSet, whose pods have longer names: at most {STATEFUL_CHARS_MAX} characters")
    template_meta: Value = {"labels": labels(workload, intent)}
    notes = dict(model_note(workload))
    if any(mount.kind == "config" for mount in workload.mounts):
        notes[f"{PREFIX}/config-sha256"] = config_digest(intent)
    if notes:
        template_meta["annotations"] = notes
    # A GPU, a claim and a state folder are held by one pod at a time: the old one goes before the new one comes.
    turn: Value = (
        {"serviceName": workload.name, "updateStrategy": {"type": "RollingUpdate"}}
        if stateful
        else {"strategy": {"type": "Recreate"}, "progressDeadlineSeconds": math.ceil(start_s_max(workload)) + PULL_S}
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet" if stateful else "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": 1,
            "revisionHistoryLimit": 3,
            **turn,
            "selector": {"matchLabels": selector(workload, intent)},
            "template": {"metadata": template_meta, "spec": pod(workload, intent, options)},
        },
    }


# ------------------------------------------------------------------------------------------------------------ the target


def target_patch(workload: Workload, options: KubeOptions) -> Value:
    """What the pod asks for on the hardware named: {} or {limits, tolerations}."""
    claims = accelerators(workload, options)
    if not claims:
        return {}
    # Clusters taint GPU nodes with the vendor's resource name, whatever the slice is called.
    key = VENDOR_RESOURCES[workload.share.vendor]
    return {"limits": claims, "tolerations": [{"key": key, "operator": "Exists", "effect": "NoSchedule"}]}


def on_target(one: Object, patch: Value) -> Object:
    """A Deployment or StatefulSet whose container asks for these devices too; other kinds as they are."""
    if not patch or one.kind not in ("Deployment", "StatefulSet"):
        return one
    value = copy.deepcopy(one.value)
    spec = value["spec"]["template"]["spec"]
    asked = spec["containers"][0]["resources"]
    asked["limits"] = {**asked.get("limits", {}), **patch["limits"]}
    spec["tolerations"] = patch["tolerations"]
    return replace(one, value=value)


def complete(intent: Intent, options: KubeOptions) -> tuple[Object, ...]:
    """All of them as they are to be in the cluster."""
    patches = {one.name: target_patch(one, options) for one in intent.workloads}
    return tuple(on_target(one, patches.get(one.workload, {})) for one in objects(intent, options))


# ------------------------------------------------------------------------------------------------------------ monitoring


def monitors(intent: Intent) -> tuple[Object, ...]:
    """What Prometheus's operator reads, and the way in for it; their own kind may be unknown to a cluster."""
    found = []
    for workload in intent.workloads:
        if not (path := figures.page(workload)):
            continue
        meta = {"name": workload.name, "labels": labels(workload, intent)}
        endpoint: Value = {"port": PORT_NAME, "path": path, "interval": f"{SCRAPE_S}s"}
        key = figures.key(workload) if workload.model else "METRICS_KEY" if intent.config.api_keys else ""
        if key:
            endpoint["authorization"] = {"credentials": {"name": secret_name(intent), "key": key}}
        spec: Value = {"selector": {"matchLabels": selector(workload, intent)}, "endpoints": [endpoint]}
        monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", "metadata": meta, "spec": spec}
        found.append(Object(monitor, switch="serviceMonitor", workload=workload.name))
        if workload.model:
            peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MONITORING_NAMESPACE}}}
            rule = {"from": [peer], "ports": [{"protocol": "TCP", "port": workload.port}]}
            policy = {"podSelector": {"matchLabels": selector(workload, intent)}, "policyTypes": ["Ingress"], "ingress": [rule]}
            extra = {"name": beside(workload.name, "metrics"), "labels": labels(workload, intent)}
            way_in = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": extra, "spec": policy}
            found.append(Object(way_in, switch="serviceMonitor", workload=workload.name))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------- comments


def config_files(intent: Intent) -> tuple[str, ...]:
    return tuple(sorted({mount.source for one in intent.workloads for mount in one.mounts if mount.kind == "config"}))


def config_digest(intent: Intent) -> str:
    """In the pods' template: a changed configuration makes new pods."""
    return hashlib.sha256(intent.config_text.encode("utf-8")).hexdigest()


def secret_command(intent: Intent) -> str:
    """What makes the Secret that the pods read; "" when they read none.  Values are typed by whoever runs it, never written here."""
    names = sorted({key for one in intent.workloads for _, key in one.secret_env})
    if not names:
        return ""
    values = " ".join(f'--from-literal={name}="${name}"' for name in names)
    return f"kubectl --namespace {intent.namespace} create secret generic {secret_name(intent)} {values}"


def comments(intent: Intent, options: KubeOptions) -> tuple[str, ...]:
    """What a reader of the files must know, one sentence a line."""
    said = list(head(intent.options.get("command", ""), f"{intent.name}: {count(len(intent.workloads))} for {intent.target}."))
    said += [one_line(note) for note in intent.notes]
    if command := secret_command(intent):
        said.append(f"Secrets are referred to, never written. Make them first:  {command}")
    if names := sorted({name for one in intent.workloads for name in one.offered_env}):
        said.append(f"{OFFERED} {', '.join(names)} in the Secret {secret_name(intent)}, where it is there: gated models ask for it.")
    said += _about_models(intent, options)
    if any(one.image.startswith("localhost/") for one in intent.workloads):
        said.append("No registry has greenroom's image: build it from the Containerfile, push it, and generate again with --image.")
    if any(one.share.devices for one in intent.workloads):
        said.append("Devices that the configuration names by UUID or index are not asked for: in a cluster the device plugin chooses.")
    for one in intent.workloads:
        if one.share.every and not options.accelerator:
            said.append(f"Nobody has said how many GPUs {one.name} is to have: it asks for {one.share.count} (see --gpu).")
    if any(one.memory_mib == 0 for one in intent.workloads):
        said.append("No memory limit is set where nobody has measured or estimated the need: what is asked for there is a guess.")
    if intent.mode == "greenroom" and not intent.config.api_keys:
        said.append("Without API keys greenroom answers to addresses and the names in allowed_hosts alone: add an Ingress's, or set keys.")
    shared = {name: pods for name, (_, users) in _claims(intent, options).items() if (pods := _pods(users, options)) > 1}
    said += [
        f"{pods} pods mount the claim {name}: its storage class must offer ReadWriteMany (see --storage-class)."
        for name, pods in shared.items()
    ]
    if shared:
        said.append("A claim that is there keeps its access modes: where they are others, save what it holds and delete it first.")
    if intent.target == "amd":
        said.append("/dev/kfd belongs to the group render on most nodes: add its number to supplementalGroups if the engine is refused.")
    return tuple(said)


def count(workloads: int) -> str:
    return "1 workload" if workloads == 1 else f"{workloads} workloads"


def _about_models(intent: Intent, options: KubeOptions) -> list[str]:
    said = []
    if places := model_places(intent, options):
        where = ", ".join(f"{one_line(source)} -> {one_line(place)}" for source, place in places)
        if options.models == "pvc":
            said.append(f"The claim {models_claim(intent)} must hold the model files, each at its place: {where}.")
        else:
            said.append(f"The image {options.models_image} must hold the model files below /{options.models_image_path}: {where}.")
    if options.models == "hostpath" and any(mount.kind == "bind" for one in intent.workloads for mount in one.mounts):
        said.append("Model files are read from folders of the node: refused where policies forbid hostPath (baseline, restricted).")
        said.append("Name the node that has them in a nodeSelector, or give every node a copy that user 10001 can read.")
    if (places and options.models == "image") or any(mount.kind == "image" for one in intent.workloads for mount in one.mounts):
        said.append("Image volumes need Kubernetes 1.33 (1.31 and the feature gate ImageVolume where no subPath is used).")
    return said


def model_places(intent: Intent, options: KubeOptions) -> tuple[tuple[str, str], ...]:
    """(on this host, in the volume of models) of every file and folder in it."""
    found = {
        (mount.source, posixpath.join(models_folder(one, intent, options), within(mount)) or "/")
        for one in intent.workloads
        for mount in one.mounts
        if is_model_file(mount, options)
    }
    return tuple(sorted(found))
