"""Pushing blobs: all at once, and in pieces where that is refused or breaks off; and how far things are."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from greenroom.store import uploads
from greenroom.store.facts import Refused
from greenroom.store.guard import Policy
from greenroom.store.packing import Layer
from greenroom.store.progress import Meter
from greenroom.store.references import parse
from greenroom.store.registry import Registry
from greenroom.store.uploads import of_layer, push_blob
from greenroom.store.web import Web

from .models import digest
from .servers import Fake, serving

DATA = bytes(range(256)) * 4096  # 1 MiB
BLOB = of_layer(Layer("x/y", digest(DATA), len(DATA), (DATA[:1000], DATA[1000:])))


class Receiving(Fake):
    """A registry that takes uploads, in the ways it is told to."""

    got = bytearray()
    whole = True  # takes all at once
    breaks_at: int | None = None  # the connection breaks after so many bytes of an upload, once
    status = 0  # of every upload request

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path, request.headers.get("Content-Range", "")))
        there = {"Location": "/v2/m/blobs/uploads/one?state=a%2Fb", "Range": f"0-{max(0, len(self.got) - 1)}"}
        if self.status and request.method != "HEAD":
            return web.json_response({"errors": [{"code": "DENIED", "message": "not yours"}]}, status=self.status)
        match request.method:
            case "HEAD":
                return web.Response(status=200 if hashlib.sha256(self.got).hexdigest() in request.path else 404)
            case "POST":
                return web.Response(status=202, headers=there)
            case "GET":
                return web.Response(status=204, headers=there)
        if request.method == "PUT" and not self.whole and request.content_length:
            return web.Response(status=405)
        first = int(request.headers.get("Content-Range", "0-").partition("-")[0])
        if request.content_length and first != len(self.got):
            return web.Response(status=416)
        async for piece in request.content.iter_any():
            self.got += piece
            if self.breaks_at is not None and len(self.got) >= self.breaks_at:
                self.breaks_at = None
                assert request.transport is not None
                request.transport.abort()
        there["Range"] = f"0-{max(0, len(self.got) - 1)}"
        assert "state=a%2Fb" in request.path_qs
        return web.Response(status=201 if request.method == "PUT" else 202, headers=there)


@pytest.fixture
async def receiving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Receiving]:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none.json"))
    monkeypatch.setattr(uploads, "CHUNK_BYTES", 300_000)
    receiving = Receiving()
    receiving.got = bytearray()
    async with serving(receiving):
        yield receiving


async def pushed(receiving: Receiving) -> tuple[str, list[int]]:
    seen: list[int] = []
    web_ = Web(Policy(named=frozenset({receiving.host})), backoff_s=0.0)
    try:
        how = await push_blob(Registry(web_), parse(f"oci://{receiving.host}/m:v1"), BLOB, on_bytes=seen.append)
    finally:
        await web_.close()
    return how, seen


async def test_all_at_once(receiving: Receiving) -> None:
    """And nothing the second time."""
    assert (await pushed(receiving))[0] == "pushed"
    assert bytes(receiving.got) == DATA
    assert await pushed(receiving) == ("there", [len(DATA)])


async def test_a_registry_that_wants_pieces_gets_pieces(receiving: Receiving) -> None:
    receiving.whole = False
    how, seen = await pushed(receiving)

    assert how == "pushed in pieces"
    assert bytes(receiving.got) == DATA
    assert [item[2] for item in receiving.asked if item[0] == "PATCH"] == ["0-299999", "300000-599999", "600000-899999", "900000-1048575"]
    assert seen[-1] == len(DATA)


async def test_an_upload_that_breaks_off_goes_on_where_it_was(receiving: Receiving) -> None:
    """The registry is asked how much it has; that is not sent again."""
    receiving.breaks_at = 500_000
    how, _ = await pushed(receiving)

    assert how == "pushed in pieces"
    assert bytes(receiving.got) == DATA
    assert int(next(item[2] for item in receiving.asked if item[0] == "PATCH").partition("-")[0]) >= 500_000


async def test_no_right_to_push_is_told(receiving: Receiving) -> None:
    receiving.status = 403
    with pytest.raises(Refused, match=r"403: not yours.*log in"):
        await pushed(receiving)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    now = 0.0
    meter = Meter("r", total=1000, clock=lambda: now)
    for _ in range(100):  # 10 s at 10 bytes/s
        meter.add(1)
        now += 0.1
    assert meter.progress().rate == pytest.approx(10, rel=0.1)
    for _ in range(60):  # 6 s at 100 bytes/s
        meter.add(10)
        now += 0.1
    told = meter.progress()
    assert told.rate == pytest.approx(100, rel=0.15)
    assert told.eta_s == pytest.approx((1000 - 700) / told.rate)
    assert Meter("r").progress().eta_s is None
