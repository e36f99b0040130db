"""The chart: linted and rendered by Helm itself, to the same objects as the kustomize tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from greenroom.deploy.intent import Intent
from greenroom.deploy.kube import kube
from tests.deploy.kube_cases import CASES, HOSTILE_NAMES, VERSIONS, by_place, engines, put, read_all, validate

helm = pytest.importorskip("helm_python", reason="no helm-python-sdk: charts are not judged")

Objects = dict[tuple[str, str], dict[str, Any]]
ERROR = 3  # severity in a lint report; 1 = told, 2 = warning


def rendered(folder: Path, values: Mapping[str, Any] | None = None) -> Objects:
    """What Helm makes of the chart, notes aside."""
    with helm.Chart.load(str(folder)) as chart:
        files = chart.render(dict(values) if values else None, name="release", namespace="llm")
    return by_place([one for name, text in files.items() if not name.endswith("NOTES.txt") for one in read_all(text)])


def notes(folder: Path) -> str:
    with helm.Chart.load(str(folder)) as chart:
        files = chart.render(None, name="release", namespace="elsewhere")
    text: str
    (text,) = [text for name, text in files.items() if name.endswith("NOTES.txt")]
    return text


def chart_of(intent: Intent, folder: Path) -> Path:
    return put(kube(intent, "helm"), folder)


def controller(found: Objects, name: str) -> dict[str, Any]:
    return next(one for (kind, own), one in found.items() if own == name and kind in ("Deployment", "StatefulSet"))


@pytest.mark.parametrize("case", CASES)
def test_default_values_render_to_what_kustomize_renders(case: str, tmp_path: Path) -> None:
    """Object by object, whatever stands in names and variables."""
    folder = chart_of(CASES[case], tmp_path)
    assert rendered(folder) == by_place(read_all(kube(CASES[case], "plain")["all.yaml"]))


@pytest.mark.parametrize("case", CASES)
def test_lint_finds_nothing_but_a_missing_icon(case: str, tmp_path: Path) -> None:
    """Strictly, for each release of Kubernetes."""
    folder = chart_of(CASES[case], tmp_path)
    for version in VERSIONS:
        report = helm.lint(str(folder), strict=True, kube_version=f"v{version}.0")
        assert report["errors"] == []
        assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


def test_lint_would_find_a_broken_template(tmp_path: Path) -> None:
    """The test above could fail."""
    folder = chart_of(CASES["engines 1"], tmp_path)
    broken = next((folder / "templates").glob("workload-*.yaml"))
    broken.write_text(broken.read_text() + "{{ .Values.nothing.at.all }}\n")
    assert max(one["severity"] for one in helm.lint(str(folder))["messages"]) == ERROR


@pytest.mark.parametrize("case", CASES)
def test_notes_tell_every_model_and_how_to_ask(case: str, tmp_path: Path) -> None:
    """In the namespace that it was installed to, with names as text."""
    told = notes(chart_of(CASES[case], tmp_path))
    for workload in CASES[case].workloads:
        assert f"{workload.name}:{workload.port}" in told
        if workload.model and workload.model.isprintable():
            assert f"({workload.model})" in told
    assert "kubectl --namespace elsewhere port-forward" in told
    assert ("Bearer $GREENROOM_API_KEY" in told) == (bool(CASES[case].config.api_keys) and CASES[case].mode == "greenroom")
    has_secrets = any(one.secret_env for one in CASES[case].workloads)
    assert ("kubectl --namespace elsewhere create secret generic" in told) == has_secrets


def test_values_change_what_they_name(tmp_path: Path) -> None:
    """Each value lands where it belongs, and the result is still valid."""
    intent = CASES["engines 3"]
    name = intent.workloads[0].name
    own = {
        "image": "registry.local/engine:2",
        "imagePullPolicy": "Always",
        "replicas": 2,
        "resources": {"requests": {"cpu": "2"}},
        "gpu": {"nvidia.com/gpu": None, "nvidia.com/mig-3g.40gb": 1},
        "tolerations": [],
        "nodeSelector": {"disk": "fast"},
        "affinity": {"nodeAffinity": {}},
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "podAnnotations": {"a": "{{ b }}"},
        "extraArgs": ["--verbose", "$(X)"],
        "extraEnv": [{"name": "X", "value": "y"}],
        "serviceType": "NodePort",
    }
    claim = {"accessModes": ["ReadOnlyMany"], "storageClassName": "nfs", "size": "1Ti"}
    values = {
        "workloads": {name: own},
        "imagePullSecrets": [{"name": "pull"}],
        "persistence": {"claims": {"models-models": claim}},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "serviceMonitor": {"enabled": True, "interval": "1m", "labels": {"release": "prometheus"}},
        "ingress": {"enabled": True, "className": "nginx", "host": "llm.example.org", "tlsSecret": "tls", "annotations": {"a": "b"}},
    }
    found = rendered(chart_of(intent, tmp_path), values)
    for (kind, _), one in found.items():
        if kind != "ServiceMonitor":
            validate(one, "1.33")
    changed = controller(found, name)
    assert changed["spec"]["replicas"] == 2
    template = changed["spec"]["template"]
    assert template["metadata"]["annotations"]["a"] == "{{ b }}"
    pod, (box,) = template["spec"], template["spec"]["containers"]
    assert (box["image"], box["imagePullPolicy"]) == ("registry.local/engine:2", "Always")
    assert {name: count for name, count in box["resources"]["limits"].items() if "/" in name} == {"nvidia.com/mig-3g.40gb": "1"}
    assert box["resources"]["requests"]["cpu"] == "2"
    assert box["args"][-2:] == ["--verbose", "$(X)"]
    assert box["env"][-1] == {"name": "X", "value": "y"}
    assert "tolerations" not in pod
    assert (pod["nodeSelector"], pod["runtimeClassName"], pod["priorityClassName"]) == ({"disk": "fast"}, "nvidia", "high")
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert found["Service", name]["spec"]["type"] == "NodePort"
    assert found["PersistentVolumeClaim", "models-models"]["spec"] == {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "nfs",
        "resources": {"requests": {"storage": "1Ti"}},
    }
    kinds = [kind for kind, _ in found]
    assert kinds.count("PodDisruptionBudget") == 0
    assert kinds.count("NetworkPolicy") == 3, "only the way in for Prometheus is left"
    assert found["ServiceMonitor", name]["metadata"]["labels"]["release"] == "prometheus"
    assert found["ServiceMonitor", name]["spec"]["endpoints"][0]["interval"] == "1m"
    ingress = found["Ingress", "models"]["spec"]
    assert ingress["tls"] == [{"secretName": "tls", "hosts": ["llm.example.org"]}]
    assert ingress["rules"][0]["http"]["paths"][0]["backend"]["service"] == {"name": name, "port": {"number": 8123}}
    others = [controller(found, one.name)["spec"] for one in intent.workloads[1:]]
    assert [(one["replicas"], one["template"]["spec"]["containers"][0]["image"]) for one in others] == [(1, intent.workloads[1].image)] * 2


def test_another_configuration_in_the_values_makes_new_pods(tmp_path: Path) -> None:
    """The digest in the pods follows the text in the ConfigMap."""
    folder = chart_of(CASES["greenroom 1"], tmp_path)
    before, after = rendered(folder), rendered(folder, {"config": "models: {}\n# {{ kept }}\n"})
    assert after["ConfigMap", "greenroom-config"]["data"] == {"greenroom.yaml": "models: {}\n# {{ kept }}\n"}
    pods = [controller(one, "greenroom")["spec"]["template"]["metadata"]["annotations"] for one in (before, after)]
    digests = [one["dev.greenroom/config-sha256"] for one in pods]
    assert digests[0] != digests[1]


WRONG: tuple[dict[str, Any], ...] = (
    {"networkPolcy": {"enabled": False}},
    {"networkPolicy": {"enable": False}},
    {"workloads": {"nobody": {"image": "x"}}},
    {"workloads": {"MODEL": {"replica": 2}}},
    {"workloads": {"MODEL": {"replicas": "two"}}},
    {"workloads": {"MODEL": {"gpu": {"nvidia.com/gpu": 0}}}},
    {"workloads": {"MODEL": {"imagePullPolicy": "always"}}},
    {"workloads": {"MODEL": {"resources": {"limit": {"memory": "1Gi"}}}}},
    {"persistence": {"claims": {"models-models": {"size": "large"}}}},
    {"ingress": {"hosts": ["a"]}},
)


@pytest.mark.parametrize("wrong", WRONG, ids=[json.dumps(one) for one in WRONG])
def test_a_misspelt_value_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    """By Helm, with the chart's own schema, before anything is rendered."""
    intent = CASES["engines 1"]
    folder = chart_of(intent, tmp_path)
    values = json.loads(json.dumps(wrong).replace("MODEL", intent.workloads[0].name))
    with pytest.raises(helm.HelmError):
        rendered(folder, values)


@pytest.mark.parametrize("case", CASES)
def test_the_schema_is_one_and_takes_the_default_values(case: str) -> None:
    """By another reader of such schemas."""
    files = kube(CASES[case], "helm")
    schema = json.loads(files["values.schema.json"])
    jsonschema.Draft7Validator.check_schema(schema)
    (values,) = read_all(files["values.yaml"])
    jsonschema.Draft7Validator(schema).validate(values)


def test_a_chart_can_be_packed(tmp_path: Path) -> None:
    """As it goes to a registry."""
    folder = chart_of(engines(HOSTILE_NAMES[:3]), tmp_path / "chart")
    packed = Path(helm.package(str(folder), destination=str(tmp_path)))
    assert packed.name == "models-0.1.0.tgz"
    with helm.Chart.load(str(packed)) as chart:
        assert chart.metadata["kubeVersion"] == ">=1.29.0-0"
