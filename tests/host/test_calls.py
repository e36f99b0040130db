"""Requests to an engine: the whole answer, or one clause that says why there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from greenroom.engines.base import Call
from greenroom.host import calls
from greenroom.host.calls import Line, Reply, Unanswered, pick

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n" + b'{"asleep":true}'


@asynccontextmanager
async def server(talk: Talk, host: str = "127.0.0.1") -> AsyncIterator[int]:
    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(guarded, host, 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


def says(answer: bytes, heard: list[bytes] | None = None) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
        body = await reader.readexactly(length)
        if heard is not None:
            heard.append(head + body)
        writer.write(answer)
        await writer.drain()

    return talk


async def test_a_call_is_sent_as_it_is_written_and_answered_whole() -> None:
    """Method, base path, query, the engine's key and the JSON body arrive; status and body come back."""
    heard: list[bytes] = []
    async with server(says(OK, heard)) as port:
        line = Line("127.0.0.1", port, "/engine", [("Authorization", "Bearer secret")])
        reply = await line.ask(Call("/sleep?level=1", "POST", b'{"a":1}'), 5)

    assert (reply.status, reply.ok, reply.json()) == (200, True, {"asleep": True})
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /engine/sleep?level=1 HTTP/1.1\r\n")
    assert (b"authorization: bearer secret" in head.lower(), b"content-type: application/json" in head.lower()) == (True, True)
    assert body == b'{"a":1}'


async def test_a_call_without_a_body_has_no_content_type() -> None:
    """Some engines refuse an empty body that claims to be JSON."""
    heard: list[bytes] = []
    async with server(says(OK, heard)) as port:
        await Line("127.0.0.1", port).ask(Call("/wake_up"), 5)

    assert b"content-type: application/json" not in heard[0].lower()


async def test_ipv6_is_spoken_too() -> None:
    """An address with colons is put in brackets."""
    try:
        async with server(says(OK), "::1") as port:
            assert (await Line("::1", port).ask(Call("/is_sleeping", "GET"), 5)).ok
    except OSError as exc:
        pytest.skip(f"no IPv6 here: {exc}")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "POST /sleep broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", "POST /sleep broke off"),
        (b"\x00\x01 no http\r\n\r\n", "POST /sleep broke off"),
    ],
)
async def test_half_an_answer_is_none(answer: bytes, why: str) -> None:
    """Whatever of it came."""
    async with server(says(answer)) as port:
        with pytest.raises(Unanswered, match=why):
            await Line("127.0.0.1", port).ask(Call("/sleep"), 5)


async def test_nobody_there_is_told_at_once() -> None:
    """A refused connection is no answer."""
    async with server(says(OK)) as port:
        pass
    with pytest.raises(Unanswered, match="GET /version broke off"):
        await Line("127.0.0.1", port).ask(Call("/version", "GET"), 5)


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"])
async def test_an_answer_that_does_not_end_is_given_up(begun: bytes) -> None:
    """The limit is for all of it: connection, head and body."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(begun)
        await writer.drain()
        await reader.read()  # until the other side hangs up

    async with server(talk) as port:
        began_at = time.monotonic()
        with pytest.raises(Unanswered, match=r"POST /sleep was not answered in 0\.3 s"):
            await Line("127.0.0.1", port).ask(Call("/sleep"), 0.3)
        assert 0.25 < time.monotonic() - began_at < 3


async def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of any size is kept in memory."""
    monkeypatch.setattr(calls, "BODY_BYTES_MAX", 1000)
    async with server(says(b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000)) as port:
        with pytest.raises(Unanswered, match="answered more than 1000 bytes"):
            await Line("127.0.0.1", port).ask(Call("/sleep"), 5)


async def test_a_redirect_is_not_followed() -> None:
    """An engine must not send us elsewhere."""
    async with server(says(b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")) as port:
        reply = await Line("127.0.0.1", port).ask(Call("/sleep"), 5)
    assert (reply.status, reply.ok) == (307, False)


@pytest.mark.parametrize(("body", "value"), [(b'{"a": 1}', {"a": 1}), (b"", None), (b"\xff\xfe", None), (b"not json", None)])
def test_a_body_that_is_no_json_is_none(body: bytes, value: Any) -> None:
    assert Reply(200, body).json() == value


def test_text_for_people_is_one_short_line() -> None:
    """Whitespace is folded, bytes that are no text replaced, the rest left out."""
    text = Reply(500, b"one\n\n  two\xff " + b"x" * 5000).text(20)
    assert text == "one two\ufffd xxxxxxxxxxx"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", {"a": [{"b": 1}, {"b": 2}], "c": {"d": False}}),
        ("c.d", False),
        ("a.1.b", 2),
        ("a.*.b", [1, 2]),
        ("a.7.b", None),
        ("a.b", None),
        ("c.d.e", None),
        ("x", None),
        ("c.*", None),
    ],
)
def test_a_path_into_an_answer(path: str, found: Any) -> None:
    """Dots go deeper, numbers and `*` into lists; None where it leads nowhere."""
    assert pick({"a": [{"b": 1}, {"b": 2}], "c": {"d": False}}, path) == found
