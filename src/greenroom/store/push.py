"""Bring a model to a registry, in one of the layouts, sending only what is not there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from .artifacts import Artifacts
from .facts import LAYOUTS, Description, ModelFile, Reference, Refused, Stored, StoreError
from .gguf_files import examine, local_files
from .library import Library, check_usable, hash_file, list_digest
from .packing import Layer, Packed, pack
from .progress import Meter, Tell, nobody
from .pull import Options, source_of, to_its_end
from .registry import Registry
from .roles import role_of
from .uploads import OnBytes, of_layer, push_blob, put_manifest

BLOBS_AT_ONCE_MAX = 3


@dataclass(frozen=True, slots=True)
class Pushed:
    """`sent` bytes went over the wire; the others were there."""

    reference: Reference
    digest: str
    layout: str
    size: int
    sent: int


@dataclass(slots=True)
class Pusher:
    """Pushes models of one library, or files."""

    library: Library
    options: Options = field(default_factory=Options)

    async def push(self, stored: Stored, target: Reference, layout: str = "", tell: Tell = nobody) -> Pushed:
        """The manifest comes last: a push that is interrupted changes nothing that others see.

        Raises StoreError: Refused (no right to, not `oci://`), Unreachable, Damaged.
        """
        if target.scheme != "oci" or target.digest:
            raise Refused(f"{target} is no place to push to: write oci://HOST/REPOSITORY:TAG")
        if layout and layout not in LAYOUTS:
            raise Refused(f"there is no layout {layout!r}: {', '.join(LAYOUTS)}")
        if self.options.offline:
            raise Refused("nothing is pushed while offline")
        check_usable(stored)
        meter = Meter(str(target), tell)
        meter.at("resolving")
        packed = await to_its_end(asyncio.to_thread(pack, stored, layout))
        source = source_of(target, self.options)
        assert isinstance(source, Artifacts)
        try:
            with self.library.using(stored):
                return await self._pushed(packed, source.registry, target, self._mounts(stored, target), meter)
        finally:
            await source.close()

    async def _pushed(self, packed: Packed, registry: Registry, target: Reference, mount_from: str, meter: Meter) -> Pushed:
        blobs = {layer.digest: layer for layer in (packed.config, *packed.layers)}
        meter.total = sum(layer.size for layer in blobs.values())
        meter.at("pushing")
        at_once = asyncio.Semaphore(BLOBS_AT_ONCE_MAX)
        sent = 0

        async def one(layer: Layer) -> None:
            nonlocal sent
            async with at_once:
                how = await push_blob(registry, target, of_layer(layer), mount_from=mount_from, on_bytes=counting(meter))
            sent += layer.size if how.startswith("pushed") else 0

        try:
            async with asyncio.TaskGroup() as group:
                for layer in blobs.values():
                    group.create_task(one(layer))
        except* StoreError as faults:
            raise _first(faults) from None
        meter.at("publishing")
        digest = await put_manifest(registry, target, packed.manifest, packed.media_type)
        meter.at("done")
        return Pushed(target, digest, packed.layout, meter.total, sent)

    def _mounts(self, stored: Stored, target: Reference) -> str:
        """Another repository of the same registry that may have the blobs already: the one it was pulled from, under any name."""
        here = (other.reference for other in self.library.all() if other.digest == stored.digest)
        return next((name.path for name in here if name.scheme == "oci" and name.host == target.host and name.path != target.path), "")


def loose(path: Path) -> Stored:
    """A file (with its other parts and its projector) or a folder, to push without taking it in.  Reads all of it."""
    reference = Reference("file", "", str(path))
    sources = local_files(path)
    folder = path if path.is_dir() else path.parent
    try:
        files = tuple(ModelFile(name, source.stat().st_size, hash_file(source), role_of(name)) for name, source in sources)
    except OSError as exc:
        raise StoreError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    files, description = examine(folder, files, Description())
    return Stored(reference, list_digest(files), "files", files, folder, description, 0.0)


def counting(meter: Meter) -> OnBytes:
    """Turns "so many bytes of this blob are there" into steps of the meter."""
    seen = 0

    def on_bytes(count: int) -> None:
        nonlocal seen
        meter.add(count - seen)
        seen = count

    return on_bytes


def _first(faults: BaseExceptionGroup[StoreError]) -> StoreError:
    fault = faults.exceptions[0]
    return _first(fault) if isinstance(fault, BaseExceptionGroup) else fault
