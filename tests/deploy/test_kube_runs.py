"""Containers of generated pods run for real: command, variables and files as Kubernetes would give them, and a question asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.kube_cases import by_place, kustomized, read_all
from tests.deploy.test_kube import as_kubernetes_reads, container, controllers
from tests.deploy.test_runs import DOWN_S_MAX, GREENROOM, ask, config, generate, running, until_healthy

pytestmark = pytest.mark.engine

Objects = dict[tuple[str, str], dict[str, Any]]
KEY = "sk-of-the-cluster"


def objects(folder: Path, *words: str, cwd: Path) -> Objects:
    """As `kubectl apply -k` would send them."""
    generate("kube", "-c", "greenroom.yaml", "--target", "cpu", "-o", str(folder), *words, cwd=cwd)
    return by_place(kustomized(folder / "overlays" / "cpu"))


def places(pod: dict[str, Any], found: Objects, folder: Path) -> dict[str, Path]:
    """Path inside -> the same on this host: claims and empty folders are made, the ConfigMap is written."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    out = {}
    for mount in pod["containers"][0]["volumeMounts"]:
        volume = volumes[mount["name"]]
        where = folder / mount["name"] / mount.get("subPath", "")
        if "configMap" in volume:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(found["ConfigMap", volume["configMap"]["name"]]["data"][mount["subPath"]])
        else:
            where.mkdir(parents=True, exist_ok=True)
        out[mount["mountPath"]] = where
    return out


def outside(text: str, where: dict[str, Path]) -> str:
    """Paths of the container as they are on this host; longer ones first, whole ones only."""
    inside = "|".join(re.escape(path) for path in sorted(where, key=len, reverse=True))
    return re.sub(rf"(?<![\w/.-])({inside})(?![\w-])", lambda found: str(where[found[1]]), text)


def fill(loader: str, where: dict[str, Path]) -> None:
    """Does what the head of the loader says: copies the files that it names to the places that it names."""
    copies = re.findall(r"^# kubectl .* cp (?:'([^']+)'|(\S+)) \S+?:(\S+)$", loader, re.MULTILINE)
    assert copies
    for quoted, bare, target in copies:
        shutil.copyfile(quoted or bare, outside(target, where))


def variables(box: dict[str, Any], where: dict[str, Path], secrets: dict[str, str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for item in box["env"]:
        if "value" in item:
            env[item["name"]] = outside(as_kubernetes_reads(item["value"], env), where)
        else:
            env[item["name"]] = secrets[item["valueFrom"]["secretKeyRef"]["key"]]
    return env


def probe(box: dict[str, Any], name: str, port: int) -> int:
    path = box[f"{name}Probe"]["httpGet"]["path"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DOWN_S_MAX) as answer:
        status: int = answer.status
        return status


def starts(port: int) -> list[int]:
    """How often each model was started."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/status", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=DOWN_S_MAX) as answer:
        return [model["starts"] for model in json.load(answer)["models"]]


def test_the_pod_of_greenroom_serves(tmp_path: Path, llama_server: Path, tiny_chat: Path, free_port: Callable[[], int]) -> None:
    """With its ConfigMap, its claim filled as the loader says, and the key of its Secret; its probes wake nobody."""
    port, start_port = free_port(), free_port()
    config(tmp_path, tiny_chat, llama_server, port, start_port)
    found = objects(tmp_path / "out", cwd=tmp_path)
    (controller,) = controllers(found).values()
    pod, box = controller["spec"]["template"]["spec"], container(controller)
    where = places(pod, found, tmp_path / "volumes")
    fill((tmp_path / "out" / "loader" / "pod.yaml").read_text(), where)
    inside = where["/etc/greenroom/greenroom.yaml"]
    inside.write_text(outside(inside.read_text(), where))
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "llama-server").symlink_to(llama_server)
    env = variables(box, where, {"GREENROOM_API_KEY": KEY}) | {"PATH": f"{programs}:{os.environ['PATH']}"}
    assert box["command"] == ["greenroom"]
    words = [outside(as_kubernetes_reads(word, env), where) for word in box["args"]]
    argv = [str(GREENROOM), *(word.replace("0.0.0.0:8080", f"127.0.0.1:{port}") for word in words)]
    with running(argv, env, tmp_path / "log") as process:
        until_healthy(process, port, tmp_path / "log")
        assert {name: probe(box, name, port) for name in ("startup", "liveness", "readiness")} == dict.fromkeys(
            ("startup", "liveness", "readiness"), 200
        )
        assert starts(port) == [0], "probes start nothing"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(port, "org/tiny:1 q4")
        assert ask(port, "org/tiny:1 q4", KEY)["choices"][0]["message"]["role"] == "assistant"
        assert starts(port) == [1]
        process.terminate()
        assert process.wait(DOWN_S_MAX) == 0, (tmp_path / "log").read_text(errors="replace")


@pytest.mark.parametrize("form", ["kustomize", "plain"])
def test_the_pod_of_an_engine_serves(form: str, tmp_path: Path, llama_server: Path, tiny_chat: Path, free_port: Callable[[], int]) -> None:
    """One pod a model: it answers on the port of its Service by the model's name, is ready by its own probe, and has figures."""
    start_port = free_port()
    config(tmp_path, tiny_chat, llama_server, free_port(), start_port)
    found = objects(tmp_path / "out", "--mode", "engines", cwd=tmp_path)
    if form == "plain":
        generate("kube", "greenroom.yaml", "--mode", "engines", "--target", "cpu", "--format", form, "-o", "out", cwd=tmp_path)
        found = by_place(read_all((tmp_path / "out" / "all.yaml").read_text()))
    ((name, controller),) = controllers(found).items()
    pod, box = controller["spec"]["template"]["spec"], container(controller)
    where = places(pod, found, tmp_path / "volumes")
    fill((tmp_path / "out" / "loader" / "pod.yaml").read_text(), where)
    assert found["Service", name]["spec"]["ports"][0]["port"] == start_port
    assert box["command"] == ["/app/llama-server"]
    env = variables(box, where, {})
    assert env["NOTE"] == '50% "x" \\d$HOME'
    words = [outside(as_kubernetes_reads(word, env), where) for word in box["args"]]
    with running([str(llama_server), *(word.replace("0.0.0.0", "127.0.0.1") for word in words)], env, tmp_path / "log") as process:
        until_healthy(process, start_port, tmp_path / "log")
        assert probe(box, "readiness", start_port) == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{start_port}/metrics", timeout=DOWN_S_MAX) as figures:
            assert b"llamacpp:" in figures.read()
        answer = ask(start_port, "org/tiny:1 q4")
        assert answer["model"] == controller["metadata"]["annotations"]["dev.greenroom/model"] == "org/tiny:1 q4"
