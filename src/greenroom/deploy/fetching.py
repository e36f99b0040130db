"""How an engine gets a model that the configuration names by reference, when greenroom's store is not there to fetch it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from greenroom.config.model import ModelConfig
from greenroom.deploy.commands import with_words
from greenroom.deploy.intent import Mount
from greenroom.deploy.names import label
from greenroom.deploy.places import ROOT
from greenroom.deploy.unfit import BuildError
from greenroom.store.facts import Reference, Stored, StoreError
from greenroom.store.layouts import IMAGE_FOLDER
from greenroom.store.references import parse
from greenroom.store.roles import entry_of
from greenroom.store.unpacking import LINK

ARTIFACTS = ("modelpack", "docker")  # layouts that no container can mount
PATH, FOLDER = "${MODEL_PATH}", "${MODEL_DIR}"
READS_FOLDERS = ("vllm", "sglang", "tei")  # laid out as the hub has them, from there or from a disk


@dataclass(frozen=True, slots=True)
class Fetched:
    """The entry without its reference, and what has to be mounted for it."""

    model: ModelConfig
    mounts: tuple[Mount, ...] = ()
    note: str = ""


def reference_of(model: ModelConfig) -> Reference | None:
    """Raises BuildError when it is none that can be read."""
    if not model.reference:
        return None
    try:
        return parse(model.reference)
    except StoreError as exc:
        raise BuildError(f"{model.id}: {exc}") from exc


def by_engine(model: ModelConfig, kind: str, stored: Stored | None = None) -> Fetched:
    """As the engine `kind` fetches by itself, or as an image that is mounted; BuildError when neither is possible.

    `stored`: the model as the store of this host has it, whose files are named as in an image of it.
    """
    reference = reference_of(model)
    if reference is None:
        return Fetched(model)
    given = (*model.container.volumes, *model.container.args) if model.container is not None else ()
    if reference.scheme != "file" and any(macro in text for text in given for macro in (PATH, FOLDER)):
        raise BuildError(
            f"{model.id}: its `container` names the place of its model, which is another one without greenroom; "
            "leave that volume out: the model is mounted anyway"
        )
    if reference.scheme == "oci":
        return _image(model, reference, kind, stored)
    if reference.scheme == "file":
        return Fetched(with_words(model, {PATH: reference.path, FOLDER: os.path.dirname(reference.path)}))
    words = _native(reference, kind)
    argv = _with_flags(model.argv, words) if kind == "llama_server" else _by_name(model, words)
    if not words or not argv:
        raise BuildError(
            f"{model.id}: {kind} cannot fetch {model.reference} by itself; deploy greenroom in front (--mode greenroom), "
            "or push the model to a registry as an OCI image"
        )
    return Fetched(replace(model, argv=argv, reference=""))


def _image(model: ModelConfig, reference: Reference, kind: str, stored: Stored | None) -> Fetched:
    tag, digest = (f":{reference.tag}" if reference.tag else ""), (f"@{reference.digest}" if reference.digest else "")
    image = f"{reference.host}/{reference.path}{'' if digest else tag}{digest}"  # a digest says more than the tag beside it
    place = f"{ROOT}/{label(model.id)}"
    folder = f"{place}/{IMAGE_FOLDER}"
    note = f"{model.id}: {image} must be an OCI image (`greenroom push --layout image`); its files are mounted from it."
    if stored is not None:
        if stored.layout in ARTIFACTS:
            raise BuildError(
                f"{model.id}: {model.reference} is an artifact ({stored.layout}), which no container can mount; "
                f"push it under another name with `greenroom push --layout image`, or deploy greenroom in front (--mode greenroom)"
            )
        entry = entry_of(stored.files)
    else:
        entry = "" if kind in READS_FOLDERS else LINK
        what = "its folder" if not entry else f"its one file ({LINK}), which a split GGUF has not"
        note += f" It is not in the store of this host: ${{MODEL_PATH}} is taken for {what}; pull it, and generate again to be sure."
    words = {PATH: f"{folder}/{entry}" if entry else folder, FOLDER: folder}
    return Fetched(with_words(model, words), (Mount("image", image, place),), note)


def _native(reference: Reference, kind: str) -> tuple[str, ...]:
    """Flags of llama-server in place of `--model PATH`; for servers of hub models the name, then more flags.  () = it cannot."""
    if kind == "llama_server":
        if reference.scheme in ("http", "https"):
            return ("--model-url", str(reference))
        if reference.scheme == "hf" and not reference.digest:
            is_file = reference.tag.endswith(".gguf")
            name = f"{reference.path}:{reference.tag}" if reference.tag and not is_file else reference.path
            return ("--hf-repo", name, *(("--hf-file", reference.tag) if is_file else ()))
        return ()
    if kind in READS_FOLDERS and reference.scheme == "hf" and not reference.tag:
        return (reference.path, *(("--revision", reference.digest) if reference.digest else ()))
    return ()


def _with_flags(argv: Sequence[str], words: tuple[str, ...]) -> tuple[str, ...]:
    """`--model ${MODEL_PATH}` replaced by `words`; () when the command uses the path in another way too."""
    for position, word in enumerate(argv[:-1]):
        if word in ("-m", "--model") and argv[position + 1] == PATH:
            changed = (*argv[:position], *words, *argv[position + 2 :])
            return () if any(macro in word for word in changed for macro in (PATH, FOLDER)) else changed
    return ()


def _by_name(model: ModelConfig, words: tuple[str, ...]) -> tuple[str, ...]:
    return (*with_words(model, {PATH: words[0], FOLDER: words[0]}).argv, *words[1:]) if words else ()
