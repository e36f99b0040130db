"""Refusals as bytes: a complete HTTP/1.1 answer, or an error event for a stream that has begun.

Every body has OpenAI's shape `{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections.abc import Mapping, Sequence, Set

import msgspec

from greenroom.proxy.admission import Catalog, Refusal

SHOWN_CHARS_MAX = 120  # of anything a client wrote, when a message repeats it
RETRY_AFTER_S_MAX = 86_400
NEAR_NAMES_MAX = 3
NEAR_LOOKED_AT_MAX = 200  # names compared for "did you mean": a miss must stay cheap however many models there are

REASONS: Mapping[int, bytes] = {
    100: b"Continue",
    101: b"Switching Protocols",
    200: b"OK",
    201: b"Created",
    202: b"Accepted",
    203: b"Non-Authoritative Information",
    204: b"No Content",
    205: b"Reset Content",
    206: b"Partial Content",
    207: b"Multi-Status",
    300: b"Multiple Choices",
    301: b"Moved Permanently",
    302: b"Found",
    303: b"See Other",
    304: b"Not Modified",
    307: b"Temporary Redirect",
    308: b"Permanent Redirect",
    400: b"Bad Request",
    401: b"Unauthorized",
    402: b"Payment Required",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    406: b"Not Acceptable",
    408: b"Request Timeout",
    409: b"Conflict",
    410: b"Gone",
    411: b"Length Required",
    412: b"Precondition Failed",
    413: b"Content Too Large",
    414: b"URI Too Long",
    415: b"Unsupported Media Type",
    416: b"Range Not Satisfiable",
    417: b"Expectation Failed",
    421: b"Misdirected Request",
    422: b"Unprocessable Content",
    424: b"Failed Dependency",
    425: b"Too Early",
    426: b"Upgrade Required",
    428: b"Precondition Required",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    499: b"Client Closed Request",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
    507: b"Insufficient Storage",
    508: b"Loop Detected",
    529: b"Overloaded",
}

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    502: "engine_error",
    503: "unavailable_error",
    504: "timeout_error",
}

_PARAMS: Mapping[str, str] = {
    "model_not_found": "model",
    "no_model": "model",
    "bad_model": "model",
    "two_models": "model",
    "bad_documents": "documents",
    "bad_query": "query",
    "bad_top_n": "top_n",
}

_CHALLENGE = b'WWW-Authenticate: Bearer realm="greenroom"\r\n'
_CHALLENGE_BASIC = b'WWW-Authenticate: Basic realm="greenroom", charset="UTF-8"\r\n'


def reason(status: int) -> bytes:
    """The phrase of a status; ours, never the engine's (it may hold anything)."""
    return REASONS.get(status, b"Unknown")


def error_type(status: int) -> str:
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def error_body(refusal: Refusal) -> bytes:
    """The JSON document of a refusal."""
    error = {
        "message": refusal.message,
        "type": error_type(refusal.status),
        "param": _PARAMS.get(refusal.code),
        "code": refusal.code,
    }
    return msgspec.json.encode({"error": error})


def answer(
    refusal: Refusal, *, head_only: bool = False, keep_alive: bool = True, extra: tuple[bytes, ...] = (), asks_browser: bool = True
) -> bytes:
    """A complete HTTP/1.1 response.  `asks_browser`: at 401 a browser may ask its user for a password (Basic).

    `head_only` for HEAD: the length is told, the body left out.  `extra` are header lines, each complete
    with its CRLF.  401 carries its challenges, `retry_after_s` becomes whole seconds of at least 1.
    """
    body = error_body(refusal)
    lines = [
        b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (refusal.status, reason(refusal.status), len(body)),
        *extra,
    ]
    if refusal.status == 401:
        lines.append(_CHALLENGE + _CHALLENGE_BASIC if asks_browser else _CHALLENGE)
    if refusal.retry_after_s is not None:
        lines.append(b"Retry-After: %d\r\n" % retry_after(refusal.retry_after_s))
    lines.append(b"\r\n" if keep_alive else b"Connection: close\r\n\r\n")
    if not head_only:
        lines.append(body)
    return b"".join(lines)


def retry_after(seconds: float) -> int:
    """Whole seconds for `Retry-After`: rounded up, between 1 and a day."""
    if math.isnan(seconds):
        return 1
    return max(1, math.ceil(min(seconds, RETRY_AFTER_S_MAX)))


def event(refusal: Refusal) -> bytes:
    """An error as a server-sent event; the blank line before it ends an event that was cut short."""
    return b"\n\ndata: " + error_body(refusal) + b"\n\n"


# ---------------------------------------------------------------------------------------------------- common refusals


def shown(text: str) -> str:
    """What a client wrote, fit to be repeated in a message: short, printable."""
    cut = text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
    return "".join(char if char.isprintable() else "�" for char in cut)


def bad_request(code: str, message: str) -> Refusal:
    return Refusal(400, code, message)


def bad_deadline(told: bytes) -> Refusal:
    name = shown(told.decode("latin-1"))
    return bad_request(
        "bad_deadline", f"X-Greenroom-Deadline-Ms is {name}; send a whole number of milliseconds, at least 1, or leave it out."
    )


def near_names(name: str, catalog: Catalog, only: Set[str] | None = None) -> tuple[str, ...]:
    """Listed names (of the models `only`) that look like this one, best first, at most three."""
    if len(name) > 2 * SHOWN_CHARS_MAX:
        return ()
    listed = {known: model for known, model in catalog.names.items() if not catalog.models[model].unlisted}
    folded = {known.casefold(): known for known, model in listed.items() if only is None or model in only}
    wanted = name.casefold()
    alike = heapq.nsmallest(NEAR_LOOKED_AT_MAX, folded, key=lambda known: abs(len(known) - len(wanted)))
    close = difflib.get_close_matches(wanted, alike, n=NEAR_NAMES_MAX, cutoff=0.6)
    if len(wanted) >= 3:
        close += [known for known in folded if wanted in known and known not in close]
    return tuple(folded[known] for known in close[:NEAR_NAMES_MAX])


def unknown_model(name: str, near: Sequence[str] = ()) -> Refusal:
    hint = "did you mean " + " or ".join(shown(other) for other in near) + "?" if near else "GET /v1/models lists what is served."
    return Refusal(404, "model_not_found", f"No model is called {shown(name)}; {hint}")


def no_model(*, was_form: bool = False) -> Refusal:
    """`was_form`: its body was read as the form that Content-Type says it is, which is what curl says unasked."""
    read = ": its body was read as a form, as Content-Type says, and that has no field `model`" if was_form else ""
    do = "send JSON as application/json, or a form with `model`" if was_form else "put `model` into the body or `?model=` into the URL"
    return bad_request("no_model", f"The request names no model and no default is configured{read}; {do}.")


def bad_key() -> Refusal:
    return Refusal(
        401,
        "bad_key",
        "The API key is missing or wrong; send it as `Authorization: Bearer KEY` or as `x-api-key`.",
    )


def key_not_allowed(name: str) -> Refusal:
    return Refusal(403, "key_not_allowed", f"This API key may not use model {shown(name)}; ask for another key or another model.")


def scope_missing(scopes: Sequence[str]) -> Refusal:
    """`scopes`: one of these would do."""
    message = f"This API key lacks the scope {' or '.join(scopes)}, which this route needs; ask for another key."
    return Refusal(403, "scope_missing", message)


def key_busy(limit: int) -> Refusal:
    message = f"This API key already has {limit} requests in flight or waiting, as many as it may; try again when one has ended."
    return Refusal(429, "key_limit", message, retry_after_s=1.0)


def not_ready(model: str) -> Refusal:
    """For paths that must never start a model (page assets)."""
    return Refusal(409, "not_ready", f"Model {shown(model)} is not loaded and this path does not load it; load the model first.")


def body_too_large(limit_bytes: int, name: str) -> Refusal:
    """`name`: of the limit in `limits`; "" = nobody can raise it."""
    do = f"send less or raise limits.{name}" if name else "send less"
    return Refusal(413, "body_too_large", f"The body is larger than the limit of {limit_bytes:,} bytes; {do}.")


def unknown_route(path: str, near: Sequence[str] = ()) -> Refusal:
    hint = f"did you mean {' or '.join(near)}?" if near else "other paths of an engine are under /upstream/MODEL/."
    return Refusal(404, "unknown_route", f"There is nothing at {shown(path)}; {hint}")


def method_not_allowed(method: str, path: str, allowed: Sequence[str]) -> Refusal:
    return Refusal(405, "method_not_allowed", f"{shown(method)} is not possible at {shown(path)}; use {' or '.join(allowed)}.")


def far_path(path: str, model: str) -> Refusal:
    """For what /upstream/MODEL/ does not carry to another server."""
    message = f"{shown(path)} is not relayed: {shown(model)} is served by a peer, which gets inference requests only; ask it there."
    return Refusal(404, "peer_path", message)


def two_models(path: str, other: str) -> Refusal:
    """For what /upstream/MODEL/ carries to another server, which serves several."""
    message = f"The path names {shown(path)} and the request itself {shown(other)}; name the same, or none beside the path."
    return bad_request("two_models", message)


def moved(model: str) -> Refusal:
    """The configuration was read again between the head of a request and the end of its body."""
    message = f"{shown(model)} moved to a peer while this request came in; send it again."
    return Refusal(503, "moved", message, retry_after_s=1.0)


def engine_control(path: str) -> Refusal:
    message = f"{shown(path)} steers the engine itself, or is spelt so that it might, and is never relayed; use /api/models/MODEL/ instead."
    return Refusal(403, "engine_control", message)
