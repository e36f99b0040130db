"""Models at plain web addresses: a GGUF file, with its other parts where it is split."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import quote

from yarl import URL

from .facts import Damaged, ModelFile, Reference, Refused, Remote
from .ranges import CONTENT_RANGE, Opener, Stretch, bytes_of, range_headers, status_error, stretch
from .references import file_name
from .roles import PART, role_of
from .web import Headers, Web

PARTS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """One file as its server tells of it.  `version`: its ETag or date, so that two versions are not mixed."""

    url: URL
    size: int
    version: str


@dataclass(slots=True)
class Urls:
    web: Web
    _places: dict[tuple[Reference, str], Place] = field(default_factory=dict)

    async def resolve(self, reference: Reference) -> Remote:
        """Asks for the size of each part.  Raises NotFound, Refused (no size told, an unsafe name), Unreachable."""
        files = []
        for name, url in parts_of(reference):
            place = await self._place(url, name)
            self._places[reference, name] = place
            files.append(ModelFile(name, place.size, "", role_of(name)))
        return Remote(reference, "", "files", tuple(files))

    def opener(self, remote: Remote, file: ModelFile) -> Opener:
        return lambda offset, length: self._stretch(self._places[remote.reference, file.path], file, offset, length)

    def key(self, remote: Remote, file: ModelFile) -> str:
        place = self._places[remote.reference, file.path]
        return hashlib.sha256(f"{place.url} {place.size} {place.version}".encode()).hexdigest()

    def read(self, remote: Remote, file: ModelFile, offset: int, length: int) -> AsyncIterator[bytes]:
        return bytes_of(self.opener(remote, file), offset, length)

    async def close(self) -> None:
        await self.web.close()

    async def _place(self, url: URL, name: str) -> Place:
        async with self.web.open("HEAD", url) as answer:
            status, headers, end = answer.status, answer.headers, answer.url
        size = _size(headers) if status == 200 else None
        if size is None and status not in (404, 410):
            # Some servers know no HEAD, and signed addresses are often for GET alone.
            async with self.web.open("GET", url, headers={"Range": "bytes=0-0"}) as answer:
                status, headers, end = answer.status, answer.headers, answer.url
            match = CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
            size = int(match[3]) if status == 206 and match and match[3] != "*" else _size(headers) if status == 200 else None
        if status not in (200, 206):
            raise status_error(status, end, name)
        if size is None:
            raise Refused(f"{url.host} does not tell how long {name} is: it cannot be checked against the free space, so it is not fetched")
        return Place(url, size, _version(headers))

    @asynccontextmanager
    async def _stretch(self, place: Place, file: ModelFile, offset: int, length: int) -> AsyncIterator[Stretch]:
        async with self.web.open("GET", place.url, headers=range_headers(offset, length, file.size)) as answer:
            if answer.status in (200, 206) and _version(answer.headers) != place.version:
                raise Damaged(f"{file.path} changed at {place.url.host} while it was fetched: pull again")
            async with stretch(answer, offset, length, file.size, file.path) as found:
                yield found


def parts_of(reference: Reference) -> list[tuple[str, URL]]:
    """Name and address of each part: of `x-00001-of-00003.gguf` all three, of anything else itself."""
    name = file_name(reference)
    url = URL(f"{reference.scheme}://{reference.host}{reference.path}", encoded=True)
    match = PART.match(name)
    if match is None:
        return [(name, url)]
    parts = int(match["parts"])
    if not 1 <= parts <= PARTS_MAX:
        raise Refused(f"{name} claims {parts:,} parts; {PARTS_MAX:,} are the limit")
    names = [f"{match['stem']}-{part:05}-of-{match['parts']}{match['ending']}" for part in range(1, parts + 1)]
    folder, query = url.raw_path.rpartition("/")[0], f"?{url.raw_query_string}" if url.raw_query_string else ""
    return [(part, url if part == name else URL(f"{url.origin()}{folder}/{quote(part)}{query}", encoded=True)) for part in names]


def _size(headers: Headers) -> int | None:
    written = headers.get("Content-Length", "")
    return int(written) if written.isdecimal() and int(written) > 0 else None


def _version(headers: Headers) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or ""
