"""Requests as bytes, each with what must come of it; shared by the corpus tests and the fuzzer."""

from __future__ import annotations

from dataclasses import dataclass

HOST = b"Host: localhost\r\n"
KEY = b"x-api-key: k1\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + KEY
GET = b"GET /upstream/m/x HTTP/1.1\r\n" + HOST + KEY
NEXT = GET + b"\r\n"
JSON = b'{"model":"m"}'
SIZE = b"%d" % len(JSON)
CHUNKS = b"d\r\n" + JSON + b"\r\n"
TE = b"Transfer-Encoding: chunked\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    data: bytes
    statuses: tuple[int, ...]  # of final answers, in order
    engine: int  # requests the engine may see
    closes: bool
    interim: tuple[int, ...] = ()


def refused(name: str, data: bytes, status: int = 400) -> Case:
    """Refused, closed, and neither it nor what follows reaches the engine."""
    return Case(name, data + NEXT, (status,), 0, True)


def served(name: str, data: bytes, statuses: tuple[int, ...] = (200, 200), engine: int = 2, interim: tuple[int, ...] = ()) -> Case:
    """Served, and the request behind it is intact."""
    return Case(name, data + NEXT, statuses, engine, False, interim)


def framed(*lines: bytes, body: bytes = JSON) -> bytes:
    return POST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def length(value: bytes) -> bytes:
    return framed(b"Content-Length: " + value)


def coded(*values: bytes) -> bytes:
    return framed(*(b"Transfer-Encoding: " + value for value in values), body=CHUNKS + b"0\r\n\r\n")


def chunks(body: bytes) -> bytes:
    return POST + TE + b"\r\n" + body


CASES: tuple[Case, ...] = (
    # both framings, and lengths
    refused("cl and te", framed(b"Content-Length: " + SIZE, TE[:-2], body=CHUNKS + b"0\r\n\r\n")),
    refused("te and cl", framed(TE[:-2], b"Content-Length: " + SIZE, body=CHUNKS + b"0\r\n\r\n")),
    refused("cl twice same", framed(b"Content-Length: " + SIZE, b"Content-Length: " + SIZE)),
    refused("cl twice different", framed(b"Content-Length: " + SIZE, b"Content-Length: 4")),
    refused("cl list", length(b"13, 13")),
    refused("cl plus", length(b"+13")),
    refused("cl minus", length(b"-13")),
    refused("cl hex", length(b"0xd")),
    refused("cl underscore", length(b"1_3")),
    refused("cl blank inside", length(b"1 3")),
    refused("cl empty", length(b"")),
    refused("cl not ascii", length(b"\xd9\xa1")),
    refused("cl 2^64", length(b"18446744073709551616")),
    refused("cl 2^64-1", length(b"18446744073709551615"), 413),
    served("cl leading zero", length(b"0013")),
    served("cl trailing blank", length(b"13 ")),
    # transfer codings
    refused("te identity", coded(b"identity")),
    refused("te gzip, chunked", coded(b"gzip, chunked")),
    refused("te identity, chunked", coded(b"identity, chunked")),
    refused("te chunked, identity", coded(b"chunked, identity")),
    refused("te two headers", coded(b"gzip", b"chunked")),
    refused("te chunked twice", coded(b"chunked", b"chunked")),
    refused("te chunked, chunked", coded(b"chunked, chunked")),
    refused("te xchunked", coded(b"xchunked")),
    refused("te quoted", coded(b'"chunked"')),
    refused("te parameter", coded(b"chunked;q=1")),
    refused("te empty", coded(b"")),
    refused("te vertical tab", coded(b"\x0bchunked")),
    refused("te on 1.0", coded(b"chunked").replace(b"HTTP/1.1", b"HTTP/1.0")),
    refused("te blank before colon", framed(b"Transfer-Encoding : chunked", body=CHUNKS + b"0\r\n\r\n")),
    refused("te obs-fold", framed(b"Transfer-Encoding:\r\n chunked", body=CHUNKS + b"0\r\n\r\n")),
    refused("te behind bare LF", framed(b"X: y\nTransfer-Encoding: chunked", body=CHUNKS + b"0\r\n\r\n")),
    refused("te behind bare CR", framed(b"X: y\rTransfer-Encoding: chunked", body=CHUNKS + b"0\r\n\r\n")),
    served("te with tab", coded(b"\tchunked")),
    served("te upper case", coded(b"CHUNKED")),
    served("te with underscore and a length", framed(b"Transfer_Encoding: chunked", b"Content-Length: " + SIZE)),
    # heads
    refused("NUL in value", framed(b"X: a\0b", b"Content-Length: " + SIZE)),
    refused("DEL in value", framed(b"X: a\x7fb", b"Content-Length: " + SIZE)),
    refused("obs-fold", framed(b"X: a\r\n b", b"Content-Length: " + SIZE)),
    refused("line without colon", framed(b"nonsense", b"Content-Length: " + SIZE)),
    refused("blank in name", framed(b"X y: z", b"Content-Length: " + SIZE)),
    refused("blank before first header", b"GET /upstream/m/x HTTP/1.1\r\n Host: localhost\r\n\r\n"),
    refused("LF line ends", (GET + b"\r\n").replace(b"\r\n", b"\n")),
    refused("CR CR LF", GET + b"X: y\r\r\n\r\n"),
    # chunks
    refused("chunk size plus", chunks(b"+d\r\n" + JSON + b"\r\n0\r\n\r\n")),
    refused("chunk size 0x", chunks(b"0xd\r\n" + JSON + b"\r\n0\r\n\r\n")),
    refused("chunk size blank", chunks(b"d \r\n" + JSON + b"\r\n0\r\n\r\n")),
    refused("chunk size empty", chunks(b"\r\n" + JSON + b"\r\n0\r\n\r\n")),
    refused("chunk size 17 F", chunks(b"F" * 17 + b"\r\n" + JSON + b"\r\n0\r\n\r\n")),
    refused("chunk size LF", chunks(b"d\n" + JSON + b"\r\n0\r\n\r\n")),
    refused("chunk too long", chunks(b"c\r\n" + JSON + b"\r\n0\r\n\r\n")),
    refused("chunk extension with LF", chunks(b"d;a=b\n" + JSON + b"\r\n0\r\n\r\n")),
    refused("chunk extension quoted LF", chunks(b'd;a="\n"\r\n' + JSON + b"\r\n0\r\n\r\n")),
    refused("trailer Content-Length", chunks(CHUNKS + b"0\r\nContent-Length: 5\r\n\r\n")),
    refused("trailer Transfer-Encoding", chunks(CHUNKS + b"0\r\nTransfer-Encoding: chunked\r\n\r\n")),
    served("chunk extension", chunks(b"d;a=b\r\n" + JSON + b"\r\n0\r\n\r\n")),
    served("trailers", chunks(CHUNKS + b"0\r\nX-Smuggled: yes\r\nAuthorization: Bearer k1\r\n\r\n")),
    refused("extension flood", chunks(b"d;" + b"a" * (400 << 10) + b"\r\n" + JSON + b"\r\n0\r\n\r\n")),
    refused("trailer flood", chunks(CHUNKS + b"0\r\n" + b"X: y\r\n" * 80_000 + b"\r\n")),
    # versions and other protocols
    refused("0.9 without version", b"GET /\r\n\r\n", 505),
    refused("0.9", b"GET / HTTP/0.9\r\n\r\n", 505),
    refused("2.0", (GET + b"\r\n").replace(b"HTTP/1.1", b"HTTP/2.0"), 505),
    refused("1.2", (GET + b"\r\n").replace(b"HTTP/1.1", b"HTTP/1.2")),
    refused("lower-case http", (GET + b"\r\n").replace(b"HTTP/1.1", b"http/1.1")),
    refused("h2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    refused("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    # hosts
    refused("no host", b"GET /upstream/m/x HTTP/1.1\r\n" + KEY + b"\r\n"),
    refused("two hosts", GET + HOST + b"\r\n"),
    # targets and methods
    refused("absolute", (GET + b"\r\n").replace(b"/upstream", b"http://localhost/upstream")),
    refused("asterisk", b"OPTIONS * HTTP/1.1\r\n" + HOST + KEY + b"\r\n"),
    refused("fragment", (GET + b"\r\n").replace(b"/x ", b"/x#y ")),
    refused("raw UTF-8", (GET + b"\r\n").replace(b"/x ", "/é ".encode())),
    refused("blank in target", (GET + b"\r\n").replace(b"/x ", b"/x y ")),
    refused("tab as separator", (GET + b"\r\n").replace(b"GET ", b"GET\t")),
    refused("CONNECT", b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + KEY + b"\r\n", 501),
    refused("TRACE", (GET + b"\r\n").replace(b"GET", b"TRACE"), 501),
    refused("lower-case method", (GET + b"\r\n").replace(b"GET", b"get")),
    refused("unknown method", (GET + b"\r\n").replace(b"GET", b"BREW")),
    # limits
    refused("expect other", framed(b"Expect: 200-ok", b"Content-Length: " + SIZE), 417),
    refused("201 headers", GET + b"".join(b"X%d: y\r\n" % n for n in range(201)) + b"\r\n", 431),
    refused("70 KiB header", GET + b"X: " + b"y" * (70 << 10) + b"\r\n\r\n", 431),
    Case("70 KiB header unfinished", GET + b"X: " + b"y" * (70 << 10), (431,), 0, True),
    refused("17 KiB target", (GET + b"\r\n").replace(b"/x ", b"/" + b"x" * (17 << 10) + b" "), 414),
    # keys
    refused("no key", b"GET /upstream/m/x HTTP/1.1\r\n" + HOST + b"\r\n", 401),
    refused("no key, with body", length(SIZE).replace(KEY, b""), 401),
    refused("wrong key", (GET + b"\r\n").replace(b"k1", b"k2"), 401),
    refused("compressed", framed(b"Content-Encoding: gzip", b"Content-Length: " + SIZE), 415),
    # harmless
    served("encoded slash and odd query", (GET + b"\r\n").replace(b"/x ", b"/a%2Fb/%zz?m=a%2Fb&m=2&empty= ")),
    served("two blanks", (GET + b"\r\n").replace(b"GET ", b"GET  ")),
    served("leading CRLF", b"\r\n\r\n" + NEXT),
    Case("1.0 without host", b"GET /upstream/m/x HTTP/1.0\r\n" + KEY + b"\r\n", (200,), 1, True),
    Case("close, then data", GET + b"Connection: close\r\n\r\n" + NEXT, (200,), 1, True),
    Case("1.0, then data", b"GET /upstream/m/x HTTP/1.0\r\n" + HOST + KEY + b"\r\n" + NEXT, (200,), 1, True),
    served("connection names framing and key", framed(b"Connection: content-length, authorization", b"Content-Length: " + SIZE)),
    Case("post without framing", POST + b"\r\n" + NEXT, (400, 200), 1, False),
    Case("post without framing, upstream", (GET + b"\r\n").replace(b"GET", b"POST") + NEXT, (200, 200), 2, False),
    Case("pipelined three", NEXT * 3, (200,) * 3, 3, False),
    Case("pipelined good and bad", NEXT + b"GET / HTTP/1.1\r\nHost : x\r\n\r\n" + NEXT, (200, 400), 1, True),
    Case("not json", POST + b"Content-Length: 3\r\n\r\n{}}" + NEXT, (400, 200), 1, False),
    Case("unknown model", length(b"13").replace(b'"m"', b'"q"') + NEXT, (404, 200), 1, False),
    Case("expect continue", framed(b"Expect: 100-continue", b"Content-Length: " + SIZE), (200,), 1, False, (100,)),
    # upgrades
    Case("upgrade behind another", NEXT + GET + UPGRADE + b"\r\n", (200, 400), 1, True),
    served("h2c with length", framed(H2C[:-2], b"Content-Length: " + SIZE)),
    served("h2c chunked", framed(H2C[:-2], TE[:-2], body=CHUNKS + b"0\r\n\r\n")),
    served("h2c on GET", GET + H2C + b"\r\n"),
    served("websocket with a body", GET + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(NEXT) + NEXT),
    served("websocket with a chunked body", GET + UPGRADE + TE + b"\r\n" + CHUNKS + b"0\r\n\r\n"),
    served("upgrade without connection", GET + b"Upgrade: websocket\r\n\r\n"),
    Case("h2c and close", framed(H2C[:-2], b"Connection: close", b"Content-Length: " + SIZE) + NEXT, (200,), 1, True),
)
