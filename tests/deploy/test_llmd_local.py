"""llm-d without Kubernetes: every replica is listed, ports meet, and greenroom's own configuration takes the peers."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
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


def spots(files: dict[str, str]) -> dict[str, list[tuple[str, int]]]:
    """Folder of a model -> where its replicas are."""
    return {
        path.split("/")[0]: [(one["address"], int(one["port"])) for one in read(text)["endpoints"]]
        for path, text in files.items()
        if path.endswith("/endpoints.yaml")
    }


def configured(entries: dict[str, Any], hosts: list[Host], **top: Any) -> dict[str, str]:
    config = load_config_text(dump({**top, "models": entries}), env={})
    return dict(local(build(config, mode="engines", target="nvidia", options=Options(no_auth=True)), hosts))


def test_no_replica_listens_where_another_does() -> None:
    """Each model has a row of ports as wide as the most replicas on a host; what a command names is kept, what docker publishes counts."""
    entries: dict[str, Any] = {
        **{name: {"cmd": f"vllm serve org/{name} --port ${{PORT}}"} for name in ("a", "b", "c")},
        "fixed": {"cmd": "vllm serve org/f --port 5802", "proxy": "http://127.0.0.1:5802"},
        "d1": {"cmd": "docker run --rm -p ${PORT}:8000 vllm/vllm-openai:1 --model org/d"},
        "d2": {"cmd": "docker run --rm -p ${PORT}:8000 vllm/vllm-openai:1 --model org/d"},
    }
    files = configured(entries, [Host("10.0.0.10", 2), Host("10.0.0.11", 3), Host("10.0.0.12")])
    found = spots(files)
    taken = [spot for own in found.values() for spot in own]

    assert len(set(taken)) == len(taken) == 6 * len(entries)
    assert found["greenroom-fixed"][0] == ("10.0.0.10", 5802)
    for own in found.values():
        first = own[0][1]
        assert own == [
            *(("10.0.0.10", first + index) for index in range(2)),
            *(("10.0.0.11", first + index) for index in range(3)),
            ("10.0.0.12", first),
        ]
    blocks = sorted(own[0][1] for own in found.values())
    assert all(later - earlier >= 3 for earlier, later in pairwise(blocks))


def test_the_readme_has_the_ports_that_the_pickers_read() -> None:
    """Who starts a replica looks there; SGLang's figures have to be switched on by hand."""
    entries = {"a|b": {"cmd": "vllm serve org/a --port ${PORT}"}, "s": {"cmd": "sglang serve --model-path org/s --port ${PORT}"}}
    files = configured(entries, [Host("10.0.0.10", 2), Host("10.0.0.11")])
    rows = dict(re.findall(r"^\| (\S+) \| (\d+ to \d+ \| \d+) \|$", files["README.md"], re.MULTILINE))
    ports = [[port for _, port in own] for own in spots(files).values()]
    assert list(rows) == ["a\\|b", "s"]
    assert list(rows.values()) == [f"{first} to {second} | {other}" for first, second, other in ports]
    assert "s: its picker reads its figures, which it has with `--enable-metrics` only." in files["README.md"]


def test_model_servers_leave_the_ports_of_pickers_and_envoys_alone() -> None:
    """They may run on the same host."""
    entries = {f"m{index}": {"cmd": f"vllm serve org/{index} --port ${{PORT}}"} for index in range(4)}
    files = configured(entries, [Host("127.0.0.1", 2)], startPort=8078)
    services = read(files["compose.yaml"])["services"]
    own = {int(word.rpartition("=")[2]) for one in services.values() for word in one["command"] if "port=" in word}
    own |= {int(peer["proxy"].rpartition(":")[2]) for peer in read(files["peers.yaml"])["peers"].values()}
    assert len(own) == 16
    assert not own & {port for spot in spots(files).values() for _, port in spot}


def test_ports_end() -> None:
    """A model whose replicas would stand beyond the last one is refused, with what to do."""
    entries = {name: {"cmd": f"vllm serve org/{name} --port ${{PORT}}"} for name in ("a", "b", "c")}
    assert max(port for own in spots(configured(entries, [Host("10.0.0.1", 2)], startPort=65530)).values() for _, port in own) == 65535
    with pytest.raises(Unfit, match=r"c: no 2 ports in a row are left from startPort 65531 to 65535 .* fewer replicas"):
        configured(entries, [Host("10.0.0.1", 2)], startPort=65531)


def test_a_host_is_named_once() -> None:
    """Its replicas would be counted from the same port twice."""
    with pytest.raises(Unfit, match=r"10\.0\.0\.1 is named more than once"):
        local(intent(workload("a")), [Host("10.0.0.1"), Host("10.0.0.1", 2)])


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
