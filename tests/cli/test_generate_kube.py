"""`greenroom generate kube | mig | mps | time-slicing` as they are typed: files, refusals, and nothing called or asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.cli import generate_options
from greenroom.config.load import load_config_text
from greenroom.config.yaml_out import dump
from greenroom.proxy.guards import Guards
from greenroom.proxy.targets import Kind
from tests.cli.test_generate import PROGRAMS, run, tree
from tests.cli.test_past import written
from tests.deploy.kube_cases import by_place, kustomized, read_all
from tests.deploy.test_kube import container, controllers
from tests.planner.test_thrash import AGENT, CODER, SMALL, alternating, scene_with, setup_of

FORMS = (
    ("kube",),
    ("kube", "--format", "helm"),
    ("kube", "--format", "plain", "--mode", "engines"),
    ("kube", "--mode", "engines", "--share-by", "mig", "--gpu-type", "H100-80GB"),
    ("mig", "--gpu-type", "H100-80GB"),
    ("mps", "--gpu-type", "H200", "--need", "agent=20GiB"),
    ("time-slicing", "--gpu-type", "H100-80GB"),
)
IDS = [" ".join(words) for words in FORMS]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three models on GPUs and one on the CPU."""
    models = {
        "agent": {"cmd": "vllm serve /srv/models/agent --port ${PORT} --gpu-memory-utilization 0.45", "env": ["HF_TOKEN=hf_0123456789"]},
        "org/embed:1 q4": {"cmd": "llama-server -m '/srv/my models/e.gguf' --embedding --port ${PORT}", "memory": "3GiB"},
        "rerank": {"cmd": "llama-server -m /srv/models/r.gguf --reranking --port 8123", "proxy": "http://127.0.0.1:8123", "memory": "6GiB"},
        "tiny": {"cmd": "llama-server -m /srv/models/t.gguf --port ${PORT}", "device": "ram", "memory": "1GiB"},
    }
    (tmp_path / "greenroom.yaml").write_text(dump({"models": models}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", FORMS, ids=IDS)
def test_only_files_are_written_and_nothing_is_called(home: Path, words: tuple[str, ...]) -> None:
    """Stand-ins for every program that could start something see no call; a second run changes nothing, and --diff says so."""
    stand_ins, calls = home / "bin", home / "calls"
    stand_ins.mkdir()
    for name in PROGRAMS:
        (stand_ins / name).write_text(f'#!/bin/sh\necho "{name} $*" >>"{calls}"\n')
        (stand_ins / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}"}
    greenroom = Path(sys.executable).with_name("greenroom")
    for extra in ((), ("--force",), ("--diff",)):
        typed = [greenroom, "generate", f"{words[0]}:out", *words[1:], *extra]
        done = subprocess.run(typed, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "", "nothing would change"
    assert not calls.exists()
    assert not any(b"hf_0123456789" in text for text in tree(home / "out").values())
    assert sorted(path.name for path in home.iterdir()) == ["bin", "greenroom.yaml", "out"]


@pytest.mark.parametrize("words", FORMS, ids=IDS)
def test_a_target_that_is_named_is_not_looked_for(home: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files on every host."""

    def look() -> str:
        raise AssertionError("the host was looked at")

    monkeypatch.setattr(generate_options, "found_vendor", look)
    named = ("--target", "nvidia") if words[0] == "kube" and "--share-by" not in words else ()
    assert run(*words, *named).exit_code == 0


@pytest.mark.parametrize("target", ["nvidia", "amd", "intel", "cpu"])
def test_each_target_has_its_own_overlay(home: Path, target: str) -> None:
    """Devices of the vendor named, and of no other; a model of the host's RAM asks for none."""
    images = ("--engine-image", "vllm=registry.local/vllm:1")
    done = run("kube", "--mode", "engines", "--target", target, *images, "-o", "out")
    assert done.exit_code == 0, done.output
    found = controllers(by_place(kustomized(home / "out" / "overlays" / target)))
    resource = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/i915", "cpu": ""}[target]
    asked = {name: [key for key in container(one)["resources"].get("limits", {}) if key != "memory"] for name, one in found.items()}
    assert asked.pop("greenroom-tiny") == []
    assert all(found == ([resource] if resource else []) for found in asked.values())
    assert len(asked) == 3


def test_a_mig_slice_is_asked_for_by_its_name(home: Path) -> None:
    """As `--mig` says."""
    done = run("kube", "--mode", "engines", "--target", "nvidia", "--mig", "3g.40gb", "--format", "plain")
    limits = [container(one)["resources"].get("limits", {}) for one in controllers(by_place(read_all(done.output))).values()]
    assert sum(one.get("nvidia.com/mig-3g.40gb") == "1" for one in limits) == 3


def test_clients_must_show_a_key(home: Path) -> None:
    """The port is open to a cluster; without --no-auth the pod waits for the key's Secret."""
    keyed = container(controllers(by_place(read_all(run("kube", "--target", "cpu", "--format", "plain").output)))["greenroom"])
    assert "GREENROOM_API_KEY" in [item["name"] for item in keyed["env"]]
    assert "--no-auth" not in keyed["args"]
    done = run("kube", "--target", "cpu", "--format", "plain", "--no-auth")
    open_to_all = container(controllers(by_place(read_all(done.output)))["greenroom"])
    assert "GREENROOM_API_KEY" not in [item["name"] for item in open_to_all["env"]]
    assert "--no-auth" in open_to_all["args"]
    assert "Without API keys greenroom answers to addresses and the names in allowed_hosts alone" in done.output


def test_without_keys_greenroom_answers_to_its_service(home: Path) -> None:
    """Every name that a cluster gives its Service is known to the guard of the configuration in the ConfigMap; others are not."""
    text = run("kube", "--target", "cpu", "--format", "plain", "--no-auth", "--namespace", "ai", "--name", "llm").output
    found = by_place(read_all(text))
    (service,) = (one["metadata"]["name"] for (kind, _), one in found.items() if kind == "Service")
    mounted = found["ConfigMap", f"{service}-config"]["data"]["greenroom.yaml"]
    guards = Guards("0.0.0.0", load_config_text(mounted, env={"HF_TOKEN": "hf_0123456789"}).allowed_hosts, ("*",))
    for host, known in (
        (f"{service}:8080", True),
        (f"{service}.ai", True),
        (f"{service}.ai.svc:8080", True),
        (f"{service}.ai.svc.cluster.local", True),
        ("10.1.2.3:8080", True),
        (f"{service}.evil.example", False),
        ("ai.svc.cluster.local", False),
    ):
        refusal = guards.check(b"POST", Kind.INFERENCE, [(b"host", host.encode())])
        assert (refusal is None) == known, host
    assert "allowed_hosts" not in run("kube", "--target", "cpu", "--format", "plain").output, "with a key any name will do"


def test_the_plan_and_the_pods_agree(home: Path) -> None:
    """Slices that mig-manager makes are those that pods ask for, and a share of a GPU becomes one of its slice."""
    done = run("kube", "--mode", "engines", "--share-by", "mig", "--gpu-type", "H100 80GB", "-o", "out")
    assert done.exit_code == 0, done.output
    found = controllers(by_place(kustomized(home / "out" / "overlays" / "nvidia")))
    asked = [key for one in found.values() for key in container(one)["resources"].get("limits", {}) if key.startswith("nvidia.com/mig-")]
    (config_map,) = read_all((home / "out" / "gpus" / "mig-manager.yaml").read_text())
    (plan,) = read_all(config_map["data"]["config.yaml"])
    made = [name for part in plan["mig-configs"]["greenroom"] for name, count in part["mig-devices"].items() for _ in range(count)]
    assert (
        sorted(asked)
        == sorted(f"nvidia.com/mig-{name}" for name in made)
        == [
            "nvidia.com/mig-1g.10gb",
            "nvidia.com/mig-1g.10gb",
            "nvidia.com/mig-4g.40gb",
        ]
    )
    args = container(found["greenroom-agent"])["args"]
    assert args[args.index("--gpu-memory-utilization") + 1] == "0.90"


def test_a_share_of_a_gpu_is_changed_in_a_command_behind_a_shell_too(home: Path) -> None:
    """Behind greenroom's own, where the last mention counts; a script of the operator's is refused."""
    command = "vllm serve /srv/models/agent --port ${PORT} --gpu-memory-utilization 0.45"
    words = ("kube", "--mode", "engines", "--share-by", "mig", "--gpu-type", "H100 80GB", "--format", "plain")
    (home / "greenroom.yaml").write_text(dump({"models": {"agent": {"cmd": f"{command} --hf-token tok-12345"}}}))
    (one,) = controllers(by_place(read_all(run(*words).output))).values()
    assert container(one)["args"][-2:] == ["--gpu-memory-utilization", "0.90"]
    (home / "greenroom.yaml").write_text(dump({"models": {"agent": {"cmd": ["sh", "-c", command]}}}))
    done = run(*words)
    assert (done.exit_code, "agent: --gpu-memory-utilization is another on 4g.40gb" in done.output) == (1, True), done.output


def test_what_was_said_beats_what_is_declared(home: Path) -> None:
    """A need from the command line, then the configuration, then flags; models on the CPU are left out."""
    text = run("mig", "--gpu-type", "H100-80GB", "--need", "rerank=15GiB").output
    assert "rerank: 2g.20gb on GPU 0, needs 15,360 MiB (said)" in text
    assert "org/embed:1 q4: 1g.10gb on GPU 0, needs 3,072 MiB (declared)" in text
    assert "agent: 4g.40gb on GPU 0, needs 36,702 MiB (from its flags)" in text
    assert "tiny" not in text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("mig",), 2, "which GPUs? Give --gpu-type, one of T4"),
        (("mig", "--gpu-type", "h100"), 2, "'h100' is no GPU that is known, or not told enough"),
        (("mig", "--gpu-type", "L4"), 1, "L4 cannot be cut into slices"),
        (("mig", "--gpu-type", "A30"), 1, "2 of them hold it"),
        (("mig", "--gpu-type", "H200", "--need", "nobody=1GiB"), 2, "there is no model 'nobody'"),
        (("mig", "--gpu-type", "H200", "--need", "agent"), 2, "write MODEL=VALUE"),
        (("mig", "--gpu-type", "H200", "--need", "agent=big"), 2, "big"),
        (("mps", "--gpu-memory", "24GiB", "--share", "16GiB", "--share", "8GiB"), 1, "equal ones only"),
        (("mps", "--gpu-type", "L4", "--gpu-memory", "24GiB"), 2, "give --gpu-type or --gpu-memory"),
        (("mps", "--gpu-type", "H200", "--per-pod", "2"), 1, "a pod takes 1 share, not 2"),
        (("mps", "--gpu-type", "H200", "--processes", "agent=none"), 2, "no number of processes"),
        (("time-slicing", "--gpu-type", "L4", "--need", "agent=20GiB"), 1, "no memory isolation"),
        (("kube", "--models", "image"), 1, "--models-image"),
        (("kube", "--share-by", "mig", "--gpu-type", "H200"), 1, "--mode engines"),
        (("kube", "--mode", "engines", "--share-by", "mig", "--gpu-type", "A30"), 1, "2 of them hold it"),
        (("kube", "--mode", "engines", "--share-by", "mig"), 2, "which GPUs?"),
        (("kube", "--gpu-type", "H200"), 2, "give both"),
        (("kube", "--mode", "engines", "--share-by", "mig", "--gpu-type", "H200", "--target", "amd"), 2, "for NVIDIA GPUs"),
        (("kube", "--mode", "engines", "--share-by", "mps", "--gpu-type", "H200", "--accelerator", "x/y"), 2, "give one"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(home: Path, words: tuple[str, ...], code: int, said: str) -> None:
    """One sentence on the way out; exit code 1 where it does not fit, 2 where it was typed wrongly."""
    done = run(*words, "-o", "out")
    assert (done.exit_code, said in done.output) == (code, True), done.output
    assert not (home / "out").exists()


def test_a_model_of_unknown_need_is_asked_about(home: Path) -> None:
    """Nobody plans with a guess."""
    (home / "greenroom.yaml").write_text(dump({"models": {"x": {"cmd": "my-engine --port ${PORT}"}}}))
    done = run("mig", "--gpu-type", "H200")
    assert done.exit_code == 1
    assert "write `memory:` into the configuration, or give --need x=SIZE" in done.output
    assert run("mig", "--gpu-type", "H200", "--need", "x=5GiB").exit_code == 0


def test_what_a_server_has_booked_can_be_planned_with(home: Path) -> None:
    """From its ledger, where that is asked for: files made from a configuration alone are the same on every host."""
    written(home / "journal.sqlite", scene_with(setup_of(AGENT, CODER, SMALL), alternating(seconds=1800.0), 1800.0))
    models = {name: {"cmd": f"my-engine {name} --port ${{PORT}}"} for name in ("agent", "coder")}
    (home / "greenroom.yaml").write_text(dump({"models": models}))
    assert run("mig", "--gpu-type", "H200").exit_code == 1, "its needs are not in the configuration"
    done = run("mig", "--gpu-type", "H200", "--state-dir", str(home))
    assert done.exit_code == 0, done.output
    assert "(from the ledger)" in done.output


def test_advice_names_options_that_are_there(home: Path) -> None:
    """What a model needs can be said to `mps`; with `kube` it has to stand in the configuration."""
    (home / "greenroom.yaml").write_text(dump({"models": {"a b": {"cmd": "my-engine --port ${PORT}"}}}))
    said = run("mps", "--gpu-type", "H200").output
    assert "or give --need 'a b'=SIZE" in said
    beside = run("kube", "--mode", "engines", "--engine-image", "a b=x", "--share-by", "mps", "--gpu-type", "H200").output
    assert "write `memory:` into the configuration" in beside
    assert "--need" not in beside
