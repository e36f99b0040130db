"""Heads are never forwarded as they came: this module takes them apart and builds new ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from itertools import product
from typing import Final
from urllib.parse import quote_from_bytes

from .errors import reason

Headers = list[tuple[bytes, bytes]]  # (lower-case name, value without blanks around it), in order

METHODS: Final = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))
BODY_METHODS: Final = frozenset((b"POST", b"PUT", b"PATCH"))  # always sent upstream with an explicit length

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"

NAMES_CACHED_MAX: Final = 512  # clients choose names, so the cache of spellings is bounded


class Mark(IntEnum):
    """Headers that mean something to the relay; PLAIN ones only pass."""

    PLAIN = 0
    CONTENT_LENGTH = 1
    TRANSFER_ENCODING = 2
    HOST = 3
    CONNECTION = 4
    UPGRADE = 5
    EXPECT = 6
    CONTENT_TYPE = 7
    CONTENT_ENCODING = 8
    DEADLINE = 9
    CACHE_CONTROL = 10
    ACCEL = 11
    CORS = 12
    KEEP_ALIVE = 13
    HOP = 14
    ORIGIN = 15
    CREDENTIAL = 16
    OVERRIDE = 17
    TOKENS = 18


_MARKS: Final = {
    b"content-length": Mark.CONTENT_LENGTH,
    b"transfer-encoding": Mark.TRANSFER_ENCODING,
    b"host": Mark.HOST,
    b"connection": Mark.CONNECTION,
    b"upgrade": Mark.UPGRADE,
    b"expect": Mark.EXPECT,
    b"content-type": Mark.CONTENT_TYPE,
    b"content-encoding": Mark.CONTENT_ENCODING,
    b"x-greenroom-deadline-ms": Mark.DEADLINE,
    b"cache-control": Mark.CACHE_CONTROL,
    b"x-accel-buffering": Mark.ACCEL,
    b"origin": Mark.ORIGIN,
    b"sec-fetch-site": Mark.ORIGIN,  # tells of a page, too
    b"authorization": Mark.CREDENTIAL,
    b"x-api-key": Mark.CREDENTIAL,
    b"keep-alive": Mark.KEEP_ALIVE,
    b"x-compute-tokens": Mark.TOKENS,  # of text-embeddings-inference
    b"proxy-connection": Mark.HOP,
    b"te": Mark.HOP,
    b"trailer": Mark.HOP,
    b"http2-settings": Mark.HOP,
    b"proxy-authenticate": Mark.HOP,
    b"proxy-authorization": Mark.HOP,
    b"content_length": Mark.HOP,  # some servers fold `_` into `-`
    b"transfer_encoding": Mark.HOP,
    b"x-greenroom-model": Mark.HOP,
    b"x-greenroom-start": Mark.HOP,
    b"x-greenroom-wait-ms": Mark.HOP,
    b"x-greenroom-peer": Mark.HOP,
    b"x-greenroom-hops": Mark.HOP,  # counted anew for each peer
    b"x-greenroom-key-name": Mark.HOP,  # ours to tell the control plane
    b"x-greenroom-scopes": Mark.HOP,
}

# Headers by which some frameworks take a request for one of another method or path than its first line says:
# engines are protected by what that line says.
_OVERRIDES: Final = (
    *("x-http-method-override", "x-http-method", "x-method-override", "x-original-method", "x-forwarded-method", "x-method"),
    *("x-original-url", "x-original-uri", "x-original-path", "x-rewrite-url", "x-rewrite-uri", "x-rewrite-path", "x-override-url"),
    *("x-forwarded-uri", "x-forwarded-url", "x-forwarded-path", "x-request-uri", "x-envoy-original-path", "x-path-info"),
    *("path-info", "request-uri", "request-method", "x-waws-unencoded-url", "x-http-path-override"),
)
for _name in _OVERRIDES:
    for _joints in product("-_", repeat=_name.count("-")):  # some servers fold `_` into `-`
        _first, *_rest = _name.split("-")
        _MARKS["".join((_first, *(joint + part for joint, part in zip(_joints, _rest, strict=True)))).encode()] = Mark.OVERRIDE

# Never sent to an engine: they belong to one connection, are written anew, or would say that the request is another.
DROPPED: Final = frozenset(name for name, mark in _MARKS.items() if mark in (1, 2, 3, 4, 5, 6, 9, 13, 14, 17))

# What a proxy before greenroom says of its clients: addresses, names, tokens.  For engines of this machine, not for others.
FROM_A_FRONT: Final = frozenset(
    b"x-forwarded-" + name
    for name in (b"for", b"host", b"port", b"proto", b"user", b"email", b"groups", b"preferred-username", b"access-token")
) | frozenset(
    [
        *(b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-connecting-ip", b"remote-user", b"x-remote-user"),
        *(b"x-auth-request-user", b"x-auth-request-email", b"x-auth-request-groups", b"x-auth-request-access-token"),
        *(b"cf-access-jwt-assertion", b"cf-access-client-id", b"cf-access-client-secret", b"x-goog-iap-jwt-assertion"),
        *(b"x-amzn-oidc-data", b"x-amzn-oidc-accesstoken", b"x-amzn-oidc-identity", b"x-ms-token-aad-access-token"),
    ]
)

SEEN: dict[bytes, tuple[bytes, int]] = {}
"""What `known_name` found, for loops that cannot afford the call."""


def known_name(name: bytes) -> tuple[bytes, int]:
    """(lower-case name, Mark) of a header name as spelled on the wire."""
    known = SEEN.get(name)
    if known is None:
        lower = name.lower()
        mark = _MARKS.get(lower, Mark.CORS if lower.startswith(b"access-control-") else Mark.PLAIN)
        known = (lower, int(mark))
        if len(SEEN) < NAMES_CACHED_MAX and len(name) <= 64:
            SEEN[name] = known
    return known


def tokens(value: bytes) -> list[bytes]:
    """The lower-case members of a comma-separated header value."""
    return [token.strip(b" \t").lower() for token in value.split(b",")]


def connection_options(value: bytes) -> list[bytes]:
    """Header names a `Connection` value limits to this hop."""
    return [token for token in tokens(value) if token and token not in (b"close", b"keep-alive", b"upgrade")]


def request_head(
    method: bytes,
    path: bytes,
    host: bytes,
    headers: Headers,
    dropped: Collection[bytes],
    length: int | None,
    extra: Sequence[tuple[bytes, bytes]] = (),
    upgrade: bool = False,
) -> bytes:
    """A request head with exactly one framing: `length`, or none at all."""
    parts = [method, b" ", path, b" HTTP/1.1\r\nHost: ", host, b"\r\n"]
    for name, value in headers:
        if name not in dropped:
            parts += (name, b": ", value, b"\r\n")
    for name, value in extra:
        parts += (name, b": ", value, b"\r\n")
    if upgrade:
        parts.append(b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
    if length is not None:
        parts.append(b"Content-Length: %d\r\n" % length)
    parts.append(b"\r\n")
    return b"".join(parts)


def response_head(status: int, lines: Iterable[bytes], extra: bytes, framing: bytes) -> bytes:
    """`lines`, `extra` and `framing` are complete header lines."""
    return b"".join((b"HTTP/1.1 %d %b\r\n" % (status, reason(status)), *lines, extra, framing, b"\r\n"))


# By which gateways of models choose one, or the server that has it, in place of the `model` that was looked at here.
NAMES_A_MODEL: Final = frozenset(
    (b"x-gateway-model-name", b"x-gateway-base-model-name", b"x-gateway-destination-endpoint", b"x-ai-eg-model", b"x-prefiller-host-port")
)

# What another server says of its own host, which to a client would be ours.
_OF_ITS_HOST: Final = frozenset(
    (b"set-cookie", b"strict-transport-security", b"alt-svc", b"clear-site-data", b"refresh", b"location", b"www-authenticate", b"nel")
)


def far_lines(lines: list[bytes]) -> list[bytes]:
    """Header lines of a peer's answer that are meant for clients of ours."""
    return [line for line in lines if line.partition(b":")[0].lower() not in _OF_ITS_HOST]


def without_protocol_keys(headers: Headers) -> Headers:
    """A client's key can also be a WebSocket sub-protocol: pages of OpenAI's realtime API have no other way to send one."""
    out: Headers = []
    for name, value in headers:
        if name == b"sec-websocket-protocol":
            value = b", ".join(word for word in map(bytes.strip, value.split(b",")) if b"api-key" not in word.lower())
            if not value:
                continue
        out.append((name, value))
    return out


def safe_value(text: str) -> bytes:
    """`text` as a header value: as it is when it is printable ASCII, else percent-encoded as UTF-8."""
    if text.isascii() and text.isprintable():
        return text.encode("ascii")
    return quote_from_bytes(text.encode("utf-8", "surrogatepass"), safe="/:+@ ").encode("ascii")


def keep_alive_s(value: bytes) -> float | None:
    """The time-out in a `Keep-Alive: timeout=5, max=100` value."""
    for token in tokens(value):
        if token.startswith(b"timeout=") and token[8:].isdigit():
            return float(token[8:13])
    return None


def is_event_stream(content_type: bytes) -> bool:
    return content_type[:17].lower() == b"text/event-stream"


OTHER, JSON, EVENTS = range(3)  # what a body is

KINDS: dict[bytes, int] = {}
"""What `body_kind` found, for those who cannot afford the call."""


def body_kind(content_type: bytes) -> int:
    kind = EVENTS if is_event_stream(content_type) else JSON if content_type[:16].lower() == b"application/json" else OTHER
    if len(KINDS) < NAMES_CACHED_MAX and len(content_type) <= 64:
        KINDS[content_type] = kind
    return kind
