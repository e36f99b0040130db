"""Values for the charts of the llm-d router, and the configuration of its endpoint picker (EPP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.config.yaml_out import dump
from greenroom.deploy.llmd_objects import POOL_LABEL
from greenroom.deploy.llmd_versions import EPP_CONFIG_API

PLUGINS_FILE = "greenroom-plugins.yaml"
SERVER_TYPES: Mapping[str, str] = {"vllm": "vllm", "sglang": "sglang"}  # engines whose figures the picker reads
WEIGHTS: Mapping[str, int] = {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3, "no-hit-lru-scorer": 2}


def picker_config(*, flow_control: bool, endpoints_file: str = "") -> dict[str, Any]:
    """How endpoints are scored; with `endpoints_file` they are read from there, not from Kubernetes."""
    plugins: list[dict[str, Any]] = [{"type": each} for each in WEIGHTS]
    config: dict[str, Any] = {"apiVersion": EPP_CONFIG_API, "kind": "EndpointPickerConfig"}
    if flow_control:
        config["featureGates"] = ["flowControl"]
    if endpoints_file:
        parameters = {"path": endpoints_file, "watchFile": True}
        plugins.insert(0, {"name": "file-discovery", "type": "file-discovery", "parameters": parameters})
        plugins += [
            {"name": "metrics-source", "type": "metrics-data-source"},
            {"name": "metrics-extractor", "type": "core-metrics-extractor"},
        ]
        config["dataLayer"] = {
            "injectDefaults": False,
            "discovery": {"endpoints": {"pluginRef": "file-discovery"}},
            "sources": [{"pluginRef": "metrics-source", "extractors": [{"pluginRef": "metrics-extractor"}]}],
        }
    profile = {"name": "default", "plugins": [{"pluginRef": each, "weight": weight} for each, weight in WEIGHTS.items()]}
    return {**config, "plugins": plugins, "schedulingProfiles": [profile]}


def values(label: str, port: int, engine: str, *, flow_control: bool, cpu: int, memory_gib: int) -> dict[str, Any]:
    """For either chart."""
    return {
        "router": {
            "modelServers": {
                "type": SERVER_TYPES[engine],
                "protocol": "http",
                "matchLabels": {POOL_LABEL: label},
                "targetPorts": [{"number": port}],
            },
            "epp": {
                "replicas": 1,
                "resources": {
                    "requests": {"cpu": str(cpu), "memory": f"{memory_gib}Gi"},
                    "limits": {"memory": f"{2 * memory_gib}Gi"},
                },
                "pluginsConfigFile": PLUGINS_FILE,
                "pluginsCustomConfig": {PLUGINS_FILE: dump(picker_config(flow_control=flow_control))},
            },
            "monitoring": {"prometheus": {"enabled": True, "auth": {"enabled": True}}},
        }
    }


def gateway_values(common: Mapping[str, Any], provider: str) -> dict[str, Any]:
    """For `llm-d-router-gateway`.  Routes are ours: the chart's know one model only."""
    # agentgateway needs nothing of the chart; other gateways neither.
    known = provider if provider in ("gke", "istio") else "none"
    return {**common, "provider": {"name": known}, "httpRoute": {"create": False}}


def standalone_values(common: Mapping[str, Any], *, cpu: int, memory_gib: int) -> dict[str, Any]:
    """For `llm-d-router-standalone`: Envoy beside the picker, no gateway; one address for each base model."""
    router = {
        **common["router"],
        "extraServicePorts": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8081}],
        "proxy": {
            "enabled": True,
            "proxyType": "envoy",
            "resources": {
                "requests": {"cpu": str(cpu), "memory": f"{memory_gib}Gi"},
                "limits": {"memory": f"{2 * memory_gib}Gi"},
            },
        },
    }
    return {"router": router}
