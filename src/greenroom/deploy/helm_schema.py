"""The JSON schema of the chart's values: a misspelt one is refused before anything is rendered."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
TRUTH: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "array", "items": TEXT}
TEXT_MAP: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": ["string", "number"]}
QUANTITIES: Schema = {"type": "object", "additionalProperties": QUANTITY}


def _only(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False, **({"required": list(required)} if required else {})}


SWITCH = _only({"enabled": TRUTH}, ("enabled",))
WORKLOAD = _only(
    {
        "image": {"type": "string", "minLength": 1},
        "imagePullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
        "replicas": {"type": "integer", "minimum": 0},
        "resources": _only({"requests": QUANTITIES, "limits": QUANTITIES, "claims": {"type": "array"}}),
        "gpu": {"type": "object", "additionalProperties": {"type": ["string", "integer"], "pattern": "^[1-9][0-9]*$", "minimum": 1}},
        "tolerations": {"type": "array", "items": {"type": "object"}},
        "nodeSelector": TEXT_MAP,
        "affinity": {"type": "object"},
        "runtimeClassName": TEXT,
        "priorityClassName": TEXT,
        "podAnnotations": TEXT_MAP,
        "extraArgs": TEXTS,
        "extraEnv": {"type": "array", "items": {"type": "object", "required": ["name"]}},
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    },
    ("image",),
)
CLAIM = _only({"accessModes": TEXTS, "storageClassName": TEXT, "size": {"type": "string", "pattern": "^[0-9.]+([EPTGMk]i?)?$"}}, ("size",))
INGRESS = {"enabled": TRUTH, "className": TEXT, "host": TEXT, "workload": TEXT, "tlsSecret": TEXT, "annotations": TEXT_MAP}


def values_schema(values: Schema) -> Schema:
    """For exactly these workloads and claims."""
    workloads = _only(dict.fromkeys(values["workloads"], WORKLOAD), tuple(values["workloads"]))
    claims = _only(dict.fromkeys(values["persistence"]["claims"], CLAIM))
    properties = {
        "workloads": workloads,
        "imagePullSecrets": {"type": "array", "items": _only({"name": TEXT}, ("name",))},
        "persistence": _only({"enabled": TRUTH, "claims": claims}),
        "networkPolicy": SWITCH,
        "podDisruptionBudget": SWITCH,
        "serviceMonitor": _only({"enabled": TRUTH, "interval": TEXT, "labels": TEXT_MAP}, ("enabled",)),
        "ingress": _only(INGRESS, ("enabled",)),
        "global": {"type": "object"},  # Helm passes it to every chart
    }
    if "config" in values:
        properties["config"] = TEXT
    schema = "http://json-schema.org/draft-07/schema#"
    return {"$schema": schema, "title": "Values", **_only(properties, ("workloads",))}
