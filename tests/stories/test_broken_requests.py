"""Broken requests: each is answered 4xx with a JSON error, and no engine is started for any of them."""

import asyncio
import json
from pathlib import Path
from typing import Any

from .rig import Reply, Rig, fake

CHAT = "/v1/chat/completions"


def post(path: str, body: bytes | str | dict[str, Any], *lines: str) -> bytes:
    """A POST with a right Content-Length unless `lines` bring their own framing."""
    raw = json.dumps(body).encode() if isinstance(body, dict) else body.encode() if isinstance(body, str) else body
    named = {line.partition(":")[0].lower() for line in lines}
    framing = [] if named & {"content-length", "transfer-encoding"} else [f"Content-Length: {len(raw)}"]
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *framing, *lines]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + raw


def get(target: str, *lines: str, method: str = "GET", host: str = "127.0.0.1") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {host}", *lines]).encode("latin-1") + b"\r\n\r\n"


OK = {"model": "a", "messages": []}
FORM = "Content-Type: multipart/form-data; boundary=x"

# What is broken -> the bytes of the request, and the status.
BROKEN: dict[str, tuple[bytes, int]] = {
    "empty body": (post(CHAT, b""), 400),
    "blank body": (post(CHAT, b"  \n "), 400),
    "not JSON": (post(CHAT, "model=a"), 400),
    "cut JSON": (post(CHAT, '{"model": "a", "messages": ['), 400),
    "JSON list": (post(CHAT, '[{"model": "a"}]'), 400),
    "JSON text": (post(CHAT, '"a"'), 400),
    "JSON null": (post(CHAT, "null"), 400),
    "bytes that are not UTF-8": (post(CHAT, b'{"model": "a", "x": "\xff"}'), 400),
    "UTF-16": (post(CHAT, json.dumps(OK).encode("utf-16")), 400),
    "nested too deeply": (post(CHAT, '{"model": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"), 400),
    "no model": (post(CHAT, {"messages": []}), 400),
    "model is a number": (post(CHAT, {"model": 5}), 400),
    "model is null": (post(CHAT, {"model": None}), 400),
    "model is empty": (post(CHAT, {"model": ""}), 400),
    "unknown model": (post(CHAT, {"model": "aa"}), 404),
    "model name of 2,000 letters": (post(CHAT, {"model": "a" * 2000}), 400),
    "form without a model": (post("/v1/audio/transcriptions", b"--x\r\n\r\nhi\r\n--x--\r\n", FORM), 400),
    "form that is cut": (post("/v1/audio/transcriptions", b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\na', FORM), 400),
    "compressed body": (post(CHAT, OK, "Content-Encoding: br"), 415),
    "unknown route": (get("/v1/nothing"), 404),
    "unknown route with a body": (post("/v1/chat", OK), 404),
    "wrong method": (get(CHAT), 405),
    "wrong method of our own": (get("/health", method="DELETE"), 405),
    "unknown model in the path": (get("/upstream/nobody/x"), 404),
    "engine control": (post("/upstream/a/sleep", b""), 403),
    "engine control, encoded": (post("/upstream/a/%73leep", b""), 403),
    "unknown model of the API": (post("/api/models/nobody/load", b""), 404),
    "unknown verb of the API": (post("/api/models/a/explode", b""), 404),
    "wrong number for the API": (post("/api/models/a/unload?wait=soon", b""), 400),
    "both framings": (post(CHAT, b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"), 400),
    "two different lengths": (post(CHAT, OK, "Content-Length: 5", "Content-Length: 6"), 400),
    "length that is no number": (post(CHAT, OK, "Content-Length: five"), 400),
    "negative length": (post(CHAT, OK, "Content-Length: -5"), 400),
    "bad chunk size": (post(CHAT, b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
    "unknown transfer coding": (post(CHAT, OK, "Transfer-Encoding: gzip"), 400),
    "unknown expectation": (post(CHAT, OK, "Expect: a-miracle"), 417),
    "blank in a header's name": (get("/v1/models", "Bad Header: x"), 400),
    "folded header": (get("/v1/models", "X-One: a", " b"), 400),
    "no HTTP": (b"HELLO THERE\r\n\r\n", 400),
    "head of 100 KiB": (get("/v1/models", "X-Long: " + "x" * 100_000), 431),
    "too many headers": (get("/v1/models", *(f"X-{index}: 1" for index in range(500))), 431),
    "target of 40 KiB": (get("/v1/models?" + "x" * 40_000), 414),
    "no Host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "foreign Host": (get("/api/status", host="evil.example"), 403),
    "model of a rerank without documents": (post("/v1/rerank", {"model": "a", "query": "q", "documents": []}), 400),
}


async def send(rig: Rig, raw: bytes) -> Reply:
    """Send bytes as they are and read the answer."""
    exchange = await rig.send("GET", "/health")  # opens a connection like any other
    await exchange.rest()
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    exchange.reader, exchange.writer, exchange.reply = reader, writer, Reply(0, {})
    writer.write(raw)
    if raw.endswith(b'name="model"\r\n\r\na'):
        writer.write_eof()
    return await exchange.rest()


async def test_each_broken_request_is_refused_and_none_starts_an_engine(tmp_path: Path) -> None:
    """45 of them: 4xx, an OpenAI-shaped error with a sentence and a code; the server serves on as if nothing had been."""
    assert len(BROKEN) >= 30
    async with Rig(tmp_path, {"a": fake()}) as rig:
        faults = {}
        for name, (raw, expected) in BROKEN.items():
            reply = await send(rig, raw)
            error = reply.error
            whole = error.get("message") and error.get("type") and "code" in error and "param" in error
            if reply.status != expected or not whole or not reply.headers.get("content-type", "").startswith("application/json"):
                faults[name] = (reply.status, expected, reply.body[:200])
        assert faults == {}
        assert rig.starts() == 0
        assert (await send(rig, post(CHAT, OK))).status == 200
        assert rig.starts() == 1
