"""llm-d without Kubernetes: every replica is listed, ports meet, and greenroom's own configuration takes the peers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.yaml_out import dump
from greenroom.deploy.build import Options, build
from greenroom.deploy.files import write
from greenroom.deploy.llmd_local import MODELS_MAX, Host, local
from greenroom.deploy.llmd_local import places as places_of
from greenroom.deploy.unfit import Unfit
from tests.deploy.test_llmd import HOSTILE, intent, read, workload
from tests.validators import tool


def test_every_replica_on_every_host_is_an_endpoint() -> None:
    """With ports that follow each other on one host, as texts, which is what the picker reads."""
    files = local(intent(workload("Org/Chat")), [Host("10.0.0.10", 2), Host("10.0.0.11")])
    (folder,) = {path.split("/")[0] for path in files if "/" in path}
    endpoints = read(files[f"{folder}/endpoints.yaml"])["endpoints"]

    assert [(one["address"], one["port"]) for one in endpoints] == [("10.0.0.10", "8000"), ("10.0.0.10", "8001"), ("10.0.0.11", "8000")]
    assert len({one["name"] for one in endpoints}) == 3
    assert {one["labels"]["model"] for one in endpoints} == {"Org/Chat"}


def test_greenroom_finds_envoy_envoy_its_picker_and_the_picker_its_endpoints() -> None:
    """Each model on ports of its own."""
    files = local(intent(*(workload(name) for name in HOSTILE)), [Host("127.0.0.1")])
    services = read(files["compose.yaml"])["services"]
    peers = read(files["peers.yaml"])["peers"]
    ports: list[int] = []

    assert [peer["models"] for peer in peers.values()] == [{name: "org/base"} for name in HOSTILE]
    for name, peer in peers.items():
        envoy = read(files[f"{name}/envoy.yaml"])["static_resources"]
        (listener,) = envoy["listeners"]
        entry = listener["address"]["socket_address"]
        assert peer["proxy"] == f"http://127.0.0.1:{entry['port_value']}"
        clusters = {cluster["name"]: cluster for cluster in envoy["clusters"]}
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        ask = manager["http_filters"][0]["typed_config"]
        assert ask["grpc_service"]["envoy_grpc"]["cluster_name"] in clusters
        assert manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["cluster"] in clusters
        (spot,) = clusters["picker"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
        grpc = spot["endpoint"]["address"]["socket_address"]["port_value"]
        command = services[f"{name}-picker"]["command"]
        assert f"--grpc-port={grpc}" in command
        told = [int(found) for word in command if (found := re.sub(r".*port=", "", word)).isdigit()]
        ports += [entry["port_value"], *told]
        config = read(files[f"{name}/picker.yaml"])
        plugin = next(one for one in config["plugins"] if one["type"] == "file-discovery")
        assert config["dataLayer"]["discovery"]["endpoints"]["pluginRef"] == plugin["name"]
        folder = next(one["target"] for one in services[f"{name}-picker"]["volumes"])
        assert plugin["parameters"]["path"] == f"{folder}/endpoints.yaml"
        assert f"--config-file={folder}/picker.yaml" in command
        scorers = {one["type"] for one in config["plugins"]}
        assert {one["pluginRef"] for one in config["schedulingProfiles"][0]["plugins"]} <= scorers
    assert len(ports) == len(set(ports)) == 4 * len(HOSTILE)


def test_names_are_those_of_clients_and_mapped_to_what_the_engines_answer_to() -> None:
    """Aliases too: a client of one would notice, else, that its model has moved."""
    plain = workload("org/base", aliases=["gpt-4o"])
    named = workload("b", argv=("vllm", "serve", "org/base", "--port", "8000", "--served-model-name", "b"))
    peers = read(local(intent(plain, named), [Host("127.0.0.1")])["peers.yaml"])["peers"]
    assert [peer["models"] for peer in peers.values()] == [{"org/base": "org/base", "gpt-4o": "org/base"}, ["b"]]


def test_ports_never_meet_up_to_the_most_models() -> None:
    """Envoys' ports and pickers' ports are two rows."""
    found = places_of([workload(str(index), name=f"m{index}") for index in range(MODELS_MAX)])
    ports = [port for one in found for port in (one.envoy, one.grpc, one.health, one.figures)]
    assert len(set(ports)) == len(ports)
    with pytest.raises(Unfit, match="at most 100"):
        places_of([workload("x", name="x")] * (MODELS_MAX + 1))


@pytest.mark.parametrize(
    ("host", "said"),
    [(Host("worker-1"), "no IPv4 address"), (Host("::1"), "no IPv4 address"), (Host("10.0.0.1", 0), "outside 1 to 100")],
)
def test_what_the_picker_cannot_use_is_refused(host: Host, said: str) -> None:
    """It resolves no names and knows no IPv6."""
    with pytest.raises(Unfit, match=said):
        local(intent(workload("a")), [host])


def test_engines_that_the_picker_cannot_read_stay_with_greenroom() -> None:
    """They are left out; when there are no others, that is said."""
    llama = workload("e", "llama_server", argv=("llama-server", "--port", "8000"))
    assert list(read(local(intent(workload("a"), llama), [Host("127.0.0.1")])["peers.yaml"])["peers"]) == ["a"]
    with pytest.raises(Unfit, match="llama_server"):
        local(intent(llama), [Host("127.0.0.1")])


def test_docker_compose_takes_the_file(tmp_path: Path) -> None:
    """The real one."""
    compose = tool("docker-compose")
    files = local(intent(*(workload(name) for name in HOSTILE)), [Host("127.0.0.1", 2)])
    write(files, tmp_path / "out")
    done = run([compose, "-f", str(tmp_path / "out" / "compose.yaml"), "config", "--format", "json"])
    assert done.returncode == 0, done.stderr


def run(argv: list[Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=60, check=False)


def test_greenroom_shows_its_engines_the_keys_they_ask_for() -> None:
    """By the variable that holds each; the keys themselves are in no file."""
    models = {
        "chat": {"cmd": "vllm serve org/base --port ${PORT} --api-key engine-key-1"},
        "code": {"cmd": "vllm serve org/code --port ${PORT}", "env": {"VLLM_API_KEY": "engine-key-2"}},
        "open": {"cmd": "vllm serve org/open --port ${PORT}"},
    }
    text = dump({"apiKeys": ["sk-client"], "models": models})
    made = build(load_config_text(text, env={}), mode="engines", target="nvidia", options=Options(no_auth=True))
    files = local(made, [Host("127.0.0.1")])
    assert not [name for name, text in files.items() if "engine-key" in text]
    variables = {one.model: one.key for one in made.workloads}
    assert f"start greenroom with {variables['chat']} (of chat), {variables['code']} (of code)" in files["peers.yaml"]
    env = {variables["chat"]: "engine-key-1", variables["code"]: "engine-key-2"}
    assert [one.key for one in load_config_text(files["peers.yaml"], env=env).peers] == ["engine-key-1", "engine-key-2", None]
    (told,) = [note for note in made.notes if "apiKeys" in note]
    assert "whoever reaches open may use them" in told
