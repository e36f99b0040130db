"""Write a model in each of the layouts: manifest, configuration and layers, the same bytes for the same model every time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .facts import LAYOUTS, Damaged, ModelFile, Refused, Stored, StoreError
from .layouts import (
    DOCKER_FILES,
    DOCKER_MODEL_CONFIG,
    DOCKER_MODEL_FILE,
    IMAGE_CONFIGS,
    IMAGE_FOLDER,
    IMAGE_KINDS,
    IMAGE_LABEL,
    IMAGE_LAYERS,
    MODELPACK,
    MODELPACK_ARTIFACT,
    MODELPACK_CONFIG,
    OCI_MANIFEST,
    PATH_ANNOTATION,
    TITLE_ANNOTATION,
    digest_of,
    is_archive,
    read_manifest,
)
from .roles import entry_of
from .tars import END, FOLDER, SYMLINK, header_of, padding_of
from .unpacking import LINK

READ_BYTES = 1 << 20
BEGINNING = "1970-01-01T00:00:00Z"  # a time that is the same every time
ORDER = ("weights", "projector", "draft", "adapter", "config", "tokenizer", "template", "license", "doc", "other")
MODELPACK_KINDS: Mapping[str, str] = {
    "weights": "weight",
    "projector": "weight",
    "draft": "weight",
    "adapter": "weight",
    "config": "weight.config",
    "tokenizer": "weight.config",
    "template": "weight.config",
    "license": "doc",
    "doc": "doc",
    "other": "code",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob to push: `size` bytes, which are those of `pieces` in their order."""

    media_type: str
    digest: str
    size: int
    pieces: tuple[bytes | Path, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Packed:
    """A model as a registry keeps it.  Push the layers and the configuration, then the manifest."""

    layout: str
    manifest: bytes
    config: Layer
    layers: tuple[Layer, ...]
    media_type: str = OCI_MANIFEST

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def size(self) -> int:
        return self.config.size + sum(layer.size for layer in self.layers)


def pack(stored: Stored, layout: str = "") -> Packed:
    """The model in this layout ("" = as it was pulled, else ModelPack).

    In the layout it was pulled in, the manifest stays byte for byte, so signatures hold.  Reads whole files where their archives'
    digests are wanted (layout "image").  Raises Refused for what a layout cannot hold, OSError.
    """
    if layout and layout not in LAYOUTS:
        raise StoreError(f"there is no layout {layout!r}: {', '.join(LAYOUTS)}")
    same = _as_pulled(stored) if layout in ("", stored.layout) else None
    if same is not None:
        return same
    files = sorted(stored.files, key=lambda file: (ORDER.index(file.role), file.path))
    match layout or (stored.layout if stored.layout in LAYOUTS else "modelpack"):
        case "docker":
            return _docker(stored, files)
        case "image":
            return _image(stored, files)
    return _modelpack(stored, files)


def read_layer(layer: Layer, offset: int = 0) -> Iterator[bytes]:
    """Its bytes from `offset` on.  Raises Damaged when a file has changed its size, OSError."""
    for piece in layer.pieces:
        size = len(piece) if isinstance(piece, bytes) else piece.stat().st_size
        if offset >= size:
            offset -= size
            continue
        if isinstance(piece, bytes):
            yield piece[offset:]
        else:
            yield from _read(piece, offset, size)
        offset = 0


def _read(path: Path, offset: int, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        while offset < size:
            data = file.read(min(READ_BYTES, size - offset))
            if not data:
                raise Damaged(f"{path} became shorter while it was read: `greenroom verify` tells more")
            offset += len(data)
            yield data


def _as_pulled(stored: Stored) -> Packed | None:
    """The manifest it came with, where all it lists is here as it lists it."""
    try:
        manifest = (stored.folder.parent / "manifest.json").read_bytes()
        config = (stored.folder.parent / "config.json").read_bytes()
        remote = read_manifest(stored.reference, manifest, config, stored.digest)
    except (OSError, StoreError):
        return None
    document = json.loads(manifest)
    here = {file.digest: stored.folder / file.path for file in stored.files}
    if any(is_archive(file) for file in remote.files) or any(entry["digest"] not in here for entry in document["layers"]):
        return None
    layers = tuple(
        Layer(entry.get("mediaType", ""), entry["digest"], entry["size"], (here[entry["digest"]],), entry.get("annotations") or {})
        for entry in document["layers"]
    )
    told = document["config"]
    media_type = document.get("mediaType") or OCI_MANIFEST
    return Packed(stored.layout, manifest, Layer(told["mediaType"], told["digest"], told["size"], (config,)), layers, media_type)


def _modelpack(stored: Stored, files: Sequence[ModelFile]) -> Packed:
    layers = [_plain(stored, file, f"{MODELPACK}{MODELPACK_KINDS[file.role]}.v1.raw") for file in files]
    told = stored.description
    config = {
        "descriptor": _filled(name=told.name, licenses=list(told.licenses)),
        "config": _filled(architecture=told.architecture, format=told.format, paramSize=told.parameters, quantization=told.quantization),
        "modelfs": {"type": "layers", "diffIds": [layer.digest for layer in layers]},
    }
    return _packed("modelpack", MODELPACK_CONFIG, config, layers, MODELPACK_ARTIFACT)


def _docker(stored: Stored, files: Sequence[ModelFile]) -> Packed:
    kinds = {"gguf": "application/vnd.docker.ai.gguf.v3", "safetensors": "application/vnd.docker.ai.safetensors"}
    if stored.description.format not in kinds:
        raise Refused(f"{stored.reference} is neither GGUF nor safetensors, which is all that Docker models can be: push it as modelpack")
    by_role = {role: kind for kind, (role, _) in reversed(list(DOCKER_FILES.items())) if role != "weights"}
    by_role["weights"] = kinds[stored.description.format]
    layers = [_plain(stored, file, by_role.get(file.role, DOCKER_MODEL_FILE)) for file in files]
    told = stored.description
    config = {
        "config": _filled(
            format=told.format,
            quantization=told.quantization,
            parameters=told.parameters,
            architecture=told.architecture,
            size=f"{sum(file.size for file in files) / 1e6:.2f} MB",
        ),
        "descriptor": {"created": BEGINNING},
        "rootfs": {"type": "rootfs", "diff_ids": [layer.digest for layer in layers]},
    }
    # The later version has a layer for each file, under its path; the earlier is what plain GGUF models have.
    later = told.format != "gguf" or any(layer.media_type == DOCKER_MODEL_FILE for layer in layers)
    return _packed("docker", f"{DOCKER_MODEL_CONFIG}{'v0.2' if later else 'v0.1'}+json", config, layers)


def _image(stored: Stored, files: Sequence[ModelFile]) -> Packed:
    layers = [_tar_layer(stored, file) for file in files]
    steps = [f"greenroom: /{IMAGE_FOLDER}/{file.path}" for file in files]
    entry = entry_of(files)
    if entry and entry != LINK:
        link = header_of(f"{IMAGE_FOLDER}/", kind=FOLDER) + header_of(f"{IMAGE_FOLDER}/{LINK}", kind=SYMLINK, target=entry) + END
        layers.append(Layer(IMAGE_LAYERS[0], digest_of(link), len(link), (link,)))
        steps.append(f"greenroom: /{IMAGE_FOLDER}/{LINK} -> {entry}")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": {IMAGE_LABEL: IMAGE_KINDS[0]}},
        "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        "history": [{"created": BEGINNING, "created_by": step} for step in steps],
    }
    return _packed("image", IMAGE_CONFIGS[0], config, layers)


def _plain(stored: Stored, file: ModelFile, media_type: str) -> Layer:
    annotations = {PATH_ANNOTATION: file.path, TITLE_ANNOTATION: file.path}
    return Layer(media_type, file.digest, file.size, (stored.folder / file.path,), annotations)


def _tar_layer(stored: Stored, file: ModelFile) -> Layer:
    """One uncompressed layer a file: its digest is stable, and a file that other models share is pushed once."""
    parts = f"{IMAGE_FOLDER}/{file.path}".split("/")
    folders = b"".join(header_of("/".join(parts[:end]) + "/", kind=FOLDER) for end in range(1, len(parts)))
    before = folders + header_of("/".join(parts), size=file.size)
    after = padding_of(file.size) + END
    path = stored.folder / file.path
    digest = hashlib.sha256(before)
    for data in _read(path, 0, file.size):
        digest.update(data)
    digest.update(after)
    return Layer(IMAGE_LAYERS[0], f"sha256:{digest.hexdigest()}", len(before) + file.size + len(after), (before, path, after))


def _packed(layout: str, config_type: str, config: Mapping[str, Any], layers: Sequence[Layer], artifact_type: str = "") -> Packed:
    data = _json(config)
    held = Layer(config_type, digest_of(data), len(data), (data,))
    # A file that is there twice is one blob, listed under each name.
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        **({"artifactType": artifact_type} if artifact_type else {}),
        "config": {"mediaType": config_type, "digest": held.digest, "size": held.size},
        "layers": [
            {
                "mediaType": layer.media_type,
                "digest": layer.digest,
                "size": layer.size,
                **({"annotations": dict(layer.annotations)} if layer.annotations else {}),
            }
            for layer in layers
        ],
    }
    return Packed(layout, _json(document), held, tuple(layers))


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _filled(**values: str | list[str]) -> dict[str, str | list[str]]:
    return {key: value for key, value in values.items() if value}
