"""Read the manifests that models are kept under in registries.  Pure: bytes in, a list of files out, nothing is fetched.

Known are CNCF ModelPack artifacts, Docker Model Runner artifacts, OCI images that hold a model below /models (as ramalama and
KServe write them), Ollama's manifests, and any artifact whose layers have titles (as `oras push` writes them).

Layers that are archives are known by their digest alone: `is_archive` tells them, and what they hold is read once they are here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .facts import Damaged, Description, ModelFile, NotFound, Reference, Refused, Remote, StoreError
from .paths import safe_path, shown
from .references import is_digest
from .roles import format_of, missing_parts, role_of, some_of

MANIFEST_BYTES_MAX = 4 << 20
CONFIG_BYTES_MAX = 8 << 20
FILES_MAX = 4096
MODEL_BYTES_MAX = 8 << 40  # more than any model has
TEXT_CHARS_MAX = 4096  # of an annotation that is kept
ANNOTATIONS_MAX = 64

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFEST_TYPES = (OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_INDEX)  # what to accept when asking for one

MODELPACK_ARTIFACT = "application/vnd.cncf.model.manifest.v1+json"
MODELPACK_CONFIG = "application/vnd.cncf.model.config.v1+json"
MODELPACK = "application/vnd.cncf.model."
MODELPACK_ROLES = {"weight": "weights", "weight.config": "config", "doc": "doc"}

DOCKER_MODEL_CONFIG = "application/vnd.docker.ai.model.config."
DOCKER_GGUF = ("application/vnd.docker.ai.gguf.v3", "application/vnd.docker.ai.model.file.v1+gguf")
DOCKER_FILES: Mapping[str, tuple[str, str]] = {  # media type -> (role, name where none is given)
    DOCKER_GGUF[0]: ("weights", "model.gguf"),
    DOCKER_GGUF[1]: ("weights", "model.gguf"),
    "application/vnd.docker.ai.safetensors": ("weights", "model.safetensors"),
    "application/vnd.docker.ai.dduf": ("weights", "model.dduf"),
    "application/vnd.docker.ai.mmproj": ("projector", "mmproj.gguf"),
    "application/vnd.docker.ai.license": ("license", "LICENSE"),
    "application/vnd.docker.ai.chat.template.jinja": ("template", "chat_template.jinja"),
    "application/vnd.docker.ai.chat.template.file": ("template", "chat_template.jinja"),
}
DOCKER_MODEL_FILE = "application/vnd.docker.ai.model.file"
DOCKER_ARCHIVES = ("application/vnd.docker.ai.vllm.config.tar", "application/vnd.docker.ai.dir.tar")

IMAGE_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
IMAGE_LAYERS = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.",
)
IMAGE_FOLDER = "models"  # where an image keeps its model
IMAGE_LABEL = "org.containers.type"
IMAGE_KINDS = ("ai.image.model.raw", "ai.image.model.car")

OLLAMA = "application/vnd.ollama.image."
OLLAMA_FILES: Mapping[str, tuple[str, str]] = {
    "model": ("weights", "model.gguf"),
    "projector": ("projector", "mmproj.gguf"),
    "adapter": ("adapter", "adapter.gguf"),
    "template": ("template", "template"),
    "params": ("config", "params.json"),
    "system": ("other", "system"),
    "messages": ("other", "messages.json"),
    "license": ("license", "LICENSE"),
}

PATH_ANNOTATION = "org.cncf.model.filepath"
TITLE_ANNOTATION = "org.opencontainers.image.title"
UNPACK_ANNOTATION = "io.deis.oras.content.unpack"  # oras: this layer is a folder, packed


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a manifest says of one blob."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.annotations.get(PATH_ANNOTATION) or self.annotations.get(TITLE_ANNOTATION) or ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest, read and checked."""

    media_type: str
    artifact_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str]


def digest_of(data: bytes) -> str:
    """`sha256:…` of some bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_archive(file: ModelFile) -> bool:
    """True for a layer whose files are known only once it is here."""
    return bool(file.blob) and file.blob == file.digest


def is_index(manifest: bytes) -> bool:
    """True where this is a list of manifests, one a platform: `pick` one."""
    return isinstance(_document(manifest, "the manifest").get("manifests"), list)


def pick(index: bytes, architecture: str = "amd64", system: str = "linux") -> Descriptor:
    """The manifest of an index for this platform; models are the same for all, so any one will do where none fits.

    Raises NotFound for an empty index, Refused for a broken one.
    """
    entries = _list(_document(index, "the index"), "manifests", "the index")
    choices: list[tuple[int, int, Descriptor]] = []
    for entry in entries:
        platform, annotations = _map(entry, "platform"), _annotations(entry)
        if platform.get("os") == "unknown" or annotations.get("vnd.docker.reference.type") == "attestation-manifest":
            continue
        fits = (platform.get("architecture") == architecture) + (platform.get("os") == system)
        choices.append((-fits, len(choices), _descriptor(entry, "the index")))
    if not choices:
        raise NotFound("the index lists no manifest of a model: it was pushed without one")
    return min(choices, key=lambda choice: choice[:2])[2]


def read_config_descriptor(manifest: bytes) -> Descriptor:
    """Where the configuration of a manifest is: fetch it, then `read_manifest`.  Raises Refused when it claims too much."""
    config = parse_manifest(manifest).config
    if config.size > CONFIG_BYTES_MAX:
        raise Refused(f"the manifest claims a configuration of {config.size:,} bytes; {CONFIG_BYTES_MAX:,} are the limit")
    return config


def parse_manifest(data: bytes) -> Manifest:
    """Raises Refused: too large, no manifest, digests that are none, sizes that cannot be."""
    document = _document(data, "the manifest")
    if document.get("schemaVersion") != 2:
        raise Refused("the manifest is of schema version 1 or of none: push the model again with a newer tool")
    layers = tuple(_descriptor(entry, "the manifest") for entry in _list(document, "layers", "the manifest"))
    config = document.get("config")
    if not isinstance(config, dict):
        raise Refused("the manifest has no configuration: it describes no model")
    return Manifest(
        _text(document.get("mediaType")),
        _text(document.get("artifactType")),
        _descriptor(config, "the manifest"),
        layers,
        _annotations(document),
    )


def read_manifest(
    reference: Reference, manifest: bytes, config: bytes = b"", digest: str = "", *, bytes_max: int = MODEL_BYTES_MAX
) -> Remote:
    """The files of a model from its manifest (no index: `pick` first) and its configuration.

    `digest`, where given, is checked, as is the configuration's.  Raises Damaged; NotFound (no model in it); Refused (unsafe names,
    duplicates, too many files or bytes, a compression that is not known).
    """
    found = digest_of(manifest)
    if digest and digest != found:
        raise Damaged(f"the manifest of {reference} is not what its digest says ({digest} expected, {found} came): pull again")
    parsed = parse_manifest(manifest)
    if config and digest_of(config) != parsed.config.digest:
        raise Damaged(f"the configuration of {reference} is not what its digest says ({parsed.config.digest} expected): pull again")
    settings = _settings(config)
    layout, files, description = _files(parsed, settings)
    _check(reference, files, bytes_max)
    annotations = {**parsed.annotations, **description.annotations}
    described = Description(
        description.format or format_of(files),
        description.architecture,
        description.parameters,
        description.quantization,
        description.name,
        description.licenses or _licenses(annotations),
        description.context_length,
        annotations,
    )
    return Remote(reference, found, layout, files, described, manifest, config)


def _files(manifest: Manifest, settings: Mapping[str, Any]) -> tuple[str, tuple[ModelFile, ...], Description]:
    types = [layer.media_type for layer in manifest.layers]
    config_type = manifest.config.media_type
    if any(kind.startswith(OLLAMA) for kind in types):
        return "files", _ollama_files(manifest.layers), _ollama_description(settings)
    if manifest.artifact_type == MODELPACK_ARTIFACT or config_type == MODELPACK_CONFIG:
        files = _modelpack_files(manifest.layers)
        # Docker's own tools push this artifact with their layer types, too.
        return "modelpack", files, _modelpack_description(settings)
    if config_type.startswith(DOCKER_MODEL_CONFIG) or any(kind in DOCKER_GGUF for kind in types):
        return "docker", _docker_files(manifest.layers), _docker_description(settings)
    if config_type in IMAGE_CONFIGS and all(kind.startswith(IMAGE_LAYERS) for kind in types):
        return "image", _image_files(manifest.layers, settings), Description()
    if any(kind.startswith(MODELPACK) for kind in types) or any(role_of(layer.name) == "weights" for layer in manifest.layers):
        return "files", _modelpack_files(manifest.layers), Description()
    kind = manifest.artifact_type or config_type or "nothing"
    raise NotFound(f"what is kept there is no model: it is {shown(kind)}, none of ModelPack, Docker model, model image")


def _modelpack_files(layers: Sequence[Descriptor]) -> tuple[ModelFile, ...]:
    files: list[ModelFile] = []
    for layer in layers:
        kind, _, form = (
            layer.media_type.removeprefix(MODELPACK).rpartition(".v1.") if layer.media_type.startswith(MODELPACK) else ("", "", "")
        )
        if kind == "dataset":
            continue
        if form.startswith("tar") or _unpacks(layer):
            files.append(_archive(layer))
        elif layer.media_type in DOCKER_FILES or layer.media_type == DOCKER_MODEL_FILE:
            files.extend(_docker_files([layer], files))
        else:
            name = layer.name or _free_name({"weight": "model.gguf", "doc": "README.md"}.get(kind, f"file-{len(files)}"), files)
            path = safe_path(name)
            told = role_of(path)
            role = told if told != "other" else MODELPACK_ROLES.get(kind, "other")
            files.append(ModelFile(path, layer.size, layer.digest, role, layer.media_type))
    return tuple(files)


def _docker_files(layers: Sequence[Descriptor], others: Sequence[ModelFile] = ()) -> tuple[ModelFile, ...]:
    files: list[ModelFile] = list(others)
    unnamed = {kind: [layer for layer in layers if layer.media_type == kind and not layer.name] for kind in DOCKER_FILES}
    for layer in layers:
        if layer.media_type in DOCKER_ARCHIVES or _unpacks(layer):
            files.append(_archive(layer))
            continue
        role, usual = DOCKER_FILES.get(layer.media_type, ("", f"file-{len(files)}"))
        name = layer.name
        if not name and role == "weights" and len(unnamed[layer.media_type]) > 1:
            # The parts of a split model, in their order: llama.cpp finds them by these names alone.
            stem, _, ending = usual.rpartition(".")
            number, parts = unnamed[layer.media_type].index(layer) + 1, len(unnamed[layer.media_type])
            name = f"{stem}-{number:05}-of-{parts:05}.{ending}"
        path = safe_path(name or _free_name(usual, files))
        files.append(ModelFile(path, layer.size, layer.digest, role or role_of(path), layer.media_type))
    return tuple(files[len(others) :])


def _ollama_files(layers: Sequence[Descriptor]) -> tuple[ModelFile, ...]:
    files: list[ModelFile] = []
    for layer in layers:
        kind = layer.media_type.removeprefix(OLLAMA).partition(";")[0]
        if kind not in OLLAMA_FILES:
            raise Refused(f"this Ollama model has a layer of type {shown(layer.media_type)}, which only Ollama can run")
        role, usual = OLLAMA_FILES[kind]
        files.append(ModelFile(_free_name(usual, files), layer.size, layer.digest, role, layer.media_type))
    return tuple(files)


def _image_files(layers: Sequence[Descriptor], settings: Mapping[str, Any]) -> tuple[ModelFile, ...]:
    """Its layers, from the first that can hold the model on: what a base image brings is left out where the history tells."""
    labels = _map(_map(settings, "config"), "Labels")
    history = [step for step in _items(settings, "history") if isinstance(step, dict)]
    steps = [_text(step.get("created_by")) for step in history if not step.get("empty_layer")]
    first = next((number for number, step in enumerate(steps) if f"/{IMAGE_FOLDER}" in step), None) if len(steps) == len(layers) else None
    said = any(f"/{IMAGE_FOLDER}" in _text(step.get("created_by")) for step in history)
    if labels.get(IMAGE_LABEL) not in IMAGE_KINDS and not said:
        raise NotFound(
            f"what is kept there is a container image without a model: it has no label {IMAGE_LABEL} and nothing below /{IMAGE_FOLDER}"
        )
    return tuple(_archive(layer) for layer in layers[first or 0 :])


def _archive(layer: Descriptor) -> ModelFile:
    if layer.media_type.endswith("zstd"):
        raise Refused(
            "a layer is compressed with zstd, which is not read here: pack it again without compression or with gzip "
            "(skopeo copy --dest-compress-format gzip)"
        )
    name = f"{layer.digest.removeprefix('sha256:')[:12]}.tar{'.gz' if layer.media_type.endswith('gzip') else ''}"
    return ModelFile(name, layer.size, layer.digest, "other", layer.media_type, blob=layer.digest)


def _unpacks(layer: Descriptor) -> bool:
    return layer.annotations.get(UNPACK_ANNOTATION) == "true"


def _free_name(usual: str, files: Sequence[ModelFile]) -> str:
    taken = {file.path for file in files}
    stem, dot, ending = usual.partition(".")
    number, name = 2, usual
    while name in taken:
        name, number = f"{stem}-{number}{dot}{ending}", number + 1
    return name


def _check(reference: Reference, files: Sequence[ModelFile], bytes_max: int) -> None:
    if not files:
        raise NotFound(f"{reference} has no files: it was pushed without a model")
    total = sum({file.digest: file.size for file in files}.values())
    if total > bytes_max:
        raise Refused(f"{reference} claims {total:,} bytes, more than the {bytes_max:,} that are allowed: nothing was fetched")
    check_paths([file.path for file in files], what=str(reference))
    sizes: dict[str, int] = {}
    for file in files:
        if sizes.setdefault(file.digest, file.size) != file.size:
            raise Refused(f"{reference} claims two sizes for {file.digest}: its manifest is broken")
    if any(is_archive(file) for file in files):
        return
    if not any(file.role == "weights" for file in files):
        raise NotFound(f"{reference} holds no weights: only {', '.join(sorted(file.path for file in files)[:5])}")
    missing = missing_parts([file.path for file in files])
    if missing:
        raise NotFound(f"{reference} is a split model without {some_of(missing)}: push it whole")


def check_paths(paths: Sequence[str], *, what: str) -> None:
    """Raises Refused for two files of one name, for a name that is a folder of another, and for too many."""
    if len(paths) > FILES_MAX:
        raise Refused(f"{what} has {len(paths):,} files; {FILES_MAX:,} are the limit")
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise Refused(f"{what} has two files named {shown(path)}: which one is meant cannot be told")
        seen.add(path)
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in seen:
                raise Refused(f"{what} has both a file and a folder named {shown('/'.join(parts[:end]))}")


def _licenses(annotations: Mapping[str, str]) -> tuple[str, ...]:
    text = annotations.get("org.opencontainers.image.licenses", "")
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _modelpack_description(settings: Mapping[str, Any]) -> Description:
    told, config = _map(settings, "descriptor"), _map(settings, "config")
    return Description(
        format=_text(config.get("format")),
        architecture=_text(config.get("architecture")),
        parameters=_text(config.get("paramSize")),
        quantization=_text(config.get("quantization")) or _text(config.get("precision")),
        name=_text(told.get("name")),
        licenses=tuple(_text(item) for item in _items(told, "licenses")[:ANNOTATIONS_MAX]),
    )


def _docker_description(settings: Mapping[str, Any]) -> Description:
    config = _map(settings, "config")
    context = config.get("context_size")
    return Description(
        format=_text(config.get("format")),
        architecture=_text(config.get("architecture")),
        parameters=_text(config.get("parameters")),
        quantization=_text(config.get("quantization")),
        context_length=context if isinstance(context, int) and 0 < context < 1 << 31 else 0,
    )


def _ollama_description(settings: Mapping[str, Any]) -> Description:
    return Description(
        format=_text(settings.get("model_format")),
        architecture=_text(settings.get("model_family")),
        parameters=_text(settings.get("model_type")),
        quantization=_text(settings.get("file_type")),
    )


def _settings(config: bytes) -> Mapping[str, Any]:
    """A configuration, which may be anything: only manifests are held to a form."""
    try:
        return _document(config, "the configuration", CONFIG_BYTES_MAX) if config else {}
    except StoreError:
        return {}


def _document(data: bytes, what: str, bytes_max: int = MANIFEST_BYTES_MAX) -> dict[str, Any]:
    if len(data) > bytes_max:
        raise Refused(f"{what} has {len(data):,} bytes; {bytes_max:,} are the limit")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(f"{what} is no JSON: this address does not answer as a registry does") from None
    if not isinstance(document, dict):
        raise Refused(f"{what} is no JSON object: this address does not answer as a registry does")
    return document


def _list(document: Mapping[str, Any], key: str, what: str) -> list[dict[str, Any]]:
    entries = document.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Refused(f"{what} has no list of {key}: it describes no model")
    if len(entries) > FILES_MAX:
        raise Refused(f"{what} has {len(entries):,} {key}; {FILES_MAX:,} are the limit")
    return entries


def _descriptor(entry: Mapping[str, Any], what: str) -> Descriptor:
    digest, size = entry.get("digest"), entry.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise Refused(f"{what} has a digest {shown(_text(digest))}; sha256: and 64 lower-case hexadecimal digits are read here")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise Refused(f"{what} gives {digest} no valid size")
    return Descriptor(_text(entry.get("mediaType")), digest, size, _annotations(entry))


def _annotations(entry: Mapping[str, Any]) -> dict[str, str]:
    given = _map(entry, "annotations")
    return {key: value for key, value in list(given.items())[:ANNOTATIONS_MAX] if isinstance(value, str) and len(value) <= TEXT_CHARS_MAX}


def _map(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _items(document: Mapping[str, Any], key: str) -> list[Any]:
    value = document.get(key)
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) else ""
