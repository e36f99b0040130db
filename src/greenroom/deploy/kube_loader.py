"""A pod that does nothing but hold the claim of models open, while files are copied into it."""

from __future__ import annotations

import posixpath
import shlex

from greenroom.config.errors import one_line
from greenroom.config.yaml_out import dump
from greenroom.deploy.intent import Files, Intent
from greenroom.deploy.kube_objects import model_places
from greenroom.deploy.kube_pod import MODELS_ROOT, USER, KubeOptions, Value, models_claim

IMAGE = "docker.io/library/busybox:1.37"  # `kubectl cp` needs a tar
WAIT_S = "86400"  # then it is over, whoever forgot it
FILE = "loader/pod.yaml"


def loader(intent: Intent, options: KubeOptions) -> Files:
    """{} where no claim is to be filled."""
    places = model_places(intent, options)
    if options.models != "pvc" or not places:
        return {}
    name = f"{intent.name}-loader"
    space = f"--namespace {intent.namespace}"
    said = ["Fills the claim of models; apply it after the claim, before the models are asked for.", ""]
    said += [f"kubectl {space} apply -f {FILE}", f"kubectl {space} wait --for=condition=Ready pod/{name}"]
    for folder in sorted({posixpath.dirname(place) for _, place in places} - {"", "/"}):
        said.append(one_line(f"kubectl {space} exec {name} -- mkdir -p {shlex.quote(f'{MODELS_ROOT}/{folder}')}"))
    for source, place in places:
        target = f"{name}:{MODELS_ROOT}/{place}".rstrip("/")
        said.append(one_line(f"kubectl {space} cp {shlex.quote(source)} {shlex.quote(target)}"))
    said.append(f"kubectl {space} delete pod {name}")
    return {FILE: dump(_pod(name, intent), comments=said)}


def _pod(name: str, intent: Intent) -> Value:
    container: Value = {
        "name": "loader",
        "image": IMAGE,
        "command": ["sleep", WAIT_S],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "models", "mountPath": MODELS_ROOT}],
    }
    spec: Value = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": models_claim(intent)}}],
    }
    labels = {"app.kubernetes.io/name": "loader", "app.kubernetes.io/part-of": intent.name}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
