"""The same Kubernetes objects as a Helm chart.

Templates are not written a second time: each object is dumped with marks where a value of the chart goes, and the marks
become template lines.  With the default values the chart renders to exactly the objects it was made of.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from greenroom import __version__
from greenroom.config.errors import one_line
from greenroom.config.yaml_out import dump, dump_all
from greenroom.deploy import figures
from greenroom.deploy.helm_schema import values_schema
from greenroom.deploy.intent import Files, Intent
from greenroom.deploy.kube_objects import (
    SCRAPE_S,
    Object,
    comments,
    config_files,
    monitors,
    objects,
    secret_command,
    target_patch,
)
from greenroom.deploy.kube_pod import PREFIX, KubeOptions, Value

CHART_VERSION = "0.1.0"
NONCE_CHARS = 16
KUBE_VERSION = ">=1.29.0-0"
VALUES_NOTES = (
    "Values of the chart; what is not here is fixed by the configuration it was made from.",
    "Mappings are merged with yours: to ask for another device, set the one named here to null.",
)
HELPERS = """\
{{/* CPU, memory and accelerators of one workload: `gpu` joins the limits. */}}
{{- define "greenroom.resources" -}}
{{- $all := deepCopy .resources -}}
{{- $limits := $all.limits | default dict -}}
{{- range $name, $count := .gpu -}}
{{- $_ := set $limits $name (toString $count) -}}
{{- end -}}
{{- if $limits -}}
{{- $_ := set $all "limits" $limits -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}
"""


@dataclass(slots=True)
class Marks:
    """Places where a value of the chart goes, while objects are still plain values."""

    nonce: str
    made: dict[str, str] = field(default_factory=dict)  # mark -> how it is filled in: scalar:EXPR | block:EXPR | with:EXPR | items:EXPR

    def put(self, how: str) -> str:
        mark = f"mark{self.nonce}x{len(self.made)}x"
        self.made[mark] = how
        return mark


def chart(intent: Intent, options: KubeOptions) -> Files:
    """Chart.yaml, values.yaml with its schema, templates and notes."""
    found = objects(intent, options)
    # No text of the objects holds a digest of them all, so no mark is mistaken for one.
    whole = json.dumps([one.value for one in found], sort_keys=True).encode()
    marks = Marks(hashlib.sha256(whole).hexdigest()[:NONCE_CHARS])
    values = _values(intent, options, found)
    files = {
        "Chart.yaml": _about(intent, options),
        "values.yaml": dump(values, comments=(*VALUES_NOTES, *figures.left_out(intent.workloads))),
        "values.schema.json": json.dumps(values_schema(values), indent=2) + "\n",
        ".helmignore": "*.orig\n*.rej\n*~\nloader/\nContainerfile\n",
        "templates/_helpers.tpl": HELPERS,
        "templates/NOTES.txt": _notes(intent),
        "templates/ingress.yaml": _ingress(intent),
    }
    for name, members in _by_file((*found, *monitors(intent))).items():
        files[f"templates/{name}.yaml"] = _template(members, intent, marks)
    return dict(sorted(files.items()))


def _about(intent: Intent, options: KubeOptions) -> str:
    said = {
        "apiVersion": "v2",
        "name": intent.name,
        "description": f"Models served by greenroom ({len(intent.workloads)} workloads, {intent.target})",
        "type": "application",
        "version": CHART_VERSION,
        "appVersion": __version__,
        "kubeVersion": KUBE_VERSION,
    }
    return dump(said, comments=comments(intent, options))


# ---------------------------------------------------------------------------------------------------------------- values


def _values(intent: Intent, options: KubeOptions, found: tuple[Object, ...]) -> Value:
    workloads = {}
    for workload in intent.workloads:
        spec = _controller_of(workload.name, found).value["spec"]["template"]["spec"]
        patch = target_patch(workload, options)
        workloads[workload.name] = {
            "image": workload.image,
            "imagePullPolicy": spec["containers"][0]["imagePullPolicy"],
            "replicas": 1,
            "resources": spec["containers"][0]["resources"],
            "gpu": patch.get("limits", {}),
            "tolerations": patch.get("tolerations", []),
            "nodeSelector": {},
            "affinity": {},
            "runtimeClassName": "",
            "priorityClassName": "",
            "podAnnotations": {},
            "extraArgs": [],
            "extraEnv": [],
            "serviceType": "ClusterIP",
        }
    claims = [one for one in found if one.kind == "PersistentVolumeClaim"]
    values: Value = {
        "workloads": workloads,
        "imagePullSecrets": [],
        "persistence": {
            "enabled": True,
            "claims": {
                one.name: {
                    "accessModes": one.value["spec"]["accessModes"],
                    "storageClassName": one.value["spec"].get("storageClassName", ""),
                    "size": one.value["spec"]["resources"]["requests"]["storage"],
                }
                for one in claims
            },
        },
        "networkPolicy": {"enabled": True},
        "podDisruptionBudget": {"enabled": True},
        "serviceMonitor": {"enabled": False, "interval": f"{SCRAPE_S}s", "labels": {}},
        "ingress": {
            "enabled": False,
            "className": "",
            "host": "",
            "workload": _front(intent),
            "tlsSecret": "",
            "annotations": {},
        },
    }
    if config_files(intent):
        values["config"] = intent.config_text
    return values


def _front(intent: Intent) -> str:
    """The workload that clients talk to: greenroom where there is one."""
    return next((one.name for one in intent.workloads if not one.model), intent.workloads[0].name)


def _controller_of(workload: str, found: tuple[Object, ...]) -> Object:
    return next(one for one in found if one.workload == workload and one.kind in ("Deployment", "StatefulSet"))


# ------------------------------------------------------------------------------------------------------------- templates


def _by_file(found: tuple[Object, ...]) -> dict[str, list[Object]]:
    files: dict[str, list[Object]] = {}
    for one in found:
        files.setdefault(f"workload-{one.workload}" if one.workload else "common", []).append(one)
    return files


def _template(members: list[Object], intent: Intent, marks: Marks) -> str:
    head = f"{{{{- $w := index .Values.workloads {json.dumps(members[0].workload)} }}}}\n" if members[0].workload else ""
    parts = []
    for one in members:
        text = _filled(dump_all([_marked(one, intent, marks)]), marks)
        if one.switch:
            text = f"{{{{- if .Values.{one.switch}.enabled }}}}\n---\n{text}{{{{- end }}}}\n"
        else:
            text = f"---\n{text}"
        parts.append(text)
    return head + "".join(parts)


def _marked(one: Object, intent: Intent, marks: Marks) -> Value:
    """A copy with marks where values of the chart go."""
    value: Value = copy.deepcopy(one.value)
    if one.kind in ("Deployment", "StatefulSet"):
        _mark_controller(value, intent, marks)
    elif one.kind == "Service":
        value["spec"]["type"] = marks.put("scalar:$w.serviceType")
    elif one.kind == "ConfigMap":
        value["data"] = {name: marks.put("scalar:.Values.config") for name in value["data"]}
    elif one.kind == "PersistentVolumeClaim":
        place = f"(index .Values.persistence.claims {json.dumps(one.name)})"
        value["spec"]["accessModes"] = marks.put(f"block:{place}.accessModes")
        value["spec"]["storageClassName"] = marks.put(f"text:{place}.storageClassName")
        value["spec"]["resources"]["requests"]["storage"] = marks.put(f"scalar:{place}.size")
    elif one.kind == "ServiceMonitor":
        value["spec"]["endpoints"][0]["interval"] = marks.put("scalar:.Values.serviceMonitor.interval")
        value["metadata"]["labels"][marks.put("merge:.Values.serviceMonitor.labels")] = ""
    return value


def _mark_controller(value: Value, intent: Intent, marks: Marks) -> None:
    value["spec"]["replicas"] = marks.put("number:$w.replicas")
    template = value["spec"]["template"]
    notes = template["metadata"].setdefault("annotations", {})
    if f"{PREFIX}/config-sha256" in notes:
        notes[f"{PREFIX}/config-sha256"] = marks.put("scalar:(.Values.config | sha256sum)")
    if notes:
        notes[marks.put("merge:$w.podAnnotations")] = ""
    else:
        template["metadata"]["annotations"] = marks.put("with:$w.podAnnotations")
    spec: dict[str, Any] = template["spec"]
    for name in ("nodeSelector", "tolerations", "affinity"):
        spec[name] = marks.put(f"with:$w.{name}")
    for name in ("runtimeClassName", "priorityClassName"):
        spec[name] = marks.put(f"text:$w.{name}")
    spec["imagePullSecrets"] = marks.put("with:.Values.imagePullSecrets")
    container = spec["containers"][0]
    container["image"] = marks.put("scalar:$w.image")
    container["imagePullPolicy"] = marks.put("scalar:$w.imagePullPolicy")
    container["resources"] = marks.put('include:"greenroom.resources" $w')
    if "args" in container:
        container["args"].append(marks.put("items:$w.extraArgs"))
    container["env"].append(marks.put("items:$w.extraEnv"))


_LINE = re.compile(r"^(?P<indent> *)(?P<dash>(?:- )*)(?:(?P<key>[^\s:]+): )?(?P<mark>mark[0-9a-f]{16}x\d+x)(?P<empty>: \"\")?$")


def _filled(text: str, marks: Marks) -> str:
    """Template text of a dump: what looks like a template in it is kept as text, marks become template lines."""
    lines = []
    for line in text.replace("{{", '{{ "{{" }}').split("\n"):
        found = _LINE.match(line)
        if found is None or found["mark"] not in marks.made:
            lines.append(line)
            continue
        how, _, expression = marks.made[found["mark"]].partition(":")
        lines.append(_line(found["indent"] + found["dash"], found["key"] or "", how, expression))
    return "\n".join(lines)


def _line(lead: str, key: str, how: str, what: str) -> str:
    """One mark as template lines; `lead` is what stands before the key or item, dashes included."""
    width = len(lead)
    match how:
        case "scalar":
            return f"{lead}{key}: {{{{ {what} | toJson }}}}"
        case "number":
            return f"{lead}{key}: {{{{ {what} | int }}}}"
        case "text":  # left out when it is empty
            return f"{{{{- with {what} }}}}\n{lead}{key}: {{{{ . | toJson }}}}\n{{{{- end }}}}"
        case "block":
            return f"{lead}{key}:\n{{{{ toYaml {what} | indent {width + 2} }}}}"
        case "include":
            return f"{lead}{key}:\n{{{{ include {what} | indent {width + 2} }}}}"
        case "with":
            return f"{{{{- with {what} }}}}\n{lead}{key}:\n{{{{ toYaml . | indent {width + 2} }}}}\n{{{{- end }}}}"
        case "merge":
            return f"{{{{- with {what} }}}}\n{{{{ toYaml . | indent {width} }}}}\n{{{{- end }}}}"
        case "items":
            return f"{{{{- with {what} }}}}\n{{{{ toYaml . | indent {width - 2} }}}}\n{{{{- end }}}}"
    raise AssertionError(how)


def _ingress(intent: Intent) -> str:
    ports = " ".join(f"{json.dumps(one.name)} {one.port}" for one in intent.workloads)
    return f"""\
{{{{- with .Values.ingress }}}}
{{{{- if .enabled }}}}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {intent.name}
  labels:
    app.kubernetes.io/part-of: {intent.name}
{{{{- with .annotations }}}}
  annotations:
{{{{ toYaml . | indent 4 }}}}
{{{{- end }}}}
spec:
{{{{- with .className }}}}
  ingressClassName: {{{{ . | toJson }}}}
{{{{- end }}}}
{{{{- if .tlsSecret }}}}
  tls:
    - secretName: {{{{ .tlsSecret | toJson }}}}
      hosts:
        - {{{{ required "ingress.host is needed with ingress.tlsSecret" .host | toJson }}}}
{{{{- end }}}}
  rules:
    - http:
        paths:
          - path: /
            pathType: Prefix
            backend:
              service:
                name: {{{{ .workload | toJson }}}}
                port:
                  number: {{{{ required "ingress.workload is none of the workloads" (get (dict {ports}) .workload) }}}}
{{{{- with .host }}}}
      host: {{{{ . | toJson }}}}
{{{{- end }}}}
{{{{- end }}}}
{{{{- end }}}}
"""


def _notes(intent: Intent) -> str:
    """Shown after an installation; model names go in as text, never as template."""
    lines = [f"{intent.name} is installed in the namespace {{{{ .Release.Namespace }}}}.", ""]
    for one in intent.workloads:
        about = f" ({one_line(one.model)})" if one.model else ""
        lines.append(f"  {one.name}:{one.port}{about}".replace("{{", '{{ "{{" }}'))
    front = next(one for one in intent.workloads if one.name == _front(intent))
    forward = f"  kubectl --namespace {{{{ .Release.Namespace }}}} port-forward service/{front.name} {front.port}:{front.port}"
    key = ' -H "Authorization: Bearer $GREENROOM_API_KEY"' if not front.model and intent.config.api_keys else ""
    lines += ["", "Try it:", "", forward, f"  curl{key} http://127.0.0.1:{front.port}/v1/models"]
    if command := secret_command(intent):
        told = command.replace(f"--namespace {intent.namespace}", "--namespace {{ .Release.Namespace }}")
        lines += ["", "Secrets that the pods wait for:", "", f"  {told}"]
    return "\n".join(lines) + "\n"
