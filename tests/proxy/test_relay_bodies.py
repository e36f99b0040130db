"""Request bodies: one framing upstream, the same bytes, large ones in a temporary file that leaves nothing behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
from pathlib import Path

import psutil
import pytest

from greenroom.proxy.admission import ModelRoute
from greenroom.proxy.limits import Limits

from .relay_world import EngineSide, Seen, a_caller, a_catalog, a_world, answer_ok, chunked, get, on_uvloop, post, until

JSON = b'{"prompt":"hello","model":"m"}'
CHUNKED_HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
BOUNDARY = b"--------------------------XyZ"
FORM = "multipart/form-data; boundary=" + BOUNDARY.decode()


def form(file: bytes, model: bytes = b"m") -> bytes:
    """A file part first, `model` behind it."""
    return (
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n%b\r\n'
        b'--%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--%b--\r\n'
    ) % (BOUNDARY, file, BOUNDARY, model, BOUNDARY)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_chunked_body_with_its_model_last_reaches_the_engine_with_a_length() -> None:
    """B11 (1): pieces and pauses change nothing; exactly one framing."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            await caller.send(CHUNKED_HEAD + b"\r\n")
            for piece in (JSON[:7], JSON[7:15], JSON[15:]):
                await caller.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(0.02)
            await caller.send(b"0\r\n\r\n")
            answer = await caller.answer()
            assert answer is not None
            assert answer.status == 200
            seen = world.engine.seen[0]
            assert (seen.body, seen.values(b"content-length"), seen.values(b"transfer-encoding")) == (JSON, [b"%d" % len(JSON)], [])

    on_uvloop(main)


def test_a_client_that_expects_to_be_told_to_continue_is_told() -> None:
    """B11 (2): 100 Continue before the body, then the answer."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            await caller.send(CHUNKED_HEAD + b"Expect: 100-continue\r\n\r\n")
            await caller.read_until(b"100 Continue\r\n\r\n")
            caller.raw.clear()
            await caller.send(chunked(JSON))
            answer = await caller.answer()
            assert answer is not None
            assert answer.status == 200
            assert not world.engine.seen[0].values(b"expect")

    on_uvloop(main)


@pytest.mark.parametrize(
    ("body", "extra", "status"),
    [(b"", "", 400), (b"not json", "", 400), (b"[1]", "", 400), (b"\x1f\x8b", "Content-Encoding: gzip\r\n", 415), (b"{}", "", 400)],
    ids=["empty", "not json", "a list", "gzip", "no model"],
)
def test_a_body_that_names_no_model_is_refused_and_starts_nothing(body: bytes, extra: str, status: int) -> None:
    """B11 (4), (6), (7): a JSON error, nobody is asked."""

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            answer = await caller.ask(post(body, extra=extra))
            assert answer.status == status
            assert b'"error"' in answer.body
            assert not world.admissions.tickets

    on_uvloop(main)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"not json", "application/json", "not valid JSON"),
        (b"not json", "application/x-www-form-urlencoded", "read as a form, as Content-Type says"),
        (b'{"messages":[]}', "application/x-www-form-urlencoded", "put `model` into the body"),
        (b'{"messages":[]}', "application/json", "put `model` into the body"),
        (b"", "application/x-www-form-urlencoded", "put `model` into the body"),
    ],
)
def test_what_is_missing_is_said_of_the_body_as_it_was_read(body: bytes, kind: str, said: str) -> None:
    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            answer = await caller.ask(post(body, content_type=kind))
            assert answer.status == 400
            assert said in answer.body.decode()

    on_uvloop(main)


def test_a_25_mib_json_body_costs_at_most_three_times_its_size() -> None:
    """B11 (5)."""
    body = b'{"image":"' + b"A" * (25 << 20) + b'","model":"m"}'

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            before = psutil.Process().memory_info().rss
            answer = await caller.ask(post(body))
            assert answer.status == 200
            assert sha(world.engine.seen[0].body) == sha(body)
            # The engine's and the client's copies live in this process, too.
            assert psutil.Process().memory_info().rss - before < 9 * len(body)
            assert world.stats["memory_bytes_now"] == 0

    on_uvloop(main)


def test_a_large_upload_is_spooled_unchanged_and_found_by_the_model_behind_the_file(tmp_path: Path) -> None:
    """A `model` field after a 40 MB file; memory stays flat, the file is gone at once."""
    directory = str(tmp_path)
    file = os.urandom(1 << 20) * 40
    body = form(file)
    digest, seen_digest, size = sha(body), hashlib.sha256(), 0

    async def digesting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal size
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        while size < length:
            data = await reader.read(1 << 16)
            size += len(data)
            seen_digest.update(data)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async def main() -> None:
        engine = await asyncio.start_server(digesting, "127.0.0.1", 0)
        async with a_world(spool_dir=directory) as world, a_caller(world) as caller:
            world.admissions.address = ("127.0.0.1", engine.sockets[0].getsockname()[1])
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer = await caller.ask(post(body, "/v1/audio/transcriptions", content_type=FORM))
            assert answer.body == b"ok"
            assert (size, seen_digest.hexdigest()) == (len(body), digest)
            assert os.listdir(directory) == []
            assert world.stats["spool_bytes_now"] == 0
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown_kib < 3 * len(body) // 1024  # what the client's own send buffer holds; the relay keeps none of it
        engine.close()

    on_uvloop(main)


def test_uploads_leave_nothing_whatever_happens_to_them(tmp_path: Path) -> None:
    """B15: client gone in the middle, unknown model, engine crash, refusal."""
    directory = str(tmp_path)
    body = form(b"x" * (3 << 20))

    async def crash(seen: Seen, side: EngineSide) -> None:
        side.rst()

    async def main() -> None:
        async with a_world(crash, spool_dir=directory) as world:
            async with a_caller(world) as caller:
                await caller.send(post(body, "/v1/audio/transcriptions", content_type=FORM)[: 2 << 20])
                await until(lambda: world.stats["spool_files_now"] == 1)
            async with a_caller(world) as caller:
                answer = await caller.ask(post(form(b"x" * (3 << 20), b"nobody"), "/v1/audio/transcriptions", content_type=FORM))
                assert answer.status == 404
            async with a_caller(world) as caller:
                answer = await caller.ask(post(body, "/v1/audio/transcriptions", content_type=FORM))
                assert answer.status == 502
            await until(lambda: world.stats["spool_files_now"] == 0)
            assert world.stats["spool_bytes_now"] == 0
            world.engine.reply = answer_ok
            async with a_caller(world) as caller:
                assert (await caller.ask(post(body, "/v1/audio/transcriptions", content_type=FORM))).status == 200
            assert os.listdir(directory) == []

    on_uvloop(main)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "json_mib_max"),
        ("/v1/rerank", "rerank_mib_max"),
        ("/v1/audio/transcriptions", "upload_mib_max"),
        ("/upstream/m/x", "upload_mib_max"),
        ("/api/models/m/load", ""),
    ],
)
def test_a_body_that_is_too_large_is_told_by_the_name_of_its_limit(path: str, name: str) -> None:
    """Where there is one that can be raised."""

    async def main() -> None:
        async with a_world(limits={"json_mib_max": 1, "rerank_mib_max": 1, "upload_mib_max": 1}) as world, a_caller(world) as caller:
            answer = await caller.ask(post(b"x" * (2 << 20), path, content_type=FORM if "audio" in path else "application/json"))
            said = json.loads(answer.body)["error"]["message"]
            assert (answer.status, said.rpartition("; ")[2]) == (413, f"send less or raise limits.{name}." if name else "send less.")

    on_uvloop(main)


def test_a_full_spool_is_an_answer_and_the_next_small_request_works(tmp_path: Path) -> None:
    """507 for what does not fit beside others, 413 for what never fits."""
    directory = str(tmp_path)
    limits: dict[str, int | float] = {"spool_mib_max": 2, "upload_mib_max": 8}

    async def main() -> None:
        async with a_world(limits=limits, spool_dir=directory) as world:
            async with a_caller(world) as caller:
                answer = await caller.ask(post(form(b"x" * (3 << 20)), "/v1/audio/transcriptions", content_type=FORM))
                assert answer.status == 507
            async with a_caller(world) as caller:
                answer = await caller.ask(post(form(b"x" * (9 << 20)), "/v1/audio/transcriptions", content_type=FORM))
                assert answer.status == 413
            async with a_caller(world) as caller:
                assert (await caller.ask(post(form(b"x"), "/v1/audio/transcriptions", content_type=FORM))).status == 200
            assert world.stats["spool_bytes_now"] == 0

    on_uvloop(main)


@pytest.mark.parametrize("size", [10, 1 << 20], ids=["in memory", "spooled"])
def test_the_engine_can_be_told_another_model_name_inside_a_form(size: int, tmp_path: Path) -> None:
    """useModelName replaces the field's value and nothing else."""
    directory = str(tmp_path)
    catalog = a_catalog(m=ModelRoute("m", use_model_name="whisper-large-v3"))

    async def main() -> None:
        async with a_world(catalog=catalog, spool_dir=directory) as world, a_caller(world) as caller:
            answer = await caller.ask(post(form(b"x" * size), "/v1/audio/transcriptions", content_type=FORM))
            assert answer.status == 200
            expected = form(b"x" * size, b"whisper-large-v3")
            assert world.engine.seen[0].body == expected
            assert world.engine.seen[0].values(b"content-length") == [b"%d" % len(expected)]

    on_uvloop(main)


def test_a_json_body_is_rewritten_as_the_model_says() -> None:
    """useModelName, strip and set; other values keep their bytes."""
    route = ModelRoute("m", use_model_name="real", strip_params=("temperature",), set_params={"top_k": 3})

    async def main() -> None:
        async with a_world(catalog=a_catalog(m=route)) as world, a_caller(world) as caller:
            await caller.ask(post(b'{"model":"m","temperature":1.0,"x":1.50}'))
            assert world.engine.seen[0].body == b'{"model":"real","x":1.50,"top_k":3}'

    on_uvloop(main)


def test_a_slow_engine_slows_the_sending_down(tmp_path: Path) -> None:
    """Only a piece at a time leaves the spool; the rest stays in the file."""
    directory = str(tmp_path)
    body = b"y" * (24 << 20)
    go_on = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await reader.readuntil(b"\r\n\r\n")
        left = len(body)
        while left:
            left -= len(await reader.read(1 << 18))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async def main() -> None:
        engine = await asyncio.start_server(slow, "127.0.0.1", 0)
        async with a_world(spool_dir=directory) as world, a_caller(world) as caller:
            world.admissions.address = ("127.0.0.1", engine.sockets[0].getsockname()[1])
            sending = asyncio.ensure_future(caller.ask(post(body, "/upstream/m/x")))
            await until(lambda: _sent_part_of(world) > 0)
            assert _sent_part_of(world) < len(body)
            go_on.set()
            assert (await sending).body == b"ok"
        engine.close()

    def _sent_part_of(world) -> int:  # type: ignore[no-untyped-def]
        active = [client.active for client in world.server.clients if client.active is not None]
        if not active or active[0].upstream is None or not active[0].upstream.write_paused:
            return 0
        return int(active[0].upstream.offset)

    on_uvloop(main)


def test_limits_are_read_by_name() -> None:
    """An unknown or impossible limit is an error that says so."""
    assert Limits.from_mapping({"head_kib_max": 32}).head_kib_max == 32
    with pytest.raises(ValueError, match=r"limits\.haed_kib_max is not a limit"):
        Limits.from_mapping({"haed_kib_max": 32})
    with pytest.raises(ValueError, match="more than 0"):
        Limits.from_mapping({"linger_s_max": 0})
    with pytest.raises(ValueError, match="whole number"):
        Limits.from_mapping({"head_kib_max": 1.5})


def test_raw_targets_and_queries_reach_the_engine_byte_for_byte() -> None:
    """B12: encoded slashes, odd queries, double slashes; HEAD stays HEAD."""
    targets = ["/files/dir%2Fitem.json", "/x%20y", "/q?m=a%2Fb&m=2&empty=", "/caf%C3%A9", "//double", "/%zz"]

    async def main() -> None:
        async with a_world() as world, a_caller(world) as caller:
            for target in targets:
                assert (await caller.ask(get("/upstream/org/name:tag" + target))).status == 200
            await caller.ask(get("/upstream/org%2Fname%3Atag/files/dir%2Fitem.json", method="HEAD"))
            assert [seen.target.decode() for seen in world.engine.seen] == [*targets, targets[0]]
            assert world.engine.seen[-1].method == b"HEAD"

    on_uvloop(main)


OWN_ROUTES = ["GET /health", "GET /ready", "OPTIONS /v1/chat/completions", "OPTIONS /upstream/m/x", "GET /v1/models"]


@pytest.mark.parametrize("route", OWN_ROUTES)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_routes_without_an_engine_keep_no_large_body(route: str, is_chunked: bool, tmp_path: Path) -> None:
    """Some of them ask for no key: anybody could have filled the disk."""
    page = "Origin: http://a.example\r\nAccess-Control-Request-Method: POST\r\n" if route.startswith("OPTIONS") else ""
    key = "Authorization: Bearer k1\r\n" if "models" in route else ""
    framing = "Transfer-Encoding: chunked\r\n" if is_chunked else f"Content-Length: {10 << 20}\r\n"
    piece = b"%x\r\n%b\r\n" % (1 << 20, bytes(1 << 20)) if is_chunked else bytes(1 << 20)

    async def main() -> None:
        async with a_world(keys=("k1",), spool_dir=str(tmp_path)) as world, a_caller(world) as caller:
            await caller.send(f"{route} HTTP/1.1\r\nHost: localhost\r\n{page}{key}{framing}\r\n".encode())
            await caller.send(piece * (1 if is_chunked else 0))
            answer = await caller.answer(route.partition(" ")[0])
            assert answer is not None
            assert answer.status == 413
            assert world.stats["spool_bytes_now"] == world.stats["spool_files_now"] == 0

    on_uvloop(main)
