"""llm-d from an intent: every object passes its schema, routes and pools are each model's own, and what it costs is said."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from greenroom.config.load import load_config_text
from greenroom.config.model import Config, ModelConfig
from greenroom.config.yaml_out import dump
from greenroom.deploy import first_start
from greenroom.deploy.build import Options, build
from greenroom.deploy.commands import dialect
from greenroom.deploy.files import write
from greenroom.deploy.intent import Intent, Mount, Probe, Share, Workload
from greenroom.deploy.llmd import LlmdOptions, llm_d
from greenroom.deploy.llmd_objects import MODEL_HEADER, POOL_LABEL
from greenroom.deploy.names import labels
from greenroom.deploy.unfit import Unfit

SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")}
HOSTILE = [
    "Org/Model-A",
    "org/model-a",
    f"{'long-' * 14}one",
    f"{'long-' * 14}two",
    "näme:7b q4",
    'quote"d',
    "back\\slash",
    "1st",
    "a" * 256,
]
TWELVE = [*HOSTILE, "plain", "日本", "x y:z/w@v"]


def workload(
    model: str, kind: str = "vllm", *, gpus: int = 1, aliases: Sequence[str] = (), argv: Sequence[str] = (), name: str = ""
) -> Workload:
    command = tuple(argv) or ("vllm", "serve", "org/base", "--port", "8000", "--host", "0.0.0.0")
    source = ModelConfig(model, command, engine=kind, parallel=8, start_s_max=300.0)
    probe = Probe("/health", 8000, first_start.start_s(source, dialect(source)))
    return Workload(
        name=name,
        model=model,
        image="docker.io/vllm/vllm-openai:v0.18.0",
        argv=command,
        port=8000,
        share=Share("nvidia", gpus),
        memory_mib=2000,
        shm_mib=1024,
        live=probe,
        ready=probe,
        aliases=tuple(aliases),
        kind=kind,
        source=source,
        offered_env=first_start.offered(dialect(source)),
    )


def intent(*workloads: Workload, namespace: str = "models") -> Intent:
    names = labels([one.model for one in workloads])
    named = tuple(Workload(**{**{slot: getattr(one, slot) for slot in Workload.__slots__}, "name": names[one.model]}) for one in workloads)
    return Intent("greenroom", "engines", named, Config("greenroom.yaml", ()), "", "nvidia", namespace)


def read(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def values(files: dict[str, str], folder: str) -> Iterator[dict[str, Any]]:
    for path, text in files.items():
        if path.startswith(f"{folder}/") and not path.endswith("kustomization.yaml"):
            yield read(text)


def of_kind(files: dict[str, str], kind: str) -> list[dict[str, Any]]:
    found = [value for folder in ("modelservers", "routing", "monitoring", "keda") for value in values(files, folder)]
    return [value for value in found if value["kind"] == kind]


def made(*workloads: Workload, options: LlmdOptions | None = None) -> dict[str, str]:
    return dict(llm_d(intent(*workloads), options or LlmdOptions()))


def judged(value: dict[str, Any]) -> None:
    """By its own schema, or by Kubernetes' for what is part of it."""
    if schema := SCHEMAS.get(value["kind"]):
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    else:
        kubernetes_validate.validate(value, "1.34", strict=True)
    if value["kind"] == "LeaderWorkerSet":
        for part in ("leaderTemplate", "workerTemplate"):
            template = value["spec"]["leaderWorkerTemplate"][part]
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "x"}, "spec": template["spec"]}
            kubernetes_validate.validate(pod, "1.34", strict=True)


@pytest.mark.parametrize("provider", ["istio", "gke", "agentgateway", "none"])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_every_object_passes_its_schema(count: int, provider: str) -> None:
    """Whatever models are called, and whichever gateway."""
    models = [workload(name, aliases=[f"{name[:200]}-also"] if index % 2 else ()) for index, name in enumerate(TWELVE[:count])]
    files = made(*models, options=LlmdOptions(provider=provider, occasional=frozenset(TWELVE[:1])))
    found = [value for folder in ("modelservers", "routing", "monitoring", "keda") for value in values(files, folder)]

    for value in found:
        judged(value)
    kinds = [value["kind"] for value in found]
    assert [kinds.count(kind) for kind in ("Deployment", "Service", "InferencePool", "HTTPRoute", "PodMonitor")] == [count] * 5
    assert kinds.count("Gateway") == (provider != "none")
    assert kinds.count("AgentgatewayPolicy") == (provider == "agentgateway")
    assert kinds.count("ScaledObject") == 1
    places = [(value["kind"], value["metadata"]["name"]) for value in found]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("kind", sorted(SCHEMAS))
def test_the_schemas_refuse_misspelt_fields(kind: str) -> None:
    """So that passing them says something."""
    files = made(workload("a", gpus=16), workload("b"), options=LlmdOptions(provider="agentgateway", occasional=frozenset({"b"})))
    value = of_kind(files, kind)[0]
    judged(value)
    broken = {**value, "spec": {**value["spec"], "tpyo": 1}}
    with pytest.raises(jsonschema.ValidationError, match="tpyo"):
        judged(broken)


def test_each_pool_selects_the_pods_of_its_own_model_and_no_others() -> None:
    """All pairs, also of names that differ in case only or after the 63rd character."""
    files = made(*(workload(name) for name in HOSTILE))
    pods = {
        one["metadata"]["annotations"]["dev.greenroom/model"]: one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(files, "Deployment")
    }
    pools = {pool["metadata"]["labels"]["app.kubernetes.io/instance"]: pool for pool in of_kind(files, "InferencePool")}
    routes = {}
    for route in of_kind(files, "HTTPRoute"):
        (rule,) = route["spec"]["rules"]
        (match,) = rule["matches"]
        assert match["path"] == {"type": "PathPrefix", "value": "/v1"}
        assert [header["name"] for header in match["headers"]] == [MODEL_HEADER]
        routes[match["headers"][0]["value"]] = rule["backendRefs"][0]["name"]

    assert set(routes) == set(pods) == set(HOSTILE)
    assert len({pool["metadata"]["name"] for pool in pools.values()}) == len(HOSTILE)
    for asked, other in product(HOSTILE, HOSTILE):
        (pool,) = [one for one in pools.values() if one["metadata"]["name"] == routes[asked]]
        wanted = pool["spec"]["selector"]["matchLabels"]
        assert (wanted.items() <= pods[other].items()) == (asked == other)
    for deployment in of_kind(files, "Deployment"):
        wanted = deployment["spec"]["selector"]["matchLabels"]
        assert sum(wanted.items() <= labels_of.items() for labels_of in pods.values()) == 1


def test_engines_answer_to_the_names_that_clients_send() -> None:
    """Nobody rewrites them on the way, so a name written in the command gives way."""
    argv = ("vllm", "serve", "org/base", "--served-model-name", "other", "more", "--port", "8000", "--served-model-name=x")
    files = made(workload("Org/Chat", aliases=["gpt-4o"], argv=argv), workload("s", "sglang", argv=("sglang", "serve", "--port", "8000")))
    commands = {one["metadata"]["annotations"]["dev.greenroom/model"]: container(one) for one in of_kind(files, "Deployment")}

    words = [*commands["Org/Chat"]["command"], *commands["Org/Chat"]["args"]]
    assert words == ["vllm", "serve", "org/base", "--port", "8000", "--served-model-name", "Org/Chat", "gpt-4o"]
    assert commands["s"]["args"][-2:] == ["--served-model-name", "s"]
    route = next(one for one in of_kind(files, "HTTPRoute") if len(one["spec"]["rules"][0]["matches"]) == 2)
    assert [match["headers"][0]["value"] for match in route["spec"]["rules"][0]["matches"]] == ["Org/Chat", "gpt-4o"]
    names = next(one for one in of_kind(files, "ConfigMap") if one["data"].get("baseModel") == "Org/Chat")
    assert read(names["data"]["adapters"]) == ["gpt-4o"]


def container(controller: dict[str, Any]) -> dict[str, Any]:
    (only,) = controller["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_what_the_picker_cannot_read_is_reached_through_a_service() -> None:
    """And the README says so."""
    files = made(workload("chat"), workload("embed", "llama_server", argv=("llama-server", "-m", "/models/e.gguf", "--port", "8000")))

    assert [pool["metadata"]["labels"]["app.kubernetes.io/instance"] for pool in of_kind(files, "InferencePool")] == ["chat"]
    backends = [route["spec"]["rules"][0]["backendRefs"][0] for route in of_kind(files, "HTTPRoute")]
    assert {"group": "", "kind": "Service", "name": "embed", "port": 8000} in backends
    assert "embed: the endpoint picker reads figures of vLLM and SGLang only" in files["README.md"]
    assert sorted(path for path in files if path.startswith("router/")) == [
        "router/chat.gateway.values.yaml",
        "router/chat.standalone.values.yaml",
    ]


def test_a_model_too_large_for_a_node_is_spread_over_several() -> None:
    """The leader answers, workers only compute; GPUs are shared out; pools see the leader alone."""
    files = made(workload("big", gpus=16), options=LlmdOptions(gpus_per_node=8, replicas={"big": 2}))
    (spread,) = of_kind(files, "LeaderWorkerSet")
    template = spread["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]

    assert (spread["spec"]["replicas"], template["size"]) == (2, 2)
    for part, rank in ((leader, "0"), (worker, "$(LWS_WORKER_INDEX)")):
        (only,) = part["spec"]["containers"]
        assert only["resources"]["limits"]["nvidia.com/gpu"] == "8"
        at = only["args"].index("--nnodes")
        assert only["args"][at : at + 6] == ["--nnodes", "2", "--node-rank", rank, "--master-addr", "$(LWS_LEADER_ADDRESS)"]
    assert worker["spec"]["containers"][0]["args"][-1] == "--headless"
    assert "readinessProbe" in leader["spec"]["containers"][0]
    assert "readinessProbe" not in worker["spec"]["containers"][0]
    assert leader["metadata"]["labels"][POOL_LABEL] == "big"
    assert POOL_LABEL not in worker["metadata"]["labels"]
    own = {"leaderworkerset.sigs.k8s.io/name": spread["metadata"]["name"]}
    policies = [one["spec"] for one in of_kind(files, "NetworkPolicy")]
    (among,) = [one for one in policies if one["podSelector"]["matchLabels"] == own]
    assert among["ingress"] == [{"from": [{"podSelector": {"matchLabels": own}}]}]
    assert "LeaderWorkerSet has to be installed for big" in files["README.md"]
    assert "16 over 2 nodes" not in files["README.md"]
    assert "| 32 over 2 nodes |" in files["README.md"]


@pytest.mark.parametrize(
    ("workloads", "options", "said"),
    [
        ([workload("a", gpus=12)], LlmdOptions(), "12 GPUs, which nodes of 8"),
        ([workload("a", "sglang", gpus=16)], LlmdOptions(), "only vLLM is spread"),
        ([workload("a")], LlmdOptions(provider="nginx"), "no gateway 'nginx'"),
        ([workload("a")], LlmdOptions(replicas={"b": 2}), "no model 'b'"),
        ([], LlmdOptions(), "no model to deploy"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(workloads: list[Workload], options: LlmdOptions, said: str) -> None:
    """In a sentence."""
    with pytest.raises(Unfit, match=said):
        made(*workloads, options=options)


def test_an_occasional_model_holds_no_gpu_while_nobody_asks() -> None:
    """KEDA counts its pods, on figures of its own picker; the picker lets requests wait."""
    files = made(workload("Org/Rare"), workload("busy"), options=LlmdOptions(occasional=frozenset({"Org/Rare"}), replicas={"busy": 3}))
    (scaled,) = of_kind(files, "ScaledObject")
    deployments = {one["metadata"]["annotations"]["dev.greenroom/model"]: one for one in of_kind(files, "Deployment")}
    release = next(path for path in files if path.startswith("router/org-rare")).removeprefix("router/").split(".")[0]

    assert "replicas" not in deployments["Org/Rare"]["spec"]
    assert deployments["busy"]["spec"]["replicas"] == 3
    assert scaled["spec"]["scaleTargetRef"]["name"] == deployments["Org/Rare"]["metadata"]["name"]
    assert scaled["spec"]["minReplicaCount"] == 0
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert all(f'namespace="models",service="{release}-epp",model_name="Org/Rare"' in query for query in queries)
    plugins = read(files[f"router/{release}.gateway.values.yaml"])["router"]["epp"]["pluginsCustomConfig"]
    assert read(next(iter(plugins.values())))["featureGates"] == ["flowControl"]
    assert "3 GPUs held all the time, more when Org/Rare are asked" in files["README.md"]
    assert "2 endpoint pickers (EPP), one for each base model: 16 CPU and 16 GiB" in files["README.md"]


def test_tokens_come_from_a_secret_and_control_routes_stay_private() -> None:
    """No value of a secret is written; only gateways, pickers and pods that say so reach an engine."""
    files = made(workload("chat"))
    env = {each["name"]: each for each in container(of_kind(files, "Deployment")[0])["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "llm-d-hf-token", "key": "HF_TOKEN", "optional": True}
    policy, metrics = of_kind(files, "NetworkPolicy")
    assert metrics["spec"]["ingress"][0]["from"] == [
        {
            "namespaceSelector": {
                "matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["monitoring", "llm-d-monitoring"]}]
            }
        }
    ]
    assert metrics["spec"]["podSelector"]["matchLabels"] == {POOL_LABEL: "chat"}
    peers = [peer["podSelector"] for peer in policy["spec"]["ingress"][0]["from"]]
    assert {"matchLabels": {"llm-d-router-gateway": "chat-epp"}} in peers
    assert all("matchLabels" in peer or "matchExpressions" in peer for peer in peers)  # an empty selector would be everybody


def test_a_first_start_has_time_to_fetch_what_it_serves() -> None:
    """Engines that fetch from a hub: one that is ended while it fetches would begin anew for ever."""
    fetches = ("llama-server", "--hf-repo", "org/m-GGUF", "--port", "8000")
    models = workload("chat"), workload("embed", "llama_server"), workload("repo", "llama_server", argv=fetches)
    chat, embed, repo = of_kind(made(*models), "Deployment")
    probes = {name: container(one)["startupProbe"] for name, one in (("chat", chat), ("embed", embed), ("repo", repo))}
    seconds = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
    assert seconds["chat"] >= 3600
    assert seconds["repo"] >= 3600
    tokens = [each["name"] for one in (chat, embed, repo) for each in container(one)["env"] if "optional" in str(each)]
    assert tokens == ["HF_TOKEN", "HF_TOKEN"]
    assert seconds["embed"] < 600
    assert chat["spec"]["progressDeadlineSeconds"] > seconds["chat"]


CACHE = Mount("volume", "greenroom-cache", "/cache", read_only=False)


@pytest.mark.parametrize(
    ("gpus", "options", "pods"),
    [
        (1, LlmdOptions(), 1),
        (1, LlmdOptions(replicas={"a": 2}), 2),
        (16, LlmdOptions(), 2),
        (16, LlmdOptions(replicas={"a": 2}), 4),
        (1, LlmdOptions(occasional=frozenset({"a"})), 1),
        (1, LlmdOptions(occasional=frozenset({"a"}), replicas_max={"a": 3}), 3),
    ],
)
def test_as_many_nodes_as_a_model_has_pods_can_mount_its_cache(gpus: int, options: LlmdOptions, pods: int) -> None:
    """Copies, nodes of each, and what KEDA adds; a model beside it has no part in it."""
    files = made(replace(workload("a", gpus=gpus), mounts=(CACHE,)), replace(workload("b"), mounts=(CACHE,)), options=options)
    claims = {one["metadata"]["name"]: one["spec"]["accessModes"] for one in of_kind(files, "PersistentVolumeClaim")}
    mode = "ReadWriteOnce" if pods == 1 else "ReadWriteMany"
    assert claims == {"greenroom-a-cache": [mode], "greenroom-b-cache": ["ReadWriteOnce"]}
    said = re.findall(r"(\d+) pods mount the claim (\S+): its storage class must offer ReadWriteMany", files["README.md"])
    assert said == ([] if pods == 1 else [(str(pods), "greenroom-a-cache")])
    assert ("A claim that is there keeps its access modes" in files["README.md"]) == (pods > 1)


def configured(entries: dict[str, Any], options: LlmdOptions | None = None) -> dict[str, str]:
    """As the command does it."""
    config = load_config_text(dump({"models": entries}), env={})
    return dict(llm_d(build(config, mode="engines", target="nvidia", options=Options(no_auth=True)), options or LlmdOptions()))


def test_words_reach_an_engine_whose_command_holds_a_secret(tmp_path: Path) -> None:
    """Such a command goes through a shell: started for real, the engine sees all of them, and the names of clients count."""
    command = "vllm serve org/base --served-model-name own --port ${PORT} --hf-token tok-12345 --tensor-parallel-size 16"
    (spread,) = of_kind(configured({"c": {"cmd": command, "aliases": ["gpt 4"]}}), "LeaderWorkerSet")
    stand_in = tmp_path / "vllm"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    stand_in.chmod(0o755)
    parser = argparse.ArgumentParser()
    for flag, more in (("--served-model-name", {"nargs": "+"}), ("--hf-token", {}), ("--nnodes", {}), ("--node-rank", {})):
        parser.add_argument(flag, **more)
    seen = []
    for part in ("leaderTemplate", "workerTemplate"):
        (box,) = spread["spec"]["leaderWorkerTemplate"][part]["spec"]["containers"]
        (secret,) = [each["name"] for each in box["env"] if each["name"].endswith("_SECRET")]
        given = {"PATH": f"{tmp_path}:/usr/bin:/bin", secret: "it's $a secret"}
        done = subprocess.run([*box["command"], *box["args"]], env=given, capture_output=True, text=True, timeout=60, check=True)
        words = done.stdout.split("\0")[:-1]
        read, rest = parser.parse_known_args(words)
        assert (read.served_model_name, read.hf_token, read.nnodes) == (["c", "gpt 4"], "it's $a secret", "2")
        seen.append((read.node_rank, "--headless" in rest))
    assert seen == [("0", False), ("$(LWS_WORKER_INDEX)", True)]


NAMED = "exec vllm serve org/base --host 0.0.0.0 --port ${PORT}"


def test_a_script_that_answers_to_the_right_names_is_left_as_it_is() -> None:
    """By a flag in it, by the model's own name, or because it hands words on."""
    files = configured(
        {
            "chat": {"cmd": ["sh", "-c", f"{NAMED} --served-model-name chat gpt-4o"], "aliases": ["gpt-4o"]},
            "org/base": {"cmd": ["sh", "-c", NAMED]},
            "open": {"cmd": ["sh", "-c", f'{NAMED} "$@"', "sh"]},
        }
    )
    words = {one["metadata"]["annotations"]["dev.greenroom/model"]: container(one)["args"] for one in of_kind(files, "Deployment")}
    assert len(words["chat"]) == len(words["org/base"]) == 2
    assert words["open"][2:] == ["sh", "--served-model-name", "open"]


@pytest.mark.parametrize(
    ("command", "gpus", "said"),
    [
        (["sh", "-c", NAMED], 1, "c: clients send this name .* write `--served-model-name c 'gpt 4'` into it"),
        (["sh", "-c", f"{NAMED} --served-model-name c"], 1, "write `--served-model-name c 'gpt 4'` into it"),
        (["sh", "-c", f'{NAMED} "$@"'], 1, "write `--served-model-name c 'gpt 4'` into it"),
        (["sh", "-c", f"{NAMED} --served-model-name c 'gpt 4'"], 16, "spread over 2 nodes, .* write the engine's own command"),
    ],
    ids=["no name", "no alias", "its first word would be $0", "nodes"],
)
def test_a_script_that_would_swallow_words_is_refused(command: list[str], gpus: int, said: str) -> None:
    """With what to do."""
    with pytest.raises(Unfit, match=said):
        configured({"c": {"cmd": command, "aliases": ["gpt 4"], "devices_count": gpus}})


def test_no_object_has_the_name_of_another() -> None:
    """Whatever models are called: what stands beside one is called like no other, in any folder, nor like what the charts make."""
    names = ("chat", "chat-metrics", "chat-set", "chat-epp", "chat-pool", "chat-names", "chat-cache")
    files = made(*(replace(workload(name, gpus=16 if name == "chat" else 1), mounts=(CACHE,)) for name in names))
    objects = [value for folder in ("modelservers", "routing", "monitoring") for value in values(files, folder)]
    for value in objects:
        judged(value)
    places = [(value["kind"], value["metadata"]["name"]) for value in objects]
    assert len(set(places)) == len(places)
    pickers = [one["spec"]["endpointPickerRef"]["name"] for one in of_kind(files, "InferencePool")]
    assert len(set(pickers)) == len(names)
    assert not {("Service", picker) for picker in pickers} & set(places)


def test_only_engines_with_figures_are_watched() -> None:
    """Switched on where a word does it; the pickers of SGLang read them too.  Who is left out is said."""
    files = configured(
        {
            "llama": {"cmd": "llama-server -m /srv/a.gguf --port ${PORT} --api-key sk-12345"},
            "sglang": {"cmd": "sglang serve --model-path org/s --port ${PORT}"},
            "own": {"cmd": "my-engine --port ${PORT}", "container": {"image": "r/own:1"}},
        }
    )
    monitors = {one["metadata"]["name"]: one["spec"]["podMetricsEndpoints"][0] for one in of_kind(files, "PodMonitor")}
    assert {name: one["path"] for name, one in monitors.items()} == {"greenroom-llama": "/metrics", "greenroom-sglang": "/metrics"}
    assert monitors["greenroom-llama"]["authorization"]["credentials"] == {"name": "greenroom-secrets", "key": "LLAMA_SECRET"}
    args = {one["metadata"]["annotations"]["dev.greenroom/model"]: container(one)["args"] for one in of_kind(files, "Deployment")}
    assert ("--metrics" in args["llama"], "--enable-metrics" in args["sglang"]) == (True, True)
    for text in (files["README.md"], files["monitoring/kustomization.yaml"]):
        assert "no page of figures that may be asked: own.\n" in text
    alone = configured({"own": {"cmd": "my-engine --port ${PORT}", "container": {"image": "r/own:1"}}})
    assert not any(name.startswith("monitoring/") for name in alone)
    assert "apply -k monitoring" not in alone["README.md"]


def test_what_has_to_be_done_first_is_in_the_readme() -> None:
    """Secrets that pods wait for, and what could not be done as asked."""
    keyed = replace(workload("chat"), secret_env=(("VLLM_API_KEY", "CHAT_SECRET"),))
    files = made(keyed, workload("embed", "llama_server"), options=LlmdOptions(occasional=frozenset({"embed"})))
    readme = files["README.md"]
    assert "create secret generic greenroom-secrets --from-literal=CHAT_SECRET=" in readme
    assert "embed is not scaled to zero" in readme
    assert "2 GPUs held all the time." in readme


def test_the_same_intent_gives_the_same_files_and_kustomize_reads_them(tmp_path: Path) -> None:
    """As kubectl does it, offline."""
    models = [workload(name) for name in HOSTILE]
    options = LlmdOptions(occasional=frozenset(HOSTILE[:2]))
    files = made(*models, options=options)
    assert files == made(*models, options=options)
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not on PATH")
    write(files, tmp_path / "out")
    for folder in ("modelservers", "routing", "monitoring", "keda"):
        done = subprocess.run(
            [kubectl, "kustomize", str(tmp_path / "out" / folder)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        rendered = [value for value in YAML(typ="safe", pure=True).load_all(done.stdout) if value]
        assert len(rendered) == len(list(values(files, folder)))
        assert {value["metadata"]["namespace"] for value in rendered} == {"models"}
