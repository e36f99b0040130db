"""Models in OCI registries, as a source: manifests resolved to files, blobs by ranges.  Ollama's registry is one, too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from .facts import ModelFile, Reference, Remote, StoreError
from .layouts import digest_of, is_index, pick, read_config_descriptor, read_manifest
from .ranges import Opener, bytes_of
from .registry import Registry

INDEXES_MAX = 2  # an index in an index; deeper ones are nobody's model
PLATFORM = "linux/amd64"
OLLAMA_HOST = "registry.ollama.ai"


@dataclass(slots=True)
class Artifacts:
    """`platform`: OS/ARCHITECTURE of the manifest that is taken from an index."""

    registry: Registry
    platform: str = PLATFORM

    async def resolve(self, reference: Reference) -> Remote:
        remote, _ = await self.resolved(reference)
        return remote

    async def resolved(self, reference: Reference) -> tuple[Remote, tuple[str, ...]]:
        """The model, and all digests that lead to it: of the manifest, and of the index that lists it.  A signature may be of either."""
        asked = as_oci(reference)
        system, _, architecture = self.platform.partition("/")
        digests: list[str] = []
        which = ""
        for _ in range(INDEXES_MAX + 1):
            manifest = await self.registry.manifest(asked, which)
            digests.append(manifest.digest)
            if not is_index(manifest.data):
                break
            which = pick(manifest.data, architecture or "amd64", system or "linux").digest
        else:
            raise StoreError(f"{reference} is a list of lists of manifests: name the one you mean by its digest")
        told = read_config_descriptor(manifest.data)
        config = await self.registry.blob(asked, told.digest, told.size)
        remote = read_manifest(asked, manifest.data, config, digest_of(manifest.data))
        return replace(remote, reference=reference), tuple(digests)

    def opener(self, remote: Remote, file: ModelFile) -> Opener:
        return self.registry.opener(as_oci(remote.reference), file.digest, file.size)

    def key(self, remote: Remote, file: ModelFile) -> str:
        return ""

    def read(self, remote: Remote, file: ModelFile, offset: int, length: int) -> AsyncIterator[bytes]:
        return bytes_of(self.opener(remote, file), offset, length)

    async def close(self) -> None:
        await self.registry.web.close()


def as_oci(reference: Reference) -> Reference:
    """Where a registry has it: a model of Ollama is one in its registry."""
    if reference.scheme == "oci":
        return reference
    return Reference("oci", reference.host or OLLAMA_HOST, reference.path, reference.tag, reference.digest)
