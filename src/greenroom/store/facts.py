"""What the parts of the store tell each other: references, files of a model, where they come from, what is kept.

Plain frozen values.  Digests are `sha256:` and 64 hexadecimal digits; sizes are bytes; paths of files inside a model are
relative, with forward slashes, and safe (no `..`, no link leads out).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

SCHEMES = ("oci", "hf", "ollama", "https", "http", "file")
LAYOUTS = ("modelpack", "docker", "image")  # CNCF ModelPack artifact, Docker Model Runner artifact, OCI image (ramalama's raw and car)
ROLES = ("weights", "projector", "draft", "adapter", "config", "tokenizer", "template", "license", "doc", "other")


class StoreError(Exception):
    """Something about a model in a store; one sentence: what, why, what to do."""


class NotFound(StoreError):
    """No such model here, or in that registry."""


class Refused(StoreError):
    """Policy or safety forbids it: a host not allowed, an unsafe name, a bad signature."""


class Damaged(StoreError):
    """Bytes that are not what their digest says."""


class NoRoom(StoreError):
    """The disk cannot hold it."""


class Unreachable(StoreError):
    """A registry does not answer, or not as one does; trying again may help."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A model's name.  `str()` of it is canonical: equal references have equal texts.

    oci://HOST[:PORT]/REPOSITORY[:TAG][@DIGEST] · hf://ORG/REPO[:FILE or QUANT][@REVISION] · ollama://[NAMESPACE/]NAME[:TAG]
    · https://HOST/PATH.gguf · file:///ABSOLUTE/PATH
    """

    scheme: str
    host: str = ""  # with :PORT where one is written; "" for file, hf, ollama with their usual host
    path: str = ""  # repository, ORG/REPO, NAMESPACE/NAME, URL path with query, or the absolute file path
    tag: str = ""  # tag, file, or quantisation
    digest: str = ""  # or an hf revision

    def __str__(self) -> str:
        from .references import written

        return written(self)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model."""

    path: str
    size: int
    digest: str = ""  # "" = not known before it was read (https, file)
    role: str = "weights"
    media_type: str = ""
    blob: str = ""  # the digest again where this is an archive: its files are known once it is here


@dataclass(frozen=True, slots=True)
class Description:
    """What a model is, as far as its files or its manifest tell."""

    format: str = ""  # gguf | safetensors
    architecture: str = ""
    parameters: str = ""  # 135M
    quantization: str = ""  # Q4_1
    name: str = ""
    licenses: tuple[str, ...] = ()
    context_length: int = 0
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remote:
    """A model in a registry, resolved: nothing of it was fetched but its manifest and its configuration."""

    reference: Reference  # as asked
    digest: str  # of its manifest; "" where there is none
    layout: str  # one of LAYOUTS, or "files" for a plain list of files
    files: tuple[ModelFile, ...]
    description: Description = field(default_factory=Description)
    manifest: bytes = b""  # as the registry gave it
    config: bytes = b""
    signed_by: str = ""  # the key that vouches for it; "" = nobody

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Stored:
    """A model that is wholly here."""

    reference: Reference
    digest: str  # names this version: of the manifest, or of the list of files where there is none
    layout: str
    files: tuple[ModelFile, ...]  # each with its digest
    folder: Path  # holds every file under its own name (hard links, reflinks or copies of shared blobs)
    description: Description
    pulled_at: float  # Unix time
    signed_by: str = ""
    damaged: tuple[str, ...] = ()  # files that a verification found broken: not to be served

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def entry(self) -> Path:
        """What an engine is given as the model: its GGUF (the first part of a split one), or its folder."""
        from .roles import entry_of

        return self.folder / entry_of(self.files)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull or a push is.  `rate` bytes/s over the last seconds, `eta_s` None = cannot be said."""

    reference: str
    done: int
    total: int
    rate: float = 0.0
    eta_s: float | None = None
    file: str = ""
    stage: str = "fetching"  # resolving | fetching | verifying | publishing | pushing | done


class Source(Protocol):
    """Where models come from: one class for registries, one each for a hub, plain URLs, files on disk."""

    async def resolve(self, reference: Reference) -> Remote:
        """Raises NotFound, Refused, Unreachable."""
        ...

    def read(self, remote: Remote, file: ModelFile, offset: int, length: int) -> AsyncIterator[bytes]:
        """The bytes of a file (or of its blob) from `offset` on, at most `length`.  Not verified.  Raises as `resolve`."""
        ...

    async def close(self) -> None: ...
