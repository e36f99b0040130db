"""Files for Kubernetes, judged by the schemas of nine releases, by kubectl itself, and by reading them back."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from greenroom.config.load import load_config_text
from greenroom.config.model import Config, KeyConfig
from greenroom.config.yaml_out import dump
from greenroom.deploy import compose, quadlet
from greenroom.deploy.build import build
from greenroom.deploy.figures import SWITCHES
from greenroom.deploy.intent import Intent, Mount, Probe, Share, Workload
from greenroom.deploy.kube import FORMATS, kube
from greenroom.deploy.kube_pod import KubeOptions
from greenroom.deploy.names import label
from greenroom.deploy.unfit import Unfit
from tests.deploy.kube_cases import (
    CASES,
    HOSTILE_NAMES,
    VERSIONS,
    Invalid,
    by_place,
    engine,
    engines,
    kustomized,
    put,
    read_all,
    validate,
    whole,
)

Object = dict[str, Any]
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
EXPANDED = re.compile(r"\$\$|\$\(([^)]*)\)")


def made(intent: Intent, **options: Any) -> dict[tuple[str, str], Object]:
    """Every object, read back from the one-file form."""
    return by_place(read_all(kube(intent, "plain", KubeOptions(**options))["all.yaml"]))


def controllers(found: dict[tuple[str, str], Object]) -> dict[str, Object]:
    return {name: one for (kind, name), one in found.items() if kind in ("Deployment", "StatefulSet")}


def container(controller: Object) -> Object:
    only: Object
    (only,) = controller["spec"]["template"]["spec"]["containers"]
    return only


def as_kubernetes_reads(text: str, env: dict[str, str]) -> str:
    """Its expansion of commands and variables."""
    return EXPANDED.sub(lambda found: "$" if found[0] == "$$" else env.get(found[1], found[0]), text)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_object_is_valid_in_every_release(case: str, version: str) -> None:
    """Strictly: a field that the release does not know is an error."""
    for one in made(CASES[case]).values():
        assert validate(one, version) == version


@pytest.mark.parametrize("controller", ["deployment", "statefulset"])
@pytest.mark.parametrize("models", ["pvc", "image", "hostpath"])
def test_every_choice_is_valid_where_it_exists(models: str, controller: str) -> None:
    """Image volumes came with 1.31; the releases before do not know them."""
    found = made(whole(HOSTILE_NAMES[:3]), models=models, models_image="registry.local/models:1", controller=controller)
    for version in VERSIONS if models != "image" else VERSIONS[2:]:
        for one in found.values():
            validate(one, version)
    if models == "image":
        with pytest.raises(Invalid):
            [validate(one, "1.30") for one in found.values()]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every mapping in a value that the schema describes, by its path (labels and the like hold any name)."""
    free = {"labels", "annotations", "matchLabels", "selector", "limits", "requests", "data"}
    if isinstance(value, dict):
        here = [] if path and path[-1] in free - {"selector"} else [path]
        return here + [deeper for key, item in value.items() for deeper in paths_of(item, (*path, key))]
    if isinstance(value, list):
        return [deeper for index, item in enumerate(value) for deeper in paths_of(item, (*path, index))]
    return []


def test_the_validator_sees_a_misspelt_field_anywhere() -> None:
    """In each mapping of each kind of object: the tests above could fail."""
    seen = 0
    for one in made(CASES["greenroom 1"]).values():
        for path in paths_of(one):
            if path[-1:] == ("selector",) and one["kind"] == "Service":
                continue
            broken = copy.deepcopy(one)
            spot: Any = broken
            for step in path:
                spot = spot[step]
            spot["misspelt"] = "x"
            with pytest.raises(Invalid):
                validate(broken, "1.33")
            seen += 1
    assert seen > 50


@pytest.mark.parametrize("case", CASES)
def test_kubectl_renders_the_tree_to_the_same_objects(case: str, tmp_path: Path) -> None:
    """Base and overlay together are what the one file holds; all of it in the namespace that was named."""
    intent = CASES[case]
    rendered = kustomized(put(kube(intent), tmp_path) / "overlays" / intent.target)
    assert by_place(rendered) == made(intent)
    assert {one["metadata"]["namespace"] for one in rendered} == {"llm"}


def test_the_base_knows_no_hardware(tmp_path: Path) -> None:
    """It is the same for each target but for its comments, so other overlays can stand on it."""
    bases = []
    for target in ("nvidia", "amd", "intel", "cpu"):
        found = kustomized(put(kube(engines(HOSTILE_NAMES[:3], target)), tmp_path / target) / "base")
        assert "gpu" not in str([one["spec"].get("template") for one in found if "spec" in one]).replace("server-cuda", "")
        bases.append(by_place(found))
    assert all(base == bases[0] for base in bases)


@pytest.mark.parametrize(
    ("share", "asked"),
    [
        (Share("nvidia", 1), {"nvidia.com/gpu": "1"}),
        (Share("nvidia", 4), {"nvidia.com/gpu": "4"}),
        (Share("nvidia", 1, mig="3g.40gb"), {"nvidia.com/mig-3g.40gb": "1"}),
        (Share("nvidia", 1, mig="1g.10gb+me"), {"nvidia.com/mig-1g.10gb.me": "1"}),
        (Share("amd", 1), {"amd.com/gpu": "1"}),
        (Share("intel", 1), {"gpu.intel.com/i915": "1"}),
        (Share("cpu", 0), {}),
    ],
)
def test_each_target_asks_for_its_own_device(share: Share, asked: dict[str, str]) -> None:
    """As text, in the limits, and nothing of another vendor."""
    (one,) = controllers(made(engines(("a",), share.vendor, share=share))).values()
    limits = container(one)["resources"]["limits"]
    assert {name: count for name, count in limits.items() if name != "memory"} == asked


def test_a_shared_gpu_is_asked_for_by_its_own_name() -> None:
    """With renameByDefault the device plugin offers nvidia.com/gpu.shared."""
    (one,) = controllers(made(engines(("a",)), accelerator="nvidia.com/gpu.shared")).values()
    assert container(one)["resources"]["limits"] == {"memory": "9548Mi", "nvidia.com/gpu.shared": "1"}


@pytest.mark.parametrize("case", CASES)
def test_what_runs_is_what_was_meant(case: str) -> None:
    """Command, variables and mounts as Kubernetes will read them equal the intent's."""
    found = controllers(made(CASES[case]))
    for workload in CASES[case].workloads:
        box = container(found[workload.name])
        env: dict[str, str] = {}
        for item in box["env"]:
            if "value" in item:
                env[item["name"]] = as_kubernetes_reads(item["value"], env)
        assert {name: env[name] for name, _ in workload.env} == dict(workload.env)
        added = [SWITCHES[workload.kind]] if workload.kind in SWITCHES else []
        assert [as_kubernetes_reads(word, env) for word in (*box["command"], *box["args"])] == [*workload.argv, *added]
        targets = {one["mountPath"]: one for one in box["volumeMounts"]}
        for mount in workload.mounts:
            is_model = mount.kind == "bind" and mount.read_only and mount.target.startswith("/models")
            assert targets["/models" if is_model else mount.target].get("readOnly", False) == mount.read_only
        assert len(targets) == len(box["volumeMounts"])
        volumes = {one["name"] for one in found[workload.name]["spec"]["template"]["spec"]["volumes"]}
        assert volumes == {one["name"] for one in box["volumeMounts"]}
        assert box["image"] == workload.image
        assert [port["containerPort"] for port in box["ports"]] == [workload.port]


@pytest.mark.parametrize("case", CASES)
def test_probes_ask_the_right_port_and_wait_long_enough(case: str) -> None:
    """Never a route that starts a model; at least as long as a start may take."""
    found = controllers(made(CASES[case]))
    for workload in CASES[case].workloads:
        box = container(found[workload.name])
        assert workload.live is not None
        assert workload.ready is not None
        probes = {name: box[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
        assert {probe.get("httpGet", probe.get("tcpSocket"))["port"] for probe in probes.values()} == {workload.port}
        ready = workload.ready.path if workload.model else "/ready"
        assert {name: probe["httpGet"]["path"] for name, probe in probes.items() if "httpGet" in probe} == (
            {"startup": ready, "liveness": workload.live.path, "readiness": ready} if not workload.tcp_only else {}
        )
        startup = box["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= workload.ready.start_s
        assert found[workload.name]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == math.ceil(workload.stop_s)


def test_an_engine_without_a_health_page_is_asked_for_its_port() -> None:
    """An open port must do."""
    (one,) = controllers(made(engines(("a",), live=None, ready=None))).values()
    assert {name: container(one)[name].get("tcpSocket") for name in ("startupProbe", "livenessProbe", "readinessProbe")} == {
        "startupProbe": {"port": 8123},
        "livenessProbe": {"port": 8123},
        "readinessProbe": {"port": 8123},
    }


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("case", CASES)
def test_each_selector_matches_exactly_its_own_pods(case: str) -> None:
    """Of all pairs: also of names that differ in case only, or after the 63rd character."""
    found = made(CASES[case])
    pods = {name: one["spec"]["template"]["metadata"]["labels"] for name, one in controllers(found).items()}
    assert len(pods) == len(CASES[case].workloads)
    checked = 0
    for (kind, name), one in found.items():
        selector = {
            "Service": lambda one=one: one["spec"]["selector"],
            "NetworkPolicy": lambda one=one: one["spec"]["podSelector"]["matchLabels"],
            "PodDisruptionBudget": lambda one=one: one["spec"]["selector"]["matchLabels"],
            "Deployment": lambda one=one: one["spec"]["selector"]["matchLabels"],
        }.get(kind)
        if selector is not None:
            assert [pod for pod, labels in pods.items() if matches(selector(), labels)] == [name]
            checked += 1
    assert checked == 4 * len(pods)


@pytest.mark.parametrize("case", CASES)
def test_names_and_labels_are_such_as_kubernetes_takes(case: str) -> None:
    """DNS labels for objects and volumes, label values within their letters, models' names untouched in annotations."""
    found = made(CASES[case])
    for (_, name), one in found.items():
        assert NAME.fullmatch(name)
        assert len(name) <= 63
        for value in one["metadata"]["labels"].values():
            assert LABEL_VALUE.fullmatch(value)
            assert len(value) <= 63
    told = [
        one["metadata"]["annotations"]["dev.greenroom/model"] for one in controllers(found).values() if "annotations" in one["metadata"]
    ]
    assert told == [one.model for one in CASES[case].workloads if one.model]
    for one in controllers(found).values():
        assert all(NAME.fullmatch(volume["name"]) for volume in one["spec"]["template"]["spec"]["volumes"])


def test_an_engine_is_reached_by_gateways_only() -> None:
    """Its sleep and reload routes stand on the port of its requests; greenroom's own port is open to all."""
    gateway = replace(whole(("a",)).workloads[0], mounts=())
    intent = replace(engines(("a",)), workloads=(gateway, *engines(("a",)).workloads))
    found = made(intent)
    pods = {name: one["spec"]["template"]["metadata"]["labels"] for name, one in controllers(found).items()}
    (rule,) = found["NetworkPolicy", "a"]["spec"]["ingress"]
    allowed = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
    assert [name for name, labels in pods.items() if any(matches(one, labels) for one in allowed)] == ["greenroom"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8123}]
    assert found["NetworkPolicy", "greenroom"]["spec"] == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/instance": "greenroom", "app.kubernetes.io/part-of": "models"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"protocol": "TCP", "port": 8080}]}],
    }


@pytest.mark.parametrize("case", CASES)
def test_pods_hold_to_the_restricted_standard(case: str) -> None:
    """As the Pod Security Standards list it; files are written to declared places only."""
    allowed_volumes = {"configMap", "emptyDir", "persistentVolumeClaim", "image"}
    for one in controllers(made(CASES[case])).values():
        spec = one["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container(one)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not spec["automountServiceAccountToken"]
        assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
        assert all(set(volume) - {"name"} <= allowed_volumes for volume in spec["volumes"])


def test_shared_memory_is_memory_and_counts_as_such() -> None:
    """vLLM's workers talk through /dev/shm; what lies there is charged to the container."""
    (one,) = controllers(made(engines(("a",)))).values()
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2048Mi"}} in one["spec"]["template"]["spec"]["volumes"]
    asked = container(one)["resources"]
    assert asked["requests"]["memory"] == f"{6000 + 2048}Mi"
    assert asked["limits"]["memory"] == f"{7500 + 2048}Mi"


def test_nothing_is_limited_that_nobody_measured() -> None:
    """A guess as a limit would end an engine that does nothing wrong; the files say so."""
    intent = engines(("a",), memory_mib=0)
    (one,) = controllers(made(intent)).values()
    assert container(one)["resources"] == {"requests": {"cpu": "1", "memory": "6144Mi"}, "limits": {"nvidia.com/gpu": "1"}}
    assert "guess" in kube(intent, "plain")["all.yaml"]


def test_no_secret_is_written_only_its_place() -> None:
    """And a command that makes it, as a comment."""
    text = kube(CASES["greenroom 1"], "plain")["all.yaml"]
    box = container(next(iter(controllers(by_place(read_all(text))).values())))
    (item,) = [one for one in box["env"] if "valueFrom" in one]
    assert item == {"name": "GREENROOM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "greenroom-secrets", "key": "GREENROOM_API_KEY"}}}
    assert "# Secrets are referred to" in text
    assert 'create secret generic greenroom-secrets --from-literal=GREENROOM_API_KEY="$GREENROOM_API_KEY"' in text


def test_another_configuration_makes_new_pods() -> None:
    """And the same one does not."""
    one = whole(("a",))
    digests = [
        next(iter(controllers(made(intent)).values()))["spec"]["template"]["metadata"]["annotations"]["dev.greenroom/config-sha256"]
        for intent in (one, replace(one, config_text=one.config_text + "# more\n"), one)
    ]
    assert digests[0] == digests[2] != digests[1]
    assert made(one)["ConfigMap", "greenroom-config"]["data"] == {"greenroom.yaml": one.config_text}


def test_claims_are_shared_only_where_they_must_be() -> None:
    """One pod may have a disk of its own; several need one that many nodes can mount."""
    assert made(engines(("a",)))["PersistentVolumeClaim", "models-models"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert made(engines(("a", "b")))["PersistentVolumeClaim", "models-models"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_what_an_engine_downloads_is_in_a_claim_of_its_own() -> None:
    """Another model changes nothing of it: access modes of a claim that is there cannot be changed."""
    entries = {name: {"cmd": f"vllm serve org/{name} --port ${{PORT}}"} for name in ("a", "b", "c")}

    def claims(count: int) -> dict[str, Object]:
        text = dump({"models": dict(list(entries.items())[:count])})
        found = made(build(load_config_text(text, env={}), mode="engines", target="nvidia"))
        mounted = {
            name: [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]
            for name, one in controllers(found).items()
            for volumes in [one["spec"]["template"]["spec"]["volumes"]]
        }
        assert mounted == {f"greenroom-{name}": [f"greenroom-{name}-cache"] for name in list(entries)[:count]}
        return {name: one["spec"] for (kind, name), one in found.items() if kind == "PersistentVolumeClaim"}

    one, three = claims(1), claims(3)
    assert one.items() < three.items()
    assert [spec["accessModes"] for spec in three.values()] == [["ReadWriteOnce"]] * 3


def test_a_claim_holds_one_thing() -> None:
    """Two that would share one are refused, not mixed."""
    files, written = Mount("bind", "/srv/m.gguf", "/models/m.gguf"), Mount("bind", "/models", "/out", read_only=False)
    found = made(engines(("a",), mounts=(files, written)))
    assert {name for kind, name in found if kind == "PersistentVolumeClaim"} == {"models-models", label("models-/models")}
    mounts = (Mount("volume", "models-cache", "/cache", read_only=False), Mount("bind", "/a-cache", "/out", read_only=False))
    with pytest.raises(Unfit, match="the claim models-a-cache would hold both a-cache and /a-cache"):
        kube(engines(("a",), mounts=mounts))


FOLDERS = (
    Mount("bind", "/srv/gguf/my model.gguf", "/models/my-model.gguf"),
    Mount("bind", "/opt/vision/", "/models/vision"),
    Mount("bind", "/var/cache/hf", "/var/cache/hf", read_only=False),
)


def test_model_files_stand_in_one_volume_at_their_places() -> None:
    """No path is made by mounting it: a missing file is told by the engine. What is written to has a claim of its own."""
    found = made(engines(("a",), mounts=FOLDERS, env=(), shm_mib=0))
    (one,) = controllers(found).values()
    assert {box["mountPath"]: (box["name"], box.get("readOnly", False)) for box in container(one)["volumeMounts"]} == {
        "/models": ("models", True),
        "/var/cache/hf": (label("bind-/var/cache/hf"), False),
        "/tmp": ("tmp", False),
        "/home/greenroom": ("home", False),
    }
    claims = {name for kind, name in found if kind == "PersistentVolumeClaim"}
    assert len(claims) == 2
    assert "models-models" in claims
    text = kube(engines(("a",), mounts=FOLDERS), "plain")["all.yaml"]
    assert "/opt/vision/ -> vision, /srv/gguf/my model.gguf -> my-model.gguf" in text


def test_two_files_of_one_place_stand_in_two_folders() -> None:
    """Each pod sees its own at the place that its command names; who has the same file shares it."""
    paths = {"a": "/srv/a/same.gguf", "b": "/srv/b/same.gguf", "c": "/srv/a/same.gguf"}
    one_by_one = [engine(name, name, mounts=(Mount("bind", path, "/models/same.gguf"),)) for name, path in paths.items()]
    intent = replace(engines(("a",)), workloads=tuple(one_by_one))
    found = controllers(made(intent))
    boxes = {name: container(one)["volumeMounts"] for name, one in found.items()}
    folders = {name: [box.get("subPath") for box in mounts if box["name"] == "models"] for name, mounts in boxes.items()}
    assert folders == {"a": [None], "b": ["b"], "c": [None]}
    text = kube(intent)["loader/pod.yaml"]
    assert "mkdir -p /models/b\n" in text
    assert "cp /srv/b/same.gguf models-loader:/models/b/same.gguf\n" in text


def test_a_pod_to_fill_the_claim_with_is_there_and_is_nobody_elses() -> None:
    """Valid, restricted, matched by no selector; its head says how files get in."""
    intent = engines(HOSTILE_NAMES[:3], mounts=(*FOLDERS, Mount("bind", "/srv/it's\nhere", "/models/x")))
    text = kube(intent)["loader/pod.yaml"]
    (pod,) = read_all(text)
    for version in VERSIONS:
        validate(pod, version)
    assert pod["spec"]["volumes"] == [{"name": "models", "persistentVolumeClaim": {"claimName": "models-models"}}]
    assert "# kubectl --namespace llm cp '/srv/gguf/my model.gguf' models-loader:/models/my-model.gguf\n" in text
    for (kind, _), one in made(intent).items():
        if kind == "Service":
            assert not matches(one["spec"]["selector"], pod["metadata"]["labels"])
    assert "loader/pod.yaml" not in kube(intent, options=KubeOptions(models="hostpath"))


def test_the_image_that_no_registry_has_comes_with_its_containerfile() -> None:
    """And the files say what to do with it."""
    intent = replace(whole(("a",), image="localhost/greenroom:1-cpu"), builds="FROM scratch\n")
    for form in FORMATS:
        files = kube(intent, form)
        assert files.get("Containerfile") == (None if form == "plain" else "FROM scratch\n")
        assert any("push it, and generate again with --image" in text for text in files.values())


def test_what_stands_below_the_models_has_a_place_to_stand() -> None:
    """A volume that is read-only can hold no mount of another: then each file is mounted by itself."""
    mounts = (Mount("image", "registry.local/agent:1", "/models/agent"), Mount("bind", "/srv/chat.jinja", "/models/chat.jinja"))
    (one,) = controllers(made(engines(("a",), mounts=mounts))).values()
    boxes = {box["mountPath"]: box for box in container(one)["volumeMounts"]}
    assert boxes["/models/chat.jinja"] == {
        "name": "models",
        "mountPath": "/models/chat.jinja",
        "subPath": "chat.jinja",
        "readOnly": True,
    }
    assert boxes["/models/agent"]["readOnly"]
    assert "/models" not in boxes


def test_folders_of_a_node_are_mounted_each_by_itself() -> None:
    """With --models hostpath."""
    (one,) = controllers(made(engines(("a",), mounts=FOLDERS), models="hostpath")).values()
    volumes = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in one["spec"]["template"]["spec"]["volumes"]}
    assert {box["mountPath"]: volumes[box["name"]] for box in container(one)["volumeMounts"] if volumes[box["name"]]} == {
        mount.target: mount.source for mount in FOLDERS
    }


def test_an_image_brings_the_model_files() -> None:
    """Laid out as `greenroom push --layout image` does: below /models of the image; what is written to keeps its claim."""
    found = made(engines(("a",), mounts=FOLDERS), models="image", models_image="registry.local/m:1")
    (one,) = controllers(found).values()
    (box,) = [box for box in container(one)["volumeMounts"] if box["name"] == "models"]
    assert box == {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "models"}
    volumes = {volume["name"]: volume for volume in one["spec"]["template"]["spec"]["volumes"]}
    assert volumes["models"]["image"] == {"reference": "registry.local/m:1", "pullPolicy": "IfNotPresent"}
    assert len([name for kind, name in found if kind == "PersistentVolumeClaim"]) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_intent_gives_the_same_bytes(form: str) -> None:
    """Twice, and made anew."""
    assert kube(engines(HOSTILE_NAMES), form) == kube(engines(HOSTILE_NAMES), form) == kube(CASES["engines 12"], form)


@pytest.mark.parametrize("form", FORMATS)
def test_no_name_gets_out_of_its_comment_or_folder(form: str) -> None:
    """Line ends in model names would be lines of their own; file names hold no dots that lead elsewhere."""
    files = kube(replace(CASES["engines 12"], notes=("a note\nkind: Secret\x00",)), form)
    assert not any("\n" + "line: injected" in text or "\nkind: Secret" in text for text in files.values())
    assert all(".." not in name.split("/") and not name.startswith("/") for name in files)


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    """One sentence each: what, why, what to do."""
    with pytest.raises(Unfit, match="no model to deploy"):
        kube(replace(CASES["engines 1"], workloads=()))
    with pytest.raises(Unfit, match="--models-image"):
        kube(CASES["engines 1"], options=KubeOptions.of({"models": "image"}))
    for name, wrong in (("models_size", "big"), ("storage_class", "a b"), ("accelerator", "gpu"), ("models_image_path", "../etc")):
        with pytest.raises(Unfit, match=f"{name.replace('_', ' ')} cannot be {re.escape(repr(wrong))}: write one such as"):
            KubeOptions.of({name: wrong})
    with pytest.raises(Unfit, match="cannot be a namespace"):
        kube(replace(CASES["engines 1"], namespace="My Space"))
    with pytest.raises(Unfit, match="no variable called 'A B'"):
        kube(engines(("a",), env=(("A B", "x"),)))
    with pytest.raises(Unfit, match="at most 52 characters"):
        kube(whole(("a",), name="g" * 60), options=KubeOptions(controller="statefulset"))
    with pytest.raises(Unfit, match="is one of pvc, image, hostpath"):
        KubeOptions.of({"models": "nfs"})
    with pytest.raises(Unfit, match="two things at /models"):
        kube(engines(("a",), mounts=(Mount("bind", "/a", "/models"), Mount("bind", "/b", "/models/"))))
    with pytest.raises(Unfit, match="kind 'nfs'"):
        kube(engines(("a",), mounts=(Mount("nfs", "/a", "/b"),)))
    with pytest.raises(Unfit, match="1,048,576"):
        kube(replace(CASES["greenroom 1"], config_text="é" * 600_000))
    with pytest.raises(Unfit, match="two objects would be"):
        kube(Intent("x", "engines", (engine("a", "a"), engine("b", "a")), Config("", ()), "", "cpu"))


def test_prometheus_is_let_in_only_when_asked(tmp_path: Path) -> None:
    """Its own kind may be unknown to a cluster: monitoring is a component that the overlay can name."""
    keyed = replace(CASES["engines 3"].config, keys=(KeyConfig("secret", "all"),))
    intent = replace(CASES["engines 3"], config=keyed)
    folder = put(kube(intent), tmp_path) / "overlays" / "nvidia"
    assert not any(one["kind"] == "ServiceMonitor" for one in kustomized(folder))
    (folder / "kustomization.yaml").write_text(
        (folder / "kustomization.yaml").read_text().replace("# components:\n#   - ", "components:\n  - ")
    )
    found = by_place(kustomized(folder))
    services = {name: one["metadata"]["labels"] for (kind, name), one in found.items() if kind == "Service"}
    watched = {name: one["spec"]["selector"]["matchLabels"] for (kind, name), one in found.items() if kind == "ServiceMonitor"}
    assert {name: [one for one, labels in services.items() if matches(wanted, labels)] for name, wanted in watched.items()} == {
        name: [name] for name in services
    }
    assert sum(kind == "NetworkPolicy" for kind, _ in found) == 2 * len(services)
    schema = json.loads((Path(__file__).parent / "kube_schemas" / "ServiceMonitor.json").read_text())
    for (kind, _), one in found.items():
        if kind == "ServiceMonitor":
            jsonschema.validate(one, schema)
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**one, "spec": {**one["spec"], "endpoint": []}}, schema)


def monitored(intent: Intent, folder: Path) -> dict[tuple[str, str], Object]:
    """With the component for monitoring switched on, as kubectl makes it."""
    overlay = put(kube(intent), folder) / "overlays" / intent.target / "kustomization.yaml"
    overlay.write_text(overlay.read_text().replace("# components:\n#   - ", "components:\n  - "))
    return by_place(kustomized(overlay.parent))


def test_the_way_in_for_prometheus_is_no_other_models(tmp_path: Path) -> None:
    """Whatever models are called: `chat-metrics` is one beside `chat`."""
    found = monitored(engines(("chat", "chat-metrics")), tmp_path)
    policies = {name: one["spec"] for (kind, name), one in found.items() if kind == "NetworkPolicy"}
    ways_in = {
        one["podSelector"]["matchLabels"]["app.kubernetes.io/instance"]
        for one in policies.values()
        if "namespaceSelector" in one["ingress"][0]["from"][0]
    }
    assert (len(policies), ways_in) == (4, {"chat", "chat-metrics"})


def test_only_pages_that_are_there_are_asked_for(tmp_path: Path) -> None:
    """Switched on where a word does it, at the path and with the key that it wants; what has none is left out, and that is said."""
    entries: dict[str, dict[str, Any]] = {
        "llama": {"cmd": "llama-server -m /srv/a.gguf --port ${PORT} --api-prefix /x --api-key sk-12345"},
        "told": {"cmd": "llama-server -m /srv/a.gguf --port ${PORT}", "env": {"LLAMA_ARG_ENDPOINT_METRICS": "1"}},
        "sleeps": {"cmd": "llama-server -m /srv/a.gguf --port ${PORT} --sleep-idle-seconds 60"},
        "locked": {"cmd": "llama-server -m /srv/a.gguf --port ${PORT} --api-key-file /srv/key"},
        "script": {"cmd": "sh -c 'exec llama-server -m /srv/a.gguf --host 0.0.0.0 --port ${PORT}'"},
        "sglang": {"cmd": "sglang serve --model-path org/s --port ${PORT} --admin-api-key=sk-67890"},
        "vllm": {"cmd": "vllm serve org/v --port ${PORT} --api-key sk-12345"},
        "tei": {"cmd": "text-embeddings-router --model-id a/b --port ${PORT}"},
        "own": {"cmd": "my-engine --port ${PORT}", "container": {"image": "r/own:1"}},
    }
    intent = build(load_config_text(dump({"models": entries}), env={}), mode="engines", target="nvidia")
    found = monitored(intent, tmp_path)
    endpoints = {
        name.removeprefix("greenroom-"): one["spec"]["endpoints"][0] for (kind, name), one in found.items() if kind == "ServiceMonitor"
    }
    assert {name: one["path"] for name, one in endpoints.items()} == {
        "llama": "/x/metrics",
        **dict.fromkeys(("told", "sglang", "vllm", "tei"), "/metrics"),
    }
    keys = {name: one["authorization"]["credentials"] for name, one in endpoints.items() if "authorization" in one}
    assert keys == {"llama": {"name": "greenroom-secrets", "key": dict(intent.workloads[0].secret_env)["LLAMA_API_KEY"]}}
    words = {name.removeprefix("greenroom-"): container(one)["args"] for name, one in controllers(found).items()}
    assert {name for name, args in words.items() if args[-1] == SWITCHES["llama_server"]} == {"llama"}
    assert {name for name, args in words.items() if args[-1] == SWITCHES["sglang"]} == {"sglang"}
    said = "that may be asked: sleeps, locked, script, own.\n"
    assert said in (tmp_path / "components" / "monitoring" / "kustomization.yaml").read_text()
    assert said in kube(intent, "helm")["values.yaml"]


def test_where_nobody_can_be_watched_there_is_no_component() -> None:
    """An empty one is an error to kustomize."""
    files = kube(engines(("a",), kind="generic", source=None))
    assert not any("monitoring" in name for name in files)
    assert "monitoring" not in files["overlays/nvidia/kustomization.yaml"]


def test_a_set_of_any_name_can_be_written() -> None:
    """The name of the set becomes one that Kubernetes takes."""
    found = made(replace(CASES["greenroom 1"], name="Mein Schrank / 1"))
    assert all(NAME.fullmatch(name) for _, name in found)


def test_a_home_that_is_mounted_gets_no_second_place() -> None:
    """HOME below a claim stays there; elsewhere it is an empty folder of the pod."""
    env = (("HOME", "/state"),)
    mounts = (Mount("volume", "state", "/state", read_only=False),)
    box = container(next(iter(controllers(made(engines(("a",), env=env, mounts=mounts))).values())))
    assert [one["mountPath"] for one in box["volumeMounts"]] == ["/state", "/tmp", "/dev/shm"]
    assert [one for one in box["env"] if one["name"] == "HOME"] == [{"name": "HOME", "value": "/state"}]


def test_a_probe_may_stand_on_another_port() -> None:
    """As an engine with a port of its own for health would have it."""
    (one,) = controllers(made(engines(("a",), ready=Probe("/h", 9000, 30.0), live=Probe("/h", 9000, 30.0)))).values()
    assert container(one)["readinessProbe"]["httpGet"]["port"] == 9000


def test_workloads_are_plain_values() -> None:
    """Nothing is read from this machine: an intent for hardware that is not here is written all the same."""
    assert isinstance(CASES["engines 1"].workloads[0], Workload)
    assert kube(engines(("a",), "amd"), "plain") == kube(engines(("a",), "amd"), "plain")


def test_a_port_below_1024_can_be_listened_on() -> None:
    """Nobody has privileges in these containers: the network of such a one allows it, in each format, and of no other."""
    entries = {
        "low": {"cmd": "docker run --rm -p ${PORT}:80 ghcr.io/huggingface/text-embeddings-inference:cpu-1.8 --model-id a/b"},
        "high": {"cmd": "llama-server -m /srv/a.gguf --port ${PORT}"},
    }
    intent = build(load_config_text(dump({"models": entries}), env={}), mode="engines", target="cpu")
    name = "net.ipv4.ip_unprivileged_port_start"
    pods = {one["metadata"]["name"]: one for one in made(intent).values() if one["kind"] == "Deployment"}
    found = {who: one["spec"]["template"]["spec"]["securityContext"].get("sysctls") for who, one in pods.items()}
    assert found == {"greenroom-low": [{"name": name, "value": "80"}], "greenroom-high": None}
    for one in pods.values():
        validate(one, "1.33")
    units = quadlet.files(intent)
    assert f"\nSysctl={name}=80\n" in units["greenroom-low.container"]
    assert "Sysctl" not in units["greenroom-high.container"]
    services = yaml.safe_load(compose.files(intent)["compose.yaml"])["services"]
    assert (services["greenroom-low"]["sysctls"], services["greenroom-high"].get("sysctls")) == ({name: "80"}, None)
