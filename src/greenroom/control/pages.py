"""The dashboard's files, as they lie in the package: read once, served from memory.

A path is looked up in the table of what was read, never on the disk, so none can lead anywhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

import greenroom

FOLDER = Path(greenroom.__file__).parent / "ui"
INDEX = "index.html"

TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# The page needs its own files and its own server, nothing else; nobody may put it into a frame.
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",  # kept, but asked about each time: a new version is seen at once
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    type: str
    etag: str


def read_pages(folder: Path = FOLDER) -> dict[str, Page]:
    """Every file of a known type below `folder`, by its path there."""
    found = sorted(path for path in folder.rglob("*") if path.suffix in TYPES and path.is_file())
    return {path.relative_to(folder).as_posix(): page(path) for path in found}


def page(path: Path) -> Page:
    body = path.read_bytes()
    return Page(body, TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:20])


def add_pages(router: web.UrlDispatcher, pages: Mapping[str, Page]) -> None:
    """GET and HEAD of /ui/ and what is below it."""

    async def get_page(request: web.Request) -> web.StreamResponse:
        found = pages.get(request.match_info["path"] or INDEX)
        if found is None:
            raise web.HTTPNotFound
        headers = {**HEADERS, "ETag": f'"{found.etag}"'}
        if any(tag.value == found.etag or tag.value == "*" for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=found.body, headers={**headers, "Content-Type": found.type})

    router.add_get("/ui/{path:.*}", get_page)
