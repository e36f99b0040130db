"""llm-d on Kubernetes: a pool of replicas and an endpoint picker for each base model, all behind one gateway.

What greenroom does on one box by turns is bought with GPUs here: every model that is not scaled to zero holds its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from greenroom.config.yaml_out import dump
from greenroom.deploy import llmd_objects as made
from greenroom.deploy import llmd_router as router
from greenroom.deploy.intent import Files, Intent, Share, Workload
from greenroom.deploy.kube_objects import PORT_NAME, Object, comments, complete, secret_command, settled
from greenroom.deploy.kube_pod import KubeOptions, Value
from greenroom.deploy.llmd_versions import (
    AS_OF,
    CHART_VERSION,
    CHARTS,
    CRDS,
    EPP_CPU,
    EPP_MEMORY_GIB,
    GATEWAY_CLASSES,
    STANDALONE_PROXY_CPU,
    STANDALONE_PROXY_MEMORY_GIB,
    VERSIONS,
)
from greenroom.deploy.names import label, labels
from greenroom.deploy.unfit import Unfit

GPUS_PER_NODE = 8
FIRST_START_S = 3600  # of engines that fetch their weights: a probe that gives up sooner has them begin anew for ever
DEADLINE_ROOM_S = 120  # more, before a rollout counts as failed
IDLE_S = 900  # without a request before an occasional model gives its GPUs back
MONITORING_NAMESPACES = ("monitoring", "llm-d-monitoring")  # where Prometheus usually is; the second is llm-d's own
PROMETHEUS = "http://llmd-kube-prometheus-stack-prometheus.llm-d-monitoring.svc.cluster.local:9090"
TOKEN_SECRET, TOKEN_KEY = "llm-d-hf-token", "HF_TOKEN"
HUB_ENGINES = ("vllm", "sglang")  # fetch models by their names on a hub
PROVIDERS = (*GATEWAY_CLASSES, "none")
HEAD = "Made by greenroom (generate llm-d); make it anew rather than edit it."


@dataclass(frozen=True, slots=True)
class LlmdOptions:
    """What is particular to llm-d."""

    provider: str = "istio"  # one of PROVIDERS
    gateway: str = "inference-gateway"
    gpus_per_node: int = GPUS_PER_NODE
    replicas: Mapping[str, int] = field(default_factory=dict)  # model -> copies; 1 where not named
    replicas_max: Mapping[str, int] = field(default_factory=dict)  # of occasional models
    occasional: frozenset[str] = frozenset()  # models that KEDA scales to zero
    idle_s: int = IDLE_S
    prometheus: str = PROMETHEUS
    epp_cpu: int = EPP_CPU
    epp_memory_gib: int = EPP_MEMORY_GIB


@dataclass(frozen=True, slots=True)
class Member:
    """One base model in the cluster."""

    workload: Workload
    engine: str
    release: str  # of its router's chart, and its pool's name
    label: str  # in `llm-d.ai/model`: no two models share one
    nodes: int  # more than 1: a LeaderWorkerSet
    replicas: int
    occasional: bool

    @property
    def pooled(self) -> bool:
        """Whether an endpoint picker understands its engine's figures."""
        return self.engine in router.SERVER_TYPES

    @property
    def names(self) -> tuple[str, ...]:
        return (self.workload.model, *self.workload.aliases)


def llm_d(intent: Intent, options: LlmdOptions) -> Files:
    """Everything but secrets.  Raises Unfit."""
    if options.provider not in PROVIDERS:
        raise Unfit(f"there is no gateway {options.provider!r} here; write one of {', '.join(PROVIDERS)}")
    intent = settled(replace(intent, workloads=tuple(one for one in intent.workloads if one.model)))
    found = members(intent, options)
    intent = replace(intent, workloads=tuple(one.workload for one in found))
    files: dict[str, str] = {}
    files |= _folder("modelservers", [*_model_servers(intent, found), *_worker_policies(found)], intent)
    files |= _folder("routing", list(_routing(intent, found, options)), intent)
    files |= _folder("monitoring", list(_monitoring(found)), intent)
    if scaled := list(_scaled(intent, found, options)):
        files |= _folder("keda", scaled, intent)
    for one in found:
        if one.pooled:
            files |= _router_files(one, options)
    files["README.md"] = readme(intent, found, options)
    return dict(sorted(files.items()))


def members(intent: Intent, options: LlmdOptions) -> list[Member]:
    """Raises Unfit where a model does not fit nodes of that size, or an option names a model that is not there."""
    models = [one.model for one in intent.workloads]
    for name in (*options.replicas, *options.occasional):
        if name not in models:
            raise Unfit(f"there is no model {name!r} in this configuration; known: {', '.join(models)}")
    tags = labels(models)
    found = []
    for one in intent.workloads:
        nodes = _nodes(one, options.gpus_per_node)
        if nodes > 1 and one.kind != "vllm":
            raise Unfit(
                f"{one.model} wants {one.share.count} GPUs, a node has {options.gpus_per_node}, and only vLLM is spread over nodes here"
            )
        release = label(one.name, chars_max=made.RELEASE_CHARS_MAX)
        named = _served(one)
        found.append(
            Member(
                named,
                one.kind,
                release,
                tags[one.model],
                nodes,
                max(1, options.replicas.get(one.model, 1)),
                # KEDA scales what it can count by itself.
                one.model in options.occasional and nodes == 1 and one.kind in router.SERVER_TYPES,
            )
        )
    return found


def _nodes(workload: Workload, gpus_per_node: int) -> int:
    if workload.share.mig or workload.share.count <= gpus_per_node:
        return 1
    if workload.share.count % gpus_per_node:
        said = f"{workload.model} wants {workload.share.count} GPUs, which nodes of {gpus_per_node} cannot give in equal parts"
        raise Unfit(f"{said}: choose another tensor or pipeline parallel size")
    return workload.share.count // gpus_per_node


def _served(workload: Workload) -> Workload:
    """The engine answers to what clients send: nobody rewrites names on the way here."""
    kind = workload.kind
    if kind not in HUB_ENGINES:
        return workload
    flags = ("--served-model-name", "--served_model_name")
    names = (workload.model, *workload.aliases) if kind == "vllm" else (workload.model,)
    argv = without(workload.argv, flags)
    return replace(workload, argv=(*argv, "--served-model-name", *names))


def without(argv: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    """A command without a flag and all its values."""
    out: list[str] = []
    skipping = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if name in flags:
            skipping = not equals
            continue
        if skipping and not word.startswith("-"):
            continue
        skipping = False
        out.append(word)
    return tuple(out)


# ------------------------------------------------------------------------------------------------------- model servers


def _model_servers(intent: Intent, found: Sequence[Member]) -> list[Value]:
    """The objects of `generate kube`, with replicas and the label that pools go by."""
    by_name = {one.workload.name: one for one in found}
    kept = [one for one in complete(intent, KubeOptions.of(intent.options)) if one.kind != "PodDisruptionBudget"]
    return [_model_server(one, by_name[one.workload], intent) if one.workload else one.value for one in kept]


def _model_server(one: Object, member: Member, intent: Intent) -> Value:
    if one.kind == "NetworkPolicy":
        return _let_in(one.value, member)
    if one.kind not in ("Deployment", "StatefulSet"):
        return one.value
    spec = one.value["spec"]
    template = _marked(spec["template"], member)
    if member.nodes > 1:
        return _spread(one.value, template, member)
    counted = {} if member.occasional else {"replicas": member.replicas}  # KEDA counts those
    kept = {key: value for key, value in spec.items() if key not in ("replicas", "strategy", "template")}
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}  # a GPU to spare is rare
    if "progressDeadlineSeconds" in kept and member.engine in HUB_ENGINES:
        kept["progressDeadlineSeconds"] = max(kept["progressDeadlineSeconds"], FIRST_START_S + DEADLINE_ROOM_S)
    return {**one.value, "spec": {**counted, **kept, "strategy": rolling, "template": template}}


def _marked(template: Value, member: Member) -> Value:
    meta = {**template["metadata"], "labels": {**template["metadata"]["labels"], made.POOL_LABEL: member.label}}
    return {**template, "metadata": meta, "spec": _patient(_with_token(template["spec"], member), member)}


def _patient(spec: Value, member: Member) -> Value:
    """Its first start may have to fetch what it serves; one that crashes is seen without a probe."""
    first = spec["containers"][0]
    if member.engine not in HUB_ENGINES or "startupProbe" not in first:
        return spec
    probe = first["startupProbe"]
    tries = max(probe["failureThreshold"], math.ceil(FIRST_START_S / probe["periodSeconds"]))
    return {**spec, "containers": [{**first, "startupProbe": {**probe, "failureThreshold": tries}}]}


def _with_token(spec: Value, member: Member) -> Value:
    """The hub's token, from a secret that may be missing: open models need none."""
    first = spec["containers"][0]
    if member.engine not in HUB_ENGINES or any(each["name"] == TOKEN_KEY for each in first["env"]):
        return spec
    source = {"secretKeyRef": {"name": TOKEN_SECRET, "key": TOKEN_KEY, "optional": True}}
    return {**spec, "containers": [{**first, "env": [*first["env"], {"name": TOKEN_KEY, "valueFrom": source}]}]}


def _let_in(policy: Value, member: Member) -> Value:
    """Gateways and the endpoint picker, nobody else: an engine's control routes stand on the same port."""
    rule = policy["spec"]["ingress"][0]
    pickers = [{mode: made.epp_name(member.release)} for mode in ("llm-d-router-gateway", "llm-d-router-standalone")]
    peers = [
        {"podSelector": {"matchExpressions": [{"key": made.GATEWAY_POD_LABEL, "operator": "Exists"}]}},
        *({"podSelector": {"matchLabels": picker}} for picker in pickers),
    ]
    ingress = [{**rule, "from": [*rule.get("from", []), *peers]}]
    if member.nodes > 1:  # its own workers, on the ports that they agree on
        ingress.append({"from": [{"podSelector": {"matchLabels": {made.SET_POD_LABEL: member.workload.name}}}]})
    return {**policy, "spec": {**policy["spec"], "ingress": ingress}}


def _worker_policies(found: Sequence[Member]) -> Iterator[Value]:
    """What workers of a set agree on among themselves asks nobody for a password: nobody else reaches them."""
    for one in found:
        if one.nodes > 1:
            whole = {made.SET_POD_LABEL: one.workload.name}
            yield made.network_policy(
                label(f"{one.workload.name}-set"), _tags(one), whole, [{"from": [{"podSelector": {"matchLabels": whole}}]}]
            )


def _spread(controller: Value, template: Value, member: Member) -> Value:
    """One copy over several nodes: the leader answers, workers only compute."""
    leader = _ranked(template, member, worker=False)
    worker = _ranked(template, member, worker=True)
    meta = controller["metadata"]
    value = made.leader_worker_set(meta["name"], meta["labels"], leader, worker, size=member.nodes, replicas=member.replicas)
    return {**value, "metadata": {**value["metadata"], **({"annotations": meta["annotations"]} if "annotations" in meta else {})}}


def _ranked(template: Value, member: Member, *, worker: bool) -> Value:
    first = template["spec"]["containers"][0]
    rank = "$(LWS_WORKER_INDEX)" if worker else "0"
    words = ["--nnodes", str(member.nodes), "--node-rank", rank, "--master-addr", "$(LWS_LEADER_ADDRESS)"]
    asked = first["resources"]
    limits = {name: str(int(count) // member.nodes) if "/" in name else count for name, count in asked.get("limits", {}).items()}
    container = {**first, "args": [*first["args"], *words, *(["--headless"] if worker else [])], "resources": {**asked, "limits": limits}}
    meta = template["metadata"]
    if worker:
        container = {key: value for key, value in container.items() if not key.endswith("Probe") and key != "ports"}
        # Only the leader answers requests: pools and services must not see the others.
        hidden = {key: value for key, value in meta["labels"].items() if key not in (made.POOL_LABEL, "app.kubernetes.io/instance")}
        meta = {**meta, "labels": hidden}
    return {"metadata": meta, "spec": {**template["spec"], "containers": [container]}}


# ------------------------------------------------------------------------------------------------------------- routing


def _tags(member: Member) -> dict[str, str]:
    return {made.POOL_LABEL: member.label, "app.kubernetes.io/instance": member.workload.name}


def _routing(intent: Intent, found: Sequence[Member], options: LlmdOptions) -> Iterator[Value]:
    whole = {"app.kubernetes.io/part-of": intent.name}
    if options.provider != "none":
        yield made.gateway(options.gateway, GATEWAY_CLASSES[options.provider], whole)
    for one in found:
        if one.pooled:
            yield made.inference_pool(one.release, _tags(one), one.workload.port, namespace=intent.namespace)
        backend = made.pool_backend(one.release) if one.pooled else made.service_backend(one.workload.name, one.workload.port)
        yield made.http_route(one.workload.name, _tags(one), one.names, backend, gateway=options.gateway)
    if options.provider == "agentgateway":
        base_of = {name: one.workload.model for one in found for name in one.names}
        yield made.agentgateway_policy(label(f"{intent.name}-model-names"), whole, base_of, gateway=options.gateway)
        return
    for one in found:
        yield made.base_model(label(f"{one.workload.name}-names"), _tags(one), one.workload.model, one.workload.aliases)


def _monitoring(found: Sequence[Member]) -> Iterator[Value]:
    for one in found:
        yield made.pod_monitor(one.workload.name, _tags(one), PORT_NAME)
        places = {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(MONITORING_NAMESPACES)}]}
        way_in = {"from": [{"namespaceSelector": places}], "ports": [{"protocol": "TCP", "port": one.workload.port}]}
        yield made.network_policy(label(f"{one.workload.name}-metrics"), _tags(one), {made.POOL_LABEL: one.label}, [way_in])


def _scaled(intent: Intent, found: Sequence[Member], options: LlmdOptions) -> Iterator[Value]:
    for one in found:
        if not one.occasional:
            continue
        probes = [probe.start_s for probe in (one.workload.ready, one.workload.live) if probe is not None]
        yield made.scaled_object(
            one.workload.name,
            _tags(one),
            one.workload.name,
            one.workload.model,
            prometheus=options.prometheus,
            epp=made.epp_name(one.release),
            namespace=intent.namespace,
            parallel=(one.workload.source.parallel if one.workload.source is not None else None) or 16,
            idle_s=options.idle_s,
            start_s=math.ceil(max(probes, default=300.0)),
            replicas_max=max(1, options.replicas_max.get(one.workload.model, one.replicas)),
        )


def _router_files(one: Member, options: LlmdOptions) -> dict[str, str]:
    common = router.values(
        one.label, one.workload.port, one.engine, flow_control=one.occasional, cpu=options.epp_cpu, memory_gib=options.epp_memory_gib
    )
    cost = f"The endpoint picker asks for {options.epp_cpu} CPU and {options.epp_memory_gib} GiB, once for each base model."
    standalone = router.standalone_values(common, cpu=STANDALONE_PROXY_CPU, memory_gib=STANDALONE_PROXY_MEMORY_GIB)
    notes = [HEAD, f"Model: {one.workload.model}", cost]
    return {
        f"router/{one.release}.gateway.values.yaml": dump(router.gateway_values(common, options.provider), comments=notes),
        f"router/{one.release}.standalone.values.yaml": dump(
            standalone, comments=[*notes, f"Its Envoy asks for {STANDALONE_PROXY_CPU} CPU and {STANDALONE_PROXY_MEMORY_GIB} GiB more."]
        ),
    }


def _folder(name: str, values: Sequence[Value], intent: Intent) -> dict[str, str]:
    """One file an object, and the kustomization that lists them."""
    files = {f"{str(value['kind']).lower()}-{value['metadata']['name']}.yaml": dump(value, comments=[HEAD]) for value in values}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": intent.namespace,
        "resources": sorted(files),
    }
    files["kustomization.yaml"] = dump(kustomization, comments=[HEAD])
    return {f"{name}/{path}": text for path, text in files.items()}


# -------------------------------------------------------------------------------------------------------------- README


def gpus(share: Share, replicas: int) -> int:
    return share.count * replicas


def readme(intent: Intent, found: Sequence[Member], options: LlmdOptions) -> str:
    """What is here, what it costs, and what to type."""
    pooled = [one for one in found if one.pooled]
    others = [one for one in found if not one.pooled]
    steady = [one for one in found if not one.occasional]
    total = sum(gpus(one.workload.share, one.replicas) for one in steady)
    lines = [
        f"# {intent.name} on llm-d",
        "",
        f"{HEAD} Nothing here was tried on your cluster.",
        "",
        f"Written for what was current in {AS_OF}:",
        "",
        *(f"* {name}: {version}" for name, version in VERSIONS.items()),
        "",
        "| model | engine | replicas | GPUs | how it is reached |",
        "|---|---|---|---|---|",
        *(_row(one) for one in found),
        "",
        "## What it costs",
        "",
        f"* {total} {'GPU' if total == 1 else 'GPUs'} held all the time"
        + (f", more when {_listed(one.workload.model for one in found if one.occasional)} are asked" if len(steady) < len(found) else "")
        + ". A pod does not share its GPU: models that took turns on one card need a card each now.",
        f"* {len(pooled)} endpoint {'picker' if len(pooled) == 1 else 'pickers'} (EPP), one for each base model: "
        f"{len(pooled) * options.epp_cpu} CPU and {len(pooled) * options.epp_memory_gib} GiB of memory together.",
        "",
        "## Install",
        "",
        "```bash",
        f"kubectl create namespace {intent.namespace} --dry-run=client -o yaml | kubectl apply -f -",
        *(f"kubectl apply -f {url}" for url in CRDS),
        f'kubectl create secret generic {TOKEN_SECRET} --namespace {intent.namespace} --from-literal={TOKEN_KEY}="$HF_TOKEN"',
        *([command] if (command := secret_command(intent)) else []),
        *(
            ["# LeaderWorkerSet has to be installed for " + _listed(wide)]
            if (wide := [one.workload.model for one in found if one.nodes > 1])
            else []
        ),
        "kubectl apply -k modelservers",
        "kubectl apply -k routing",
        *(
            f"helm install {one.release} {CHARTS}/llm-d-router-gateway --version {CHART_VERSION} "
            f"--namespace {intent.namespace} -f router/{one.release}.gateway.values.yaml"
            for one in pooled
        ),
        *_processor(intent, options),
        f"kubectl apply -k monitoring   # where Prometheus's operator is installed; let in from {' and '.join(MONITORING_NAMESPACES)}",
        *(["kubectl apply -k keda         # where KEDA is installed"] if any(one.occasional for one in found) else []),
        "```",
        "",
        "Without a gateway, `llm-d-router-standalone` with the other values file gives each base model an address of its own.",
    ]
    if others:
        lines += [
            "",
            f"{_listed(one.workload.model for one in others)}: the endpoint picker reads figures of vLLM and SGLang only, "
            "so the route goes to a plain Service, which spreads requests without looking.",
        ]
    if any(one.occasional for one in found):
        lines += [
            "",
            "Models that KEDA scales to zero: a request waits in the picker's flow control while a pod starts, for as long as a "
            "cold start takes. greenroom wakes a sleeping model in about a second; nothing in Kubernetes does that yet.",
        ]
    if any(one.workload.aliases and one.engine == "sglang" for one in found):
        lines += ["", "SGLang answers to one name: requests under an alias reach it, and it may refuse the name."]
    if held := [one.workload.model for one in found if one.workload.model in options.occasional and not one.occasional]:
        said = "is not scaled to zero: KEDA counts what the picker of vLLM or SGLang holds, of models that fit a node. Its GPUs are held"
        lines += ["", *(f"* {name} {said}." for name in held)]
    # The first says what made the files, and the secrets are above.
    notes = [note for note in comments(intent, KubeOptions.of(intent.options))[1:] if not note.startswith("Secrets are")]
    lines += [*(["", "## Notes", "", *(f"* {note}" for note in notes)] if notes else []), ""]
    return "\n".join(lines)


def _row(one: Member) -> str:
    copies = f"0 to {one.replicas}" if one.occasional else str(one.replicas)
    way = f"InferencePool {one.release}" if one.pooled else f"Service {one.workload.name}"
    spread = f" over {one.nodes} nodes" if one.nodes > 1 else ""
    model = one.workload.model.replace("|", "\\|")
    return f"| {model} | {one.engine or 'unknown'} | {copies} | {gpus(one.workload.share, one.replicas)}{spread} | {way} |"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _processor(intent: Intent, options: LlmdOptions) -> list[str]:
    if options.provider == "agentgateway":
        return ["# agentgateway reads the model's name itself: no payload processor is needed"]
    provider = options.provider if options.provider in ("gke", "istio") else "none"
    return [
        f"helm install payload-processor {CHARTS}/payload-processor --version {CHART_VERSION} --namespace {intent.namespace} "
        f"--set provider.name={provider} --set inferenceGateway.name={options.gateway}"
    ]
