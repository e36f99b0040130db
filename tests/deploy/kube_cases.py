"""Intents to write files from, with names and values that people and the wicked think of; and what reads the files back."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import utils as judge
from ruamel.yaml import YAML

from greenroom.config.model import Config, ModelConfig
from greenroom.deploy.build import Options, build
from greenroom.deploy.intent import Intent, Mount, Probe, Share, Workload
from greenroom.deploy.names import labels
from tests.deploy import sets

Invalid = judge.ValidationError
VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))
HOSTILE_NAMES = (
    "org/näme:7b q4",
    "Org/Model-A",
    "org/model-a",
    "a" * 70 + "-one",
    "a" * 70 + "-two",
    "{{ .Values.config }}",
    "new\nline: injected",
    "on",
    "日本語モデル",
    "'; rm -rf / #",
    "-leading-",
    "markdeadbeefdeadbeefx0x",
)
HOSTILE_ENV = (
    ("NOTE", '50% off "x" \\d$HOME'),
    ("EXPANDS", "$(HOME) $$(HOME) $$ $"),
    ("LINES", "one\n  two\n\tthree\n"),
    ("TEMPLATE", '{{ .Values.image }} {{- "x" -}} }} {{{{'),
    ("YES", "yes"),
    ("NUMBER", "0123"),
    ("EMPTY", ""),
    ("ADDRESS", "[2001:db8::1]:8080"),
    ("TRAILS", "a \nb: # c"),
    ("UNICODE", "\u2028é\x07"),  # not \x85: kubectl itself writes it so that it reads a blank
)


def model(name: str) -> ModelConfig:
    return ModelConfig(id=name, argv=("llama-server", "--port", "${PORT}"), engine="llama_server")


def engine(name: str, unit: str, *, port: int = 8123, **changes: Any) -> Workload:
    given: dict[str, Any] = {
        "name": unit,
        "model": name,
        "image": "ghcr.io/ggml-org/llama.cpp:server-cuda-b10434",
        "argv": ("/app/llama-server", "-m", "/models/my model.gguf", "--alias", name, "--port", str(port), "--x", '{"a": "$(b)"}'),
        "port": port,
        "env": HOSTILE_ENV,
        "secret_env": (("HF_TOKEN", "TEAM_HF_TOKEN"),),
        "kind": "llama_server",
        "mounts": (Mount("bind", "/srv/models", "/models"),),
        "share": Share("nvidia", 1),
        "memory_mib": 6000,
        "shm_mib": 2048,
        "live": Probe("/health", port, 300.0),
        "ready": Probe("/health", port, 300.0),
        "stop_s": 12.5,
        "source": model(name),
        "gpu_mib": 9000,
    }
    return Workload(**{**given, **changes})


def engines(names: tuple[str, ...], target: str = "nvidia", **changes: Any) -> Intent:
    """One workload a model."""
    units = labels(names)
    share = Share() if target == "cpu" else Share(target, 1)
    workloads = tuple(engine(name, units[name], **{"share": share, **changes}) for name in names)
    return Intent("models", "engines", workloads, Config("greenroom.yaml", tuple(map(model, names))), "models: {}\n", target, "llm")


def whole(names: tuple[str, ...], target: str = "nvidia", **changes: Any) -> Intent:
    """greenroom runs the engines itself."""
    config = Config("greenroom.yaml", tuple(map(model, names)))
    given: dict[str, Any] = {
        "name": "greenroom",
        "model": "",
        "image": "ghcr.io/example/greenroom:0.4",
        "argv": ("greenroom", "serve", "-c", "/etc/greenroom/greenroom.yaml", "--listen", "0.0.0.0:8080", "--no-auth"),
        "port": 8080,
        "env": HOSTILE_ENV,
        "secret_env": (("GREENROOM_API_KEY", "GREENROOM_API_KEY"),),
        "mounts": (
            Mount("config", "greenroom.yaml", "/etc/greenroom/greenroom.yaml"),
            Mount("bind", "/srv/models", "/models"),
            Mount("volume", "state", "/var/lib/greenroom", read_only=False),
        ),
        "share": Share() if target == "cpu" else Share(target, 2),
        "memory_mib": 40_000,
        "shm_mib": 4096,
        "live": Probe("/health", 8080, 600.0),
        "ready": Probe("/ready", 8080, 600.0),
        "stop_s": 90.0,
    }
    text = "models:\n" + "".join(f"  {i}:\n    cmd: 'x {{{{ .Values }}}} $(HOME)'\n" for i in range(len(names)))
    return Intent("greenroom", "greenroom", (Workload(**{**given, **changes}),), config, text, target, "llm")


def built(count: int, mode: str) -> Intent:
    """From a configuration of that many models, as the command does it."""
    options = Options(namespace="llm", require_key=True)
    return build(sets.config(count), mode=mode, target="nvidia", options=options)


CASES = {
    "greenroom 1": whole(HOSTILE_NAMES[:1]),
    "greenroom 12": whole(HOSTILE_NAMES),
    "engines 1": engines(HOSTILE_NAMES[:1]),
    "engines 3": engines(HOSTILE_NAMES[:3]),
    "engines 12": engines(HOSTILE_NAMES),
    **{f"built {mode} {count}": built(count, mode) for mode in ("greenroom", "engines") for count in (1, 3, 12)},
}


# It parses megabytes of schema for each object; the schemas do not change meanwhile.
judge.schema_contents = functools.cache(judge.schema_contents)


def validate(one: dict[str, Any], version: str) -> str:
    """Strictly: a field that the release does not know is Invalid."""
    found: str = judge.validate(one, version, strict=True)
    return found


def read_all(text: str) -> list[dict[str, Any]]:
    """Documents by a reader of YAML 1.1, as kubectl's is."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)  # type: ignore[assignment]
    return [one for one in yaml.load_all(text) if one is not None]


def by_place(found: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) -> object without its namespace; each only once."""
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for one in found:
        place = (one["kind"], one["metadata"]["name"])
        assert place not in out, f"twice: {place}"
        out[place] = {**one, "metadata": {key: value for key, value in one["metadata"].items() if key != "namespace"}}
    return out


def put(files: Any, folder: Path) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """What kubectl itself makes of a kustomize folder, offline."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on PATH: kustomize files are not rendered")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip()
    return read_all(done.stdout)
