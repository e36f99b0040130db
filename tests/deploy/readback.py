"""Compare what a generated file says with the model's own entry: paths turned back into the host's, additions named."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from greenroom.config.load import load_config_text
from greenroom.deploy.intent import Workload
from tests.deploy import sets

# What is put behind a command so that the engine can be reached and called by its name, and nothing else.
ADDED = re.compile(r"(--port \d+ ?)?(--host 0\.0\.0\.0 ?|--hostname 0\.0\.0\.0 ?)?(--alias \S.*|--served-model-name \S.*)?", re.DOTALL)


def back(word: str, mounts: Mapping[str, Mapping[str, Any]]) -> str:
    """A word with paths inside turned into paths of the host, by the mounts of the same file."""
    for target in sorted(mounts, key=len, reverse=True):
        word = _put(word, target, str(mounts[target]["source"]))
    return word


def _put(word: str, target: str, source: str) -> str:
    return re.sub(rf"(?<![\w/]){re.escape(target)}(?![\w.-])", lambda _: source, word)


def original(workload: Workload) -> tuple[str, ...]:
    """The command as it stands in the configuration, its port filled in."""
    entry = load_config_text(sets.text(len(sets.MODELS)), env={}).models
    model = next(model for model in entry if model.id == workload.model)
    return tuple(word.replace("${PORT}", str(workload.port)) for word in model.argv)


def assert_same_command(workload: Workload, command: Sequence[str], mounts: Mapping[str, Mapping[str, Any]]) -> None:
    """The command of a generated file is the configuration's: another program path, addresses opened, names added, no more."""
    if not workload.model or workload.model in ("eighth",):  # greenroom's own; a command in a shell, for its secret
        return
    wanted = list(original(workload))
    if wanted[0] == "env":  # the wrapper stays on the host, its variable is in the environment
        wanted = wanted[wanted.index("llama-server") :]
    found = list(command) if workload.model == "whisper" else [back(word, mounts) for word in command]
    wanted = [{"::1": "::", "--host=127.0.0.1": "--host=0.0.0.0", "CUDA1": "CUDA0"}.get(word, word) for word in wanted]
    assert found[1 : len(wanted)] == wanted[1:]
    assert found[0].rpartition("/")[2].removesuffix("3") == wanted[0].rpartition("/")[2]
    added = " ".join(found[len(wanted) :])
    assert ADDED.fullmatch(added), added
    if "--alias" in added or "--served-model-name" in added:
        assert workload.model in found


def expected_env(workload: Workload) -> dict[str, str]:
    """The configuration's variables, without secrets, and those greenroom sets."""
    if not workload.model:
        return {"HOME": "/cache"}
    entry = load_config_text(sets.text(len(sets.MODELS)), env={}).models
    model = next(model for model in entry if model.id == workload.model)
    mine = {name: value for name, value in model.env if value not in sets.SECRETS.values()}
    extra = {
        "Org/Model-A": {"HOME": "/cache"},
        "org/model-a": {"HOME": "/cache"},
        "eighth": {"HOME": "/cache", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"},
        "1e3": {"CUDA_LAUNCH_BLOCKING": "1"},
        "whisper": {"LANG": "C"},
    }
    return {**mine, **extra.get(workload.model, {})}
