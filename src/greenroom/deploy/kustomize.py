"""Kubernetes objects as a kustomize tree: a base that knows no hardware, an overlay for the target, monitoring to switch on."""

from __future__ import annotations

from greenroom.config.yaml_out import dump, dump_all
from greenroom.deploy import figures
from greenroom.deploy.intent import Files, Intent
from greenroom.deploy.kube_objects import Object, comments, complete, monitors, objects, target_patch
from greenroom.deploy.kube_pod import KubeOptions, Value

KUSTOMIZE = "kustomize.config.k8s.io/v1beta1"
COMPONENT = "kustomize.config.k8s.io/v1alpha1"
SHARED = "common"  # no workload's name ends up as this file: theirs stand in a folder


def kustomize(intent: Intent, options: KubeOptions) -> Files:
    """base/, overlays/TARGET/ and components/monitoring/; `kubectl apply -k overlays/TARGET` is all that is needed."""
    files: dict[str, str] = {}
    found = objects(intent, options)
    for name, members in _by_file(found).items():
        files[f"base/{name}"] = dump_all([one.value for one in members])
    resources = sorted(name.removeprefix("base/") for name in files)
    files["base/kustomization.yaml"] = _kustomization(intent, options, {"resources": resources})
    overlay = f"overlays/{intent.target}"
    patches = {one.name: _patch(one.name, found, target_patch(one, options)) for one in intent.workloads}
    for name, patch in patches.items():
        if patch:
            files[f"{overlay}/{name}.yaml"] = dump(patch)
    listed = [{"path": f"{name}.yaml"} for name, patch in patches.items() if patch]
    body: Value = {"namespace": intent.namespace, "resources": ["../../base"], **({"patches": listed} if listed else {})}
    monitoring = _monitoring(intent)
    files[f"{overlay}/kustomization.yaml"] = _kustomization(intent, options, body) + (
        "# With Prometheus's operator in the cluster (without it, ServiceMonitor is an unknown kind):\n"
        "# components:\n#   - ../../components/monitoring\n"
        if monitoring
        else ""
    )
    files |= monitoring
    return dict(sorted(files.items()))


def plain(intent: Intent, options: KubeOptions) -> Files:
    """One file with everything, for `kubectl apply -f` and tools that know no kustomize."""
    values = [one.value for one in complete(intent, options)]
    return {"all.yaml": dump_all(values, comments=comments(intent, options))}


def _by_file(found: tuple[Object, ...]) -> dict[str, list[Object]]:
    files: dict[str, list[Object]] = {}
    for one in found:
        name = f"workloads/{one.workload}.yaml" if one.workload else f"{'config' if one.kind == 'ConfigMap' else SHARED}.yaml"
        files.setdefault(name, []).append(one)
    return files


def _kustomization(intent: Intent, options: KubeOptions, body: Value) -> str:
    return dump({"apiVersion": KUSTOMIZE, "kind": "Kustomization", **body}, comments=comments(intent, options))


def _patch(workload: str, found: tuple[Object, ...], wanted: Value) -> Value:
    """A strategic merge: containers are merged by their name."""
    if not wanted:
        return {}
    controller = next(one for one in found if one.workload == workload and one.kind in ("Deployment", "StatefulSet"))
    container = {"name": controller.value["spec"]["template"]["spec"]["containers"][0]["name"], "resources": {"limits": wanted["limits"]}}
    return {
        "apiVersion": "apps/v1",
        "kind": controller.kind,
        "metadata": {"name": controller.name},
        "spec": {"template": {"spec": {"tolerations": wanted["tolerations"], "containers": [container]}}},
    }


def _monitoring(intent: Intent) -> dict[str, str]:
    """{} where nobody can be watched."""
    found = monitors(intent)
    if not found:
        return {}
    said = ["ServiceMonitors for Prometheus's operator, and the way in for pods of the namespace `monitoring`."]
    if intent.config.api_keys:
        said.append("greenroom asks for a key: put one with the scope `view` into the Secret as METRICS_KEY.")
    said += figures.left_out(intent.workloads)
    return {
        "components/monitoring/kustomization.yaml": dump(
            {"apiVersion": COMPONENT, "kind": "Component", "resources": ["monitors.yaml"]}, comments=said
        ),
        "components/monitoring/monitors.yaml": dump_all([one.value for one in found]),
    }
