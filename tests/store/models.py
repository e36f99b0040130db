"""Small models for the tests of the store: real GGUF and safetensors files of any size, and manifests that name them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

from greenroom.store.layouts import MODELPACK_ARTIFACT, MODELPACK_CONFIG, OCI_MANIFEST, PATH_ANNOTATION

RAW = "application/vnd.cncf.model.weight.v1.raw"


def gguf(bytes_: int = 4096, *, fields: Mapping[str, str | int] | None = None, seed: int = 0) -> bytes:
    """A GGUF file with one tensor of about so many bytes; different for each seed."""
    values = max(1, bytes_ // 4)
    told = {"general.architecture": "llama", "general.name": "Tiny", "general.file_type": 0, "llama.context_length": 2048, **(fields or {})}
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(told))
    for key, value in told.items():
        head += _text(key)
        head += struct.pack("<I", 8) + _text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
    head += _text("token_embd.weight") + struct.pack("<IQIQ", 1, values, 0, 0)
    head += bytes(-len(head) % 32)
    block = hashlib.shake_256(str(seed).encode()).digest(4096)
    return head + (block * (values * 4 // 4096 + 1))[: values * 4]


def safetensors(values: int = 16) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [values], "data_offsets": [0, values * 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(values * 4)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def descriptor(data: bytes, media_type: str = RAW, **annotations: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"mediaType": media_type, "digest": digest(data), "size": len(data)}
    return {**entry, "annotations": annotations} if annotations else entry


def named(data: bytes, path: str, media_type: str = RAW) -> dict[str, Any]:
    return {**descriptor(data, media_type), "annotations": {PATH_ANNOTATION: path}}


def modelpack(*layers: dict[str, Any], config: bytes = b"{}", **more: Any) -> bytes:
    """A ModelPack manifest of these layers."""
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": MODELPACK_ARTIFACT,
        "config": descriptor(config, MODELPACK_CONFIG),
        "layers": list(layers),
        **more,
    }
    return json.dumps(document).encode()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
