"""Against web pages that drive a local service: names of this host, origins, and CORS.

Header lists hold (lower-case name, value) pairs.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from greenroom.proxy import errors
from greenroom.proxy.admission import Refusal
from greenroom.proxy.targets import SAFE_METHODS, Kind

HOSTS_REMEMBERED_MAX = 256
HOST_BYTES_REMEMBERED_MAX = 255  # of one: clients write them
ASKED_HEADERS_MAX = 64
PREFLIGHT_AGE_S = 600

CORS_NAMES: frozenset[bytes] = frozenset(
    {
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"access-control-allow-headers",
        b"access-control-allow-methods",
        b"access-control-allow-private-network",
        b"access-control-expose-headers",
        b"access-control-max-age",
    }
)
"""Headers of an engine's answer that are ours to give: the relay drops them."""

Headers = Sequence[tuple[bytes, bytes]]

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}\Z")
_EXPOSED = b"Access-Control-Expose-Headers: X-Greenroom-Model, X-Greenroom-Start, X-Greenroom-Wait-Ms, Retry-After\r\n"
_STARTING = frozenset({Kind.INFERENCE, Kind.UPSTREAM})  # even a GET may start a model
_ANY_ADDRESS = frozenset({"0.0.0.0", "::", "*", ""})
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"


def is_preflight(method: bytes, headers: Headers) -> bool:
    """A browser's question before a request across origins (an OPTIONS of /upstream may be one, too)."""
    return method == b"OPTIONS" and _first(headers, b"access-control-request-method") is not None


class Guards:
    """The rules of one configuration: what Host may say, which origins may ask, which may read."""

    __slots__ = ("_any_address", "_any_origin", "_check_host", "_host_known", "_names", "_origins", "_suffixes")

    def __init__(self, listen_host: str, allowed_hosts: Sequence[str], cors_origins: Sequence[str], *, check_host: bool = True) -> None:
        """`allowed_hosts` are names without port, `.example.org` or `*.example.org` for all below; `*` for any.

        `check_host` False: every name is ours.  Meant for servers that ask for a key: a page that re-points its own
        name to this address has none, while clients of a network may call us by names nobody listed.
        """
        bare = listen_host.strip("[]").lower()
        extra = [host.strip().strip("[]").rstrip(".").lower() for host in allowed_hosts]
        self._any_address = bare in _ANY_ADDRESS
        self._names = frozenset({"localhost", bare, *extra})
        self._suffixes = (".localhost", *(name.lstrip("*") for name in extra if name.startswith((".", "*."))))
        self._origins = frozenset(origin.rstrip("/").lower() for origin in cors_origins if origin != "*")
        self._any_origin = "*" in cors_origins
        self._check_host = check_host
        self._host_known: dict[bytes, bool] = {}

    # ------------------------------------------------------------------------------------------------------- checking

    def check(self, method: bytes, kind: Kind, headers: Headers, *, changes: bool = False) -> Refusal | None:
        """None when the request may go on.  `changes`: the route changes state although its method is safe."""
        host = origin = upgrade = site = mode = agent = None
        for name, value in headers:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
            elif name == b"upgrade":
                upgrade = value
            elif name == b"sec-fetch-site":
                site = value
            elif name == b"sec-fetch-mode":
                mode = value
            elif name == b"user-agent":
                agent = value
        if self._check_host and host is not None and not self._is_host_known(host):
            return _unknown_host(host)
        if origin is not None:
            if self._is_origin_refused(method, kind, origin, host, is_upgrade=upgrade is not None):
                return _foreign_origin(origin)
        elif site is None:
            if changes and method in SAFE_METHODS and agent is not None and agent.startswith(b"Mozilla/"):
                return _untold_origin()
        elif site in {b"cross-site", b"same-site"} and self._is_foreign_look_refused(kind, mode, changes=changes):
            return _foreign_origin(b"another site")
        return None

    def _is_foreign_look_refused(self, kind: Kind, mode: bytes | None, *, changes: bool) -> bool:
        """An <img> or a link of another site sends no Origin, and could unload or start a model."""
        if kind is Kind.CONTROL:
            return changes or mode != b"navigate"
        return kind in _STARTING and not self._any_origin and mode != b"navigate"

    def _is_host_known(self, host: bytes) -> bool:
        known = self._host_known.get(host)
        if known is None:
            known = self._judge_host(host.decode("latin-1").strip().lower())
            if len(self._host_known) >= HOSTS_REMEMBERED_MAX:
                self._host_known.clear()
            if len(host) <= HOST_BYTES_REMEMBERED_MAX:
                self._host_known[host] = known
        return known

    def _judge_host(self, host: str) -> bool:
        name = _without_port(host).rstrip(".")
        if not name:
            return False
        if name in self._names or "*" in self._names or name.endswith(self._suffixes):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # A page can point its own name here, but never an address: bound to all of them, any address is one of ours.
        return address.is_loopback or self._any_address

    def _is_origin_refused(self, method: bytes, kind: Kind, origin: bytes, host: bytes | None, *, is_upgrade: bool) -> bool:
        if self._is_same_origin(origin, host) or _lower(origin) in self._origins:
            return False
        if kind is Kind.CONTROL or is_upgrade:
            return True
        return not self._any_origin and (method not in SAFE_METHODS or (kind in _STARTING and method != b"OPTIONS"))

    def _is_same_origin(self, origin: bytes, host: bytes | None) -> bool:
        scheme, found, netloc = _lower(origin).partition("://")
        if not found or host is None:
            return False
        default = {"http": ":80", "https": ":443"}.get(scheme)
        ours = _lower(host)
        return default is not None and netloc.removesuffix(default) == ours.removesuffix(default)

    # ----------------------------------------------------------------------------------------------------------- CORS

    def cors(self, headers: Headers, *, control: bool = False) -> tuple[bytes, ...]:
        """Header lines (with CRLF) for an answer, errors included; none when no page asks.

        `control`: for the control plane, where `*` means nobody.
        """
        origin = _first(headers, b"origin")
        if origin is None:
            return ()
        allowed = self._allow_origin(origin, control=control)
        return (*allowed, _EXPOSED) if len(allowed) and allowed[0] is not _VARY else allowed

    def _allow_origin(self, origin: bytes, *, control: bool) -> tuple[bytes, ...]:
        if self._any_origin and not control:
            return _ALLOW_ANY
        if _lower(origin) in self._origins:
            return (b"Access-Control-Allow-Origin: " + origin.strip() + b"\r\n", _VARY)
        return (_VARY,) if self._origins else ()

    def preflight(self, headers: Headers, *, control: bool = False) -> bytes:
        """The whole answer to a preflight: 204, no key needed, nothing started."""
        lines = [b"HTTP/1.1 204 No Content\r\n"]
        origin = _first(headers, b"origin")
        allowed = self._allow_origin(origin, control=control) if origin is not None else ()
        lines += allowed
        if allowed and allowed[0] is not _VARY:
            asked = _first(headers, b"access-control-request-headers") or b""
            names = [name for part in asked.split(b",")[:ASKED_HEADERS_MAX] if _TOKEN.match(name := part.strip())]
            lines.append(b"Access-Control-Allow-Methods: " + _METHODS + b"\r\n")
            if names:
                lines.append(b"Access-Control-Allow-Headers: " + b", ".join(names) + b"\r\n")
            if (
                origin is not None
                and _lower(origin) in self._origins
                and _first(headers, b"access-control-request-private-network") == b"true"
            ):
                lines.append(b"Access-Control-Allow-Private-Network: true\r\n")
            lines.append(b"Access-Control-Max-Age: %d\r\n" % PREFLIGHT_AGE_S)
        else:
            lines.append(b"Allow: " + _METHODS + b"\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)


_VARY = b"Vary: Origin\r\n"
_ALLOW_ANY = (b"Access-Control-Allow-Origin: *\r\n",)


def _lower(value: bytes) -> str:
    return value.decode("latin-1").strip().lower()


def _first(headers: Headers, wanted: bytes) -> bytes | None:
    for name, value in headers:
        if name == wanted:
            return value
    return None


def _without_port(host: str) -> str:
    if host.startswith("["):
        inside, closed, port = host[1:].partition("]")
        return inside if closed and (not port or (port[0] == ":" and port[1:].isdecimal())) else ""
    name, colon, port = host.rpartition(":")
    if not colon:
        return host
    return name if port.isdecimal() and ":" not in name else ""


def _unknown_host(host: bytes) -> Refusal:
    name = errors.shown(host.decode("latin-1"))
    return Refusal(403, "unknown_host", f"This server is not called {name}; use its address, or add the name to `allowed_hosts`.")


def _foreign_origin(origin: bytes) -> Refusal:
    name = errors.shown(origin.decode("latin-1"))
    return Refusal(403, "foreign_origin", f"A page of {name} may not do this; add its origin to `cors_origins` if it should.")


def _untold_origin() -> Refusal:
    """Browsers leave `Sec-Fetch-Site` out where the address is neither https nor loopback: any page could be behind it."""
    return Refusal(403, "foreign_origin", "A browser that does not tell which page asks may change nothing with GET; send POST instead.")
