"""Answers as bytes, some of them wrong, each with what the client must get; shared by the tests and the fuzzer."""

from __future__ import annotations

from dataclasses import dataclass

OK = b"HTTP/1.1 200 OK\r\n"
MARKER = b"SURPLUS"
SECOND = OK + b"Content-Length: 7\r\n\r\n" + MARKER


@dataclass(frozen=True, slots=True)
class EngineCase:
    name: str
    data: bytes
    ending: str  # fin | rst | open
    status: int
    complete: bool
    body: bytes = b""
    method: str = "GET"


def whole(name: str, data: bytes, body: bytes = b"hello", ending: str = "open", status: int = 200, method: str = "GET") -> EngineCase:
    return EngineCase(name, data, ending, status, True, body, method)


def bad(name: str, data: bytes, ending: str = "open") -> EngineCase:
    """502, complete: nothing of the answer was relayed."""
    return EngineCase(name, data, ending, 502, True)


def cut(name: str, data: bytes, body: bytes, ending: str = "fin") -> EngineCase:
    return EngineCase(name, data, ending, 200, False, body)


def sized(value: bytes, body: bytes = b"hello") -> bytes:
    return OK + b"Content-Length: " + value + b"\r\n\r\n" + body


def chunky(body: bytes) -> bytes:
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + body


CASES: tuple[EngineCase, ...] = (
    whole("length", sized(b"5")),
    whole("chunked", chunky(b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")),
    whole("chunked with extension and trailer", chunky(b"5;x=y\r\nhello\r\n0\r\nX-Trailer: 1\r\n\r\n")),
    whole("until close", OK + b"\r\nhello", ending="fin"),
    whole("1.0 until close", b"HTTP/1.0 200 OK\r\n\r\nhello", ending="fin"),
    whole("length, then close", OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", ending="fin"),
    whole("length zero", sized(b"0", b""), b""),
    whole("empty chunked", chunky(b"0\r\n\r\n"), b""),
    whole("204 with a length", b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", b"", status=204),
    whole("204 with a body", b"HTTP/1.1 204 No Content\r\nContent-Length: 7\r\n\r\n" + MARKER, b"", status=204),
    whole("304 with a length", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", status=304),
    whole("head", sized(b"5", b""), b"", method="HEAD"),
    whole("head with a body", sized(b"7", MARKER), b"", method="HEAD"),
    whole("head chunked", chunky(b""), b"", method="HEAD"),
    whole("100 before", b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"5")),
    whole("102 and 103 before", b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + sized(b"5")),
    whole("reason with odd bytes", b"HTTP/1.1 200 \xffn\x80\r\nContent-Length: 5\r\n\r\nhello"),
    whole("no reason", b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello"),
    whole("longer than its length", sized(b"5", b"hello" + MARKER)),
    whole("a second answer", sized(b"5") + SECOND),
    whole("a second answer after chunks", chunky(b"5\r\nhello\r\n0\r\n\r\n") + SECOND),
    whole("garbage behind", sized(b"5") + b"\0\1\2" + MARKER),
    whole("reset behind", sized(b"5"), ending="rst"),
    whole("418", b"HTTP/1.1 418 x\r\nContent-Length: 5\r\n\r\nhello", status=418),
    cut("length cut by FIN", sized(b"9"), b"hello"),
    cut("length cut by RST", sized(b"9"), b"hello", "rst"),
    cut("chunked cut by FIN", chunky(b"5\r\nhello\r\n"), b"hello"),
    cut("chunked cut inside a chunk", chunky(b"9\r\nhello"), b"hello"),
    cut("chunked cut by RST", chunky(b"5\r\nhello\r\n"), b"hello", "rst"),
    cut("until close, but RST", OK + b"\r\nhello", b"hello", "rst"),
    cut("bad chunk behind good ones", chunky(b"5\r\nhello\r\nzz\r\n"), b"hello", "open"),
    bad("1xx with a length", b"HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\nhello" + sized(b"5")),
    bad("too many 1xx", b"HTTP/1.1 100 Continue\r\n\r\n" * 40),
    bad("101 unasked", b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nraw"),
    bad("101 without headers", b"HTTP/1.1 101 Switching Protocols\r\n\r\n"),
    bad("length and chunked", OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
    bad("two equal lengths", OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello"),
    bad("two lengths", OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"),
    bad("te gzip", OK + b"Transfer-Encoding: gzip\r\n\r\nhello", "fin"),
    bad("te chunked, gzip", OK + b"Transfer-Encoding: chunked, gzip\r\n\r\nhello", "fin"),
    bad("te gzip, chunked", OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
    bad("obs-fold", OK + b"X: y\r\n z\r\nContent-Length: 5\r\n\r\nhello"),
    bad("LF only", sized(b"5").replace(b"\r\n", b"\n")),
    bad("NUL in value", OK + b"X: a\0b\r\nContent-Length: 5\r\n\r\nhello"),
    bad("CR in value", OK + b"X: a\rSet-Cookie: b\r\nContent-Length: 5\r\n\r\nhello"),
    bad("status 000", b"HTTP/1.1 000 x\r\nContent-Length: 5\r\n\r\nhello"),
    bad("status 99", b"HTTP/1.1 99 x\r\nContent-Length: 5\r\n\r\nhello"),
    bad("status 600", b"HTTP/1.1 600 x\r\nContent-Length: 5\r\n\r\nhello"),
    bad("status 1000", b"HTTP/1.1 1000 x\r\nContent-Length: 5\r\n\r\nhello"),
    bad("status abc", b"HTTP/1.1 abc x\r\nContent-Length: 5\r\n\r\nhello"),
    bad("no HTTP", b"hello there\r\n\r\n"),
    bad("head cut", OK + b"Content-Le", "fin"),
    bad("head cut by RST", OK + b"Content-Le", "rst"),
    bad("endless head", OK + b"X: " + b"y" * (80 << 10)),
    bad("300 headers", OK + b"X: y\r\n" * 300 + b"Content-Length: 5\r\n\r\nhello"),
)
