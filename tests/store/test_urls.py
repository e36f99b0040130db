"""Plain addresses: one file, all parts of a split one, and servers that tell too little."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from greenroom.store.facts import Damaged, NotFound, Refused
from greenroom.store.library import Library
from greenroom.store.pull import Options, Puller
from greenroom.store.references import parse
from greenroom.store.urls import parts_of

from .models import gguf
from .servers import Fake, serving

MIB = 1 << 20


class Files(Fake):
    """A web server with files."""

    files: dict[str, bytes]
    head = True
    length = True
    etag = '"one"'

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path, request.headers.get("Range", "")))
        data = self.files.get(request.path)
        if data is None or (request.method == "HEAD" and not self.head):
            return web.Response(status=404 if data is None else 405)
        if not self.length:
            response = web.StreamResponse(headers={"ETag": self.etag})
            response.enable_chunked_encoding()
            await response.prepare(request)
            await response.write(data)
            return response
        if request.method == "HEAD":
            return web.Response(headers={"ETag": self.etag, "Content-Length": str(len(data))})
        response = web.StreamResponse(headers={"ETag": self.etag})
        first, last = 0, len(data) - 1
        if self.ranges and (asked := request.headers.get("Range")):
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end), last)
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        response.content_length = last + 1 - first
        await response.prepare(request)
        await response.write(data[first : last + 1])
        return response


@pytest.fixture
async def files() -> AsyncIterator[Files]:
    files = Files()
    files.files = {"/a/m.gguf": gguf(100_000)}
    async with serving(files):
        yield files


async def test_a_file(files: Files, tmp_path: Path) -> None:
    """It is plain http on this machine; nobody vouches for its bytes, so what came is what is kept."""
    stored = await Puller(Library(tmp_path)).pull(parse(f"http://{files.host}/a/m.gguf"))
    assert stored.entry.read_bytes() == files.files["/a/m.gguf"]


async def test_plain_http_elsewhere_is_asked_for_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="without TLS"):
        await Puller(Library(tmp_path)).pull(parse("http://h.example/m.gguf"))


async def test_all_parts_of_a_split_file(files: Files, tmp_path: Path) -> None:
    parts = {
        f"/a/m-0000{number}-of-00003.gguf": gguf(50_000, fields={"split.count": 3, "split.no": number - 1}, seed=number)
        for number in (1, 2, 3)
    }
    files.files |= parts
    stored = await Puller(Library(tmp_path)).pull(parse(f"http://{files.host}/a/m-00002-of-00003.gguf"))

    assert stored.entry.name == "m-00001-of-00003.gguf"
    assert [path.read_bytes() for path in sorted(stored.folder.iterdir())] == list(parts.values())
    del files.files["/a/m-00003-of-00003.gguf"]
    with pytest.raises(NotFound, match="m-00003"):
        await Puller(Library(tmp_path / "other")).pull(parse(f"http://{files.host}/a/m-00001-of-00003.gguf"))


def test_names_of_parts_keep_their_query() -> None:
    urls = [str(url) for _, url in parts_of(parse("https://h.example/x-00001-of-00002.gguf?sig=a%2Fb"))]
    assert urls == ["https://h.example/x-00001-of-00002.gguf?sig=a%2Fb", "https://h.example/x-00002-of-00002.gguf?sig=a%2Fb"]
    with pytest.raises(Refused, match="99,999 parts"):
        parts_of(parse("https://h.example/x-00001-of-99999.gguf"))


async def test_a_server_that_knows_no_head(files: Files, tmp_path: Path) -> None:
    """Then a range of one byte tells the size; or, without ranges, the answer itself."""
    files.head = False
    await Puller(Library(tmp_path / "a")).pull(parse(f"http://{files.host}/a/m.gguf"))
    files.ranges = False
    await Puller(Library(tmp_path / "b")).pull(parse(f"http://{files.host}/a/m.gguf"))


async def test_a_server_that_tells_no_size_is_not_fetched_from(files: Files, tmp_path: Path) -> None:
    files.length = files.head = False
    with pytest.raises(Refused, match="how long"):
        await Puller(Library(tmp_path)).pull(parse(f"http://{files.host}/a/m.gguf"))


async def test_a_file_that_changes_meanwhile_is_not_mixed(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has another ETag."""
    monkeypatch.setattr(Files, "etag", property(lambda self: f'"{len(self.asked)}"'))
    with pytest.raises(Damaged, match="changed"):
        await Puller(Library(tmp_path)).pull(parse(f"http://{files.host}/a/m.gguf"))
    assert Library(tmp_path).all() == ()


async def test_what_is_no_model_is_not_kept(files: Files, tmp_path: Path) -> None:
    files.files["/a/m.gguf"] = b"<html>log in first</html>"
    with pytest.raises(Damaged):
        await Puller(Library(tmp_path)).pull(parse(f"http://{files.host}/a/m.gguf"))
    assert Library(tmp_path).all() == ()


async def test_a_file_of_this_host_is_taken_in(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(50_000))
    library = Library(tmp_path / "store")
    stored = await Puller(library).pull(parse(f"file://{tmp_path}/m.gguf"))

    assert stored.entry.read_bytes() == gguf(50_000)
    with pytest.raises(Refused, match="operator"):
        await Puller(library, Options(files=False)).pull(parse(f"file://{tmp_path}/m.gguf"))
