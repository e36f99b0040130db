"""Bringing blobs and manifests to a registry: nothing is sent that is there, and what breaks off goes on where it was."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from yarl import URL

from .facts import Damaged, Reference, Refused, StoreError, Unreachable
from .packing import Layer, read_layer
from .ranges import status_error
from .registry import Place, Registry
from .web import BACKOFF_S_MAX, Text, words

CHUNK_BYTES = 64 * 1024 * 1024  # of a PATCH, where all at once did not go
TRIES_MAX = 5  # in a row, without a byte more at the registry
RECEIVED = re.compile(r"(?:bytes=)?0-(\d{1,18})")

OnBytes = Callable[[int], None]  # how many of a blob's bytes are there


@dataclass(frozen=True, slots=True)
class Blob:
    """What is to be there."""

    digest: str
    size: int
    read: Callable[[int], Iterator[bytes]]  # its bytes from an offset on; runs in a thread


def of_layer(layer: Layer) -> Blob:
    return Blob(layer.digest, layer.size, lambda offset: read_layer(layer, offset))


async def has_blob(registry: Registry, reference: Reference, digest: str) -> bool:
    answer = await registry.answer("HEAD", await registry.home(reference), f"blobs/{digest}", {}, push=True)
    answer.close()
    if answer.status not in (200, 404):
        raise status_error(answer.status, answer.url, f"{digest} of {reference.path}")
    return answer.status == 200


async def push_blob(
    registry: Registry, reference: Reference, blob: Blob, *, mount_from: str = "", on_bytes: OnBytes = lambda count: None
) -> str:
    """Brings a blob to the reference's repository; tells how: `there`, `mounted`, `pushed`, `pushed in pieces`.

    `mount_from`: another repository of the registry that may have it.  Raises Refused, Unreachable, Damaged.
    """
    if await has_blob(registry, reference, blob.digest):
        on_bytes(blob.size)
        return "there"
    place = await registry.home(reference)
    query = f"?mount={blob.digest}&from={mount_from}" if mount_from and mount_from != reference.path else ""
    text = await registry.text("POST", place, f"blobs/uploads/{query}", {"Content-Length": "0"}, push=True)
    if text.status == 201:
        on_bytes(blob.size)
        return "mounted"
    if text.status != 202:
        raise _error(text, reference)
    return await _Upload(registry, place, reference, blob, on_bytes, _location(text, place.base)).run()


async def put_manifest(registry: Registry, reference: Reference, data: bytes, media_type: str, which: str = "") -> str:
    """Names what was uploaded; gives the manifest's digest."""
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    place = await registry.home(reference)
    path = f"manifests/{which or reference.tag or digest}"
    text = await registry.text("PUT", place, path, {"Content-Type": media_type}, push=True, body=lambda: data)
    if text.status not in (200, 201):
        raise _error(text, reference)
    told = text.headers.get("Docker-Content-Digest", digest)
    if told != digest:
        raise Damaged(f"{place.host} says it stored {told} where {digest} was sent: push again")
    return digest


@dataclass(slots=True)
class _Upload:
    registry: Registry
    place: Place
    reference: Reference
    blob: Blob
    on_bytes: OnBytes
    url: URL  # the upload's own address; every answer may give a new one

    async def run(self) -> str:
        """All at once, as most registries take it; in pieces when that is refused or breaks off."""
        try:
            text = await self._send("PUT", self._closing(), 0, self.blob.size)
            if text.status in (200, 201):
                return "pushed"
            if text.status in (401, 403, 507):
                raise _error(text, self.reference)
        except Unreachable:
            pass  # the connection broke: what arrived counts
        await self._in_pieces()
        text = await self._send("PUT", self._closing(), self.blob.size, 0)
        if text.status not in (200, 201):
            raise _error(text, self.reference)
        return "pushed in pieces"

    async def _in_pieces(self) -> None:
        done, idle = await self._received(), 0
        while done < self.blob.size:
            before = done
            try:
                length = min(CHUNK_BYTES, self.blob.size - done)
                text = await self._send("PATCH", self.url, done, length)
                if text.status in (401, 403, 507):
                    raise _error(text, self.reference)
                if text.status in (200, 201, 202, 204):
                    self.url = _location(text, self.url) if "Location" in text.headers else self.url
                    done += length
                else:
                    done = await self._received()
            except Unreachable:
                done = await self._received()
            idle = 0 if done > before else idle + 1
            if idle >= TRIES_MAX:
                raise Unreachable(f"{self.place.host} takes no more of {self.blob.digest} after {done:,} bytes: push again later")
            if idle:
                await asyncio.sleep(min(BACKOFF_S_MAX, self.registry.web.backoff_s * 2**idle))

    async def _received(self) -> int:
        """How much of it the registry has."""
        answer = await self.registry.answer("GET", self.place, self.url, {}, push=True)
        answer.close()
        if answer.status == 404:
            # It forgot the upload: from the start.
            text = await self.registry.text("POST", self.place, "blobs/uploads/", {"Content-Length": "0"}, push=True)
            if text.status != 202:
                raise _error(text, self.reference)
            self.url = _location(text, self.place.base)
            return 0
        match = RECEIVED.match(answer.headers.get("Range", ""))
        if "Location" in answer.headers:
            self.url = _joined(answer.url, answer.headers["Location"])
        done = int(match[1]) + 1 if match and match[1] != "0" else 0
        return min(done, self.blob.size)

    async def _send(self, method: str, url: URL, offset: int, length: int) -> Text:
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(length)}
        if method == "PATCH":
            headers["Content-Range"] = f"{offset}-{offset + length - 1}"
        body = (lambda: self._pieces(offset, length)) if length else None
        return await self.registry.text(method, self.place, url, headers, push=True, body=body, tries=1)

    async def _pieces(self, offset: int, length: int) -> AsyncIterator[bytes]:
        loop, end = asyncio.get_running_loop(), offset + length
        pieces = self.blob.read(offset)
        ahead = loop.run_in_executor(None, next, pieces, b"")
        try:
            while offset < end:
                data = await ahead
                if not data:
                    raise StoreError(f"{self.blob.digest} became shorter while it was pushed: it must not change meanwhile")
                data = data[: end - offset]
                offset += len(data)
                ahead = loop.run_in_executor(None, next, pieces, b"")
                yield data
                self.on_bytes(offset)
        finally:
            await asyncio.wait([ahead])

    def _closing(self) -> URL:
        query = f"{self.url.raw_query_string}&" if self.url.raw_query_string else ""
        return URL(f"{str(self.url).partition('?')[0]}?{query}digest={self.blob.digest.replace(':', '%3A')}", encoded=True)


def _location(text: Text, base: URL) -> URL:
    if not (target := text.headers.get("Location")):
        raise StoreError(f"{text.url.host} starts an upload without telling where to: it is no registry as they are specified")
    return _joined(text.url if text.url.host else base, target)


def _joined(url: URL, target: str) -> URL:
    try:
        return url.join(URL(target, encoded=True))
    except ValueError:
        raise StoreError(f"{url.host} gives an address that cannot be read for an upload") from None


def _error(text: Text, reference: Reference) -> StoreError:
    if text.status in (401, 403):
        host = reference.host
        return Refused(f"{host} does not let us push to {reference.path} ({text.status}{words(text)}): log in with an account that may")
    return status_error(text.status, text.url, f"place for {reference.path}", words(text))
