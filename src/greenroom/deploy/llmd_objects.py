"""The Kubernetes objects that only llm-d deployments have, as plain values.  Field names follow the versions in `llmd_versions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MODEL_HEADER = "X-Gateway-Base-Model-Name"  # set by the payload processor, or by agentgateway itself
POOL_LABEL = "llm-d.ai/model"
GATEWAY_POD_LABEL = "gateway.networking.k8s.io/gateway-name"  # on the pods that a Gateway is made of
SET_POD_LABEL = "leaderworkerset.sigs.k8s.io/name"  # on all pods of one set
EPP_PORT = 9002
RELEASE_CHARS_MAX = 40  # the router's charts cut a release's name there
ROUTE_RULES_MAX = 16  # of one HTTPRoute
MATCHES_MAX = 64  # of one rule
HEADER_VALUE_CHARS_MAX = 4096


def inference_pool(release: str, labels: Mapping[str, str], port: int, *, namespace: str) -> dict[str, Any]:
    """All pods of one base model, and who picks among them.

    The router's chart makes one too, under its release's name: the marks here let Helm take this one over instead of
    refusing to install beside it.
    """
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {
            "name": release,
            "labels": {**labels, "app.kubernetes.io/managed-by": "Helm"},
            "annotations": {"meta.helm.sh/release-name": release, "meta.helm.sh/release-namespace": namespace},
        },
        "spec": {
            "selector": {"matchLabels": {POOL_LABEL: labels[POOL_LABEL]}},
            "targetPorts": [{"number": port}],
            "appProtocol": "http",
            "endpointPickerRef": {"name": epp_name(release), "port": {"number": EPP_PORT}, "failureMode": "FailOpen"},
        },
    }


def epp_name(release: str) -> str:
    """The Service that the router's charts make for a release."""
    return f"{release.lower().strip()[:RELEASE_CHARS_MAX]}-epp"


def http_route(name: str, labels: Mapping[str, str], models: Sequence[str], backend: Mapping[str, Any], *, gateway: str) -> dict[str, Any]:
    """Requests whose model is one of `models`, exactly as clients write it, go to `backend`.

    Only what lies under /v1: engines keep their sleep, reload and profiling routes elsewhere on the same port.
    """
    matches = [
        {"path": {"type": "PathPrefix", "value": "/v1"}, "headers": [{"type": "Exact", "name": MODEL_HEADER, "value": model}]}
        for model in models
    ]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "parentRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway}],
            # Long answers stream for as long as they take.
            "rules": [{"matches": matches, "backendRefs": [dict(backend)], "timeouts": {"request": "0s"}}],
        },
    }


def pool_backend(name: str) -> dict[str, Any]:
    return {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}


def service_backend(name: str, port: int) -> dict[str, Any]:
    return {"group": "", "kind": "Service", "name": name, "port": port}


def gateway(name: str, gateway_class: str, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "gatewayClassName": gateway_class,
            "listeners": [{"name": "http", "port": 80, "protocol": "HTTP", "allowedRoutes": {"namespaces": {"from": "Same"}}}],
        },
    }


def base_model(name: str, labels: Mapping[str, str], model: str, other_names: Sequence[str]) -> dict[str, Any]:
    """Tells the payload processor which names mean this base model."""
    data = {"baseModel": model}
    if other_names:
        data["adapters"] = "".join(f"- {_quoted(each)}\n" for each in other_names)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {**labels, "inference.llm-d.ai/ipp-managed": "true"}},
        "data": data,
    }


def agentgateway_policy(name: str, labels: Mapping[str, str], base_of: Mapping[str, str], *, gateway: str) -> dict[str, Any]:
    """agentgateway reads the model's name by itself; no payload processor is needed."""
    table = ", ".join(f"{_quoted(model)}: {_quoted(base)}" for model, base in base_of.items())
    return {
        "apiVersion": "agentgateway.dev/v1alpha1",
        "kind": "AgentgatewayPolicy",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "targetRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway}],
            "traffic": {
                "phase": "PreRouting",
                "transformation": {"request": {"set": [{"name": MODEL_HEADER, "value": f"{{{table}}}[string(json(request.body).model)]"}]}},
            },
        },
    }


def _quoted(text: str) -> str:
    """As a double-quoted text that YAML and CEL read alike."""
    out = []
    for char in text:
        if char in '"\\':
            out.append(f"\\{char}")
        elif char.isprintable():
            out.append(char)
        else:
            out.append(f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}")
    return f'"{"".join(out)}"'


def pod_monitor(
    name: str, labels: Mapping[str, str], port: str, path: str, *, key: Mapping[str, str] | None = None, interval_s: int = 15
) -> dict[str, Any]:
    """The engine's own figures; `port` is the container port's name, `key` what opens them: a Secret's `name` and a `key` in it."""
    locked = {"authorization": {"credentials": dict(key)}} if key else {}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "selector": {"matchLabels": {POOL_LABEL: labels[POOL_LABEL]}},
            "podMetricsEndpoints": [{"port": port, "path": path, "interval": f"{interval_s}s", **locked}],
        },
    }


def network_policy(name: str, labels: Mapping[str, str], pods: Mapping[str, str], ingress: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Who may reach the pods with these labels, beside those that other policies let in."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {"podSelector": {"matchLabels": dict(pods)}, "policyTypes": ["Ingress"], "ingress": [dict(rule) for rule in ingress]},
    }


def scaled_object(
    name: str, labels: Mapping[str, str], target: str, model: str, *, prometheus: str, epp: str, namespace: str, parallel: int,
    idle_s: int, start_s: int, replicas_max: int,
) -> dict[str, Any]:  # fmt: skip
    """None while nobody asks, `replicas_max` at most; requests wait in the flow control of the endpoint picker meanwhile.

    `parallel`: requests in flight that one replica is meant to have; `start_s`: its cold start, so that one that still
    loads is not taken for missing.
    """
    where = f"{{namespace={_quoted(namespace)},service={_quoted(epp)},model_name={_quoted(model)}}}"
    signals = {
        "waiting": (f"sum(llm_d_epp_flow_control_queue_size{where})", 1),
        "running": (f"sum(llm_d_epp_request_running{where})", parallel),
    }
    triggers = [
        {
            "type": "prometheus",
            "name": trigger,
            "metricType": "AverageValue",
            "metadata": {"serverAddress": prometheus, "query": query, "threshold": str(threshold)},
        }
        for trigger, (query, threshold) in signals.items()
    ]
    policies = [{"type": "Percent", "value": 100, "periodSeconds": 15}]
    behavior = {
        way: {"stabilizationWindowSeconds": min(3600, max(60, seconds)), "policies": policies}
        for way, seconds in (("scaleUp", start_s), ("scaleDown", idle_s))
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
            "minReplicaCount": 0,
            "maxReplicaCount": replicas_max,
            "pollingInterval": 5,
            "cooldownPeriod": idle_s,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": triggers,
        },
    }


def leader_worker_set(
    name: str, labels: Mapping[str, str], leader: Mapping[str, Any], worker: Mapping[str, Any], *, size: int, replicas: int = 1
) -> dict[str, Any]:
    """One model over `size` nodes; `leader` and `worker` are pod templates."""
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "replicas": replicas,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": size,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": dict(leader),
                "workerTemplate": dict(worker),
            },
        },
    }
