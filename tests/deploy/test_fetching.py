"""A model of a registry is named by the path that it has in the image that `greenroom push` makes of it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from greenroom.config.load import load_config_text
from greenroom.config.yaml_out import dump
from greenroom.deploy.build import BuildError, Options, build
from greenroom.deploy.intent import Intent
from greenroom.store.facts import Stored
from greenroom.store.library import Library
from greenroom.store.packing import pack, read_layer
from tests.store.test_packing import MODELS, adopted

PLACE = "/models/m"  # where the image is mounted
LLAMA, VLLM = "llama-server --model ${MODEL_PATH} --port ${PORT}", "vllm serve ${MODEL_PATH} --port ${PORT}"


def intent(cmd: str, stored: Mapping[str, Stored] | None = None, **more: object) -> Intent:
    text = dump({"models": {"m": {"model": "oci://registry.example/team/m:1", "cmd": cmd, **more}}})
    return build(load_config_text(text, env={}), mode="engines", target="nvidia", options=Options(stored=stored or {}))


def model_word(made: Intent) -> str:
    """What its engine is told to load."""
    (workload,) = made.workloads
    assert [(mount.kind, mount.target) for mount in workload.mounts][:1] == [("image", PLACE)]
    return next(word for word in workload.argv if word.startswith(PLACE))


def in_image(stored: Stored) -> dict[str, str]:
    """Path in the image -> what is there: file, link or folder."""
    found = {}
    for layer in pack(stored, "image").layers:
        with tarfile.open(fileobj=io.BytesIO(b"".join(read_layer(layer)))) as tar:
            found |= {one.name.rstrip("/"): "folder" if one.isdir() else "link" if one.issym() else "file" for one in tar}
    return found


@pytest.mark.parametrize(
    ("which", "cmd", "kind"), [("one", LLAMA, "file"), ("split", LLAMA, "file"), ("seeing", LLAMA, "file"), ("folder", VLLM, "folder")]
)
def test_what_the_store_knows_is_named_as_it_is(tmp_path: Path, which: str, cmd: str, kind: str) -> None:
    """A split GGUF by its first part: llama-server finds the others by that name.  Safetensors by their folder."""
    stored = adopted(Library(tmp_path / "store"), tmp_path / "model", MODELS[which])
    made = intent(cmd, {"m": stored})
    inside = model_word(made).removeprefix(f"{PLACE}/")
    assert in_image(stored)[inside] == kind
    assert inside == f"models/{stored.entry.relative_to(stored.folder)}".removesuffix("/.")
    assert not any("not in the store" in note for note in made.notes)


@pytest.mark.parametrize(("cmd", "inside"), [(LLAMA, "models/model.file"), (VLLM, "models")])
def test_what_the_store_does_not_know_is_a_guess_that_is_told(tmp_path: Path, cmd: str, inside: str) -> None:
    made = intent(cmd)
    assert model_word(made) == f"{PLACE}/{inside}"
    assert any("It is not in the store of this host" in note for note in made.notes)
    which = "one" if cmd == LLAMA else "folder"
    assert inside in in_image(adopted(Library(tmp_path / "store"), tmp_path / "model", MODELS[which])), "right for most"


def test_an_artifact_is_refused_as_nothing_can_mount_it(tmp_path: Path) -> None:
    stored = replace(adopted(Library(tmp_path / "store"), tmp_path / "model", MODELS["one"]), layout="modelpack")
    with pytest.raises(BuildError, match="--layout image"):
        intent(LLAMA, {"m": stored})


def test_a_container_that_mounts_the_models_place_itself_is_refused() -> None:
    """That place is on the host alone."""
    with pytest.raises(BuildError, match="leave that volume out"):
        intent("--model ${MODEL_PATH} --port ${PORT}", container={"image": "i:1", "volumes": ["${MODEL_DIR}:/m:ro"]}, engine="llama_server")
